"""FLASH_ATTN_EXT on CUDA: what is supported, which kernel it takes, how much scratch that needs."""

from __future__ import annotations

from pyggml.dtypes import GGMLType
from pyggml.params import FlashAttnParams
from pyggml.tensor import Tensor

T = GGMLType
CACHE_TYPES = frozenset((T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0))
# head sizes of keys and values
EQUAL_SIZES = frozenset((40, 64, 72, 80, 96, 112, 128, 256))
# sizes that only kernels for groups of queries have, and what the group has to be a multiple of
GROUPED_SIZES = {(192, 128): 8, (320, 256): 32, (512, 512): 1, (576, 512): 1}
# pairs of types for which a vector kernel is compiled
VECTOR_PAIRS = frozenset(((T.F16, T.F16), (T.BF16, T.BF16), (T.Q4_0, T.Q4_0), (T.Q8_0, T.Q8_0)))

TURING, ADA = 75, 89
NO_TENSOR_CORES = frozenset((40, 72))  # head sizes
KV_STEP = 256


def _operands(node: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, mask = node.src[:4]
    assert q is not None and k is not None and v is not None
    return q, k, v, mask


def attention_supported(node: Tensor) -> bool:
    """Whether there is a kernel."""
    q, k, v, mask = _operands(node)
    if k.type not in CACHE_TYPES or v.type not in CACHE_TYPES:
        return False
    if mask is not None and mask.ne[2] != 1:
        return False
    sizes = k.ne[0], v.ne[0]
    if sizes[0] == sizes[1] and sizes[0] in EQUAL_SIZES:
        return True
    ratio = q.ne[2] // k.ne[2]
    return sizes in GROUPED_SIZES and _grouped(node) and ratio % GROUPED_SIZES[sizes] == 0


def _grouped(node: Tensor) -> bool:
    """Whether the queries that share a key head can be computed together."""
    q, k, v, mask = _operands(node)
    assert isinstance(node.params, FlashAttnParams)
    aligned = all(
        stride % 16 == 0
        for t in (q, k, v, mask)
        if t is not None and not t.type.is_quantized
        for stride in t.nb[1:]
    )
    return (
        q.ne[2] // k.ne[2] >= 2
        and mask is not None
        and node.params.max_bias == 0
        and k.ne[1] % KV_STEP == 0
        and aligned
    )


def uses_vector_kernel(node: Tensor, compute_capability: int) -> bool:
    """Whether the kernel for few queries is chosen, which reads keys and values as they are."""
    q, k, v, _ = _operands(node)
    size, n_kv, n_batch = k.ne[0], k.ne[1], q.ne[1]
    quantized, grouped = k.type.is_quantized or v.type.is_quantized, _grouped(node)
    is_ada = compute_capability >= ADA
    if compute_capability < TURING or size in NO_TENSOR_CORES:
        return n_batch <= 2 if quantized else n_batch == 1 and not grouped
    if size > 256 or size % 64 or size == 192 or n_kv % KV_STEP:
        return False
    if quantized and n_batch <= (2 if is_ada else 1):
        return True
    heavy = q.ne[2] // k.ne[2] > 4 and (size >= 256 or n_kv >= 8192)
    if not quantized and is_ada and n_batch == 1 and q.ne[3] == 1 and not heavy:
        return True
    return n_batch == 1 and not grouped


def attention_scratch(node: Tensor, compute_capability: int) -> int:
    """Bytes behind the result for F16 copies of keys and values that the kernel cannot read."""
    _, k, v, _ = _operands(node)
    vector = uses_vector_kernel(node, compute_capability)
    if vector and (k.type, v.type) in VECTOR_PAIRS:
        return 0
    return sum(2 * t.nelements for t in (k, v) if t.type != T.F16)
