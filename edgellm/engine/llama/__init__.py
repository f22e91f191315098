"""The backend that computes: llama.cpp through the raw functions of llama_cpp.llama_cpp.

The only package that imports llama_cpp. In reading order: library (the functions), log, params (a
plan in llama.cpp's words), limits, vocab, describe, batch, memory, samplers, rows, vectors, draft;
backend puts them together, and quantize is a child process of its own.
"""

# Before anything that imports numpy: the other order crashed inside model load on a CUDA build.
from edgellm.engine.llama import library as library  # isort: skip
from edgellm.engine.llama.backend import LlamaBackend, dry_run, load

__all__ = ["LlamaBackend", "dry_run", "load"]
