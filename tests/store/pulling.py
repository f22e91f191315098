"""What the tests of pulling share: models, a pull, and what must be true afterwards."""

from __future__ import annotations

import random
from pathlib import Path

from edgellm.gguf.reader import check_file, read_gguf
from edgellm.store import hub as store_hub
from edgellm.store import records
from edgellm.store.catalog import parse_hub_ref
from edgellm.store.local import list_models
from edgellm.store.records import Record
from edgellm.store.transfer import Listener
from edgellm.units import KiB
from tests.gguf.build import STR, gguf, pair, tensor
from tests.hub_server import COMMIT, HubServer

REPO = "ann/tiny-GGUF"
SIZE = 300 * KiB


def model(name: str, size: int = SIZE, *pairs: bytes) -> bytes:
    """A sound GGUF whose tensor holds noise, so that no two pieces are alike."""
    data = gguf([pair("general.name", STR, name), *pairs], [tensor("a", (size,), 24, 0)])
    return data + random.Random(name).randbytes(size)


class Notes(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[tuple[int, int | None]] = []

    def progress(self, name: str, done: int, total: int | None) -> None:
        self.seen.append((done, total))

    def note(self, message: str) -> None:
        self.notes.append(message)


def pull(ref: str = f"hf:{REPO}:Q4_K_M", listener: Listener | None = None, **kw: bool) -> Record:
    parsed = parse_hub_ref(ref)
    assert parsed is not None
    listing = store_hub.listing(parsed)
    choice = store_hub.choose(listing, parsed)
    assert choice is not None
    projector = listing.projectors[0] if kw.get("projector") else None
    order = store_hub.order(listing, choice, projector)
    return store_hub.fetch(order, check=check_file, listener=listener)


def cache(home: Path) -> Path:
    return home / ".cache/huggingface/hub/models--ann--tiny-GGUF"


def files_below(folder: Path) -> set[str]:
    """Every file that is there, locks and the hub's marker aside."""
    found = (p.relative_to(folder) for p in folder.rglob("*") if not p.is_dir())
    return {str(p) for p in found if ".locks" not in p.parts}


def assert_right(home: Path, hub: HubServer, name: str = "tiny-Q4_K_M.gguf") -> None:
    """The model is whole, visible, listed as ours, and nothing else is lying about."""
    data = hub.files[REPO][name]
    path = cache(home) / "snapshots" / COMMIT / name
    assert path.is_symlink()
    assert path.read_bytes() == data
    assert not list(home.rglob("*.incomplete"))
    (ours,) = [m for m in list_models() if m.path == path]
    assert ours.owner == "edgellm"
    assert read_gguf(path).kind == "model"


def assert_resumable(home: Path, hub: HubServer) -> None:
    """Nothing is visible, the partial is a prefix of the file, and it is listed."""
    assert not list(cache(home).glob("snapshots/*/*"))
    assert "tiny-Q4_K_M" not in [m.name for m in list_models()]
    data = hub.files[REPO]["tiny-Q4_K_M.gguf"]
    for part in home.rglob("*.incomplete"):
        assert data.startswith(part.read_bytes())
    (record,) = records.load_all()
    assert (record.complete, record.name, record.size) == (False, "tiny-Q4_K_M", len(data))
