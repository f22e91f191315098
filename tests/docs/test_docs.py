"""What the documentation tells a reader to type works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgellm.cli.app import COMMANDS, build_app
from tests.docs.blocks import DATA, ROOT, Session, blocks, pages


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


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").as_posix()
        assert path in navigation, f"docs/{path} is in no menu of mkdocs.yml"
