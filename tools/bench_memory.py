"""Peak resident memory of a task: each side does it once in a process of its own.

`python -m pyggml.tools.bench_memory SIDE TASK` is that process.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from pyggml.errors import UserError
from pyggml.tools.bench_measure import Side, random_work
from pyggml.tools.bench_tasks import Task

PYGGML = "pyggml"
IN_PROCESS = (PYGGML, "auto", "llama_cpp", "xllamacpp")


def peak(side: str, task: Task) -> int:
    """Bytes; `side` is "pyggml" or what --vs-llama-cpp may name."""
    command = [sys.executable, "-m", "pyggml.tools.bench_memory", side, json.dumps(asdict(task))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"--memory: {side}: {done.stderr.strip()}")
    return int(done.stdout.split()[-1])


def _peak_of_binary(path: str, task: Task) -> int:
    """For the small process: a child's ru_maxrss begins with what its parent has in memory."""
    from pyggml.tools.bench_references import LlamaBenchSide

    command = LlamaBenchSide(path).command(task)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{' '.join(command)}: failed with {process.returncode}")
    return _bytes(usage.ru_maxrss)


def _bytes(maxrss: int) -> int:
    return maxrss if sys.platform == "darwin" else maxrss * 1024


def _own_peak() -> int:
    """Of this process since it began to run Python.

    ru_maxrss would also count what its parent had in memory when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _open_side(name: str) -> Side:
    if name == PYGGML:
        from pyggml.tools.bench_pyggml import PyggmlSide

        return PyggmlSide()
    from pyggml.tools.bench_references import make_reference

    return make_reference(name)


def main() -> None:
    """Do one task; print the peak."""
    name, text = sys.argv[1:]
    task = Task(**json.loads(text))
    if name not in IN_PROCESS:
        print(_peak_of_binary(name, task))
        return
    side = _open_side(name)
    side.open(task)
    work = random_work(task, side.vocabulary(), seed=0)
    side.prepare(work)
    side.run(work)
    print(_own_peak())
    side.close()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"{error}")
