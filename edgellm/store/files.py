"""Files that are somewhere else, and the models they make up."""

from __future__ import annotations

import msgspec


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A file somewhere else. What is unknown is None and not checked."""

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    """For small files that the hub keeps in git: SHA-1 over ``blob <size>\\0`` and the bytes."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a repository: all shards of one quantisation."""

    name: str
    quant: str
    files: tuple[Remote, ...]

    @property
    def n_bytes(self) -> int:
        return sum(file.size or 0 for file in self.files)


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A repository at one commit."""

    repo: str
    commit: str
    revision: str
    choices: tuple[Choice, ...]
    """By size, the largest first."""
    projectors: tuple[Remote, ...] = ()
    license: str | None = None
    downloads: int | None = None
    is_gated: bool = False
    base_model: str | None = None
