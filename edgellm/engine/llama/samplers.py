"""How a sequence chooses: its parameters as a chain of llama.cpp's samplers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from edgellm.engine.backend import Limits
from edgellm.engine.llama.library import lib
from edgellm.engine.llama.vocab import Vocab
from edgellm.engine.sampling import (
    candidates_needed,
    has_penalties,
    min_p_depth,
    needs_all_logits,
)
from edgellm.request import SamplingParams

FORBIDDEN: Final = -float("inf")


class Sampler:
    """A sequence's chain, and how much of the logits it must see."""

    __slots__ = ("attached", "bans_ends", "chain", "depth", "needed", "remembers")

    def __init__(self) -> None:
        self.chain: Any = None
        """None for plain greedy."""
        self.attached = False
        """The context hands over its candidates, not the logits."""
        self.bans_ends = False
        """The chain's first sampler forbids end tokens, until ``allow_end`` takes it out."""
        self.remembers = False
        """The chain must hear which token was chosen."""
        self.depth = 0.0
        """Logits this far below the highest decide exactly; 0: that is not known."""
        self.needed = 0
        """Highest logits that decide exactly; 0: all."""


def make_chain(samplers: Iterable[Any]) -> Any:
    """A chain that owns the samplers."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in samplers:
        lib.llama_sampler_chain_add(chain, sampler)
    return chain


class SamplerFactory:
    """Makes and frees the samplers of one model's sequences."""

    def __init__(self, vocab: Vocab, limits: Limits) -> None:
        self._n_vocab = vocab.n
        self._eog_ids = vocab.eog_ids
        self._top_k = limits.attached_top_k
        self._n_ctx_seq = limits.n_ctx_seq

    def make(self, params: SamplingParams, seed: int, prompt: Sequence[int]) -> Sampler:
        """A sampler; ``prompt`` feeds the penalties."""
        sampler = Sampler()
        sampler.attached = self._top_k > 0 and not needs_all_logits(params, self._top_k)
        sampler.depth = min_p_depth(params)
        sampler.needed = candidates_needed(params)
        if sampler.needed:
            sampler.needed += len(self._eog_ids) + len(params.stop_token_ids)
        parts = self._parts(params, seed)
        if params.min_tokens and not params.ignore_eos:
            ends = {*self._eog_ids, *params.stop_token_ids}
            parts.insert(0, self._bias(dict.fromkeys(ends, FORBIDDEN)))
            sampler.bans_ends = True
        if len(parts) == 1 and params.temperature == 0.0:
            lib.llama_sampler_free(parts[0])
            return sampler
        sampler.chain = make_chain(parts)
        if has_penalties(params):
            sampler.remembers = True
            n = params.repeat_last_n
            for token in prompt if n < 0 else prompt[max(0, len(prompt) - n) :]:
                lib.llama_sampler_accept(sampler.chain, token)
        return sampler

    @staticmethod
    def free(sampler: Sampler) -> None:
        """Give back what ``make`` took."""
        if sampler.chain is not None:
            lib.llama_sampler_free(sampler.chain)
            sampler.chain = None

    @staticmethod
    def allow_end(sampler: Sampler) -> None:
        """min_tokens are there: end tokens may be chosen from now on."""
        if sampler.bans_ends:
            sampler.bans_ends = False
            lib.llama_sampler_free(lib.llama_sampler_chain_remove(sampler.chain, 0))

    def _parts(self, params: SamplingParams, seed: int) -> list[Any]:
        """llama.cpp's own order (common/sampling.cpp), without what is switched off."""
        parts = self._biases(params)
        if has_penalties(params):
            parts.append(self._penalties(params))
        if params.temperature == 0.0:
            return [*parts, lib.llama_sampler_init_greedy()]
        if params.top_k > 0:
            parts.append(lib.llama_sampler_init_top_k(params.top_k))
        if params.typical_p < 1.0:
            parts.append(lib.llama_sampler_init_typical(params.typical_p, 1))
        if params.top_p < 1.0:
            parts.append(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            parts.append(lib.llama_sampler_init_min_p(params.min_p, 1))
        parts.append(lib.llama_sampler_init_temp(params.temperature))
        parts.append(lib.llama_sampler_init_dist(seed % 0xFFFFFFFF))  # that one means random
        return parts

    def _biases(self, params: SamplingParams) -> list[Any]:
        bias = {t: FORBIDDEN if b <= -100 else b for t, b in params.logit_bias.items()}
        if params.ignore_eos:
            bias |= dict.fromkeys(self._eog_ids, FORBIDDEN)
        return [self._bias(bias)] if bias else []

    def _bias(self, bias: dict[int, float]) -> Any:
        usable = {t: b for t, b in bias.items() if 0 <= t < self._n_vocab}
        table = (lib.llama_logit_bias * max(1, len(usable)))()
        for i, (token, value) in enumerate(usable.items()):
            table[i].token = token
            table[i].bias = value
        return lib.llama_sampler_init_logit_bias(self._n_vocab, len(usable), table)

    def _penalties(self, params: SamplingParams) -> Any:
        n = params.repeat_last_n
        return lib.llama_sampler_init_penalties(
            self._n_vocab,
            n if n >= 0 else self._n_ctx_seq,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
