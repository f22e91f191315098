"""Where other programs keep the GGUF files they downloaded, and what they call them.

Every function here only reads. A model found here is used in place and never deleted.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from edgellm import paths
from edgellm.store.names import display_name, is_projector, shard_match

# publisher/repository/file.gguf is as deep as LM Studio goes; folders of people one or two more.
MAX_DEPTH: Final = 5
_OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
_OLLAMA_PROJECTOR: Final = "application/vnd.ollama.image.projector"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A model of some program: all its files, none opened yet."""

    name: str
    files: tuple[str, ...]
    """Every shard, the first one first."""
    owner: str
    publisher: str = ""
    """Tells models of one name apart (a hub account)."""
    mmproj: str | None = None
    ref: str | None = None
    """What ``edgellm pull`` would be given for it."""


def hf_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The Hugging Face hub's cache (``constants.py`` of huggingface_hub, without importing it)."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return paths.expand(os.path.expandvars(environ[variable]))
    if environ.get("HF_HOME"):
        return paths.expand(os.path.expandvars(environ["HF_HOME"])) / "hub"
    return _user_cache(environ) / "huggingface" / "hub"


def _user_cache(environ: Mapping[str, str]) -> Path:
    return paths.expand(environ.get("XDG_CACHE_HOME") or "~/.cache")


def llama_cpp_caches(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """llama.cpp's folders (``fs_get_cache_directory`` in common/common.cpp), old and new."""
    if environ.get("LLAMA_CACHE"):
        return [paths.expand(environ["LLAMA_CACHE"])]
    if sys.platform == "darwin":
        return [paths.expand("~/Library/Caches/llama.cpp")]
    return [_user_cache(environ) / "llama.cpp"]


def ollama_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Ollama's model folders: the person's, and the one of the system service on Linux."""
    if environ.get("OLLAMA_MODELS"):
        return [paths.expand(environ["OLLAMA_MODELS"])]
    return [paths.expand("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]


def lm_studio_folders() -> list[Path]:
    """LM Studio's model folders: where its pointer file says, the usual one, the older one."""
    homes = [paths.expand("~/.lmstudio"), paths.expand("~/.cache/lm-studio")]
    try:
        pointer = paths.expand("~/.lmstudio-home-pointer").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        pointer = ""
    if pointer:
        homes.insert(0, Path(pointer))
    return list(dict.fromkeys(home / "models" for home in homes))


def gguf_files(folder: str | Path, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Paths of GGUF files below a folder, in order; what cannot be read is passed over."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in listed:
        if entry.name.lower().endswith(".gguf"):
            yield entry.path
        elif depth > 1 and not entry.name.startswith(".") and _is_folder(entry):
            yield from gguf_files(entry.path, depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        # A link to a folder is not followed: it may lead back up.
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def group_shards(paths: Iterator[str] | list[str]) -> list[tuple[str, ...]]:
    """Models among file paths: shards of one model together. Incomplete sets are left out."""
    models: dict[str, list[str]] = {}
    wanted: dict[str, int] = {}
    for path in paths:
        folder, name = os.path.split(path)
        match = shard_match(name)
        key = path if match is None else os.path.join(folder, f"{match['prefix']}*{match['count']}")
        models.setdefault(key, []).append(path)
        wanted[key] = 1 if match is None else int(match["count"])
    return [tuple(sorted(files)) for key, files in models.items() if len(files) == wanted[key]]


def models_in(
    folder: str | Path, owner: str, *, depth: int = MAX_DEPTH, publisher: str = ""
) -> Iterator[Found]:
    """Every model below a folder; a projector belongs to the models beside it."""
    files = list(gguf_files(folder, depth))
    projectors: dict[str, str] = {}
    for path in files:
        if is_projector(path):
            projectors.setdefault(os.path.dirname(path), path)
    for group in group_shards([path for path in files if not is_projector(path)]):
        beside = os.path.dirname(group[0])
        yield Found(
            name=display_name(group[0]),
            files=group,
            owner=owner,
            publisher=publisher or _publisher(folder, group[0]),
            mmproj=projectors.get(beside),
        )


def _publisher(folder: str | Path, path: str) -> str:
    parts = path[len(str(folder)) :].strip(os.sep).split(os.sep)
    return parts[0] if len(parts) > 2 else ""


def hf_models(cache: Path, owner: str = "huggingface") -> Iterator[Found]:
    """Models in a hub cache: ``models--owner--repo/snapshots/<commit>/file.gguf``."""
    for repo_folder in _subfolders(cache, "models--"):
        repo = os.path.basename(repo_folder).removeprefix("models--").replace("--", "/", 1)
        for snapshot in _snapshots(repo_folder):
            for found in models_in(snapshot, owner, publisher=repo.split("/", maxsplit=1)[0]):
                inside = found.files[0][len(snapshot) + 1 :]
                yield msgspec.structs.replace(found, ref=f"hf:{repo}:{inside}")


def _snapshots(repo_folder: str) -> list[str]:
    """Snapshot folders, the one that ``main`` points to first."""
    try:
        with open(os.path.join(repo_folder, "refs", "main"), encoding="ascii") as file:
            main = file.read().strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    folders = _subfolders(Path(repo_folder, "snapshots"))
    return sorted(folders, key=lambda folder: os.path.basename(folder) != main)


def _subfolders(folder: Path, prefix: str = "") -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(e.path for e in entries if e.name.startswith(prefix) and e.is_dir())
    except OSError:
        return []


def ollama_models(folder: Path) -> Iterator[Found]:
    """Ollama's ``manifests/<host>/<namespace>/<model>/<tag>`` with their blobs."""
    for path in sorted((folder / "manifests").glob("*/*/*/*")):
        layers = _ollama_layers(path)
        model = layers.get(_OLLAMA_MODEL)
        if model is None:
            continue
        host, namespace, name, tag = path.parts[-4:]
        projector = _ollama_blob(folder, layers.get(_OLLAMA_PROJECTOR))
        blob = _ollama_blob(folder, model)
        if blob is not None:
            yield Found(
                name=_ollama_name(host, namespace, name, tag),
                files=(blob,),
                owner="ollama",
                mmproj=projector,
            )


def _ollama_layers(path: Path) -> dict[str, str]:
    """Media type -> digest of a manifest's layers; empty for anything else."""
    try:
        manifest = json.loads(path.read_bytes())
        layers = manifest["layers"]
        return {layer["mediaType"]: layer["digest"] for layer in layers}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _ollama_blob(folder: Path, digest: str | None) -> str | None:
    if digest is None or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        return None
    path = folder / "blobs" / digest.replace(":", "-")
    return str(path) if path.is_file() else None


def _ollama_name(host: str, namespace: str, name: str, tag: str) -> str:
    """As ``ollama ls`` writes it: its own registry and the library namespace go without saying."""
    if host != "registry.ollama.ai":
        return f"{host}/{namespace}/{name}:{tag}"
    return f"{name}:{tag}" if namespace == "library" else f"{namespace}/{name}:{tag}"


def llama_cpp_models(cache: Path) -> Iterator[Found]:
    """llama.cpp's cache: the hub's layout in new builds, flat ``owner_repo_file.gguf`` before."""
    yield from hf_models(cache, "llama.cpp")
    yield from models_in(cache, "llama.cpp", depth=1)
