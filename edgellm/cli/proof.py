"""A proof that an engine works: ``python -m edgellm.cli.proof [--gpu]`` loads the starter in the
engine that this environment finds, lets it say a few words, and prints what it allocated."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from edgellm import config, runtime
from edgellm.engine.client import Engine
from edgellm.errors import EdgeLLMError, EngineError
from edgellm.planner.plan import LoadReport
from edgellm.request import Request, SamplingParams
from edgellm.store.local import STARTER


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What the starter's load showed."""

    offloaded: str
    """Layers on the GPU of all: 31/31."""
    overhead: int | None = None
    """Bytes the first GPU lost beyond llama.cpp's buffers; None without a driver to ask."""


async def prove(*, gpu: bool) -> Proof:
    """Load, generate eight tokens, and report. Raises EngineError when no layer was offloaded."""
    flags = {"plan.ngl": "all" if gpu else "0", "plan.ctx": 512}
    settings = config.load(flags, environ={}).settings
    engine = await runtime.open_engine(STARTER, settings=settings)
    try:
        n_tokens = await _say_something(engine)
        if n_tokens == 0:
            raise EngineError("the starter said nothing")
        return Proof(offloaded=engine.report.offloaded, overhead=overhead_of(engine.report))
    finally:
        await engine.close()


async def _say_something(engine: Engine) -> int:
    request = Request(
        id="proof",
        prompt="The capital of France is",
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
    )
    counts = [len(event.token_ids) async for event in engine.generate(request)]
    return sum(counts)


def overhead_of(report: LoadReport) -> int | None:
    """Bytes a GPU lost to this load beyond the buffers on it."""
    for device in report.measured:
        if device.used_before is None or device.used_after is None:
            continue
        buffers = device.weights + device.kv_cache + device.recurrent_state + device.compute
        return max(0, device.used_after - device.used_before - buffers - device.output)
    return None


def main() -> int:
    try:
        proof = asyncio.run(prove(gpu="--gpu" in sys.argv[1:]))
    except EdgeLLMError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(msgspec.json.encode(proof).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
