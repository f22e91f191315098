"""Pulling against a hub that misbehaves: after each scenario the store is right or resumable."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from edgellm.config import StoreSettings
from edgellm.errors import (
    ChecksumError,
    DiskFullError,
    DownloadError,
    EdgeLLMError,
    GGUFError,
    ModelNotFoundError,
    StoreError,
)
from edgellm.gguf.reader import check_file, read_gguf
from edgellm.store import hub as store_hub
from edgellm.store import pull as store_pull
from edgellm.store import records, transfer
from edgellm.store.catalog import HubRef, resolve
from edgellm.store.importing import import_model
from edgellm.store.local import list_models
from edgellm.store.records import Record
from edgellm.store.transfer import Listener
from edgellm.units import KiB
from tests.gguf.build import U16, gguf, pair, tensor
from tests.hub_server import COMMIT, HubServer, Trouble, etag_of
from tests.store.pulling import (
    REPO,
    SIZE,
    Notes,
    assert_resumable,
    assert_right,
    cache,
    files_below,
    model,
    pull,
)


def test_a_pull_leaves_the_layout_that_the_hubs_library_makes(home: Path, hub: HubServer) -> None:
    data = hub.files[REPO]["tiny-Q4_K_M.gguf"]
    notes = Notes()
    record = pull(listener=notes)
    assert_right(home, hub)
    assert files_below(cache(home)) == {
        f"blobs/{etag_of(data)}",
        f"snapshots/{COMMIT}/tiny-Q4_K_M.gguf",
        "refs/main",
    }
    assert (cache(home) / "refs/main").read_text() == COMMIT
    assert record.complete
    assert notes.seen[-1] == (len(data), len(data))
    assert notes.notes == []


def test_the_hubs_library_finds_what_was_pulled(home: Path, hub: HubServer) -> None:
    from huggingface_hub import try_to_load_from_cache

    pull()
    found = try_to_load_from_cache(
        REPO, "tiny-Q4_K_M.gguf", cache_dir=home / ".cache/huggingface/hub"
    )
    assert found == str(cache(home) / "snapshots" / COMMIT / "tiny-Q4_K_M.gguf")


def test_a_second_pull_fetches_nothing(home: Path, hub: HubServer) -> None:
    pull()
    n_sent = hub.n_sent
    pull()
    assert hub.n_sent == n_sent


def test_the_pulled_model_answers_to_its_names(hub: HubServer) -> None:
    pull()
    path = resolve("tiny-Q4_K_M").path
    assert path is not None
    assert resolve(f"hf:{REPO}:Q4_K_M").path == path
    assert resolve(f"hf:{REPO}:tiny-Q4_K_M.gguf").path == path


def test_a_projector_comes_along_when_wanted(home: Path, hub: HubServer) -> None:
    pull(projector=True)
    (found,) = [m for m in list_models() if m.name == "tiny-Q4_K_M"]
    assert found.mmproj == cache(home) / "snapshots" / COMMIT / "mmproj-tiny-F16.gguf"


def test_shards_become_visible_together(home: Path, hub: HubServer) -> None:
    shards = {}
    for index in range(3):
        split = [pair("split.no", U16, index), pair("split.count", U16, 3)]
        name = f"Q8_0/big-Q8_0-{index + 1:05d}-of-00003.gguf"
        data = gguf(split, [tensor(f"t{index}", (SIZE,), 24, 0)])
        shards[name] = data + random.Random(index).randbytes(SIZE)
    hub.files[REPO] = shards
    hub.trouble = Trouble(statuses=[200] * 0, cut_after=[SIZE * 2, SIZE * 2, 10] + [0] * 20)
    with pytest.raises(DownloadError):
        pull(f"hf:{REPO}:Q8_0")
    assert not list(cache(home).glob("snapshots/*/*/*"))
    hub.trouble = Trouble()
    pull(f"hf:{REPO}:Q8_0")
    (found,) = [m for m in list_models() if m.name == "big-Q8_0"]
    assert len(read_gguf(found.path).tensors) == 3


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (Trouble(statuses=[500, 502, 503]), "in trouble (HTTP 500)"),
        (Trouble(statuses=[429], retry_after="0"), "asked too often"),
        (Trouble(statuses=[429], retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), "again in 0 s"),
        (Trouble(cut_after=[100, 70_000, 0, 33_333]), "ended"),
        (Trouble(cut_after=[0]), "ended"),
        (Trouble(no_ranges=True, cut_after=[50_000]), "does not resume"),
        (Trouble(corrupt=1), "the bytes are wrong"),
        (Trouble(wrong_start=1, cut_after=[50_000]), "the server sent byte"),
        (Trouble(chunk=999, chunk_delay_s=0.0002), ""),
    ],
    ids=[
        *("5xx", "429", "429-date", "cut", "cut-at-once", "no-ranges", "corrupt-once"),
        *("wrong-part", "slow"),
    ],
)
def test_passing_trouble_is_overcome_and_told(
    home: Path, hub: HubServer, trouble: Trouble, said: str
) -> None:
    hub.trouble = trouble
    notes = Notes()
    pull(listener=notes)
    assert_right(home, hub)
    assert said in " ".join(notes.notes)


def test_a_resumed_download_asks_only_for_what_is_missing(home: Path, hub: HubServer) -> None:
    hub.trouble = Trouble(cut_after=[100_000])
    pull()
    ranges = [asked.range for asked in hub.data_requests()]
    assert ranges == [None, "bytes=100000-"]
    assert hub.n_sent == len(hub.files[REPO]["tiny-Q4_K_M.gguf"])


def test_a_mirror_with_another_entity_tag_for_the_same_bytes_resumes(
    home: Path, hub: HubServer
) -> None:
    hub.trouble = Trouble(cut_after=[100_000] + [0] * 20)
    with pytest.raises(DownloadError):
        pull()
    hub.trouble = Trouble()
    hub.etags[f"{REPO}/tiny-Q4_K_M.gguf"] = "of-another-mirror"
    hub.asked.clear()
    pull()
    assert_right(home, hub)
    assert [asked.range for asked in hub.data_requests()] == ["bytes=100000-"]


def test_a_promise_that_no_bytes_can_keep_is_a_checksum_error(home: Path, hub: HubServer) -> None:
    """The hub's API names a digest, the file has another, of the same length."""
    data = hub.files[REPO]["tiny-Q4_K_M.gguf"]
    hub.claimed[f"{REPO}/tiny-Q4_K_M.gguf"] = data[:-1] + b"?"
    with pytest.raises(ChecksumError):
        pull()
    assert not list(cache(home).glob("snapshots/*/*"))


def test_a_very_large_file_comes_in_pieces(
    home: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE", 100_000)
    pull()
    assert_right(home, hub)
    assert [asked.range for asked in hub.data_requests()] == [
        *("bytes=0-99999", "bytes=100000-199999", "bytes=200000-299999", "bytes=300000-"),
    ]


@pytest.mark.parametrize(
    ("trouble", "message", "hint"),
    [
        (Trouble(statuses=[503] * 50), "gave up after 6 attempts", "goes on where it stopped"),
        (Trouble(cut_after=[90_000] + [0] * 50), "gave up", "goes on where it stopped"),
        (Trouble(html=9), "a web page came", "proxy"),
        (Trouble(statuses=[404]), "HTTP 404", None),
    ],
    ids=["5xx-for-long", "cut-for-long", "html", "404"],
)
def test_lasting_trouble_ends_with_advice_and_a_partial(
    home: Path, hub: HubServer, trouble: Trouble, message: str, hint: str | None
) -> None:
    hub.trouble = trouble
    with pytest.raises(DownloadError, match=message) as caught:
        pull()
    assert (hint or "") in (caught.value.hint or "")
    assert_resumable(home, hub)
    hub.trouble = Trouble()
    pull()
    assert_right(home, hub)


def test_html_after_a_partial_does_not_touch_it(home: Path, hub: HubServer) -> None:
    hub.trouble = Trouble(cut_after=[90_000], statuses=[])
    hub.trouble.cut_after += [0] * 20
    with pytest.raises(DownloadError):
        pull()
    hub.trouble = Trouble(html=1)
    with pytest.raises(DownloadError, match="web page"):
        pull()
    assert next(home.rglob("*.incomplete")).stat().st_size == 90_000


def test_wrong_bytes_twice_are_a_checksum_error_and_not_kept(home: Path, hub: HubServer) -> None:
    hub.trouble = Trouble(corrupt=50)
    with pytest.raises(ChecksumError, match="twice"):
        pull()
    assert_resumable(home, hub)
    assert not list(home.rglob("*.incomplete"))
    hub.trouble = Trouble()
    pull()
    assert_right(home, hub)


def test_a_partial_with_wrong_bytes_is_found_out_and_replaced(home: Path, hub: HubServer) -> None:
    """As after a power cut, or left by a program that wrote something else there."""
    digest = etag_of(hub.files[REPO]["tiny-Q4_K_M.gguf"])
    part = cache(home) / "blobs" / f"{digest}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    notes = Notes()
    pull(listener=notes)
    assert_right(home, hub)
    assert "the bytes are wrong" in notes.notes[0]


def test_a_partial_longer_than_the_file_starts_again(home: Path, hub: HubServer) -> None:
    data = hub.files[REPO]["tiny-Q4_K_M.gguf"]
    part = cache(home) / "blobs" / f"{etag_of(data)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(data + b"more")
    pull()
    assert_right(home, hub)


def test_a_whole_partial_needs_no_request_for_data(home: Path, hub: HubServer) -> None:
    data = hub.files[REPO]["tiny-Q4_K_M.gguf"]
    part = cache(home) / "blobs" / f"{etag_of(data)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    pull()
    assert_right(home, hub)
    assert hub.data_requests() == []


def test_a_server_with_another_length_than_promised_is_refused(home: Path, hub: HubServer) -> None:
    hub.trouble = Trouble(wrong_length=1)
    with pytest.raises(DownloadError, match=r"has \d+ bytes where \d+ were promised"):
        pull()
    assert_resumable(home, hub)


def test_a_file_that_is_no_gguf_never_becomes_visible(home: Path, hub: HubServer) -> None:
    hub.files[REPO]["tiny-Q4_K_M.gguf"] = b"GGUF but not really" * 1000
    with pytest.raises(GGUFError, match="not a sound GGUF"):
        pull()
    assert not list(cache(home).glob("snapshots/*/*"))
    assert not list(home.rglob("*.incomplete"))


def test_a_truncated_model_on_the_hub_never_becomes_visible(home: Path, hub: HubServer) -> None:
    hub.files[REPO]["tiny-Q4_K_M.gguf"] = model("q4")[:-5]
    with pytest.raises(GGUFError, match="incomplete"):
        pull()
    assert not list(cache(home).glob("snapshots/*/*"))


def test_a_damaged_blob_is_fetched_again_by_the_next_pull(home: Path, hub: HubServer) -> None:
    pull()
    blob = next((cache(home) / "blobs").iterdir())
    blob.write_bytes(blob.read_bytes()[:-1] + b"\0")
    notes = Notes()
    pull(listener=notes)
    assert_right(home, hub)
    assert "damaged" in notes.notes[0]


def test_what_another_program_downloaded_is_used_and_not_called_ours(
    home: Path, hub: HubServer
) -> None:
    data = hub.files[REPO]["tiny-Q4_K_M.gguf"]
    blob = cache(home) / "blobs" / etag_of(data)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(data)
    record = pull()
    assert hub.data_requests() == []
    assert not record.files[0].ours
    (found,) = [m for m in list_models() if m.name == "tiny-Q4_K_M"]
    assert found.owner == "huggingface"


def test_no_room_on_the_disk_is_said_before_anything_is_fetched(
    home: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "DISK_RESERVE", 1 << 60)
    with pytest.raises(DiskFullError) as caught:
        pull()
    assert caught.value.required > caught.value.available
    assert hub.data_requests() == []
    assert records.load_all() == []


def test_two_pulls_at_once_do_the_work_once(home: Path, hub: HubServer) -> None:
    someone_waits = threading.Event()

    class Slow(Notes):
        """Goes on when the other one has said that it waits."""

        def note(self, message: str) -> None:
            super().note(message)
            someone_waits.set()

        def progress(self, name: str, done: int, total: int | None) -> None:
            super().progress(name, done, total)
            assert someone_waits.wait(60)

    notes = [Slow(), Slow()]
    failed: list[EdgeLLMError] = []

    def run(listener: Notes) -> None:
        try:
            pull(listener=listener)
        except EdgeLLMError as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in notes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert_right(home, hub)
    assert hub.n_sent == len(hub.files[REPO]["tiny-Q4_K_M.gguf"])
    assert any("another edgellm is pulling it" in note for n in notes for note in n.notes)


def test_a_gated_repository_says_where_to_accept_its_terms(home: Path, hub: HubServer) -> None:
    hub.trouble = Trouble(gated=True)
    with pytest.raises(StoreError, match="is gated") as caught:
        pull()
    assert f"{hub.url}/{REPO}" in (caught.value.hint or "")
    assert "HF_TOKEN" in (caught.value.hint or "")


def test_a_private_repository_needs_a_token_and_gets_it(
    home: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.trouble = Trouble(token="secret")
    with pytest.raises(ModelNotFoundError, match="private") as caught:
        pull()
    assert "hf auth login" in (caught.value.hint or "")
    monkeypatch.setenv("HF_TOKEN", "secret")
    pull()
    assert_right(home, hub)
    assert {asked.authorization for asked in hub.data_requests()} == {None}


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("hf:ann/nothing:Q8_0", "no ann/nothing"),
        (f"hf:{REPO}:Q2_K", "has no Q2_K"),
        (f"hf:{REPO}:other.gguf", "has no other.gguf"),
        (f"hf:{REPO}:Q8_0@v9", "no revision 'v9'"),
        ("hf:ann/empty:Q8_0", "holds no GGUF"),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub: HubServer, ref: str, message: str) -> None:
    hub.files["ann/empty"] = {"README.md": b"x"}
    with pytest.raises(ModelNotFoundError, match=message):
        pull(ref)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_says_so(hub: HubServer, status: int) -> None:
    hub.trouble = Trouble(api_status=status)
    with pytest.raises(DownloadError, match=f"HTTP {status}"):
        store_hub.listing(HubRef(repo=REPO))


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(hub: HubServer) -> None:
    hub.trouble = Trouble(api_status=503)
    n_asked = []

    class Clock:
        @staticmethod
        def sleep(_: float) -> None:
            n_asked.append(len(hub.asked))
            hub.trouble = Trouble()

    hub.asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_hub, "time", Clock)
        assert store_hub.listing(HubRef(repo=REPO)).repo == REPO
    assert n_asked == [1]


def test_an_unreachable_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"cannot reach http://127\.0\.0\.1:9"):
        store_hub.listing(HubRef(repo=REPO))


def test_a_hub_whose_name_leads_nowhere_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(store_hub, "_asked_once", None)  # whoever asks fails
    with pytest.raises(DownloadError, match=r"cannot reach https://hub\.invalid"):
        store_hub.listing(HubRef(repo=REPO))


def test_behind_a_proxy_the_proxy_looks_the_name_up(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no names here")

    with monkeypatch.context() as patch:
        patch.setattr(store_hub, "getproxies", lambda: {"https": "http://proxy:3128"})
        patch.setattr(store_hub.socket, "getaddrinfo", refuse)
        store_hub._look_up(None)
    with monkeypatch.context() as patch:
        patch.setattr(store_hub, "getproxies", dict)
        patch.setattr(store_hub.socket, "getaddrinfo", refuse)
        with pytest.raises(DownloadError, match="no names here"):
            store_hub._look_up(None)


def test_offline_asks_nobody(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match="offline"):
        store_hub.listing(HubRef(repo=REPO), StoreSettings(offline=True))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="offline"):
        store_hub.listing(HubRef(repo=REPO))
    assert hub.asked == []


def test_a_listing_has_choices_by_size_with_projectors_apart(hub: HubServer) -> None:
    listing = store_hub.listing(HubRef(repo=REPO))
    assert [(c.quant, c.n_bytes) for c in listing.choices] == [
        ("Q8_0", len(hub.files[REPO]["tiny-Q8_0.gguf"])),
        ("Q4_K_M", len(hub.files[REPO]["tiny-Q4_K_M.gguf"])),
    ]
    assert [p.name for p in listing.projectors] == ["mmproj-tiny-F16.gguf"]
    assert listing.license == "mit"


def test_names_that_lead_out_of_the_cache_are_not_followed(home: Path, hub: HubServer) -> None:
    hub.files[REPO] = {
        "../../../escape-Q4_K_M.gguf": model("q4"),
        "a/../../b-Q4_K_M.gguf": model("q4"),
        "/tmp/c-Q4_K_M.gguf": model("q4"),
        "fine-Q8_0.gguf": model("q8"),
    }
    assert [c.name for c in store_hub.listing(HubRef(repo=REPO)).choices] == ["fine-Q8_0"]


@pytest.mark.parametrize("address", ["http://x/..%2F..%2Fescape.gguf", "http://x/a%5C..%5Cb.gguf"])
def test_addresses_that_lead_out_of_the_store_are_not_followed(address: str) -> None:
    try:
        order = store_pull.url_order(address)
    except StoreError:
        return
    store = records.store_folder()
    assert [target.path.parent for target in order.targets] == [store]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".."])
def test_a_models_name_is_one_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot be the name"):
        store_pull.url_order("http://x/y.gguf", name=name)
    with pytest.raises(StoreError, match="cannot be the name"):
        import_model(tmp_path / "x.gguf", check=check_file, name=name)


def test_a_cache_that_cannot_be_written_is_said(
    home: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = home / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("HF_HUB_CACHE", str(blocked))
    with pytest.raises(StoreError, match="blocked") as caught:
        pull()
    assert "HF_HOME" in (caught.value.hint or "")


# --- plain addresses: no digest is promised, so the entity tag guards the resuming


def url(hub: HubServer, name: str = "tiny-Q4_K_M.gguf") -> str:
    return f"{hub.url}/cdn/{REPO}/{name}"


def pull_url(address: str, listener: Listener | None = None, name: str | None = None) -> Record:
    order = store_pull.url_order(address, name=name)
    return store_pull.pull(order, check=check_file, listener=listener)


def test_a_url_goes_to_the_store(hub: HubServer, edgellm_home: Path) -> None:
    pull_url(url(hub))
    store = edgellm_home / "models"
    assert (store / "tiny-Q4_K_M.gguf").read_bytes() == hub.files[REPO]["tiny-Q4_K_M.gguf"]
    assert {p for p in files_below(store) if "records" not in p} == {"tiny-Q4_K_M.gguf"}
    assert resolve("tiny-Q4_K_M").source == "edgellm"


def test_a_file_that_changed_on_the_server_is_not_glued_together(
    hub: HubServer, edgellm_home: Path
) -> None:
    hub.trouble = Trouble(cut_after=[90_000] + [0] * 20)
    with pytest.raises(DownloadError):
        pull_url(url(hub))
    hub.files[REPO]["tiny-Q4_K_M.gguf"] = model("newer")
    hub.trouble = Trouble()
    notes = Notes()
    pull_url(url(hub), listener=notes)
    assert (edgellm_home / "models/tiny-Q4_K_M.gguf").read_bytes() == model("newer")
    assert "changed on the server" in notes.notes[0]


def test_a_server_that_ignores_if_range_is_found_out(hub: HubServer, edgellm_home: Path) -> None:
    hub.trouble = Trouble(cut_after=[90_000] + [0] * 20)
    with pytest.raises(DownloadError):
        pull_url(url(hub))
    hub.files[REPO]["tiny-Q4_K_M.gguf"] = model("newer")
    hub.trouble = Trouble(ignore_if_range=True)
    pull_url(url(hub))
    assert (edgellm_home / "models/tiny-Q4_K_M.gguf").read_bytes() == model("newer")


def test_a_server_whose_file_became_shorter_answers_416_and_we_start_again(
    hub: HubServer, edgellm_home: Path
) -> None:
    hub.trouble = Trouble(cut_after=[200_000] + [0] * 20)
    with pytest.raises(DownloadError):
        pull_url(url(hub))
    hub.files[REPO]["tiny-Q4_K_M.gguf"] = model("short", 50 * KiB)
    hub.etags[f"{REPO}/tiny-Q4_K_M.gguf"] = etag_of(model("q4"))
    hub.trouble = Trouble()
    notes = Notes()
    pull_url(url(hub), listener=notes)
    assert "200000 are here" in notes.notes[0]
    short = model("short", 50 * KiB)
    assert (edgellm_home / "models/tiny-Q4_K_M.gguf").read_bytes() == short


def test_a_url_of_a_web_page_is_not_saved_as_a_model(hub: HubServer, edgellm_home: Path) -> None:
    hub.trouble = Trouble(html=9)
    with pytest.raises(DownloadError, match="a web page came"):
        pull_url(url(hub))
    assert not (edgellm_home / "models/tiny-Q4_K_M.gguf").exists()
    with pytest.raises(StoreError, match=r"does not name a \.gguf"):
        pull_url(f"{hub.url}/login")


def test_another_models_file_is_not_overwritten(hub: HubServer, edgellm_home: Path) -> None:
    mine = edgellm_home / "models/tiny-Q4_K_M.gguf"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(StoreError, match="did not come from"):
        pull_url(url(hub))
    assert mine.read_bytes() == b"mine"
    pull_url(url(hub), name="other")
    assert (edgellm_home / "models/other.gguf").exists()


def test_shards_of_a_url_come_together(hub: HubServer, edgellm_home: Path) -> None:
    for index in range(2):
        split = [pair("split.no", U16, index), pair("split.count", U16, 2)]
        data = gguf(split, [tensor(f"t{index}", (64,), 24, 0)], data=64)
        hub.files[REPO][f"big-{index + 1:05d}-of-00002.gguf"] = data
    pull_url(url(hub, "big-00002-of-00002.gguf"), name="mine")
    assert len(read_gguf(edgellm_home / "models/mine-00001-of-00002.gguf").tensors) == 2
