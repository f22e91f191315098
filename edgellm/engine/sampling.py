"""What of the logits a request needs, decided from its parameters alone."""

from __future__ import annotations

from edgellm.request import SamplingParams


def needs_all_logits(params: SamplingParams, top_k: int) -> bool:
    """Whether ``top_k`` candidates are too few to serve these parameters.

    Log-probabilities need the sum over the vocabulary; a grammar and a positive bias may want a
    token that is not among the candidates; so may a hot, wide distribution without min_p.
    """
    if top_k <= 0:
        return False
    if params.logprobs is not None or params.prompt_logprobs or params.best_of is not None:
        return True
    if params.grammar is not None or any(bias > 0 for bias in params.logit_bias.values()):
        return True
    if params.temperature == 0.0:
        return len(params.logit_bias) >= top_k
    if params.top_k > top_k:
        return True
    return params.top_k == 0 and (params.min_p < 0.02 or params.temperature > 1.5)


def has_penalties(params: SamplingParams) -> bool:
    """Whether the chain must know the tokens so far."""
    return params.repeat_last_n != 0 and (
        params.repeat_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
