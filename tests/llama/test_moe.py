"""Mixtures of experts: every option of the builder against a plain formula, nodes and models
against real llama.cpp, and files that lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from divergence import prompt
from exact import gelu, kl, silu
from numpy.typing import NDArray
from op_case import Case, Leafs, place
from oracle import LlamaCpp
from tiny import VARIANTS, write_tiny
from tiny_arch import DENSE, ROUTED
from tiny_llama import DEVICE, corrupt, keys, metadata
from tiny_llama import hparams as small_hparams
from tiny_moe import MOE_ARCHS

from pyggml.backends.cpu.device import CpuDevice
from pyggml.errors import ModelError
from pyggml.llama import architectures, load
from pyggml.llama.builder import Builder, GraphShape
from pyggml.llama.hparams import Experts, Gating
from pyggml.llama.kv_cache import Memory
from pyggml.llama.moe import Activation, moe_ffn
from pyggml.llama.weights import Layer
from pyggml.tensor import Tensor

Array = NDArray[np.float64]
N_EMBD, N_FF, N_SHARED, N_EXPERT, N_TOKENS, IL = 16, 10, 6, 12, 7, 1
SHAPES = {
    "ffn_gate_inp": (N_EMBD, N_EXPERT),
    "ffn_gate_exps": (N_EMBD, N_FF, N_EXPERT),
    "ffn_up_exps": (N_EMBD, N_FF, N_EXPERT),
    "ffn_gate_up_exps": (N_EMBD, 2 * N_FF, N_EXPERT),
    "ffn_down_exps": (N_FF, N_EMBD, N_EXPERT),
    "ffn_gate_shexp": (N_EMBD, N_SHARED),
    "ffn_up_shexp": (N_EMBD, N_SHARED),
    "ffn_down_shexp": (N_SHARED, N_EMBD),
    "ffn_gate_inp_shexp": (N_EMBD,),
    "exp_probs_b": (N_EMBD, N_EXPERT),  # there is only its bias
}
ROUTER, SHARED = ("ffn_gate_inp",), ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
GATED = (*ROUTER, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
UNGATED = (*ROUTER, "ffn_up_exps", "ffn_down_exps")
MERGED = (*ROUTER, "ffn_gate_up_exps", "ffn_down_exps")


# ---------------------------------------------------------------- the formula
def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def swiglu_oai(gate: Array, up: Array) -> Array:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate * sigmoid(1.702 * gate) * (up + 1)


def softmax(x: Array) -> Array:
    out: Array = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    return out


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.RELU: relu,
    Activation.RELU_SQR: lambda x: relu(x) ** 2,
}
GATES: dict[Gating, Callable[[Array], Array]] = {
    Gating.SOFTMAX: softmax,
    Gating.SIGMOID: sigmoid,
    Gating.SOFTMAX_WEIGHT: lambda x: x,
    Gating.SQRT_SOFTPLUS: lambda x: np.sqrt(np.log1p(np.exp(x))),
}


@dataclass(frozen=True)
class Mixture:
    """What a layer has, how it routes, and the options of the builder."""

    name: str
    parts: tuple[str, ...] = GATED
    routing: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def experts(self) -> Experts:
        chosen = {"n_expert": N_EXPERT, "n_used": (4, 3), "n_ff": N_FF, **self.routing}
        return Experts(**chosen)


def chosen(e: Experts, scores: Array) -> NDArray[np.int64]:
    """The best experts, of the best groups if there are groups."""
    if e.n_groups > 1:
        groups = scores.reshape(e.n_groups, -1)
        value = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        worse = np.argsort(-value)[e.n_groups_used :]
        groups = groups.copy()
        groups[worse] = -np.inf
        scores = groups.reshape(-1)
    return np.argsort(-scores)[: e.n_used[IL]]


def formula(m: Mixture, w: dict[str, Array], x: Array) -> Array:
    """One token. Matrices are [..., n_out, n_in]."""
    e = m.experts
    logits = w["ffn_gate_inp.weight"] @ x + w.get("ffn_gate_inp.bias", 0)
    probs = GATES[e.gating](logits)
    scores = logits if m.options.get("select_by_logits") else probs
    ids = chosen(e, scores + w.get("exp_probs_b.bias", 0))
    weights = probs[ids]
    if e.gating == Gating.SOFTMAX_WEIGHT:
        weights = softmax(weights)
    if e.norm_weights:
        weights = weights / max(weights.sum(), 2.0**-14)
    weights = weights * e.weights_scale
    first = bool(m.options.get("weigh_inputs"))
    out = np.zeros(N_EMBD)
    for i, weight in zip(ids, weights, strict=True):
        hidden = expert(m, w, i, x * weight if first else x)
        out += hidden if first else weight * hidden
    if "ffn_up_shexp.weight" in w:
        gate, up, down = (w[f"{name}.weight"] for name in SHARED)
        shared = down @ (silu(gate @ x) * (up @ x))
        if "ffn_gate_inp_shexp.weight" in w:
            shared = shared * sigmoid(w["ffn_gate_inp_shexp.weight"] @ x)
        out += shared
    return out


def expert(m: Mixture, w: dict[str, Array], i: int, x: Array) -> Array:
    def linear(part: str, x: Array) -> Array:
        y: Array = w[f"ffn_{part}_exps.weight"][i] @ x
        y = y * w.get(f"ffn_{part}_exps.scale", np.ones(N_EXPERT))[i]
        bias = w.get(f"ffn_{part}_exps.bias")
        return y if bias is None else y + bias[i]

    act = m.options.get("act", Activation.SILU)
    if "ffn_gate_up_exps.weight" in w:
        gate, up = np.split(linear("gate_up", x), 2)
    elif "ffn_gate_exps.weight" in w:
        gate, up = linear("gate", x), linear("up", x)
    else:
        return linear("down", ACTIVATIONS[act](linear("up", x)))
    oai = act == Activation.SWIGLU_OAI
    return linear("down", swiglu_oai(gate, up) if oai else ACTIVATIONS[act](gate) * up)


# ---------------------------------------------------------------- options of the builder
BIASES = tuple(f"{name}.bias" for name in GATED)
SCALES = tuple(f"{name}.scale" for name in GATED[1:])
OAI, LLAMA4 = {"act": Activation.SWIGLU_OAI}, {"weigh_inputs": True, "select_by_logits": True}
BALANCED: dict[str, Any] = {"gating": Gating.SIGMOID, "norm_weights": True, "weights_scale": 2.5}
MIXTURES = (
    Mixture("softmax"),
    Mixture("softmax-normed", routing={"norm_weights": True}),
    Mixture("sigmoid-balanced", (*GATED, "exp_probs_b.bias"), BALANCED),
    Mixture("softmax_weight", (*GATED, "ffn_gate_inp.bias"), {"gating": Gating.SOFTMAX_WEIGHT}),
    Mixture("sqrt_softplus", routing={"gating": Gating.SQRT_SOFTPLUS}),
    Mixture(
        "groups",
        (*GATED, "exp_probs_b.bias"),
        {**BALANCED, "n_groups": 4, "n_groups_used": 2, "n_used": (4, 5)},
    ),
    Mixture("one", routing={"n_used": (1, 1)}),
    Mixture("all", routing={"n_used": (12, 12)}),
    Mixture("gelu", options={"act": Activation.GELU}),
    Mixture("relu", options={"act": Activation.RELU}),
    Mixture("biased-oai", (*GATED, *BIASES), {"gating": Gating.SOFTMAX_WEIGHT}, OAI),
    Mixture("merged", MERGED),
    Mixture("merged-oai", (*MERGED, "ffn_gate_up_exps.bias", "ffn_gate_up_exps.scale"), {}, OAI),
    Mixture("scaled", (*GATED, *SCALES)),
    Mixture("ungated-relu_sqr", UNGATED, options={"act": Activation.RELU_SQR}),
    Mixture("ungated-silu", UNGATED),
    Mixture("ungated-gelu", UNGATED, options={"act": Activation.GELU}),
    Mixture("ungated-relu", UNGATED, options={"act": Activation.RELU}),
    Mixture("llama4", (*GATED, *SHARED), {"gating": Gating.SIGMOID, "n_used": (2, 2)}, LLAMA4),
    Mixture("shared", (*GATED, *SHARED)),
    Mixture("shared-gated", (*GATED, *SHARED, "ffn_gate_inp_shexp")),
)


def leaf(x: Leafs, name: str) -> Tensor:
    base, _, kind = name.partition(".")
    shape = SHAPES[base]
    if kind == "bias":
        return x(*shape[1:])
    if kind == "scale":
        return x.given(x.rng.uniform(0.5, 2, N_EXPERT).astype(np.float32))
    return x(*shape, scale=1.5 if base == "ffn_gate_inp" else 0.5)


def built(m: Mixture, leafs: dict[str, Tensor], n_tokens: int = N_TOKENS) -> Case:
    def make(x: Leafs) -> Tensor:
        for name in m.parts:
            leafs[name if "." in name else f"{name}.weight"] = leaf(x, name)
        leafs["x"] = x(N_EMBD, n_tokens, scale=2.0)
        hp = small_hparams(n_layer=2, experts=m.experts)
        shape = GraphShape(n_tokens, n_tokens, ())
        b = Builder(hp, shape, Memory(()), flash_attn=False, n_ctx=8)
        layer = Layer({f"blk.{IL}.{name}": t for name, t in leafs.items()}, IL)
        return moe_ffn(b, layer, leafs["x"], **m.options)

    return Case(m.name, make)


@pytest.mark.parametrize("device", [DEVICE, CpuDevice()], ids=["reference", "cpu"])
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_every_option_follows_the_formula(mixture: Mixture, device: Any) -> None:
    leafs: dict[str, Tensor] = {}
    placed = place(built(mixture, leafs), device.buffer_type())
    got = placed.run(device.init_backend())[0, 0]
    values = {name: placed.leafs[t].astype(np.float64) for name, t in leafs.items()}
    expected = [formula(mixture, values, token) for token in values["x"]]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-6)


def test_no_tokens() -> None:
    """The last layer of a ubatch of which nobody wants logits."""
    for mixture in MIXTURES:
        if mixture.name in ("groups", "softmax-normed", "shared-gated"):
            placed = place(built(mixture, {}, n_tokens=0), DEVICE.buffer_type())
            assert placed.run(DEVICE.init_backend()).shape == (1, 1, 0, N_EMBD)


# ---------------------------------------------------------------- beside llama.cpp
@pytest.mark.parametrize(
    "variant",
    ["llama-scaled_experts", "qwen2moe", "dots1-groups", "dots1-softmax_weight", "gpt-oss"],
)
def test_nodes_have_the_names_and_order_of_llama_cpp(variant: str, tmp_path: Path) -> None:
    arch, options = VARIANTS[variant]
    path = write_tiny(tmp_path / "m.gguf", arch, **options)
    theirs: list[str] = []
    with LlamaCpp(path, watch=theirs.append) as oracle:
        oracle.logits([5, 6, 7])
    with load(path, n_ctx=256, flash_attn="off", warmup=False) as ours:
        shape = GraphShape(3, 3, tuple(256 for _ in ours.context().memory.caches))
        b = Builder(ours.model.hparams, shape, ours.context().memory, flash_attn=False, n_ctx=256)
        b.graph.expand(ours.model.arch.graph(b, ours.model.weights))
        mine = [node.name for node in b.graph.nodes]

    def of_experts(names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(("ffn_moe", "ffn_shexp"))]

    assert of_experts(mine) == of_experts(theirs)


MOE = [name for name, (_, options) in VARIANTS.items() if name in MOE_ARCHS and not options]
EXACT: dict[str, Any] = {"n_ctx": 256, "type_k": "f32", "type_v": "f32"}


@pytest.mark.parametrize("variant", [*MOE, "llama-experts"])
def test_small_ubatches_flash_attention_and_greedy_tokens(variant: str, tmp_path: Path) -> None:
    """What test_architectures.py does with plain attention and large ubatches."""
    arch, options = VARIANTS[variant]
    path = write_tiny(tmp_path / "m.gguf", arch, **options)
    with (
        LlamaCpp(path, n_ctx=256) as theirs,
        load(path, flash_attn="on", n_ubatch=8, **EXACT) as ours,
    ):
        for n in (1, 2, 33, 100):
            ids = prompt(theirs.n_vocab, n)
            assert kl(theirs.logits(ids), ours.logits(ids, all=True)).max() < 1e-6
        steps = ours.session().generate(ids, temp=0, n_predict=16, ignore_eos=False)
        mine = [step.token for step in steps]  # ours end with the text
        assert mine == [step.token for step in theirs.greedy(ids, 16)][: len(mine)]


TYPES = ("F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4")
MORE = ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ4_XS")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MORE]


@pytest.mark.parametrize("weight_type", [*TYPES, *SLOW])
def test_types_of_experts(weight_type: str, tmp_path: Path) -> None:
    """With all experts in use: rounding cannot send a token to others."""
    arch, options = VARIANTS["qwen3moe-all"]
    types = dict.fromkeys(ROUTED[1:], weight_type)
    path = write_tiny(tmp_path / "m.gguf", arch, types=types, **options)
    with LlamaCpp(path, n_ctx=256) as theirs, load(path, **EXACT) as ours:
        ids = prompt(theirs.n_vocab, 100)
        assert kl(theirs.logits(ids), ours.logits(ids, all=True)).max() < 2e-3


@pytest.mark.parametrize("weight_type", ["F16", "Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("variant", ["qwen2moe", "glm4moe"])
def test_quantized_models(variant: str, weight_type: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", variant, weight_type=weight_type)
    with LlamaCpp(path, n_ctx=256) as theirs, load(path, **EXACT) as ours:
        ids = prompt(theirs.n_vocab, 100)
        assert kl(theirs.logits(ids), ours.logits(ids, all=True)).mean() < 2e-3


def test_a_quantized_model_that_uses_all_experts(tmp_path: Path) -> None:
    """Without a choice no position is far from llama.cpp: the choice makes what there is more."""
    numbers = {"expert_group_count": 0, "expert_group_used_count": 0, "expert_used_count": 12}
    path = write_tiny(tmp_path / "m.gguf", "bailingmoe2", weight_type="Q8_0", metadata=numbers)
    with LlamaCpp(path, n_ctx=256) as theirs, load(path, **EXACT) as ours:
        ids = prompt(theirs.n_vocab, 100)
        assert kl(theirs.logits(ids), ours.logits(ids, all=True)).max() < 5e-3


@pytest.mark.parametrize("weight_type", ["F32", "Q4_0", "Q8_0", "Q4_K"])
def test_logits_do_not_depend_on_ubatch_threads_or_layout(weight_type: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen2moe", weight_type=weight_type)
    with load(path, n_threads=1, **EXACT) as one:
        ids = prompt(one.model.hparams.n_vocab, 100)
        expected = one.logits(ids, all=True)
    for params in (
        {"n_ubatch": 1},
        {"n_ubatch": 7, "n_threads": 2},
        {"n_ubatch": 33, "repack": False},
        {"n_ubatch": 64, "n_batch": 64, "n_threads": 3},
    ):
        with load(path, **EXACT, **params) as other:
            np.testing.assert_array_equal(other.logits(ids, all=True), expected, str(params))


def test_experts_are_repacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen2moe", weight_type="Q4_0")
    with caplog.at_level("INFO"), load(path, n_ctx=256, warmup=False) as ours:
        tensors = ours.model.weights.tensors
        places = {name: t.buffer.name for name, t in tensors.items() if t.buffer is not None}
    for name in (*ROUTED[1:], *SHARED):
        assert places[f"blk.1.{name}.weight"] == "CPU_REPACK"
    assert places["blk.1.ffn_gate_inp.weight"] == places["blk.1.ffn_norm.weight"] == "CPU_Mapped"
    assert "CPU_REPACK model buffer size" in caplog.text


# ---------------------------------------------------------------- files that lie
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_used_count": 0}, "expert_used_count is 0; it must lie in 1..12"),
        ({"expert_used_count": 13}, "expert_used_count is 13; it must lie in 1..12, the expert_c"),
        ({"expert_used_count": [3, 0, 3]}, "expert_used_count is 0"),
        ({"expert_used_count": [3, 3]}, "expert_used_count has wrong array length"),
        ({"expert_used_count": 2**32 - 1}, "expert_used_count is 4294967295"),
        ({"expert_count": 0}, r"expert_count is 0; it must lie in 1..1024"),
        ({"expert_count": 1025}, r"expert_count is 1025; it must lie in 1..1024"),
        ({"expert_feed_forward_length": 0}, "experts are 0 wide"),
        ({"expert_shared_count": 1 << 31}, r"expert_shared_count is 2147483648; it must lie in 0"),
        ({"expert_gating_func": 5}, r"func is 5; known are 1 \(softmax\), 2 \(sigmoid\), 3 \("),
        ({"expert_gating_func": 0}, "expert_gating_func is 0; known are"),
        ({"expert_weights_scale": math.nan}, "expert_weights_scale is nan"),
        ({"leading_dense_block_count": 4}, "leading_dense_block_count is 4; there are 3 layers"),
        ({"expert_group_count": 5}, "expert_group_count is 5; groups must be equal parts"),
        ({"expert_group_count": 12}, "expert_group_count is 12"),
        ({"expert_group_used_count": 0}, "expert_group_used_count is 0; it must be less than"),
        ({"expert_group_used_count": 4}, "expert_group_used_count is 4; .* less than the 4 groups"),
        ({"expert_used_count": 7}, "enough for 7 experts in groups of 3"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3; it must be less than the 3 lay"),
    ],
)
def test_impossible_numbers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    numbers = {
        "expert_count": 12,
        "expert_used_count": 3,
        "expert_feed_forward_length": 8,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    }
    kv = metadata(tmp_path / "m.gguf", keys("bailingmoe2", **{**numbers, **change}))
    with pytest.raises(ModelError, match=message):
        architectures.find("bailingmoe2").hparams(kv)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 8}, r"'blk.0.ffn_gate_inp.weight' has wrong shape; expected \[128, 8\]"),
        ({"expert_feed_forward_length": 64}, r"_exps.weight' has wrong shape; expected \["),
        ({"expert_shared_feed_forward_length": 64}, r"_shexp.weight' has wrong shape"),
    ],
)
def test_numbers_that_tensors_contradict(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen2moe", metadata=change)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_one_tensor_per_expert(tmp_path: Path) -> None:
    """Files of 2023: llama.cpp does not load them any more either."""
    numbers = {"expert_count": 12, "expert_used_count": 2}
    split = tuple(f"blk.{il}.ffn_up.{i}" for il in range(2) for i in range(12))
    path = write_tiny(tmp_path / "m.gguf", "llama", omit=DENSE[-3:], extra=split, metadata=numbers)
    with pytest.raises(ModelError, match="one tensor per expert.*convert the model again"):
        load(path)


@pytest.mark.parametrize("name", ["ffn_gate_inp.weight", "exp_probs_b.bias"])
def test_a_router_that_is_not_a_number(name: str, tmp_path: Path) -> None:
    """Refused without --check-tensors too: it would choose experts at random."""
    path = write_tiny(tmp_path / "m.gguf", "dots1")
    corrupt(path, f"blk.1.{name}", 0, np.float32(np.nan).tobytes())
    with pytest.raises(ModelError, match=f"'blk.1.{name}' holds invalid data.*download it again"):
        load(path)
