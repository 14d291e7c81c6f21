"""`--check-tensors`: is every value of a tensor a finite number?"""

import numpy as np

from pyggml.dtypes import TYPES, GGMLType
from pyggml.errors import ModelError
from pyggml.gguf import Gguf, GgufTensor
from pyggml.quants import dequantize

CHUNK_BYTES = 1 << 24
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.F64)


def check_data(gguf: Gguf, tensor: GgufTensor) -> None:
    """Raise ModelError if a tensor holds NaN or infinity."""
    if not tensor.type.is_quantized and tensor.type not in (*FLOATS, GGMLType.BF16):
        return
    data = gguf.data(tensor.name)
    step = CHUNK_BYTES // tensor.type.type_size * tensor.type.type_size
    for start in range(0, len(data), step):
        raw = np.frombuffer(data[start : start + step], np.uint8)
        if not _is_finite(raw, tensor.type):
            raise ModelError(
                f"{gguf.path}: tensor {tensor.name!r} holds invalid data (NaN or infinity): "
                "the file is damaged, download it again"
            )


def _is_finite(raw: "np.ndarray[tuple[int], np.dtype[np.uint8]]", type: GGMLType) -> bool:
    dtype = TYPES[type].numpy
    if type in FLOATS and dtype is not None:
        return bool(np.isfinite(raw.view(dtype)).all())
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isfinite(dequantize(raw, type)).all())
