"""Plan, dry run and measurement side by side: 16 architectures, 8 settings each, one GPU.

Every case runs in a process of its own, so that what the driver charges it (context, kernels,
workspaces) is that case's alone. The model files are sparse: only memory is measured here.

    python benchmarks/gpu/memory.py --out results/ [--models llama-3.1-8b,...] [--jobs 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgellm.units import MiB

HERE = Path(__file__)
ENTRIES = ("weights", "kv_cache", "recurrent_state", "compute")
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.01, 16 * MiB
UNATTRIBUTED = 18 * MiB
"""What the driver charges the device and no process; plans are for the device."""


@dataclass(frozen=True)
class Setting:
    """One column of the table: a name and what it changes of edgellm's own defaults."""

    name: str
    request: dict[str, Any] = field(default_factory=dict)
    layers: str = "all"
    """all, half or one."""
    experts: str = "gpu"


SETTINGS = (
    Setting("4k", {"n_ctx": 4096}),
    Setting("32k-q8", {"n_ctx": 32768, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}),
    Setting("8k-8seq-ub64", {"n_ctx": 8192, "n_seq_max": 8, "n_ubatch": 64, "n_outputs_max": 8}),
    Setting("8k-half", {"n_ctx": 8192}, layers="half"),
    Setting("8k-no-fa", {"n_ctx": 8192, "flash_attn": "off"}),
    Setting("16k-4seq-split", {"n_ctx": 16384, "n_seq_max": 4, "kv_unified": False}),
    Setting("4k-experts-or-one", {"n_ctx": 4096}, layers="one", experts="host"),
    Setting("4k-all-logits-ub1024", {"n_ctx": 4096, "n_ubatch": 1024, "n_outputs_max": 1024}),
)


@dataclass(frozen=True)
class Case:
    model: str
    path: str
    setting: str
    request: dict[str, Any]


def cases(names: list[str], folder: Path) -> list[Case]:
    """Every model with every setting; ``half`` and ``one`` become numbers of layers."""
    import synthetic  # numpy with it: not in the process that loads llama.cpp

    from edgellm.gguf.reader import read_gguf
    from edgellm.gguf.shape import model_shape

    out = []
    for name in names:
        path = folder / f"{name}.gguf"
        synthetic.write_model(name, path, sparse=True)
        shape = model_shape(read_gguf(path))
        for setting in SETTINGS:
            request = {"n_outputs_max": 1, "kv_unified": True, **setting.request}
            request["n_batch"] = max(512, request.get("n_ubatch", 512))
            if setting.experts == "host" and shape.n_expert:
                request |= {"n_gpu_layers": -1, "n_cpu_moe": shape.n_layer // 2}
            else:
                layers = {"all": -1, "half": shape.n_layer // 2, "one": 1}
                request["n_gpu_layers"] = layers[setting.layers]
            out.append(Case(name, str(path), setting.name, request))
    return out


def run_one(case: Case) -> dict[str, Any]:
    """In a process of its own: the plan, the real load with its warm-up, then the dry run."""
    # llama_cpp before numpy: the other order crashes inside a CUDA build's model load.
    from edgellm.engine import llama
    from edgellm.engine.info import EngineOptions

    import pynvml  # isort: skip
    from edgellm import devices
    from edgellm.gguf.reader import read_gguf
    from edgellm.gguf.shape import model_shape
    from edgellm.planner.fit import make_plan
    from edgellm.planner.plan import PlanRequest

    request = PlanRequest(fixed=True, force=True, **case.request)
    found = devices.probe()
    plan = make_plan(model_shape(read_gguf(case.path)), found, request)
    options = EngineOptions()
    pynvml.nvmlInit()
    # The driver's list knows nothing of CUDA_VISIBLE_DEVICES: its card 0 may be another.
    card = pynvml.nvmlDeviceGetHandleByUUID(found.gpus[0].uuid)
    before = used_by_device(pynvml, card)
    began = time.monotonic()
    backend = llama.load(plan, options, lambda _: None)
    load_s = time.monotonic() - began
    after = used_by_device(pynvml, card)
    own = used_by_this_process(pynvml, card)
    report = backend.report
    backend.close()
    dry = llama.dry_run(plan, options)
    return {
        "planned": plan.to_json(),
        "measured": {m.id: asdict_struct(m) for m in report.measured},
        "dry_run": {m.id: asdict_struct(m) for m in dry.measured},
        "offloaded": report.offloaded,
        "driver_before": before,
        "driver_after": after,
        "driver_own": own,
        "load_s": round(load_s, 2),
    }


def asdict_struct(value: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(value))


def used_by_device(nvml: Any, card: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(card).used)


def used_by_this_process(nvml: Any, card: Any) -> int | None:
    import os

    for process in nvml.nvmlDeviceGetComputeRunningProcesses(card):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    return None


def run_apart(case: Case) -> dict[str, Any]:
    command = [sys.executable, str(HERE), "--one", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    row: dict[str, Any] = {"model": case.model, "setting": case.setting, "request": case.request}
    last = done.stdout.strip().rsplit("\n", 1)[-1]
    if done.returncode != 0 or not last.startswith("{"):
        return row | {"error": (done.stderr or done.stdout)[-1500:], "rc": done.returncode}
    return row | json.loads(last) | {"error": None}


def compare(row: dict[str, Any], alone: bool) -> dict[str, Any]:
    """Planned less measured, in bytes, by ledger entry and for the whole device."""
    planned = row["planned"]["devices"][0]
    measured = row["measured"].get(planned["id"], {})
    dry = row["dry_run"].get(planned["id"], {})
    out = {entry: planned[entry] - measured.get(entry, 0) for entry in ENTRIES}
    out["dry_compute"] = dry.get("compute", 0) - measured.get("compute", 0)
    buffers = sum(measured.get(entry, 0) for entry in (*ENTRIES, "output"))
    used = row["driver_own"] + UNATTRIBUTED if row["driver_own"] else None
    if used is None and alone:
        used = row["driver_after"] - row["driver_before"]
    if used is not None:
        out["overhead_measured"] = used - buffers
        # Without flash attention some of it is only taken as the context fills.
        out["used"] = planned["used"] - planned.get("growth", 0) - used
        out["used_share"] = out["used"] / max(used, 1)
    return out


def outside(diff: dict[str, Any], row: dict[str, Any]) -> bool:
    measured = row["measured"].get(row["planned"]["devices"][0]["id"], {})
    for entry in ENTRIES:
        allowed = max(TOLERANCE_SHARE * measured.get(entry, 0), TOLERANCE_BYTES)
        if abs(diff[entry]) > allowed:
            return True
    used = row["planned"]["devices"][0]["used"]
    return abs(diff.get("used", 0)) > max(TOLERANCE_SHARE * used, TOLERANCE_BYTES)


def table(rows: list[dict[str, Any]], alone: bool) -> str:
    head = ("model", "setting", "weights", "KV", "state", "compute", "dry", "overhead", "used", "")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        if row["error"]:
            lines.append(f"| {row['model']} | {row['setting']} | failed: {row['rc']} |" + " |" * 7)
            continue
        d = compare(row, alone)
        cells = [*(d[e] for e in ENTRIES), d["dry_compute"], d.get("overhead_measured")]
        cells.append(d.get("used"))
        text = ["" if c is None else f"{c / MiB:+.1f}" for c in cells]
        mark = "outside" if outside(d, row) else ""
        lines.append("| " + " | ".join([row["model"], row["setting"], *text, mark]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/edgellm-models"))
    parser.add_argument("--models", help="comma-separated; default: all in headers/")
    parser.add_argument("--settings", help="comma-separated; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_one(Case(**json.loads(args.one)))))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    every = sorted(json.loads((HERE.parent / "headers" / "file_bytes.json").read_text()))
    todo = cases(args.models.split(",") if args.models else every, args.folder)
    if args.settings:
        todo = [case for case in todo if case.setting in args.settings.split(",")]
    results = args.out / "memory.jsonl"
    known = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    done = {(row["model"], row["setting"]) for row in known}
    todo = [case for case in todo if (case.model, case.setting) not in done]
    with ThreadPoolExecutor(args.jobs) as pool, results.open("a") as out:
        for row in pool.map(run_apart, todo):
            out.write(json.dumps(row) + "\n")
            out.flush()
            known.append(row)
    text = table(known, alone=args.jobs == 1)
    (args.out / "memory.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
