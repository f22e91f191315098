"""A backend without a model: deterministic text at any speed, and failures on demand.

Its cache is simulated cell by cell and every next token depends on all tokens that the cache holds
for the sequence, so that a wrong share, a lost token or a position out of order shows as another
text. Words are readable; whatever is no word is spelled in bytes, so any text goes round.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

from edgellm.engine.backend import NO_CELLS, OK, Allowed, Limits, OnProgress, Span, State
from edgellm.engine.info import EngineInfo, EngineOptions, Fault, LoadProgress
from edgellm.errors import DoesNotFitError
from edgellm.planner.plan import LoadReport, MeasuredDevice, Plan
from edgellm.request import Pooling, SamplingParams, TokenLogprob, TopLogprob

BOS: Final = 256
EOS: Final = 257
FIRST_WORD: Final = 258
N_CANDIDATES: Final = 20
CHATML: Final = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _words() -> tuple[str, ...]:
    starts = [*"bcdfghklmnprstvw", "br", "cl", "dr", "fl", "gr", "pl", "st", "tr"]
    ends = [*"aeiou", "an", "en", "in", "on", "ar", "er", "or", "al", "el", "il", "as"]
    made = [f" {a}{b}" for a in starts for b in ends]
    common = "the of and to in is it that for was on are as with his they be at one have this"
    special = [
        "<|im_start|>",
        "<|im_end|>",
        ".",
        ",",
        "!",
        "?",
        "\n",
        "{",
        "}",
        '"',
        ":",
        " é",
        "€",
    ]
    return tuple(dict.fromkeys([*special, *(f" {w}" for w in common.split()), *made]))


WORDS: Final = _words()
_IDS: Final = {word: FIRST_WORD + i for i, word in enumerate(WORDS)}
N_VOCAB: Final = FIRST_WORD + len(WORDS)
IM_END: Final = _IDS["<|im_end|>"]
_PIECES: Final = tuple(
    [bytes([i]) for i in range(256)] + [b"", b""] + [word.encode() for word in WORDS]
)
_SPECIAL: Final = ("<|im_start|>", "<|im_end|>")
_SPLIT: Final = re.compile("|".join(re.escape(w) for w in sorted(WORDS, key=len, reverse=True)))
_MASK: Final = (1 << 61) - 1
_ANSWER: Final = tuple(i for w, i in _IDS.items() if w.startswith(" ") or w in ".,")


def mix(state: int, token: int) -> int:
    """The state after one more token: what every later choice depends on."""
    return ((state ^ (token + 0x9E3779B9)) * 0x5851F42D4C957F2D + 0x14057B7E) & _MASK


def tokenize(text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
    """Words where there are words, bytes elsewhere."""
    out = [BOS] if add_special else []
    at = 0
    for found in _SPLIT.finditer(text):
        out.extend(text[at : found.start()].encode())
        word = found.group()
        special = word in _SPECIAL and not parse_special
        out.extend(word.encode()) if special else out.append(_IDS[word])
        at = found.end()
    out.extend(text[at:].encode())
    return out


class _Cell:
    __slots__ = ("position", "state", "users")

    def __init__(self, position: int, state: int) -> None:
        self.position = position
        self.state = state
        self.users = 1


class ScriptedSampler:
    """Its own random numbers, and whether the end may come yet."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params = params
        self.random = random.Random(seed)
        self.end_allowed = params.min_tokens == 0
        self.is_freed = False


class ScriptedBackend:
    """Implements Backend. ``cells`` may be looked at by tests."""

    def __init__(self, plan: Plan, options: EngineOptions, on_progress: OnProgress) -> None:
        self.script = options.script
        self._options = options
        params = plan.params
        self.limits = _limits(plan, options)
        self.info = _info(plan, options, self.limits)
        self.cells: dict[int, list[_Cell]] = {}
        self.n_cells_used = 0
        self.n_samplers = 0
        self.has_draft = plan.params.draft_model is not None
        self._rows: list[int] = []
        self._step = 0
        self._fired: dict[int, int] = {}
        self._load(on_progress, params.n_ubatch)
        self.report = LoadReport(
            measured=(MeasuredDevice(id="host"),), offloaded="0/0", build="scripted"
        )

    def _load(self, on_progress: OnProgress, n_ubatch: int) -> None:
        for fault in self.script.faults:
            if fault.kind == "oom" and n_ubatch >= fault.code:
                raise DoesNotFitError(
                    "out of memory while loading", device="GPU0", required=2, available=1
                )
        for i in range(1, 11):
            self._wait(self.script.load_s / 10)
            on_progress(LoadProgress(stage="weights", fraction=i / 10))

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    # -- text --------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return tokenize(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int) -> bytes:
        return _PIECES[token]

    def vocabulary(self) -> Sequence[bytes]:
        return _PIECES

    def special_tokens(self) -> frozenset[int]:
        return frozenset({BOS, EOS, *(_IDS[word] for word in _SPECIAL)})

    # -- steps -------------------------------------------------------------------------------

    def decode(self, spans: Sequence[Span], meanwhile: Callable[[], None] | None = None) -> int:
        self._step += 1
        code = self._faults(spans)
        if code != OK:
            return code
        if meanwhile is not None:
            meanwhile()
        n = sum(len(span.tokens) for span in spans)
        if n > self.limits.n_batch:
            raise ValueError(f"{n} tokens in a batch of {self.limits.n_batch}")
        if self.n_cells_used + n > self.limits.n_cells:
            return NO_CELLS
        rows = sum(1 for s in spans if s.n_out)
        script = self.script
        self._wait(
            script.step_s + rows * script.decode_token_s + (n - rows) * script.prefill_token_s
        )
        self._rows = []
        for span in spans:
            self._append(span)
        return OK

    def _append(self, span: Span) -> None:
        held = self.cells.setdefault(span.seq_id, [])
        if len(held) != span.start:
            raise ValueError(f"seq {span.seq_id} holds {len(held)}, span begins at {span.start}")
        state = held[-1].state if held else 0
        for i, token in enumerate(span.tokens):
            state = mix(state, token)
            held.append(_Cell(span.start + i, state))
            self._rows.append(state)
        self.n_cells_used += len(span.tokens)

    def _faults(self, spans: Sequence[Span]) -> int:
        for i, fault in enumerate(self.script.faults):
            if self._fired.get(i, 0) < fault.times and self._is_due(fault, spans):
                self._fired[i] = self._fired.get(i, 0) + 1
                code = self._act(fault)
                if code != OK:
                    return code
        return OK

    def _is_due(self, fault: Fault, spans: Sequence[Span]) -> bool:
        if fault.at_step is not None:
            return fault.at_step == self._step
        word = _IDS.get(fault.on_word or "")
        return word is not None and any(word in span.tokens for span in spans)

    def _act(self, fault: Fault) -> int:
        if fault.kind == "code":
            return fault.code
        if fault.kind == "raise":
            raise RuntimeError("the scripted backend raised, as it was told to")
        if fault.kind == "exit":
            os._exit(3)
        if fault.kind == "abort":
            os.write(2, b"scripted.cpp:1: GGML_ASSERT(false) failed\n")
            os.abort()
        if fault.kind in ("hang", "slow"):
            time.sleep(fault.seconds)
        return OK

    # -- sampling ----------------------------------------------------------------------------

    def make_sampler(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],  # noqa: ARG002  (no penalties here)
    ) -> Any:
        self.n_samplers += 1
        return ScriptedSampler(params, seed)

    def free_sampler(self, sampler: Any) -> None:
        if sampler.is_freed:
            raise ValueError("a sampler was freed twice")
        sampler.is_freed = True
        self.n_samplers -= 1

    def allow_end(self, sampler: Any) -> None:
        sampler.end_allowed = True

    def sample(self, rows: Sequence[int], samplers: Sequence[Any]) -> list[int]:
        return [self._pick(row, sampler) for row, sampler in zip(rows, samplers, strict=True)]

    def _pick(self, row: int, sampler: ScriptedSampler) -> int:
        state = self._rows[row]
        may_end = sampler.end_allowed and not sampler.params.ignore_eos
        mean = self.script.answer_tokens
        if may_end and mean and (state >> 7) % mean == 0:
            return EOS
        if sampler.params.temperature == 0.0:
            return self._candidate(state, 0)
        return self._candidate(state, min(int(sampler.random.expovariate(0.7)), N_CANDIDATES - 1))

    def sample_allowed(self, row: int, sampler: Any, allowed: Allowed) -> int:
        state = self._rows[row]
        if allowed is None or isinstance(allowed, bool):
            return self._candidate(state, 0) if allowed is False else self._pick(row, sampler)
        if isinstance(allowed, bytes):
            bits = allowed
            allowed = tuple(i for i in range(N_VOCAB) if bits[i >> 3] >> (i & 7) & 1)
        if EOS in allowed and (len(allowed) == 1 or state % 3 == 0):
            return EOS
        return allowed[(state >> 11) % len(allowed)]

    def _candidate(self, state: int, rank: int) -> int:
        return _ANSWER[((state >> 11) + rank * 7) % len(_ANSWER)]

    def logprobs(self, row: int, token: int, k: int) -> TokenLogprob:
        state = self._rows[row]
        ranked = [self._candidate(state, rank) for rank in range(N_CANDIDATES)]
        rank = ranked.index(token) if token in ranked else N_CANDIDATES
        top = tuple(TopLogprob(t, _PIECES[t], -0.1 - 0.7 * i) for i, t in enumerate(ranked[:k]))
        return TokenLogprob(token, _PIECES[token], -0.1 - 0.7 * rank, top)

    def logits(self, row: int) -> bytes:
        state = self._rows[row]
        values = array("f", [-10.0]) * len(_PIECES)
        for rank in range(N_CANDIDATES):
            values[self._candidate(state, rank)] = -0.7 * rank
        return values.tobytes()

    def draft(self, asked: Sequence[tuple[int, array[int]]], k: int) -> list[list[int]]:
        """Right three times in four."""
        out = []
        for seq_id, tokens in asked if self.has_draft else ():
            state = mix(self.cells[seq_id][len(tokens) - 2].state, tokens[-1])
            guesses = []
            for _ in range(k):
                guesses.append(self._candidate(state, 1 if (state >> 5) % 4 == 0 else 0))
                state = mix(state, guesses[-1])
            out.append(guesses)
        return out

    # -- the cache ---------------------------------------------------------------------------

    def seq_rm(self, seq_id: int, start: int) -> bool:
        held = self.cells.get(seq_id, [])
        if not self.limits.can_rewind and 0 < start < len(held):
            return False
        self._release(held[start:])
        del held[start:]
        if not held:
            self.cells.pop(seq_id, None)
        return True

    def _release(self, cells: Sequence[_Cell]) -> None:
        for cell in cells:
            cell.users -= 1
            self.n_cells_used -= cell.users == 0

    def seq_cp(self, source: int, target: int, n: int) -> None:
        if self.cells.get(target):
            raise ValueError(f"seq {target} is not empty")
        held = self.cells[source]
        if n > len(held):
            raise ValueError(f"seq {source} holds {len(held)} cells, not {n}")
        self.cells[target] = held[:n]
        for cell in held[:n]:
            cell.users += 1

    def seq_shift(self, seq_id: int, start: int, n_drop: int) -> None:
        held = self.cells[seq_id]
        self._release(held[start : start + n_drop])
        del held[start : start + n_drop]
        for i, cell in enumerate(held[start:], start):
            cell.position = i

    def state_get(self, seq_id: int) -> State:
        if seq_id in self.limits.retained_ids:
            return b""  # as llama_kv_cache::state_write_meta: unreadable beyond n_seq_max
        return array("q", [cell.state for cell in self.cells.get(seq_id, ())]).tobytes()

    def state_set(self, seq_id: int, state: State) -> bool:
        states = array("q")
        states.frombytes(state)
        if not states or self.n_cells_used + len(states) > self.limits.n_cells:
            return False
        self.cells[seq_id] = [_Cell(i, s) for i, s in enumerate(states)]
        self.n_cells_used += len(states)
        return True

    def embed(
        self, spans: Sequence[Span], pooling: Pooling, *, normalize: bool
    ) -> list[tuple[float, ...]]:
        self._step += 1
        self._faults(spans)
        self._wait(self.script.step_s)
        return [self._vector(span, pooling, normalize) for span in spans]

    def _vector(self, span: Span, pooling: Pooling, normalize: bool) -> tuple[float, ...]:
        state = 0
        for token in span.tokens:
            state = mix(state, token)
        if pooling is Pooling.RANK:
            return ((state % 2000) / 1000 - 1,)
        numbers = random.Random(state)
        vector = [numbers.uniform(-1, 1) for _ in range(self.script.n_embd)]
        norm = math.sqrt(sum(x * x for x in vector)) if normalize else 1.0
        return tuple(x / norm for x in vector)

    def close(self) -> None:
        self.cells.clear()


def _limits(plan: Plan, options: EngineOptions) -> Limits:
    params = plan.params
    sharing = options.script.share
    n = params.n_seq_max
    attached = options.attach_top_k or 0
    plain = tuple(range(n, n + options.n_plain)) if attached else ()
    first = n + len(plain)
    retained = tuple(range(first, 256)) if sharing == "cells" else ()
    return Limits(
        n_cells=params.n_ctx,
        n_ctx_seq=params.n_ctx_seq,
        n_batch=params.n_batch,
        n_ubatch=params.n_ubatch,
        n_running=n,
        n_outputs_max=max(params.n_outputs_max, 1),
        slot_ids=tuple(range(n)),
        plain_ids=plain,
        retained_ids=retained,
        sharing=sharing,
        can_shift=options.script.can_shift,
        can_rewind=sharing != "checkpoint" or options.script.can_rewind,
        attached_top_k=attached,
        is_async=options.script.is_async,
    )


def _info(plan: Plan, options: EngineOptions, limits: Limits) -> EngineInfo:
    template = options.script.chat_template or CHATML
    return EngineInfo(
        name=plan.model.name,
        arch="scripted",
        n_vocab=N_VOCAB,
        n_ctx=plan.params.n_ctx,
        n_ctx_seq=plan.params.n_ctx_seq,
        n_seq_max=plan.params.n_seq_max,
        n_ctx_train=plan.model.n_ctx_train,
        n_embd=options.script.n_embd,
        bos_id=BOS,
        bos_text="",
        eos_id=EOS,
        eos_text="",
        eog_ids=(EOS, IM_END),
        add_bos=True,
        chat_templates={"default": template},
        is_encoder=plan.params.embeddings,
        pooling=plan.params.pooling,
        metadata={"general.architecture": "scripted"},
        build="scripted",
        devices=("host",),
        backend="scripted",
        sharing=limits.sharing,
        can_shift=limits.can_shift,
    )
