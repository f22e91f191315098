"""RAM: what stays there, what the CPU's kernels copy, what loading takes for a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from edgellm.devices import Devices, Host, hypothetical
from edgellm.gguf.shape import ModelShape, Tensor
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import HostLedger, PlanRequest
from edgellm.planner.ram import is_repacked
from edgellm.units import GiB, MiB

Shapes = Callable[[str], ModelShape]
X86 = ("avx2", "avx512")


def ledger_of(shape: ModelShape, *features: str, **asked: Any) -> HostLedger:
    host = Host(
        cpu="cpu",
        n_physical=2,
        n_logical=2,
        total=64 * GiB,
        available=60 * GiB,
        features=features,
    )
    request = PlanRequest(fixed=True, n_ctx=2048, n_outputs_max=1, n_gpu_layers=0, **asked)
    return make_plan(shape, Devices(host=host), request).host


@pytest.mark.parametrize(("mapped", "weights"), [(True, 694.76), (False, 212.14)])
def test_matrices_that_the_kernels_want_otherwise_are_copied(
    shape_of: Shapes, mapped: bool, weights: float
) -> None:
    """As llama.cpp reported CPU_Mapped (or CPU) and CPU_REPACK on a CPU with AVX-512."""
    ledger = ledger_of(shape_of("lfm2-1.2b"), *X86, use_mmap=mapped)
    assert ledger.weights / MiB == pytest.approx(weights, abs=0.01)
    assert ledger.repacked / MiB == pytest.approx(482.62, abs=0.01)
    assert ledger.compute / MiB == pytest.approx(62.03, abs=0.01)


def test_a_mapped_original_and_its_copy_do_not_both_stay(shape_of: Shapes) -> None:
    """Refusing an 8 GB machine a 5 GB model for pages that nobody reads would be wrong."""
    shape = shape_of("lfm2-1.2b")
    mapped, read = (ledger_of(shape, *X86, use_mmap=m) for m in (True, False))
    assert mapped.idle == pytest.approx(482.62 * MiB, abs=0.01 * MiB)
    assert mapped.used == read.used


def test_used_is_the_sum_of_its_entries(shape_of: Shapes) -> None:
    x = ledger_of(shape_of("lfm2-1.2b"), *X86)
    entries = x.weights - x.idle + x.repacked + x.kv_cache + x.recurrent_state + x.compute
    assert x.used == entries + x.output + x.extra + x.process


def test_a_cpu_without_such_kernels_copies_nothing(shape_of: Shapes) -> None:
    assert ledger_of(shape_of("lfm2-1.2b")).repacked == 0


def test_beside_a_card_with_host_buffers_nothing_is_copied(shape_of: Shapes) -> None:
    """llama.cpp puts a GPU's pinned host buffer before the CPU's own layouts."""
    host = Host(
        cpu="cpu", n_physical=2, n_logical=2, total=GiB * 64, available=GiB * 60, features=X86
    )
    devices = Devices(host=host, gpus=hypothetical([8 * GiB]))
    request = PlanRequest(fixed=True, n_ctx=2048, n_gpu_layers=8)
    assert make_plan(shape_of("lfm2-1.2b"), devices, request).host.repacked == 0


@pytest.mark.parametrize(
    ("type_name", "dims", "name", "repacked"),
    [
        ("Q4_K", (4096, 4096), "blk.0.attn_q.weight", True),
        ("Q4_K", (4096, 4100), "blk.0.attn_q.weight", False),
        ("Q6_K", (4096, 4096), "blk.0.ffn_down.weight", False),
        ("Q4_K", (2048, 768, 128), "blk.0.ffn_up_exps.weight", True),
        ("Q4_K", (128, 512, 16), "blk.0.attn_k_b.weight", False),
        ("F32", (4096,), "blk.0.attn_norm.weight", False),
    ],
)
def test_what_is_copied_is_llama_cpps_choice(
    type_name: str, dims: tuple[int, ...], name: str, repacked: bool
) -> None:
    assert is_repacked(Tensor(name, dims, type_name, 1, 0), X86) is repacked


def test_the_output_tied_to_the_embeddings_is_copied_too(shape_of: Shapes) -> None:
    shape = shape_of("lfm2-1.2b")
    tied = shape.tied_tensor
    assert tied is not None
    inputs = (msgspec.structs.replace(t, type="Q4_K") for t in shape.input_tensors)
    changed = msgspec.structs.replace(shape, input_tensors=tuple(inputs))
    more = ledger_of(changed, *X86).repacked - ledger_of(shape, *X86).repacked
    assert more == tied.n_bytes


def test_what_may_be_kept_for_prompts_never_refuses_a_model(shape_of: Shapes) -> None:
    roomy = ledger_of(shape_of("lfm2-1.2b"), *X86)
    assert roomy.prompt_cache == 512 * MiB
    assert roomy.prompt_cache + roomy.used <= roomy.available
    assert ledger_of(shape_of("llama-3.2-1b"), *X86, kv_unified=True).prompt_cache == 0
    host = Host(cpu="", n_physical=2, n_logical=2, total=GiB, available=900 * MiB, features=X86)
    tight = make_plan(shape_of("lfm2-1.2b"), Devices(host=host), PlanRequest(n_ctx=2048))
    assert tight.host.used + tight.host.prompt_cache <= 900 * MiB
    assert tight.verdict == "cpu"
