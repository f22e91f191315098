"""What a loaded model is: EngineInfo, asked of llama.cpp."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from edgellm.engine.backend import Limits
from edgellm.engine.info import EngineInfo
from edgellm.engine.llama.library import build, lib
from edgellm.engine.llama.params import POOLING
from edgellm.engine.llama.vocab import Vocab
from edgellm.planner.plan import Plan

POOLING_NAMES: Final = {value: name for name, value in POOLING.items()}
MAX_VALUE: Final = 512
"""Bytes of a metadata value that is kept."""
_TEMPLATE: Final = "tokenizer.chat_template."


def describe(plan: Plan, model: Any, ctx: Any, vocab: Vocab, limits: Limits) -> EngineInfo:
    """Facts of the model and of the context made for it."""
    meta = _metadata(model)
    encodes = not lib.llama_model_has_decoder(model) or not lib.llama_get_memory(ctx)
    is_encoder = encodes or plan.params.embeddings
    pooling = POOLING_NAMES.get(lib.llama_pooling_type(ctx), "none")
    return EngineInfo(
        name=plan.model.name,
        arch=meta.get("general.architecture", plan.model.arch),
        n_vocab=vocab.n,
        n_ctx=limits.n_cells,
        n_ctx_seq=limits.n_ctx_seq,
        n_seq_max=plan.params.n_seq_max,
        n_ctx_train=lib.llama_model_n_ctx_train(model),
        n_embd=lib.llama_model_n_embd_out(model),
        bos_id=vocab.bos_id,
        bos_text=vocab.text_of(vocab.bos_id),
        eos_id=vocab.eos_id,
        eos_text=vocab.text_of(vocab.eos_id),
        eog_ids=vocab.eog_ids,
        add_bos=vocab.add_bos,
        chat_templates=_templates(model, meta),
        is_encoder=is_encoder,
        pooling=pooling if is_encoder else "none",
        infill=vocab.infill(),
        metadata=meta,
        build=build(),
        backend="llama",
        sharing=limits.sharing,
        can_shift=limits.can_shift,
    )


def _metadata(model: Any) -> dict[str, str]:
    """Small scalar values as text; of named chat templates the name alone."""
    out = {}
    buffer = ctypes.create_string_buffer(MAX_VALUE)
    for i in range(lib.llama_model_meta_count(model)):
        lib.llama_model_meta_key_by_index(model, i, buffer, MAX_VALUE)
        key = buffer.value.decode("utf-8", "replace")
        n = lib.llama_model_meta_val_str_by_index(model, i, buffer, MAX_VALUE)
        if 0 <= n < MAX_VALUE:
            out[key] = buffer.value.decode("utf-8", "replace")
        elif key.startswith(_TEMPLATE):
            out[key] = ""
    return out


def _templates(model: Any, meta: dict[str, str]) -> dict[str, str]:
    names = [key.removeprefix(_TEMPLATE) for key in meta if key.startswith(_TEMPLATE)]
    found = {"default": lib.llama_model_chat_template(model, None)}
    found |= {name: lib.llama_model_chat_template(model, name.encode()) for name in names}
    return {n: t.decode("utf-8", "replace") for n, t in found.items() if t}
