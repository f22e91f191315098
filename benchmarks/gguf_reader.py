"""How long reading GGUF headers takes: ``python benchmarks/gguf_reader.py FILE...``.

For each file the best and the median of several first reads (no cache) and of reads with the header
in the cache, in milliseconds, on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from edgellm.gguf import reader
from edgellm.gguf.reader import read_gguf


def milliseconds(work: Callable[[], object], runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGELLM_HOME"] = folder
        print(f"{'file':44} {'tokens':>7} {'header':>10}  first: best median   again: best median")
        for path in options.files:
            first = milliseconds(lambda path=path: reader.check_file(path), options.runs)
            file = read_gguf(path)
            again = milliseconds(lambda path=path: read_gguf(path), options.runs)
            tokens = file.metadata.get("tokenizer.ggml.tokens")
            n_tokens = len(tokens) if isinstance(tokens, reader.GGUFArray) else 0
            print(
                f"{path.name[:44]:44} {n_tokens:7} {file.data_offset:10}  "
                f"{min(first):11.1f} {statistics.median(first):6.1f}   "
                f"{min(again):11.2f} {statistics.median(again):6.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
