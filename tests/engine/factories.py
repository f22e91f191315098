"""Plans, requests and sequences for engine tests."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import msgspec

from edgellm.engine.backend import Limits
from edgellm.engine.sequence import Sequence
from edgellm.planner.plan import HostLedger, ModelFacts, Plan, PlanParams, Speed
from edgellm.request import Priority, Request, SamplingParams

_ids = itertools.count()


def plan(path: str = "scripted", **changes: Any) -> Plan:
    """A plan with small round numbers."""
    params = PlanParams(
        n_gpu_layers=0,
        n_ctx=1024,
        n_ctx_seq=1024,
        n_batch=256,
        n_ubatch=256,
        n_seq_max=4,
        n_outputs_max=4,
        n_threads=2,
        n_threads_batch=2,
    )
    return Plan(
        model=ModelFacts(
            name="test",
            path=path,
            arch="llama",
            quant="Q4_1",
            file_bytes=1,
            n_params=1,
            n_layer=1,
            n_ctx_train=8192,
        ),
        params=msgspec.structs.replace(params, **changes),
        devices=(),
        host=HostLedger(total=1, available=1),
        verdict="cpu",
        speed=Speed(prefill_tps=1.0, decode_tps=1.0, basis="table"),
    )


def request(prompt: Any = "hello", *, priority: Priority = Priority.NORMAL, **kw: Any) -> Request:
    """A request; keywords that Request does not have go to its sampling."""
    names = set(Request.__struct_fields__)
    sampling = {k: v for k, v in kw.items() if k not in names}
    outer = {k: v for k, v in kw.items() if k in names}
    outer.setdefault("id", f"r{next(_ids)}")
    sampling.setdefault("temperature", 0.0)
    return Request(prompt=prompt, priority=priority, sampling=SamplingParams(**sampling), **outer)


def sequence(prompt: list[int], **kw: Any) -> Sequence:
    """A waiting sequence with these prompt tokens."""
    return Sequence(request(tuple(prompt), **kw), array("i", prompt))


def limits(**changes: Any) -> Limits:
    """Four slots, 256 cells, a batch of 64."""
    base = Limits(
        n_cells=256,
        n_ctx_seq=256,
        n_batch=64,
        n_ubatch=64,
        n_running=4,
        n_outputs_max=8,
        slot_ids=(0, 1, 2, 3),
        retained_ids=tuple(range(4, 12)),
    )
    return msgspec.structs.replace(base, **changes)
