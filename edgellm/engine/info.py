"""What an engine is told once (EngineOptions) and what it says of itself once (EngineInfo)."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

SpecMode = Literal["off", "ngram", "draft", "auto"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that the scripted backend acts out.

    It fires when step number ``at_step`` (the first is 1) comes, or whenever a step computes the
    word ``on_word``.
    """

    kind: Literal["code", "abort", "hang", "slow", "raise", "exit", "oom"]
    at_step: int | None = None
    on_word: str | None = None
    code: int = 1
    """What decode returns, for ``code``: 1 no cells, 2 aborted, negative fatal."""
    seconds: float = 3600.0
    """How long ``hang`` and ``slow`` sleep."""
    times: int = 1_000_000
    """How often it fires at most."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """How the backend without a model behaves. Times are seconds that really pass."""

    load_s: float = 0.0
    step_s: float = 0.0
    """Time of a step, whatever it holds."""
    decode_token_s: float = 0.0
    """Time of each sequence's last token in a step, added to ``step_s``."""
    prefill_token_s: float = 0.0
    """Time of each other token in a step."""
    answer_tokens: int = 64
    """The mean length of an answer; 0: the model never ends by itself."""
    n_embd: int = 16
    share: Literal["cells", "checkpoint", "none"] = "cells"
    """How prefixes can be shared: by cells, by saved states, or not at all."""
    can_shift: bool = True
    can_rewind: bool = False
    """With saved states: a cache for each sequence, which takes tokens back; else a recurrent one.
    """
    is_async: bool = False
    """The step is computed elsewhere, as a GPU does."""
    faults: tuple[Fault, ...] = ()
    chat_template: str | None = None


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine runs a plan."""

    max_waiting: int = 256
    """Requests that may wait; one more is answered with QueueFullError."""
    itl_target_s: float | None = None
    """No step that carries running streams should last longer; None: ``itl_factor`` decides."""
    itl_factor: float = 2.5
    """A step with a prefill chunk may last this many times a step without one."""
    aging_s: float = 15.0
    """Waiting this long raises a request by one priority."""
    step_budget: int | None = None
    """Tokens a step may carry; None: the plan's n_batch."""
    retain_prefixes: bool = True
    """Finished sequences leave their cells behind until others need them."""
    prefix_min: int = 16
    """Shorter common prefixes are not worth sharing (tokens)."""
    checkpoint_bytes: int = 512 * 1024 * 1024
    """Host memory for the checkpoints of window and recurrent caches."""
    warmup: bool = True
    seed: int | None = None
    """Where the seeds of requests without one come from; None: the system."""
    spec: SpecMode = "off"
    spec_max: int = 8
    """Draft tokens a step and sequence at most."""
    spec_min_gain: float = 0.05
    """Speculation that gains less than this is paused and tried again later."""
    attach_top_k: int | None = None
    """Candidates that the GPU picks and hands to the sampler; 0: the sampler sees all logits; None:
    64 where layers and cells allow it. Reading 32 rows of 128k logits that the GPU just wrote took
    4-5 ms of a 17 ms step on an H200's host, the top-k of each on the GPU 1.3 to 2.4 ms."""
    n_plain: int = 8
    """Sequences beside the attached ones that keep all logits."""
    sample_threads: int | None = None
    """None: one a physical core, at most 8."""
    pin_dir: str | None = None
    """Where pinned prefixes are kept between runs."""
    restart: bool = True
    """A child that died is started again."""
    max_restarts: int = 3
    """Deaths within ``restart_window_s`` that are mended."""
    restart_window_s: float = 300.0
    hang_timeout_s: float | None = None
    """A loop with work that answers nothing for so long hangs: its process is ended and started
    again. None: 120 s, more where the plan predicts slow steps; 0: never."""
    load_timeout_s: float | None = None
    min_ctx: int | None = None
    """The smallest context that loading may fall back to without memory; None: the plan's."""
    log_lines: int = 200
    script: Script = Script()


_STAGES: Final = {
    "weights": "reading the weights",
    "context": "making room for the context",
    "warmup": "warming up",
    "fallback": "trying a smaller plan",
}


def load_words(stage: str, fraction: float) -> str:
    """A stage of loading for a person; how far it is where that is known, which is of the weights
    alone."""
    words = _STAGES.get(stage, stage)
    return f"{words} {fraction:.0%}" if stage == "weights" else words


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far loading has come: a stage and a fraction of it."""

    stage: str
    """starting, weights, context, warmup, fallback or ready."""
    fraction: float
    message: str = ""


class Infill(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that mark prefix, suffix and middle for fill-in-the-middle, as text and id."""

    prefix: str
    suffix: str
    middle: str
    prefix_id: int
    suffix_id: int
    middle_id: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model is."""

    name: str
    arch: str
    n_vocab: int
    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    n_ctx_train: int
    n_embd: int
    bos_id: int
    bos_text: str
    eos_id: int
    eos_text: str
    eog_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_templates: dict[str, str] = msgspec.field(default_factory=dict)
    """``default`` and the named ones."""
    is_encoder: bool = False
    """Embeds or scores; does not generate."""
    pooling: str = "none"
    infill: Infill | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    """The file's small scalar metadata, as text."""
    build: str = ""
    devices: tuple[str, ...] = ()
    backend: str = ""
    sharing: str = "cells"
    """How prefixes are shared: cells, checkpoint or none."""
    can_shift: bool = True
