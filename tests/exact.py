"""The yardstick: what a GGUF model computes, without rounding, in NumPy.

Weights are dequantized by the `gguf` package to the float32 values that the file means; all
arithmetic on them is float64, nothing is quantized or cached on the way, and a prompt is one
matrix [n_tokens, n_embd]. Shares no code with pyggml.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]
Elementwise = Callable[[F64], F64]
Rotation = Callable[[F64, F64], F64]


def log_softmax(logits: NDArray[np.floating[Any]]) -> F64:
    """Log-probabilities of the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: F64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def kl(logp: NDArray[np.floating[Any]], logq: NDArray[np.floating[Any]]) -> F64:
    """KL divergence of q from p along the last axis, in nats; logits or log-probabilities."""
    logp, logq = log_softmax(logp), log_softmax(logq)
    possible = np.isfinite(logp)
    terms = np.where(possible, np.exp(logp) * (np.where(possible, logp, 0) - logq), 0)
    result: F64 = terms.sum(axis=-1)
    return result


def silu(x: F64) -> F64:
    """x * sigmoid(x)."""
    result: F64 = x / (1 + np.exp(-x))
    return result


def gelu(x: F64) -> F64:
    """The tanh approximation of GELU, which is the one that GGUF models mean."""
    result: F64 = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def gelu_from_table(x: F64) -> F64:
    """GELU as ggml's CPU code computes it: looked up by the F16 value of x, kept as F16.

    Outside -10 < x < 10 it is 0 or x itself.
    """
    inside = gelu(x.astype(np.float16).astype(np.float64)).astype(np.float16)
    return np.where(x <= -10, 0, np.where(x >= 10, x, inside))


def rotate_adjacent(x: F64, angles: F64) -> F64:
    """Turn each pair (x[2i], x[2i+1]) of x [n_tokens, n_head, d] by angles [n_tokens, n_pairs]."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    n_rot = 2 * angles.shape[-1]
    out = x.copy()
    first, second = x[..., 0:n_rot:2], x[..., 1:n_rot:2]
    out[..., 0:n_rot:2] = first * cos - second * sin
    out[..., 1:n_rot:2] = first * sin + second * cos
    return out


def rotate_halves(x: F64, angles: F64) -> F64:
    """Turn each pair (x[i], x[n_pairs+i]), as `rotate_adjacent` does the adjacent ones."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    n_pairs = angles.shape[-1]
    out = x.copy()
    first, second = x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs]
    out[..., :n_pairs] = first * cos - second * sin
    out[..., n_pairs : 2 * n_pairs] = first * sin + second * cos
    return out


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture does that its file does not say."""

    rotate: Rotation
    activation: Elementwise = silu
    scaled_embedding: bool = False  # token embeddings times sqrt(n_embd)
    window_pattern: int = 1  # the last of so many layers sees all tokens, the others a window


FAMILIES = {
    "llama": Family(rotate_adjacent),
    "qwen2": Family(rotate_halves),
    "qwen3": Family(rotate_halves),
    "gemma3": Family(rotate_halves, gelu, scaled_embedding=True, window_pattern=6),
}


def knows(arch: str, options: Mapping[str, Any]) -> bool:
    """Whether `Exact` computes a row of tiny.VARIANTS: no experts."""
    return arch in FAMILIES and "ffn_gate_inp" not in options.get("extra", ())


class Exact:
    """One model file; each weight is dequantized when first used and kept."""

    def __init__(self, path: Path, activation: Elementwise | None = None) -> None:
        """`activation` replaces the one of the architecture."""
        reader = Reader(path)
        self.stored = {tensor.name: tensor for tensor in reader.tensors}
        self._weights: dict[str, F32] = {}
        self._keys = reader.fields
        self.arch = str(self._keys["general.architecture"].contents())
        self.family = FAMILIES[self.arch]
        self.activation = activation or self.family.activation
        self.n_layer = int(self.key("block_count"))
        self.n_head = int(self.key("attention.head_count"))
        self.n_head_kv = int(self.key("attention.head_count_kv", self.n_head))
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))

    def key(self, name: str, default: Any = None) -> Any:
        """The value of "<arch>.<name>" in the file."""
        found = self._keys.get(f"{self.arch}.{name}")
        return default if found is None else found.contents()

    def weight(self, name: str) -> F32:
        """Values of a tensor, outputs first: [n_out, n_in] or [n]."""
        if name not in self._weights:
            tensor = self.stored[name]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            self._weights[name] = values.astype(np.float32)
        return self._weights[name]

    def logits(self, ids: Sequence[int]) -> F64:
        """[n_tokens, n_vocab]: the logits after each token."""
        x = self.weight("token_embd.weight")[np.asarray(ids)].astype(np.float64)
        if self.family.scaled_embedding:
            x *= math.sqrt(x.shape[-1])
        for il in range(self.n_layer):
            x += self.normed(self.attention(x, il), f"blk.{il}.post_attention_norm")
            x += self.normed(self.feed_forward(x, il), f"blk.{il}.post_ffw_norm")
        x = self.normed(x, "output_norm")
        out = self.linear(x, "output" if "output.weight" in self.stored else "token_embd")
        cap = self.key("final_logit_softcapping")
        return out if cap is None else cap * np.tanh(out / cap)

    def attention(self, x: F64, il: int) -> F64:
        """What the tokens read from each other: [n_tokens, n_embd]."""
        blk, n_tokens = f"blk.{il}", len(x)
        x = self.normed(x, f"{blk}.attn_norm")
        counts = (self.n_head, self.n_head_kv, self.n_head_kv)
        if f"{blk}.attn_qkv.weight" in self.stored:
            heads = self.linear(x, f"{blk}.attn_qkv").reshape(n_tokens, sum(counts), -1)
            q, k, v = np.split(heads, np.cumsum(counts)[:-1], axis=1)
        else:
            q, k, v = (
                self.linear(x, f"{blk}.attn_{name}").reshape(n_tokens, n, -1)
                for name, n in zip("qkv", counts, strict=True)
            )
        angles = self.angles(n_tokens, q.shape[-1], il)
        q = self.family.rotate(self.normed(q, f"{blk}.attn_q_norm"), angles)
        k = self.family.rotate(self.normed(k, f"{blk}.attn_k_norm"), angles)
        mixed = attend(q, k, v, self.visible(n_tokens, il))
        return self.linear(mixed.reshape(n_tokens, -1), f"{blk}.attn_output")

    def feed_forward(self, x: F64, il: int) -> F64:
        """The gated MLP of a layer: [n_tokens, n_embd]."""
        blk = f"blk.{il}"
        x = self.normed(x, f"{blk}.ffn_norm")
        gate = self.activation(self.linear(x, f"{blk}.ffn_gate"))
        return self.linear(gate * self.linear(x, f"{blk}.ffn_up"), f"{blk}.ffn_down")

    def normed(self, x: F64, name: str) -> F64:
        """Rows at unit root-mean-square times the weight; x if the model has no such norm."""
        if f"{name}.weight" not in self.stored:
            return x
        scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        result: F64 = x * scale * self.weight(f"{name}.weight")
        return result

    def linear(self, x: F64, name: str) -> F64:
        """x times a weight, plus its bias if there is one: [n_tokens, n_out]."""
        w = self.weight(f"{name}.weight")
        # in pieces, so that float64 copies of a big vocabulary matrix stay small
        step = 1 << 14
        parts = [x @ w[i : i + step].T.astype(np.float64) for i in range(0, len(w), step)]
        out = np.concatenate(parts, axis=1)
        return out + self.weight(f"{name}.bias") if f"{name}.bias" in self.stored else out

    def is_windowed(self, il: int) -> bool:
        """Whether a layer sees a window of the last tokens only."""
        pattern = int(self.key("attention.sliding_window_pattern", self.family.window_pattern))
        return il % pattern < pattern - 1

    def visible(self, n_tokens: int, il: int) -> NDArray[np.bool_]:
        """[n_tokens, n_tokens]: which earlier tokens (columns) a token sees, itself included."""
        distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        window = self.key("attention.sliding_window") if self.is_windowed(il) else n_tokens
        return (distance >= 0) & (distance < window)

    def angles(self, n_tokens: int, head_dim: int, il: int) -> F64:
        """[n_tokens, n_pairs]: how far rope turns each pair of a head at each position."""
        assert self.key("rope.scaling.type", "linear") == "linear"
        n_rot = int(self.key("rope.dimension_count", head_dim))
        base, factor = self.key("rope.freq_base", 1e4), self.key("rope.scaling.factor", 1.0)
        if self.is_windowed(il):
            base, factor = self.key("rope.freq_base_swa", 1e4), 1.0
        frequencies = base ** (-np.arange(0, n_rot, 2) / n_rot) / factor
        if "rope_freqs.weight" in self.stored:
            frequencies = frequencies / self.weight("rope_freqs.weight")
        result: F64 = np.arange(n_tokens)[:, None] * frequencies
        return result


def attend(q: F64, k: F64, v: F64, visible: NDArray[np.bool_]) -> F64:
    """Softmax attention: q [n_tokens, n_head, d], k and v [n_tokens, n_head_kv, d] -> as q."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    weights = np.exp(log_softmax(np.where(visible, scores, -np.inf)))
    result: F64 = np.einsum("hqk,khd->qhd", weights, v)
    return result


class Reader(gguf.GGUFReader):
    """Steps over long arrays: a vocabulary takes the base class seconds, and no tensor needs it."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        view, is_array = self.data.data, raw_type == gguf.GGUFValueType.ARRAY
        kind, count = struct.unpack_from("<IQ", view, orig_offs) if is_array else (0, 0)
        if count < 1000:
            return super()._get_field_parts(orig_offs, raw_type)
        end = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", view, end)[0]
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]
