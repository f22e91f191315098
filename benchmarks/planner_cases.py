"""Buffer sizes that others published, beside what the planner computes.

Headers are made from each model's published numbers (tests/data/planner/cases), so weights are
compared only where one quantisation fills the file. `python benchmarks/planner_cases.py` writes
docs/benchmarks/planner-cases.md.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from edgellm.devices import Gpu, Host
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner.estimate import Ledger, estimate
from edgellm.planner.params import fixed_params
from edgellm.planner.plan import PlanRequest
from edgellm.units import GiB, MiB

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "planner"
PAGE = ROOT / "docs" / "benchmarks" / "planner-cases.md"
ROWS = {r["id"]: r for r in map(json.loads, (DATA / "cases.jsonl").read_text().splitlines())}


F32_MASK = "a version whose attention masks were f32: twice the bytes on the host"


@dataclass(frozen=True)
class Case:
    """How a row's log is computed: its model, what the log leaves unsaid, what to compare."""

    model: str
    expect: dict[str, float]
    """Entry -> MiB, from the row."""
    request: dict[str, Any] = field(default_factory=dict)
    n_gpus: int = 1
    differs: str = ""
    """Why an entry may differ: another version of llama.cpp, of the fork, a rounded number."""


CASES: dict[str, Case] = {
    "hr-q35-9b-q4kxl-vk-1070ti-c8k-ub2048-np4": Case(
        "qwen3.5-9b",
        {"gpu_kv": 256.0, "gpu_rs": 184.25, "cpu_rs": 16.75, "gpu_compute": 447.38,
         "host_compute": 128.44, "host_output": 3.79},
        {"n_gpu_layers": 31, "n_outputs_max": 4},
    ),
    "hr-gemma4-12b-qat-vk-3080ti-c8k-ub2048-np4": Case(
        "gemma-4-12b",
        {"gpu_kv": 2048.0, "gpu_compute": 541.07, "host_compute": 116.08, "host_output": 4.0},
        {"n_gpu_layers": 49, "n_outputs_max": 4},
    ),
    "of-qwen-4b-q4_0-rocm-6700xt-c32k-q8kv": Case(
        "qwen1.5-4b",
        {"gpu_model": 2007.82, "gpu_kv": 6800.0, "gpu_compute": 372.09, "host_compute": 42.09,
         "host_output": 0.58},
        {"n_gpu_layers": 41, "n_outputs_max": 1},
    ),
    "gg-fitparams-readme-q3-30b-f16-cuda-4090-c4k": Case(
        "qwen3-30b-a3b",
        {"gpu_kv": 384.0, "host_compute": 12.0},
        {"n_gpu_layers": 48},
        differs="a version of 2025, where 48 of 49 layers were all but the output layer",
    ),
    "m5-gptoss20b-metal-c128k-np4": Case(
        "gpt-oss-20b",
        {"gpu_kv": 3096.0, "gpu_compute": 420.83, "host_compute": 269.27, "host_output": 3.07},
        {"n_gpu_layers": 25, "n_outputs_max": 4},
        differs=F32_MASK,
    ),
    "m5-gptoss20b-f16variant-metal-c128k-np1": Case(
        "gpt-oss-20b",
        {"gpu_kv": 3090.0, "gpu_compute": 420.08, "host_compute": 268.77, "host_output": 0.77},
        {"n_gpu_layers": 25},
        differs=F32_MASK,
    ),
    "m5-gptoss20b-metal-c128k-ub2048": Case(
        "gpt-oss-20b",
        {"gpu_kv": 3126.0, "gpu_compute": 1672.08, "host_compute": 1064.59, "host_output": 0.77},
        {"n_gpu_layers": 25},
        differs=F32_MASK,
    ),
    "ps-q3x-27b-cuda-3090-c200k-q8kv": Case(
        "qwen3.6-27b",
        {"gpu_kv": 6647.0, "gpu_rs": 149.62, "gpu_compute": 654.78, "host_compute": 411.29},
        {"n_gpu_layers": 65},
        differs=F32_MASK + "; and it unpacked a quantised cache outside the compute buffer",
    ),
    "sp-q36-27b-q4km-cuda-gb10-c32k": Case(
        "qwen3.6-27b",
        {"gpu_kv": 2048.0, "gpu_rs": 149.62, "gpu_compute": 495.0, "host_compute": 84.02,
         "host_output": 0.95},
        {"n_gpu_layers": -1},
        differs=F32_MASK,
    ),
    "ol-hermes3-8b-q4_0-cuda-2060-c32k": Case(
        "hermes3-8b",
        {"gpu_model": 2049.43, "gpu_kv": 1792.0, "cpu_kv": 2304.0,
         "gpu_compute": 248.0, "host_compute": 48.01, "host_output": 0.49},
        {"n_gpu_layers": 15},
    ),
    "ol-qwen25coder-7b-q4km-cuda-1650maxq-c4k": Case(
        "qwen2.5-7b",
        {"gpu_kv": 120.0, "gpu_compute": 183.44},
        {"n_gpu_layers": 16, "n_outputs_max": 1},
    ),
    "ag-q35-4b-q5kxl-mtp-cuda-4060laptop-c128k-q8kv": Case(
        "qwen3.5-4b",
        {"gpu_kv": 2176.0, "gpu_compute": 690.28},
        {"n_gpu_layers": 99, "n_outputs_max": 1},
    ),
    "lms-q3vl4b-vk-760m-c8k": Case(
        "qwen3vl-4b",
        {"gpu_kv": 1152.0, "gpu_compute": 301.0, "host_compute": 21.0},
        {"n_gpu_layers": -1},
    ),
    "hf-minimax-m21-reap-q2k-vk-l4-c32k-q8q4": Case(
        "minimax-m2-reap",
        {"gpu_kv": 3148.0, "gpu_compute": 396.0},
        {"n_gpu_layers": -1, "n_cpu_moe": 40},
        differs="which experts were moved is not in the log",
    ),
    "sw-smollm2-135m-q2k-rocm-9070xt-c32k-np2": Case(
        "smollm2-135m",
        {"gpu_kv": 720.0, "gpu_compute": 97.0, "host_compute": 18.0},
        {"n_gpu_layers": 99},
    ),
    "ks-gemma4-12b-q4km-metal-m1max-ub1024-c4k": Case(
        "gemma-4-12b", {"gpu_compute": 255.32, "host_compute": 43.32}, {"n_gpu_layers": -1}
    ),
    "ks-gemma4-12b-q4km-metal-m1max-ub1024-c16k": Case(
        "gemma-4-12b", {"gpu_compute": 279.32, "host_compute": 67.32}, {"n_gpu_layers": -1}
    ),
    "ks-gemma4-12b-q4km-metal-m1max-ub2048-c16k": Case(
        "gemma-4-12b",
        {"gpu_kv": 646.0, "gpu_compute": 561.35, "host_compute": 137.36},
        {"n_gpu_layers": -1},
    ),
    "gg-12369-32b-rocm-5xmi50-c32k-fa0": Case(
        "qwen2.5-32b",
        {"gpu_kv": 8192.0, "gpu_compute": 2664.0, "host_compute": 74.01, "host_output": 0.58},
        {"n_gpu_layers": -1},
        n_gpus=5,
        differs="built without pipelining: its host buffer holds one copy of the inputs, not four",
    ),
    "gg-12728-dsv2-vk-c4k-fa0": Case(
        "deepseek-v2",
        {"gpu_kv": 19200.0, "gpu_compute": 1174.0, "host_compute": 18.01},
        {"n_gpu_layers": -1},
        differs="a version of 2025 whose attention kept its scores elsewhere",
    ),
    "lem-79-q35-27b-q4km-rocm-9060xt-oom-kv": Case(
        "qwen3.6-27b", {"gpu_kv": 2048.0}, {"n_gpu_layers": -1}
    ),
    "m5-ministral3-8b-q8_0-metal-c64k": Case(
        "ministral3-8b",
        {"gpu_model": 8603.0, "gpu_kv": 8704.0, "gpu_compute": 264.0, "host_compute": 144.0},
        {"n_gpu_layers": -1},
        differs=F32_MASK + "; and Metal now reserves room to unpack a cache to f16",
    ),
    "m5-gptoss20b-metal-c32k-cpuexperts": Case(
        "gpt-oss-20b",
        {"gpu_kv": 786.0, "gpu_compute": 398.0, "host_compute": 116.0},
        {"n_gpu_layers": -1, "n_cpu_moe": 12},
        differs="which experts were moved is not in the log",
    ),
    "rs-q3x-35ba3b-cuda-4070super-c32k-fit": Case(
        "qwen3.6-35b-a3b",
        {"gpu_kv": 640.0, "gpu_rs": 62.8, "gpu_compute": 493.0, "host_compute": 40.0},
        {"n_gpu_layers": 41},
    ),
    "mi210-27b-q8_0-rocm-ub2048-vs-512-fork": Case(
        "qwen3.6-27b",
        {"gpu_kv": 13056.0, "gpu_compute": 2000.0, "host_compute": 404.0},
        {"n_gpu_layers": -1, "n_ubatch": 512, "n_outputs_max": 4},
        differs="a fork",
    ),
    "pr-qwen27b-cuda-c256k-q8kv-ngl0": Case(
        "qwen3.6-27b",
        {"cpu_kv": 8704.0, "gpu_compute": 1959.73, "host_compute": 276.02},
        {"n_gpu_layers": 0, "n_outputs_max": 1},
    ),
    "ik-gh-q3-30b-q4km-cuda-5090+4090-c16k-fa0-expcpu": Case(
        "qwen3-30b-a3b",
        {"gpu_kv": 1536.0, "gpu_compute": 1080.0, "host_compute": 36.01, "host_output": 0.58},
        {"n_gpu_layers": 49, "n_cpu_moe": 48},
        n_gpus=2,
        differs="a version of 2025",
    ),
    "vk-mtp23269-q35moe-35b-c64k-ub1088": Case(
        "qwen3.6-35b-a3b", {"gpu_kv": 1280.0, "host_output": 0.95}, {"n_gpu_layers": -1}
    ),
}  # fmt: skip
"""Rows whose numbers are enough to compute from."""

WITH_DESKTOP = "only the card's whole use, a desktop's 490-1200 MiB in it"
INCOMPLETE = {
    "tk-q3vl235b-iq1m-cuda-4x3080-c64k-q4kv-np4-mmproj": "where each layer went is not in it",
    "dk-q36-27b-q4kxl-mtp-cuda-5090-fit-c-auto": "the context that was chosen is not in it",
    "dfch-glm52-q5kxl-cuda-4xrtxpro6000-c512k": "widths of the model are not in it",
    "dfch-glm52-q5kxl-cuda-4xrtxpro6000-c750k": "widths of the model are not in it",
    "dfch-glm52-q5kxl-cuda-oom-weights": "tensor types are not in it",
    "pl-q36-35ba3b-iq4xs-vk-12g-ncmoe20-c32k": WITH_DESKTOP,
    "pl-q36-35ba3b-iq4xs-vk-12g-ncmoe22-c64k": WITH_DESKTOP,
    "pl-q36-35ba3b-q4kxl-vk-12g-ncmoe27-c64k": WITH_DESKTOP,
    "pl-q36-35ba3b-q4kxl-vk-12g-ncmoe28-c64k": WITH_DESKTOP,
    "pl-q36-35ba3b-q4kxl-vk-12g-ncmoe30-c64k": WITH_DESKTOP,
    "ks-trinity-metal-m1max-c16k-q8kv-server": "widths of the model are not in it",
    "ks-trinity-metal-m1max-c128k-fit": "widths of the model are not in it",
    "gg-18160-q3-30b-q8_0-vk-renoir-fa0-oom": "the context is not in it",
    "gg-18527-gptoss20b-vk-9070xt-a770-fa0-fit": "only sums over both cards",
    "dg-q3x-35ba3b-q4km-cuda-5060ti-ncmoe-fit": "the context is not in it",
    "kc-2030-llama4scout-cuda-44of49": "tensor types are not in it",
}


@cache
def shape_of(model: str) -> ModelShape:
    """The shape of a header kept for tests, grown to its size with a hole."""
    packed = DATA / "cases" / f"{model}.gguf-header.gz"
    if packed.exists():
        header, sizes = gzip.decompress(packed.read_bytes()), DATA / "cases" / "file_bytes.json"
    else:
        header = (DATA / "headers" / f"{model}.gguf-header").read_bytes()
        sizes = DATA / "headers" / "file_bytes.json"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model}.gguf"
        path.write_bytes(header)
        os.truncate(path, json.loads(sizes.read_text())[model])
        return model_shape(read_gguf(path))


def ledger_of(id_: str) -> Ledger:
    """What the planner computes for a row."""
    case, run = CASES[id_], ROWS[id_]["run"]
    known = {
        "n_ctx": run.get("n_ctx"),
        "n_batch": run.get("n_batch"),
        "n_ubatch": run.get("n_ubatch"),
        "n_seq_max": run.get("n_seq_max"),
        "n_outputs_max": run.get("n_outputs_max"),
        "flash_attn": run.get("flash_attn", "on").split("-")[0],
        "type_k": run.get("cache_type_k"),
        "type_v": run.get("cache_type_v"),
        "kv_unified": run.get("kv_unified", run.get("n_seq_max", 1) == 1),
    }
    request = PlanRequest(fixed=True, **{**known, **case.request})
    backend = ROWS[id_]["backend"].lower()
    gpus = [
        Gpu(id=f"GPU{i}", name="card", backend=backend, total=96 * GiB, free=96 * GiB)
        for i in range(case.n_gpus)
    ]
    host = Host(cpu="cpu", n_physical=8, n_logical=16, total=256 * GiB, available=256 * GiB)
    return estimate(shape_of(case.model), fixed_params(request), gpus, host, every_block=True)


def computed(id_: str) -> dict[str, float]:
    """The planner's MiB by the names that the rows use."""
    ledger = ledger_of(id_)
    cards, host = ledger.devices, ledger.host
    found = {
        "gpu_model": sum(d.weights for d in cards),
        "gpu_kv": sum(d.kv_cache for d in cards),
        "cpu_kv": host.kv_cache,
        "gpu_rs": sum(d.recurrent_state for d in cards),
        "cpu_rs": host.recurrent_state,
        "gpu_compute": max(d.compute for d in cards),
        "host_compute": host.compute,
        "host_output": host.output,
    }
    return {name: size / MiB for name, size in found.items()}


def is_close(measured: float, planned: float) -> bool:
    """Within 5 % or 100 MiB, whichever is larger."""
    return abs(planned - measured) <= max(0.05 * measured, 100.0)


def lines() -> Iterator[str]:
    yield "# Published buffer sizes and the planner's\n"
    yield (
        "Logs that others published, of other cards, backends and versions of llama.cpp, beside\n"
        "what `edgellm plan --fixed` computes for the same settings. Written by\n"
        "`python benchmarks/planner_cases.py`.\n"
    )
    yield "| Case | Backend | Entry | Published MiB | Planned MiB | Error | Within |"
    yield "|---|---|---|---:|---:|---:|---|"
    n_close = n_all = n_exact = 0
    for id_, case in CASES.items():
        planned = computed(id_)
        for name, measured in case.expect.items():
            error = planned[name] - measured
            close = is_close(measured, planned[name])
            n_all, n_close, n_exact = n_all + 1, n_close + close, n_exact + (abs(error) <= 1)
            yield (
                f"| {id_} | {ROWS[id_]['backend']} | {name} | {measured:.2f} | {planned[name]:.2f} "
                f"| {error:+.2f} ({100 * error / measured:+.1f} %) | {'yes' if close else 'no'} |"
            )
    yield f"\n{n_close} of {n_all} numbers are within 5 % or 100 MiB, {n_exact} within 1 MiB.\n"
    yield "## Why some differ\n"
    for id_, case in CASES.items():
        if case.differs:
            yield f"* {id_}: {case.differs}."
    yield "\n## Rows that cannot be computed\n"
    for id_, why in INCOMPLETE.items():
        yield f"* {id_}: {why}."


def main() -> None:
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
