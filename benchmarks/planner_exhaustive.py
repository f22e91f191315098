"""Is the chosen plan the best? Against every placement and lever, by the same predictor.

`python benchmarks/planner_exhaustive.py` prints a table of 12 models on 4 to 24 GiB: the predicted
speed of the plan, and of the best that an exhaustive search finds.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from edgellm.devices import Devices, Gpu, Host, hypothetical
from edgellm.errors import DoesNotFitError
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner.estimate import Ledger, estimate, replace
from edgellm.planner.fit import make_plan
from edgellm.planner.params import UBATCHES, base_params, kv_kinds
from edgellm.planner.placement import HOST
from edgellm.planner.plan import PlanParams, PlanRequest
from edgellm.planner.speed import card, host_card, predict
from edgellm.planner.terms import terms_of
from edgellm.units import GiB

HEADERS = Path(__file__).parent.parent / "tests" / "data" / "planner" / "headers"
MODELS = (
    "llama-3.2-1b", "qwen3-4b", "llama-2-7b", "qwen2.5-7b", "llama-3.1-8b", "qwen3-8b",
    "gemma-2-9b", "gemma-3-12b", "gemma-4-12b", "gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b",
)  # fmt: skip
BUDGETS = (4, 6, 8, 12, 16, 24)
CPU = Host(cpu="cpu", n_physical=8, n_logical=16, total=64 * GiB, available=60 * GiB)


@dataclass(frozen=True)
class Best:
    """The fastest that fits; 0 when nothing does."""

    decode_tps: float
    n_gpu_layers: int = 0
    n_cpu_moe: int = 0


def shape_of(model: str) -> ModelShape:
    sizes = msgspec.json.decode((HEADERS / "file_bytes.json").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model}.gguf"
        shutil.copyfile(HEADERS / f"{model}.gguf-header", path)
        os.truncate(path, sizes[model])
        return model_shape(read_gguf(path))


def placements(shape: ModelShape, params: PlanParams, gpu: Gpu) -> list[tuple[float, int, int]]:
    """Every (decode speed, layers on the card, layers with experts on the host), fastest first."""
    n_all = shape.n_layer_all + 1
    experts = range(n_all) if shape.has_experts else range(1)
    found = []
    for n, n_cpu_moe in product(range(n_all + 1), experts):
        where = [HOST if il < n_all - n else 0 for il in range(n_all)]
        placed = replace(params, n_gpu_layers=n, n_cpu_moe=n_cpu_moe)
        speed = predict(shape, placed, where, [card(gpu)], host_card(CPU))
        found.append((speed.decode_tps, n, n_cpu_moe))
    return sorted(found, key=lambda x: (-x[0], x[2]))


def ledgers(
    shape: ModelShape, request: PlanRequest, gpu: Gpu, n: int, n_cpu_moe: int
) -> Iterator[Ledger]:
    """The exact ledgers of a placement under every cache type and ubatch."""
    base = base_params(shape, Devices(host=CPU, gpus=(gpu,)), request)
    for (type_k, type_v), n_ubatch in product(kv_kinds(shape, request), UBATCHES):
        params = replace(
            base,
            n_gpu_layers=n,
            n_cpu_moe=n_cpu_moe,
            type_k=type_k,
            type_v=type_v,
            n_ubatch=n_ubatch,
        )
        yield estimate(shape, params, [gpu], CPU, terms_of(shape, [gpu], request))


def best_of_all(shape: ModelShape, gpu: Gpu, request: PlanRequest) -> Best:
    """The first placement, from the fastest on, that fits with any lever."""
    params = base_params(shape, Devices(host=CPU, gpus=(gpu,)), request)
    per_layer = [x.n_bytes for x in shape.layers]
    experts = [x.expert_bytes for x in shape.layers]
    for speed, n, n_cpu_moe in placements(shape, params, gpu):
        first = max(shape.n_layer_all + 1 - n, 0)
        weights = sum(per_layer[first:]) - sum(experts[first : max(first, n_cpu_moe)])
        if weights > gpu.free:
            continue
        if any(ledger.fits for ledger in ledgers(shape, request, gpu, n, n_cpu_moe)):
            return Best(speed, n, n_cpu_moe)
    return Best(0.0)


def compare(shape: ModelShape, gib: int, request: PlanRequest) -> tuple[float, Best]:
    """(the plan's predicted speed, the best there is)."""
    gpu = hypothetical([gib * GiB])[0]
    try:
        made = make_plan(shape, Devices(host=CPU, gpus=(gpu,)), request)
        chosen = made.speed.decode_tps
    except DoesNotFitError:
        chosen = 0.0
    return chosen, best_of_all(shape, gpu, request)


def main() -> int:
    worst = 1.0
    print("| Model | GiB | Plan tok/s | Best tok/s | Share |\n|---|---:|---:|---:|---:|")
    for model in sys.argv[1:] or MODELS:
        shape = shape_of(model)
        for gib in BUDGETS:
            chosen, best = compare(shape, gib, PlanRequest())
            share = chosen / best.decode_tps if best.decode_tps else 1.0
            worst = min(worst, share)
            print(f"| {model} | {gib} | {chosen:.1f} | {best.decode_tps:.1f} | {share:.3f} |")
    print(f"\nworst share: {worst:.3f}")
    return int(worst < 0.98)


if __name__ == "__main__":
    sys.exit(main())
