"""The backend that computes: llama.cpp through the raw functions of llama_cpp.llama_cpp.

The wrappers in that package's _internals are not used: they fold every code of llama_decode into
one error and allocate on every call.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

# Before numpy: the other order crashed inside model load on a CUDA build.
import llama_cpp.llama_cpp as lib
import msgspec
import numpy as np

from edgellm.engine.backend import OK, Allowed, Limits, OnProgress, Span
from edgellm.engine.build import library_folder, open_library
from edgellm.engine.candidates import highest
from edgellm.engine.imatrix import read_imatrix
from edgellm.engine.info import EngineInfo, EngineOptions, Infill, LoadProgress
from edgellm.engine.prefix import common_prefix
from edgellm.engine.quantize import QuantizeJob
from edgellm.engine.retention import first_budget
from edgellm.engine.rpc import end_process, register, watch
from edgellm.engine.sampling import (
    candidates_needed,
    has_penalties,
    min_p_depth,
    needs_all_logits,
)
from edgellm.errors import ConfigError, DoesNotFitError, EngineError, GGUFError
from edgellm.planner.plan import LoadReport, MeasuredDevice, Plan, PlanParams
from edgellm.request import Pooling, SamplingParams, TokenLogprob, TopLogprob
from edgellm.units import MiB

ATTACHED_TOP_K: Final = 64
MAX_SEQ: Final = 256  # LLAMA_MAX_SEQ, src/llama-cparams.h
FORBIDDEN: Final = -float("inf")
TYPES: Final = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, ggml.h; the bindings leave it out
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "iq4_nl": lib.GGML_TYPE_IQ4_NL,
}
POOLING: Final = {
    "none": lib.LLAMA_POOLING_TYPE_NONE,
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
    "rank": lib.LLAMA_POOLING_TYPE_RANK,
}
POOLING_NAMES: Final = {value: name for name, value in POOLING.items()}
FLASH: Final = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}
SPLIT: Final = {
    "none": lib.LLAMA_SPLIT_MODE_NONE,
    "layer": lib.LLAMA_SPLIT_MODE_LAYER,
    "row": lib.LLAMA_SPLIT_MODE_ROW,
    "tensor": lib.LLAMA_SPLIT_MODE_TENSOR,
}


_CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""


class _Log:
    """llama.cpp's log: kept while loading (the report is read from it), passed on to stderr."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_kept = True
        self._partial = ""
        self._callback = lib.llama_log_callback(self._take)
        lib.llama_log_set(self._callback, None)

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level == 1:  # GGML_LOG_LEVEL_DEBUG, ggml.h: none 0, debug 1, info 2, warn 3, error 4
            return
        self._partial += text.decode("utf-8", "replace")
        if not self._partial.endswith("\n"):
            return
        line, self._partial = self._partial.rstrip("\n"), ""
        if self.is_kept:
            self.lines.append(line)
        if self.is_kept or level in (3, 4):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


_BUFFER: Final = re.compile(
    r"\s(\S+)\s+(model|KV|RS|output|compute) buffer size\s*=\s*([\d.]+) MiB"
)
_OFFLOADED: Final = re.compile(r"offloaded (\d+/\d+) layers to GPU")
_DEVICE: Final = re.compile(r"using device (\S+) \((.*?)\)")
_EOG: Final = re.compile(r"EOG token\s*=\s*(\d+)")
_ENTRY: Final = {
    "model": "weights",
    "KV": "kv_cache",
    "RS": "recurrent_state",
    "output": "output",
    "compute": "compute",
}


def read_report(lines: Sequence[str], aliases: Mapping[str, str] = {}) -> LoadReport:
    """What llama.cpp's log says it allocated, by device; everything on the host as ``host``.

    ``aliases``: device names of the buffers that the log calls otherwise.
    """
    found: dict[str, dict[str, int]] = {}
    offloaded = ""
    for line in lines:
        if match := _BUFFER.search(line):
            name, kind, size = match.groups()
            is_host = name.startswith("CPU") or name.endswith("_Host")
            device = "host" if is_host else aliases.get(name, name)
            entry = found.setdefault(device, {})
            entry[_ENTRY[kind]] = entry.get(_ENTRY[kind], 0) + round(float(size) * MiB)
        elif match := _OFFLOADED.search(line):
            offloaded = match.group(1)
    measured = tuple(MeasuredDevice(id=name, **entry) for name, entry in found.items())
    return LoadReport(measured=measured, offloaded=offloaded, build=build())


def build() -> str:
    """Which llama.cpp this is."""
    import llama_cpp

    return f"llama-cpp-python {llama_cpp.__version__}"


def _ggml(name: str, result: Any = None, *arguments: Any) -> Any:
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


def _device_list(names: Sequence[str], *, must_exist: bool) -> Any:
    """A NULL-terminated ggml_backend_dev_t[] of the devices with these names.

    None when one is missing that need not exist (cards given by size have names of their own).
    """
    table = (ctypes.c_void_p * (len(names) + 1))()
    for i, name in enumerate(names):
        table[i] = _ggml("ggml_backend_dev_by_name", ctypes.c_void_p, name.encode())
        if not table[i] and not must_exist:
            return None
        if not table[i]:
            raise EngineError(f"the engine knows no device {name}", hint="edgellm doctor")
    return table


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _expert_overrides(n_cpu_moe: int) -> Any:
    """Overrides that keep the first n layers' expert tensors on the host, an empty one last.

    One pattern for all (LLM_FFN_EXPS_REGEX, common/common.h): llama.cpp compiles each pattern
    anew for every tensor.
    """
    layers = "|".join(map(str, range(n_cpu_moe)))
    pattern = rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    table = (_Override * 2)()
    table[0] = _Override(pattern.encode(), _ggml("ggml_backend_cpu_buffer_type", ctypes.c_void_p))
    return table


def _devices_for(plan: Plan) -> Any:
    """The devices llama.cpp may use, or None: those it would take by itself.

    A plan for the CPU gives an empty list: with a GPU present even n_gpu_layers 0 would take
    memory there.
    """
    if plan.verdict == "cpu":
        return _device_list((), must_exist=True)
    if plan.params.devices:
        return _device_list(plan.params.devices, must_exist=True)
    if plan.devices:
        return _device_list([device.id for device in plan.devices], must_exist=False)
    return None


def _model_params(plan: Plan, keep: list[Any]) -> Any:
    p = plan.params
    params = lib.llama_model_default_params()
    params.n_gpu_layers = p.n_gpu_layers
    params.split_mode = SPLIT[p.split_mode]
    params.main_gpu = p.main_gpu
    params.load_mode = (lib.LLAMA_LOAD_MODE_MMAP if p.use_mmap else lib.LLAMA_LOAD_MODE_NONE) | (
        lib.LLAMA_LOAD_MODE_MLOCK if p.use_mlock else 0
    )
    devices = _devices_for(plan)
    if devices is not None:
        keep.append(devices)
        params.devices = ctypes.addressof(devices)
    if p.tensor_split:
        split = (ctypes.c_float * lib.llama_max_devices())(*p.tensor_split)
        keep.append(split)
        params.tensor_split = split
    if p.n_cpu_moe:
        overrides = _expert_overrides(p.n_cpu_moe)
        keep.append(overrides)
        params.tensor_buft_overrides = ctypes.addressof(overrides)
    return params


def _context_params(p: PlanParams, n_outputs_per_seq: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = p.n_ctx
    params.n_batch = p.n_batch
    params.n_ubatch = p.n_ubatch
    params.n_seq_max = p.n_seq_max
    params.n_outputs_max = 0 if p.embeddings else max(p.n_outputs_max, p.n_seq_max)
    params.n_outputs_max_per_seq = n_outputs_per_seq
    params.n_threads = p.n_threads
    params.n_threads_batch = p.n_threads_batch
    params.type_k = TYPES[p.type_k]
    params.type_v = TYPES[p.type_v]
    params.flash_attn_type = FLASH[p.flash_attn]
    params.offload_kqv = p.offload_kqv
    params.kv_unified = p.kv_unified
    params.swa_full = p.swa_full
    params.embeddings = p.embeddings
    params.no_perf = True
    if p.embeddings and p.pooling in POOLING:
        params.pooling_type = POOLING[p.pooling] if p.pooling != "none" else -1
    return params


class _Batch:
    """A llama_batch over arrays that are filled in place and never reallocated."""

    def __init__(self, n: int) -> None:
        zeros = bytes(4 * n)
        self.token = array("i", zeros)
        self.pos = array("i", zeros)
        self.seq = array("i", zeros)
        self.out = bytearray(n)
        self._n_seq = array("i", [1]) * n
        self.n_rows = 0
        seq_at = self.seq.buffer_info()[0]
        self._seq_ptrs = array("Q", [seq_at + 4 * i for i in range(n)])
        self.no_out = bytes(n)
        self.places: dict[int, int] | None = None
        """Batch index -> row of logits; None: the same."""
        self.struct = lib.llama_batch()
        batch = self.struct
        i32 = ctypes.POINTER(ctypes.c_int32)
        batch.token = ctypes.cast(self.token.buffer_info()[0], i32)
        batch.pos = ctypes.cast(self.pos.buffer_info()[0], i32)
        batch.n_seq_id = ctypes.cast(self._n_seq.buffer_info()[0], i32)
        batch.seq_id = ctypes.cast(self._seq_ptrs.buffer_info()[0], ctypes.POINTER(i32))
        out = (ctypes.c_int8 * n).from_buffer(self.out)
        self._keep = out
        batch.logits = ctypes.cast(out, ctypes.POINTER(ctypes.c_int8))

    def fill(self, spans: Sequence[Span]) -> None:
        """Write the spans one after another."""
        token, pos, seq, out = self.token, self.pos, self.seq, self.out
        at = n_rows = 0
        places = {}
        for seq_id, start, tokens, n_out in spans:
            n = len(tokens)
            if n == 1:
                token[at] = tokens[0]
                pos[at] = start
                seq[at] = seq_id
                out[at] = n_out
            else:
                end = at + n
                token[at:end] = tokens
                pos[at:end] = array("i", range(start, start + n))
                seq[at:end] = array("i", [seq_id]) * n
                out[at:end] = self.no_out[: n - n_out] + b"\1" * n_out
            at += n
            for i in range(at - n_out, at):
                places[i] = n_rows
                n_rows += 1
        self.places = None if n_rows == at else places
        self.n_rows = n_rows
        self.struct.n_tokens = at


class LlamaSampler:
    """A chain of llama.cpp's samplers; ``chain`` is None for plain greedy."""

    __slots__ = ("attached", "chain", "depth", "needed", "params", "plain_ban")

    def __init__(self, params: SamplingParams, *, attached: bool) -> None:
        self.params = params
        self.attached = attached
        self.chain: int | None = None
        self.plain_ban = False
        """The chain's first sampler forbids end tokens, until allow_end takes it out."""
        self.depth = 0.0
        """Logits this far below the highest decide exactly; 0: that is not known."""
        self.needed = 0
        """Highest logits that decide exactly; 0: all."""


class LlamaBackend:
    """Implements Backend over one model and one context."""

    def __init__(self, plan: Plan, options: EngineOptions, on_progress: OnProgress) -> None:
        self._log = _Log()
        self._keep: list[Any] = []
        self._plan = plan
        self._options = options
        self._on_progress = on_progress
        lib.llama_backend_init()
        workers = plan.params.rpc
        self._aliases = register(workers)
        if workers:
            watch(workers, end_process)
        self._model = self._load_model(plan)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)
        on_progress(LoadProgress(stage="context", fraction=0.0))
        self.limits = self._plan_limits()
        self._ctx = self._make_context()
        self._memory = lib.llama_get_memory(self._ctx)
        self.limits = self._true_limits()
        self._batch = _Batch(self.limits.n_batch)
        self._piece_buffer = ctypes.create_string_buffer(256)
        self._vocabulary: list[bytes] | None = None
        self._greedy = self._chain([lib.llama_sampler_init_greedy()])
        n_threads = options.sample_threads or min(8, max(1, plan.params.n_threads))
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads, "engine-sample") if n_threads > 1 else None
        self.info = self._describe()
        self._drafter = self._load_draft()
        self.has_draft = self._drafter is not None
        warmup_s = self._warm_up() if options.warmup else 0.0
        self._log.is_kept = False
        report = read_report(self._log.lines, self._aliases)
        self.report = msgspec.structs.replace(report, warmup_s=warmup_s)

    # -- loading -----------------------------------------------------------------------------

    def _load_model(self, plan: Plan) -> Any:
        params = _model_params(plan, self._keep)
        last = 0.0

        def report(fraction: float, _: object) -> bool:
            nonlocal last
            if fraction - last >= 0.01 or fraction >= 1.0:
                last = fraction
                self._on_progress(LoadProgress(stage="weights", fraction=fraction))
            return True

        params.progress_callback = lib.llama_progress_callback(report)
        model = lib.llama_model_load_from_file(plan.model.path.encode(), params)
        if not model:
            raise _load_error(plan, self._log.lines, "the model")
        return model

    def _attached_top_k(self) -> int:
        p, wanted = self._plan.params, self._options.attach_top_k
        if p.embeddings or p.split_mode == "tensor":  # llama_context::set_sampler refuses it
            return 0
        if p.n_outputs_max > 2 * p.n_seq_max:  # a vocabulary on the GPU for each output: 0.5 GiB
            return 0
        if wanted is not None:
            return wanted
        # Where sequences have cells of their own, plain ones beside them would cost memory.
        return ATTACHED_TOP_K if self._is_on_gpu() and self._sharing() == "cells" else 0

    def _is_on_gpu(self) -> bool:
        return self._plan.params.n_gpu_layers != 0 and bool(lib.llama_supports_gpu_offload())

    def _sharing(self) -> str:
        p = self._plan.params
        if lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model):
            return "checkpoint"
        if lib.llama_model_n_swa(self._model) > 0 and not p.swa_full:
            return "checkpoint"
        return "cells" if p.kv_unified else "checkpoint"

    def _plan_limits(self) -> Limits:
        """The limits as planned; the context may round some of them."""
        p = self._plan.params
        n = p.n_seq_max
        sharing = self._sharing()
        top_k = self._attached_top_k()
        slots: tuple[int, ...] = tuple(range(n))
        plain: tuple[int, ...] = ()
        if top_k and sharing == "cells":
            # More sequences cost a shared full cache nothing; window and recurrent caches a copy.
            plain = tuple(range(n, min(n + min(n, self._options.n_plain), MAX_SEQ)))
        elif top_k and n > 1:
            n_plain = min(self._options.n_plain, n // 2)
            slots, plain = slots[: n - n_plain], slots[n - n_plain :]
        elif top_k:
            top_k = 0
        first = n + len(plain)
        return Limits(
            n_cells=p.n_ctx,
            n_ctx_seq=p.n_ctx_seq,
            n_batch=p.n_batch,
            n_ubatch=p.n_ubatch,
            n_prefill=min(p.n_batch, p.n_ubatch * max(1, len(p.tensor_split))),
            n_running=n,
            n_outputs_max=self._n_outputs(n),
            slot_ids=slots,
            plain_ids=plain,
            retained_ids=tuple(range(first, MAX_SEQ)) if sharing == "cells" else (),
            retain_cells=self._retain_cells(),
            sharing=sharing,
            attached_top_k=top_k,
        )

    def _retain_cells(self) -> int:
        plan = self._plan
        weights = sum(d.weights for d in plan.devices) + plan.host.weights
        kv_cache = sum(d.kv_cache for d in plan.devices) + plan.host.kv_cache
        return first_budget(weights, kv_cache // max(1, plan.params.n_ctx))

    def _n_outputs(self, n_seq: int) -> int:
        """Rows of logits a step: the plan's, one a sequence at least, and some to guess with."""
        p = self._plan.params
        guesses = self._options.spec_max if self._options.spec != "off" else 0
        return min(max(p.n_outputs_max, n_seq + guesses), p.n_batch)

    def _true_limits(self) -> Limits:
        ctx = self._ctx
        can_shift = self._memory is not None and bool(lib.llama_memory_can_shift(self._memory))
        return msgspec.structs.replace(
            self.limits,
            n_cells=lib.llama_n_ctx(ctx),
            n_ctx_seq=min(self._plan.params.n_ctx_seq, lib.llama_n_ctx_seq(ctx)),
            n_batch=lib.llama_n_batch(ctx),
            n_ubatch=lib.llama_n_ubatch(ctx),
            can_shift=can_shift,
        )

    def _make_context(self) -> Any:
        spec = self._options.spec != "off"
        p = self._plan.params
        n_seq = max([*self.limits.slot_ids, *self.limits.plain_ids, p.n_seq_max - 1]) + 1
        p = msgspec.structs.replace(p, n_seq_max=n_seq, n_outputs_max=self._n_outputs(n_seq))
        params = _context_params(p, self._options.spec_max + 1 if spec else 1)
        if self.limits.attached_top_k:
            chains = [
                self._chain([lib.llama_sampler_init_top_k(self.limits.attached_top_k)])
                for _ in self.limits.slot_ids
            ]
            table = (lib.llama_sampler_seq_config * len(chains))()
            for i, (slot, chain) in enumerate(zip(self.limits.slot_ids, chains, strict=True)):
                table[i].seq_id = slot
                table[i].sampler = ctypes.cast(chain, ctypes.c_void_p)
            self._keep += [table, chains]
            params.samplers = table
            params.n_samplers = len(chains)
        else:
            params.n_outputs_max_per_seq = 0
        ctx = lib.llama_init_from_model(self._model, params)
        if not ctx:
            raise _load_error(self._plan, self._log.lines, "the context")
        return ctx

    def _chain(self, samplers: Sequence[Any]) -> Any:
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in samplers:
            lib.llama_sampler_chain_add(chain, sampler)
        return chain

    def _warm_up(self) -> float:
        """Fill one ubatch (and, on a GPU, some depth): kernels and workspaces load lazily."""
        began = time.monotonic()
        self._on_progress(LoadProgress(stage="warmup", fraction=0.0))
        if self.info.is_encoder:
            return 0.0
        on_gpu = self._is_on_gpu()
        n_ubatch = self.limits.n_ubatch if on_gpu else min(16, self.limits.n_ubatch)
        depth = min(self.limits.n_ctx_seq - 2, n_ubatch * (4 if on_gpu else 1))
        slots = [*self.limits.slot_ids[:1], *self.limits.plain_ids[:1]]
        token = max(self.info.bos_id, 0)
        for slot in slots:
            start = 0
            while start < depth:
                n = min(n_ubatch, depth - start)
                self._warm_span(slot, start, array("i", [token]) * n)
                start += n
            self._warm_span(slot, start, array("i", [token]))
            lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        return time.monotonic() - began

    def _warm_span(self, slot: int, start: int, tokens: array[int]) -> None:
        code = self.decode([Span(slot, start, tokens, 1)])
        if code != OK:
            raise EngineError(f"the warm-up failed: llama_decode returned {code}")

    # -- what the model is -------------------------------------------------------------------

    def _describe(self) -> EngineInfo:
        vocab, model = self._vocab, self._model
        meta = self._metadata()
        bos, eos = lib.llama_vocab_bos(vocab), lib.llama_vocab_eos(vocab)
        pooling = POOLING_NAMES.get(lib.llama_pooling_type(self._ctx), "none")
        encoder_only = not lib.llama_model_has_decoder(model) or self._memory is None
        lines = self._log.lines
        return EngineInfo(
            name=self._plan.model.name,
            arch=meta.get("general.architecture", self._plan.model.arch),
            n_vocab=self.n_vocab,
            n_ctx=self.limits.n_cells,
            n_ctx_seq=self.limits.n_ctx_seq,
            n_seq_max=self._plan.params.n_seq_max,
            n_ctx_train=lib.llama_model_n_ctx_train(model),
            n_embd=lib.llama_model_n_embd_out(model),
            bos_id=bos,
            bos_text=self._special_text(bos),
            eos_id=eos,
            eos_text=self._special_text(eos),
            eog_ids=self._eog_ids(),
            add_bos=bool(lib.llama_vocab_get_add_bos(vocab)),
            chat_templates=self._templates(meta),
            is_encoder=encoder_only or self._plan.params.embeddings,
            pooling=pooling if self._plan.params.embeddings or encoder_only else "none",
            infill=self._infill(),
            metadata=meta,
            build=build(),
            devices=tuple(m.group(1) for m in map(_DEVICE.search, lines) if m) or ("CPU",),
            backend="llama",
            sharing=self.limits.sharing,
            can_shift=self.limits.can_shift,
        )

    def _special_text(self, token: int) -> str:
        return "" if token < 0 else self.piece(token).decode("utf-8", "replace")

    def _metadata(self) -> dict[str, str]:
        out = {}
        buffer = ctypes.create_string_buffer(512)
        for i in range(lib.llama_model_meta_count(self._model)):
            lib.llama_model_meta_key_by_index(self._model, i, buffer, 512)
            key = buffer.value.decode("utf-8", "replace")
            n = lib.llama_model_meta_val_str_by_index(self._model, i, buffer, 512)
            if 0 <= n < 512:
                out[key] = buffer.value.decode("utf-8", "replace")
            elif key.startswith("tokenizer.chat_template."):
                out[key] = ""
        return out

    def _templates(self, meta: dict[str, str]) -> dict[str, str]:
        prefix = "tokenizer.chat_template."
        names = [key[len(prefix) :] for key in meta if key.startswith(prefix)]
        found = {"default": lib.llama_model_chat_template(self._model, None)}
        found |= {n: lib.llama_model_chat_template(self._model, n.encode()) for n in names}
        return {n: t.decode("utf-8", "replace") for n, t in found.items() if t}

    def _eog_ids(self) -> tuple[int, ...]:
        logged = {int(m.group(1)) for m in map(_EOG.search, self._log.lines) if m}
        own = {lib.llama_vocab_eos(self._vocab), lib.llama_vocab_eot(self._vocab)}
        return tuple(sorted(t for t in logged | own if t >= 0))

    def _infill(self) -> Infill | None:
        ids = (
            lib.llama_vocab_fim_pre(self._vocab),
            lib.llama_vocab_fim_suf(self._vocab),
            lib.llama_vocab_fim_mid(self._vocab),
        )
        if min(ids) < 0:
            return None
        texts = [self._special_text(i) for i in ids]
        return Infill(
            prefix=texts[0],
            suffix=texts[1],
            middle=texts[2],
            prefix_id=ids[0],
            suffix_id=ids[1],
            middle_id=ids[2],
        )

    # -- text --------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        n_max = len(data) + 2
        buffer = (ctypes.c_int32 * n_max)()
        n = lib.llama_tokenize(
            self._vocab, data, len(data), buffer, n_max, add_special, parse_special
        )
        if n < 0:
            buffer = (ctypes.c_int32 * -n)()
            n = lib.llama_tokenize(
                self._vocab, data, len(data), buffer, -n, add_special, parse_special
            )
        ids: list[int] = buffer[:n]
        bos = self.info.bos_id
        if add_special and parse_special and ids[:2] == [bos, bos]:
            del ids[0]  # a rendered template brings its own
        return ids

    def piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def vocabulary(self) -> Sequence[bytes]:
        if self._vocabulary is None:
            self._vocabulary = [self.piece(token) for token in range(self.n_vocab)]
        return self._vocabulary

    def special_tokens(self) -> frozenset[int]:
        control = lib.llama_vocab_is_control
        return frozenset(t for t in range(self.n_vocab) if control(self._vocab, t))

    # -- steps -------------------------------------------------------------------------------

    def decode(self, spans: Sequence[Span]) -> int:
        batch = self._batch
        batch.fill(spans)
        code: int = lib.llama_decode(self._ctx, batch.struct)
        if code == OK:
            lib.llama_synchronize(self._ctx)
        return code

    def make_sampler(self, params: SamplingParams, seed: int, prompt: Sequence[int]) -> Any:
        top_k = self.limits.attached_top_k
        attached = top_k > 0 and not needs_all_logits(params, top_k)
        sampler = LlamaSampler(params, attached=attached)
        sampler.depth = min_p_depth(params)
        sampler.needed = candidates_needed(params)
        if sampler.needed:
            sampler.needed += len(self.info.eog_ids) + len(params.stop_token_ids)
        parts = self._parts(params, seed)
        if params.min_tokens and not params.ignore_eos:
            parts.insert(0, self._bias(dict.fromkeys(self._ends(params), FORBIDDEN)))
            sampler.plain_ban = True
        if len(parts) > 1 or params.temperature > 0.0:
            sampler.chain = self._chain(parts)
            if has_penalties(params):
                n = params.repeat_last_n
                for token in prompt if n < 0 else prompt[max(0, len(prompt) - n) :]:
                    lib.llama_sampler_accept(sampler.chain, token)
        else:
            lib.llama_sampler_free(parts[0])
        return sampler

    def _ends(self, params: SamplingParams) -> set[int]:
        return {*self.info.eog_ids, *params.stop_token_ids}

    def _parts(self, params: SamplingParams, seed: int) -> list[Any]:
        """llama.cpp's own order (common/sampling.cpp), without what is switched off."""
        parts: list[Any] = []
        bias = dict(params.logit_bias)
        if params.ignore_eos:
            bias |= dict.fromkeys(self.info.eog_ids, FORBIDDEN)
        if bias:
            parts.append(self._bias({t: FORBIDDEN if b <= -100 else b for t, b in bias.items()}))
        if has_penalties(params):
            parts.append(
                lib.llama_sampler_init_penalties(
                    self.n_vocab,
                    params.repeat_last_n if params.repeat_last_n >= 0 else self.limits.n_ctx_seq,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
        if params.temperature == 0.0:
            return [*parts, lib.llama_sampler_init_greedy()]
        if params.top_k > 0:
            parts.append(lib.llama_sampler_init_top_k(params.top_k))
        if params.typical_p < 1.0:
            parts.append(lib.llama_sampler_init_typical(params.typical_p, 1))
        if params.top_p < 1.0:
            parts.append(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            parts.append(lib.llama_sampler_init_min_p(params.min_p, 1))
        parts.append(lib.llama_sampler_init_temp(params.temperature))
        parts.append(lib.llama_sampler_init_dist(seed % 0xFFFFFFFF))  # that one means random
        return parts

    def _bias(self, bias: dict[int, float]) -> Any:
        usable = {t: b for t, b in bias.items() if 0 <= t < self.n_vocab}
        table = (lib.llama_logit_bias * max(1, len(usable)))()
        for i, (token, value) in enumerate(usable.items()):
            table[i].token = token
            table[i].bias = value
        return lib.llama_sampler_init_logit_bias(self.n_vocab, len(usable), table)

    def free_sampler(self, sampler: Any) -> None:
        if sampler.chain is not None:
            lib.llama_sampler_free(sampler.chain)
            sampler.chain = None

    def allow_end(self, sampler: Any) -> None:
        if sampler.plain_ban:
            sampler.plain_ban = False
            lib.llama_sampler_free(lib.llama_sampler_chain_remove(sampler.chain, 0))

    def sample(self, rows: Sequence[int], samplers: Sequence[Any]) -> list[int]:
        out = [0] * len(rows)
        greedy: list[int] = []
        filtered: list[int] = []
        chained: list[int] = []
        for i, sampler in enumerate(samplers):
            if sampler.attached:
                chained.append(i)
            elif sampler.chain is None:
                greedy.append(i)
            else:
                (filtered if sampler.needed or sampler.depth else chained).append(i)
        if greedy or filtered:
            self._sample_filtered(rows, samplers, greedy, filtered, out)
        if chained:
            self._sample_chains(rows, samplers, chained, out)
        return out

    def _sample_filtered(
        self,
        rows: Sequence[int],
        samplers: Sequence[Any],
        greedy: list[int],
        filtered: list[int],
        out: list[int],
    ) -> None:
        """Rows that their highest logits decide: found in parallel, a share of rows a thread."""
        logits = self._matrix()
        places = self._batch.places
        at = rows if places is None else [places[row] for row in rows]

        def argmax(part: list[int]) -> None:
            for i, token in zip(part, _rows(logits, [at[i] for i in part]).argmax(1), strict=True):
                out[i] = int(token)

        def choose(part: list[int]) -> None:
            some = _rows(logits, [at[i] for i in part])
            for i, token in zip(part, self._filter([samplers[i] for i in part], some), strict=True):
                out[i] = token

        jobs = [(argmax, part) for part in self._shares(greedy)]
        jobs += [(choose, part) for part in self._shares(filtered)]
        others = [self._pool.submit(f, part) for f, part in jobs[1:]] if self._pool else []
        for f, part in jobs[:1] if self._pool else jobs:
            f(part)
        for other in others:
            other.result()

    def _shares(self, which: list[int]) -> list[list[int]]:
        """Consecutive rows for each thread; waking one costs as much as a few rows."""
        n = max(8, -(-len(which) // self._n_threads))
        return [which[i : i + n] for i in range(0, len(which), n)]

    def _matrix(self) -> Any:
        address = ctypes.cast(lib.llama_get_logits(self._ctx), ctypes.c_void_p).value
        if address is None:
            raise EngineError("the last step has no logits")
        n = self._batch.n_rows * self.n_vocab
        data: Any = (ctypes.c_float * n).from_address(address)
        return np.frombuffer(data, np.float32).reshape(self._batch.n_rows, self.n_vocab)

    def _filter(self, samplers: Sequence[Any], logits: Any) -> list[int]:
        """Chains applied to each row's highest logits alone."""
        needed = max(1, *(sampler.needed for sampler in samplers))
        out = []
        for sampler, row, best in zip(samplers, logits, highest(logits, needed), strict=True):
            deep = bool(sampler.depth)
            ids = np.flatnonzero(row >= row.max() - (sampler.depth + 0.01)) if deep else best
            candidates = np.empty(len(ids), _CANDIDATE)
            candidates["id"], candidates["logit"] = ids, row[ids]
            data = lib.llama_token_data_array()
            out.append(_apply(data, sampler.chain, candidates.ctypes.data, len(ids)))
        return out

    def _sample_chains(
        self, rows: Sequence[int], samplers: Sequence[Any], which: list[int], out: list[int]
    ) -> None:
        ctx, call, greedy = self._ctx, lib.llama_sampler_sample, self._greedy

        def run(part: Sequence[int]) -> None:
            for i in part:
                chain = samplers[i].chain
                out[i] = call(greedy if chain is None else chain, ctx, rows[i])

        # K candidates take microseconds; all logits take long enough to share them out.
        wide = [i for i in which if not samplers[i].attached]
        if self._pool is None or len(wide) < 2:
            run(which)
            return
        lib.llama_get_logits(ctx)  # puts the rows in order once, before threads read them
        n = min(self._n_threads, len(wide))
        shares = [wide[k::n] for k in range(n)]
        others = [self._pool.submit(run, share) for share in shares[1:]]
        run(shares[0])
        run([i for i in which if samplers[i].attached])
        for other in others:
            other.result()

    def sample_allowed(self, row: int, sampler: Any, allowed: Allowed) -> int:
        logits = self._row(row)
        if isinstance(allowed, tuple):
            ids = np.array(allowed, np.int32)
        elif isinstance(allowed, bytes):
            bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
            ids = np.flatnonzero(bits[: self.n_vocab]).astype(np.int32)
        else:
            keep = np.ones(self.n_vocab, bool)
            if allowed is False:
                keep[list(self.info.eog_ids)] = False
            ids = np.flatnonzero(keep).astype(np.int32)
        if not len(ids):
            raise EngineError("the grammar allows no token")
        candidates = np.empty(len(ids), _CANDIDATE)
        candidates["id"], candidates["logit"] = ids, logits[ids]
        chain = self._greedy if sampler.chain is None else sampler.chain
        return _apply(lib.llama_token_data_array(), chain, candidates.ctypes.data, len(ids))

    def _row(self, row: int) -> Any:
        pointer = lib.llama_get_logits_ith(self._ctx, row)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise EngineError(f"row {row} has no logits")
        data: Any = (ctypes.c_float * self.n_vocab).from_address(address)
        return np.frombuffer(data, np.float32)

    def logits(self, row: int) -> bytes:
        return bytes(self._row(row).astype("<f4", copy=False).tobytes())

    def logprobs(self, row: int, token: int, k: int) -> TokenLogprob:
        logits = self._row(row)
        top = float(logits.max())
        total = top + float(np.log(np.exp(logits - top, dtype=np.float64).sum()))
        best: tuple[TopLogprob, ...] = ()
        if k:
            ids = np.argpartition(logits, -k)[-k:]
            ids = ids[np.argsort(-logits[ids], kind="stable")]
            best = tuple(
                TopLogprob(int(i), self.piece(int(i)), float(logits[i]) - total) for i in ids
            )
        return TokenLogprob(token, self.piece(token), float(logits[token]) - total, best)

    def _load_draft(self) -> _Drafter | None:
        p = self._plan.params
        if p.draft_model is None:
            return None
        facts = msgspec.structs.replace(self._plan.model, path=p.draft_model)
        small = msgspec.structs.replace(
            p, n_gpu_layers=p.draft_n_gpu_layers, n_outputs_max=p.n_seq_max, draft_model=None
        )
        plan = msgspec.structs.replace(self._plan, model=facts, params=small)
        model = lib.llama_model_load_from_file(
            p.draft_model.encode(), _model_params(plan, self._keep)
        )
        if not model:
            raise _load_error(plan, self._log.lines, "the model")
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        if n_vocab != self.n_vocab:
            raise ConfigError(
                f"the draft model has {n_vocab} tokens, the model {self.n_vocab}",
                hint="choose a draft model of the same family",
            )
        ctx = lib.llama_init_from_model(model, _context_params(small, 1))
        if not ctx:
            raise _load_error(plan, self._log.lines, "the context")
        return _Drafter(model, ctx, self.n_vocab, self.limits.n_batch)

    def draft(self, asked: Sequence[tuple[int, array[int]]], k: int) -> list[list[int]]:
        return self._drafter.propose(asked, k) if self._drafter is not None else []

    # -- the cache ---------------------------------------------------------------------------

    def seq_rm(self, seq_id: int, start: int) -> bool:
        return bool(lib.llama_memory_seq_rm(self._memory, seq_id, start if start else -1, -1))

    def seq_cp(self, source: int, target: int, n: int) -> None:
        lib.llama_memory_seq_cp(self._memory, source, target, 0, n)

    def seq_shift(self, seq_id: int, start: int, n_drop: int) -> None:
        lib.llama_memory_seq_rm(self._memory, seq_id, start, start + n_drop)
        lib.llama_memory_seq_add(self._memory, seq_id, start + n_drop, -1, -n_drop)

    def state_get(self, seq_id: int) -> bytes:
        n = lib.llama_state_seq_get_size_ext(self._ctx, seq_id, 0)
        buffer = (ctypes.c_uint8 * n)()
        written = lib.llama_state_seq_get_data_ext(self._ctx, buffer, n, seq_id, 0)
        return bytes(memoryview(buffer)[:written])

    def state_set(self, seq_id: int, state: bytes) -> bool:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        return bool(lib.llama_state_seq_set_data_ext(self._ctx, buffer, len(state), seq_id, 0))

    # -- embeddings --------------------------------------------------------------------------

    def embed(
        self, spans: Sequence[Span], pooling: Pooling, *, normalize: bool
    ) -> list[tuple[float, ...]]:
        self._batch.fill(spans)
        code = lib.llama_decode(self._ctx, self._batch.struct)
        if code != OK:
            raise EngineError(f"embedding failed: llama_decode returned {code}")
        out = [self._vector(span, i, pooling, normalize) for i, span in self._places(spans)]
        if self._memory is not None:
            lib.llama_memory_clear(self._memory, False)
        return out

    @staticmethod
    def _places(spans: Sequence[Span]) -> list[tuple[int, Span]]:
        at, out = 0, []
        for span in spans:
            out.append((at, span))
            at += len(span.tokens)
        return out

    def _vector(self, span: Span, at: int, pooling: Pooling, normalize: bool) -> tuple[float, ...]:
        n_embd = lib.llama_model_n_embd_out(self._model)
        if pooling is Pooling.NONE:
            rows = [
                self._floats(lib.llama_get_embeddings_ith(self._ctx, at + i), n_embd)
                for i in range(len(span.tokens))
            ]
            return tuple(float(x) for row in rows for x in _scaled(row, normalize))
        pointer = lib.llama_get_embeddings_seq(self._ctx, span.seq_id)
        if pooling is Pooling.RANK:
            return (float(pointer[0]),)
        return tuple(_scaled(self._floats(pointer, n_embd), normalize).tolist())

    @staticmethod
    def _floats(pointer: Any, n: int) -> Any:
        return np.ctypeslib.as_array(pointer, (n,)).copy()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        lib.llama_free(self._ctx)
        lib.llama_model_free(self._model)


class _Drafter:
    """A small model that guesses greedily, with a cache of its own under the same seq_ids."""

    def __init__(self, model: Any, ctx: Any, n_vocab: int, n_batch: int) -> None:
        self._model = model
        self._ctx = ctx
        self._memory = lib.llama_get_memory(ctx)
        self._n_vocab = n_vocab
        self._n_batch = min(n_batch, lib.llama_n_batch(ctx))
        self._batch = _Batch(self._n_batch)
        self._cached: dict[int, array[int]] = {}

    def propose(self, asked: Sequence[tuple[int, array[int]]], k: int) -> list[list[int]]:
        """k tokens for each sequence; all sequences advance in one batch a token."""
        if not self._catch_up(asked):
            lib.llama_memory_clear(self._memory, False)
            self._cached.clear()
            return [[] for _ in asked]
        out: list[list[int]] = [[] for _ in asked]
        spans = [Span(slot, len(tokens) - 1, array("i", [tokens[-1]]), 1) for slot, tokens in asked]
        for _ in range(k):
            self._batch.fill(spans)
            if lib.llama_decode(self._ctx, self._batch.struct) != OK:
                break
            for i, span in enumerate(spans):
                self._cached[span.seq_id].extend(span.tokens)
                out[i].append(self._argmax(i))
                spans[i] = Span(span.seq_id, span.start + 1, array("i", out[i][-1:]), 1)
        return out

    def _catch_up(self, asked: Sequence[tuple[int, array[int]]]) -> bool:
        """Compute all but each sequence's newest token; False when there is no room."""
        for slot, tokens in asked:
            held = self._cached.setdefault(slot, array("i"))
            same = common_prefix(held, tokens[:-1])
            if same < len(held):
                lib.llama_memory_seq_rm(self._memory, slot, same if same else -1, -1)
                del held[same:]
            while len(held) < len(tokens) - 1:
                part = tokens[len(held) : min(len(tokens) - 1, len(held) + self._n_batch)]
                self._batch.fill([Span(slot, len(held), part, 0)])
                if lib.llama_decode(self._ctx, self._batch.struct) != OK:
                    return False
                held.extend(part)
        return True

    def _argmax(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self._ctx, row)
        return int(np.ctypeslib.as_array(pointer, (self._n_vocab,)).argmax())


def _rows(matrix: Any, which: list[int]) -> Any:
    """Rows of a matrix: a view when they follow one another."""
    first, n = which[0], len(which)
    if which == list(range(first, first + n)):
        return matrix[first : first + n]
    return matrix[which]


def _apply(data: Any, chain: Any, address: int, n: int) -> int:
    """What a chain chooses of ``n`` candidates at an address; the chain remembers it."""
    if not n:
        raise EngineError("nothing to choose from: the model's logits are not numbers")
    data.data = ctypes.cast(address, lib.llama_token_data_p)
    data.size, data.selected, data.sorted = n, -1, False
    lib.llama_sampler_apply(chain, ctypes.byref(data))
    token = int(data.data[data.selected].id)
    lib.llama_sampler_accept(chain, token)
    return token


def _scaled(vector: Any, normalize: bool) -> Any:
    norm = float(np.linalg.norm(vector))
    return vector / norm if normalize and norm > 0 else vector


_NO_MEMORY: Final = (
    "out of memory",
    "failed to allocate",
    "unable to allocate",
    "cudaMalloc failed",
)


def _load_error(plan: Plan, lines: Sequence[str], what: str) -> Exception:
    """What a NULL from llama.cpp means; it says why in its log alone."""
    tail = [line for line in lines if "error" in line.lower() or "fail" in line.lower()][-3:]
    said = "; ".join(tail) or "llama.cpp gave no reason"
    if any(sign in line for sign in _NO_MEMORY for line in lines):
        named = (d for d in plan.devices if any(d.id in line for line in tail))
        card = next(named, plan.devices[0] if plan.devices else None)
        return DoesNotFitError(
            f"no memory for {what}: {said}",
            device=card.id if card else "host",
            required=card.used if card else plan.host.used,
            available=card.free if card else plan.host.available,
        )
    if what == "the model":
        return GGUFError(plan.model.path, f"llama.cpp cannot load it: {said}")
    return EngineError(f"llama.cpp could not make {what}: {said}")


def load(plan: Plan, options: EngineOptions, on_progress: OnProgress) -> LlamaBackend:
    """Load the plan's model."""
    return LlamaBackend(plan, options, on_progress)


def dry_run(plan: Plan, options: EngineOptions) -> LoadReport:
    """The buffers of a plan, measured without allocating them (weights and KV print as 0)."""
    log = _Log()
    keep: list[Any] = []
    lib.llama_backend_init()
    aliases = register(plan.params.rpc)
    params = _model_params(plan, keep)
    params.no_alloc = True
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    model = lib.llama_model_load_from_file(plan.model.path.encode(), params)
    if not model:
        raise _load_error(plan, log.lines, "the model")
    context = _context_params(plan.params, options.spec_max + 1 if options.spec != "off" else 1)
    ctx = lib.llama_init_from_model(model, context)
    if not ctx:
        raise _load_error(plan, log.lines, "the context")
    report = read_report(log.lines, aliases)
    lib.llama_free(ctx)
    lib.llama_model_free(model)
    return report


def quantize_file(job: QuantizeJob, on_line: Callable[[str], None]) -> None:
    """Write ``job.target`` from ``job.source`` with llama.cpp's quantiser, or with ``dry_run`` only
    say what each tensor would become. ``on_line`` gets its log. Raises EngineError."""
    log = _LineLog(on_line)
    lib.llama_backend_init()
    params = lib.llama_model_quantize_default_params()
    params.nthread = job.n_threads
    params.ftype = job.file_type
    params.allow_requantize = job.allow_requantize
    params.dry_run = job.dry_run
    # The array and what its pointers point to must outlive the call.
    keep = _imatrix_data(job.imatrix) if job.imatrix else None
    if keep is not None:
        params.imatrix = keep[0]
    code = lib.llama_model_quantize(job.source.encode(), job.target.encode(), ctypes.byref(params))
    if code != 0:
        said = [line for line in log.lines if "fail" in line or "disabled" in line]
        raise EngineError(f"llama.cpp could not quantize: {'; '.join(said) or f'code {code}'}")


class _LineLog:
    """llama.cpp's log, whole lines to a function; the last few are kept."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.lines: deque[str] = deque(maxlen=20)
        self._on_line = on_line
        self._partial = ""
        self._callback = lib.llama_log_callback(self._take)
        lib.llama_log_set(self._callback, None)

    def _take(self, level: int, text: bytes, _: object) -> None:
        self._partial += text.decode("utf-8", "replace")
        *lines, self._partial = self._partial.split("\n")
        for line in lines:
            if level != 4:  # debug
                self.lines.append(line)
                self._on_line(line)


def _imatrix_data(path: str) -> tuple[Any, list[Any]]:
    """llama_model_imatrix_data[]: by name the mean squares of what a weight is multiplied with, an
    entry of zeros at the end (``i_data`` in tools/quantize/quantize.cpp)."""
    entries = read_imatrix(path)
    kept: list[Any] = []
    data = (lib.llama_model_imatrix_data * (len(entries) + 1))()
    for slot, (name, values) in zip(data, entries.items(), strict=False):
        buffer = (ctypes.c_float * len(values)).from_buffer(values)
        kept += [name.encode(), values, buffer]
        slot.name = kept[-3]
        slot.data = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_float))
        slot.size = len(values)
    return data, kept
