"""The yardsticks agree: llama.cpp and the exact forward, on tiny models and on real ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from divergence import LENGTHS
from exact import Exact, gelu_from_table, kl, knows
from oracle import LlamaCpp, LlamaServer
from texts import TEXTS
from tiny import ARCHS, TABLE_GELU, VARIANTS, write_tiny
from tiny_tokens import VOCABS

# Mean KL from exact arithmetic that activations of 8 bits cost llama.cpp in tiny models.
QUANTIZED = {"Q8_0": 2e-3, "Q4_K": 4e-3}


@pytest.fixture(params=[name for name, row in VARIANTS.items() if knows(*row)])
def variant(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Each row of VARIANTS that the exact forward knows."""
    return VARIANTS[request.param]


def prompt(n_vocab: int, n_tokens: int) -> list[int]:
    """Random ids."""
    return [
        int(token) for token in np.random.default_rng(n_tokens).integers(n_vocab, size=n_tokens)
    ]


def disagreement(model: LlamaCpp, exact: Exact, lengths: tuple[int, ...] = LENGTHS) -> float:
    """The largest mean KL of llama.cpp from exact arithmetic over prompts of such lengths."""
    prompts = [prompt(model.n_vocab, n) for n in lengths]
    return max(float(kl(model.logprobs(ids), exact.logits(ids)).mean()) for ids in prompts)


def test_f32_models_agree(tmp_path: Path, variant: tuple[str, dict[str, Any]]) -> None:
    arch, options = variant
    path = write_tiny(tmp_path / "m.gguf", arch, **options)
    # Gemma's GELU is a table of F16 values in ggml's CPU code; F32 sums that fall on the other
    # side of an F16 rounding leave a little
    table, allowed = (gelu_from_table, 3e-8) if arch in TABLE_GELU else (None, 1e-11)
    with LlamaCpp(path) as model:
        assert disagreement(model, Exact(path, table)) < allowed
        assert disagreement(model, Exact(path)) < 1e-6


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_quantized_models_agree(
    tmp_path: Path, variant: tuple[str, dict[str, Any]], weight_type: str
) -> None:
    arch, options = variant
    path = write_tiny(tmp_path / "m.gguf", arch, weight_type=weight_type, **options)
    with LlamaCpp(path) as model:
        assert 1e-6 < disagreement(model, Exact(path)) < QUANTIZED[weight_type]


@pytest.mark.parametrize(
    "settings", [{"n_ubatch": 16}, {"n_threads": 2}, {"repack": True}], ids=str
)
def test_settings_change_only_the_rounding(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3")
    with LlamaCpp(path, **settings) as model:
        assert disagreement(model, Exact(path, gelu_from_table)) < 3e-8


def test_cache_type_and_flash_attention_are_heard(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    with LlamaCpp(path, kv_type="F16", flash_attention=True) as model:
        assert 1e-10 < disagreement(model, Exact(path)) < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_distributions_are_neither_flat_nor_certain(tmp_path: Path, name: str) -> None:
    arch, options = VARIANTS[name]
    n_vocab = len(VOCABS[ARCHS[arch].vocab]().tokens)
    with LlamaCpp(write_tiny(tmp_path / "m.gguf", arch, **options)) as model:
        logprobs = model.logprobs(prompt(n_vocab, 100))
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=-1)
    assert 2.5 < entropy.mean() < 5.2 < np.log(n_vocab)


@pytest.mark.parametrize(
    ("arch", "omitted"),
    [
        ("llama-rope_freqs", "rope_freqs"),
        ("gemma3", "attn_q_norm"),
        ("llama-biases", "attn_v.bias"),
    ],
)
def test_every_part_of_a_variant_matters(tmp_path: Path, arch: str, omitted: str) -> None:
    """A model without the part differs by far more than the bounds above."""
    arch, options = VARIANTS[arch]
    whole = Exact(write_tiny(tmp_path / "whole.gguf", arch, **options))
    less = Exact(write_tiny(tmp_path / "less.gguf", arch, **options, omit=(omitted,)))
    ids = prompt(300, 33)
    assert kl(whole.logits(ids), less.logits(ids)).mean() > 1e-3


def test_a_token_sees_no_later_one(tmp_path: Path) -> None:
    exact = Exact(write_tiny(tmp_path / "m.gguf", "gemma3"))
    ids = prompt(300, 40)
    np.testing.assert_allclose(exact.logits(ids)[:25], exact.logits(ids[:25]), rtol=1e-9, atol=1e-9)


def test_files_repeat_and_seeds_differ(tmp_path: Path) -> None:
    first, again, other = (
        write_tiny(tmp_path / f"{i}.gguf", "qwen3", seed=seed).read_bytes()
        for i, seed in enumerate((0, 0, 1))
    )
    assert first == again != other


def test_dimensions_types_and_keys_can_be_chosen(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path / "m.gguf",
        "llama",
        types={"blk.1.ffn_down": "F16", "output": "Q8_0"},
        metadata={"rope.freq_base": 1e5},
        n_layer=3,
        n_ff=224,
    )
    exact = Exact(path)
    assert (exact.n_layer, exact.key("rope.freq_base")) == (3, 1e5)
    found = {name: tensor.tensor_type.name for name, tensor in exact.stored.items()}
    assert (found["blk.1.ffn_down.weight"], found["blk.2.ffn_down.weight"]) == ("F16", "F32")
    assert found["output.weight"] == "Q8_0"
    with pytest.raises(ValueError, match="n_lyer"):
        write_tiny(path, "llama", n_lyer=3)


def test_server_reports_the_same_distribution(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen2", weight_type="Q8_0")
    with LlamaCpp(path) as model, LlamaServer(path) as server:
        ids = prompt(model.n_vocab, 20)
        reported = server.next_logprobs(ids, model.n_vocab)
        np.testing.assert_allclose(reported, model.next_logprobs(ids), atol=2e-5)


def test_greedy_follows_the_distribution(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    with LlamaCpp(path) as model:
        ids = model.tokenize("the world is")
        steps = model.greedy("the world is", 12)
        for n, step in enumerate(steps):
            best = model.next_logprobs(ids + [step.token for step in steps[:n]])
            assert step.token == best.argmax()
            assert step.logprob == pytest.approx(best.max(), abs=1e-4)
            assert step.runner_up == pytest.approx(np.sort(best)[-2], abs=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_every_text_survives_tokenization(tmp_path: Path, arch: str) -> None:
    text = "Hello the world, is it 42? Äöü 東京 🙂\n"
    with LlamaCpp(write_tiny(tmp_path / "m.gguf", arch)) as model:
        ids = model.tokenize(text, add_special=False)
        assert model.detokenize(ids) == text
        assert len(ids) < len(text.encode())  # merges are found


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("qwen3", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("gemma3", "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
    ],
)
def test_template_of_the_file_is_applied(tmp_path: Path, arch: str, expected: str) -> None:
    with LlamaCpp(write_tiny(tmp_path / "m.gguf", arch)) as model:
        assert model.apply_template([{"role": "user", "content": "Hi"}]) == expected


def test_refusals_name_the_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", omit=("attn_q",))
    with pytest.raises(ValueError, match=r"m\.gguf"):
        LlamaCpp(path)


def test_kl_of_known_distributions() -> None:
    p, q = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    assert kl(p, q) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert kl(p + 7, q - 3) == pytest.approx(kl(p, q))  # logits serve as well
    assert kl(np.array([0, -np.inf]), p) == pytest.approx(np.log(2))


def real_disagreement(path: Path) -> float:
    """Mean KL of llama.cpp from exact arithmetic over 5 prompts of up to 30 tokens."""
    exact = Exact(path)
    with LlamaCpp(path, n_ctx=256, n_ubatch=64) as model:
        prompts = [model.tokenize(text)[:30] for text in TEXTS]
        found = [kl(model.logprobs(ids), exact.logits(ids)) for ids in prompts]
    return float(np.concatenate(found).mean())


def test_smollm2_agrees(smollm2: Path) -> None:
    assert 1e-3 < real_disagreement(smollm2) < 6e-3


@pytest.mark.slow
def test_gemma3_agrees(gemma3: Path) -> None:
    assert 1e-3 < real_disagreement(gemma3) < 8e-3
