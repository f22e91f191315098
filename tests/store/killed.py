"""Kill pulls and imports at random moments: ``python -m tests.store.killed [--kills N]``.

A child pulls (or copies) a model from a slow server; this process kills it with SIGKILL at a random
moment, looks at what is on disk, and starts the next child on the same home. Whenever one gets
through, the model must be right and nothing else may be there; then it is deleted and the next
round begins. The test suite runs a few kills; the script fifty of each kind by default.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gguf.build import STR, gguf, pair, tensor
from tests.hub_server import HubServer, Trouble, hub_server

REPO = "ann/tiny-GGUF"
NAME = "tiny-Q4_K_M.gguf"
SIZE = 3 * 1024 * 1024


def model(seed: int) -> bytes:
    head = gguf([pair("general.name", STR, f"m{seed}")], [tensor("a", (SIZE,), 24, 0)])
    return head + random.Random(seed).randbytes(SIZE)


# --- the child


def child(kind: str, source: str) -> None:
    """Say "go", then do the work that is to be killed."""
    from edgellm.gguf.reader import check_file
    from edgellm.store import importing, transfer

    transfer.CHUNK = 32 * 1024
    importing._CHUNK = 32 * 1024
    if kind == "import":
        print("go", flush=True)
        importing.import_model(Path(source), check=check_file, mode="copy", listener=_Slow())
        return
    from edgellm.store import hub
    from edgellm.store.catalog import HubRef

    ref = HubRef(repo=REPO, quant="Q4_K_M")
    print("go", flush=True)
    found = hub.listing(ref)
    choice = hub.choose(found, ref)
    assert choice is not None
    hub.fetch(hub.order(found, choice, found.projectors[0]), check=check_file)


def _Slow() -> object:  # noqa: N802 (a class made where its base is imported)
    from edgellm.store.transfer import Listener

    class Slow(Listener):
        def progress(self, name: str, done: int, total: int | None) -> None:
            time.sleep(0.008)

    return Slow()


# --- the one that kills


class Round:
    """A home, a source, and what must be true of them."""

    def __init__(self, kind: str, folder: Path, hub: HubServer, rng: random.Random) -> None:
        self.kind, self.folder, self.rng = kind, folder, rng
        self.hub = hub
        self.source = folder / "usb" / NAME
        self.n_kills = self.n_complete = self.n_resumed = 0
        self.begin()

    def begin(self) -> None:
        """A new model, so that nothing of the last round can help."""
        seed = self.rng.randrange(1 << 30)
        self.data = model(seed)
        self.hub.files[REPO] = {NAME: self.data, "mmproj-tiny-F16.gguf": model(seed + 1)}
        self.source.parent.mkdir(parents=True, exist_ok=True)
        self.source.write_bytes(self.data)

    @property
    def environment(self) -> dict[str, str]:
        home = str(self.folder / "home")
        return {
            **{
                k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_", "EDGELLM_"))
            },
            "HOME": home,
            "EDGELLM_HOME": f"{home}/edgellm",
            "HF_ENDPOINT": self.hub.url,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }

    def strike(self, longest: float) -> None:
        """One child, killed after at most ``longest`` seconds of work unless it ends before."""
        had = self.partial_bytes()
        command = [sys.executable, "-m", "tests.store.killed", "--child", self.kind]
        with subprocess.Popen(
            [*command, str(self.source)], env=self.environment, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            try:
                process.wait(self.rng.uniform(0, longest))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.n_kills += 1
                self.check_partial(had)
                return
            assert process.returncode == 0, f"a resumed {self.kind} failed"
        self.check_complete()

    def files(self) -> dict[str, Path]:
        root = self.folder / "home"
        found = (p for p in root.rglob("*") if not p.is_dir() and ".locks" not in p.parts)
        return {str(p.relative_to(root)): p for p in found if "/.records/" not in f"/{p}"}

    def parts(self) -> list[Path]:
        return [p for n, p in self.files().items() if n.endswith((".incomplete", ".part"))]

    def partial_bytes(self) -> int:
        return sum(p.stat().st_size for p in self.parts())

    def check_partial(self, had: int) -> None:
        """Visible files are right; partials are prefixes, and no shorter than before."""
        known = list(self.hub.files[REPO].values())
        for part in self.parts():
            assert any(data.startswith(part.read_bytes()) for data in known), "not a prefix"
        for name, path in self.files().items():
            if name.endswith(".gguf"):
                assert path.read_bytes() in known, f"{name} is visible and wrong"
        blobs = sum(p.stat().st_size for n, p in self.files().items() if "/blobs/" in n)
        assert max(blobs, self.partial_bytes()) >= had or self.kind == "import", "bytes were lost"
        self.n_resumed += had > 0

    def check_complete(self) -> None:
        """Exactly the files of the model are there, and they are right."""
        files = self.files()
        if self.kind == "import":
            assert set(files) == {f"edgellm/models/{NAME}"}, set(files)
            assert files[f"edgellm/models/{NAME}"].read_bytes() == self.data
        else:
            kinds = sorted(name.split("/")[4] for name in files)
            assert kinds == ["blobs", "blobs", "refs", "snapshots", "snapshots"], set(files)
            for name, path in files.items():
                if "/blobs/" in name:
                    assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        self.n_complete += 1
        for path in files.values():
            path.unlink()
        for path in (self.folder / "home").rglob(".records/*"):
            path.unlink()
        self.begin()


def run(kind: str, kills: int, seed: int) -> Round:
    with tempfile.TemporaryDirectory() as folder, hub_server() as hub:
        hub.trouble = Trouble(chunk=32 * 1024, chunk_delay_s=0.003)
        round_ = Round(kind, Path(folder), hub, random.Random(seed))
        while round_.n_kills < kills:
            round_.strike(longest=0.8)
        before = round_.n_complete
        while round_.n_complete == before:
            round_.strike(longest=60)
    return round_


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    for kind in ("pull", "import"):
        done = run(kind, options.kills, options.seed)
        print(
            f"{kind}: {done.n_kills} kills, {done.n_resumed} on a partial, "
            f"{done.n_complete} completed, all right"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
