"""Everything edgellm raises on purpose, in one tree.

EdgeLLMError
├── ConfigError                  a flag, variable, file or profile says something impossible
├── ModelNotFoundError           no model under that name
├── GGUFError                    the file is not a usable GGUF (path, what, offset)
├── StoreError
│   ├── DownloadError            the network or the far end failed; what arrived is kept
│   ├── ChecksumError            the bytes are not the bytes that were promised
│   └── DiskFullError            no room (required, available)
├── PlanError
│   └── DoesNotFitError          (device, required, available, smallest_fix)
├── RequestError
│   ├── InvalidRequestError      a parameter is wrong (param)
│   ├── ContextOverflowError     the prompt is longer than the context (n_prompt, n_ctx)
│   └── QueueFullError           too many waiting requests
└── EngineError
    ├── KVFullError              no cell for the next batch; the scheduler handles it
    ├── DecodeError              one step failed
    └── EngineDeadError          the child process is gone

A message says what happened, with the numbers. ``hint`` holds the next command to run, apart, so
that the terminal, the server and the TUI can each show it in their way.
"""

from __future__ import annotations

from pathlib import Path


class EdgeLLMError(Exception):
    """Base of every error that edgellm raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(EdgeLLMError):
    """A flag, a variable, config.toml or a profile says something impossible."""


class ModelNotFoundError(EdgeLLMError):
    """No model under the name that was asked for."""


class GGUFError(EdgeLLMError):
    """The file is not a GGUF that can be used.

    ``offset`` is the byte where reading stopped making sense, when there is one.
    """

    def __init__(
        self,
        path: str | Path,
        what: str,
        *,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        at = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{path}: {what}{at}", hint=hint)
        self.path = str(path)
        self.what = what
        self.offset = offset


class StoreError(EdgeLLMError):
    """The model store could not do what it was asked."""


class DownloadError(StoreError):
    """The network or the far end failed; what had arrived is kept."""


class ChecksumError(StoreError):
    """The bytes on disk are not the bytes that were promised."""


class DiskFullError(StoreError):
    """There is no room for what should be written (bytes)."""

    def __init__(
        self, message: str, *, required: int, available: int, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.required = required
        self.available = available


class PlanError(EdgeLLMError):
    """No plan can be made from what was given."""


class DoesNotFitError(PlanError):
    """The model does not fit as asked: ``required`` and ``available`` are bytes on ``device``."""

    def __init__(
        self,
        message: str,
        *,
        device: str,
        required: int,
        available: int,
        smallest_fix: str | None = None,
    ) -> None:
        super().__init__(message, hint=smallest_fix)
        self.device = device
        self.required = required
        self.available = available
        self.smallest_fix = smallest_fix


class RequestError(EdgeLLMError):
    """A request cannot be served as it is."""


class InvalidRequestError(RequestError):
    """A parameter of a request is wrong; ``param`` names it."""

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextOverflowError(RequestError):
    """The prompt (and what it should produce) is longer than one sequence may be, in tokens."""

    def __init__(
        self, n_prompt: int, n_ctx: int, *, what: str = "the prompt has", hint: str | None = None
    ) -> None:
        super().__init__(
            f"{what} {n_prompt} tokens, the context holds {n_ctx}",
            hint=hint or "shorten the prompt, plan a larger context, or use --overflow slide",
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class QueueFullError(RequestError):
    """As many requests wait as may wait; try again later."""


class EngineError(EdgeLLMError):
    """The engine could not do its work."""


class KVFullError(EngineError):
    """llama_decode found no free cells (code 1): recoverable, handled by the scheduler."""


class DecodeError(EngineError):
    """One step failed; ``code`` is what llama_decode returned."""

    def __init__(self, message: str, *, code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class EngineDeadError(EngineError):
    """The child process that owned the model is gone."""
