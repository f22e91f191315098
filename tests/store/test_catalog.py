"""Every way of naming a model leads to one place, or to an error that names the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import paths
from edgellm.devices import Devices, Host, imagine
from edgellm.errors import ModelNotFoundError
from edgellm.store.catalog import GOOD_AT, HubRef, entries, parse_hub_ref, resolve
from edgellm.store.names import display_name, quant_of
from edgellm.store.rough import rough_bytes, rough_verdict
from edgellm.units import GiB
from tests.store import layouts


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = layouts.write(tmp_path / "odd name.gguf")
    found = resolve(str(path))
    assert (found.path, found.source, found.name) == (path, "path", "odd name")


def test_a_file_without_the_ending_is_a_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts.write(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    assert resolve("blob").path == Path("blob")


@pytest.mark.parametrize("ref", ["./x", "/no/such/x", "~/x", "x.gguf", "sub/x.GGUF"])
def test_a_path_that_is_not_there_says_so(ref: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        resolve(ref)


def test_the_starter_is_the_packages_file() -> None:
    found = resolve("starter")
    assert found.source == "starter"
    assert found.path is not None
    assert found.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.usefixtures("no_starter")
def test_a_missing_starter_says_how_to_get_it() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("starter")
    assert caught.value.hint == "edgellm pull starter"


def test_a_store_name_is_its_file() -> None:
    path = layouts.write(paths.store_dir() / "mine-Q4_0.gguf")
    assert resolve("MINE-Q4_0").path == path


def test_an_unknown_name_suggests_the_nearest() -> None:
    layouts.write(paths.store_dir() / "mistral-7b-Q4_0.gguf")
    with pytest.raises(ModelNotFoundError, match="did you mean mistral-7b-Q4_0"):
        resolve("mistal-7b-Q4_0")
    with pytest.raises(ModelNotFoundError, match="no model was named"):
        resolve(" ")


@pytest.mark.parametrize("name", ["llama3.1-8b", "Llama-3.1_8B", "Llama-3.1-8B-Q4"])
def test_an_unknown_name_suggests_the_catalogs_too(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean llama-3\.1-8b"):
        resolve(name)


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("hf:ann/tiny-GGUF", HubRef(repo="ann/tiny-GGUF")),
        ("hf:ann/tiny:Q4_K_M", HubRef(repo="ann/tiny", quant="Q4_K_M")),
        ("hf:ann/tiny:a/b-Q8_0.gguf", HubRef(repo="ann/tiny", file="a/b-Q8_0.gguf")),
        ("hf:ann/tiny:Q8_0@v1", HubRef(repo="ann/tiny", quant="Q8_0", revision="v1")),
        ("hf:ann/tiny@refs/pr/3", HubRef(repo="ann/tiny", revision="refs/pr/3")),
        ("hf.co/ann/tiny:Q8_0", HubRef(repo="ann/tiny", quant="Q8_0")),
        ("https://huggingface.co/ann/tiny", HubRef(repo="ann/tiny")),
        (
            "https://huggingface.co/ann/tiny/blob/main/x%20y.gguf",
            HubRef(repo="ann/tiny", file="x y.gguf"),
        ),
        (
            "https://hf.co/ann/tiny/resolve/abc/x.gguf?download=true",
            HubRef(repo="ann/tiny", file="x.gguf", revision="abc"),
        ),
    ],
)
def test_hub_references_in_all_their_spellings(ref: str, expected: HubRef) -> None:
    assert parse_hub_ref(ref) == expected
    assert resolve(ref).hub == expected


@pytest.mark.parametrize("ref", ["hf:", "hf:tiny", "hf:a/b/c", "hf:a b/c"])
def test_a_malformed_hub_reference_shows_the_forms(ref: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(ref)
    assert "hf:owner/repo" in (caught.value.hint or "")


def test_a_hub_reference_to_a_file_that_is_here_is_that_file(home: Path) -> None:
    link = layouts.hf(home / ".cache/huggingface/hub", "ann/tiny-GGUF", "tiny-Q8_0.gguf")
    assert resolve("hf:ann/tiny-GGUF:Q8_0").path == link
    assert resolve("hf:ann/tiny-GGUF:tiny-Q8_0.gguf").path == link
    assert resolve("hf:ann/tiny-GGUF:Q4_0").path is None
    assert resolve("hf:ann/tiny-GGUF:Q8_0@v2").path is None


def test_a_repository_of_which_one_model_is_here_is_that_model(home: Path) -> None:
    cache = home / ".cache/huggingface/hub"
    link = layouts.hf(cache, "ann/tiny-GGUF", "tiny-Q8_0.gguf")
    assert resolve("hf:ann/tiny-GGUF").path == link
    layouts.hf(cache, "ann/tiny-GGUF", "tiny-Q4_0.gguf")
    assert resolve("hf:ann/tiny-GGUF").path is None


def test_another_address_is_a_url() -> None:
    found = resolve("https://example.org/models/x-Q4_0.gguf?sig=1")
    assert (found.url, found.name, found.source) == (
        "https://example.org/models/x-Q4_0.gguf?sig=1",
        "x-Q4_0",
        "url",
    )


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("a-Q4_K_M.gguf", "Q4_K_M"),
        ("x.IQ2_XXS.gguf", "IQ2_XXS"),
        ("UD-Q4_K_XL/m-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("m-bf16.gguf", "BF16"),
        ("phi.fp16.gguf", "F16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-Q3_K_L.gguf", "Q3_K_L"),
        ("Qwen3-8B.gguf", ""),
    ],
)
def test_the_quantisation_in_a_files_name(file: str, quant: str) -> None:
    assert quant_of(file) == quant


def test_names_leave_out_folder_ending_and_shard() -> None:
    assert display_name("/x/big-Q4_0-00001-of-00003.gguf") == "big-Q4_0"
    assert display_name("a.b.GGUF") == "a.b"


# --- the catalog that comes with edgellm


def test_the_catalogs_entries_are_sound() -> None:
    found = entries()
    assert 40 <= len(found) <= 60
    names = [entry.name for entry in found]
    assert len(set(names)) == len(names)
    for entry in found:
        assert entry.name == entry.name.lower()
        assert parse_hub_ref(f"hf:{entry.repo}") == HubRef(repo=entry.repo)
        assert entry.file.endswith(".gguf")
        assert quant_of(entry.file)
        assert set(entry.good_at) <= set(GOOD_AT)
        assert ("vision" in entry.good_at) <= (entry.projector is not None), entry.name
        assert entry.sha256 is None or len(entry.sha256) == 64


def test_the_catalog_has_something_for_every_use() -> None:
    for use in GOOD_AT:
        assert any(use in entry.good_at for entry in entries()), use


def test_a_catalog_name_leads_to_its_repository(home: Path) -> None:
    entry = entries()[0]
    found = resolve(entry.name)
    assert (found.source, found.hub) == ("catalog", HubRef(repo=entry.repo))
    assert resolve(f"{entry.name}:q8_0").hub == HubRef(repo=entry.repo, quant="Q8_0")
    link = layouts.hf(home / ".cache/huggingface/hub", entry.repo, "x-Q8_0.gguf")
    assert resolve(f"{entry.name}:Q8_0").path == link


def test_sizes_and_verdicts_without_a_header() -> None:
    host = Host(cpu="A CPU", n_physical=8, n_logical=16, total=32 * GiB, available=24 * GiB)
    devices = imagine(Devices(host=host), vram=[8 * GiB], backend="cuda")
    assert 4.0 < rough_bytes("8B", "Q4_K_M") / GiB < 5.0
    assert rough_bytes("30B, 3B active", "Q4_K_M") > 15 * GiB
    assert rough_bytes("big", "Q4_K_M") == 0
    verdicts = [rough_verdict(n * GiB, devices) for n in (2, 12, 40)]
    assert verdicts == ["gpu", "partial", "does_not_fit"]
    assert rough_verdict(0, devices) == ""
