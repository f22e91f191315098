"""A server that stands in for the hub, and misbehaves on demand.

It speaks what pulling a model needs: ``/api/models/...``, ``/owner/repo/resolve/rev/file`` with
the hub's headers, and a redirect to another address that serves ranges. ``Trouble`` says what goes
wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Trouble:
    """What goes wrong; each is used up as requests for file data meet it."""

    statuses: list[int] = field(default_factory=list)
    """Answer the next data requests with these (429, 500 ...), then well."""
    retry_after: str | None = None
    cut_after: list[int] = field(default_factory=list)
    """End the next data answers after so many bytes, connection closed."""
    chunk_delay_s: float = 0.0
    chunk: int = 16 * 1024
    no_ranges: bool = False
    html: int = 0
    """So many data answers are a web page with status 200."""
    wrong_length: int = 0
    """So many data answers promise more bytes than they send, and than the file has."""
    corrupt: int = 0
    """So many whole bodies have a byte changed."""
    ignore_if_range: bool = False
    wrong_start: int = 0
    """So many partial answers start at another byte than was asked for, and say so."""
    api_status: int | None = None
    gated: bool = False
    token: str | None = None
    """A token without which nothing is served."""
    hang_s: float = 0.0


@dataclass
class Asked:
    """A request that was served."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    n_sent: int = 0


@dataclass
class HubServer:
    """``files`` maps ``owner/repo`` to its file names and bytes."""

    url: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    trouble: Trouble = field(default_factory=Trouble)
    asked: list[Asked] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)
    """Overrides by ``repo/file``."""
    claimed: dict[str, bytes] = field(default_factory=dict)
    """What the API says a file is (size and digest), where that is a lie."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def data_requests(self) -> list[Asked]:
        return [a for a in self.asked if a.path.startswith("/cdn/") and a.method == "GET"]

    @property
    def n_sent(self) -> int:
        return sum(a.n_sent for a in self.asked if a.path.startswith("/cdn/"))


class Hollow:
    """A file of ``size`` bytes: ``head``, then zeros that are made when asked for."""

    def __init__(self, head: bytes, size: int) -> None:
        self.head, self.size = head, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        first, last, _ = part.indices(self.size)
        found = self.head[first:last]
        return found + b"\0" * (last - first - len(found))


def etag_of(data: bytes | Hollow) -> str:
    known = data if isinstance(data, bytes) else data.head + str(data.size).encode()
    return hashlib.sha256(known).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = HubServer(url=f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that went away is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def _route(self) -> None:
        asked = Asked(
            self.command,
            unquote(urlsplit(self.path).path),
            self.headers.get("Range"),
            self.headers.get("Authorization"),
        )
        with self.hub.lock:
            self.hub.asked.append(asked)
        try:
            self._answer(asked)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, asked: Asked) -> None:
        if asked.path == "/api/models":
            return self._search()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(.+))?", asked.path):
            return self._model(match[1], match[3])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", asked.path):
            return self._resolve(match[1], match[3])
        if match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", asked.path):
            return self._data(asked, match[1], match[2])
        return self._send(404, b"")

    def _search(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        words = query.get("search", [""])[0].lower().split()
        limit = int(query.get("limit", ["100"])[0])
        found = [
            {
                "id": repo,
                "modelId": repo,
                "downloads": 10,
                "likes": 1,
                "tags": ["gguf", "license:mit"],
            }
            for repo in self.hub.files
            if all(word in repo.lower() for word in words)
        ]
        self._json(found[:limit])

    def _refused(self, repo: str) -> bool:
        trouble = self.hub.trouble
        if repo not in self.hub.files:
            self._error(404 if trouble.token else 401, "RepoNotFound", "Repository not found")
            return True
        if trouble.token and self.headers.get("Authorization") != f"Bearer {trouble.token}":
            self._error(401, "RepoNotFound", "Invalid credentials")
            return True
        return False

    def _model(self, repo: str, revision: str | None) -> None:
        if self.hub.trouble.api_status:
            return self._send(self.hub.trouble.api_status, b"")
        if self._refused(repo):
            return None
        if revision not in (None, "main", "v1", COMMIT):
            return self._error(404, "RevisionNotFound", "Revision not found")
        siblings = []
        for name, data in self.hub.files[repo].items():
            claimed = self.hub.claimed.get(f"{repo}/{name}", data)
            lfs = {"sha256": etag_of(claimed), "size": len(claimed), "pointerSize": 134}
            entry: dict[str, Any] = {"rfilename": name, "size": len(claimed)}
            known = claimed if isinstance(claimed, bytes) else claimed.head
            git = hashlib.sha1(b"blob %d\0" % len(claimed) + known).hexdigest()
            entry |= {"blobId": git} if name.endswith(".md") else {"blobId": git, "lfs": lfs}
            siblings.append(entry)
        return self._json(
            {
                "id": repo,
                "modelId": repo,
                "sha": COMMIT,
                "private": False,
                "gated": "manual" if self.hub.trouble.gated else False,
                "downloads": 10,
                "tags": ["gguf", "license:mit"],
                "cardData": {"license": "mit"},
                "siblings": siblings,
            }
        )

    def _resolve(self, repo: str, name: str) -> None:
        if self._refused(repo):
            return
        if self.hub.trouble.gated:
            self._error(403, "GatedRepo", f"Access to model {repo} is restricted")
            return
        data = self.hub.files[repo].get(name)
        if data is None:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        claimed = self.hub.claimed.get(f"{repo}/{name}", data)
        headers = {
            # The data is at another address: a token must not follow.
            "Location": self.hub.url.replace("127.0.0.1", "localhost") + f"/cdn/{repo}/{name}",
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": f'"{etag_of(claimed)}"',
            "X-Linked-Size": str(len(claimed)),
        }
        self._send(302, b"", headers)

    def _data(self, asked: Asked, repo: str, name: str) -> None:
        with self.hub.lock:
            status, body, headers, cut = self._plan_data(asked, repo, name)
        time.sleep(self.hub.trouble.hang_s)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self._stream(asked, body, cut)

    def _plan_data(
        self, asked: Asked, repo: str, name: str
    ) -> tuple[int, bytes, dict[str, str], int | None]:
        trouble = self.hub.trouble
        if trouble.statuses:
            headers = {"Content-Length": "0"}
            if trouble.retry_after:
                headers["Retry-After"] = trouble.retry_after
            return trouble.statuses.pop(0), b"", headers, None
        if trouble.html:
            trouble.html -= 1
            page = b"<!DOCTYPE html><html><body>Please log in</body></html>"
            return 200, page, {"Content-Type": "text/html", "Content-Length": str(len(page))}, None
        data = self.hub.files[repo][name]
        headers = {"ETag": f'"{self.hub.etags.get(f"{repo}/{name}", etag_of(data))}"'}
        headers["Content-Type"] = "application/octet-stream"
        if trouble.corrupt:
            trouble.corrupt -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, body = self._ranged(asked, data, headers)
        length = len(body)
        if trouble.wrong_length:
            trouble.wrong_length -= 1
            length += 999
        headers["Content-Length"] = str(length)
        cut = trouble.cut_after.pop(0) if trouble.cut_after else None
        return status, body, headers, len(body) if length > len(body) and cut is None else cut

    def _ranged(self, asked: Asked, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        trouble = self.hub.trouble
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.range or "")
        if match is None or trouble.no_ranges:
            return 200, data
        tag = self.headers.get("If-Range")
        if tag and tag != headers["ETag"] and not trouble.ignore_if_range:
            return 200, data
        first = int(match[1])
        if first >= len(data):
            headers["Content-Range"] = f"bytes */{len(data)}"
            return 416, b""
        if trouble.wrong_start:
            trouble.wrong_start -= 1
            first = max(0, first - 7)
        last = min(int(match[2]) if match[2] else len(data) - 1, len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return 206, data[first : last + 1]

    def _stream(self, asked: Asked, body: bytes, cut: int | None) -> None:
        trouble = self.hub.trouble
        end = len(body) if cut is None else min(cut, len(body))
        for at in range(0, end, trouble.chunk):
            piece = body[at : min(at + trouble.chunk, end)]
            self.wfile.write(piece)
            asked.n_sent += len(piece)
            if trouble.chunk_delay_s:
                time.sleep(trouble.chunk_delay_s)
        if cut is not None:
            self.close_connection = True

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
