"""Tiny random GGUF models, one row per architecture: a fixed seed gives a fixed file.

No two dimensions of a model are equal, so that a transposed or swapped shape is seen. The gains
make hidden states, attention scores and logits about as spread as in a trained model: a wrong
scale, mask or rope is then visible in the output distribution.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ggml_oracle import base, ggml_quantize_file
from numpy.typing import NDArray
from tiny_arch import (
    ATTENTION,
    DENSE,
    EXPERT_SPREAD,
    FUSED,
    FUSED_SHAPES,
    GAINS,
    GRANITE,
    GRANITE_GAINS,
    HEAD_NORMS,
    LONGROPE,
    LONGROPE_KEYS,
    POST_NORMS,
    QKV_BIAS,
    SHAPES,
    TIED,
    TOP_ONLY,
    UNTIED,
    YARN,
    Arch,
    Scalar,
)
from tiny_latent import LATENT_ARCHS, LATENT_VARIANTS
from tiny_linear import LINEAR_ARCHS, LINEAR_SIZES, LINEAR_VARIANTS, linear_keys, linear_sizes
from tiny_moe import MOE_ARCHS, MOE_VARIANTS
from tiny_tokens import VOCABS

from pyggml.dtypes import GGMLType

# Rows of K-quants are multiples of 256; the other types have blocks of 32 at most.
SMALL = {"n_embd": 128, "n_head": 6, "n_head_kv": 2, "head_dim": 32, "n_ff": 160}
SMALL |= {"n_expert": 12, "n_ff_exp": 96, "n_ff_shexp": 224}
WIDE = {"n_embd": 256, "n_head": 8, "n_head_kv": 2, "head_dim": 64, "n_ff": 768}
WIDE |= {"n_expert": 12, "n_ff_exp": 512, "n_ff_shexp": 1024}
SMALL |= LINEAR_SIZES
WIDE |= {**LINEAR_SIZES, "n_state": 32, "n_state_k": 5, "n_state_v": 40}

BIASES = (*QKV_BIAS, "attn_norm.bias", "attn_output.bias", "ffn_up.bias", "ffn_down.bias")
LAYER_NORM: dict[str, Scalar] = {"attention.layer_norm_epsilon": 1e-5}

ARCHS = {
    "llama": Arch("llama-bpe", UNTIED, DENSE, {"rope.freq_base": 5e5}),
    "qwen2": Arch("qwen2", UNTIED, (*DENSE, *QKV_BIAS), {"rope.freq_base": 1e6}, square=True),
    "qwen3": Arch("qwen2", UNTIED, (*DENSE, *HEAD_NORMS), {"rope.freq_base": 1e6}),
    **LATENT_ARCHS,
    **MOE_ARCHS,
    **LINEAR_ARCHS,
    # a window and a pattern that prompts of 33 tokens and 4 layers reach; as in Gemma 3 4B, only
    # the full layers scale their positions
    "gemma3": Arch(
        "spm",
        TIED,
        (*DENSE, *HEAD_NORMS, *POST_NORMS),
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": 3,
        },
        n_layer=4,
        # the scaled embedding would outweigh the layers, and each token predict itself
        gains={"token_embd": 0.5, "output_norm": 4.0},
    ),
    "phi3": Arch(
        "spm",
        UNTIED,
        FUSED,
        {"rope.scaling.attn_factor": 1.2, "attention.sliding_window": 16},
        square=True,
        shapes=FUSED_SHAPES,
    ),
    "gemma2": Arch(
        "spm",
        TIED,
        (*DENSE, *POST_NORMS),
        {"attention.sliding_window": 16},
        n_layer=3,
        gains={"token_embd": 0.5, "output_norm": 4.0},
    ),
    "glm4": Arch(
        "glm4",
        UNTIED,
        ("ffn_norm", *ATTENTION, *QKV_BIAS, *POST_NORMS, "ffn_up", "ffn_down"),
        {"rope.dimension_count": 20},
        shapes=FUSED_SHAPES,
    ),
    "mistral3": Arch("tekken", UNTIED, DENSE, {"rope.freq_base": 1e6}),
    "smollm3": Arch("smaug-bpe", TIED, DENSE, {"rope.freq_base": 5e6}, n_layer=5),
    "olmo2": Arch(
        "dbrx",
        UNTIED,
        (*ATTENTION[1:], *HEAD_NORMS, *DENSE[-3:], *POST_NORMS),
        {"rope.freq_base": 5e5},
        n_layer=3,
        square=True,
        shapes={"attn_q_norm": ("n_q",), "attn_k_norm": ("n_kv",)},
    ),
    "gemma": Arch("spm", TIED, DENSE, {}, gains={"token_embd": 0.3, "output_norm": 6.0}),
    "internlm2": Arch("spm", UNTIED, DENSE, {}, square=True),
    "exaone": Arch("refact", UNTIED, (*DENSE, *QKV_BIAS), {}),
    "starcoder2": Arch(
        "refact",
        (*UNTIED, "output_norm.bias"),
        (*ATTENTION, *BIASES, *DENSE[5:6], "ffn_norm.bias", "ffn_up", "ffn_down"),
        LAYER_NORM,
        square=True,
    ),
    "phi2": Arch(
        "refact",
        (*UNTIED, "output_norm.bias", "output.bias"),
        (*ATTENTION, *BIASES, "ffn_up", "ffn_down"),
        {**LAYER_NORM, "rope.dimension_count": 20},
        square=True,
    ),
    "command-r": Arch(
        "glm4",
        TIED,
        (*ATTENTION, *DENSE[-3:]),
        {**LAYER_NORM, "logit_scale": 0.5},
        square=True,
        gains={"token_embd": 0.5, "output_norm": 8.0},
    ),
    "granite": Arch(
        "refact",
        TIED,
        DENSE,
        GRANITE,
        gains=GRANITE_GAINS,
    ),
}

# Architectures with a GELU, which in ggml's CPU code is a table of F16 values.
TABLE_GELU = ("gemma", "gemma2", "gemma3", "phi2", "starcoder2")

# name -> architecture and the arguments of write_tiny that make it
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHS},
    "llama-rope_freqs": ("llama", {"extra": ("rope_freqs",)}),
    "llama-tied": ("llama", {"omit": ("output",)}),
    "llama-biases": ("llama", {"extra": (*QKV_BIAS, "attn_output.bias")}),
    "llama-attn_qkv": ("llama", {"extra": ("attn_qkv", "attn_qkv.bias"), "omit": ATTENTION[1:4]}),
    "qwen3-attn_qkv": ("qwen3", {"extra": ("attn_qkv",), "omit": ATTENTION[1:4]}),
    "phi3-short": ("phi3", {"extra": LONGROPE, "metadata": LONGROPE_KEYS}),
    "phi3-long": (
        "phi3",
        {
            "extra": LONGROPE,
            "metadata": {**LONGROPE_KEYS, "rope.scaling.original_context_length": 64},
        },
    ),
    "phi3-partial": ("phi3", {"metadata": {"rope.dimension_count": 24}}),
    "phi3-separate": ("phi3", {"extra": (*ATTENTION[1:4], *QKV_BIAS), "omit": ("attn_qkv",)}),
    "gemma2-caps": (
        "gemma2",
        {
            "metadata": {
                "rope.scaling.factor": 4.0,
                "rope.freq_base_swa": 1e3,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0,
                "attention.sliding_window_pattern": 3,
            }
        },
    ),
    "glm4-tied": ("glm4", {"omit": ("output", *QKV_BIAS)}),
    "glm4-attn_qkv": ("glm4", {"extra": ("attn_qkv",), "omit": (*ATTENTION[1:4], *QKV_BIAS)}),
    "mistral3-yarn": ("mistral3", {"metadata": {**YARN, "attention.temperature_scale": 0.5}}),
    "mistral3-yarn_log": (
        "mistral3",
        {
            "metadata": {
                **YARN,
                "rope.scaling.original_context_length": 1024,
                "rope.scaling.yarn_log_multiplier": 0.7,
                "rope.scaling.yarn_beta_fast": 8.0,
                "rope.scaling.yarn_beta_slow": 0.5,
            }
        },
    ),
    "smollm3-attn_qkv": ("smollm3", {"extra": ("attn_qkv",), "omit": ATTENTION[1:4]}),
    "olmo2-window": (
        "olmo2",
        {
            "metadata": {
                **YARN,
                "attention.sliding_window": 16,
                "attention.sliding_window_pattern": 2,
            }
        },
    ),
    "granite-unrotated": ("granite", {"metadata": {"rope.scaling.finetuned": False}}),
    "granite-unscaled": (
        "granite",
        {
            "extra": (*QKV_BIAS, "ffn_gate.bias"),
            "metadata": dict.fromkeys(
                ("embedding_scale", "residual_scale", "attention.scale"), 0.0
            ),
        },
    ),
    **LATENT_VARIANTS,
    **MOE_VARIANTS,
    **LINEAR_VARIANTS,
    "gemma3-softcap": ("gemma3", {"metadata": {"final_logit_softcapping": 4.0}}),
}


def write_tiny(
    path: Path,
    arch: str,
    *,
    weight_type: str = "F32",
    seed: int = 0,
    extra: tuple[str, ...] = (),
    omit: tuple[str, ...] = (),
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Scalar] | None = None,
    **dims: int | str,
) -> Path:
    """Write a random model of `arch` with matrices of `weight_type` to `path`; returns `path`.

    `extra` and `omit` change the tensors of the row ("blk.0.ffn_up": of one layer), `types` gives
    single matrices another type (by name, "blk.0.ffn_down" or "ffn_down"), `metadata` sets
    "<arch>." keys (the name of a dimension stands for its size) and `dims` replaces dimensions
    such as n_layer (by a number, or by others: "3*n_ff_exp").
    """
    row, types = ARCHS[arch], types or {}
    vocab = VOCABS[row.vocab]()
    size = dimensions(row, {weight_type, *types.values()}, len(vocab.tokens), dims)
    writer = gguf.GGUFWriter(path, arch)
    add = functools.partial(add_metadata, writer)
    keys = {**common_metadata(size), **(expert_metadata(size) if row.has_experts else {})}
    keys |= {**(linear_keys(size) if row.linear else {}), **row.metadata, **(metadata or {})}
    keys = {k: size.get(v, v) if isinstance(v, str) else v for k, v in keys.items()}
    size["n_rot"] = int(keys["rope.dimension_count"])
    for key, value in keys.items():
        if value is not None:
            add(f"{arch}.{key}", value)
    for key, value in vocab.metadata.items():
        add(f"tokenizer.{key}", value)
    for name in tensor_names(row, size["n_layer"], extra, omit):
        stem = name.removesuffix(".weight")
        chosen = types.get(stem, types.get(stem.split(".")[-1], weight_type))
        add_tensor(writer, name, random_tensor(name, row, size, seed), chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dimensions(
    row: Arch, types: set[str], n_vocab: int, chosen: Mapping[str, int | str]
) -> dict[str, int]:
    """All sizes that shapes are made of."""
    block = max(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0] for name in types)
    size = {"n_layer": row.n_layer, **(WIDE if block > 32 else SMALL)}
    if unknown := chosen.keys() - size.keys():
        raise ValueError(f"unknown dimension {sorted(unknown)}; there are {sorted(size)}")
    size |= {name: n for name, n in chosen.items() if isinstance(n, int)}
    if row.square:
        size["n_head"] = size["n_embd"] // size["head_dim"]
    rules = {name: rule for name, rule in chosen.items() if isinstance(rule, str)}
    for name, rule in {**row.sizes, **rules}.items():
        factor, _, other = rule.rpartition("*")
        size[name] = int(factor or 1) * (size[other] if other in size else int(other))
    size["n_q"] = size["n_head"] * size["head_dim"]
    size["n_kv"] = size["n_head_kv"] * size["head_dim"]
    size["n_qkv"] = size["n_q"] + 2 * size["n_kv"]
    size["n_gate_up"] = 2 * size["n_ff"]
    size["n_embd_twice"] = 2 * size["n_embd"]
    size["n_gate_up_exps"] = 2 * size["n_ff_exp"]
    size["n_attn_out"] = size["n_head"] * size.get("n_head_v", size["head_dim"])
    if "n_lora_kv" in size:
        size["n_latent"] = size["n_lora_kv"] + size["n_rot"]
        size["n_kv_b"] = size["n_head"] * (size["n_nope"] + size["n_head_v"])
    return {**size, **linear_sizes(size), "n_vocab": n_vocab}


def common_metadata(size: Mapping[str, int]) -> dict[str, Scalar]:
    """The keys that every architecture has."""
    return {
        "vocab_size": size["n_vocab"],
        "context_length": 4096,
        "embedding_length": size["n_embd"],
        "block_count": size["n_layer"],
        "feed_forward_length": size["n_ff"],
        "attention.head_count": size["n_head"],
        "attention.head_count_kv": size["n_head_kv"],
        "attention.key_length": size["head_dim"],
        "attention.value_length": size["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": size["head_dim"],
    }


def expert_metadata(size: Mapping[str, int]) -> dict[str, Scalar]:
    """The keys of mixtures of experts."""
    return {
        "expert_count": size["n_expert"],
        "expert_used_count": 3,
        "expert_feed_forward_length": size["n_ff_exp"],
        "expert_shared_feed_forward_length": size["n_ff_shexp"],
    }


def tensor_names(
    row: Arch, n_layer: int, extra: tuple[str, ...], omit: tuple[str, ...]
) -> Iterator[str]:
    """Full names in the order of the file."""
    once = [part for part in extra if part in TOP_ONLY or part.startswith("blk.")]
    top = (*row.top, *once)
    layer = (*row.layer, *(part for part in extra if part not in once))
    first = (*(row.first or row.layer), *layer[len(row.layer) :])
    layers = [first, *[layer] * (n_layer - 1)]
    if row.linear:
        linear = (*row.linear, *layer[len(row.layer) :])
        layers = [layer if (il + 1) % 3 == 0 else linear for il in range(n_layer)]
    for prefix, parts in (("", top), *((f"blk.{il}.", layers[il]) for il in range(n_layer))):
        for part in parts:
            if part not in omit:
                is_whole = part.endswith((".bias", ".scale")) or part == "ssm_a"
                yield prefix + (part if is_whole else f"{part}.weight")


def random_tensor(name: str, row: Arch, size: Mapping[str, int], seed: int) -> NDArray[np.float32]:
    """Values that depend on the seed and the name only, not on the other tensors of the model."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    part = re.sub(r"\.(weight|bias|scale)$", "", name).split(".")[-1]
    if part in TOP_ONLY:
        return rope_factors(part, size["n_rot"] // 2)
    if part.isdigit():  # of one expert: ffn_up.3
        part = name.split(".")[-3]
    gain = {**GAINS, **row.gains}.get(part, 1.0)
    shape = [size[dim] for dim in reversed({**SHAPES, **row.shapes}[part])]
    if name.endswith(".bias"):
        gain = 0.1 if part == "exp_probs_b" else 0.3  # the balance does not decide alone
        values = gain * random.standard_normal(shape[:-1] or shape)
    elif name.endswith(".scale"):
        values = 1 + 0.3 * random.standard_normal(shape[:1])
    elif part == "ssm_a":  # states remember some ten tokens
        values = -random.uniform(0.05, 0.5, shape)
    elif part.endswith("norm"):
        values = gain * (1 + 0.1 * random.standard_normal(shape))
    else:
        values = gain / math.sqrt(shape[-1]) * random.standard_normal(shape)
    if part.endswith("_exps"):
        values = values[:1] + EXPERT_SPREAD * (values - values[:1])
    return values.astype(np.float32)


def rope_factors(name: str, n_pairs: int) -> NDArray[np.float32]:
    """Divisors of the rope frequencies.

    rope_freqs as in Llama 3.1: 1 for fast pairs, 8 for slow ones; Phi's grow for all, the short
    ones less.
    """
    if name == "rope_freqs":
        return np.clip(np.linspace(-3, 12, n_pairs), 1, 8).astype(np.float32)
    return np.linspace(1.1, 20 if name == "rope_factors_long" else 3, n_pairs).astype(np.float32)


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Scalar | list[Any]) -> None:
    """Add one key with the GGUF type that llama.cpp wants for such a value."""
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def add_tensor(
    writer: gguf.GGUFWriter, name: str, data: NDArray[np.float32], type_name: str
) -> None:
    """Add one tensor; vectors, biases, routers and convolutions stay F32, as in real models.

    Rows that are no whole number of blocks become Q8_0.
    """
    if data.shape[-1] % GGMLType[type_name].block_size:
        type_name = "Q8_0"
    small = (".bias", "ffn_gate_inp", "ssm_conv1d")
    is_small = data.ndim == 1 or any(part in name for part in small)
    if is_small or type_name == "F32":
        writer.add_tensor(name, data)
    else:
        raw_dtype = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, quantize(data, GGMLType[type_name]), raw_dtype=raw_dtype)


def quantize(data: NDArray[np.float32], kind: GGMLType) -> NDArray[np.uint8]:
    """Rows of `data` as ggml itself quantizes them: `gguf` cannot write K-quants.

    Types that demand an importance matrix get one that finds all columns equally important.
    """
    *outer, n_in = data.shape
    needs_importance = base().ggml_quantize_requires_imatrix(kind)
    importance = np.ones(n_in, np.float32) if needs_importance else None
    return ggml_quantize_file(data.reshape(-1, n_in), kind, importance).reshape(*outer, -1)
