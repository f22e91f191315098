"""The seam without a machine behind it: a laptop with a 6 GiB card that is always the same.

Used by the tests and by the script that draws the screenshots. Everything is deterministic: the
clock stands still unless it is moved, and answers come from a fixed text at a chosen speed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

import msgspec

from edgellm.devices import Devices, Gpu, Host
from edgellm.errors import DoesNotFitError, EngineDeadError, ModelNotFoundError
from edgellm.metrics import EngineStats, RequestTimings, RunningRequest
from edgellm.planner.plan import (
    Alternative,
    DeviceLedger,
    HostLedger,
    LoadReport,
    MeasuredDevice,
    ModelFacts,
    Plan,
    PlanParams,
    PlanRequest,
    Reason,
    Speed,
)
from edgellm.request import SamplingParams, Usage
from edgellm.store.rough import rough_verdict
from edgellm.tui.ports import (
    Delta,
    Endpoint,
    Gauge,
    Json,
    ModelRow,
    Preferences,
    Progress,
    ServerHandle,
)
from edgellm.units import GiB, MiB, format_bytes

NOON: Final = 1_790_000_000.0
GPU: Final = Gpu(
    id="CUDA0", name="NVIDIA GeForce RTX 4050 Laptop", backend="cuda",
    total=6141 * MiB, free=5820 * MiB, compute_capability=(8, 9),
)  # fmt: skip
HOST: Final = Host(
    cpu="AMD Ryzen 7 7840HS", n_physical=8, n_logical=16, total=32 * GiB, available=24 * GiB,
    os="Linux",
)  # fmt: skip
BYTES: Final = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}

# name, quant, MiB, layers, KV MiB per 1024 tokens at f16, trained context, experts, about
MODELS: Final = (
    ("SmolLM2-135M-Instruct", "Q4_1", 94, 30, 22.5, 8192, 0, "tiny, answers at once"),
    ("Qwen3-4B-Instruct", "Q4_K_M", 2382, 36, 144.0, 262144, 0, "small all-rounder"),
    ("Llama-3.1-8B-Instruct", "Q4_K_M", 4693, 32, 128.0, 131072, 0, "strong all-rounder"),
    ("gemma-3-12b-it", "Q4_K_M", 6956, 48, 384.0, 131072, 0, "writes well, sees images"),
    ("Qwen3-30B-A3B", "Q4_K_M", 17700, 48, 96.0, 262144, 128, "mixture of experts"),
    ("Llama-3.3-70B-Instruct", "Q4_K_M", 40550, 80, 320.0, 131072, 0, "needs a workstation"),
)
ANSWER: Final = """The **KV cache** holds the keys and values of every token that was already \
processed, so each new token costs one step instead of a whole pass.

Its size is simple arithmetic:

```python
def kv_bytes(cells: int, layers: int, width: int, bytes_each: float = 2.0) -> int:
    # keys and values, for every layer
    return int(2 * cells * layers * width * bytes_each)
```

| cache type | bytes an element | 8,192 cells |
|------------|-----------------:|------------:|
| f16        | 2                | 1,024 MiB   |
| q8_0       | 1.06             | 544 MiB     |

So on a small card:

1. plan the context you **need**, not the one the model allows;
2. try `q8_0` before you move layers to the CPU.
"""


RUNS: Final[list[Json]] = [
    {
        "created": NOON - 86400 * i, "model": name, "scenario": scenario,
        "summary": {
            "decode_tps_p50": tps, "prefill_tps_p50": tps * 17, "output_tps": tps * streams,
            "ttft_p50_s": ttft, "ttft_p99_s": ttft * 1.6, "tpot_p50_s": 1 / tps,
            "tpot_p99_s": 1.3 / tps,
        },
    }
    for i, (name, scenario, tps, streams, ttft) in enumerate((
        ("Llama-3.1-8B-Instruct", "chat x1", 36.4, 1, 0.21),
        ("Llama-3.1-8B-Instruct", "chat x8", 21.0, 8, 0.48),
        ("Llama-3.1-8B-Instruct", "chat x1", 34.9, 1, 0.23),
        ("Qwen3-4B-Instruct", "chat x1", 101.2, 1, 0.11),
        ("Qwen3-4B-Instruct", "long prompt", 88.7, 1, 1.92),
    ))
]  # fmt: skip


class DemoServices:
    """Implements :class:`edgellm.tui.ports.Services` from constants."""

    def __init__(self, folder: str = "", *, models: int = 3, token_s: float = 0.0) -> None:
        self.folder = folder
        self.n_here = models
        self.token_s = token_s
        self.profiles: dict[str, Plan] = {}
        self.endpoints: list[DemoEndpoint] = []
        self.runs: list[Json] = []
        self.now = NOON
        self.answer = ANSWER
        self.reasoning = ""
        self.preferred = Preferences(animations=False)

    def clock(self) -> float:
        return self.now

    def state_file(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else ":memory:"

    def preferences(self) -> Preferences:
        return self.preferred

    def devices(self) -> Devices:
        return Devices(host=HOST, gpus=(GPU,))

    def gauge(self) -> Gauge:
        return Gauge(
            cpu_percent=23.0, ram_used=8 * GiB, ram_total=32 * GiB, gpu_percent=87.0,
            gpu_used=5466 * MiB, gpu_total=6141 * MiB, gpu_celsius=64.0, gpu_watts=58.0,
        )  # fmt: skip

    def local_models(self) -> list[ModelRow]:
        owners = ("starter", "edgellm", "ollama", "lmstudio", "huggingface", "edgellm")
        rows = []
        for model, owner in zip(MODELS[: self.n_here], owners, strict=False):
            name, quant, size = model[:3]
            ref = "starter" if owner == "starter" else name
            rows.append(
                ModelRow(
                    ref=ref,
                    name=name,
                    source="here",
                    owner=owner,
                    path=f"/models/{name}.gguf",
                    n_bytes=size * MiB,
                    quant=quant,
                    about=model[7],
                )
            )
        return rows

    def catalog(self) -> list[ModelRow]:
        return [
            ModelRow(
                verdict=rough_verdict(size * MiB, self.devices()),
                ref=f"hf:edge/{name}-GGUF:{quant}", name=name, source="catalog", owner="edge",
                n_bytes=size * MiB, quant=quant, about=about, licence="Apache-2.0",
            )
            for name, quant, size, *_, about in MODELS[1:]
        ]  # fmt: skip

    def search(self, query: str) -> list[ModelRow]:
        words = query.lower().split()
        rows = self.catalog()
        found = [row for row in rows if all(word in row.name.lower() for word in words)]
        return [msgspec.structs.replace(row, source="hub") for row in found]

    def details(self, row: ModelRow) -> list[tuple[str, str]]:
        model = _model(row.ref)
        return [
            ("architecture", "llama"),
            ("layers", str(model[3])),
            ("trained context", f"{model[5]:,}"),
            ("licence", row.licence or "Apache-2.0"),
            ("chat template", "{% for message in messages %}{{ message.content }}{% endfor %}"),
        ]

    def plan(self, ref: str, request: PlanRequest) -> Plan:
        return _plan(_model(ref), ref, request)

    def alternatives(self, ref: str, request: PlanRequest, plan: Plan) -> Plan:  # noqa: ARG002
        found = _alternatives(plan.params, plan.speed.decode_tps)
        return msgspec.structs.replace(plan, alternatives=found)

    def save_profile(self, name: str, plan: Plan, request: PlanRequest) -> str:  # noqa: ARG002
        self.profiles[name] = plan
        return f"~/.config/edgellm/profiles/{name}.toml"

    def pull(
        self, ref: str, on_progress: Callable[[Progress], None], stopped: Callable[[], bool]
    ) -> str:
        total = _model(ref)[2] * MiB
        for step in range(1, 11):
            if stopped():
                break
            on_progress(
                Progress(
                    phase="downloading",
                    n_done=total * step // 10,
                    n_total=total,
                    rate=48.0 * MiB,
                )
            )
        return f"/models/{_model(ref)[0]}.gguf"

    async def load(self, plan: Plan, on_progress: Callable[[Progress], None]) -> Endpoint:
        for step in range(1, 5):
            on_progress(Progress(phase="weights", n_done=step, n_total=4))
            await asyncio.sleep(0)
        endpoint = DemoEndpoint(plan, self)
        self.endpoints.append(endpoint)
        return endpoint

    async def attach(self, url: str, api_key: str | None = None) -> Endpoint:  # noqa: ARG002
        endpoint = DemoEndpoint(self.plan("starter", PlanRequest()), self, where=url)
        self.endpoints.append(endpoint)
        return endpoint

    async def serve(
        self,
        ref: str,
        host: str,
        port: int,
        api_key: str | None,  # noqa: ARG002
    ) -> ServerHandle:
        return DemoServer(ref, f"http://{host}:{port}")

    def bench_runs(self) -> list[Json]:
        return self.runs


class DemoServer:
    """A server that is only a name."""

    def __init__(self, ref: str, url: str) -> None:
        self.url = url
        self.is_alive = True
        self._lines = [f"loading {ref}", f"listening on {url}"]

    def tail(self, n: int) -> list[str]:
        return self._lines[-n:]

    async def stop(self) -> None:
        self.is_alive = False


class DemoEndpoint:
    """Answers with :attr:`DemoServices.answer`, word by word."""

    def __init__(self, plan: Plan, services: DemoServices, *, where: str = "this machine") -> None:
        self.name = plan.model.name
        self.where = where
        self.n_ctx = plan.params.n_ctx_seq
        self.plan: Plan | None = plan
        self.report: LoadReport | None = _report(plan)
        self.is_alive = True
        self.asked: list[tuple[list[Json], SamplingParams]] = []
        self.cancelled: list[str] = []
        self._services = services

    async def chat(
        self,
        messages: Sequence[Json],
        sampling: SamplingParams,
        *,
        request_id: str,  # noqa: ARG002
    ) -> AsyncGenerator[Delta, None]:
        self.asked.append((list(messages), sampling))
        words = re.findall(r"\s*\S+\s*", self._services.answer)
        for word in re.findall(r"\s*\S+", self._services.reasoning):
            yield Delta(reasoning=word, n_tokens=1)
        for word in words:
            if not self.is_alive:
                raise EngineDeadError("the engine ended (killed)", hint="restart it")
            await asyncio.sleep(self._services.token_s)
            yield Delta(text=word, n_tokens=1)
        yield Delta(
            finish="stop",
            usage=Usage(n_prompt=24, n_output=len(words), n_cached=12),
            timings=RequestTimings(ttft_s=0.182, decode_tps=48.6, prefill_tps=910.0),
        )

    async def count(self, messages: Sequence[Json]) -> int:
        return sum(len(str(message.get("content", ""))) // 4 + 4 for message in messages)

    async def stats(self) -> EngineStats:
        return EngineStats(
            uptime_s=754.0, n_steps=18_400, running=2, waiting=1, n_cells=self.n_ctx,
            cells_used=self.n_ctx * 5 // 8, cells_retained=self.n_ctx // 8,
            prompt_tokens=41_200, cached_tokens=28_900, generated_tokens=17_300,
            requests_finished=61, prefix_hits=48, prefill_tps=912.0, decode_tps=96.2,
            requests=(
                RunningRequest(
                    id="chat-7f3a", client="terminal", state="running", priority=0, n_prompt=412,
                    n_computed=412, n_output=188, age_s=4.1, ttft_s=0.18, decode_tps=48.6,
                ),
                RunningRequest(
                    id="req-11c2", client="127.0.0.1", state="running", priority=1,
                    n_prompt=1204, n_computed=1204, n_output=96, age_s=2.6, ttft_s=0.41,
                    decode_tps=47.6,
                ),
                RunningRequest(
                    id="req-11c3", client="127.0.0.1", state="waiting", priority=2,
                    n_prompt=2210, n_computed=0, n_output=0, age_s=0.7,
                ),
            ),
        )  # fmt: skip

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def close(self) -> None:
        self.is_alive = False


Model = tuple[str, str, int, int, float, int, int, str]


def _model(ref: str) -> Model:
    for model in MODELS:
        if model[0] in ref or (ref == "starter" and model is MODELS[0]):
            return model
    raise ModelNotFoundError(f"no model named {ref!r}", hint="edgellm ls")


def _params(model: Model, request: PlanRequest, n_gpu_layers: int) -> PlanParams:
    n_seq = request.n_seq_max or 1
    n_ctx = request.n_ctx or min(model[5], 8192)
    return PlanParams(
        n_gpu_layers=n_gpu_layers, n_ctx=n_ctx, n_ctx_seq=n_ctx, n_batch=2048,
        n_ubatch=request.n_ubatch or 512, n_seq_max=n_seq, n_outputs_max=n_seq,
        type_k=request.type_k or "f16", type_v=request.type_v or request.type_k or "f16",
        flash_attn="on", n_cpu_moe=request.n_cpu_moe or 0, n_threads=8, n_threads_batch=8,
    )  # fmt: skip


def _plan(model: Model, ref: str, request: PlanRequest) -> Plan:
    """The most layers that fit, or what was asked for."""
    n_all = model[3] + 1
    asked = request.n_gpu_layers
    if asked is not None:
        plan = _ledger(model, ref, request, n_all if asked < 0 else min(asked, n_all))
        gpu = plan.devices[0]
        if gpu.headroom < 0 and not request.force:
            raise DoesNotFitError(
                f"{gpu.id} is over by {format_bytes(-gpu.headroom)}", device=gpu.id,
                required=gpu.used, available=gpu.free - gpu.margin,
                smallest_fix="fewer layers on the GPU, or a smaller context",
            )  # fmt: skip
        return plan
    for n in range(n_all, -1, -1):
        plan = _ledger(model, ref, request, n)
        if plan.devices[0].headroom >= 0:
            break
    if plan.host.used > plan.host.available and not request.force:
        raise DoesNotFitError(
            f"{model[0]} does not fit", device="RAM", required=plan.host.used,
            available=plan.host.available, smallest_fix="choose a smaller quantisation",
        )  # fmt: skip
    return plan


def _ledger(model: Model, ref: str, request: PlanRequest, n: int) -> Plan:
    name, quant, size, n_layer, kv_1k, n_train, n_expert, _ = model
    params = _params(model, request, n)
    share = n / (n_layer + 1)
    kv = kv_1k * params.n_ctx / 1024 * BYTES[params.type_k] / 2
    on_gpu = size * share
    moved = on_gpu * 0.85 * params.n_cpu_moe / n_layer if n_expert else 0.0
    weights, cache = int((on_gpu - moved) * MiB), int(kv * share * MiB)
    compute = int((28 + params.n_ubatch * 0.16) * MiB)
    overhead, margin = 412 * MiB, 160 * MiB
    used = weights + cache + compute + overhead if n else 0
    gpu = DeviceLedger(
        id=GPU.id, name=GPU.name, backend="cuda", total=GPU.total, free=GPU.free,
        margin=margin if n else 0, weights=weights, kv_cache=cache, compute=compute if n else 0,
        overhead=overhead if n else 0, used=used, headroom=GPU.free - used - margin, n_layers=n,
    )  # fmt: skip
    on_host = int((size + kv) * MiB) - weights - cache + 64 * MiB
    host = HostLedger(
        total=HOST.total, available=HOST.available, weights=int(size * MiB) - weights,
        kv_cache=int(kv * MiB) - cache, compute=64 * MiB, used=on_host,
    )  # fmt: skip
    decode = 1000 / (size * (0.0036 * share + 0.021 * (1 - share)) / (8 if n_expert else 1) + 0.9)
    return Plan(
        model=ModelFacts(
            name=name, path=ref, arch="llama", quant=quant, file_bytes=size * MiB,
            n_params=size * MiB * 8 // 5, n_layer=n_layer, n_ctx_train=n_train, n_expert=n_expert,
        ),
        params=params, devices=(gpu,), host=host,
        verdict="gpu" if share == 1 else "partial" if n else "cpu",
        speed=Speed(
            prefill_tps=decode * 18, decode_tps=decode, basis="table",
            bottleneck="memory bandwidth of " + ("CUDA0" if share == 1 else "the host"),
        ),
        reasons=_reasons(params),
        binding="CUDA0 weights" if share < 1 else "none",
    )  # fmt: skip


def _reasons(params: PlanParams) -> tuple[Reason, ...]:
    return (
        Reason(
            param="n_gpu_layers",
            value=str(params.n_gpu_layers),
            why="as many layers as fit into free memory less the margin",
        ),
        Reason(
            param="n_ctx",
            value=f"{params.n_ctx:,}",
            why="enough for long conversations; the model allows more",
        ),
        Reason(
            param="n_outputs_max",
            value=str(params.n_outputs_max),
            why="logits for one token a sequence: the compute buffer stays small",
        ),
        Reason(param="flash_attn", value="on", why="a quantised cache and a flat compute buffer"),
    )


def _alternatives(params: PlanParams, decode: float) -> tuple[Alternative, ...]:
    return (
        Alternative(
            title="Twice the context", change={"n_ctx": params.n_ctx * 2},
            gain=f"{params.n_ctx * 2:,} tokens", cost="fewer layers on the GPU",
            decode_tps=decode * 0.82, n_ctx=params.n_ctx * 2,
        ),
        Alternative(
            title="q8_0 KV cache", change={"type_k": "q8_0", "type_v": "q8_0"},
            gain="half the cache", cost="hardly measurable", decode_tps=decode * 1.04,
        ),
        Alternative(
            title="Smaller batches", change={"n_ubatch": 128},
            gain="a smaller compute buffer", cost="slower prompts", decode_tps=decode,
        ),
    )  # fmt: skip


def _report(plan: Plan) -> LoadReport:
    device = plan.devices[0]
    return LoadReport(
        measured=(
            MeasuredDevice(
                id=device.id, weights=device.weights - 3 * MiB, kv_cache=device.kv_cache,
                compute=device.compute + 4 * MiB, used_before=321 * MiB,
                used_after=321 * MiB + device.used - 9 * MiB,
            ),
            MeasuredDevice(id="host", weights=plan.host.weights, kv_cache=plan.host.kv_cache),
        ),
        offloaded=f"{plan.params.n_gpu_layers}/{plan.model.n_layer + 1}",
        load_s=1.84, warmup_s=0.31, build="0c1e57098",
    )  # fmt: skip
