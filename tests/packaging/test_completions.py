"""The completions complete, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "packaging" / "completions"

BASH = """
source "$1/edgellm.bash"
COMP_WORDS=($2); [[ $2 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$2; COMP_POINT=${#2}
_edgellm edgellm "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""

CASES = [
    ("edgellm pl", "plan"),
    ("edgellm plan x --vr", "--vram"),
    ("edgellm serve --flash-attn ", "auto"),
    ("edgellm config un", "unset"),
]


def run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [line.split("\t")[0].strip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("typed", "offered"), CASES)
def test_bash_offers_commands_flags_and_choices(typed: str, offered: str) -> None:
    assert offered in run("bash", "-c", BASH, "bash", str(FOLDER), typed)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("typed", "offered"), CASES)
def test_fish_offers_commands_flags_and_choices(typed: str, offered: str) -> None:
    script = f"source {FOLDER / 'edgellm.fish'}; complete -C '{typed}'"
    assert offered in run("fish", "--no-config", "-c", script)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_defines_the_function_it_names() -> None:
    script = f"autoload -U compinit; compinit -D; fpath=({FOLDER} $fpath); autoload -U _edgellm; "
    assert "edgellm" in " ".join(run("zsh", "-f", "-c", script + "functions _edgellm"))
