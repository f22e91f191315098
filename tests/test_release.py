"""What a release rests on: one version, a changelog in its format, pinned where it must be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import edgellm

ROOT = Path(__file__).parents[1]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", edgellm.__version__)
    assert not re.search(r'^version = "', read("pyproject.toml"), re.MULTILINE)
    assert 'path = "edgellm/__init__.py"' in read("pyproject.toml")


def test_the_changelog_is_in_its_format() -> None:
    text = read("CHANGELOG.md")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    for heading in headings[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", heading)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= KINDS


def test_each_dependency_says_why_it_is_there() -> None:
    lines = read("pyproject.toml").splitlines()
    start = lines.index("dependencies = [")
    block = lines[start + 1 : lines.index("]", start)]
    reason = ""
    for line in block:
        if line.strip().startswith("#"):
            reason = line
        else:
            assert reason, f"{line.strip()} has no reason above it"


@pytest.mark.parametrize("name", ["check.yml", "release.yml"])
def test_workflows_call_make_and_nothing_of_their_own(name: str) -> None:
    text = read(f".github/workflows/{name}")
    assert "make " in text or ".ci/run" in text
    assert "pytest" not in text


def test_the_container_files_run_as_a_user_without_rights() -> None:
    for name in ("cpu", "cuda"):
        text = read(f"packaging/docker/{name}.Dockerfile")
        final = text[text.rindex("\nFROM ") :]
        assert re.search(r"^USER \d+$", final, re.MULTILINE)
        assert "HEALTHCHECK" in final


def test_the_manual_page_and_completions_name_every_command() -> None:
    from edgellm.cli.app import COMMANDS

    for file in ("man/edgellm.1", "completions/edgellm.bash", "completions/edgellm.fish"):
        text = read(f"packaging/{file}")
        missing = [name for name, *_ in COMMANDS if not re.search(rf"\b{name}\b", text)]
        assert not missing, f"{file}: {missing}; run: make generate"
