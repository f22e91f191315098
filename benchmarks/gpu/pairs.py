"""Two cards: edgellm's split, llama-server's own, a sweep of splits and the larger card alone.

Ballast makes pairs of unequal cards out of two large ones (capacity only). For each model and
pair: edgellm's plan is loaded, its context filled with several sequences, its speed for one stream
measured and its ledger held against what llama.cpp allocated, card by card.

    python benchmarks/gpu/pairs.py --out results/ --llama-server bin/llama-server \\
        --vocab ggml-vocab-llama-bpe.gguf [--pairs 8+4:llama-3.1-8b]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from ballast import emulated_card
from cards import Trial, attempt, fixed_plan, time_llama_server, time_plan, tps

from edgellm import devices
from edgellm.devices import Devices
from edgellm.errors import EdgeLLMError
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.units import GiB, MiB

PAIRS = (
    ((8, 4), "llama-3.1-8b"),
    ((12, 12), "qwen3-30b-a3b"),
    ((16, 8), "gemma-3-12b"),
    ((24, 6), "qwen3-30b-a3b"),
    ((4, 4), "llama-3.1-8b"),
    ((8, 4), "gemma-3-12b"),
)
ENTRIES = ("weights", "kv_cache", "recurrent_state", "compute")


def splits(plan: Plan, shape: ModelShape) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Shares of the layers around the planned ones: by tenths, from one card to the other."""
    every = shape.n_layer + 1
    planned = (
        round(every * plan.params.tensor_split[0] / sum(plan.params.tensor_split))
        if (plan.params.tensor_split)
        else every
    )
    for first in sorted({planned - 4, planned - 2, planned + 2, planned + 4, every // 2}):
        if 0 < first < every and first != planned:
            yield f"{first}+{every - first}", (float(first), float(every - first))


def ledger_errors(plan: Plan, report: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Planned less measured, by card and entry (bytes)."""
    measured = {entry["id"]: entry for entry in report.get("measured", ())}
    return {
        device.id: {
            name: getattr(device, name) - measured.get(device.id, {}).get(name, 0)
            for name in ENTRIES
        }
        for device in plan.devices
    }


async def run_pair(
    pair: tuple[int, ...], name: str, path: Path, args: argparse.Namespace
) -> dict[str, Any]:
    shape = model_shape(read_gguf(path))
    with ExitStack() as stack:
        for index, size in enumerate(pair):
            stack.enter_context(emulated_card(size * GiB, index))
        found = devices.probe()
        plan = make_plan(shape, found, PlanRequest(n_ctx=args.ctx))
        try:
            own, report = await time_plan(plan, "edgellm", filled=True)
        except EdgeLLMError as error:
            own, report = Trial("edgellm", None, None, error=error.message[-160:]), {}
        log = args.out / f"{'+'.join(map(str, pair))}-{name}.log"
        peer = time_llama_server(args.llama_server, path, plan, log)
        alone = await larger_alone(shape, found, args.ctx)
        sweep = [
            await attempt(split_plan(shape, plan, split), title)
            for title, split in splits(plan, shape)
        ]
    return {
        "pair": list(pair),
        "model": name,
        "plan": plan.to_json(),
        "report": report,
        "errors": ledger_errors(plan, report),
        "edgellm": msgspec.to_builtins(own),
        "llama_server": msgspec.to_builtins(peer),
        "larger_alone": msgspec.to_builtins(alone),
        "sweep": [msgspec.to_builtins(trial) for trial in sweep],
    }


def split_plan(shape: ModelShape, plan: Plan, split: tuple[float, ...]) -> Plan:
    p = plan.params
    change = {
        "n_gpu_layers": p.n_gpu_layers,
        "n_ubatch": p.n_ubatch,
        "type_k": p.type_k,
        "type_v": p.type_v,
        "n_cpu_moe": p.n_cpu_moe,
        "tensor_split": split,
    }
    return fixed_plan(shape, plan, change)


async def larger_alone(shape: ModelShape, found: Devices, n_ctx: int) -> Trial:
    """The best plan for the larger card by itself, run with the other hidden by its share."""
    larger = max(found.gpus, key=lambda gpu: gpu.free)
    alone = msgspec.structs.replace(found, gpus=(larger,))
    try:
        plan = make_plan(shape, alone, PlanRequest(n_ctx=n_ctx))
    except EdgeLLMError as error:
        return Trial("larger alone", None, None, error=error.message[-160:])
    index = found.gpus.index(larger)
    split = tuple(float(i == index) for i in range(len(found.gpus)))
    params = msgspec.structs.replace(plan.params, tensor_split=split, main_gpu=index)
    return await attempt(msgspec.structs.replace(plan, params=params), "larger alone")


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "GiB", "model", "split", "decode", "prefill", "llama-server", "larger alone",
        "best of the sweep", "largest ledger error (MiB)",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        own = row["edgellm"]
        trials = [t for t in (own, *row["sweep"]) if t["decode_tps"]]
        best = max(trials, key=lambda t: t["decode_tps"], default=own)
        errors = [abs(v) for card in row["errors"].values() for v in card.values()]
        split = "+".join(str(d["n_layers"]) for d in row["plan"]["devices"])
        cells = (
            "+".join(map(str, row["pair"])), row["model"], f"{split} {own['error']}",
            tps(own["decode_tps"]), tps(own["prefill_tps"]),
            tps(row["llama_server"]["decode_tps"]), tps(row["larger_alone"]["decode_tps"]),
            f"{best['name']} {tps(best['decode_tps'])}", f"{max(errors, default=0) / MiB:.1f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    import synthetic

    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/edgellm-models"))
    parser.add_argument("--vocab", type=Path, action="append", required=True)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--pairs", help="8+4:model,...; default: the table in this file")
    parser.add_argument("--ctx", type=int, default=4096)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    pairs: tuple[tuple[tuple[int, ...], str], ...] = PAIRS
    if args.pairs:
        halves = (item.split(":") for item in args.pairs.split(","))
        pairs = tuple((tuple(map(int, sizes.split("+"))), name) for sizes, name in halves)
    rows: list[dict[str, Any]] = []
    for pair, name in sorted(pairs, key=lambda item: item[1]):
        path = args.folder / f"{name}-filled.gguf"
        if not path.exists():
            synthetic.write_model(name, path, vocabs=args.vocab)
        row = asyncio.run(run_pair(pair, name, path, args))
        rows.append(row)
        with (args.out / "pairs.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(table([row]).splitlines()[-1], flush=True)
    (args.out / "pairs.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
