"""Small cards: edgellm's own plan, llama-server's automatic fit and a sweep, on the same memory.

A ballast leaves 4 to 24 GiB of the real card free, so capacity is emulated and bandwidth is not.
For each model and card: edgellm's plan is loaded, its context is filled with several sequences,
and its speed for one stream is measured; llama-server fits itself at the same context; other
layer counts, ubatches and KV types around the plan are tried through the same engine.

    python benchmarks/gpu/cards.py --out results/ --llama-server bin/llama-server \\
        --vocab ggml-vocab-llama-bpe.gguf [--pairs 6:llama-3.1-8b,4:llama-3.1-8b]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

# llama_cpp is only loaded in children; numpy (synthetic) may come first here.
import synthetic
from ballast import emulated_card
from fitted import read_fit
from timing import N_OUTPUT, N_PROMPT, fill, loaded, no_second_try, one_stream, prompt

from edgellm import devices
from edgellm.devices import Devices
from edgellm.engine.client import OnProgress
from edgellm.errors import EdgeLLMError
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner import observed
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import LoadReport, Plan, PlanRequest
from edgellm.units import GiB, MiB

PAIRS = (
    (4, "llama-3.1-8b"),
    (6, "llama-3.1-8b"),
    (6, "qwen3-8b"),
    (4, "qwen3-4b"),
    (8, "gemma-3-12b"),
    (12, "gemma-3-12b"),
    (8, "gpt-oss-20b"),
    (12, "gpt-oss-20b"),
    (12, "qwen3-30b-a3b"),
    (16, "qwen3-30b-a3b"),
    (24, "qwen3-30b-a3b"),
)


@dataclass(frozen=True)
class Trial:
    """One configuration of one server on one emulated card, and what came of it."""

    name: str
    decode_tps: float | None
    prefill_tps: float | None
    n_gpu_layers: int | None = None
    detail: str = ""
    error: str = ""


async def time_plan(
    plan: Plan, name: str, *, filled: bool, on_progress: OnProgress | None = None
) -> tuple[Trial, dict[str, Any]]:
    """Load, time one stream (the better of two), and fill the context when asked."""
    async with loaded(plan, on_progress) as engine:
        timed = await one_stream(engine)
        if filled:
            await fill(engine)
        report = msgspec.to_builtins(engine.report)
        used = msgspec.structs.asdict(engine.plan.params)
    detail = f"ub {used['n_ubatch']} kv {used['type_k']} cpu-moe {used['n_cpu_moe']}" + "".join(
        f"; {step}" for step in report["fallbacks"]
    )
    trial = Trial(
        name,
        timed.decode_tps,
        timed.prefill_tps,
        used["n_gpu_layers"],
        detail,
    )
    return trial, report


async def attempt(plan: Plan, name: str) -> Trial:
    try:
        trial, _ = await time_plan(plan, name, filled=False, on_progress=no_second_try)
    except EdgeLLMError as error:
        return Trial(name, None, None, plan.params.n_gpu_layers, error=error.message[-160:])
    return trial


def neighbours(plan: Plan, shape: ModelShape) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plans around edgellm's own: more and fewer layers or experts, other ubatches and KV types."""
    p = plan.params
    every = shape.n_layer + 1
    layers = every if p.n_gpu_layers < 0 else min(p.n_gpu_layers, every)
    kept = {"n_gpu_layers": layers, "n_ubatch": p.n_ubatch, "type_k": p.type_k, "type_v": p.type_v}
    kept["n_cpu_moe"] = p.n_cpu_moe
    if shape.n_expert:
        for n in (p.n_cpu_moe - 2, p.n_cpu_moe - 1, p.n_cpu_moe + 2):
            if 0 <= n <= shape.n_layer:
                yield f"cpu-moe {n}", kept | {"n_cpu_moe": n}
    if p.n_cpu_moe == 0:
        for n in (layers - 2, layers + 1, layers + 2):
            if 0 <= n <= every:
                yield f"ngl {n}", kept | {"n_gpu_layers": n}
    other = 64 if p.n_ubatch > 64 else 512
    yield f"ub {other}", kept | {"n_ubatch": other}


def fixed_plan(
    shape: ModelShape, base: Plan, change: dict[str, Any], found: Devices | None = None
) -> Plan:
    """``base`` with ``change`` of its parameters, taken as they are."""
    p = base.params
    asked = {
        "n_ctx": p.n_ctx,
        "n_seq_max": p.n_seq_max,
        "n_batch": max(p.n_batch, change.get("n_ubatch", 0)),
        "n_outputs_max": p.n_outputs_max,
        "flash_attn": p.flash_attn,
        "kv_unified": p.kv_unified,
        "n_threads": p.n_threads,
        "n_threads_batch": p.n_threads_batch,
    }
    request = PlanRequest(fixed=True, force=True, **(asked | change))
    return make_plan(shape, found or devices.probe(), request)


@contextmanager
def llama_server(
    binary: str, path: Path, n_ctx: int, log: Path, more: Sequence[str] = ("-np", "1")
) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # -lv 4: what its fit chose is said at that level only
    command = [binary, "-m", str(path), "-c", str(n_ctx), "--port", str(port), "-lv", "4", *more]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_healthy(url: str, process: subprocess.Popen[bytes], limit_s: float = 120) -> None:
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("llama-server did not become healthy")


def completion(url: str, tokens: tuple[int, ...], n_output: int = N_OUTPUT) -> dict[str, Any]:
    """One answer's timings, as the server counts them."""
    body = {"prompt": tokens, "n_predict": n_output, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        timings: dict[str, Any] = json.loads(reply.read())["timings"]
    return timings


def time_llama_server(binary: str, path: Path, plan: Plan, log: Path) -> Trial:
    try:
        with llama_server(binary, path, plan.params.n_ctx, log) as url:
            runs = [completion(url, prompt(N_PROMPT, plan.model.n_vocab, 90 + i)) for i in range(2)]
    except (RuntimeError, OSError) as error:
        return Trial("llama-server", None, None, error=str(error)[-160:])
    fitted = read_fit(log.read_text(errors="replace").splitlines())
    return Trial(
        "llama-server",
        max(run["predicted_per_second"] for run in runs),
        max(run["prompt_per_second"] for run in runs),
        fitted.n_gpu_layers,
        str(fitted),
    )


async def run_pair(card: int, name: str, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything for one card and one model."""
    shape = model_shape(read_gguf(path))
    with emulated_card(card * GiB) as free:
        began = time.monotonic()
        plan = make_plan(shape, devices.probe(), PlanRequest(n_ctx=args.ctx))
        plan_s = time.monotonic() - began
        try:
            own, report = await time_plan(plan, "edgellm", filled=True)
        except EdgeLLMError as error:
            own, report = Trial("edgellm", None, None, error=error.message[-160:]), {}
        learned = await later_load(shape, plan, report, args.ctx) if report else None
        peer = time_llama_server(args.llama_server, path, plan, args.out / f"{card}-{name}.log")
        sweep = []
        if args.sweep:
            for title, change in neighbours(plan, shape):
                sweep.append(await attempt(fixed_plan(shape, plan, change), title))
            # How far two loads of one plan differ is the noise of this comparison.
            sweep.append(await attempt(plan, "edgellm again"))
    return {
        "card_gib": card,
        "model": name,
        "free_mib": free // MiB,
        "plan_s": round(plan_s, 4),
        "plan": plan.to_json(),
        "report": report,
        "edgellm": msgspec.to_builtins(own),
        "learned": msgspec.to_builtins(learned),
        "llama_server": msgspec.to_builtins(peer),
        "sweep": [msgspec.to_builtins(trial) for trial in sweep],
    }


async def later_load(
    shape: ModelShape, plan: Plan, report: dict[str, Any], n_ctx: int
) -> Trial | None:
    """The plan once the card is known: as many loads as it takes to learn its margin, then a new
    plan. None when that is the plan there was."""
    request = PlanRequest(n_ctx=n_ctx)
    seen = observed.observe(plan, msgspec.convert(report, LoadReport))
    known = tuple(msgspec.structs.replace(x, n_loads=observed.TRUSTED) for x in seen)
    expected = make_plan(shape, devices.probe(), msgspec.structs.replace(request, observed=known))
    if expected.params == plan.params:
        return None
    for _ in range(observed.TRUSTED - 1):
        async with loaded(plan) as engine:
            seen = observed.merged(seen, observed.observe(plan, engine.report))
    learned = make_plan(shape, devices.probe(), msgspec.structs.replace(request, observed=seen))
    try:
        trial, _ = await time_plan(learned, f"edgellm, load {observed.TRUSTED + 1}", filled=True)
    except EdgeLLMError as error:
        return Trial("edgellm, learned", None, None, error=error.message[-160:])
    return trial


def make_room(folder: Path, needed: int = 24 * GiB) -> None:
    """Remove filled models, oldest first, until another one fits on the disk."""
    for old in sorted(folder.glob("*-filled.gguf"), key=lambda path: path.stat().st_mtime):
        if shutil.disk_usage(folder).free >= needed:
            return
        old.unlink()


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "GiB", "model", "verdict", "edgellm layers", "decode", "predicted", "prefill", "learned",
        "llama-server layers", "decode", "prefill", "decode ratio", "best of the sweep",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        own, peer = row["edgellm"], row["llama_server"]
        learned = row.get("learned") or own
        best = max(
            (t for t in (own, learned, *row["sweep"]) if t["decode_tps"]),
            key=lambda t: t["decode_tps"],
            default=own,
        )
        ratio = (own["decode_tps"] or 0) / peer["decode_tps"] if peer["decode_tps"] else None
        cells = [
            row["card_gib"], row["model"], row["plan"]["verdict"],
            f"{own['n_gpu_layers']} {own['detail']}{own['error']}", tps(own["decode_tps"]),
            tps(row["plan"]["speed"]["decode_tps"]), tps(own["prefill_tps"]),
            learned_cell(row),
            f"{peer['n_gpu_layers']}{peer['error']}", tps(peer["decode_tps"]),
            tps(peer["prefill_tps"]), "" if ratio is None else f"{ratio:.2f}x",
            f"{best['name']} {tps(best['decode_tps'])}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def learned_cell(row: dict[str, Any]) -> str:
    trial = row.get("learned")
    if trial is None:
        return "the same"
    return f"{trial['n_gpu_layers']} {trial['detail']}{trial['error']}: {tps(trial['decode_tps'])}"


def tps(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/edgellm-models"))
    parser.add_argument("--vocab", type=Path, action="append", required=True)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--pairs", help="GiB:model,...; default: the table in this file")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    pairs = PAIRS
    if args.pairs:
        split = (pair.split(":") for pair in args.pairs.split(","))
        pairs = tuple((int(gib), name) for gib, name in split)
    results = args.out / "cards.jsonl"
    rows = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    done = {(row["card_gib"], row["model"]) for row in rows}
    for card, name in pairs:
        if (card, name) in done:
            continue
        path = args.folder / f"{name}-filled.gguf"
        if not path.exists():
            make_room(args.folder)
            synthetic.write_model(name, path, vocabs=args.vocab)
        row = asyncio.run(run_pair(card, name, path, args))
        rows.append(row)
        with results.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(table([row]).splitlines()[-1], flush=True)
    text = table(rows)
    (args.out / "cards.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
