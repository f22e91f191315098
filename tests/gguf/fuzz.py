"""Break real headers many times: ``python -m tests.gguf.fuzz FILE... [--count N] [--seed N]``.

Every mutant must parse or end in GGUFError, within a second and without taking memory. Prints what
it saw and exits 1 when a mutant did anything else. The test suite runs a small cousin of this.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from edgellm.errors import GGUFError
from edgellm.gguf.reader import parse_header, read_gguf
from tests.gguf.mutate import mutations

# Where the structure is: the first keys, and the last keys with the tensor table.
START, END = 4096, 64 * 1024
LIMIT_S = 1.0
LIMIT_MIB = 200


def header_bytes(path: Path) -> tuple[bytes, int]:
    """A file's header and the size its tensors make it have."""
    file = read_gguf(path)
    with path.open("rb") as stream:
        return stream.read(file.data_offset), file.file_bytes


def mutants(header: bytes, rng: random.Random, count: int) -> list[bytes]:
    """A third broken at the start, a third at the end, a third anywhere."""
    part = rng.randrange(3)
    if part == 0:
        return [head + header[START:] for head in mutations(header[:START], rng, count)]
    if part == 1:
        return [header[:-END] + tail for tail in mutations(header[-END:], rng, count)]
    return list(mutations(header, rng, count))


def outcome(data: bytes, size: int, scratch: Path) -> str:
    try:
        if size % 2:  # half through a file of the model's size, as a hole
            with scratch.open("wb") as stream:
                stream.write(data)
                stream.truncate(max(size, len(data)))
            read_gguf(scratch)
        else:
            parse_header(data, file_bytes=max(size, len(data)))
    except GGUFError as error:
        named = error.offset is not None or "shard" in error.what or "split" in error.what
        return "refused" if named else f"no offset: {error.what}"
    except Exception as error:  # noqa: BLE001 (any other is what this looks for)
        return f"{type(error).__name__}: {error}"
    return "parsed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    seeds = [header_bytes(path) for path in options.files]
    seen: Counter[str] = Counter()
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        while seen.total() < options.count:
            header, size = rng.choice(seeds)
            for data in mutants(header, rng, 8):
                started = time.thread_time()  # of CPU: the machine may be busy with others
                seen[outcome(data, size + rng.randrange(2), Path(folder, "m.gguf"))] += 1
                slowest = max(slowest, time.thread_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{seen.total()} mutants of {len(seeds)} headers: {dict(seen)}")
    memory = f"peak memory {peak:.0f} MiB ({before / 1024:.0f} before)"
    print(f"slowest {slowest * 1e3:.0f} ms of CPU, {memory}")
    wrong = set(seen) - {"parsed", "refused"}
    return int(bool(wrong) or slowest > LIMIT_S or peak > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
