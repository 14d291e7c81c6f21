"""What tensors a model wants, and the tensors it got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pyggml.llama.hparams import HParams
from pyggml.ops import Op
from pyggml.tensor import Tensor

INPUT, OUTPUT = -1, -2  # pseudo layers


@dataclass(frozen=True, slots=True)
class Want:
    """One tensor that an architecture reads from its file.

    `op` is the operation that uses it: a buffer type must support it (llama.cpp's probe).
    `duplicate_of` names the tensor whose data is used if this one is missing (tied output, or one
    for all layers),
    `unless` one that replaces it: a file that has that tensor needs this one no more. `checked`:
    its values must be numbers, --check-tensors or not.
    """

    name: str
    ne: tuple[int, ...]
    op: Op = Op.MUL_MAT
    required: bool = True
    layer: int = INPUT
    duplicate_of: str = ""
    unless: str = ""
    checked: bool = False


class Layer:
    """The weights of one block by their short names, e.g. layer["attn_q.weight"]."""

    def __init__(self, tensors: Mapping[str, Tensor], il: int) -> None:
        self._tensors = tensors
        self._prefix = f"blk.{il}."
        self.il = il

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(self._prefix + name)


class Weights:
    """All weights of a model by their GGUF names."""

    def __init__(self, tensors: Mapping[str, Tensor], n_layer: int) -> None:
        self.tensors = tensors
        self.layers = tuple(Layer(tensors, il) for il in range(n_layer))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def layer(self, il: int) -> Layer:
        """A layer by its number; `layers` are those that a graph is made of."""
        return Layer(self.tensors, il)


class WantList:
    """Collects wants: `layer.linear("attn_q", n_in, n_out, bias=...)` and the like."""

    def __init__(self) -> None:
        self.wants: list[Want] = []
        self.ignored: list[str] = []  # how names of tensors begin that are known and not used

    def __iter__(self) -> Iterator[Want]:
        return iter(self.wants)

    def add(
        self,
        name: str,
        *ne: int,
        op: Op,
        required: bool = True,
        layer: int = INPUT,
        unless: str = "",
        checked: bool = False,
    ) -> None:
        """One tensor."""
        self.wants.append(Want(name, ne, op, required, layer, unless=unless, checked=checked))

    def embeddings(self, n_embd: int, n_vocab: int) -> None:
        """token_embd, output_norm and the output, which may be tied to token_embd."""
        self.add("token_embd.weight", n_embd, n_vocab, op=Op.GET_ROWS)
        self.add("output_norm.weight", n_embd, op=Op.MUL, layer=OUTPUT)
        self.wants.append(
            Want("output.weight", (n_embd, n_vocab), layer=OUTPUT, duplicate_of="token_embd.weight")
        )

    def ignore_nextn(self, hp: HParams) -> None:
        """The layers that predict further tokens."""
        self.ignored += [f"blk.{hp.n_layer + i}." for i in range(hp.n_nextn)]

    def norm(
        self, il: int, name: str, n: int, *, required: bool = True, bias: bool = False
    ) -> None:
        """The weight of a norm, and with `bias` its bias."""
        self.add(f"blk.{il}.{name}.weight", n, op=Op.MUL, layer=il, required=required)
        if bias:
            self.add(f"blk.{il}.{name}.bias", n, op=Op.ADD, layer=il, required=required)

    def linear(
        self, il: int, name: str, n_in: int, n_out: int, *, bias: bool = False, unless: str = ""
    ) -> None:
        """A matrix, and with `bias` an optional bias; `unless` names a matrix that replaces it."""
        blk, unless = f"blk.{il}.{name}", unless and f"blk.{il}.{unless}.weight"
        self.add(f"{blk}.weight", n_in, n_out, op=Op.MUL_MAT, layer=il, unless=unless)
        if bias:
            self.add(f"{blk}.bias", n_out, op=Op.ADD, required=False, layer=il, unless=unless)

    def rope_factors(self, hp: HParams) -> None:
        """Optional per-frequency factors (Llama 3: rope_freqs; longrope: long and short).

        The file has one tensor for all layers; each layer gets its own, on the layer's device.
        """
        for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
            for il in range(hp.n_layer):
                own, ne = f"blk.{il}.{name}", (hp.n_rot // 2,)
                self.wants.append(
                    Want(own, ne, Op.ROPE, required=False, layer=il, duplicate_of=name)
                )

    def attention(self, il: int, hp: HParams, *, bias: bool = False, fused: bool = True) -> None:
        """attn_q, attn_k, attn_v and attn_output; with `fused` attn_qkv may replace three."""
        n_q = hp.n_embd_head_k * hp.n_head[il]
        n_k, n_v = hp.n_embd_k_gqa(il), hp.n_embd_v_gqa(il)
        n_out = hp.n_embd_head_v * hp.n_head[il]
        if fused:
            n_qkv, qkv = n_q + n_k + n_v, f"blk.{il}.attn_qkv"
            self.add(f"{qkv}.weight", hp.n_embd, n_qkv, op=Op.MUL_MAT, required=False, layer=il)
            if bias:
                self.add(f"{qkv}.bias", n_qkv, op=Op.ADD, required=False, layer=il)
        for name, n in (("attn_q", n_q), ("attn_k", n_k), ("attn_v", n_v)):
            self.linear(il, name, hp.n_embd, n, bias=bias, unless="attn_qkv")
        self.linear(il, "attn_output", n_out, hp.n_embd, bias=bias)

    def qk_norms(self, il: int, hp: HParams, *, rows: bool = False, required: bool = True) -> None:
        """attn_q_norm and attn_k_norm, as wide as a head or, with `rows`, as all heads together."""
        n_q, n_k = hp.n_embd_head_k, hp.n_embd_head_k
        if rows:
            n_q, n_k = n_q * hp.n_head[il], hp.n_embd_k_gqa(il)
        self.norm(il, "attn_q_norm", n_q, required=required)
        self.norm(il, "attn_k_norm", n_k, required=required)

    def ffn(self, il: int, n_embd: int, n_ff: int, *, bias: bool = False, suffix: str = "") -> None:
        """ffn_gate, ffn_up and ffn_down, or those with a suffix."""
        self.linear(il, f"ffn_gate{suffix}", n_embd, n_ff, bias=bias)
        self.linear(il, f"ffn_up{suffix}", n_embd, n_ff, bias=bias)
        self.linear(il, f"ffn_down{suffix}", n_ff, n_embd, bias=bias)

    def plain_ffn(self, il: int, n_embd: int, n_ff: int) -> None:
        """ffn_up and ffn_down with biases, and no gate."""
        self.linear(il, "ffn_up", n_embd, n_ff, bias=True)
        self.linear(il, "ffn_down", n_ff, n_embd, bias=True)

    def fused_ffn(self, il: int, n_embd: int, n_ff: int) -> None:
        """ffn_up that holds the gate and then the other half, and ffn_down."""
        self.linear(il, "ffn_up", n_embd, 2 * n_ff)
        self.linear(il, "ffn_down", n_ff, n_embd)
