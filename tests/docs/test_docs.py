"""What the documentation tells a reader to type works."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import dropwhile, groupby
from pathlib import Path

import pytest

from edgellm.cli.app import COMMANDS, build_app, main
from tests.docs.blocks import DATA, FENCE, ROOT, Session, blocks, pages


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in pages() if any(not b.not_run for b in blocks(p))], ids=name
)
def test_every_command_block_runs(page: Path, tmp_path: Path) -> None:
    session = Session(tmp_path)
    try:
        for block in blocks(page):
            if block.language in ("console", "python") and block.not_run is None:
                session.run(block)
    finally:
        session.close()


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_stand_in_console_blocks_so_that_they_are_run(page: Path) -> None:
    for block in blocks(page):
        assert block.language in {*DATA, "console", "python", "powershell"}, f"line {block.line}"
        if block.language == "console":
            assert block.commands(), f"line {block.line}: no line begins with '$ '"


# Why a block may stay unrun, and of how many blocks each reason is true today.
UNRUN = {
    "takes minutes": 13,
    "takes a minute": 2,
    "asks the hub": 2,
    "downloads from the hub": 2,
    "fetches 250 MiB from the package index": 1,
    "installs from the package index into the person's own home": 2,
    "the tests that run this page were started by it": 3,
    "compiles for ten minutes": 1,
    "installs a unit into the person's own session": 1,
    "the service above was not installed": 1,
    "needs edgellm installed by pipx": 1,
    "needs a container runtime": 2,
    "needs an NVIDIA card": 1,
    "needs the card": 1,
    "needs a Mac": 1,
    "needs files of the reader's": 1,
    "needs the carried files": 1,
    "needs a file of requests": 1,
    "needs a set of prompts": 1,
    "needs a running server": 1,
    "needs another server's binary": 2,
    "needs other servers": 1,
    "needs another machine": 1,
    "needs the other machines": 1,
    "needs vLLM": 1,
    "needs the runs above": 1,
    "opens a port and waits": 1,
    "opens a port to the network": 1,
    "asks questions": 1,
}


def test_each_block_that_is_not_run_is_on_the_list_of_exceptions() -> None:
    reasons = Counter(b.not_run for page in pages() for b in blocks(page) if b.not_run)
    assert dict(reasons) == UNRUN


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_that_are_not_run_are_well_formed_at_least(page: Path) -> None:
    app = build_app(documented=True)  # a line of help would stay with the groups' own apps
    for block in blocks(page):
        for command in block.commands() if block.not_run else ():
            for words in edgellm_words(command):
                app.parse_args(words, print_error=False, exit_on_error=False)


def edgellm_words(command: str) -> Iterator[list[str]]:
    """The arguments of every call of edgellm in a line of shell."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|;&")
    lexer.whitespace_split = True
    for is_end, group in groupby(lexer, key=lambda word: set(word) <= set("|;&")):
        words = list(dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), group))
        if not is_end and words and words[0] == "edgellm":
            yield words[1:]


@pytest.mark.parametrize("page", pages(), ids=name)
def test_no_command_hides_in_an_indented_block(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for line in text.splitlines():
        assert not re.match(r" {4}(\$ |edgellm |pip |python )", line), line


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_every_command_that_the_docs_name_exists() -> None:
    known = {command for command, *_ in COMMANDS} | {"--help", "--version"}
    for page in pages():
        for used in re.findall(r"edgellm ([a-z][a-z-]+)", "\n".join(_code(page))):
            assert used in known, f"{name(page)} names 'edgellm {used}'"


def _code(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`(edgellm [^`]+)`", text)
    return inline + [c for block in blocks(page) for c in block.commands()]


def test_every_flag_that_the_docs_name_exists() -> None:
    app = build_app(documented=True)
    reference = app.generate_docs("markdown")
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", reference))
    for page in pages():
        for command in _code(page):
            for part in re.split(r"[|;&]", command):
                if part.strip().startswith("edgellm "):
                    unknown = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", part)) - flags
                    assert not unknown, f"{name(page)}: {part.strip()}"


def test_readme_opens_with_the_two_commands() -> None:
    (first, *_) = blocks(ROOT / "README.md")
    assert [c.split("#")[0].strip() for c in first.commands()] == ["make demo", "make test"]


def test_the_plan_in_the_readme_is_the_one_that_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("EDGELLM_STORE_OFFLINE", "true")
    (block,) = [b for b in blocks(ROOT / "README.md") if "edgellm plan llama" in b.body]
    assert main(next(edgellm_words(block.commands()[0]))) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = block.body.splitlines()[1:]
    assert on_the_card(shown) == on_the_card(printed)


def on_the_card(lines: list[str]) -> dict[str, str]:
    """The card's ledger and the parameters; host, threads and speeds are a machine's own."""
    rows = re.findall(r"^[█░· ] +([a-zA-Z ]+?) {2,}([\d,.]+)", "\n".join(lines), re.M)
    chosen = re.findall(r"^  ([nft][a-z_, ]+?) {2,}(\S+)", "\n".join(lines), re.M)
    return {name: value for name, value in [*rows, *chosen] if name != "n_threads"}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").as_posix()
        assert path in navigation, f"docs/{path} is in no menu of mkdocs.yml"
