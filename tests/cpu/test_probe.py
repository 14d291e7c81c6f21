"""The kernels that measure the machine do the work that is counted."""

from __future__ import annotations

import ctypes
import functools

import llvmlite.binding as llvm
import numpy as np
import pytest

from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu import probe
from pyggml.backends.cpu.compile import PROBES, kernel_names
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cpu.library import KernelLibrary
from pyggml.backends.cpu.memory import aligned_words
from pyggml.backends.cpu.probe import KERNELS, Probe
from pyggml.backends.cpu.target import Target
from pyggml.threads import ThreadParams

TARGETS = {
    "host": Target.host(),
    "avx2": Target("haswell", "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2"),
    "portable": Target.portable(),
}
STREAMS, LINE = 4, 64


def runs_here(target: Target) -> bool:
    mine = {name for name, has in llvm.get_host_cpu_features().items() if has}
    return {f[1:] for f in target.features.split(",") if f.startswith("+")} <= mine


@functools.cache
def kernel(target: str, name: str):
    library = KernelLibrary(TARGETS[target])
    code = library.addresses(KERNELS)[name]
    i32 = ctypes.c_int32
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, i32, i32, i32)(code)
    return library, function


def run(target: str, name: str, memory, work: int, step: int, chunk: int) -> np.ndarray:
    """What the kernel stores for a chunk."""
    node, sink = aligned_words(layout.WORDS), aligned_words(8 * LINE // 8)
    node[layout.DST], node[layout.SRC] = sink.ctypes.data, memory.ctypes.data
    node[layout.PARAMS : layout.PARAMS + 2] = work, step
    kernel(target, name)[1](node.ctypes.data, 0, chunk, 8)
    found = sink.view(np.int32).reshape(8, -1)
    assert not np.delete(found, chunk, axis=0).any()
    return found[chunk]


@pytest.fixture(params=TARGETS)
def target(request) -> str:
    if not runs_here(TARGETS[request.param]):
        pytest.skip("this CPU lacks the instructions")
    return request.param


def test_every_byte_is_read_once(target) -> None:
    part = 5 * STREAMS * LINE
    memory = np.random.default_rng(0).integers(-(2**31), 2**31, 2 * part // 4, np.int32)
    words = memory.reshape(2, -1)
    for chunk in range(2):
        got = np.bitwise_xor.reduce(run(target, "probe_read", memory, part, part, chunk))
        # accumulators begin with the first line of every stream's place
        begin = words[chunk][: STREAMS * LINE // 4]
        want = np.bitwise_xor.reduce(words[chunk]) ^ np.bitwise_xor.reduce(begin)
        assert got == want


@pytest.mark.parametrize("name", ["probe_fma", "probe_dot"])
def test_every_step_computes(target, name) -> None:
    """With each more step the result is another one, and nothing overflows or dies out."""
    memory = np.random.default_rng(0).random(1024, np.float32)
    unit = 8 * 16 * 24  # at least one step, whatever the width of vectors
    found = [run(target, name, memory, n * unit, 0, 0) for n in (0, 1, 2, 3)]
    assert len({f.tobytes() for f in found}) == len(found)
    assert all(f.any() for f in found)


def test_the_threads_of_a_probe() -> None:
    found = Probe(CpuDevice(), ThreadParams(2), 1 << 20)
    assert 0.9 * (1 << 20) < found.read.amount <= 1 << 20
    assert found.fma.amount == found.dot.amount == 2 * probe.ARITHMETIC
    assert min(peak.run() for peak in (found.read, found.fma, found.dot)) > 0
    found.close()


def test_models_do_not_wait_for_probes() -> None:
    names = kernel_names()
    assert "mul_mat_q4_0" in names
    assert not [name for name in names if name.startswith(PROBES)]
    assert all(name.startswith(PROBES) for name in KERNELS)
