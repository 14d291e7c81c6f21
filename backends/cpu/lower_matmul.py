"""MUL_MAT: activations are brought into a product kernel's form once and shared by all users."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from pyggml.backends.cpu.buffers import is_repacked
from pyggml.backends.cpu.lowering import PlanContext, Step, WantedColumns, Work, lowering
from pyggml.backends.cpu.panels import (
    FEW_COLUMNS,
    FLOAT_GROUP,
    FLOAT_ROWS,
    FLOAT_SUMS,
    GROUP,
    LAYOUTS,
    ROWS,
    ActivationFormat,
    PanelLayout,
)
from pyggml.dtypes import GGMLType
from pyggml.ops import Op
from pyggml.tensor import Tensor

F32, F16 = GGMLType.F32, GGMLType.F16
FLOATS = (F32, F16, GGMLType.BF16)

# Activations of a block of columns stay in the second-level cache while all weights pass.
BLOCK_BYTES = 256 << 10
FLOAT_BLOCK_BYTES = 512 << 10  # of weights, while all columns pass

Steps = Generator[Step, None, Work]


def _operands(node: Tensor) -> tuple[Tensor, Tensor]:
    weights, activations = node.src[0], node.src[1]
    assert weights is not None and activations is not None
    return weights, activations


def _usual(node: Tensor) -> bool:
    """What all product kernels ask of their operands."""
    weights, x = _operands(node)
    return (
        node.type == F32
        and node.is_contiguous
        and x.type in (F32, F16)
        and x.has_contiguous_rows
        and weights.has_contiguous_rows
    )


def supports_quantized(node: Tensor) -> bool:
    """Weights with a panel layout, in panels or as rows."""
    weights, _ = _operands(node)
    known = weights.type in LAYOUTS and weights.ne[0] % weights.type.block_size == 0
    return known and _usual(node)


def supports_float(node: Tensor) -> bool:
    """F32, F16 and BF16 weights, which may be views (the KV cache)."""
    weights, _ = _operands(node)
    return weights.type in FLOATS and _usual(node)


def widened(ctx: PlanContext, x: Tensor) -> Generator[Step, None, Tensor | Work]:
    """F16 activations as packed F32."""
    if x.type == F32:
        return x
    work = ctx.quantized(x, "f32")
    if work is None:
        work = ctx.work_tensor(F32, x.ne)
        yield Step("widen_f16", ctx.chunks(x.nrows), work, (x,))
        ctx.keep_quantized(x, "f32", work)
    return work


# ---------------------------------------------------------------- quantized weights
@dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of quantized activations are laid out."""

    n: int  # per plane
    planes: int
    group: int  # columns that lie together: GROUP or 1
    blocks: int  # per column
    nbytes: int  # of a block

    @property
    def padded(self) -> int:
        return -(-self.n // self.group) * self.group

    @property
    def plane_bytes(self) -> int:
        return self.padded * self.blocks * self.nbytes

    @property
    def at_once(self) -> int:
        """Columns whose activations fit BLOCK_BYTES; a multiple of GROUP."""
        return max(1, BLOCK_BYTES // max(1, GROUP * self.blocks * self.nbytes)) * GROUP


def _columns(weights: Tensor, x: Tensor, panel: PanelLayout) -> Columns:
    n, planes = x.ne[1], x.ne[2] * x.ne[3]
    if weights.ne[2] * weights.ne[3] == 1:
        n, planes = n * planes, 1  # one matrix: all columns belong together
    blocks = blocks_per_column(panel, weights.ne[0])
    group = GROUP if n >= FEW_COLUMNS else 1
    return Columns(n, planes, group, blocks, panel.activations.nbytes)


def blocks_per_column(panel: PanelLayout, k: int) -> int:
    """Blocks of activations that k values fill, with those of the padding of weights."""
    return panel.units(k) * panel.blocks_per_unit


def quantized_columns(
    ctx: PlanContext, x: Tensor, form: ActivationFormat, columns: Columns
) -> Steps:
    key = (form, columns)
    work = ctx.quantized(x, key)
    if work is None:
        source = yield from widened(ctx, x)
        work = ctx.work(columns.plane_bytes * columns.planes)
        params = (
            columns.n,
            columns.planes,
            columns.group,
            columns.blocks,
            columns.plane_bytes,
            form.zero,
        )
        n_chunks = ctx.chunks(columns.padded * columns.planes)
        yield Step(form.kernel, n_chunks, work, (source,), params)
        ctx.keep_quantized(x, key, work)
    return work


def wanted_columns(node: Tensor) -> WantedColumns | None:
    """What a quantized product of a whole node's rows wants of them."""
    weights, x = _operands(node)
    panel = LAYOUTS.get(weights.type)
    if panel is None or x.type != F32 or not supports_quantized(node):
        return None
    columns = _columns(weights, x, panel)
    return wanted(columns, panel.activations) if columns.planes == 1 else None


def wanted(columns: Columns, form: ActivationFormat) -> WantedColumns:
    """The columns of one plane, as a step that computes their values can leave them."""
    params = (columns.group, columns.blocks, form.zero, columns.padded)
    return WantedColumns((form, columns), form.kernel, columns.plane_bytes, params)


@lowering(Op.MUL_MAT, supports_quantized)
def lower_quantized(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Quantize the activations, unless that was done already, and multiply."""
    weights, x = _operands(node)
    panel = LAYOUTS[weights.type]
    columns = _columns(weights, x, panel)
    work = yield from quantized_columns(ctx, x, panel.activations, columns)
    k, rows = weights.ne[:2]
    repacked = is_repacked(weights)
    merged = columns.planes == 1
    params = (
        rows,
        columns.n,
        1 if merged else x.ne[2],
        1 if merged else x.ne[3],
        1 if merged else x.ne[2] // weights.ne[2],
        1 if merged else x.ne[3] // weights.ne[3],
        panel.units(k),
        columns.group,
        columns.at_once,
        columns.plane_bytes,
        0 if repacked else k // weights.type.block_size,
        0 if repacked else 1,
    )
    yield Step(
        f"mul_mat_{weights.type.name.lower()}",
        ctx.chunks(-(-rows // ROWS) * columns.planes, nbytes=weights.nbytes * columns.n),
        node,
        (weights, work),
        params,
        scratch=0 if repacked else panel.panel_bytes(k),
    )


# ---------------------------------------------------------------- float weights
@dataclass(frozen=True, slots=True)
class _Planes:
    """A float product as `planes2 * planes3` matrices; strides in bytes."""

    n: int  # columns
    planes2: int
    planes3: int
    repeat2: int  # planes that share one matrix of weights
    repeat3: int
    x_nb: tuple[int, int, int]  # of columns and of both kinds of planes
    out_nb: tuple[int, int, int]


def _planes(weights: Tensor, x: Tensor, node: Tensor) -> _Planes:
    _, ne1, ne2, ne3 = x.ne
    repeat2, repeat3 = ne2 // weights.ne[2], ne3 // weights.ne[3]
    if ne1 == 1 and repeat2 > 1:
        # the heads that share a key head become columns of one product
        nb2, out2 = x.nb[2], node.nb[2]
        x_nb = (nb2, nb2 * repeat2, x.nb[3])
        out_nb = (out2, out2 * repeat2, node.nb[3])
        return _Planes(repeat2, ne2 // repeat2, ne3, 1, repeat3, x_nb, out_nb)
    in_line = (ne2 == 1 or x.nb[2] == ne1 * x.nb[1]) and (ne3 == 1 or x.nb[3] == ne2 * x.nb[2])
    if weights.ne[2] * weights.ne[3] == 1 and in_line:
        return _Planes(ne1 * ne2 * ne3, 1, 1, 1, 1, (x.nb[1], 0, 0), (node.nb[1], 0, 0))
    return _Planes(ne1, ne2, ne3, repeat2, repeat3, x.nb[1:], node.nb[1:])


def _packed(ctx: PlanContext, x: Tensor, source: Tensor | Work, planes: _Planes) -> Steps:
    """Columns in groups, padded with zeros."""
    key = ("packed", planes.n)
    work = ctx.quantized(x, key)
    if work is None:
        n_planes, padded = planes.planes2 * planes.planes3, _padded(planes.n)
        nbytes = padded * packed_row(x.ne[0])
        work = ctx.work(nbytes * n_planes)
        params = (planes.n, n_planes, nbytes)
        yield Step("pack_columns", ctx.chunks(padded * n_planes), work, (source,), params)
        ctx.keep_quantized(x, key, work)
    return work


def _padded(n: int) -> int:
    return -(-n // FLOAT_GROUP) * FLOAT_GROUP


def packed_row(k: int) -> int:
    """Bytes of a packed column."""
    return -(-k // 16) * 64


def rows_at_once(weights: Tensor) -> int:
    """Rows that stay in the second-level cache while all columns pass; a multiple of 8."""
    fit = FLOAT_BLOCK_BYTES // max(1, weights.type.row_size(weights.ne[0]))
    return max(16, min(FLOAT_ROWS, fit // 8 * 8))


@lowering(Op.MUL_MAT, supports_float)
def lower_float(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Few columns are read where they are, many are packed into groups first."""
    weights, x = _operands(node)
    source = yield from widened(ctx, x)
    if isinstance(source, Work):
        shaped = Tensor(F32, x.ne)  # its strides are those of the packed copy
        planes = _planes(weights, shaped, node)
    else:
        planes = _planes(weights, x, node)
    k, rows = weights.ne[:2]
    x_nb = planes.x_nb
    if planes.n >= FEW_COLUMNS:
        source = yield from _packed(ctx, x, source, planes)
        nbytes = _padded(planes.n) * packed_row(k)
        x_nb = (0, nbytes, nbytes * planes.planes2)
    params = (
        rows,
        planes.n,
        k,
        planes.planes2,
        planes.planes3,
        planes.repeat2,
        planes.repeat3,
        rows_at_once(weights),
        *x_nb,
        *planes.out_nb,
    )
    n_items = -(-rows // 8) * planes.planes2 * planes.planes3
    name = f"mul_mat_{weights.type.name.lower()}"
    scratch = FLOAT_SUMS if x_nb[0] == 0 else 0
    n_chunks = ctx.chunks(n_items, nbytes=weights.nbytes * planes.n)
    yield Step(name, n_chunks, node, (weights, source), params, scratch=scratch)
