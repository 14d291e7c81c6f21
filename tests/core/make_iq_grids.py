"""Write pyggml/iq_grids.npz, the codebooks of the IQ types, from the gguf package.

python tests/core/make_iq_grids.py
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants

TARGET = Path(__file__).parents[2] / "pyggml" / "iq_grids.npz"
SOURCES: dict[str, tuple[Any, type]] = {
    "iq1_s": (quants.IQ1_S, np.int8),
    "iq2_xxs": (quants.IQ2_XXS, np.uint8),
    "iq2_xs": (quants.IQ2_XS, np.uint8),
    "iq2_s": (quants.IQ2_S, np.uint8),
    "iq3_xxs": (quants.IQ3_XXS, np.uint8),
    "iq3_s": (quants.IQ3_S, np.uint8),
}


def make() -> dict[str, Any]:
    """Every grid as an array: [indices, values per index]."""
    grids = {}
    for name, (source, dtype) in SOURCES.items():
        source.init_grid()
        grids[name] = source.grid.reshape(source.grid_shape).astype(dtype)
    return grids


if __name__ == "__main__":
    np.savez_compressed(TARGET, **make())
