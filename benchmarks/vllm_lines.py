"""The `vllm serve` lines that edgellm writes, read by vLLM's own parser.

    python benchmarks/vllm_lines.py > lines.txt          # every model in gpu/headers, every node
    python benchmarks/vllm_lines.py --check < lines.txt  # in an environment that has vLLM

``--check`` parses and validates each line as ``vllm serve`` does, compares what it understood with
what the line says, and exits with 1 when one is refused. It imports nothing of edgellm.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HEADERS = Path(__file__).parent / "gpu" / "headers"
NODES = ("1x24GiB", "2x24GiB", "2x48GiB", "4x48GiB", "8x80GiB", "8x141GiB")
CONTEXTS = (4096, 32768)


def lines() -> Iterator[str]:
    """One line for each model, node, link, precision and context that fits."""
    from edgellm.cli.plan import node_of
    from edgellm.errors import DoesNotFitError
    from edgellm.gguf.reader import read_gguf
    from edgellm.gguf.shape import model_shape
    from edgellm.planner.vllm import model_of, plan_vllm

    for header in sorted(HEADERS.glob("*.gguf-header")):
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(header.read_bytes())
            file.truncate(40 << 30)  # a hole for the weights: only the header is read
            shape = model_shape(read_gguf(file.name))
        for node in NODES:
            for link in ("nvlink", "pcie"):
                for fp8 in (False, True):
                    model = model_of(shape, f"org/{header.stem}", fp8=fp8)
                    for n_ctx in CONTEXTS:
                        try:
                            yield plan_vllm(model, node_of(node, link), n_ctx=n_ctx).command
                        except DoesNotFitError:
                            continue


def check() -> int:
    """Parse each line of stdin; how many are refused or misunderstood."""
    import vllm
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    n_lines = n_bad = 0
    for line in dict.fromkeys(sys.stdin):
        words = shlex.split(line)[2:]
        n_lines += 1
        try:
            args = parser.parse_args(words)
            validate_parsed_serve_args(args)
        except (SystemExit, ValueError, TypeError) as error:
            print(f"refused: {line.strip()}: {error!r}")
            n_bad += 1
            continue
        wrong = [f"{k} {v!r}" for k, v in said(words) if str(getattr(args, k)) != v]
        if args.model_tag != words[0] or wrong:
            print(f"misunderstood: {line.strip()}: {', '.join(wrong)}")
            n_bad += 1
    print(f"vLLM {vllm.__version__}: {n_lines - n_bad} of {n_lines} lines accepted")
    return 1 if n_bad or not n_lines else 0


def said(words: list[str]) -> Iterator[tuple[str, str]]:
    """Each option of a line, by vLLM's attribute, and its value; True for a switch."""
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            yield word[2:].replace("-", "_"), "True" if after.startswith("--") else after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="parse the lines on stdin with vLLM")
    if parser.parse_args().check:
        return check()
    for line in lines():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
