"""llama.cpp's functions (``lib``), and those of the ggml beneath it.

The wrappers in llama_cpp._internals are not used: they fold every code of llama_decode into one
error and allocate on every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import llama_cpp
import llama_cpp.llama_cpp as lib

from edgellm.engine.build import library_folder, open_library
from edgellm.errors import EngineError

__all__ = ["MAX_SEQ", "build", "device_list", "ggml", "ggml_functions", "lib", "quick"]

MAX_SEQ: Final = 256  # LLAMA_MAX_SEQ, src/llama-cparams.h

_held: Final = ctypes.PyDLL("llama", handle=lib._lib._handle)


def quick(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp that keeps the interpreter lock while it runs.

    For calls of a few microseconds: one that gives the lock away may wait a whole switch interval
    for it wherever another thread is busy, and a step makes dozens of them.
    """
    function = getattr(_held, name)
    function.restype, function.argtypes = result, arguments
    return function


def build() -> str:
    """Which llama.cpp this is."""
    return f"llama-cpp-python {llama_cpp.__version__}"


def ggml(name: str, result: Any = None, *arguments: Any) -> Any:
    """Call a function of the ggml that llama.cpp itself uses; every argument is a pointer or a
    size.

    llama_cpp._ggml always opens the package's own copy: with LLAMA_CPP_LIB_PATH that is another
    one, with other devices and buffer types, or none at all.
    """
    folder = library_folder()
    for part in ("ggml", "ggml-base"):
        function = getattr(open_library(folder, part), name, None)
        if function is not None:
            function.restype = result
            function.argtypes = [ctypes.c_void_p] * len(arguments)
            return function(*arguments)
    raise EngineError(f"the engine's libraries in {folder} have no {name}", hint="edgellm doctor")


def ggml_functions(
    arguments: dict[str, tuple[Any, ...]], results: dict[str, Any]
) -> dict[str, Any]:
    """Functions of the ggml that llama.cpp uses, which keep the interpreter lock as ``quick`` does;
    a pointer comes back where ``results`` names nothing else. Empty when one of them is missing."""
    try:
        library = open_library(library_folder(), "ggml-base")
    except OSError:
        return {}
    functions = {}
    for name, types in arguments.items():
        held = ctypes.PyDLL("ggml", handle=library._handle)
        function = getattr(held, name, None)
        if function is None:
            return {}
        function.argtypes = types
        function.restype = results.get(name, ctypes.c_void_p)
        functions[name] = function
    return functions


def device_list(names: Sequence[str], *, must_exist: bool) -> Any:
    """A NULL-terminated ggml_backend_dev_t[] of the devices with these names.

    None when none is known and they need not exist (cards given by size have names of their own).
    Without one of several, llama.cpp would take every device there is.
    """
    table = (ctypes.c_void_p * (len(names) + 1))()
    for i, name in enumerate(names):
        table[i] = ggml("ggml_backend_dev_by_name", ctypes.c_void_p, name.encode())
    missing = [name for name, device in zip(names, table, strict=False) if not device]
    if missing and not must_exist and len(missing) == len(names):
        return None
    if missing:
        raise EngineError(f"the engine knows no device {missing[0]}", hint="edgellm doctor")
    return table
