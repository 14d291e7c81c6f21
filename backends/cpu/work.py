"""How lowerings share out rows."""

from __future__ import annotations

from pyggml.backends.cpu.lowering import PlanContext

# Elements of simple work per chunk at least: handing out a chunk costs about as much as 500.
GRAIN = 8192


def row_chunks(ctx: PlanContext, n_rows: int, row_cost: int) -> int:
    """Chunks for n_rows of work; row_cost: elements per row, times more for costly functions."""
    most = max(1, n_rows * row_cost // GRAIN)
    return min(ctx.chunks(n_rows), most)
