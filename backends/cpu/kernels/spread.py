"""A block spread out in memory: what the types of codes.py are turned into first."""

from __future__ import annotations

from typing import Any, Final, cast

from llvmlite import ir
from numba.core import cgutils

from pyggml.backends.cpu.kernels.emit import V, at, load_vector
from pyggml.backends.cpu.kernels.simd import I8, I16, I64, Vec, load_ir

# u8 codes[256], scales[16], f16 d
SCALES: Final = 256
D: Final = 272
SPREAD_BYTES: Final = 288


def stack_memory(b: Any, nbytes: int) -> Any:
    """Address of memory of the kernel's stack frame."""
    return b.ptrtoint(cast(Any, cgutils).alloca_once(b, ir.ArrayType(I8, nbytes)), I64)


def store_scalar(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def copy_d(b: Any, block: Any, to: Any, offset: int) -> None:
    """The block's F16 scale."""
    store_scalar(b, load_ir(b, at(b, block, offset), I16), at(b, to, D))


# ---------------------------------------------------------------- one and two bits
_BYTES16, _BYTES32 = Vec("u8", 16), Vec("u8", 32)


def _words(v: V) -> V:
    """Bytes as u32 lanes."""
    vec = Vec("u32", v.vec.lanes)
    return V(v.b, vec, v.b.zext(v.value, vec.ir))


def q1_0(b: Any, block: Any, to: Any) -> None:
    """16 bytes of 8 codes."""
    copy_d(b, block, to, 0)
    q = load_vector(b, _BYTES16, at(b, block, 2))
    # 4 bits to the 4 bytes of a word
    low, high = (_words(n) * 0x204081 & 0x01010101 for n in (q & 15, q >> 4))
    for half in range(2):
        lanes = [lane for i in range(8 * half, 8 * half + 8) for lane in (i, 16 + i)]
        low.pick(lanes, high).store(at(b, to, 64 * half))


def q2_0(b: Any, block: Any, to: Any) -> None:
    """16 bytes of 4 codes."""
    copy_d(b, block, to, 0)
    q = _words(load_vector(b, _BYTES16, at(b, block, 2)))
    ((q | q << 6 | q << 12 | q << 18) & 0x03030303).store(to)


def tq2_0(b: Any, block: Any, to: Any) -> None:
    """Twice 32 bytes of 4 codes that are 32 apart."""
    copy_d(b, block, to, 64)
    for half in range(2):
        q = load_vector(b, _BYTES32, at(b, block, 32 * half))
        for n in range(4):
            (q >> 2 * n & 3).store(at(b, to, 128 * half + 32 * n))


def tq1_0(b: Any, block: Any, to: Any) -> None:
    """Bytes of 5 or 4 trits: fractions of 256 in base 3, whose first digit is split off."""
    copy_d(b, block, to, 52)
    source = target = 0
    for n_bytes, digits in ((32, 5), (16, 5), (4, 4)):
        q = load_vector(b, Vec("u8", n_bytes), at(b, block, source))
        for n in range(digits):
            rest = q * 3**n
            upper = rest.if_less(171, rest.constant(1), rest.constant(2))
            rest.if_less(86, rest.constant(0), upper).store(at(b, to, target))
            target += n_bytes
        source += n_bytes


# ---------------------------------------------------------------- FP4
def nvfp4(b: Any, block: Any, to: Any) -> None:
    """4 times 8 bytes of 2 codes that are 8 apart; the scales are unsigned 8-bit floats.

    The NaN among the scales counts as 0, and the sign bit for nothing.
    """
    scales = load_vector(b, Vec("u8", 4), block)
    at_most_nan = scales.if_less(0x7F, scales, scales.constant(0))
    scales.if_less(0x80, at_most_nan, scales & 0x7F).store(at(b, to, SCALES))
    q = load_vector(b, _BYTES32, at(b, block, 4))
    low, high = (q & 15).cast("i64"), (q >> 4).cast("i64")
    low.pick([0, 4, 1, 5, 2, 6, 3, 7], high).store(to)
