"""`--check-tensors`: is every value of a tensor a finite number?"""

import numpy as np
import numpy.typing as npt

from pyggml.dtypes import GGMLType
from pyggml.errors import ModelError
from pyggml.gguf import Gguf, GgufTensor
from pyggml.quants import DEQUANTIZABLE, dequantize

CHUNK_BYTES = 1 << 22


def check_data(gguf: Gguf, tensor: GgufTensor) -> None:
    """Raise ModelError if a tensor holds NaN or infinity."""
    if tensor.type not in DEQUANTIZABLE:  # integers
        return
    data = gguf.data(tensor.name)
    block = tensor.type.type_size
    step = CHUNK_BYTES // block * block
    for start in range(0, len(data), step):
        raw = np.frombuffer(data[start : start + step], np.uint8)
        bad = _first_bad(raw, tensor.type)
        if bad >= 0:
            raise ModelError(
                f"{gguf.path}: tensor {tensor.name!r} holds invalid data (NaN or infinity) in "
                f"block {start // block + bad:,}: the file is damaged, download it again"
            )


def _first_bad(raw: npt.NDArray[np.uint8], type: GGMLType) -> int:
    """The first block with a value that is not finite; -1: none."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = dequantize(raw, type).reshape(-1, type.block_size)
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    return int(bad[0]) if bad.size else -1
