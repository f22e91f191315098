"""What a person means by a model's name."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from edgellm import paths
from edgellm.config import StoreSettings
from edgellm.errors import ModelNotFoundError, StoreError
from edgellm.store import local
from edgellm.store.local import STARTER, LocalModel
from edgellm.store.names import display_name, quant_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HF_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
_HF_REF: Final = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<what>[^@]+))?(?:@(?P<revision>.+))?", re.ASCII
)


class HubRef(msgspec.Struct, frozen=True, kw_only=True):
    """``hf:owner/repo[:file or quant][@revision]``."""

    repo: str
    file: str | None = None
    quant: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        what = self.file or self.quant
        tail = f":{what}" if what else ""
        return f"hf:{self.repo}{tail}" + (f"@{self.revision}" if self.revision else "")


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model is: ``path`` when it is on this machine, else ``url`` or ``hub`` (which is
    there beside ``path`` when the hub was named)."""

    name: str
    path: Path | None = None
    url: str | None = None
    hub: HubRef | None = None
    source: str
    """path, starter, url, hf, or the owner of a local model (edgellm, ollama ...)."""
    mmproj: Path | None = None


def resolve(ref: str, settings: StoreSettings | None = None) -> ResolvedModel:
    """Find a model: a path, ``starter``, a local model's name, a catalog name,
    ``hf:owner/repo[:file or quant][@revision]`` or a URL.

    Nothing is fetched. Raises ModelNotFoundError, naming the nearest local models.
    """
    if not ref.strip():
        raise ModelNotFoundError("no model was named", hint="edgellm ls")
    remote = _remote(ref)
    if remote is not None:
        return _already_here(remote, settings) or remote
    path = paths.expand(ref)
    if paths.exists(path) and (path.is_file() or _looks_like_path(ref)):
        return ResolvedModel(name=display_name(str(path)), path=path, source="path")
    if _looks_like_path(ref):
        raise ModelNotFoundError(f"{ref}: no such file", hint="edgellm ls")
    return _named(ref, settings)


def parse_hub_ref(ref: str) -> HubRef | None:
    """``hf:owner/repo...`` or a page or file address of the hub; None for anything else."""
    if ref.startswith(("hf:", "hf.co/", "huggingface.co/")):
        rest = ref.split(":", 1)[1] if ref.startswith("hf:") else ref.split("/", 1)[1]
        match = _HF_REF.fullmatch(rest.strip("/"))
        if match is None:
            raise ModelNotFoundError(
                f"{ref!r} is not a model on the hub",
                hint="write hf:owner/repo, hf:owner/repo:Q4_K_M or hf:owner/repo:file.gguf",
            )
        return _hub_ref(match["repo"], match["what"], match["revision"])
    try:
        parts = urlsplit(ref)
    except ValueError as error:  # http://[
        raise ModelNotFoundError(f"{ref!r} is not an address: {error}") from error
    if parts.scheme in ("http", "https") and parts.hostname in _HF_HOSTS:
        return _hub_address(parts.path)
    return None


def _hub_ref(repo: str, what: str | None, revision: str | None) -> HubRef:
    is_file = what is not None and what.lower().endswith(".gguf")
    return HubRef(
        repo=repo,
        file=what if is_file else None,
        quant=None if is_file else what,
        revision=revision,
    )


def _hub_address(path: str) -> HubRef | None:
    """``/owner/repo`` or ``/owner/repo/(blob|resolve)/revision/file.gguf``."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if len(parts) == 2:
        return HubRef(repo="/".join(parts))
    if len(parts) >= 5 and parts[2] in ("blob", "resolve", "raw"):
        revision = None if parts[3] == "main" else parts[3]
        return HubRef(repo="/".join(parts[:2]), file="/".join(parts[4:]), revision=revision)
    return None


def _remote(ref: str) -> ResolvedModel | None:
    hub = parse_hub_ref(ref)
    if hub is not None:
        return ResolvedModel(name=_hub_name(hub), hub=hub, source="hf")
    if urlsplit(ref).scheme in ("http", "https"):
        name = display_name(unquote(urlsplit(ref).path)) or ref
        return ResolvedModel(name=name, url=ref, source="url")
    return None


def _hub_name(hub: HubRef) -> str:
    if hub.file:
        return display_name(hub.file)
    name = re.sub(r"[-_.]gguf$", "", hub.repo.split("/")[1], flags=re.IGNORECASE)
    return f"{name}-{hub.quant}" if hub.quant else name


def _already_here(remote: ResolvedModel, settings: StoreSettings | None) -> ResolvedModel | None:
    """A file of the hub's cache that a reference names for certain: same repository, same file
    or quantisation (or the only one that is here), no revision asked for."""
    hub = remote.hub
    if hub is None or hub.revision is not None:
        return None
    refs = [(m, m.ref) for m in local.list_models(settings) if m.ref is not None]
    found = [model for model, ref in refs if _same(hub, ref)]
    if not found or (len(found) > 1 and not (hub.file or hub.quant)):
        return None
    return msgspec.structs.replace(_local(found[0]), hub=hub)


def _same(hub: HubRef, ref: str) -> bool:
    prefix = f"hf:{hub.repo}:".lower()
    if not ref.lower().startswith(prefix):
        return False
    file = ref[len(prefix) :]
    if hub.file is None and hub.quant is None:
        return True
    if hub.file:
        return file == hub.file or display_name(file) == display_name(hub.file)
    return quant_of(file) == (hub.quant or "").upper()


def _looks_like_path(ref: str) -> bool:
    return ref.startswith((".", "/", "~")) or ref.lower().endswith(".gguf")


def _local(model: LocalModel) -> ResolvedModel:
    return ResolvedModel(name=model.name, path=model.path, source=model.owner, mmproj=model.mmproj)


def _named(name: str, settings: StoreSettings | None) -> ResolvedModel:
    models = local.list_models(settings)
    model = local.find(name, models)
    if model is not None:
        return _local(model)
    known = entry_ref(name)
    if known is not None:
        remote = ResolvedModel(name=name, hub=known, source="catalog")
        return _already_here(remote, settings) or remote
    if name == STARTER:
        raise ModelNotFoundError("the starter model is not installed", hint="edgellm pull starter")
    near = _nearest(name, [m.name for m in models])
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ModelNotFoundError(
        f"no model named {name!r}{meant}",
        hint=f"edgellm ls, or edgellm search {name}" if os.sep not in name else f"hf:{name}",
    )


def _nearest(name: str, here: list[str]) -> list[str]:
    """Names like this one: of models that are here, and of the catalog's, whatever their case."""
    names = {each.lower(): each for each in [*(entry.name for entry in entries()), *here]}
    return [names[n] for n in difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the catalog (models/catalog.toml). What is not known is left out there."""

    name: str
    repo: str
    file: str
    """One of its files (the first shard); ``pull`` chooses among all quantisations."""
    parameters: str
    """As its makers say it: ``8B``, ``30B, 3B active``."""
    good_at: tuple[str, ...]
    """Of GOOD_AT."""
    sha256: str | None = None
    """Of ``file``."""
    projector: str | None = None
    """The vision projector's file."""
    license: str | None = None
    template: str | None = None
    """What to know about its chat template."""
    header: str | None = None
    """A header that comes with edgellm (models/headers): a Q4_K_M of this architecture."""
    arch: str | None = None
    n_layer: int | None = None
    n_embd: int | None = None
    n_head: int | None = None
    n_head_kv: int | None = None
    n_ff: int | None = None
    n_expert: int | None = None
    n_expert_used: int | None = None
    n_vocab: int | None = None
    n_ctx_train: int | None = None


GOOD_AT: Final = (
    *("chat", "code", "reasoning", "vision", "tools", "multilingual"),
    *("embedding", "reranking"),
)


def entries() -> list[Entry]:
    """The catalog. Raises StoreError when the file that comes with edgellm is unreadable."""
    path = paths.shipped("models") / "catalog.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(data.get("model", []), list[Entry])
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise StoreError(f"{path}: {error}") from error


def shipped_header(repo: str) -> bytes | None:
    """The header that comes with edgellm for the catalog's model in ``repo``, if there is one."""
    for entry in entries():
        if entry.repo == repo and entry.header is not None:
            path = paths.shipped("models") / "headers" / f"{entry.header}.gguf-header"
            return path.read_bytes() if path.is_file() else None
    return None


def entry_ref(name: str) -> HubRef | None:
    """The repository of a catalog name, ``qwen3-8b`` or ``qwen3-8b:Q8_0``; None if it is none."""
    wanted, _, quant = name.lower().partition(":")
    for entry in entries():
        if entry.name == wanted:
            return HubRef(repo=entry.repo, quant=quant.upper() or None)
    return None
