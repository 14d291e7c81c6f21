"""Header-only GGUF files in the shapes of well-known models: as large as they are, without data.

Sizes, keys and types follow the published models and the usual Q4_K_M mixes (gpt-oss: MXFP4). The
vocabularies have the real number of entries, with invented texts: enough to plan, not to talk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from pyggml.dtypes import GGMLType
from pyggml.gguf_metadata import ValueType
from pyggml.gguf_writer import NewFile, NewTensor, Stored, number, string, write_files

Scalar: TypeAlias = int | float | bool | str
Row: TypeAlias = tuple[str, tuple[int, ...], GGMLType]  # name without ".weight", ne, type

F32, Q4, Q5, Q6, Q8 = (GGMLType[n] for n in ("F32", "Q4_K", "Q5_K", "Q6_K", "Q8_0"))
NARROW = {Q4: GGMLType.Q5_0, Q5: GGMLType.Q5_1, Q6: Q8}  # for rows that 256 does not divide
NORMAL, CONTROL = 1, 3  # types of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One model; `n_layer` (its block_count) may be made smaller with `dataclasses.replace`."""

    arch: str
    name: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_merges: int  # 0: an SPM vocabulary
    pre: str
    n_head: int
    n_head_kv: int
    head: int
    n_expert: int
    n_used: int
    n_ff_exp: int
    n_ff: int
    keys: Mapping[str, Scalar]  # below "<arch>."
    layer: Callable[[Shape, int], Iterator[Row]]
    ends: GGMLType = Q4  # type of token_embd

    def rows(self) -> Iterator[Row]:
        """All tensors."""
        out = Q6 if self.ends is Q4 else self.ends
        yield "token_embd", (self.n_embd, self.n_vocab), self.ends
        for il in range(self.n_layer):
            for name, ne, type_ in self.layer(self, il):
                yield f"blk.{il}.{name}", ne, type_
        yield "output_norm", (self.n_embd,), F32
        yield "output", (self.n_embd, self.n_vocab), out

    def more_bits(self, il: int) -> bool:
        """Whether a Q4_K_M file spends more bits on a layer's attn_v and ffn_down."""
        eighth = self.n_layer // 8
        return il < eighth or il >= 7 * self.n_layer // 8 or (il - eighth) % 3 == 2

    def down(self, il: int) -> GGMLType:
        return Q6 if self.more_bits(il) else Q4


# ---------------------------------------------------------------- parts of layers
def attention(s: Shape, q: GGMLType, k: GGMLType, v: GGMLType, o: GGMLType) -> Iterator[Row]:
    n_q, n_kv = s.n_head * s.head, s.n_head_kv * s.head
    yield "attn_norm", (s.n_embd,), F32
    yield "attn_q", (s.n_embd, n_q), q
    yield "attn_k", (s.n_embd, n_kv), k
    yield "attn_v", (s.n_embd, n_kv), v
    yield "attn_output", (n_q, s.n_embd), o


def biases(s: Shape, *names: str) -> Iterator[Row]:
    n_kv = s.n_head_kv * s.head
    width = {"attn_q": s.n_head * s.head, "attn_k": n_kv, "attn_v": n_kv, "attn_output": s.n_embd}
    for name in names:
        yield f"{name}.bias", (width[name],), F32


def dense(s: Shape, il: int, n_ff: int, suffix: str = "") -> Iterator[Row]:
    yield f"ffn_gate{suffix}", (s.n_embd, n_ff), Q4
    yield f"ffn_up{suffix}", (s.n_embd, n_ff), Q4
    yield f"ffn_down{suffix}", (n_ff, s.n_embd), s.down(il)


def expert_matrices(s: Shape, up: GGMLType, down: GGMLType) -> Iterator[Row]:
    yield "ffn_gate_inp", (s.n_embd, s.n_expert), F32
    yield "ffn_gate_exps", (s.n_embd, s.n_ff_exp, s.n_expert), up
    yield "ffn_up_exps", (s.n_embd, s.n_ff_exp, s.n_expert), up
    yield "ffn_down_exps", (s.n_ff_exp, s.n_embd, s.n_expert), down


# ---------------------------------------------------------------- layers
def mixtral_layer(s: Shape, il: int) -> Iterator[Row]:
    # of eight experts the attention is small: the mix spends more on it
    yield from attention(s, Q4, Q8, Q8, Q5)
    yield "ffn_norm", (s.n_embd,), F32
    yield from expert_matrices(s, Q4, s.down(il))


def qwen3moe_layer(s: Shape, il: int) -> Iterator[Row]:
    yield from attention(s, Q4, Q4, s.down(il), Q4)
    yield "attn_q_norm", (s.head,), F32
    yield "attn_k_norm", (s.head,), F32
    yield "ffn_norm", (s.n_embd,), F32
    yield from expert_matrices(s, Q4, s.down(il))


def gpt_oss_layer(s: Shape, il: int) -> Iterator[Row]:
    yield from attention(s, Q8, Q8, Q8, Q8)
    yield from biases(s, "attn_q", "attn_k", "attn_v", "attn_output")
    yield "attn_sinks", (s.n_head,), F32
    yield "post_attention_norm", (s.n_embd,), F32
    yield from expert_matrices(s, GGMLType.MXFP4, GGMLType.MXFP4)
    yield "ffn_gate_inp.bias", (s.n_expert,), F32
    for name, n in (("gate", s.n_ff_exp), ("up", s.n_ff_exp), ("down", s.n_embd)):
        yield f"ffn_{name}_exps.bias", (n, s.n_expert), F32


def glm4moe_layer(s: Shape, il: int) -> Iterator[Row]:
    yield from attention(s, Q4, Q4, s.down(il), Q4)
    yield from biases(s, "attn_q", "attn_k", "attn_v")
    yield "post_attention_norm", (s.n_embd,), F32
    if il < 1:
        yield from dense(s, il, s.n_ff)
    else:
        yield from expert_matrices(s, Q4, s.down(il))
        yield "exp_probs_b.bias", (s.n_expert,), F32
        yield from dense(s, il, s.n_ff_exp, "_shexp")
    if il == s.n_layer - 1:  # it predicts further tokens
        yield "nextn.eh_proj", (2 * s.n_embd, s.n_embd), Q4
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}", (s.n_embd,), F32
        for name in ("embed_tokens", "shared_head_head"):
            yield f"nextn.{name}", (s.n_embd, s.n_vocab), Q4


N_LORA_Q, N_LORA_KV, N_ROT, N_NOPE, N_HEAD_V = 1536, 512, 64, 128, 128


def deepseek_layer(s: Shape, il: int) -> Iterator[Row]:
    yield "attn_norm", (s.n_embd,), F32
    yield "attn_q_a", (s.n_embd, N_LORA_Q), Q4
    yield "attn_q_a_norm", (N_LORA_Q,), F32
    yield "attn_q_b", (N_LORA_Q, s.n_head * (N_NOPE + N_ROT)), Q4
    yield "attn_kv_a_mqa", (s.n_embd, N_LORA_KV + N_ROT), Q4
    yield "attn_kv_a_norm", (N_LORA_KV,), F32
    yield "attn_k_b", (N_NOPE, N_LORA_KV, s.n_head), Q4
    yield "attn_v_b", (N_LORA_KV, N_HEAD_V, s.n_head), Q4
    yield "attn_output", (s.n_head * N_HEAD_V, s.n_embd), Q4
    yield "ffn_norm", (s.n_embd,), F32
    if il < 3:
        yield from dense(s, il, s.n_ff)
    else:
        yield from expert_matrices(s, Q4, s.down(il))
        yield "exp_probs_b.bias", (s.n_expert,), F32
        yield from dense(s, il, s.n_ff_exp, "_shexp")


# ---------------------------------------------------------------- models
DEEPSEEK_KEYS: Mapping[str, Scalar] = {
    "context_length": 163840,
    "leading_dense_block_count": 3,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.q_lora_rank": N_LORA_Q,
    "attention.kv_lora_rank": N_LORA_KV,
    "attention.key_length": N_LORA_KV + N_ROT,
    "attention.value_length": N_LORA_KV,
    "attention.key_length_mla": N_NOPE + N_ROT,
    "attention.value_length_mla": N_HEAD_V,
    "rope.dimension_count": N_ROT,
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 8,
    "expert_group_used_count": 4,
}

SHAPES: Mapping[str, Shape] = {
    "deepseek-r1": Shape(
        arch="deepseek2",
        name="DeepSeek R1",
        n_layer=61,
        n_embd=7168,
        n_vocab=129280,
        n_merges=127741,
        pre="deepseek-v3",
        n_head=128,
        n_head_kv=1,
        head=N_LORA_KV + N_ROT,
        n_expert=256,
        n_used=8,
        n_ff_exp=2048,
        n_ff=18432,
        keys=DEEPSEEK_KEYS,
        layer=deepseek_layer,
    ),
    "mixtral-8x22b": Shape(
        arch="llama",
        name="Mixtral 8x22B v0.1",
        n_layer=56,
        n_embd=6144,
        n_vocab=32000,
        n_merges=0,
        pre="default",
        n_head=48,
        n_head_kv=8,
        head=128,
        n_expert=8,
        n_used=2,
        n_ff_exp=16384,
        n_ff=16384,
        keys={
            "context_length": 65536,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 128,
            "rope.freq_base": 1e6,
        },
        layer=mixtral_layer,
    ),
    "qwen3-30b-a3b": Shape(
        arch="qwen3moe",
        name="Qwen3 30B A3B",
        n_layer=48,
        n_embd=2048,
        n_vocab=151936,
        n_merges=151387,
        pre="qwen2",
        n_head=32,
        n_head_kv=4,
        head=128,
        n_expert=128,
        n_used=8,
        n_ff_exp=768,
        n_ff=6144,
        keys={
            "context_length": 40960,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "rope.freq_base": 1e6,
        },
        layer=qwen3moe_layer,
    ),
    "gpt-oss-120b": Shape(
        arch="gpt-oss",
        name="gpt-oss 120B",
        n_layer=36,
        n_embd=2880,
        n_vocab=201088,
        n_merges=446189,
        pre="gpt-4o",
        n_head=64,
        n_head_kv=8,
        head=64,
        n_expert=128,
        n_used=4,
        n_ff_exp=2880,
        n_ff=2880,
        keys={
            "context_length": 131072,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.sliding_window": 128,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        layer=gpt_oss_layer,
        ends=Q8,
    ),
    "glm-4.5-air": Shape(
        arch="glm4moe",
        name="GLM 4.5 Air",
        n_layer=47,  # the last predicts further tokens
        n_embd=4096,
        n_vocab=151552,
        n_merges=318088,
        pre="glm4",
        n_head=96,
        n_head_kv=8,
        head=128,
        n_expert=128,
        n_used=8,
        n_ff_exp=1408,
        n_ff=10944,
        keys={
            "context_length": 131072,
            "nextn_predict_layers": 1,
            "leading_dense_block_count": 1,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "rope.dimension_count": 64,
            "rope.freq_base": 1e6,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
        layer=glm4moe_layer,
    ),
}


# ---------------------------------------------------------------- files
def write_header(path: Path, shape: str | Shape) -> Path:
    """Write the header of a model (one of SHAPES, or a changed one) to `path`; returns `path`."""
    s = SHAPES[shape] if isinstance(shape, str) else shape
    tensors = [_tensor(*row) for row in s.rows()]
    write_files([NewFile(path, _metadata(s), tensors, has_data=False)])
    return path


def _tensor(name: str, ne: tuple[int, ...], type_: GGMLType) -> NewTensor:
    if ne[0] % type_.block_size:
        type_ = NARROW[type_]
    nbytes = type_.row_size(ne[0])
    for n in ne[1:]:
        nbytes *= n
    name = name if name.endswith(".bias") else f"{name}.weight"
    return NewTensor(name, type_, ne, nbytes, tuple)


def _metadata(s: Shape) -> dict[str, Stored]:
    keys: dict[str, Scalar] = {
        "block_count": s.n_layer,
        "embedding_length": s.n_embd,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "expert_count": s.n_expert,
        "expert_used_count": s.n_used,
        "vocab_size": s.n_vocab,
        **s.keys,
    }
    if s.n_ff_exp != s.n_ff or s.arch == "gpt-oss":
        keys["expert_feed_forward_length"] = s.n_ff_exp
    pairs: dict[str, Scalar] = {
        "general.architecture": s.arch,
        "general.name": s.name,
        "general.file_type": 15 if s.ends is Q4 else 38,
        **{f"{s.arch}.{key}": value for key, value in keys.items()},
    }
    return {key: _stored(value) for key, value in pairs.items()} | _vocabulary(s)


def _stored(value: Scalar) -> Stored:
    if isinstance(value, str):
        return string(value)
    if isinstance(value, bool):
        return number(ValueType.BOOL, value)
    return number(ValueType.UINT32 if isinstance(value, int) else ValueType.FLOAT32, value)


def _vocabulary(s: Shape) -> dict[str, Stored]:
    key = "tokenizer.ggml."
    types = struct.pack(f"<{s.n_vocab}i", *[CONTROL] * 3, *[NORMAL] * (s.n_vocab - 3))
    pairs = {
        f"{key}model": string("gpt2" if s.n_merges else "llama"),
        f"{key}pre": string(s.pre),
        f"{key}tokens": _strings("t", s.n_vocab),
        f"{key}token_type": _array(ValueType.INT32, s.n_vocab, types),
        f"{key}bos_token_id": number(ValueType.UINT32, 1),
        f"{key}eos_token_id": number(ValueType.UINT32, 2),
    }
    if s.n_merges:
        pairs[f"{key}merges"] = _strings("t ", s.n_merges)
    else:
        pairs[f"{key}scores"] = _array(ValueType.FLOAT32, s.n_vocab, bytes(4 * s.n_vocab))
    return pairs


def _array(type_: ValueType, n: int, raw: bytes) -> Stored:
    return Stored(ValueType.ARRAY, struct.pack("<IQ", type_, n) + raw)


@cache
def _strings(prefix: str, n: int) -> Stored:
    texts: Sequence[bytes] = [f"{prefix}{i:06d}".encode() for i in range(n)]
    raw = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    return _array(ValueType.STRING, n, raw)
