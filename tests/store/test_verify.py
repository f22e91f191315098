"""verify finds what is wrong on disk, whoever put it there."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import paths
from edgellm.gguf.reader import check_file
from edgellm.store.local import find, list_models
from edgellm.store.verify import Finding, forget_stamps, record_of, verify
from tests.hub_server import HubServer
from tests.store import layouts
from tests.store.pulling import assert_right, cache, pull

pytestmark = pytest.mark.usefixtures("no_starter")


def look(name: str) -> list[Finding]:
    model = find(name, list_models())
    assert model is not None
    return verify(model, check_file)


def flip(path: Path) -> None:
    """Change one bit of the data and nothing of the times, as a failing disk does."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_a_sound_pull_is_right_by_its_digest(hub: HubServer) -> None:
    pull(projector=True)
    findings = look("tiny-Q4_K_M")
    assert len(findings) == 2
    assert all(f.problem is None and f.digest for f in findings)


def test_a_flipped_bit_is_found_and_repaired_by_a_pull(home: Path, hub: HubServer) -> None:
    import os

    pull()
    blob = next((cache(home) / "blobs").iterdir())
    stat = blob.stat()
    flip(blob)
    os.utime(blob, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (finding,) = look("tiny-Q4_K_M")
    assert "SHA-256 is" in (finding.problem or "")
    model = find("tiny-Q4_K_M", list_models())
    assert model is not None
    record = record_of(model)
    assert record is not None
    forget_stamps(record)
    pull()
    assert_right(home, hub)
    assert look("tiny-Q4_K_M")[0].problem is None


def test_a_cut_file_is_found_by_its_structure(home: Path, hub: HubServer) -> None:
    pull()
    blob = next((cache(home) / "blobs").iterdir())
    blob.write_bytes(blob.read_bytes()[:-10])
    (finding,) = look("tiny-Q4_K_M")
    assert "bytes, should have" in (finding.problem or "")


def test_the_hubs_and_ollamas_blobs_are_held_against_their_names(home: Path) -> None:
    link = layouts.hf(home / ".cache/huggingface/hub", "a/b", "x-Q8_0.gguf")
    blob = layouts.ollama(home / ".ollama/models", "registry.ollama.ai/library/y/1b")
    assert [f.problem for name in ("x-Q8_0", "y:1b") for f in look(name)] == [None, None]
    for path in (link.resolve(), blob):
        flip(path)
    assert all("SHA-256" in (f.problem or "") for name in ("x-Q8_0", "y:1b") for f in look(name))


def test_without_a_known_digest_the_structure_is_checked() -> None:
    path = layouts.write(paths.store_dir() / "mine.gguf")
    (finding,) = look("mine")
    assert (finding.problem, finding.digest) == (None, None)
    path.write_bytes(path.read_bytes()[:-1])
    assert "incomplete" in (look("mine")[0].problem or "")
