"""SIMD vector types for Numba: types, memory, construction and conversion.

A ``Vec`` is a Numba type whose LLVM representation is a first-class vector (``<32 x i8>``,
``<8 x float>`` ...). Values live in registers and exist only inside compiled code. Kernels
address memory with plain integers, so no array structs, bounds checks or reference counts appear:

    acc = zero(f32x8)
    for i in range(0, n, 8):
        acc = acc + load(f32x8, a + 4 * i) * load(f32x8, b + 4 * i)
    s = reduce_add(acc)

Arithmetic is in simd_ops.py, atomics in atomics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import llvmlite.binding as llvm
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils, config

# An intrinsic returns its signature and the function that emits its code.
Typed = tuple[Any, Callable[[Any, Any, Any, Any], Any]]


def intrinsic(fn: Callable[..., Typed | None]) -> Any:
    """Numba's intrinsic; its own type would demand the typing context of every caller."""
    return cast(Any, extending.intrinsic)(fn)


def literal_intrinsic(fn: Callable[..., Typed | None]) -> Any:
    """An intrinsic that sees the values of literal arguments."""
    return cast(Any, extending.intrinsic)(prefer_literal=True)(fn)


# ---------------------------------------------------------------- CPU features
def cpu_features() -> frozenset[str]:
    """Feature names of the CPU that Numba generates code for."""
    forced = cast(Any, config).CPU_FEATURES
    if forced is not None:
        return frozenset(f[1:] for f in forced.split(",") if f.startswith("+"))
    return frozenset(k for k, v in llvm.get_host_cpu_features().items() if v)


FEATURES = cpu_features()
IS_X86 = llvm.get_process_triple().startswith(("x86_64", "i686"))
HAS_AVX2 = IS_X86 and "avx2" in FEATURES
HAS_AVX512 = IS_X86 and {"avx512f", "avx512bw", "avx512vl"} <= FEATURES
HAS_F16C = not IS_X86 or "f16c" in FEATURES
HAS_VNNI = IS_X86 and ("avxvnni" in FEATURES or {"avx512vnni", "avx512vl"} <= FEATURES)


# ---------------------------------------------------------------- types
I8, I16, I32, I64 = (ir.IntType(b) for b in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_IR = {
    "i8": I8,
    "u8": I8,
    "i16": I16,
    "u16": I16,
    "i32": I32,
    "u32": I32,
    "i64": I64,
    "u64": I64,
    "f16": F16,
    "f32": F32,
}
_SCALAR = {
    "i8": types.int8,
    "u8": types.uint8,
    "i16": types.int16,
    "u16": types.uint16,
    "i32": types.int32,
    "u32": types.uint32,
    "i64": types.int64,
    "u64": types.uint64,
    "f32": types.float32,
}


class Vec(types.Type):
    """`lanes` elements of kind `elem` ('i8', 'u8', ..., 'f32') in one LLVM vector."""

    def __init__(self, elem: str, lanes: int) -> None:
        self.elem, self.lanes = elem, lanes
        cast(Any, super()).__init__(name=f"Vec({elem}x{lanes})")

    @property
    def key(self) -> tuple[str, int]:
        return self.elem, self.lanes

    @property
    def is_float(self) -> bool:
        return self.elem[0] == "f"

    @property
    def is_signed(self) -> bool:
        return self.elem[0] == "i"

    @property
    def bits(self) -> int:
        return int(self.elem[1:])

    @property
    def ir(self) -> Any:
        return ir.VectorType(_IR[self.elem], self.lanes)

    @property
    def scalar(self) -> Any:
        return _SCALAR[self.elem]

    @property
    def suffix(self) -> str:
        """How LLVM intrinsics name the type."""
        return f"v{self.lanes}{'f' if self.is_float else 'i'}{self.bits}"


@extending.register_model(Vec)
class VecModel(extending.models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        cast(Any, super()).__init__(dmm, fe_type, fe_type.ir)


i8x8, i32x8, f32x8, f32x16 = Vec("i8", 8), Vec("i32", 8), Vec("f32", 8), Vec("f32", 16)


# ---------------------------------------------------------------- helpers that emit code
def named(ty: Any) -> Any:
    """The type named by a type argument: load(f32x8, p), load(float32, p)."""
    if isinstance(ty, types.TypeRef | types.NumberClass):
        return ty.instance_type
    return None


def typed(signature: Any, emit: Callable[[Any, Any], Any]) -> Typed:
    """An intrinsic whose code needs only the builder and the arguments."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = emit(builder, args)
        return context.get_dummy_value() if sig.return_type == types.void else value

    return signature, codegen


def shuffle_ir(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def splat_ir(builder: Any, vec_ir: Any, scalar: Any) -> Any:
    """Broadcast an LLVM scalar to all lanes."""
    undef = ir.Constant(vec_ir, ir.Undefined)
    one = builder.insert_element(undef, scalar, ir.Constant(I32, 0))
    return shuffle_ir(builder, one, undef, [0] * vec_ir.count)


def load_ir(builder: Any, addr: Any, irt: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(addr, irt.as_pointer()), align=align)


def prefetch_ir(b: Any, addr: Any) -> None:
    flags = [ir.Constant(I32, v) for v in (0, 3, 1)]  # read, keep in all levels, data
    ptr = b.inttoptr(addr, I8.as_pointer())
    call_ir(b, "llvm.prefetch.p0", ir.VoidType(), [ptr, *flags])


def call_ir(builder: Any, name: str, ret: Any, args: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic or function by name."""
    fnty = ir.FunctionType(ret, [a.type for a in args])
    function = cast(Any, cgutils).get_or_insert_function(builder.module, fnty, name)
    return builder.call(function, list(args))


# ---------------------------------------------------------------- halfs
def _constant(like: Any, value: int) -> Any:
    t = like.type
    return ir.Constant(t, [value] * t.count if isinstance(t, ir.VectorType) else value)


def _like(value: Any, scalar: Any) -> Any:
    """The type `scalar`, with as many lanes as the value has."""
    t = value.type
    return ir.VectorType(scalar, t.count) if isinstance(t, ir.VectorType) else scalar


def half_to_float(b: Any, half: Any) -> Any:
    """f16 -> f32, exactly; by integer arithmetic on CPUs without an instruction for it."""
    if HAS_F16C:
        return b.fpext(half, _like(half, F32))
    h = b.zext(b.bitcast(half, _like(half, I16)), _like(half, I32))
    magnitude = b.and_(h, _constant(h, 0x7FFF))
    bits = b.shl(magnitude, _constant(h, 13))
    scaled = b.fmul(b.bitcast(bits, _like(h, F32)), ir.Constant(_like(h, F32), _lanes(h, 2.0**112)))
    special = b.or_(bits, _constant(h, 0x7F800000))
    is_special = b.icmp_unsigned(">=", magnitude, _constant(h, 0x7C00))
    bits = b.select(is_special, special, b.bitcast(scaled, h.type))
    sign = b.shl(b.and_(h, _constant(h, 0x8000)), _constant(h, 16))
    return b.bitcast(b.or_(bits, sign), _like(h, F32))


def float_to_half(b: Any, x: Any) -> Any:
    """f32 -> f16, to nearest even; by integer arithmetic on CPUs without an instruction for it."""
    if HAS_F16C:
        return b.fptrunc(x, _like(x, F16))
    bits = b.bitcast(x, _like(x, I32))
    magnitude = b.and_(bits, _constant(bits, 0x7FFFFFFF))
    sign = b.and_(b.lshr(bits, _constant(bits, 16)), _constant(bits, 0x8000))
    is_nan = b.icmp_unsigned(">", magnitude, _constant(bits, 0x7F800000))
    huge = b.select(is_nan, _constant(bits, 0x7E00), _constant(bits, 0x7C00))
    # adding 0.5 moves a subnormal result's bits to the end of the mantissa, rounded
    shifted = b.fadd(b.bitcast(magnitude, x.type), ir.Constant(x.type, _lanes(x, 0.5)))
    tiny = b.sub(b.bitcast(shifted, bits.type), _constant(bits, 0x3F000000))
    odd = b.and_(b.lshr(magnitude, _constant(bits, 13)), _constant(bits, 1))
    rounded = b.add(b.add(magnitude, _constant(bits, 0xC8000FFF)), odd)
    normal = b.lshr(rounded, _constant(bits, 13))
    small = b.icmp_unsigned("<", magnitude, _constant(bits, 0x38800000))
    large = b.icmp_unsigned(">=", magnitude, _constant(bits, 0x47800000))
    half = b.select(large, huge, b.select(small, tiny, normal))
    half = b.trunc(b.or_(half, sign), _like(x, I16))
    return b.bitcast(half, _like(x, F16))


def _lanes(like: Any, value: float) -> Any:
    t = like.type
    return [value] * t.count if isinstance(t, ir.VectorType) else value


# ---------------------------------------------------------------- memory
@intrinsic
def load(_: Any, ty: Any, addr: Any) -> Typed:
    """load(T, address): unaligned load of a vector, aligned load of a scalar."""
    t = named(ty)
    irt = t.ir if isinstance(t, Vec) else ir.IntType(t.bitwidth)
    if t == types.float32:
        irt = F32
    elif t == types.float64:
        irt = ir.DoubleType()
    align = 1 if isinstance(t, Vec) else t.bitwidth // 8
    return typed(t(ty, types.intp), lambda b, a: load_ir(b, a[1], irt, align))


@intrinsic
def store(_: Any, addr: Any, value: Any) -> Typed:
    """store(address, v): unaligned store; the type of v tells how many bytes."""
    if isinstance(value, types.Literal):
        value = value.literal_type
    align = 1 if isinstance(value, Vec) else value.bitwidth // 8

    def emit(b: Any, a: Any) -> None:
        b.store(a[1], b.inttoptr(a[0], a[1].type.as_pointer()), align=align)

    return typed(types.void(types.intp, value), emit)


@intrinsic
def load_f16(_: Any, addr: Any) -> Typed:
    """A half, converted to float32."""
    return typed(types.float32(types.intp), lambda b, a: half_to_float(b, load_ir(b, a[0], F16)))


LINE = 64  # bytes of a cache line


@intrinsic
def prefetch(_: Any, addr: Any) -> Typed:
    """Ask for the cache line at an address."""
    return typed(types.void(types.intp), lambda b, a: prefetch_ir(b, a[0]))


# ---------------------------------------------------------------- construction
@intrinsic
def zero(_: Any, ty: Any) -> Typed:
    """zero(T): all lanes 0."""
    t = named(ty)
    return typed(t(ty), lambda b, a: ir.Constant(t.ir, None))


@intrinsic
def splat(_: Any, ty: Any, x: Any) -> Typed:
    """splat(T, x): all lanes x, converted to the element type."""
    t = named(ty)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return splat_ir(builder, t.ir, context.cast(builder, args[1], sig.args[1], t.scalar))

    return t(ty, x), codegen


# ---------------------------------------------------------------- conversion
def _conversion(source: Vec, target: Vec) -> str | None:
    """Name of the builder method that converts lanes; None: same bits."""
    if source.is_float:
        return "fptosi" if target.is_signed else "fptoui"
    if target.is_float:
        return "sitofp" if source.is_signed else "uitofp"
    if target.bits > source.bits:
        return "sext" if source.is_signed else "zext"
    return "trunc" if target.bits < source.bits else None


@intrinsic
def convert(_: Any, ty: Any, v: Any) -> Typed | None:
    """Numeric conversion lane by lane: extend, truncate, int <-> float, half <-> float."""
    t = named(ty)
    if not isinstance(v, Vec) or v.lanes != t.lanes:
        return None
    if v == t:
        return typed(t(ty, v), lambda b, a: a[1])
    if v.is_float and t.is_float:
        halfs = half_to_float if v.bits == 16 else float_to_half
        return typed(t(ty, v), lambda b, a: halfs(b, a[1]))
    method = _conversion(v, t)

    def emit(b: Any, a: Any) -> Any:
        return a[1] if method is None else getattr(b, method)(a[1], t.ir)

    return typed(t(ty, v), emit)
