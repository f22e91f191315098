"""Which quantisation of a repository is worth downloading for a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from edgellm import library
from edgellm.cli.quantize import requantized
from edgellm.config import Settings
from edgellm.devices import Devices, Host, imagine
from edgellm.engine.quantize import TensorDone
from edgellm.errors import DoesNotFitError, DownloadError
from edgellm.gguf.file import GGUFFile
from edgellm.gguf.reader import parse_header
from edgellm.store.catalog import HubRef, entries, shipped_header
from edgellm.store.files import Choice, Listing, Remote
from edgellm.units import GiB
from tests.hub_server import Hollow, HubServer, hub_server

HEADERS = Path(__file__).parent / "data" / "planner" / "headers"
TYPES = {"Q8_0": "q8_0", "Q6_K": "q6_K", "Q4_K_M": "q4_K", "IQ4_NL": "iq4_nl", "Q2_K": "q2_K"}


def header(name: str) -> tuple[bytes, int]:
    data = (HEADERS / f"{name}.gguf-header").read_bytes()
    return data, json.loads((HEADERS / "file_bytes.json").read_text())[name]


def quantized(quant: str) -> GGUFFile:
    """Llama-3.1-8B with every matrix of one type."""
    data, _ = header("llama-3.1-8b")
    file = parse_header(data)
    matrices = [t for t in file.tensors if len(t.dims) > 1]
    return requantized(
        file,
        [
            TensorDone(index=i, count=1, name=t.name, from_type="", to_type=TYPES[quant])
            for i, t in enumerate(matrices)
        ],
    )


@pytest.fixture
def repo(monkeypatch: pytest.MonkeyPatch) -> Listing:
    headers = {quant: quantized(quant) for quant in TYPES}
    choices = [
        Choice(
            name=f"m-{quant}",
            quant=quant,
            files=(Remote(url=quant, name=f"m-{quant}.gguf", size=file.file_bytes),),
        )
        for quant, file in headers.items()
    ]
    whole = Remote(url="F16", name="m-F16.gguf", size=16 * GiB)
    choices.append(Choice(name="m-F16", quant="F16", files=(whole,)))
    monkeypatch.setattr(library, "choice_header", lambda choice: headers[choice.quant])
    return Listing(
        repo="ann/m",
        commit="c",
        revision="main",
        choices=tuple(sorted(choices, key=lambda c: -c.n_bytes)),
    )


def machine(*vram: int, ram: int = 32 * GiB) -> Devices:
    host = Host(cpu="A CPU", n_physical=8, n_logical=16, total=ram, available=ram)
    return imagine(Devices(host=host), vram=vram, backend="cuda" if vram else None)


@pytest.mark.parametrize(
    ("vram", "quant"),
    [(24, "Q8_0"), (9, "Q8_0"), (8, "Q6_K"), (7, "Q6_K"), (5, "Q4_K_M"), (4, "Q2_K")],
)
def test_a_gpu_gets_the_largest_that_runs_on_it_whole(repo: Listing, vram: int, quant: str) -> None:
    choice, advice = library.advise(repo, machine(vram * GiB))
    assert choice.quant == quant
    assert advice.plan.verdict == "gpu"
    assert quant in advice.why
    assert "GPU" in advice.why


def test_q4_k_m_is_preferred_to_what_is_hardly_larger(repo: Listing) -> None:
    near = next(c for c in repo.choices if c.quant == "Q4_K_M")
    larger = msgspec.structs.replace(
        next(c for c in repo.choices if c.quant == "IQ4_NL"),
        files=(Remote(url="IQ4_NL", name="m-IQ4_NL.gguf", size=near.n_bytes + 1000),),
    )
    rest = [c for c in repo.choices if c.quant == "Q2_K"]
    repo = msgspec.structs.replace(repo, choices=(larger, near, *rest))
    assert library.advise(repo, machine(8 * GiB))[0].quant == "Q4_K_M"


def test_without_a_gpu_q4_k_m_is_taken_where_it_fits(repo: Listing) -> None:
    choice, advice = library.advise(repo, machine())
    assert (choice.quant, advice.plan.verdict) == ("Q4_K_M", "cpu")


def test_without_room_for_q4_k_m_the_largest_that_fits_is_taken(repo: Listing) -> None:
    assert library.advise(repo, machine(ram=4 * GiB))[0].quant == "Q2_K"


def test_when_nothing_fits_the_numbers_are_given(repo: Listing) -> None:
    with pytest.raises(DoesNotFitError, match="the smallest has") as caught:
        library.advise(repo, machine(ram=1 * GiB))
    assert caught.value.required > caught.value.available
    assert "--force" in (caught.value.hint or "")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server() as hub:
        hub.files["ann/llama-GGUF"] = {"llama-Q4_K_M.gguf": Hollow(*header("llama-3.1-8b"))}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_model_on_the_hub_is_planned_from_its_header_alone(hub: HubServer) -> None:
    file = library.find_header("hf:ann/llama-GGUF:Q4_K_M", Settings())
    _, size = header("llama-3.1-8b")
    assert (file.arch, file.file_bytes) == ("llama", size)
    assert hub.n_sent < 3 * 1024 * 1024


def test_a_header_from_the_hub_is_remembered_by_its_digest(hub: HubServer) -> None:
    first = library.hub_header(HubRef(repo="ann/llama-GGUF"), Settings(), machine())
    hub.asked.clear()
    assert library.hub_header(HubRef(repo="ann/llama-GGUF"), Settings(), machine()) == first
    assert hub.data_requests() == []


def test_a_url_is_planned_too(hub: HubServer) -> None:
    url = f"{hub.url}/cdn/ann/llama-GGUF/llama-Q4_K_M.gguf"
    assert library.find_header(url, Settings()).arch == "llama"


def test_the_starters_header_is_its_files() -> None:
    assert library.find_header("starter", Settings()).quant == "Q4_1"


def test_without_a_network_some_catalog_models_are_planned_from_a_shipped_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = library.find_header("qwen3-8b", Settings())
    assert (file.arch, file.quant) == ("qwen3", "Q4_K_M")
    assert file.file_bytes == header("qwen3-8b")[1]
    with pytest.raises(DownloadError, match="offline") as caught:
        library.find_header("magistral-small", Settings())
    assert "without the hub these can be planned: gemma-3-12b" in (caught.value.hint or "")


def test_shipped_headers_have_the_numbers_of_their_entries() -> None:
    with_header = [entry for entry in entries() if entry.header is not None]
    assert len(with_header) >= 10
    for entry in with_header:
        shipped = shipped_header(entry.repo)
        assert shipped is not None
        file = parse_header(shipped)
        assert file.arch == entry.arch
        assert file.metadata[f"{file.arch}.block_count"] == entry.n_layer
        assert file.metadata[f"{file.arch}.embedding_length"] == entry.n_embd
