"""MUL_MAT: activations are converted once and shared, then one product kernel runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyggml.backends.cpu.buffers import is_repacked
from pyggml.backends.cpu.lowering import PlanContext, Step, Work, lowering
from pyggml.backends.cpu.panels import GROUP, LAYOUTS, ActivationFormat, PanelLayout
from pyggml.dtypes import GGMLType
from pyggml.ops import Op
from pyggml.tensor import Tensor

# Fewer columns than this are computed one by one, without padding them to a group.
FEW_COLUMNS = 3
# Activations of a block of columns stay in the second-level cache while all weights pass.
BLOCK_BYTES = 256 << 10


def _operands(node: Tensor) -> tuple[Tensor, Tensor]:
    weights, activations = node.src[0], node.src[1]
    assert weights is not None and activations is not None
    return weights, activations


def _usual(node: Tensor) -> bool:
    """What all product kernels ask of their operands."""
    weights, activations = _operands(node)
    return (
        node.type == GGMLType.F32
        and activations.type in (GGMLType.F32, GGMLType.F16)
        and activations.has_contiguous_rows
        and node.has_contiguous_rows
        and weights.has_contiguous_rows
    )


def supports_quantized(node: Tensor) -> bool:
    """Weights with a panel layout, in panels or as rows."""
    weights, _ = _operands(node)
    if weights.type not in LAYOUTS or weights.ne[0] % weights.type.block_size:
        return False
    return _usual(node)


# ---------------------------------------------------------------- activations
@dataclass(frozen=True, slots=True)
class _Columns:
    """How the columns of an activation tensor are laid out for a kernel."""

    n: int  # per plane
    planes: int
    group: int  # columns that lie together: GROUP or 1
    blocks: int  # per column
    nbytes: int  # of a block

    @property
    def plane_bytes(self) -> int:
        padded = -(-self.n // self.group) * self.group
        return padded * self.blocks * self.nbytes

    @property
    def at_once(self) -> int:
        """Columns whose activations fit BLOCK_BYTES; a multiple of GROUP."""
        return max(1, BLOCK_BYTES // (GROUP * self.blocks * self.nbytes)) * GROUP


def _quantized(
    ctx: PlanContext, x: Tensor, form: ActivationFormat, columns: _Columns
) -> Iterator[Step | Work]:
    """Yields the steps that quantize x, if any are needed, and last the result."""
    key = (form, columns)
    work = ctx.quantized(x, key)
    if work is None:
        work = ctx.work(columns.plane_bytes * columns.planes)
        source: Tensor | Work = x
        kernel = "quantize_q8_k" if form.values == 256 else "quantize_q8"
        n_rows = -(-columns.n // columns.group) * columns.group * columns.planes
        params = (
            columns.n,
            columns.planes,
            columns.group,
            columns.blocks,
            columns.plane_bytes,
            form.zero,
        )
        yield Step(kernel, ctx.chunks(n_rows), work, (source,), params)
        ctx.keep_quantized(x, key, work)
    yield work


@lowering(Op.MUL_MAT, supports_quantized)
def lower_quantized(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Quantize the activations, unless that was done already, and multiply."""
    weights, x = _operands(node)
    panel = LAYOUTS[weights.type]
    columns = _columns(node, weights, panel)
    work: Work | None = None
    for item in _quantized(ctx, x, panel.activations, columns):
        if isinstance(item, Work):
            work = item
        else:
            yield item
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
    )
    n_items = -(-rows // (2 * 8)) * columns.planes
    yield Step(
        f"mul_mat_{weights.type.name.lower()}",
        ctx.chunks(n_items),
        node,
        (weights, work),
        params,
        scratch=0 if repacked else 2 * panel.panel_bytes(k),
    )


def _columns(node: Tensor, weights: Tensor, panel: PanelLayout) -> _Columns:
    _, x = _operands(node)
    planes = x.ne[2] * x.ne[3]
    n = x.ne[1]
    if weights.ne[2] * weights.ne[3] == 1 and node.is_contiguous:
        n, planes = n * planes, 1  # one matrix: all columns belong together
    form = panel.activations
    blocks = panel.units(weights.ne[0]) * (panel.values // form.values)
    return _Columns(n, planes, GROUP if n >= FEW_COLUMNS else 1, blocks, form.nbytes)
