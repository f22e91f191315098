"""Compare catalog.toml with the hub: ``python models/check.py [NAME...]``.

For each model: the repository exists, the file and projector are in it, the digest and licence are
what the hub says, and the architecture numbers are those of the file's header. Exits 1 when
something is wrong; what could not be checked (no network, gated) is said and is no error.
"""

from __future__ import annotations

import sys

from edgellm.errors import EdgeLLMError, ModelNotFoundError
from edgellm.gguf.file import GGUFFile
from edgellm.library import choice_header
from edgellm.store import hub
from edgellm.store.catalog import Entry, HubRef, entries
from edgellm.store.files import Listing

KEYS = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "n_ff": "feed_forward_length",
    "n_expert": "expert_count",
    "n_expert_used": "expert_used_count",
    "n_vocab": "vocab_size",
    "n_ctx_train": "context_length",
}


def problems(entry: Entry) -> list[str]:
    """What is wrong with an entry. Raises EdgeLLMError when it could not be checked."""
    try:
        found = hub.listing(HubRef(repo=entry.repo))
    except ModelNotFoundError as error:
        return [error.message]
    wrong = file_problems(entry, found)
    if entry.license and found.license and entry.license != found.license:
        wrong.append(f"the licence is {found.license}, not {entry.license}")
    if entry.arch is not None and not wrong:
        choice = hub.choose(found, HubRef(repo=entry.repo, file=entry.file))
        if choice is not None:
            wrong += header_problems(entry, choice_header(choice))
    return wrong


def file_problems(entry: Entry, found: Listing) -> list[str]:
    files = {file.name: file for choice in found.choices for file in choice.files}
    projectors = {file.name for file in found.projectors}
    wrong = []
    if entry.file not in files:
        wrong.append(f"{entry.file} is not there")
    elif entry.sha256 and files[entry.file].sha256 != entry.sha256:
        wrong.append(f"the SHA-256 of {entry.file} is {files[entry.file].sha256}")
    if entry.projector and entry.projector not in projectors:
        wrong.append(f"{entry.projector} is not there")
    return wrong


def header_problems(entry: Entry, header: GGUFFile) -> list[str]:
    if header.arch != entry.arch:
        return [f"the architecture is {header.arch}, not {entry.arch}"]
    wrong = []
    for field, key in KEYS.items():
        ours, theirs = getattr(entry, field), header.metadata.get(f"{header.arch}.{key}")
        if ours is not None and isinstance(theirs, int) and ours != theirs:
            wrong.append(f"{field} is {theirs}, not {ours}")
    return wrong


def main(names: list[str]) -> int:
    n_wrong = n_unchecked = 0
    for entry in entries():
        if names and entry.name not in names:
            continue
        try:
            wrong = problems(entry)
        except EdgeLLMError as error:
            n_unchecked += 1
            print(f"{entry.name}: not checked: {error.message}")
            continue
        n_wrong += bool(wrong)
        print(f"{entry.name}: {'; '.join(wrong) if wrong else 'right'}")
    print(f"{n_wrong} wrong, {n_unchecked} not checked")
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
