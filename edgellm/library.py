"""Models wherever they are: headers of local and remote ones, verdicts, and what to download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from edgellm.config import Settings
from edgellm.devices import Devices
from edgellm.errors import DoesNotFitError, DownloadError, GGUFError
from edgellm.gguf.reader import GGUFFile, parse_header, read_gguf
from edgellm.gguf.shape import model_shape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.store import catalog
from edgellm.store.catalog import HubRef
from edgellm.store.files import Choice, Listing
from edgellm.units import format_bytes

# What nobody runs by choice: twice the bytes of Q8_0 and no better answers.
_UNQUANTIZED: Final = ("F32", "F16", "BF16", "")
PREFERRED: Final = ("Q4_K_M", "UD-Q4_K_M")
# Q4_K_M is taken in place of a choice that is at most this much larger.
_EQUAL: Final = 1.05


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Why a model of a repository was chosen, and its plan."""

    name: str
    plan: Plan
    why: str


def find_header(ref: str, settings: Settings, devices: Devices | None = None) -> GGUFFile:
    """The header of any model: here, at an address, or on the hub (a few MiB are fetched at most).

    A repository without a quantisation gives the one that ``pull`` would choose for ``devices``.
    When the hub cannot be asked, some models of the catalog have a header that comes with edgellm
    (a Q4_K_M, whatever was asked for).
    """
    resolved = catalog.resolve(ref, settings.store)
    if resolved.path is not None:
        return read_gguf(resolved.path)
    if resolved.url is not None:
        from edgellm.gguf.remote import read_gguf_url  # HTTP, and only for what is not here

        return read_gguf_url(resolved.url)
    if resolved.hub is None:
        raise DownloadError(f"{ref}: no address is known for it")
    try:
        return hub_header(resolved.hub, settings, devices)
    except DownloadError as error:
        shipped = catalog.shipped_header(resolved.hub.repo)
        if shipped is None:
            names = ", ".join(entry.name for entry in catalog.entries() if entry.header)
            shown = f"without the hub these can be planned: {names}"
            error.hint = f"{error.hint}; {shown}" if error.hint else shown
            raise
        return parse_header(shipped, path=f"hf:{resolved.hub.repo}")


def hub_header(ref: HubRef, settings: Settings, devices: Devices | None) -> GGUFFile:
    """The header of one model of a repository."""
    from edgellm.store import hub

    found = hub.listing(ref, settings.store)
    choice = hub.choose(found, ref)
    if choice is None and devices is not None:
        choice = advise(found, devices)[0]
    return choice_header(choice or _preferred(found.choices))


def choice_header(choice: Choice) -> GGUFFile:
    """The header of a model on the hub, from its first shard's address."""
    from edgellm.store import hub

    first = choice.files[0]
    digest = first.sha256 if len(choice.files) == 1 else None
    try:
        from edgellm.gguf.remote import read_gguf_url

        return read_gguf_url(first.url, headers=hub.request_headers(), digest=digest)
    except DownloadError as error:
        raise hub.explain(error, hub.repo_of(first.url)) from error


def plan_header(header: GGUFFile, devices: Devices, request: PlanRequest) -> Plan:
    """The plan for a header. Raises DoesNotFitError."""
    return make_plan(model_shape(header), devices, request)


def choice_plan(choice: Choice, devices: Devices, request: PlanRequest | None = None) -> Plan:
    """The plan for a model on the hub. Raises DoesNotFitError, DownloadError, GGUFError."""
    return plan_header(choice_header(choice), devices, request or PlanRequest())


def advise(
    found: Listing,
    devices: Devices,
    request: PlanRequest | None = None,
) -> tuple[Choice, Advice]:
    """The quantisation of a repository to run on ``devices``.

    With a GPU the largest that runs on it whole, Q4_K_M where another is hardly larger; without,
    or when none does, Q4_K_M if it fits at all, else the largest that fits. Raises DoesNotFitError.
    """
    choices = [c for c in found.choices if c.quant not in _UNQUANTIZED] or list(found.choices)

    def plan_of(choice: Choice) -> Plan | None:
        try:
            return choice_plan(choice, devices, request)
        except (DoesNotFitError, GGUFError):
            return None

    chosen = _largest_whole(choices, devices, plan_of)
    chosen = chosen or _largest_fitting(found, choices, devices, plan_of)
    if len(found.choices) == 1:
        why = f"{chosen[0].quant or chosen[0].name} is the only one there"
        return chosen[0], msgspec.structs.replace(chosen[1], why=why)
    return chosen


def _largest_whole(
    choices: Sequence[Choice],
    devices: Devices,
    plan_of: Callable[[Choice], Plan | None],
) -> tuple[Choice, Advice] | None:
    room = sum(gpu.free for gpu in devices.gpus)
    for choice in choices:
        if choice.n_bytes >= room:
            continue
        plan = plan_of(choice)
        if plan is None or plan.verdict != "gpu":
            continue
        better = _as_good(choice, choices)
        if better is not choice and (other := plan_of(better)) is not None:
            return _advice(better, other, "runs whole on the GPU, and nothing larger is worth it")
        return _advice(choice, plan, "is the largest that runs whole on the GPU")
    return None


def _as_good(choice: Choice, choices: Sequence[Choice]) -> Choice:
    for other in choices:
        near = other.n_bytes <= choice.n_bytes <= other.n_bytes * _EQUAL
        if other.quant in PREFERRED and near:
            return other
    return choice


def _largest_fitting(
    found: Listing,
    choices: Sequence[Choice],
    devices: Devices,
    plan_of: Callable[[Choice], Plan | None],
) -> tuple[Choice, Advice]:
    preferred = _preferred(choices)
    smaller = [c for c in choices if c.n_bytes < preferred.n_bytes]
    where = "on the CPU" if not devices.gpus else "partly on the GPU"
    for choice in (preferred, *smaller):
        plan = plan_of(choice)
        if plan is not None:
            what = "the usual quality for its size" if choice is preferred else "the largest"
            return _advice(choice, plan, f"is {what} that fits, {where}")
    least = choices[-1]
    room = sum(gpu.free for gpu in devices.gpus) + devices.host.available
    raise DoesNotFitError(
        f"nothing of {found.repo} fits: the smallest has {format_bytes(least.n_bytes)}, "
        f"{format_bytes(room)} are free",
        device="host",
        required=least.n_bytes,
        available=room,
        smallest_fix=f"a smaller model, or edgellm pull hf:{found.repo}:{least.quant} --force",
    )


def _preferred(choices: Sequence[Choice]) -> Choice:
    """Q4_K_M, or what is nearest to its usual size among the others: the median."""
    named = [c for c in choices if c.quant in PREFERRED]
    return named[0] if named else choices[len(choices) // 2]


def _advice(choice: Choice, plan: Plan, why: str) -> tuple[Choice, Advice]:
    return choice, Advice(name=choice.name, plan=plan, why=f"{choice.quant or choice.name} {why}")


def verdict(path: str | Path, devices: Devices) -> tuple[str, int, float | None, str]:
    """A local model's verdict with its context and decode speed, and its kind. Files that are not
    run by themselves (projectors, adapters) have an empty verdict. Raises GGUFError."""
    header = read_gguf(path)
    if header.kind != "model":
        return "", 0, None, header.kind
    try:
        plan = plan_header(header, devices, PlanRequest())
    except DoesNotFitError:
        return "does_not_fit", 0, None, header.kind
    return plan.verdict, plan.params.n_ctx, plan.speed.decode_tps, header.kind
