"""Runs are kept, found again, compared and shown."""

from __future__ import annotations

import io
import re
import sqlite3
import xml.etree.ElementTree as ET
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from edgellm.bench import report
from edgellm.bench.archive import Archive, is_reference
from edgellm.bench.html import render
from edgellm.bench.results import BenchRun
from edgellm.bench.scenarios import scenario_from
from edgellm.bench.stats import Objective
from edgellm.bench.svg import nice_ticks
from edgellm.errors import ConfigError, EdgeLLMError

from .factories import make_run, slower


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "deep" / "bench.sqlite3")


def printed(show: object, *args: object) -> str:
    out = io.StringIO()
    show(Console(file=out, width=120), *args)  # type: ignore[operator]
    return out.getvalue()


def test_a_run_comes_back_as_it_was(archive: Archive) -> None:
    run = make_run(label="first")
    number = archive.add(run)
    assert archive.run(str(number)) == (number, run)


def test_runs_are_found_by_number_label_and_recency(archive: Archive) -> None:
    for label in ("a", "b", "a"):
        archive.add(make_run(label=label))
    assert [archive.run(ref)[0] for ref in ("1", "a", "b", "last", "last-1", "last-2")] == [
        1,
        3,
        2,
        3,
        2,
        1,
    ]


@pytest.mark.parametrize("ref", ["9", "nobody", "last-7", "last"])
def test_a_run_that_is_not_there_is_said(archive: Archive, ref: str) -> None:
    said = "no run is kept yet" if ref == "last" else re.escape(ref)
    with pytest.raises(ConfigError, match=said):
        archive.run(ref)


def test_the_newest_run_is_listed_first_with_its_result(archive: Archive) -> None:
    archive.add(make_run())
    archive.add(make_run(label="second"))
    entries = archive.entries()
    assert [e.label for e in entries] == ["second", ""]
    assert entries[0].headline == "175.3 tok/s at 4 streams"
    assert "second" in printed(report.show_entries, entries)


def test_other_kinds_are_kept_apart(archive: Archive) -> None:
    archive.add_document(
        kind="tune", started="s", label="t", target="engine", model="m", digest=None,
        scenario="-", headline="h", document=b"{}",
    )  # fmt: skip
    assert [e.kind for e in archive.entries(kind="tune")] == ["tune"]
    assert archive.entries(kind="bench") == []
    with pytest.raises(ConfigError, match="is a tune run"):
        archive.run("t")


def test_a_file_that_is_no_archive_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "bench.sqlite3"
    path.write_bytes(b"not a database, but long enough to be looked at" * 10)
    with pytest.raises(EdgeLLMError) as caught:
        Archive(path).entries()
    assert str(path) in caught.value.message


def test_processes_that_make_the_archive_at_once_all_find_it(tmp_path: Path) -> None:
    """Both have seen an empty file before either made the tables."""
    archive = Archive(tmp_path / "bench.sqlite3")
    late = sqlite3.connect(archive.path)
    assert archive._version(late) == 0
    assert archive.entries() == []
    with closing(late), mock.patch.object(archive, "_version", side_effect=[0, 1]):
        archive._prepare(late)


def test_no_run_is_found_without_a_name(archive: Archive) -> None:
    archive.add(make_run(label=""))
    with pytest.raises(ConfigError, match="number or a label"):
        archive.document("")


@pytest.mark.parametrize(("text", "is_one"), [("12", 1), ("last", 1), ("last-3", 1), ("last-x", 0)])
def test_what_means_a_place_in_the_list_is_known(text: str, is_one: int) -> None:
    assert is_reference(text) == bool(is_one)


def test_a_diff_of_different_work_or_of_runs_that_warned_says_so() -> None:
    plain = make_run(repeats=1, n_requests=50)
    other = make_run(scenario=scenario_from("batch", max_tokens=32))
    said = report.diff_warnings(plain, other)
    assert said[0].startswith("the two runs did different work (two kinds of batch)")
    assert "before: one repeat, so its spread is not known" in said
    assert any(w.startswith("after: 1 stream: answers have 64 tokens") for w in said)
    assert report.diff_warnings(plain, other)[0] in printed(report.show_diff, plain, other)


def test_the_page_of_two_runs_says_when_their_work_differs() -> None:
    other = make_run(scenario=scenario_from("batch", max_tokens=32))
    assert "did different work" in render([(1, make_run()), (2, other)])
    assert "Before comparing" not in render([(1, make_run()), (2, make_run())])


def test_a_figure_that_was_nothing_before_has_no_ratio() -> None:
    free, strict = make_run(), make_run(objective=Objective.parse("ttft=1ms"))
    both = printed(report.show_diff, strict, make_run(objective=Objective.parse("ttft=1s")))
    assert "inf" not in both
    assert "inf" not in printed(report.show_diff, free, strict)


def test_a_run_is_shown_with_its_figures_and_warnings() -> None:
    text = printed(report.show_run, make_run(), 7)
    assert "#7 sim" in text
    assert re.search(r"TTFT p50\s+200 ms\s+200 ms", text)
    assert re.search(r"output tok/s, all streams\s+43.8 ±0%\s+175 ±0%", text)
    assert "! a p99 of 16 requests" in text


def test_plots_show_every_level_or_the_timeline() -> None:
    assert "4 streams" in printed(report.show_plots, make_run())
    assert "last repeat" in printed(report.show_plots, make_run(concurrency=(4,)))


def test_a_diff_shows_what_differs_and_what_came_of_it() -> None:
    text = printed(report.show_diff, make_run(), make_run(slower(1.5), seed="2"))
    assert re.search(r"config.seed\s+1\s+2", text)
    assert re.search(r"4 streams\s+TTFT p50\s+200 ms\s+300 ms\s+1.50x\s+worse", text)


class _Page(HTMLParser):
    """Which tags a page has, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href")]


def page_of(*runs: BenchRun) -> str:
    return render([(i + 1, run) for i, run in enumerate(runs)])


def test_the_page_fetches_nothing_and_draws_its_charts() -> None:
    text = page_of(make_run())
    page = _Page(text)
    assert page.links == ["data:,"]
    assert "http" not in text.replace("http://192.0.2.1:8080", "").lower()
    assert page.tags.count("svg") == 6
    assert "$" not in text


def test_every_chart_is_well_formed_and_within_its_frame() -> None:
    for svg in re.findall(r"<svg.*?</svg>", page_of(make_run(), make_run(slower(2))), re.DOTALL):
        root = ET.fromstring(svg)
        for circle in root.iter("circle"):
            assert 0 <= float(circle.attrib["cx"]) <= 560
            assert 0 <= float(circle.attrib["cy"]) <= 300


def test_two_runs_are_compared_on_one_page() -> None:
    text = page_of(make_run(label="old"), make_run(slower(2), label="new"))
    assert "What came of it" in text
    assert '<tr class="worse">' in text
    assert "old p50" in text


def test_names_from_outside_cannot_become_markup() -> None:
    text = page_of(make_run(label="<script>alert(1)</script>"))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 100, [0, 20, 40, 60, 80, 100]), (0, 0.37, [0, 0.1, 0.2, 0.3]), (3, 3, [3])],
)
def test_axis_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(expected)
