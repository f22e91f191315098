"""``edgellm search``: the hub's GGUF repositories, judged for this machine."""

from __future__ import annotations

import concurrent.futures
import sys
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from edgellm import config, library
from edgellm.cli.flags import AT_LEAST_1
from edgellm.cli.ls import VERDICTS
from edgellm.config import Settings
from edgellm.devices import Devices
from edgellm.errors import DoesNotFitError, DownloadError, EdgeLLMError
from edgellm.runtime import plan_devices, plan_request
from edgellm.store.catalog import Entry, HubRef, entries
from edgellm.store.files import Choice
from edgellm.store.rough import entry_bytes, rough_verdict
from edgellm.units import format_bytes

SCHEMA = "edgellm.search/1"
# Headers read at the same time: enough to hide the waiting, few enough not to be throttled.
_AT_ONCE = 4
_WITHOUT_HUB = "edgellm plan NAME, or the Models screen of edgellm, for what fits"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A repository with the model of it that suits this machine. ``verdict`` is empty where the
    header could not be read (``note`` says why)."""

    repo: str
    downloads: int
    license: str | None
    name: str | None = None
    quant: str | None = None
    n_bytes: int | None = None
    verdict: str = ""
    n_ctx: int | None = None
    decode_tps: float | None = None
    sizes: dict[str, int] = {}
    note: str = ""


def search(
    *words: str,
    fits: bool = False,
    limit: Annotated[int, AT_LEAST_1] = 10,
    vram: Annotated[list[str] | None, Parameter(consume_multiple=False)] = None,
    ram: str | None = None,
    json: bool = False,
) -> None:
    """Find GGUF models on the hub, each with its verdict on this machine, and in the catalog.

    A few headers are read at a time, and remembered. The catalog is a list that comes with edgellm.

    Examples, one a line:

    * `edgellm search qwen3 coder`
    * `edgellm search qwen3 --fits --vram 6GiB`

    Parameters
    ----------
    words
        What to look for.
    fits
        Leave out what does not fit. The catalog's models are judged by size alone: `edgellm plan
        NAME` is exact.
    limit
        Repositories to look at.
    vram
        Judge for a card with this much free memory instead; repeat it for several cards.
    ram
        Judge for this much free RAM instead.
    json
        Print JSON (edgellm.search/1).
    """
    settings = config.load({"plan.vram": vram, "plan.ram": ram}).settings
    devices = plan_devices(settings)
    known = [entry for entry in entries() if _matches(entry, words)]
    if fits:
        known = [entry for entry in known if _may_fit(entry, devices)]
    if not json:
        _print_known(known)
        if sys.stderr.isatty():
            print("asking the hub ...", file=sys.stderr, flush=True)
    try:
        results, offline = _asked(" ".join(words), limit, settings, devices), None
    except DownloadError as error:
        if not known:
            raise
        results, offline = [], error
    if fits:
        results = [r for r in results if r.verdict not in ("does_not_fit", "")]
    if json:
        print(msgspec.json.encode(_as_json(known, results)).decode())
        return
    if offline is None:
        _print(results)
        return
    print(f"only the catalog was searched: {offline.message}", file=sys.stderr)
    print(f"  try: {_WITHOUT_HUB}", file=sys.stderr)


def _matches(entry: Entry, words: tuple[str, ...]) -> bool:
    text = " ".join([entry.name, entry.repo, *entry.good_at]).lower()
    return all(word.lower() in text for word in words)


def _may_fit(entry: Entry, devices: Devices) -> bool:
    """Whether it fits by its size; one of unknown size may."""
    return rough_verdict(entry_bytes(entry), devices) != "does_not_fit"


def _asked(words: str, limit: int, settings: Settings, devices: Devices) -> list[Result]:
    from edgellm.store import hub

    hits = hub.search(words, limit=limit, settings=settings.store)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda hit: _judged(hit, settings, devices), hits))


def _judged(hit: Any, settings: Settings, devices: Devices) -> Result:
    from edgellm.store import hub

    plain = Result(repo=hit.repo, downloads=hit.downloads, license=hit.license)
    try:
        found = hub.listing(HubRef(repo=hit.repo), settings.store)
    except EdgeLLMError as error:
        return msgspec.structs.replace(plain, note=error.message)
    plain = msgspec.structs.replace(
        plain, license=found.license, sizes={c.quant or c.name: c.n_bytes for c in found.choices}
    )
    try:
        choice, advice = library.advise(found, devices, plan_request(settings))
    except DoesNotFitError as error:
        return _with(plain, found.choices[-1], verdict="does_not_fit", note=error.message)
    except EdgeLLMError as error:
        return _with(plain, found.choices[-1], verdict="", note=error.message)
    plan = advice.plan
    return msgspec.structs.replace(
        _with(plain, choice, verdict=plan.verdict, note=advice.why),
        n_ctx=plan.params.n_ctx,
        decode_tps=plan.speed.decode_tps,
    )


def _with(result: Result, choice: Choice, *, verdict: str, note: str) -> Result:
    return msgspec.structs.replace(
        result,
        name=choice.name,
        quant=choice.quant,
        n_bytes=choice.n_bytes,
        verdict=verdict,
        note=note,
    )


def _print_known(known: list[Entry]) -> None:
    for entry in known:
        what = ", ".join(entry.good_at)
        print(f"{entry.name}  {entry.parameters}  {entry.license or ''}  {what}")
        print(f"  edgellm pull {entry.name}   ({entry.repo})")
    if known:
        print()


def _print(results: list[Result]) -> None:
    if not results:
        print("nothing found on the hub", file=sys.stderr)
        return
    for result in results:
        here = VERDICTS[result.verdict] or result.note
        speed = f", about {result.decode_tps:.0f} tok/s" if result.decode_tps else ""
        size = format_bytes(result.n_bytes) if result.n_bytes else "?"
        print(
            f"{result.repo}  {result.downloads} downloads  {result.license or 'no licence named'}"
        )
        print(f"  {result.quant or '?'}  {size}  {here}{speed}")


def _as_json(known: list[Entry], results: list[Result]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "catalog": msgspec.to_builtins(known),
        "hub": msgspec.to_builtins(results),
    }
