"""One file over HTTP into one partial file: resumed, checked, bounded in its retries.

The partial is always a prefix of the file, so whatever ends the process it can be gone on with. It
is thrown away in two cases only: the far end has another file now, or the digest is wrong.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from edgellm.errors import ChecksumError, DiskFullError, DownloadError
from edgellm.store.files import Remote
from edgellm.units import GiB, MiB, format_bytes
from edgellm.web import Response, TransientError, open_url

CHUNK: Final = 1 * MiB
# Bytes asked for at once: servers refuse to send more than 50 GB in one answer.
PIECE: Final = 32 * GiB
# Failures in a row without a new byte before giving up; bytes that arrive start the count again.
MAX_FAILURES: Final = 6
# Seconds before the next attempt: doubled each time, up to the second number.
BACK_OFF_S: Final = (1.0, 30.0)
MAX_RETRY_AFTER_S: Final = 120.0
# Left free on a disk, so that a download never fills it to the last byte.
DISK_RESERVE: Final = 64 * MiB


class Listener:
    """What a caller may want to show: override what is wanted. Called from the thread that
    downloads."""

    def progress(self, name: str, done: int, total: int | None) -> None:
        """``done`` of ``total`` bytes are on disk; called every CHUNK bytes."""

    def note(self, message: str) -> None:
        """Something went another way than planned, such as a retry."""


class _StartAgainError(Exception):
    """What is on disk is not a prefix of what is to be fetched; the reason is the message."""


def fetch(
    remote: Remote,
    part: Path,
    *,
    headers: Mapping[str, str] | None = None,
    etag: str | None = None,
    listener: Listener | None = None,
    on_etag: Callable[[str | None, int | None], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Complete ``part`` from ``remote`` and return its SHA-256.

    ``etag`` is the one that the bytes already in ``part`` came with; ``on_etag`` learns the current
    one, and the size, before the first new byte is written. Raises ChecksumError when the bytes are
    wrong twice (the partial is then gone), DiskFullError, or DownloadError with the partial kept.
    """
    listener = listener or Listener()
    transfer = _Transfer(
        remote=remote,
        part=part,
        headers=dict(headers or {}),
        etag=etag,
        listener=listener,
        on_etag=on_etag,
        sleep=sleep,
        size=remote.size,
    )
    part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in (1, 2):
        transfer.download()
        digest = transfer.sha256()
        if transfer.is_sound(digest):
            return digest
        part.unlink()
        if attempt == 1:
            listener.note(f"{remote.name}: the bytes are wrong (SHA-256); starting again")
    raise ChecksumError(
        f"{remote.name}: the bytes received are not the ones promised, twice (SHA-256 is {digest}, "
        f"promised is {remote.sha256 or remote.git_sha1}); nothing was kept",
        hint="a proxy or a mirror may be changing the file; try another network or HF_ENDPOINT",
    )


def check_disk(folder: Path, needed: int) -> None:
    """Raise DiskFullError unless ``folder``'s disk has room for ``needed`` more bytes."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed + DISK_RESERVE > free:
        raise _disk_full(folder, needed + DISK_RESERVE, free)


def _disk_full(folder: Path, required: int, free: int) -> DiskFullError:
    return DiskFullError(
        f"{format_bytes(required)} are needed in {folder}, {format_bytes(free)} are free",
        required=required,
        available=free,
        hint="edgellm rm a model, or move the store: HF_HOME, EDGELLM_STORE_DIR",
    )


@dataclass(kw_only=True)
class _Transfer:
    remote: Remote
    part: Path
    headers: dict[str, str]
    etag: str | None
    listener: Listener
    on_etag: Callable[[str | None, int | None], None] | None
    sleep: Callable[[float], None]
    size: int | None
    use_ranges: bool = True

    def download(self) -> None:
        """Until ``part`` has every byte; gives up after MAX_FAILURES without a new one."""
        failures = 0
        while True:
            before = self.have()
            try:
                if self.attempt():
                    return
            except _StartAgainError as reason:
                self.listener.note(f"{self.remote.name}: {reason}; starting again")
                self.truncate()
                self.size, self.etag = self.remote.size, None
                failures += 1
            except TransientError as error:
                failures = 0 if self.have() > before else failures + 1
                self.back_off(error, failures)
            if failures >= MAX_FAILURES:
                raise DownloadError(
                    f"{self.remote.name}: the server keeps sending another file",
                    hint="run the same command again later",
                )

    def have(self) -> int:
        try:
            return self.part.stat().st_size
        except FileNotFoundError:
            return 0

    def truncate(self) -> None:
        with self.part.open("wb"):
            pass

    def attempt(self) -> bool:
        """One request; True when nothing is missing any more."""
        have = self.have()
        if self.size is not None and have > self.size:
            raise _StartAgainError(f"{have} bytes are here, the file has {self.size}")
        if self.size is not None and have == self.size and self.part.exists():
            return True
        headers = dict(self.headers)
        if have and self.guard:
            headers["If-Range"] = f'"{self.guard}"'
        first, last = self.piece(have)
        with open_url(self.remote.url, headers=headers, first=first, last=last) as response:
            if response.status == 416:
                return self.is_complete(response, have)
            self.accept(response, have)
            self.write(response)
        return self.size is None or self.have() >= self.size

    @property
    def guard(self) -> str | None:
        """The entity tag that a resumed answer must have. None where a digest is known: it guards
        better, and the hub's mirrors have entity tags of their own for the same bytes."""
        known = self.remote.sha256 or self.remote.git_sha1
        return None if known else self.etag

    def piece(self, have: int) -> tuple[int | None, int | None]:
        """The range to ask for: to the end, or one of several pieces of a very large file."""
        if not self.use_ranges:
            return None, None
        if self.size is not None and self.size - have > PIECE:
            return have, have + PIECE - 1
        return (have, None) if have else (None, None)

    def is_complete(self, response: Response, have: int) -> bool:
        """A 416: there is no byte where we want to go on. All are here, or ours are too many."""
        _, total = response.content_range
        if total == have and self.size in (None, total):
            return True
        raise _StartAgainError(f"the server's file has {total} bytes, {have} are here")

    def accept(self, response: Response, have: int) -> None:
        """Check what is coming before a byte of it is written."""
        if response.is_html:
            raise DownloadError(
                f"{self.remote.name}: a web page came instead of the model",
                hint="a login page or proxy may be in between: open the address in a browser",
            )
        first, total = response.content_range if response.status == 206 else (0, response.length)
        self.check_total(total)
        if response.status == 206 and first != have:
            self.use_ranges = False
            raise _StartAgainError(f"the server sent byte {first} where {have} was asked for")
        other = self.guard is not None and response.etag not in (None, self.guard)
        if response.status == 206 and have and other:
            raise _StartAgainError("the file changed on the server")
        if response.status == 200 and have:
            changed = self.guard is not None and response.etag != self.guard
            why = "the file changed on the server" if changed else "the server does not resume"
            self.listener.note(f"{self.remote.name}: {why}; starting again")
            self.truncate()
        self.size = self.size if self.size is not None else total
        self.etag = response.etag
        if self.on_etag is not None:
            self.on_etag(self.etag, self.size)
        if self.size is not None:
            check_disk(self.part.parent, self.size - self.have())

    def check_total(self, total: int | None) -> None:
        known = self.remote.size
        if total is not None and known is not None and total != known:
            raise DownloadError(
                f"{self.remote.name}: the server has {total} bytes where {known} were promised",
                hint="the repository may be changing: run the same command again later",
            )

    def write(self, response: Response) -> None:
        with self.part.open("ab") as file:
            try:
                self.copy(response, file)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                free = shutil.disk_usage(self.part.parent).free
                needed = (self.size or self.have()) - self.have()
                raise _disk_full(self.part.parent, needed, free) from error
            finally:
                file.flush()
            os.fsync(file.fileno())

    def copy(self, response: Response, file: BinaryIO) -> None:
        done = file.tell()
        while True:
            left = CHUNK if self.size is None else min(CHUNK, self.size - done)
            data = response.read(left) if left else b""
            if not data:
                break
            file.write(data)
            file.flush()  # so that what a killed process had received is on disk
            done += len(data)
            self.listener.progress(self.remote.name, done, self.size)
        if self.size is not None and done < self.size and response.length is None:
            raise TransientError(f"the answer ended at {done} of {self.size} bytes")

    def back_off(self, error: TransientError, failures: int) -> None:
        if failures >= MAX_FAILURES:
            have = self.have()
            raise DownloadError(
                f"{self.remote.name}: gave up after {failures} attempts: {error.message}; "
                f"{format_bytes(have)} are kept",
                hint="run the same command again: it goes on where it stopped",
            ) from error
        first, most = BACK_OFF_S
        wait = min(most, first * 2 ** max(0, failures - 1)) * random.uniform(0.8, 1.2)
        if error.retry_after is not None:
            wait = min(error.retry_after, MAX_RETRY_AFTER_S)
        self.listener.note(f"{self.remote.name}: {error.message}; again in {wait:.0f} s")
        self.sleep(wait)

    def sha256(self) -> str:
        name, size = f"checking {self.remote.name}", self.have()
        with self.part.open("rb") as file:
            return file_digest(file, lambda done: self.listener.progress(name, done, size))

    def is_sound(self, sha256: str) -> bool:
        if self.remote.sha256 is not None:
            return sha256 == self.remote.sha256
        if self.remote.git_sha1 is not None:
            return git_sha1(self.part) == self.remote.git_sha1
        return True


def file_digest(file: BinaryIO, on_progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of what is left to read, in hex; ``on_progress`` learns the bytes done."""
    digest, done = hashlib.sha256(), 0
    while data := file.read(4 * MiB):
        digest.update(data)
        done += len(data)
        if on_progress is not None:
            on_progress(done)
    return digest.hexdigest()


def git_sha1(path: Path) -> str:
    """The name git gives these bytes."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(4 * MiB):
            digest.update(data)
    return digest.hexdigest()
