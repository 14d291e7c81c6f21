"""pyllama-gguf upcycle: a mixture of experts made of a dense model.

Every expert is the dense feed-forward, exact or perturbed; the router is random. The weights of
the chosen experts must add up to 1 for exact copies to compute what the dense model does:

- llama and qwen3 have sisters that normalize them: `llama` with experts, and `qwen3moe`.
- qwen2moe normalizes nothing and needs one more, shared expert. A qwen2 model becomes a `llama`
  instead, which takes its biases as well; llama rotates neighbours where qwen2 rotates halves of
  a head, so the rows of its queries and keys are put in that order.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from pyggml import quants
from pyggml.dtypes import GGMLType
from pyggml.errors import ConfigError, GgufError
from pyggml.gguf import Gguf, GgufTensor, ValueType
from pyggml.gguf_writer import (
    Chunks,
    NewTensor,
    Stored,
    copy_of,
    number,
    pieces,
    string,
)
from pyggml.tools.gguf_split import model_pairs

MAX_EXPERTS = 512  # llama.cpp's limit
FEED_FORWARD = ("gate", "up", "down")
STEP = 1 << 20  # values that are perturbed at once


@dataclass(frozen=True, slots=True)
class Family:
    """How a dense architecture becomes a mixture."""

    arch: str
    interleave: bool = False  # whether halves of heads become neighbours


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama"),
    "qwen2": Family("llama", interleave=True),
    "qwen3": Family("qwen3moe"),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is asked for."""

    n_expert: int
    n_used: int
    noise: float = 0.0
    skew: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n_expert <= MAX_EXPERTS:
            raise ConfigError(f"--experts {self.n_expert}: it must lie in 1..{MAX_EXPERTS}")
        if not 1 <= self.n_used <= self.n_expert:
            raise ConfigError(
                f"--used {self.n_used}: it must lie in 1..{self.n_expert}, the number of experts"
            )
        for name in ("noise", "skew"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"--{name} {value:g}: it must be a number, 0 or greater")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: it must be 0 or greater")


def upcycled(gguf: Gguf, recipe: Recipe) -> tuple[dict[str, Stored], list[NewTensor]]:
    """Metadata and tensors of the mixture; nothing is computed before they are written."""
    arch = gguf.metadata.get_str("general.architecture")
    if arch not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise GgufError(f"{gguf.path}: a model of {arch!r} cannot be upcycled; known are {known}")
    family = FAMILIES[arch]
    _check_tensors(gguf, recipe)
    return _pairs(gguf, arch, family, recipe), list(_tensors(gguf, arch, family, recipe))


def _check_tensors(gguf: Gguf, recipe: Recipe) -> None:
    arch = gguf.metadata.get_str("general.architecture")
    n_expert: int = gguf.metadata.get_int(f"{arch}.expert_count", 0)
    if n_expert or any("_exps." in name for name in gguf.tensors):
        raise GgufError(f"{gguf.path}: is a mixture of experts already: give a dense model")
    n_layer = gguf.metadata.get_int(f"{arch}.block_count")
    for il in range(n_layer):
        for part in FEED_FORWARD:
            tensor = gguf.tensors.get(f"blk.{il}.ffn_{part}.weight")
            if tensor is None:
                raise GgufError(
                    f"{gguf.path}: tensor 'blk.{il}.ffn_{part}.weight' is missing: "
                    "a feed-forward with gate, up and down is needed"
                )
            _check_matrix(gguf, tensor, recipe)
    for name in gguf.tensors:
        if re.search(r"\.ffn_(gate|up|down)\.(?!weight$)|^output\.bias$", name):
            raise GgufError(f"{gguf.path}: tensor {name!r} has no place in a mixture of experts")


def _check_matrix(gguf: Gguf, tensor: GgufTensor, recipe: Recipe) -> None:
    part = tensor.name.split(".")[2]
    first = gguf.tensors[f"blk.0.{part}.weight"]
    if tensor.n_dims != 2 or tensor.ne != first.ne:
        raise GgufError(
            f"{gguf.path}: tensor {tensor.name!r} is {_shape(tensor)}, that of layer 0 "
            f"{_shape(first)}: experts are equally wide in all layers"
        )
    if recipe.noise and tensor.type not in quants.QUANTIZABLE:
        known = ", ".join(t.label for t in quants.QUANTIZABLE)
        raise GgufError(
            f"{gguf.path}: tensor {tensor.name!r} is {tensor.type.label}, which cannot be "
            f"quantized after noise is added: leave --noise away, or use one of {known}"
        )


def _shape(tensor: GgufTensor) -> str:
    return "x".join(map(str, tensor.ne[: tensor.n_dims]))


# ---------------------------------------------------------------- metadata
def _pairs(gguf: Gguf, arch: str, family: Family, recipe: Recipe) -> dict[str, Stored]:
    """The dense model's keys under the new architecture's name, and those of experts."""
    pairs = {
        re.sub(rf"^{arch}\.", f"{family.arch}.", key): pair
        for key, pair in model_pairs(gguf).items()
    }
    width = gguf.tensors["blk.0.ffn_up.weight"].ne[1]
    u32 = partial(number, ValueType.UINT32)
    pairs["general.architecture"] = string(family.arch)
    pairs[f"{family.arch}.expert_count"] = u32(recipe.n_expert)
    pairs[f"{family.arch}.expert_used_count"] = u32(recipe.n_used)
    if family.arch == "llama":
        # Its experts are feed_forward_length wide, which may be one number per layer
        pairs["llama.feed_forward_length"] = u32(width)
    else:
        pairs[f"{family.arch}.expert_feed_forward_length"] = u32(width)
    label = gguf.metadata.get_str("general.size_label", "")
    if label:
        pairs["general.size_label"] = string(f"{recipe.n_expert}x{label}")
    return pairs


# ---------------------------------------------------------------- tensors
def _tensors(gguf: Gguf, arch: str, family: Family, recipe: Recipe) -> Iterator[NewTensor]:
    n_embd = gguf.metadata.get_int(f"{arch}.embedding_length")
    head_size = _head_size(gguf, arch, n_embd) if family.interleave else 0
    routed: set[str] = set()
    for tensor in gguf.tensors.values():
        layer, _, part = tensor.name.rpartition(".ffn_")
        if layer and part.removesuffix(".weight") in FEED_FORWARD:
            if layer not in routed:
                yield _router(f"{layer}.ffn_gate_inp.weight", n_embd, recipe)
                routed.add(layer)
            yield _experts(gguf, tensor, recipe)
        elif head_size and re.match(r"blk\.\d+\.attn_[qk]\.", tensor.name):
            chunks = partial(_interleaved, gguf, tensor, head_size)
            yield replace(copy_of(gguf, tensor), chunks=chunks)
        else:
            yield copy_of(gguf, tensor)


def _experts(gguf: Gguf, tensor: GgufTensor, recipe: Recipe) -> NewTensor:
    """The matrices of all experts in one tensor: [n_in, n_out, n_expert]."""

    def chunks() -> Iterator[bytes | memoryview]:
        deviation = recipe.noise * _deviation(gguf, tensor) if recipe.noise else 0.0
        for i in range(recipe.n_expert):
            if deviation:
                yield from _perturbed(gguf, tensor, deviation, [recipe.seed, i])
            else:
                yield from pieces(gguf, tensor)

    name = tensor.name.replace(".weight", "_exps.weight")
    ne = (*tensor.ne[:2], recipe.n_expert)
    return NewTensor(name, tensor.type, ne, tensor.nbytes * recipe.n_expert, chunks)


def _router(name: str, n_embd: int, recipe: Recipe) -> NewTensor:
    """Normal rows, [n_embd, n_expert]; a row's length tells how often its expert is chosen.

    A score is the product of a row with the normalized hidden state, so a longer row scores
    higher, and lower, than others: the expert in place r of a random order gets the length
    (r + 1) ** -skew.
    """

    def chunks() -> Chunks:
        random = np.random.default_rng([recipe.seed, zlib.crc32(name.encode())])
        rows = random.standard_normal((recipe.n_expert, n_embd)) / np.sqrt(n_embd)
        places = random.permutation(recipe.n_expert)
        rows *= (places[:, None] + 1.0) ** -recipe.skew
        return [rows.astype("<f4").tobytes()]

    ne = (n_embd, recipe.n_expert)
    return NewTensor(
        name, GGMLType.F32, ne, GGMLType.F32.row_size(n_embd) * recipe.n_expert, chunks
    )


# ---------------------------------------------------------------- noise
def _values(gguf: Gguf, tensor: GgufTensor) -> Iterator[npt.NDArray[np.float32]]:
    """The dequantized rows, some at a time."""
    row = tensor.type.row_size(tensor.ne[0])
    for piece in pieces(gguf, tensor, row * max(1, STEP // tensor.ne[0])):
        yield quants.dequantize(np.frombuffer(piece, np.uint8).reshape(-1, row), tensor.type)


def _deviation(gguf: Gguf, tensor: GgufTensor) -> float:
    """The standard deviation of a matrix."""
    count, total, squares = 0, 0.0, 0.0
    for x in _values(gguf, tensor):
        count += x.size
        total += float(x.sum(dtype=np.float64))
        squares += float(np.square(x, dtype=np.float64).sum())
    return float(np.sqrt(max(0.0, squares / count - (total / count) ** 2)))


def _perturbed(
    gguf: Gguf, tensor: GgufTensor, deviation: float, seed: list[int]
) -> Iterator[bytes]:
    random = np.random.default_rng([*seed, zlib.crc32(tensor.name.encode())])
    for x in _values(gguf, tensor):
        x += np.float32(deviation) * random.standard_normal(x.shape, np.float32)
        yield quants.quantize(x, tensor.type).tobytes()


# ---------------------------------------------------------------- rotation
def _head_size(gguf: Gguf, arch: str, n_embd: int) -> int:
    """Elements of a head, all of which must be rotated."""
    kv = gguf.metadata
    size = kv.get_int(f"{arch}.attention.key_length", 0)
    size = size or n_embd // kv.get_int(f"{arch}.attention.head_count")
    rotated = kv.get_int(f"{arch}.rope.dimension_count", size)
    if rotated != size or size % 2:
        raise GgufError(
            f"{gguf.path}: {arch}.rope.dimension_count is {rotated} and a head has {size}: "
            "only models whose heads are rotated wholly can be upcycled"
        )
    return size


def _interleaved(gguf: Gguf, tensor: GgufTensor, head_size: int) -> Chunks:
    """Rows i and i + head_size / 2 of every head become rows 2i and 2i + 1."""
    is_bias = tensor.n_dims == 1
    row = tensor.type.type_size if is_bias else tensor.type.row_size(tensor.ne[0])
    if tensor.nbytes % (row * head_size):
        raise GgufError(f"{gguf.path}: tensor {tensor.name!r} is not made of heads of {head_size}")
    raw = np.frombuffer(b"".join(pieces(gguf, tensor)), np.uint8)
    halves = raw.reshape(-1, 2, head_size // 2, row)
    return [halves.swapaxes(1, 2).tobytes()]
