"""Flags that several commands share: how to plan, how to sample."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

_PLAN = Group("Plan", sort_key=20)
_PARAMETERS = Group("llama.cpp parameters", sort_key=21)
_SAMPLING = Group("Sampling", sort_key=22)

AT_LEAST_0 = Parameter(validator=Number(gte=0))
AT_LEAST_1 = Parameter(validator=Number(gte=1))
AT_LEAST_16 = Parameter(validator=Number(gte=16))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What to plan for. Every flag is also a setting: plan.NAME in config.toml."""

    ctx: Annotated[int | None, Parameter(group=_PLAN)] = None
    """Cells of context (a cell holds one token), for all sequences together."""
    parallel: Annotated[int | None, Parameter(group=_PLAN)] = None
    """Sequences (conversations) at once; edgellm serve takes 8 by default."""
    objective: Annotated[Literal["speed", "context"] | None, Parameter(group=_PLAN)] = None
    """Prefer speed, or the longest context."""
    vram: Annotated[list[str] | None, Parameter(group=_PLAN, consume_multiple=False)] = None
    """Plan for a card with this much free memory (6GiB); repeat it for several cards."""
    ram: Annotated[str | None, Parameter(group=_PLAN)] = None
    """Plan for this much free RAM (16GiB)."""
    worker: Annotated[list[str] | None, Parameter(group=_PLAN, consume_multiple=False)] = None
    """HOST:PORT of a machine that runs edgellm worker; repeat it for several."""
    backend: Annotated[
        Literal["cuda", "vulkan", "metal", "rocm", "cpu", "rpc"] | None, Parameter(group=_PLAN)
    ] = None
    """Plan for this backend; cpu leaves the GPU out."""
    margin: Annotated[str | None, Parameter(group=_PLAN)] = None
    """Memory kept free on each card (512MiB); 0 keeps none."""
    overhead: Annotated[str | None, Parameter(group=_PLAN)] = None
    """Memory a card takes outside llama.cpp's buffers."""
    min_ctx: Annotated[int | None, Parameter(group=_PLAN)] = None
    """The smallest context the planner may fall to."""
    allow_q4_kv: Annotated[bool | None, Parameter(group=_PLAN)] = None
    """Let the planner choose a q4_0 cache."""
    force: Annotated[bool | None, Parameter(group=_PLAN)] = None
    """Go on even where it should not fit."""
    profile: Annotated[str | None, Parameter(group=_PLAN)] = None
    """Use this profile's values first."""
    ngl: Annotated[str | None, Parameter(group=_PARAMETERS)] = None
    """Layers on the GPU: a number, auto or all."""
    kv: Annotated[str | None, Parameter(group=_PARAMETERS)] = None
    """Type of the K and the V cache: f16, q8_0, q4_0 ..."""
    type_k: Annotated[str | None, Parameter(group=_PARAMETERS)] = None
    """Type of the K cache."""
    type_v: Annotated[str | None, Parameter(group=_PARAMETERS)] = None
    """Type of the V cache."""
    batch: Annotated[int | None, Parameter(group=_PARAMETERS)] = None
    """Tokens one decode call takes."""
    ubatch: Annotated[int | None, Parameter(group=_PARAMETERS)] = None
    """Tokens of a prompt computed at once; fewer take less memory."""
    outputs: Annotated[int | None, Parameter(group=_PARAMETERS)] = None
    """Rows of logits reserved a step."""
    flash_attn: Annotated[Literal["on", "off", "auto"] | None, Parameter(group=_PARAMETERS)] = None
    """Flash attention."""
    n_cpu_moe: Annotated[int | None, Parameter(group=_PARAMETERS)] = None
    """Layers whose experts stay on the host."""
    swa_full: Annotated[bool | None, Parameter(group=_PARAMETERS)] = None
    """A full-size cache for sliding-window layers."""
    kv_unified: Annotated[Literal["on", "off"] | None, Parameter(group=_PARAMETERS)] = None
    """One cache shared by all sequences, or a part for each."""
    tensor_split: Annotated[str | None, Parameter(group=_PARAMETERS)] = None
    """Share of each card, such as 3,1."""
    split_mode: Annotated[Literal["none", "layer", "row"] | None, Parameter(group=_PARAMETERS)] = (
        None
    )
    """How several cards share the model."""
    main_gpu: Annotated[int | None, Parameter(group=_PARAMETERS)] = None
    """The card for what is not split."""
    threads: Annotated[int | None, Parameter(group=_PARAMETERS)] = None
    """CPU threads for decoding."""
    threads_batch: Annotated[int | None, Parameter(group=_PARAMETERS)] = None
    """CPU threads for prompts."""
    mmap: Annotated[bool | None, Parameter(group=_PARAMETERS, negative="--no-mmap")] = None
    """Map the file instead of reading it."""
    mlock: Annotated[bool | None, Parameter(group=_PARAMETERS)] = None
    """Keep the weights from being swapped out."""
    embeddings: Annotated[bool | None, Parameter(group=_PARAMETERS)] = None
    """Embed texts instead of generating (models made for it need no flag)."""
    pooling: Annotated[
        Literal["none", "mean", "cls", "last", "rank"] | None, Parameter(group=_PARAMETERS)
    ] = None
    """How an embedding is read from a text; rank scores documents for a query."""

    def settings(self) -> dict[str, Any]:
        """The flags that were given, as dotted keys for ``config.load``."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        profile, kv = given.pop("profile"), given.pop("kv")
        for side in ("type_k", "type_v"):
            given[side] = given[side] or kv
        return {"profile": profile, **{f"plan.{name}": value for name, value in given.items()}}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen. Every flag is also a setting: chat.NAME in config.toml."""

    temperature: Annotated[
        float | None, Parameter(name=("--temperature", "--temp"), group=_SAMPLING)
    ] = None
    """0 takes the likeliest token; higher is more varied."""
    top_k: Annotated[int | None, Parameter(group=_SAMPLING)] = None
    """Candidates kept; 0 keeps all."""
    top_p: Annotated[float | None, Parameter(group=_SAMPLING)] = None
    """Probability mass kept."""
    min_p: Annotated[float | None, Parameter(group=_SAMPLING)] = None
    """Kept relative to the likeliest."""
    repeat_penalty: Annotated[float | None, Parameter(group=_SAMPLING)] = None
    """1 is off."""
    presence_penalty: Annotated[float | None, Parameter(group=_SAMPLING)] = None
    """0 is off."""
    frequency_penalty: Annotated[float | None, Parameter(group=_SAMPLING)] = None
    """0 is off."""
    seed: Annotated[int | None, Parameter(group=_SAMPLING)] = None
    """The same seed gives the same text."""
    max_tokens: Annotated[int | None, Parameter(name=("--max-tokens", "-n"), group=_SAMPLING)] = (
        None
    )
    """The longest answer, in tokens."""

    def settings(self) -> dict[str, Any]:
        """The flags that were given, as dotted keys for ``config.load``."""
        return {f"chat.{f.name}": getattr(self, f.name) for f in fields(self)}
