"""The Hugging Face hub: what a repository holds, and where its files go.

The only user of ``huggingface_hub``: its tokens, endpoint, offline mode and the layout of its cache
are honoured, so other programs share the files. The bytes are fetched by ``transfer``, because the
library throws a partial away when its process ends.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec
from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from edgellm.config import StoreSettings
from edgellm.errors import DownloadError, EdgeLLMError, ModelNotFoundError, StoreError
from edgellm.store import transfer
from edgellm.store.catalog import HubRef
from edgellm.store.files import Choice, Listing, Remote
from edgellm.store.names import display_name, is_projector, is_safe, quant_of
from edgellm.store.others import group_shards, hf_cache
from edgellm.store.pull import Check, Order, Target, pull
from edgellm.store.records import Record
from edgellm.store.transfer import Listener
from edgellm.web import StatusError, TransientError

# Its warnings of each further attempt would stand before the one sentence that says what was wrong.
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

_T = TypeVar("_T")
_DEFAULT_ENDPOINT: Final = "https://huggingface.co"
# httpx's or requests' own base class, whichever the installed library is built on.
_HTTP_ERROR: Final[type[Exception]] = next(
    (kind for kind in HfHubHTTPError.__mro__ if kind.__name__ in ("HTTPError", "RequestException")),
    OSError,
)
_ATTEMPTS: Final = 4
# What becomes part of a path is looked at first.
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A repository that a search found."""

    repo: str
    downloads: int
    likes: int
    license: str | None = None
    updated: str | None = None
    is_gated: bool = False


def listing(ref: HubRef, settings: StoreSettings | None = None) -> Listing:
    """What ``ref``'s repository holds, in one request.

    Raises ModelNotFoundError (no repository, revision or GGUF in it) or DownloadError.
    """
    api = _api(settings)
    info = _asked(
        lambda: api.model_info(ref.repo, revision=ref.revision, files_metadata=True), ref, settings
    )
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise DownloadError(f"{endpoint(settings)} names no commit of {ref.repo}")
    files = [
        _remote(sibling, ref.repo, commit, settings)
        for sibling in info.siblings or []
        if sibling.rfilename.lower().endswith(".gguf") and is_safe(sibling.rfilename)
    ]
    if not files:
        raise ModelNotFoundError(
            f"{ref.repo} holds no GGUF files",
            hint=f"edgellm search {ref.repo.split('/')[1]}",
        )
    return Listing(
        repo=ref.repo,
        commit=commit,
        revision=ref.revision or "main",
        choices=_choices(files),
        projectors=tuple(file for file in files if is_projector(file.name)),
        license=_license(info),
        downloads=info.downloads,
        is_gated=bool(info.gated),
    )


def choose(found: Listing, ref: HubRef) -> Choice | None:
    """The model that ``ref`` names by file or quantisation; None when it names neither."""
    if ref.file is not None:
        wanted = [c for c in found.choices if any(f.name == ref.file for f in c.files)]
        wanted = wanted or [c for c in found.choices if c.name == display_name(ref.file)]
    elif ref.quant is not None:
        names = (ref.quant.upper(), f"UD-{ref.quant.upper()}")
        wanted = [c for name in names for c in found.choices if c.quant == name]
    else:
        return None
    if not wanted:
        there = ", ".join(dict.fromkeys(c.quant or c.name for c in found.choices))
        raise ModelNotFoundError(
            f"{found.repo} has no {ref.file or ref.quant}", hint=f"it has {there}"
        )
    return wanted[0]


def order(
    found: Listing,
    choice: Choice,
    projector: Remote | None = None,
) -> Order:
    """An order that puts a choice's files where the hub's library would look for them."""
    cache = hf_cache()
    folder = cache / f"models--{found.repo.replace('/', '--')}"
    locks = cache / ".locks" / folder.name
    files = [*choice.files, *([projector] if projector else [])]
    refs: tuple[tuple[Path, str], ...] = ()
    if found.revision != found.commit and is_safe(found.revision):
        refs = ((folder / "refs" / found.revision, found.commit),)
    is_main = found.revision == "main"
    what = choice.files[0].name
    return Order(
        name=choice.name,
        ref=str(HubRef(repo=found.repo, file=what, revision=None if is_main else found.revision)),
        source="hf",
        targets=tuple(_target(file, folder, locks, found.commit) for file in files),
        revision=found.commit,
        refs=refs,
    )


def request_headers() -> dict[str, str]:
    """Headers for the hub's files: the token of the person, where there is one."""
    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def fetch(
    order: Order,
    *,
    check: Check,
    listener: Listener | None = None,
    settings: StoreSettings | None = None,
) -> Record:
    """``pull.pull`` with the person's token, and refusals in the hub's words."""
    repo = order.ref.removeprefix("hf:").split(":", maxsplit=1)[0]
    try:
        return pull(
            order, check=check, headers=request_headers(), listener=listener, settings=settings
        )
    except StatusError as error:
        raise explain(error, repo) from error


def repo_of(url: str) -> str:
    """The repository of a file's address."""
    return "/".join(urlsplit(url).path.strip("/").split("/resolve/")[0].split("/")[-2:])


def explain(error: DownloadError, repo: str) -> EdgeLLMError:
    """A refused file in the words of the hub: gated, private, or gone."""
    if not isinstance(error, StatusError) or error.status not in (401, 403, 404):
        return error
    if error.code == "GatedRepo" or error.status == 403:
        return _gated(repo)
    if error.status == 401:
        return _not_found(repo)
    return error


def search(words: str, *, limit: int, settings: StoreSettings | None = None) -> list[Hit]:
    """GGUF repositories for some words, the most downloaded first."""
    api = _api(settings)

    def ask() -> list[Any]:
        return list(
            api.list_models(
                search=words, filter="gguf", sort="downloads", limit=limit, cardData=True
            )
        )

    return [
        Hit(
            repo=info.id,
            downloads=info.downloads or 0,
            likes=info.likes or 0,
            license=_license(info),
            updated=info.last_modified.date().isoformat() if info.last_modified else None,
            is_gated=bool(info.gated),
        )
        for info in _asked(ask, None, settings)
    ]


def endpoint(settings: StoreSettings | None = None) -> str:
    """The hub's address: the setting, HF_ENDPOINT, or the public one."""
    given = settings.endpoint if settings is not None else None
    return (given or os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def _is_offline(settings: StoreSettings | None) -> bool:
    offline = settings is not None and settings.offline
    return offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _api(settings: StoreSettings | None) -> HfApi:
    if _is_offline(settings):
        raise DownloadError(
            "offline mode is on: the hub is not asked",
            hint="unset HF_HUB_OFFLINE and store.offline, or use a local model: edgellm ls",
        )
    return HfApi(endpoint=endpoint(settings), library_name="edgellm")


def _asked(ask: Callable[[], _T], ref: HubRef | None, settings: StoreSettings | None) -> _T:
    """A question to the hub, asked again where it is busy."""
    _look_up(settings)
    first, most = transfer.BACK_OFF_S
    for attempt in range(_ATTEMPTS - 1):
        try:
            return _asked_once(ask, ref, settings)
        except _BusyError:
            time.sleep(min(most, first * 2**attempt))
    return _asked_once(ask, ref, settings)


def _look_up(settings: StoreSettings | None) -> None:
    """Raise TransientError at once where the hub's name leads nowhere.

    The library would try for 23 seconds. Behind a proxy it is the proxy that looks names up.
    """
    host = urlsplit(endpoint(settings)).hostname
    if host is None or getproxies() or _is_offline(settings):
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise _unreachable(error, settings) from error


def _unreachable(error: Exception, settings: StoreSettings | None) -> TransientError:
    return TransientError(
        f"cannot reach {endpoint(settings)}: {error}",
        hint="check the connection, the proxy variables and HF_ENDPOINT",
    )


class _BusyError(TransientError):
    """HTTP 429 or 5xx."""


def _asked_once(ask: Callable[[], _T], ref: HubRef | None, settings: StoreSettings | None) -> _T:
    """One question to the hub; the library's errors in our words, in this one place."""
    repo = ref.repo if ref else ""
    try:
        return ask()
    except GatedRepoError as error:
        raise _gated(repo) from error
    except RepositoryNotFoundError as error:
        raise _not_found(repo) from error
    except RevisionNotFoundError as error:
        revision = ref.revision if ref else ""
        raise ModelNotFoundError(f"{repo} has no revision {revision!r}") from error
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo!r} is not a repository's name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise _status(status, settings) from error
    except (_HTTP_ERROR, OSError) as error:
        raise _unreachable(error, settings) from error


def _status(status: int, settings: StoreSettings | None) -> DownloadError:
    host = endpoint(settings)
    if status == 429 or status >= 500:
        what = "is asked too often" if status == 429 else "is in trouble"
        return _BusyError(f"{host} {what} (HTTP {status})", hint="try again in a few minutes")
    return StatusError(f"{host} answered HTTP {status}", status=status)


def _gated(repo: str) -> StoreError:
    return DownloadError(
        f"{repo} is gated: its owner wants terms accepted first",
        hint=f"accept them at {endpoint()}/{repo}, then `hf auth login` or set HF_TOKEN",
    )


def _not_found(repo: str) -> ModelNotFoundError:
    token = "the token in use may not see it" if get_token() else "`hf auth login` if it is private"
    return ModelNotFoundError(
        f"the hub has no {repo}, or it is private",
        hint=f"edgellm search {repo.rsplit('/', maxsplit=1)[-1]}; {token}",
    )


def _remote(sibling: Any, repo: str, commit: str, settings: StoreSettings | None) -> Remote:
    url = hf_hub_url(repo, sibling.rfilename, revision=commit, endpoint=endpoint(settings))
    lfs = sibling.lfs
    return Remote(
        url=url,
        name=sibling.rfilename,
        size=lfs.size if lfs else sibling.size,
        sha256=lfs.sha256 if lfs else None,
        git_sha1=None if lfs else sibling.blob_id,
    )


def _choices(files: Iterable[Remote]) -> tuple[Choice, ...]:
    by_name = {file.name: file for file in files if not is_projector(file.name)}
    choices = [
        Choice(
            name=display_name(group[0]),
            quant=quant_of(group[0]),
            files=tuple(by_name[name] for name in group),
        )
        for group in group_shards(sorted(by_name))
    ]
    return tuple(sorted(choices, key=lambda choice: -choice.n_bytes))


def _license(info: Any) -> str | None:
    card = info.card_data
    named = card.get("license_name") or card.get("license") if card else None
    tags = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    return str(named) if named else (tags[0] if tags else None)


def _target(file: Remote, folder: Path, locks: Path, commit: str) -> Target:
    """The library names a blob by its entity tag: SHA-256 for large files, git's SHA-1 else."""
    name = file.sha256 or file.git_sha1
    if name is None or not _DIGEST.fullmatch(name):
        raise DownloadError(f"{file.name}: the hub gives no digest, so it cannot be checked")
    return Target(
        remote=file,
        path=folder / "snapshots" / commit / file.name,
        blob=folder / "blobs" / name,
        part=folder / "blobs" / f"{name}.incomplete",
        lock=locks / f"{name}.lock",
    )
