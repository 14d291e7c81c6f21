"""Processes that compile kernels. A run that finds all it needs does not import this module."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyggml.backends.cpu.library import usable_cores
from pyggml.backends.cpu.object_file import read_object
from pyggml.backends.cpu.target import Target


def compile_all(names: list[str], folder: Path, target: Target, digest: str) -> Iterator[str]:
    """Compile kernels by name in parallel; yields each name when its file is in the folder."""
    n_workers = min(len(names), usable_cores())
    wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
    finished: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    running: list[subprocess.Popen[str]] = []
    for name in random.sample(names, len(names)):  # a program that starts now takes others first
        wanted.put(name)
    with ThreadPoolExecutor(max(1, n_workers)) as executor:
        for _ in range(n_workers):
            executor.submit(
                _drive_worker,
                wanted,
                finished,
                running,
                lambda: _start(folder, target, digest),
                lambda name: read_object(folder / f"{name}.o") is not None,
            )
        try:
            for _ in names:
                result = finished.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            while not wanted.empty():  # interrupted: nobody waits for what is being compiled
                wanted.get()
            for process in running:
                process.kill()


def _drive_worker(
    wanted: queue.SimpleQueue[str],
    finished: queue.SimpleQueue[str | BaseException],
    running: list[subprocess.Popen[str]],
    start: Callable[[], subprocess.Popen[str]],
    is_there: Callable[[str], bool],
) -> None:
    """Feed one worker process with what is wanted and not there until nothing is."""
    try:
        with start() as process:
            running.append(process)
            assert process.stdin is not None and process.stdout is not None
            while True:
                try:
                    name = wanted.get_nowait()
                except queue.Empty:
                    process.stdin.close()
                    return
                if is_there(name):  # of another program meanwhile
                    finished.put(name)
                    continue
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    raise RuntimeError(f"the compiler process ended while compiling {name}")
                error = json.loads(answer)["error"]
                if error:
                    raise RuntimeError(f"kernel {name} does not compile: {error}")
                finished.put(name)
    except BaseException as e:
        finished.put(e)


def _start(folder: Path, target: Target, digest: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(p for p in sys.path if p)  # the child finds what this process found
    return subprocess.Popen(
        # -P: a module in the current folder must not be taken for one of ours
        [sys.executable, "-P", "-m", "pyggml.backends.cpu.compile", str(folder), digest],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for us: a worker would only print a traceback
        env={**os.environ, "PYTHONPATH": path, **target.environment()},
    )
