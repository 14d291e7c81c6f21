"""The sampler chain: from a row of logits to a token.

`make_chain` composes the stages once; the order is data (`SamplingParams.samplers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, ModelError
from pyggml.llama.sampling_candidates import F32, Candidates, Pure, Stage, off
from pyggml.llama.sampling_draw import AdaptiveP, Dist, Mirostat, MirostatV2, Xtc, fresh_seed
from pyggml.llama.sampling_history import Breakers, Dry, DryRule, Penalties, token_breakers
from pyggml.llama.sampling_infill import infill
from pyggml.llama.sampling_params import (
    SamplingParams,
    model_defaults,
    parse_logit_bias,
    parse_samplers,
    parse_sampling_seq,
)
from pyggml.llama.sampling_stages import (
    logit_bias,
    min_p,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
)

__all__ = [
    "Candidates",
    "Sampler",
    "SamplingParams",
    "VocabInfo",
    "make_chain",
    "model_defaults",
    "parse_logit_bias",
    "parse_samplers",
    "parse_sampling_seq",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabInfo:
    """What sampling needs to know of a vocabulary and a context."""

    n_vocab: int
    n_ctx: int = 4096  # window of penalties whose last_n is -1
    eog_ids: frozenset[int] = frozenset()
    end_id: int = -1  # end of turn or of text, for infill; -1: none
    suppress_ids: frozenset[int] = frozenset()  # tokenizer.ggml.suppress_tokens
    token_to_piece: Callable[[int], bytes] | None = None  # special tokens included
    tokenize: Callable[[str], Sequence[int]] | None = None  # without BOS or special tokens


class Sampler:
    """A chain of stages with its history and random state."""

    def __init__(self, stages: Sequence[Stage], n_vocab: int, seed: int) -> None:
        self.seed = seed
        self.last: Candidates | None = None  # what was left of the latest row, with probs
        self._stages = tuple(stages)
        self._ids = np.arange(n_vocab, dtype=np.int32)

    @property
    def description(self) -> str:
        """The chain as llama.cpp prints it; ? marks stages that do nothing."""
        return " -> ".join(["logits", *(stage.name for stage in self._stages)])

    def sample(self, logits: F32) -> int:
        """Choose a token for one row of logits; `accept` it to make it part of the history."""
        if len(logits) != len(self._ids):
            raise ConfigError(f"{len(logits)} logits for a vocabulary of {len(self._ids)} tokens")
        if not np.isfinite(logits.max()):
            raise ModelError(
                "the model computed logits that are not numbers: the file may be damaged "
                "(try --check-tensors) or its numbers overflow a 16-bit type"
            )
        candidates = Candidates(self._ids, np.asarray(logits, dtype=np.float32))
        for stage in self._stages:
            candidates = stage(candidates)
        self.last = candidates
        return int(candidates.ids[candidates.selected])

    def accept(self, token: int) -> None:
        """Take note of a token of the text, prompt tokens included."""
        for stage in self._stages:
            stage.accept(token)

    def forget(self) -> None:
        """Forget the text; the random numbers go on. What is still text must be accepted anew."""
        for stage in self._stages:
            stage.forget()

    def reset(self) -> None:
        """Forget the text and start the random numbers again from the same seed."""
        for stage in self._stages:
            stage.reset()
        self.last = None

    def clone(self) -> Sampler:
        """An independent sampler that would go on in the same way."""
        twin = Sampler([stage.clone() for stage in self._stages], len(self._ids), self.seed)
        twin.last = self.last
        return twin


def make_chain(params: SamplingParams, vocab: VocabInfo) -> Sampler:
    """Compose the stages that the parameters ask for."""
    seed = fresh_seed(params.seed)
    stages: list[Stage] = []
    bias = combined_bias(params, vocab)
    if bias:
        stages.append(Pure("logit-bias", logit_bias(bias)))
    if params.mirostat:
        stages.append(_temp(params))
        version = Mirostat if params.mirostat == 1 else MirostatV2
        stages.append(version(params.mirostat_tau, params.mirostat_eta, seed, vocab.n_vocab))
        return Sampler(stages, vocab.n_vocab, seed)
    names = [name for name in params.samplers if name != "adaptive_p"]
    stages += [_BUILDERS[name](params, vocab, seed) for name in names]
    if "adaptive_p" in params.samplers and params.adaptive_target >= 0:
        stages.append(AdaptiveP(params.adaptive_target, params.adaptive_decay, seed))
    else:
        stages.append(Dist(seed))
    return Sampler(stages, vocab.n_vocab, seed)


def combined_bias(params: SamplingParams, vocab: VocabInfo) -> dict[int, float]:
    """Biases of the user, of ignore_eos and of the model's suppressed tokens, added up."""
    for token in params.logit_bias:
        if not 0 <= token < vocab.n_vocab:
            raise ConfigError(
                f"--logit-bias: token {token} is not in the vocabulary (0 to {vocab.n_vocab - 1})"
            )
    bias = dict(params.logit_bias)
    banned = vocab.suppress_ids | (vocab.eog_ids if params.ignore_eos else frozenset())
    bias.update((token, -np.inf) for token in banned if 0 <= token < vocab.n_vocab)
    return bias


def _penalties(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    last_n = vocab.n_ctx if p.repeat_last_n == -1 else p.repeat_last_n
    neutral = p.repeat_penalty == 1 and not p.frequency_penalty and not p.presence_penalty
    if neutral or not last_n:
        return off("penalties")
    return Penalties(last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)


def _dry(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    last_n = vocab.n_ctx if p.dry_penalty_last_n == -1 else p.dry_penalty_last_n
    if not p.dry_multiplier or p.dry_base < 1 or not last_n:
        return off("dry")
    breakers: Breakers = {}
    if p.dry_sequence_breakers:
        if vocab.token_to_piece is None or vocab.tokenize is None:
            raise ConfigError("dry_sequence_breakers need a vocabulary with text: pass none")
        pieces = [vocab.token_to_piece(token) for token in range(vocab.n_vocab)]
        breakers = token_breakers(p.dry_sequence_breakers, pieces, vocab.tokenize)
    rule = DryRule(
        multiplier=p.dry_multiplier,
        base=p.dry_base,
        allowed_length=p.dry_allowed_length,
        last_n=min(last_n, vocab.n_ctx),
        breakers=breakers,
    )
    return Dry(rule)


def _top_n_sigma(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    if p.top_n_sigma <= 0:
        return off("top-n-sigma")
    return Pure("top-n-sigma", top_n_sigma(p.top_n_sigma))


def _top_k(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    return Pure("top-k", top_k(p.top_k)) if p.top_k > 0 else off("top-k")


def _typical(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    return Pure("typical", typical(p.typ_p, p.min_keep)) if p.typ_p < 1 else off("typical")


def _top_p(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    return Pure("top-p", top_p(p.top_p, p.min_keep)) if p.top_p < 1 else off("top-p")


def _min_p(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    return Pure("min-p", min_p(p.min_p, p.min_keep)) if p.min_p > 0 else off("min-p")


def _xtc(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    if p.xtc_probability <= 0 or p.xtc_threshold > 0.5:
        return off("xtc")
    return Xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, seed)


def _temp_ext(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    if p.temp == 1 and p.dynatemp_range <= 0:
        return off("temp-ext")
    return Pure("temp-ext", temperature(p.temp, p.dynatemp_range, p.dynatemp_exponent))


def _temp(p: SamplingParams) -> Stage:
    return Pure("temp", temperature(p.temp)) if p.temp != 1 else off("temp")


def _infill(p: SamplingParams, vocab: VocabInfo, seed: int) -> Stage:
    if vocab.token_to_piece is None or vocab.end_id < 0:
        raise ConfigError("the infill sampler needs a vocabulary with text and an end token")
    return Pure("infill", infill(vocab.eog_ids, vocab.token_to_piece, vocab.end_id))


_BUILDERS: dict[str, Callable[[SamplingParams, VocabInfo, int], Stage]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": _typical,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temp_ext,
    "infill": _infill,
}
