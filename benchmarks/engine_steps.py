"""Steady decode of the engine's loop against llama-batched-bench, and where a step's time goes.

    python benchmarks/engine_steps.py MODEL.gguf --streams 1,8,32 --ngl -1 \
        --batched-bench build/bin/llama-batched-bench --json out.json

The loop runs in this process and packs its frames, all but the socket: what is measured is
schedule + decode + sample + deliver. Prompts are random token ids; outputs have a fixed length (end
tokens are ignored). The peer computes the same batch without sampling anything. Set
LLAMA_CPP_LIB_PATH to use another build.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bare_plan import bare_plan
from edgellm.engine import wire
from edgellm.engine.info import EngineOptions, Script
from edgellm.engine.loop import Arrived, Loop
from edgellm.engine.sequence import State
from edgellm.engine.worker import open_backend
from edgellm.planner.plan import Plan
from edgellm.request import Request, SamplingParams


def make_plan(args: argparse.Namespace, n_seq: int) -> Plan:
    """A plan straight from the arguments: nothing is estimated here."""
    n_ctx = -(-(args.prompt + args.output + 32) // 256) * 256 * n_seq
    return bare_plan(
        args.model,
        n_gpu_layers=args.ngl,
        n_ctx=n_ctx,
        n_ctx_seq=n_ctx if args.kv_unified == "on" else n_ctx // n_seq,
        kv_unified=args.kv_unified == "on",
        n_batch=args.batch,
        n_ubatch=args.ubatch,
        n_seq_max=n_seq,
        n_outputs_max=n_seq,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn=args.flash_attn,
    )


def sampling(args: argparse.Namespace, seed: int) -> SamplingParams:
    """The default chain, or greedy, or the chain with log-probabilities."""
    if args.sampling == "greedy":
        return SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
    logprobs = 1 if args.sampling == "logprobs" else None
    return SamplingParams(max_tokens=args.output, ignore_eos=True, seed=seed, logprobs=logprobs)


def steady(loop: Loop, n: int, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Run n requests together; rates from the step in which all decode to the first one's end."""
    numbers = random.Random(seed)
    n_vocab = loop.backend.info.n_vocab
    for i in range(n):
        prompt = array("i", [numbers.randrange(n_vocab // 2, n_vocab) for _ in range(args.prompt)])
        request = Request(id=f"b{seed}-{i}", prompt=(1,), sampling=sampling(args, i))
        loop.inbox.put(Arrived(request, prompt, time.monotonic()))
    loop._take_in()
    began = time.monotonic()
    running = loop.scheduler.running
    while not (len(running) == n and all(s.n_output > 0 for s in running)):
        loop.turn()
    ready = time.monotonic()
    parts: list[tuple[float, ...]] = []
    gaps: list[float] = []
    while len(running) == n and all(s.state is State.RUNNING for s in running):
        t = time.monotonic()
        loop.turn()
        gaps.append(time.monotonic() - t)
        parts.append(loop.meter.last)
    while loop.scheduler.has_work:
        loop.turn()
    names = ("schedule_s", "decode_s", "sample_s", "deliver_s")
    split = {k: statistics.median(p[i] for p in parts) for i, k in enumerate(names)}
    total = sum(gaps)
    own = [g - p[1] - p[2] for g, p in zip(gaps, parts, strict=True)]
    return {
        "decode_tps": n * len(gaps) / total,
        "prefill_tps": n * args.prompt / (ready - began),
        "step_s": statistics.median(gaps),
        "python_s": statistics.median(own),
        **split,
    }


def peer(args: argparse.Namespace, streams: list[int]) -> dict[int, dict[str, float]]:
    """llama-batched-bench's S_TG and S_PP by batch size."""
    if not args.batched_bench:
        return {}
    most = max(streams)
    command = [args.batched_bench, "-m", args.model, "-npp", str(args.prompt)]
    command += ["-ntg", str(args.output), "-npl", ",".join(map(str, streams))]
    command += ["-c", str((args.prompt + args.output + 32) * most), "-b", str(args.batch)]
    command += ["-ub", str(args.ubatch), "-ngl", str(args.ngl), "-t", str(args.threads)]
    command += ["-fa", args.flash_attn, "-kvu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        cells = [c.strip() for c in line.split("|")[1:-1]]
        if len(cells) >= 9 and re.fullmatch(r"\d+", cells[0]):
            found[int(cells[2])] = {"prefill_tps": float(cells[5]), "decode_tps": float(cells[7])}
    return found


def print_nothing(_: object) -> None:
    """Progress is of no interest here."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every batch size in turn, several rounds, medians."""
    streams = [int(s) for s in args.streams.split(",")]
    script = Script(answer_tokens=0, step_s=args.step_s)
    options = EngineOptions(retain_prefixes=False, attach_top_k=args.top_k, script=script)
    rounds: dict[int, list[dict[str, float]]] = {n: [] for n in streams}
    peers: dict[int, list[dict[str, float]]] = {n: [] for n in streams}
    sent = 0

    def send(message: wire.FromChild) -> None:
        nonlocal sent
        sent += len(wire.pack(message))

    for n in streams:
        plan = make_plan(args, n)
        backend = open_backend(args.backend)(plan, options, print_nothing)
        loop = Loop(backend, options, send)
        steady(loop, n, args, 999)
        for i in range(args.rounds):
            rounds[n].append(steady(loop, n, args, i))
        backend.close()
    for _ in range(args.rounds if args.batched_bench else 0):
        for n, numbers in peer(args, streams).items():
            peers[n].append(numbers)
    return {"rows": [_row(n, rounds[n], peers[n]) for n in streams], "args": vars(args)}


def _row(n: int, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    row: dict[str, float] = {"streams": n}
    row |= {k: statistics.median(r[k] for r in ours) for k in ours[0]}
    if theirs:
        row["peer_decode_tps"] = statistics.median(r["decode_tps"] for r in theirs)
        row["peer_prefill_tps"] = statistics.median(r["prefill_tps"] for r in theirs)
        row["ratio"] = row["decode_tps"] / row["peer_decode_tps"]
    return row


def show(rows: list[dict[str, float]]) -> None:
    """A table for people; the split is in milliseconds."""
    print("streams  tok/s    peer   ratio | step ms  sched decode sample deliver | python ms")
    for row in rows:
        ms = {k: row[k] * 1e3 for k in row if k.endswith("_s")}
        print(
            f"{row['streams']:7.0f} {row['decode_tps']:7.1f} {row.get('peer_decode_tps', 0):7.1f} "
            f"{row.get('ratio', 0):6.3f} | {ms['step_s']:7.2f} {ms['schedule_s']:6.3f} "
            f"{ms['decode_s']:6.2f} {ms['sample_s']:6.3f} {ms['deliver_s']:6.3f} | "
            f"{ms['python_s']:6.3f}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--backend", default="llama", choices=("llama", "scripted"))
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=104)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ngl", type=int, default=0)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-attn", default="auto")
    parser.add_argument("--kv-unified", default="on", choices=("on", "off"))
    parser.add_argument("--sampling", default="default", choices=("default", "greedy", "logprobs"))
    parser.add_argument("--top-k", type=int, default=0, help="candidates chosen on the GPU")
    parser.add_argument("--step-s", type=float, default=0.0, help="scripted backend's step")
    parser.add_argument("--batched-bench", default=None)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    result = measure(args)
    show(result["rows"])
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
