"""A model's header over HTTP, without the model.

The header is read with byte ranges: a first piece, then as much as the number of tokens suggests.
Four requests are enough for every tokenizer seen (262k tokens with merges take three).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from edgellm.errors import DownloadError, GGUFError
from edgellm.gguf import cache
from edgellm.gguf.file import GGUFFile, Header
from edgellm.gguf.reader import assemble, check_shards, parse_one, shard_paths, split_count
from edgellm.units import MiB
from edgellm.web import Response, open_url

MAX_REQUESTS: Final = 4
FIRST: Final = 1 * MiB


def read_gguf_url(
    url: str, *, headers: Mapping[str, str] | None = None, digest: str | None = None
) -> GGUFFile:
    """Read the header of the GGUF at ``url``; of a split model, every shard's.

    ``digest`` (SHA-256 of the file, where known) lets a header read before be used with no request.
    Raises DownloadError, also when the server does not serve ranges, or GGUFError. Long arrays (the
    tokenizer's) have their length but cannot be decoded.
    """
    header = _read_one(url, headers, digest)
    count = split_count(header, url)
    if count <= 1:
        return assemble((url,), (header,))
    urls = shard_urls(url, count)
    all_headers = tuple(header if u == url else _read_one(u, headers, None) for u in urls)
    check_shards(urls, all_headers)
    return assemble(urls, all_headers)


def shard_urls(url: str, count: int) -> tuple[str, ...]:
    """The addresses of all shards, from any of them."""
    parts = urlsplit(url)
    paths = shard_paths(unquote(parts.path), count)
    return tuple(urlunsplit(parts._replace(path=quote(path))) for path in paths)


def _read_one(url: str, headers: Mapping[str, str] | None, digest: str | None) -> Header:
    if digest is not None:
        known = cache.load(f"sha256:{digest}", cache.NO_STAMP)
        if known is not None:
            return known
    source = _Ranges(url, headers or {})
    data = source.fill(0, FIRST, 0)
    header = parse_one(url, data, source.file_bytes, source.fill)
    if digest is not None:
        cache.save(f"sha256:{digest}", cache.NO_STAMP, header)
    return header


class _Ranges:
    """Pieces of a file, each following the last; every request after the first goes straight to
    where the redirects led."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self.at = url
        self.headers = dict(headers)
        self.file_bytes: int | None = None
        self.etag: str | None = None
        self.n_requests = 0

    def fill(self, have: int, need: int, expected: int) -> bytes:
        """The bytes from ``have`` to at least ``need``, further where more will be wanted."""
        if self.n_requests == MAX_REQUESTS:
            raise GGUFError(self.url, f"the header is over {have} bytes long", offset=have)
        self.n_requests += 1
        growth = have * 2 if self.n_requests == MAX_REQUESTS else have * 13 // 10
        wanted = max(need, expected if self.n_requests == 2 else growth)
        if self.file_bytes is not None:
            wanted = min(wanted, self.file_bytes)
        with open_url(self.at, headers=self.headers, first=have, last=wanted - 1) as response:
            self._check(response, have)
            return _read_all(response, wanted - have)

    def _check(self, response: Response, have: int) -> None:
        if response.status != 206:
            raise self._no_ranges(response)
        first, total = response.content_range
        if first != have:
            raise DownloadError(f"{self.url}: asked for byte {have}, the server sent byte {first}")
        if self.etag is not None and response.etag != self.etag:
            raise DownloadError(
                f"{self.url}: the file changed while it was read", hint="run the command again"
            )
        if urlsplit(response.url).netloc != urlsplit(self.url).netloc:
            self.headers.pop("Authorization", None)
        self.at, self.etag = response.url, response.etag
        self.file_bytes = total if total is not None else self.file_bytes

    def _no_ranges(self, response: Response) -> DownloadError:
        host = urlsplit(response.url).hostname
        if response.status == 416:
            return DownloadError(f"{self.url} is empty or shorter than a GGUF")
        if response.is_html:
            return DownloadError(
                f"{self.url} is a web page, not a model",
                hint="use the address of the file itself (on the hub: .../resolve/main/FILE.gguf)",
            )
        return DownloadError(
            f"{host} does not serve byte ranges, so the header cannot be read without the model",
            hint=f"edgellm pull {self.url}",
        )


def _read_all(response: Response, n: int) -> bytes:
    pieces, left = [], n
    while left > 0:
        piece = response.read(left)
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
