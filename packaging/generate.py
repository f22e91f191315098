"""Write what follows from the command line itself: completions, manual page, reference pages.

``python packaging/generate.py`` writes them, ``--check`` fails when one is not up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from edgellm import __version__, config
from edgellm.cli.app import build_app
from edgellm.cli.errors import EXIT_CODES
from edgellm.config import Known

ROOT: Final = Path(__file__).parents[1]
# A manual page carries a date: the day of the last release.
RELEASED: Final = "2026-11-29"
EXITS: Final = (
    (0, "done"),
    (1, "failed"),
    (2, "wrong usage: a flag, a setting or a request is impossible"),
    (3, "no model under that name"),
    (4, "the model does not fit"),
    (5, "the file is not a usable model"),
    (130, "interrupted"),
)


def completion(shell: Any) -> str:
    return build_app(documented=True).generate_completion(prog_name="edgellm", shell=shell)


def reference() -> str:
    """The command line as Markdown."""
    text = build_app(documented=True).generate_docs("markdown", heading_level=1)
    # Line breaks in docstrings are for the terminal; a console block is not to be run.
    return text.replace("```console\nedgellm", "```text\nedgellm").rstrip() + "\n"


def settings() -> str:
    """Every setting as a Markdown table a section."""
    lines = [
        "# Settings",
        "",
        "Flags win over `EDGELLM_*` variables, those over config.toml, that over the profile,",
        "that over the defaults. `edgellm config` prints each value and where it came from;",
        "`edgellm config set plan.ctx 8192` writes one. An unknown key is an error that names",
        "the nearest known one.",
    ]
    for section, keys in _sections():
        lines += ["", f"## {section or 'general'}", ""]
        lines += ["| setting | variable | default | what it does |", "|---|---|---|---|"]
        lines += [_setting_row(known) for known in keys]
    return "\n".join(lines) + "\n"


def _sections() -> Iterator[tuple[str, list[Known]]]:
    sections: dict[str, list[Known]] = {}
    for key, known in config.known_keys().items():
        sections.setdefault(key.rpartition(".")[0], []).append(known)
    yield from sections.items()


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _setting_row(known: Known) -> str:
    default = "" if known.default in (None, ()) else f"`{_toml(known.default)}`"
    return f"| `{known.key}` | `{known.variable}` | {default} | {known.description} |"


def manual() -> str:
    """edgellm(1): the commands with their flags, settings, exit codes, files."""
    parts = [
        f'.TH EDGELLM 1 "{RELEASED}" "edgellm {__version__}" "User commands"',
        ".SH NAME",
        r"edgellm \- run GGUF models with llama.cpp, planned to the MiB",
        ".SH SYNOPSIS",
        ".B edgellm",
        r"[\fICOMMAND\fR] [\fIOPTIONS\fR]",
        ".SH DESCRIPTION",
        "edgellm reads a model's header, works out what fits where on this machine, runs it,",
        "serves it over an OpenAI-compatible API, and shows in a terminal what is happening.",
        "Without a command it opens the terminal interface.",
        ".SH COMMANDS",
    ]
    parts += _manual_commands()
    parts += [".SH EXIT STATUS"]
    for code, meaning in EXITS:
        parts += [".TP", f".B {code}", _roff(meaning)]
    parts += [".SH ENVIRONMENT", ".TP", ".B EDGELLM_HOME", "Keep everything below this folder."]
    parts += [".TP", ".B EDGELLM_CONFIG", "Another settings file than config.toml."]
    parts += [".TP", r".BI EDGELLM_ SECTION _ KEY", "Every setting of config.toml; see"]
    parts += [r"\fBedgellm config\fR."]
    return "\n".join(parts) + "\n"


def _manual_commands() -> Iterator[str]:
    """The commands of the reference page, from the first one on: before it stands a table."""
    lines = reference().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("## edgellm"))
    for line in lines[first:]:
        if line.startswith("#"):
            yield f".SS {_roff(line.lstrip('# '))}"
        else:
            yield from _roff_line(line)


def _roff_line(line: str) -> Iterator[str]:
    """One line of the generated Markdown as roff."""
    option = re.match(r"\* `(.+?)`: ?(.*)", line)
    if option:
        yield from (".TP", f".B {_roff(option[1])}", _roff(_plain(option[2])))
    elif line.startswith("* `"):
        yield from (".IP", f".B {_roff(_plain(line[2:]))}")
    elif line.startswith("**") and line.endswith("**:"):
        yield from (".PP", f".I {_roff(line.strip('*:'))}")
    elif line.startswith("```") or not line.strip():
        return
    elif line.startswith("edgellm "):
        yield from (f".B {_roff(line)}", ".PP")
    else:
        yield _roff(_plain(line))


def _plain(text: str) -> str:
    return re.sub(r"\*\[(.+?)\]\*", r"[\1]", text).replace("`", "").replace("**", "")


def _roff(text: str) -> str:
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    # A line that begins with a dot or a quote would be a request.
    return r"\&" + escaped if escaped[:1] in (".", "'") else escaped


FILES: Final[dict[str, Callable[[], str]]] = {
    "packaging/completions/edgellm.bash": lambda: completion("bash"),
    "packaging/completions/_edgellm": lambda: completion("zsh"),
    "packaging/completions/edgellm.fish": lambda: completion("fish"),
    "packaging/completions/edgellm.ps1": lambda: completion("powershell"),
    "packaging/man/edgellm.1": manual,
    "docs/reference/cli.md": reference,
    "docs/reference/settings.md": settings,
}


def main() -> int:
    """Write the files, or with --check name those that differ."""
    if {code for code, _ in EXITS} - {0, 130} != {code for _, code in EXIT_CODES}:
        print("packaging/generate.py: EXITS differs from the exit codes of the command line")
        return 1
    stale = [name for name, make in FILES.items() if not _is_current(ROOT / name, make())]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name} is not what the command line says now; run: make generate")
        return int(bool(stale))
    for name in stale:
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES[name](), encoding="utf-8")
        print(f"wrote {name}")
    return 0


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
