"""HTTP for files: byte ranges, redirects, proxies, and errors that say what to do.

The standard library's client. Proxies come from the environment (``https_proxy``, ``no_proxy``),
certificates from the system (``SSL_CERT_FILE``). An Authorization header goes to the host it was
given for and to no other, wherever redirects lead.
"""

from __future__ import annotations

import email.utils
import http.client
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Final
from urllib.parse import quote, urljoin, urlsplit

from edgellm.errors import DownloadError

USER_AGENT: Final = "edgellm"
MAX_REDIRECTS: Final = 8
TIMEOUT_S: Final = 30.0
_URL_CHARACTERS: Final = "%/:=&?~#+!$,;'@()*[]"
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class TransientError(DownloadError):
    """It may work when tried again: the connection failed, or the far end is busy.

    ``retry_after`` is the number of seconds the far end asked for, where it did.
    """

    def __init__(
        self, message: str, *, retry_after: float | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class StatusError(DownloadError):
    """The far end refused; trying the same again will not help.

    ``code`` is the hub's own word for it (``X-Error-Code``: GatedRepo, EntryNotFound ...).
    """

    def __init__(
        self, message: str, *, status: int, code: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


class Response:
    """An open answer. ``url`` is where redirects ended; header names are lower case."""

    def __init__(self, url: str, status: int, headers: Mapping[str, str], body: IO[bytes]) -> None:
        self.url = url
        self.status = status
        self.headers = headers
        self._body = body
        self._n_read = 0

    @property
    def etag(self) -> str | None:
        """The entity tag without quotes and weakness mark."""
        tag = self.headers.get("x-linked-etag") or self.headers.get("etag")
        return tag.removeprefix("W/").strip('"') if tag else None

    @property
    def length(self) -> int | None:
        """Bytes of this body, where the far end says."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isdigit() else None

    @property
    def content_range(self) -> tuple[int | None, int | None]:
        """First byte of this part and bytes of the whole, of a 206 or 416 answer."""
        match = _CONTENT_RANGE.fullmatch(self.headers.get("content-range", ""))
        if match is None:
            return None, None
        total = None if match[3] == "*" else int(match[3])
        return (int(match[1]) if match[1] else None), total

    @property
    def is_html(self) -> bool:
        return "text/html" in self.headers.get("content-type", "")

    def read(self, n: int) -> bytes:
        """Up to ``n`` bytes; empty at the end.

        A connection that breaks, or a body shorter than promised, raises TransientError.
        """
        host = urlsplit(self.url).hostname
        try:
            data = self._body.read(n)
        except http.client.IncompleteRead as error:
            if self.length is None:  # chunked, and the last chunk never came
                raise TransientError(f"{host} ended the answer early") from error
            data = error.partial
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"the connection to {host} broke: {_reason(error)}") from error
        self._n_read += len(data)
        if not data and n > 0 and self._n_read < (self.length or 0):
            raise TransientError(
                f"{host} ended the answer after {self._n_read} of {self.length} bytes"
            )
        return data

    def close(self) -> None:
        self._body.close()

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def open_url(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    first: int | None = None,
    last: int | None = None,
    timeout: float = TIMEOUT_S,
) -> Response:
    """Ask for ``url``, or its bytes ``first`` to ``last`` (included).

    Answers of 200, 206 and 416 are returned. Others raise: TransientError for what may pass (no
    connection, 408, 425, 429, 5xx), StatusError for the rest.
    """
    wanted = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **(headers or {})}
    if first is not None:
        wanted["Range"] = f"bytes={first}-{'' if last is None else last}"
    origin, current = urlsplit(url).netloc, url
    for _ in range(MAX_REDIRECTS + 1):
        response = _open_once(current, method, wanted, timeout)
        if response.status not in _REDIRECTS:
            return _checked(response)
        location = response.headers.get("location")
        response.close()
        if not location:
            raise StatusError(f"{url} redirects to nowhere", status=response.status)
        current = urljoin(current, location)
        if urlsplit(current).netloc != origin:
            wanted.pop("Authorization", None)
    raise StatusError(f"{url} redirects more than {MAX_REDIRECTS} times", status=310)


def _open_once(url: str, method: str, headers: Mapping[str, str], timeout: float) -> Response:
    if urlsplit(url).scheme not in ("http", "https"):
        raise StatusError(f"{url!r} is not an http address", status=0)
    opener = urllib.request.build_opener(_NoRedirect)
    url = quote(url, safe=_URL_CHARACTERS)  # servers redirect to addresses with spaces in them
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    try:
        answer = opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        answer = error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _connection_error(url, error) from error
    lowered = {name.lower(): value for name, value in answer.headers.items()}
    return Response(url, answer.status, lowered, answer)


def _connection_error(url: str, error: Exception) -> DownloadError:
    host = urlsplit(url).hostname
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return StatusError(
            f"the certificate of {host} is not trusted: {cause.verify_message}",
            status=0,
            hint="behind a company proxy, name its certificate in SSL_CERT_FILE",
        )
    if isinstance(cause, (ValueError, http.client.InvalidURL)):
        return StatusError(f"{url!r} is not a usable address: {cause}", status=0)
    return TransientError(
        f"cannot reach {host}: {_reason(cause)}",
        hint="check the connection and the proxy variables, then run the same command again",
    )


def _reason(error: object) -> str:
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "it took too long to answer"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _checked(response: Response) -> Response:
    if response.status in (200, 206, 416):
        return response
    status, host = response.status, urlsplit(response.url).hostname
    retry_after = _retry_after(response.headers.get("retry-after"))
    response.close()
    if status in (408, 425, 429) or status >= 500:
        what = "is asked too often" if status == 429 else "is in trouble"
        raise TransientError(
            f"{host} {what} (HTTP {status})",
            retry_after=retry_after,
            hint="run the same command again later: it goes on where it stopped",
        )
    raise StatusError(
        f"{host} answered HTTP {status} for {response.url}",
        status=status,
        code=response.headers.get("x-error-code"),
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, when.timestamp() - time.time())
