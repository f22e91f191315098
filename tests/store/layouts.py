"""Model folders as other programs lay them out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.gguf.build import small_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model(name: str = "tiny") -> bytes:
    return small_model(**{"general.name": name})


def write(path: Path, data: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model(path.name) if data is None else data)
    return path


def hf(
    cache: Path, repo: str, file: str, data: bytes | None = None, *, commit: str = COMMIT
) -> Path:
    """``models--owner--repo`` with blobs, a snapshot of links, and refs/main."""
    data = model(file) if data is None else data
    folder = cache / f"models--{repo.replace('/', '--')}"
    blob = write(folder / "blobs" / hashlib.sha256(data).hexdigest(), data)
    link = folder / "snapshots" / commit / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(blob)
    write(folder / "refs" / "main", COMMIT.encode())
    return link


def ollama(
    folder: Path, name: str, data: bytes | None = None, *, projector: bytes | None = None
) -> Path:
    """``name`` is host/namespace/model/tag."""

    def blob(content: bytes) -> tuple[str, Path]:
        digest = hashlib.sha256(content).hexdigest()
        return f"sha256:{digest}", write(folder / "blobs" / f"sha256-{digest}", content)

    digest, path = blob(model(name) if data is None else data)
    kind = "application/vnd.ollama.image"
    layers = [
        {"mediaType": f"{kind}.model", "digest": digest, "size": 1},
        {"mediaType": f"{kind}.template", "digest": blob(b"{{ .Prompt }}")[0], "size": 1},
    ]
    if projector is not None:
        layers.append({"mediaType": f"{kind}.projector", "digest": blob(projector)[0], "size": 1})
    manifest = {"schemaVersion": 2, "config": {}, "layers": layers}
    write(folder / "manifests" / name, json.dumps(manifest).encode())
    return path
