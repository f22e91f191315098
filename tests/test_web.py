"""The small HTTP client: redirects, ranges, waits, and errors that say whether to try again."""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from edgellm.errors import DownloadError
from edgellm.web import MAX_REDIRECTS, StatusError, TransientError, _retry_after, open_url


class Handler(BaseHTTPRequestHandler):
    """``/status/429``, ``/redirect/3`` (so many more), ``/away``, ``/headers``, ``/cut``."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        kind, _, value = self.path.strip("/").partition("/")
        if kind == "status":
            self.answer(int(value), b"", {"Retry-After": "7", "X-Error-Code": "GatedRepo"})
        elif kind == "redirect" and value != "0":
            self.answer(302, b"", {"Location": f"/redirect/{int(value) - 1}"})
        elif kind == "nowhere":
            self.answer(302, b"", {})
        elif kind == "away":
            port = self.server.server_address[1]
            self.answer(307, b"", {"Location": f"http://localhost:{port}/headers/with a space"})
        elif kind == "chunks":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"4\r\nhalf\r\n")
            self.close_connection = True
        elif kind == "cut":
            self.answer(200, b"half", {"Content-Length": "8"})
            self.close_connection = True
        else:
            self.answer(200, str(self.headers).encode(), {})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def body(url: str, **options: Any) -> str:
    with open_url(url, **options) as response:
        return response.read(1 << 20).decode()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_transient_and_says_how_long_to_wait(server: str, status: int) -> None:
    with pytest.raises(TransientError, match=f"HTTP {status}") as caught:
        open_url(f"{server}/status/{status}")
    assert caught.value.retry_after == 7


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_what_will_not_pass_has_its_status_and_the_hubs_word(server: str, status: int) -> None:
    with pytest.raises(StatusError) as caught:
        open_url(f"{server}/status/{status}")
    assert (caught.value.status, caught.value.code) == (status, "GatedRepo")


def test_redirects_are_followed_to_where_they_end(server: str) -> None:
    with open_url(f"{server}/redirect/{MAX_REDIRECTS}") as response:
        assert response.url == f"{server}/redirect/0"


def test_redirects_without_end_or_aim_are_refused(server: str) -> None:
    with pytest.raises(StatusError, match="redirects more than"):
        open_url(f"{server}/redirect/{MAX_REDIRECTS + 1}")
    with pytest.raises(StatusError, match="redirects to nowhere"):
        open_url(f"{server}/nowhere")


def test_a_token_stays_with_its_host(server: str) -> None:
    token = {"Authorization": "Bearer secret"}
    assert "Bearer secret" in body(f"{server}/redirect/2", headers=token)
    assert "Bearer secret" not in body(f"{server}/away", headers=token)


def test_a_range_is_asked_for_as_bytes(server: str) -> None:
    assert "Range: bytes=5-9\n" in body(f"{server}/headers", first=5, last=9)
    assert "Range: bytes=5-\n" in body(f"{server}/headers", first=5)
    assert "Range" not in body(f"{server}/headers")
    assert "Accept-Encoding: identity" in body(f"{server}/headers")


def read_to_the_end(url: str) -> None:
    with open_url(url) as response:
        while response.read(100):
            pass


def test_a_body_shorter_than_promised_is_transient(server: str) -> None:
    with pytest.raises(TransientError, match="after 4 of 8 bytes"):
        read_to_the_end(f"{server}/cut")


def test_chunks_without_an_end_are_transient(server: str) -> None:
    with pytest.raises(TransientError, match=r"early|broke"):
        read_to_the_end(f"{server}/chunks")


def test_a_proxy_from_the_environment_is_used(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert "Host: models.example" in body("http://models.example/headers")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://x/y", "x", "http:///y", "http://a b/"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(DownloadError):
        open_url(url)


def test_retry_after_is_a_number_or_a_date() -> None:
    assert _retry_after("12") == 12
    assert _retry_after(None) is None
    assert _retry_after("soon") is None
    soon = _retry_after(email.utils.formatdate(time.time() + 3600))
    assert soon is not None
    assert 3000 < soon <= 3600
