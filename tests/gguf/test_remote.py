"""A header over HTTP: few requests, few bytes, never the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.errors import DownloadError, GGUFError
from edgellm.gguf.file import GGUFArray
from edgellm.gguf.reader import parse_header, read_gguf
from edgellm.gguf.remote import MAX_REQUESTS, read_gguf_url
from edgellm.units import MiB
from edgellm.web import StatusError, TransientError
from tests.gguf.build import STR, U16, array, gguf, pair, small_model, tensor
from tests.hub_server import HubServer, Trouble, hub_server

REPO = "ann/tiny-GGUF"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


def url(hub: HubServer, file: str = "m.gguf") -> str:
    return f"{hub.url}/{REPO}/resolve/main/{file}"


def tokenizer(n_tokens: int, letters: int, data: int) -> bytes:
    """A model whose header is nearly all tokens and merges."""
    pairs = [
        pair("general.architecture", STR, "llama"),
        array("tokenizer.ggml.tokens", STR, ["t" * letters] * n_tokens),
        array("tokenizer.ggml.merges", STR, ["m" * (2 * letters + 1)] * (2 * n_tokens)),
        pair("tokenizer.chat_template", STR, "{{ x }}"),
    ]
    return gguf(pairs, [tensor("a", (data,), 24, 0)], data=data)


def test_a_small_header_takes_one_request_and_the_redirect_is_followed(hub: HubServer) -> None:
    hub.files[REPO] = {"m.gguf": small_model()}
    file = read_gguf_url(url(hub))
    assert (file.arch, file.kind, len(file.tensors)) == ("llama", "model", 2)
    assert len(hub.data_requests()) == 1


@pytest.mark.parametrize("letters", [2, 6, 12])
@pytest.mark.parametrize("n_tokens", [30_000, 60_000])
def test_a_large_header_takes_at_most_four_requests_and_little_more_than_its_bytes(
    hub: HubServer, n_tokens: int, letters: int
) -> None:
    data = tokenizer(n_tokens, letters, 24 * MiB)
    hub.files[REPO] = {"m.gguf": data}
    file = read_gguf_url(url(hub))
    assert file.tensors == parse_header(data).tensors
    assert file.file_bytes == len(data)
    assert len(hub.data_requests()) <= MAX_REQUESTS
    assert hub.n_sent < file.data_offset * 1.5 + 2 * MiB
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GGUFArray)
    assert len(tokens) == n_tokens
    with pytest.raises(GGUFError, match="stayed on the server"):
        tokens.decode()


def test_redirects_are_followed_once_not_for_every_piece(hub: HubServer) -> None:
    hub.files[REPO] = {"m.gguf": tokenizer(60_000, 6, 4 * MiB)}
    read_gguf_url(url(hub))
    assert len([a for a in hub.asked if "/resolve/" in a.path]) == 1


def test_a_token_does_not_follow_a_redirect_to_another_host(hub: HubServer) -> None:
    hub.trouble = Trouble(token="secret")
    hub.files[REPO] = {"m.gguf": tokenizer(60_000, 6, 4 * MiB)}
    read_gguf_url(url(hub), headers={"Authorization": "Bearer secret"})
    assert hub.asked[0].authorization == "Bearer secret"
    assert {a.authorization for a in hub.data_requests()} == {None}


def test_a_server_without_ranges_is_said_so_and_the_model_not_fetched(hub: HubServer) -> None:
    hub.trouble = Trouble(no_ranges=True)
    hub.files[REPO] = {"m.gguf": tokenizer(100, 6, 64 * MiB)}
    with pytest.raises(DownloadError, match="does not serve byte ranges") as caught:
        read_gguf_url(url(hub))
    assert caught.value.hint == f"edgellm pull {url(hub)}"
    # The kernel's socket buffers take some; nobody reads it.
    assert hub.n_sent < 16 * MiB


def test_a_web_page_is_called_a_web_page(hub: HubServer) -> None:
    hub.trouble = Trouble(html=1)
    hub.files[REPO] = {"m.gguf": small_model()}
    with pytest.raises(DownloadError, match="is a web page"):
        read_gguf_url(url(hub))


def test_a_file_that_changes_in_between_is_noticed(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tokenizer(60_000, 6, MiB)
    hub.files[REPO] = {"m.gguf": data}
    plan = type(hub).data_requests

    def changing(self: HubServer) -> str:
        return f"tag{len(plan(self))}"

    class Tags(dict[str, str]):
        def get(self, *_: object) -> str:  # type: ignore[override]
            return changing(hub)

    hub.etags = Tags()
    with pytest.raises(DownloadError, match="changed while it was read"):
        read_gguf_url(url(hub))


def test_a_part_that_starts_elsewhere_is_refused(hub: HubServer) -> None:
    hub.files[REPO] = {"m.gguf": tokenizer(60_000, 6, MiB)}
    hub.trouble = Trouble(wrong_start=2)
    with pytest.raises(DownloadError, match="asked for byte"):
        read_gguf_url(url(hub))


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        (Trouble(statuses=[429]), TransientError, "asked too often"),
        (Trouble(statuses=[503]), TransientError, "in trouble"),
        (Trouble(statuses=[404]), StatusError, "HTTP 404"),
        (Trouble(cut_after=[100]), TransientError, "ended the answer after 100 of"),
    ],
)
def test_what_the_server_does_wrong_has_its_own_error(
    hub: HubServer, trouble: Trouble, error: type[Exception], message: str
) -> None:
    hub.files[REPO] = {"m.gguf": small_model()}
    hub.trouble = trouble
    with pytest.raises(error, match=message):
        read_gguf_url(url(hub))


def test_an_unreachable_server_says_so() -> None:
    with pytest.raises(TransientError, match=r"cannot reach 127\.0\.0\.1"):
        read_gguf_url("http://127.0.0.1:9/m.gguf")


@pytest.mark.parametrize("address", ["ftp://x/m.gguf", "file:///etc/passwd", "http://[::1"])
def test_only_http_is_spoken(address: str) -> None:
    with pytest.raises((DownloadError, ValueError)):
        read_gguf_url(address)


def test_an_empty_file_is_an_error(hub: HubServer) -> None:
    hub.files[REPO] = {"m.gguf": b""}
    with pytest.raises(DownloadError, match="empty"):
        read_gguf_url(url(hub))


def test_a_split_model_is_read_from_any_of_its_addresses(hub: HubServer, tmp_path: Path) -> None:
    files = {}
    for index in range(3):
        pairs = [pair("split.no", U16, index), pair("split.count", U16, 3)]
        name = f"q 4/big-{index + 1:05d}-of-00003.gguf"
        files[name] = gguf(pairs, [tensor(f"t{index}", (32,), 0, 0)], data=128)
        (tmp_path / name.split("/")[1]).write_bytes(files[name])
    hub.files[REPO] = files
    remote = read_gguf_url(url(hub, "q%204/big-00002-of-00003.gguf"))
    local = read_gguf(tmp_path / "big-00001-of-00003.gguf")
    assert (remote.tensors, remote.file_bytes) == (local.tensors, local.file_bytes)
    assert remote.shards[2].path.endswith("/q%204/big-00003-of-00003.gguf")


def test_a_header_known_by_its_digest_takes_no_request(hub: HubServer) -> None:
    hub.files[REPO] = {"m.gguf": small_model()}
    first = read_gguf_url(url(hub), digest="ab" * 32)
    hub.asked.clear()
    assert read_gguf_url(url(hub), digest="ab" * 32) == first
    assert hub.asked == []
