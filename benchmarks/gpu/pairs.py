"""Several cards: edgellm's split, llama-server's own, a sweep of splits and the larger card alone.

Ballast makes pairs of unequal cards out of large ones (capacity only). For each pair and model:
edgellm's plan is loaded, its context filled with four sequences, its speed measured and its ledger
held against what llama.cpp and the driver say, card by card. Then llama-server's fit, the larger
card alone, other splits, tensor and row split, the cards in the other order, and a card that is
taken away between plan and load. What matters most comes first; at --limit-s it stops and reports.

    python benchmarks/gpu/pairs.py --out results --llama-server bin/llama-server \\
        --vocab ggml-vocab-llama-bpe.gguf [--pairs 8+4:llama-3.1-8b@65536,...]
    python benchmarks/gpu/pairs.py --loopback --pairs 0.2+0.1:model.gguf@2048 ...  # without cards
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pairs_report
import synthetic
from cards import completion, fixed_plan, llama_server
from fitted import read_fit
from machines import Cards, Loopback, Machine, words
from timing import N_PROMPT, fill, loaded, no_second_try, one_stream, prompt

from edgellm.devices import Devices
from edgellm.engine.client import Engine, OnProgress
from edgellm.engine.info import EngineOptions
from edgellm.errors import EdgeLLMError
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner import observed
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Observation, Plan, PlanRequest
from edgellm.request import Request, SamplingParams
from edgellm.runtime.opening import replanner
from edgellm.units import parse_bytes

PAIRS = (
    "12+12:qwen3-30b-a3b@8192,8+4:qwen3-14b@4096,24+6:qwen3-30b-a3b@32768,"
    "8+4:llama-3.1-8b@65536,8+4:gemma-3-12b@8192,16+8:qwen3-30b-a3b@16384,"
    "16+8:gemma-3-12b@32768,8+4:qwen3-30b-a3b@4096"
)
N_SEQ = 4
N_LONG = 2048
TRIAL_S = 20.0
"""What a trial is taken to last until one of its model was timed."""
OPTIONS = EngineOptions(restart=False, load_timeout_s=120)
FAILURES = (EdgeLLMError, RuntimeError, OSError, asyncio.TimeoutError, ValueError)


@dataclass(frozen=True)
class Pair:
    """Devices of these sizes (GiB), a model (see headers/, or a file) and a context."""

    sizes: tuple[float, ...]
    model: str
    n_ctx: int

    @classmethod
    def parse(cls, text: str) -> Pair:
        sizes, _, rest = text.partition(":")
        model, _, n_ctx = rest.partition("@")
        return cls(tuple(map(float, sizes.split("+"))), model, int(n_ctx or 4096))

    def __str__(self) -> str:
        return "+".join(f"{size:g}" for size in self.sizes) + f" {Path(self.model).stem}"


@dataclass
class Trial:
    """One configuration and what came of it."""

    name: str
    decode_tps: float | None = None
    prefill_tps: float | None = None
    split: str = ""
    seconds: float = 0.0
    error: str = ""
    fallbacks: tuple[str, ...] = ()
    cards: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    text: str = ""
    note: str = ""
    elsewhere: int = 0
    """Bytes on cards that the plan leaves out."""


class Clock:
    """The time that is left, and what a model's trials took."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self._longest: dict[str, float] = {}

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def has_time(self, pair: Pair) -> bool:
        return self.left > self._longest.get(pair.model, TRIAL_S)

    def took(self, pair: Pair, seconds: float) -> None:
        self._longest[pair.model] = max(self._longest.get(pair.model, 5.0), seconds)


class Race:
    """All of it: the pairs, what is known of each, and the files it is written to."""

    def __init__(self, args: argparse.Namespace, machine: Machine) -> None:
        self.args = args
        self.machine = machine
        self.clock = Clock(args.limit_s)
        self.pairs = [Pair.parse(text) for text in args.pairs.split(",")]
        self.rows: list[dict[str, Any]] = [
            {"pair": list(p.sizes), "model": Path(p.model).stem, "n_ctx": p.n_ctx, "trials": []}
            for p in self.pairs
        ]
        self.extra: dict[str, Any] = {}
        self.plans: dict[int, Plan] = {}
        self.seen: tuple[Observation, ...] = ()

    # -- the parts, the most important first

    async def run(self) -> None:
        for i, pair in enumerate(self.pairs):
            await self._guarded(i, pair, self._first_round)
            if i == 1:
                await self._extras()
        for i, pair in enumerate(self.pairs):
            if any(True for _ in self._open(i, pair)):
                await self._guarded(i, pair, self._sweep)

    async def _guarded(self, i: int, pair: Pair, *parts: Any) -> None:
        """Parts on the same emulated devices; what goes wrong in one is written down."""
        if not self.clock.has_time(pair):
            names = [part.__name__.strip("_") for part in parts]
            self.rows[i].setdefault("skipped", []).extend(names)
            return
        try:
            with self.machine.emulated(pair.sizes) as found:
                for part in parts:
                    await self._part(i, part, pair, found)
        except FAILURES as error:
            self._note(i, error)

    async def _part(self, i: int, part: Any, pair: Pair, found: Devices) -> None:
        try:
            await part(i, pair, found)
        except FAILURES as error:
            self._note(i, error)
        self.save()

    def _note(self, i: int, error: BaseException) -> None:
        self.rows[i].setdefault("errors", []).append(words(error))
        print(f"{self.pairs[i]}: {words(error)}", flush=True)

    async def _first_round(self, i: int, pair: Pair, found: Devices) -> None:
        shape = shape_of(self.path(pair))
        self.rows[i]["free"] = [gpu.free for gpu in found.gpus]
        plan = make_plan(shape, found, request(pair))
        self.plans[i] = plan
        await self.trial(i, pair, plan, "edgellm", filled=True)
        await self._server(i, pair)
        if len([d for d in plan.devices if d.used]) > 1:
            await self.trial(i, pair, larger_alone(shape, found, pair), "larger alone")
        # As much of the sweep as leaves the pairs after this one their three trials.
        await self._sweep(i, pair, found, reserve_s=3 * TRIAL_S * (len(self.pairs) - i - 1))

    async def _server(self, i: int, pair: Pair) -> None:
        if not self.args.llama_server or not self.clock.has_time(pair):
            return
        began = time.monotonic()
        log = self.args.out / f"{str(pair).replace(' ', '-')}.log"
        trial = await asyncio.to_thread(self._time_server, pair, log)
        trial.seconds = time.monotonic() - began
        self.keep(i, pair, trial)

    def _time_server(self, pair: Pair, log: Path) -> Trial:
        more = ["-np", str(N_SEQ), "-kvu", "--cache-ram", "0", *self.machine.server_arguments()]
        n_vocab, n_long = shape_of(self.path(pair)).n_vocab, long_prompt(pair)
        trial = Trial("llama-server")
        try:
            with llama_server(
                self.args.llama_server, self.path(pair), pair.n_ctx, log, more
            ) as url:
                short = [completion(url, prompt(N_PROMPT, n_vocab, 90 + j)) for j in range(2)]
                long = [completion(url, prompt(n_long, n_vocab, 80 + j), 1) for j in range(2)]
            trial.decode_tps = max(t["predicted_per_second"] for t in short)
            trial.prefill_tps = max(t["prompt_per_second"] for t in long)
        except FAILURES as error:
            trial.error = words(error)
        fitted = read_fit(log.read_text(errors="replace").splitlines())
        trial.split, trial.note = str(fitted), json.dumps(fitted.buffers)
        return trial

    def _open(self, i: int, pair: Pair) -> Iterator[tuple[str, dict[str, Any]]]:
        """The trials of the sweep that were not made yet."""
        plan, done = self.plans.get(i), {t["name"] for t in self.rows[i]["trials"]}
        if plan is None:
            return
        for name, change in others(plan, shape_of(self.path(pair)), self.rows[i]["free"]):
            if name not in done:
                yield name, change

    async def _sweep(self, i: int, pair: Pair, found: Devices, reserve_s: float = 0.0) -> None:
        shape = shape_of(self.path(pair))
        for name, change in self._open(i, pair):
            if self.clock.left < reserve_s:
                return
            other = fixed_plan(shape, self.plans[i], {"margin": 0, **change}, found)
            # What cannot fit by exact numbers would only cost time; a tensor split has none.
            short = min(d.headroom for d in other.devices)
            if change.get("split_mode", "layer") == "layer" and short < 0:
                self.keep(i, pair, Trial(name, error=f"does not fit by {-short >> 20} MiB"))
                continue
            await self.trial(i, pair, other, name)
        done = {t["name"] for t in self.rows[i]["trials"]}
        if self.clock.left >= reserve_s and i in self.plans and pairs_report.AGAIN not in done:
            # How far two loads of one plan differ is the noise of this comparison.
            await self.trial(i, pair, self.plans[i], pairs_report.AGAIN)

    async def _extras(self) -> None:
        """Other order, a card gone, a card filled: with the smallest model that needs both."""
        ready = [i for i, plan in self.plans.items() if sum(1 for d in plan.devices if d.used) > 1]
        if not ready:
            return
        i = min(ready, key=lambda i: self.path(self.pairs[i]).stat().st_size)
        parts = (self._reversed, self._filled, self._taken_away)
        await self._guarded(i, self.pairs[i], *parts)

    async def _reversed(self, i: int, pair: Pair, found: Devices) -> None:
        """What was learned of each card is found again by its UUID when the order changes."""
        shape = shape_of(self.path(pair))
        with self.machine.reversed():
            turned = self.machine.found()
            asked = msgspec.structs.replace(request(pair), observed=self.seen)
            plan = make_plan(shape, turned, asked)
            trial = await self.trial(i, pair, plan, "reversed", filled=True)
        first = next(t for t in self.rows[i]["trials"] if t["name"] == "edgellm")
        self.extra["reversed"] = {
            "order": [gpu.uuid or gpu.name for gpu in turned.gpus],
            "before": [gpu.uuid or gpu.name for gpu in found.gpus],
            "overhead": {d.uuid or d.name: d.overhead for d in plan.devices},
            "learned": {x.device: x.overhead for x in self.seen if x.arch == plan.model.arch},
            "same_text": None if trial is None else trial.text == first["text"],
        }

    async def _taken_away(self, i: int, pair: Pair, found: Devices) -> None:
        plan = make_plan(shape_of(self.path(pair)), found, request(pair))
        again = replanner(self.machine.pool, request(pair))
        self.extra["pair"] = str(self.pairs[i])
        with self.machine.without_last():
            self.extra["taken away"] = await outcome(plan, again)
            self.extra["taken away, not replanned"] = await outcome(plan, None)

    async def _filled(self, i: int, pair: Pair, found: Devices) -> None:
        plan = make_plan(shape_of(self.path(pair)), found, request(pair))
        filled: AbstractContextManager[Any] | None = self.machine.filled_last()
        if filled is not None:
            again = replanner(self.machine.pool, request(pair))
            with filled:
                self.extra[f"filled by others ({self.pairs[i]})"] = await outcome(plan, again)

    # -- one trial

    async def trial(
        self, i: int, pair: Pair, plan: Plan | None, name: str, *, filled: bool = False
    ) -> Trial | None:
        if not self.clock.has_time(pair):
            return None
        if plan is None:
            trial = Trial(name, error="no plan fits")
        else:
            trial = await self._timed(plan, pair, name, filled=filled)
        self.keep(i, pair, trial)
        return trial

    async def _timed(self, plan: Plan, pair: Pair, name: str, *, filled: bool) -> Trial:
        began = time.monotonic()
        split = "+".join(str(d.n_layers) for d in plan.devices)
        trial = Trial(name, split=split, plan=plan.to_json())
        limit = max(self.clock.left, 1.0)
        try:
            await asyncio.wait_for(self._measure(trial, plan, pair, filled), limit)
        except FAILURES as error:
            trial.error = words(error) or "no time was left"
        trial.seconds = round(time.monotonic() - began, 1)
        return trial

    async def _measure(self, trial: Trial, plan: Plan, pair: Pair, filled: bool) -> None:
        """Load, time, fill the context where asked, and write down what came of it."""
        before = self.machine.processes()
        is_own = trial.name in ("edgellm", "reversed", pairs_report.AGAIN)
        on_progress: OnProgress | None = None if is_own else no_second_try
        async with loaded(plan, on_progress, OPTIONS) as engine:
            report = engine.report
            trial.fallbacks = report.fallbacks
            timed = await one_stream(engine, long_prompt(pair))
            trial.decode_tps, trial.prefill_tps = timed.decode_tps, timed.prefill_tps
            trial.text = await greedy(engine)
            if filled:  # after the timing: the cells of a full cache are all read in every step
                await fill(engine)
            grown = new_bytes(before, self.machine.processes(), self.machine.owners(engine))
            trial.cards = card_rows(plan, msgspec.to_builtins(report), grown)
            used = {d.uuid for d in plan.devices if d.used}
            trial.elsewhere = sum(n for uuid, n in grown.items() if uuid not in used)
            if not report.fallbacks and trial.name == "edgellm":
                self.seen = observed.merged(self.seen, observed.observe(plan, report, time.time()))

    # -- what is kept

    def keep(self, i: int, pair: Pair, trial: Trial) -> None:
        self.clock.took(pair, trial.seconds)
        self.rows[i]["trials"].append(asdict(trial))
        print(
            f"{pair} {trial.name} [{trial.split}] decode {trial.decode_tps or 0:.1f} prefill "
            f"{trial.prefill_tps or 0:.0f} in {trial.seconds:.1f} s, {self.clock.left:.0f} s left "
            f"{trial.error} {' '.join(trial.fallbacks)}",
            flush=True,
        )
        self.save()

    def save(self) -> None:
        done = {"rows": self.rows, "extra": self.extra}
        (self.args.out / "pairs.json").write_text(json.dumps(done, indent=1))
        (self.args.out / "pairs.md").write_text(pairs_report.markdown(self.rows, self.extra))

    def path(self, pair: Pair) -> Path:
        return model_path(self.args, pair.model)


def request(pair: Pair) -> PlanRequest:
    return PlanRequest(n_ctx=pair.n_ctx, n_seq_max=N_SEQ)


def long_prompt(pair: Pair) -> int:
    return min(N_LONG, pair.n_ctx // 2)


def shape_of(path: Path) -> ModelShape:
    return model_shape(read_gguf(path))


def larger_alone(shape: ModelShape, found: Devices, pair: Pair) -> Plan | None:
    """The best plan for the larger card by itself; the other is not even initialised."""
    larger = max(found.gpus, key=lambda gpu: gpu.free)
    try:
        return make_plan(shape, msgspec.structs.replace(found, gpus=(larger,)), request(pair))
    except EdgeLLMError:
        return None


def others(
    plan: Plan, shape: ModelShape, free: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other splits around the planned one, then other kinds of split, then other ubatches."""
    p = plan.params
    every = shape.n_layer + 1
    kept = {
        "n_gpu_layers": p.n_gpu_layers,
        "n_ubatch": p.n_ubatch,
        "type_k": p.type_k,
        "type_v": p.type_v,
        "n_cpu_moe": p.n_cpu_moe,
    }
    n_gpu = every if p.n_gpu_layers < 0 else min(p.n_gpu_layers, every)
    planned = next((d.n_layers for d in plan.devices if d.used), n_gpu)
    step = max(2, every // 12)
    by_free = round(n_gpu * free[0] / sum(free))
    wanted = [by_free, n_gpu // 2, planned - step, planned + step]
    for first in dict.fromkeys(n for n in wanted if 0 < n < n_gpu and n != planned):
        yield (
            f"{first}+{n_gpu - first}",
            kept | {"tensor_split": (float(first), float(n_gpu - first))},
        )
    # Shares of each tensor, by free memory: the only ones that can fit.
    shares = tuple(round(bytes_ / sum(free), 2) for bytes_ in free)
    if n_gpu == every:
        for mode in ("tensor", "row"):
            change = {"split_mode": mode, "tensor_split": shares, "flash_attn": "on"}
            yield mode, kept | change
    if len([d for d in plan.devices if d.used]) > 1:
        split = {"tensor_split": p.tensor_split}
        for n_ubatch in (2048, 128):  # one ubatch a batch: nothing to pipeline; sixteen
            yield f"ubatch {n_ubatch}", kept | split | {"n_ubatch": n_ubatch}


def new_bytes(
    before: dict[str, dict[int, int]],
    after: dict[str, dict[int, int]],
    owners: frozenset[int] | None = None,
) -> dict[str, int]:
    """What processes that were not there before hold, by device; of ``owners`` alone when given."""
    return {
        uuid: sum(
            n
            for pid, n in held.items()
            if pid not in before.get(uuid, {}) and (owners is None or pid in owners)
        )
        for uuid, held in after.items()
    }


def card_rows(plan: Plan, report: dict[str, Any], grown: dict[str, int]) -> list[dict[str, Any]]:
    """Each card's ledger, what llama.cpp says of it and what the driver does."""
    measured = {entry["id"]: entry for entry in report["measured"]}
    return [
        {
            "id": device.id,
            "uuid": device.uuid,
            "planned": msgspec.to_builtins(device),
            "measured": measured.get(device.id, {}),
            "process": grown.get(device.uuid or ""),
        }
        for device in plan.devices
    ]


async def greedy(engine: Engine) -> str:
    """A few tokens without chance, as text."""
    asked = Request(
        id="greedy",
        prompt=prompt(64, engine.info.n_vocab, 7),
        sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
    )
    return "".join([event.text async for event in engine.generate(asked)])


async def outcome(plan: Plan, replan: Any) -> str:
    """What loading a plan came to whose devices have changed."""
    try:
        engine = await asyncio.wait_for(Engine.load(plan, options=OPTIONS, replan=replan), 120)
    except FAILURES as error:
        return f"error: {words(error)}"
    try:
        text = await greedy(engine)
        split = ", ".join(f"{d.id} {d.n_layers}" for d in engine.plan.devices)
        steps = "; ".join(engine.report.fallbacks)
        return f"loaded: {split or 'host only'}; {steps or 'no step down'}; {len(text)} characters"
    finally:
        await engine.close()


def model_path(args: argparse.Namespace, model: str) -> Path:
    given = Path(model)
    return given if given.suffix == ".gguf" else Path(args.folder) / f"{model}-filled.gguf"


def write_models(args: argparse.Namespace, names: Iterable[str]) -> None:
    """The filled models that are missing, a process each."""
    todo = [name for name in dict.fromkeys(names) if not model_path(args, name).exists()]
    with ProcessPoolExecutor(max(len(todo), 1)) as pool:
        jobs = [pool.submit(write_one, name, model_path(args, name), args.vocab) for name in todo]
        for job in jobs:
            job.result()


def write_one(name: str, path: Path, vocabs: list[Path]) -> None:
    began = time.monotonic()
    partial = path.with_suffix(".partial")
    size = synthetic.write_model(name, partial, vocabs=vocabs)
    partial.rename(path)
    print(f"wrote {path.name}: {size >> 20} MiB, {time.monotonic() - began:.0f} s", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/edgellm-models"))
    parser.add_argument("--vocab", type=Path, action="append", default=[])
    parser.add_argument("--llama-server", default="", help="its own fit is raced when given")
    parser.add_argument("--pairs", default=PAIRS, help="8+4:MODEL@CTX,...")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--ram", type=parse_bytes, help="RAM to plan with, such as 64GiB")
    parser.add_argument("--loopback", action="store_true", help="workers here in place of cards")
    return parser.parse_args()


def stop(*_: object) -> None:
    raise SystemExit("stopped: what was measured is in the report")


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, stop)
    args.out.mkdir(parents=True, exist_ok=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    race = Race(args, Loopback(args.ram) if args.loopback else Cards(args.ram))
    write_models(args, (pair.model for pair in race.pairs))
    asyncio.run(race.run())
    race.save()
    print((args.out / "pairs.md").read_text())


if __name__ == "__main__":
    main()
