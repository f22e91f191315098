"""A thousand local models: how long ``edgellm ls`` takes, cold and remembered.

``python benchmarks/store_ls.py [--models N]`` makes that many models of real header sizes (sparse
files below a temporary folder, half in edgellm's store, the rest as LM Studio, Ollama and the hub's
cache keep them), runs ``edgellm ls`` as a process, and prints wall-clock seconds and, for machines
that are busy, seconds of CPU. The first run has no cache at all; the others have its cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
HEADERS = ROOT / "tests" / "data" / "planner" / "headers"


class Source(msgspec.Struct, frozen=True):
    header: bytes
    size: int


def sources() -> list[Source]:
    """Real headers. They hold no tokens, which ``ls`` does not read either."""
    sizes = json.loads((HEADERS / "file_bytes.json").read_text())
    return [
        Source((HEADERS / f"{name}.gguf-header").read_bytes(), size)
        for name, size in sorted(sizes.items())
    ]


def write(path: Path, source: Source, number: int) -> Path:
    """A sparse model of its own: the number makes its length one of a kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(source.header)
        file.truncate(source.size + 32 * number)
    return path


def populate(home: Path, count: int) -> None:
    kinds = sources()
    for number in range(count):
        source = kinds[number % len(kinds)]
        name = f"model-{number}-Q4_K_M"
        place = number % 8
        if place < 4:
            write(home / "edgellm/models" / f"{name}.gguf", source, number)
        elif place < 6:
            write(
                home / f".lmstudio/models/pub{number % 7}/repo{number}/{name}.gguf", source, number
            )
        elif place == 6:
            repo = home / f".cache/huggingface/hub/models--pub--repo{number}"
            digest = hashlib.sha256(str(number).encode()).hexdigest()
            write(repo / "blobs" / digest, source, number)
            link = repo / "snapshots" / ("c" * 40) / f"{name}.gguf"
            link.parent.mkdir(parents=True)
            link.symlink_to(f"../../blobs/{digest}")
        else:
            ollama(home / ".ollama/models", source, number)


def ollama(folder: Path, source: Source, number: int) -> None:
    digest = hashlib.sha256(f"o{number}".encode()).hexdigest()
    write(folder / "blobs" / f"sha256-{digest}", source, number)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest = folder / f"manifests/registry.ollama.ai/library/model{number}/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}))


def cpu_seconds() -> float:
    """What the processes started here have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def runs(home: Path, cached: int) -> Iterator[tuple[str, float, dict[str, float]]]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_", "EDGELLM_"))}
    environment = {
        **keep,
        "HOME": str(home),
        "EDGELLM_HOME": str(home / "edgellm"),
        "PYTHONPATH": str(ROOT),
    }
    shutil.rmtree(home / "edgellm/cache", ignore_errors=True)
    for turn in range(1 + cached):
        started, used = time.perf_counter(), cpu_seconds()
        done = subprocess.run(
            [sys.executable, "-m", "edgellm", "ls", "--json"],
            env=environment,
            capture_output=True,
            check=True,
        )
        seconds = time.perf_counter() - started
        used = cpu_seconds() - used
        models = json.loads(done.stdout)["models"]
        facts: dict[str, float] = {
            "cpu_s": round(used, 3),
            "models": len(models),
            "exact": sum(m["exact"] for m in models),
        }
        yield ("remembered" if turn else "cold"), seconds, facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        populate(home, options.models)
        times: dict[str, list[float]] = {}
        for kind, seconds, facts in runs(home, options.runs):
            times.setdefault(kind, []).append(seconds)
            print(f"{kind:10}  {seconds:.3f} s  {facts}")
        for kind, found in times.items():
            print(f"{kind}: median {statistics.median(found):.3f} s, best {min(found):.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
