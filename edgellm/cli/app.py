"""The commands, their one-line help, and the border where every error becomes an exit code.

A command is named here by an import string and imported when it runs, so that ``edgellm --help``
and ``edgellm plan`` load nothing they do not need. The command that is being run is registered
without the line below, so that its own docstring (with an example) is its ``--help``.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError
from cyclopts import _convert as cyclopts_convert

from edgellm import __version__
from edgellm.cli import errors
from edgellm.errors import EdgeLLMError

_RUN: Final = Group("Run a model", sort_key=1)
_MODELS: Final = Group("Models on disk", sort_key=2)
_MEASURE: Final = Group("Measure", sort_key=3)
_MACHINE: Final = Group("This machine", sort_key=4)

# (name, import string, group, one line)
COMMANDS: Final[tuple[tuple[str, str, Group, str], ...]] = (
    ("tui", "edgellm.cli.tui:tui", _RUN, "The terminal interface (also: edgellm alone)."),
    ("chat", "edgellm.cli.chat:chat", _RUN, "Chat in the terminal, or answer one prompt."),
    ("serve", "edgellm.cli.serve:serve", _RUN, "Serve models over an OpenAI-compatible API."),
    ("batch", "edgellm.cli.batch:batch", _RUN, "Run a file of requests and write the answers."),
    ("ps", "edgellm.cli.ps:ps", _RUN, "Running servers, their models and requests."),
    ("stop", "edgellm.cli.stop:stop", _RUN, "Unload a model or stop a server."),
    ("plan", "edgellm.cli.plan:plan", _MODELS, "What fits where, to the MiB, before loading."),
    ("pull", "edgellm.cli.pull:pull", _MODELS, "Download a model that fits this machine."),
    ("ls", "edgellm.cli.ls:ls", _MODELS, "Models here: size, quantisation, verdict."),
    ("rm", "edgellm.cli.rm:rm", _MODELS, "Delete a model from the store."),
    ("search", "edgellm.cli.search:search", _MODELS, "Find models on the hub."),
    ("verify", "edgellm.cli.verify:verify", _MODELS, "Check a model's bytes and structure."),
    ("import", "edgellm.cli.import_:import_", _MODELS, "Use a model another program downloaded."),
    ("quantize", "edgellm.cli.quantize:quantize", _MODELS, "Write a smaller copy of a model."),
    ("bench", "edgellm.cli.bench:app", _MEASURE, "Measure speed and memory; compare runs."),
    ("tune", "edgellm.cli.tune:tune", _MEASURE, "Search for better settings by measuring."),
    ("eval", "edgellm.cli.eval:app", _MEASURE, "Check quality: perplexity, KL, own prompts, A/B."),
    ("doctor", "edgellm.cli.doctor:doctor", _MACHINE, "What this machine has, and what is wrong."),
    ("profile", "edgellm.cli.profile:app", _MACHINE, "Settings for a class of hardware."),
    ("config", "edgellm.cli.config:app", _MACHINE, "Every setting and where it came from."),
    ("worker", "edgellm.cli.worker:worker", _MACHINE, "Lend this machine's memory to another's."),
    ("setup", "edgellm.cli.setup:setup", _MACHINE, "Install the engine for this machine's GPU."),
)

_cyclopts_int: Final = cyclopts_convert._converters[int]


def _whole_number(text: str) -> int:
    """cyclopts' own takes 1.5 for 2, and has no public place to say otherwise for every flag."""
    if "." in text and not float(text).is_integer():
        raise ValueError(f"{text} is no whole number")
    return int(_cyclopts_int(text))


cyclopts_convert._converters[int] = _whole_number

_ROOT_FLAGS: Final = ("--help", "-h", "--version")

_EPILOGUE: Final = (
    "Start with:  edgellm doctor, then edgellm chat starter\n\n"
    "Each command has --help with an example."
)


def build_app(first: str | None = None, *, documented: bool = False) -> App:
    """The application; ``first`` is the command being run, whose own docstring becomes its help.

    ``documented`` gives every command its own docstring, which imports them all: for the manual.
    """
    app = App(
        name="edgellm",
        help="Run GGUF models with llama.cpp, planned to the MiB, on the machine you own.",
        help_epilogue=None if first is not None else _EPILOGUE,
        help_format="plaintext" if first is None and not documented else "markdown",
        default_parameter=Parameter(negative=()),
        version=f"edgellm {__version__}",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        group_commands=Group("Other", sort_key=9),
    )
    for order, (name, where, group, line) in enumerate(COMMANDS):
        about = None if documented or name == first else line
        app.command(where, name=name, help=about, group=group, sort_key=order)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: the only place that turns errors into one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    _open_closed_streams()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:
        return _reader_went_away()
    except CycloptsError as error:
        return errors.report(_usage_error(error), as_json=as_json)
    except EdgeLLMError as error:
        return errors.report(error, as_json=as_json)
    except Exception as error:  # noqa: BLE001 (the border: nothing above prints or exits)
        return errors.report_unexpected(error, as_json=as_json)


def _run(arguments: list[str]) -> int:
    if not arguments:
        arguments = ["tui"] if sys.stdout.isatty() and sys.stdin.isatty() else ["--help"]
    _check_command(arguments[0])
    app = build_app(None if arguments[0].startswith("-") else arguments[0])
    try:
        result = app(arguments, exit_on_error=False, print_error=False, help_on_error=False)
    except SystemExit as leaving:
        # rich ends the program itself when the reader went away, and with 1.
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        raise
    sys.stdout.flush()
    return result if isinstance(result, int) else errors.DONE


def _check_command(first: str) -> None:
    """Refuse an unknown command here: cyclopts would import every command to name them."""
    names = [*_ROOT_FLAGS, *(name for name, *_ in COMMANDS)]
    if first in names:
        return
    near = difflib.get_close_matches(first, names, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    kind = "option" if first.startswith("-") else "command"
    raise errors.UsageError(f"no {kind} {first!r}{meant}", hint="edgellm --help")


def _usage_error(error: CycloptsError) -> errors.UsageError:
    chain = getattr(error, "command_chain", None) or ()
    return errors.UsageError(_in_our_words(error), hint=" ".join(("edgellm", *chain, "--help")))


def _in_our_words(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"nothing here takes {' '.join(error.unused_tokens)!r}"
    lacks = re.fullmatch(r'(?:Command ".+" p|P)arameter (\S+) requires an argument\.', str(error))
    if lacks is None:
        return str(error)
    if getattr(error, "keyword", None) is not None:
        return f"{lacks[1]} needs a value"
    return f"{lacks[1].lstrip('-').upper()} is missing"


def _open_closed_streams() -> None:
    """Point standard streams that were closed (``>&-``) at nothing.

    Python has None there, which nothing can write to; and the next file that is opened would get
    the free number, and what llama.cpp prints with it.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (for as long as we run)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _reader_went_away() -> int:
    """Our output was piped to a program that stopped reading (``edgellm ls | head -1``)."""
    # Python flushes stdout at exit and would complain again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return errors.DONE
