"""edgellm: run GGUF models with llama.cpp, planned to the MiB, on the machine you own."""

from __future__ import annotations

__version__ = "0.1.0"
