"""What of the logits a request needs, decided from its parameters alone."""

from __future__ import annotations

import math
from typing import Final

from edgellm.request import SamplingParams

SPARE: Final = 16
"""Candidates kept for what may be forbidden beside them: end tokens, stop tokens."""


def needs_all_logits(params: SamplingParams, top_k: int) -> bool:
    """Whether the ``top_k`` highest logits are too few to serve these parameters exactly.

    Log-probabilities need the sum over the vocabulary; a grammar may want a token that is not
    among the candidates, and what lifts or sinks many tokens looks further down.
    """
    if top_k <= 0:
        return False
    if params.logprobs is not None or params.prompt_logprobs or params.best_of is not None:
        return True
    if params.grammar is not None:
        return True
    needed = candidates_needed(params)
    return needed == 0 or needed + len(params.stop_token_ids) + SPARE > top_k


MAX_FILTERED: Final = 1024


def candidates_needed(params: SamplingParams) -> int:
    """How many of the highest logits decide the choice exactly; 0 when all of them do.

    With top_k everything after it sees k tokens. Penalties and negative biases before it can only
    push down the tokens they name: as many more candidates make up for them. What can lift a
    token from anywhere needs all.
    """
    if params.temperature > 0.0 and not 0 < params.top_k <= MAX_FILTERED:
        return 0
    if any(bias > 0 for bias in params.logit_bias.values()):
        return 0
    k = 1 if params.temperature == 0.0 else params.top_k
    if has_penalties(params):
        lifts = min(params.presence_penalty, params.frequency_penalty, params.repeat_penalty - 1.0)
        if lifts < 0.0 or params.repeat_last_n < 0:
            return 0
        k += params.repeat_last_n
    k += len(params.logit_bias)
    return k if k <= 2 * MAX_FILTERED else 0


def min_p_depth(params: SamplingParams) -> float:
    """How far below the highest logit min_p alone looks; 0 when it does not decide alone.

    p >= min_p * p_max is logit >= logit_max + ln(min_p) (llama-sampler.cpp, min_p_apply).
    """
    is_alone = params.top_k == 0 and params.top_p >= 1.0 and params.typical_p >= 1.0
    if params.temperature == 0.0 or not is_alone or not 0.0 < params.min_p < 1.0:
        return 0.0
    if has_penalties(params) or params.logit_bias or params.ignore_eos or params.min_tokens:
        return 0.0
    return -math.log(params.min_p)


def has_penalties(params: SamplingParams) -> bool:
    """Whether the chain must know the tokens so far."""
    return params.repeat_last_n != 0 and (
        params.repeat_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
