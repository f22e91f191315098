"""Tokens a second, predicted from bytes and bandwidths. Pure.

Decode reads every active weight and the cells in use once a token: bytes over bandwidth, device by
device. On a fast card that is half of it: the rest is kernels, about two dozen a layer, each of
which costs the same however little it reads. Prefill is bound by arithmetic, by weights that are
read once a ubatch, and by host weights that cross the bus to the first card once a ubatch (op
offload).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgellm.devices import Gpu, Host
from edgellm.gguf.shape import LayerShape, ModelShape
from edgellm.planner.memo import remembered
from edgellm.planner.placement import HOST
from edgellm.planner.plan import PlanParams, Speed
from edgellm.planner.types import row_bytes

GB: Final = 1e9
DEPTH: Final = 2048
"""Cells in use when decode speed is quoted, whatever the context: so that a larger n_ctx, which
costs nothing until it is filled, does not look slower."""


@dataclass(frozen=True)
class Reads:
    """Bytes that one token reads in a block, and the kernels that a card runs for it."""

    dense: int
    expert: int
    cache: float
    kernels: int = 0
    logits: int = 0
    """Of the output layer: what is sorted for the sampler."""


@dataclass(frozen=True)
class Fixed:
    """Seconds that no bandwidth explains, a token. The defaults are a card's, with CUDA graphs."""

    layer: float = 0.0
    kernel: float = 2e-6
    """Launching it, filling the card and emptying it, however little it reads."""
    step: float = 150e-6
    """Scheduling a step, starting it and fetching what it gave."""
    logit: float = 2e-9
    """Sorting the candidates."""

    def seconds(self, reads: Reads) -> float:
        step = self.step + self.logit * reads.logits if reads.logits else 0.0
        return self.layer + self.kernel * reads.kernels + step


FLAT: Final = Fixed(layer=60e-6, kernel=0.0, step=0.0, logit=0.0)
"""Of a CPU, whose threads meet after every operation, and of a device nobody knows."""


@dataclass(frozen=True)
class Card:
    """What a device can do: bytes a second from its memory, TFLOP/s of llama.cpp's quantised
    products (not the card's peak), bytes a second over its bus."""

    bandwidth: float
    tflops: float
    bus: float = 12 * GB
    fixed: Fixed = Fixed()
    basis: str = "table"
    latency: float = 0.0
    """Seconds to its machine and back; 0: this one."""
    link: float = float("inf")
    """Bytes a second to its machine."""

    @property
    def is_remote(self) -> bool:
        return self.latency > 0.0

    def hop(self, n_embd: int, n_logits: int = 0) -> float:
        """Seconds a token that going there costs: hidden values there and back, and the logits
        where the output layer is there, all f32, one answer waited for (ggml-rpc.cpp sends
        without waiting, and waits when it reads)."""
        if not self.is_remote:
            return 0.0
        return self.latency + 4 * (2 * n_embd + n_logits) / self.link

    def seconds(self, reads: Reads) -> tuple[float, float]:
        """Seconds a token of a block: (dense and cache, experts)."""
        dense = (reads.dense + reads.cache) / self.bandwidth + self.fixed.seconds(reads)
        return dense, reads.expert / self.bandwidth


_PINNED: Final = 0.8
"""Share of the bus that copies from pinned memory (the host buffer of load mode none) reach:
39 GB/s of a PCIe 5 x16 on an H200."""
_PAGEABLE: Final = 7 * GB
"""Copies from a mapped file go through the driver's staging buffer: 5 to 8 GB/s on an H200."""
OFFLOAD_BATCH: Final = 32
"""Tokens from which ggml offloads an operation of host weights (op_offload_min_batch_size)."""

_EFFICIENCY: Final = 0.75
"""Share of the nominal bandwidth that quantised matrix-vector products reach."""
_MOST_UNPACKED: Final = 2100 * GB
"""They unpack no more than this a second, whatever the memory could give: the same layers with
twice the bytes (Qwen3 4B and 8B on an H200) take 1.0 ms longer, not 0.6."""

HOST_PART: Final = 0.2e-3
"""Seconds a token that crossing to layers on the host costs, however few, beside their bytes: what
45 measured placements with a part on the host are nearest to."""

_LAUNCH: Final = 2.5
"""A kernel of a prompt takes this many times one of a captured graph: no graph fits its shapes."""
_EXPERT_TFLOPS: Final = 0.37
"""Share of a card's arithmetic that experts reach: each sees a few dozen tokens of a ubatch."""

_CARDS: Final = (
    # name pattern, GB/s, TFLOP/s of quantised products, bus GB/s
    (r"H200", 4800, 165, 50),  # 9,000 to 10,000 prompt tokens a second of an 8B
    (r"H100", 3350, 165, 50),
    (r"A100.*80", 2039, 100, 25),
    (r"A100", 1555, 100, 25),
    (r"L40S?", 864, 180, 25),
    (r"\bL4\b", 300, 60, 12),
    (r"RTX PRO 6000", 1792, 250, 50),
    (r"RTX 6000 Ada", 960, 180, 25),
    (r"RTX A6000", 768, 77, 25),
    (r"5090 Laptop", 896, 120, 25),
    (r"5090", 1792, 210, 50),
    (r"5080", 960, 112, 50),
    (r"5070 Ti", 896, 88, 50),
    (r"5070", 672, 62, 50),
    (r"5060 Ti", 448, 47, 25),
    (r"5060", 448, 38, 25),
    (r"4090 Laptop", 576, 80, 12),
    (r"4090", 1008, 165, 25),
    (r"4080", 717, 97, 25),
    (r"4070 Ti SUPER", 672, 88, 25),
    (r"4070 Laptop", 256, 40, 12),
    (r"4070", 504, 58, 25),
    (r"4060 Ti", 288, 44, 12),
    (r"4060 Laptop", 256, 30, 12),
    (r"4060", 272, 30, 12),
    (r"4050", 192, 25, 12),
    (r"3090", 936, 71, 25),
    (r"3080 Ti", 912, 68, 25),
    (r"3080", 760, 59, 25),
    (r"3070", 448, 40, 25),
    (r"3060 Ti", 448, 32, 25),
    (r"3060", 360, 25, 25),
    (r"3050", 224, 18, 12),
    (r"2080 Ti", 616, 54, 12),
    (r"2080", 448, 40, 12),
    (r"2070", 448, 32, 12),
    (r"2060", 336, 26, 12),
    (r"1660", 288, 10, 12),
    (r"1650 Max-Q", 112, 5, 12),
    (r"1650", 128, 6, 12),
    (r"1080 Ti", 484, 11, 12),
    (r"1080", 320, 9, 12),
    (r"1070", 256, 6.5, 12),
    (r"1060", 192, 4.4, 12),
    (r"1050", 112, 2, 12),
    (r"\bT4\b", 320, 32, 12),
    (r"P40", 347, 11, 12),
    (r"V100", 900, 110, 12),
    (r"7900 XTX", 960, 100, 25),
    (r"7900 XT", 800, 85, 25),
    (r"7800 XT", 624, 65, 25),
    (r"7700 XT", 432, 55, 25),
    (r"7600", 288, 38, 12),
    (r"9070 XT", 640, 95, 25),
    (r"9070", 640, 72, 25),
    (r"9060 XT", 320, 50, 25),
    (r"6900 XT|6950", 512, 40, 25),
    (r"6800", 512, 36, 25),
    (r"6700 XT", 384, 25, 25),
    (r"6600", 224, 17, 12),
    (r"MI210", 1638, 150, 25),
    (r"MI50", 1024, 26, 12),
    (r"A770", 560, 60, 25),
    (r"A750", 512, 50, 25),
    (r"B580", 456, 58, 12),
    (r"M[1-5] Ultra", 800, 50, 800),
    (r"M4 Max", 546, 34, 546),
    (r"M[1-3] Max", 400, 26, 400),
    (r"M[45] Pro", 273, 17, 273),
    (r"M[1-3] Pro", 200, 12, 200),
    (r"M5", 153, 12, 153),
    (r"M4", 120, 8, 120),
    (r"M[123]", 100, 6, 100),
)
_UNKNOWN_BY_SIZE: Final = ((20, 700, 60), (14, 400, 45), (10, 330, 30), (7, 270, 25), (0, 190, 15))
"""(GiB from, GB/s, TFLOP/s) of a card nobody named: what such cards usually have."""

HOST_BANDWIDTH: Final = 45 * GB
"""Two channels of DDR4-3200 to DDR5-5600 reach 35-70 GB/s."""
CORE_BANDWIDTH: Final = 8 * GB
"""What one core's quantised dot products get through; a few cores do not use up the memory's."""


def card(gpu: Gpu) -> Card:
    """The table's entry for ``gpu``, else a typical one for its size; a worker's as measured."""
    if gpu.endpoint is not None:
        return _remote_card(gpu)
    for pattern, bandwidth, tflops, bus in _CARDS:
        if re.search(pattern, gpu.name, re.IGNORECASE):
            return Card(_reached(bandwidth), tflops, bus * GB)
    if gpu.integrated:
        return Card(HOST_BANDWIDTH, 2, HOST_BANDWIDTH, basis="unknown device")
    gib = gpu.total / 2**30
    _, bandwidth, tflops = next(row for row in _UNKNOWN_BY_SIZE if gib >= row[0])
    return Card(_reached(bandwidth), tflops, basis="unknown device")


def _reached(bandwidth: float) -> float:
    """Bytes a second of quantised weights, of a memory of so many GB/s."""
    return min(bandwidth * GB * _EFFICIENCY, _MOST_UNPACKED)


def _remote_card(gpu: Gpu) -> Card:
    """What a worker showed: the protocol does not tell what kind of device it has."""
    bandwidth = gpu.bandwidth or HOST_BANDWIDTH
    link = gpu.link_bandwidth or 125e6  # 1 Gbit/s
    # GPUs do some 60 to 150 operations for each byte of bandwidth, CPUs some 10.
    per_byte = 60 if bandwidth > 150 * GB else 10
    return Card(
        bandwidth,
        bandwidth * per_byte / 1e12,
        bus=link,
        fixed=FLAT,
        basis="measured" if gpu.bandwidth else "unknown device",
        latency=max(gpu.link_latency_s, 1e-6),
        link=link,
    )


def host_card(host: Host, measured: float | None = None) -> Card:
    """The CPU: its memory's bandwidth (as measured, else typical), about 0.05 TFLOP/s a core."""
    cores = max(host.n_physical, 1)
    bandwidth = min(measured or HOST_BANDWIDTH, CORE_BANDWIDTH * cores)
    return Card(bandwidth, 0.05 * cores, fixed=FLAT)


def active_bytes(shape: ModelShape, il: int) -> tuple[int, int]:
    """Bytes of block ``il`` that one token reads: (dense, expert)."""
    layer = shape.layers[il]
    expert = layer.expert_bytes
    dense = layer.n_bytes - expert
    if expert and shape.n_expert:
        used = layer.n_expert_used or shape.n_expert_used or shape.n_expert
        expert = expert * used // shape.n_expert
    return dense, expert


_MIXING: Final = 5
"""What a block runs besides its tensors: positions turned into K and Q, K and V kept, attention and
putting its parts together. A recurrent block has about as many steps."""


def kernels(layer: LayerShape) -> int:
    """Kernels a card runs for a block and token: one a tensor, one more a matrix (the input is
    quantised first), and what mixes tokens. Counted from the header, so that it costs nothing."""
    matrices = sum(1 for t in layer.tensors if len(t.dims) > 1 and not t.name.endswith(".bias"))
    return len(layer.tensors) + matrices + _MIXING


_OUTPUT_KERNELS: Final = 3
"""The last norm, and the product with the vocabulary."""


def output_read_bytes(shape: ModelShape) -> int:
    """Bytes of the output layer, read once a token."""
    own = sum(t.n_bytes for t in shape.output_tensors)
    return own + (shape.tied_tensor.n_bytes if shape.tied_tensor else 0)


def predict(
    shape: ModelShape,
    params: PlanParams,
    layer_device: Sequence[int],
    cards: Sequence[Card],
    host: Card,
) -> Speed:
    """Decode and prefill of one stream under ``params``."""
    seconds = decode_seconds(shape, params, layer_device, cards, host)
    decode = sum(seconds.values())
    prefill = _prefill_seconds(shape, params, layer_device, cards, host)
    hops = hop_seconds(shape, layer_device, cards)
    decode += hops
    # A whole ubatch crosses at once; only its last token's logits come back.
    width = sum(4 * 2 * shape.n_embd / cards[d].link for d in _remote(layer_device, cards))
    waits = sum(cards[d].latency for d in _remote(layer_device, cards))
    prefill += width + waits / max(params.n_ubatch, 1)
    slowest = max(seconds, key=lambda d: seconds[d], default=HOST)
    launches = _launch_seconds(shape, params, layer_device, cards)
    basis = next((c.basis for c in cards if c.basis != "table"), "table")
    return Speed(
        prefill_tps=1 / prefill if prefill > 0 else 0.0,
        decode_tps=1 / decode if decode > 0 else 0.0,
        basis=basis,
        bottleneck=_bottleneck(slowest, seconds, launches.get(slowest, 0.0))
        if hops < seconds.get(slowest, 0.0)
        else f"the network ({100 * hops / decode:.0f} % of a token's time)",
    )


def _remote(layer_device: Sequence[int], cards: Sequence[Card]) -> list[int]:
    """The devices in use that are in other machines."""
    return [d for d in sorted(set(layer_device)) if d != HOST and cards[d].is_remote]


def hop_seconds(shape: ModelShape, layer_device: Sequence[int], cards: Sequence[Card]) -> float:
    """Seconds a token that the network takes."""
    last = layer_device[-1] if layer_device else HOST
    return sum(
        cards[d].hop(shape.n_embd, shape.n_vocab if d == last else 0)
        for d in _remote(layer_device, cards)
    )


def rate(tps: float) -> str:
    """Tokens a second for people: 8.7, 28, 1,250."""
    return f"{tps:.1f}" if tps < 20 else f"{tps:,.0f}"


def _bottleneck(slowest: int, seconds: dict[int, float], launches: float) -> str:
    """Where a token's time goes; ``launches``: of a card's time, what is not reading."""
    total, took = sum(seconds.values()) or 1.0, seconds.get(slowest, 0.0)
    if slowest == HOST:
        return f"host memory bandwidth ({100 * took / total:.0f} % of a token's time)"
    reading = took - launches
    what = "memory bandwidth" if reading >= launches else "kernel launches"
    return f"GPU {slowest} {what} ({100 * max(reading, launches) / total:.0f} % of a token's time)"


def _launch_seconds(
    shape: ModelShape, params: PlanParams, layer_device: Sequence[int], cards: Sequence[Card]
) -> dict[int, float]:
    """The fixed part of a token's seconds on each card."""
    seconds: dict[int, float] = {}
    for il, where in enumerate(layer_device):
        reads = layer_reads(shape, params, il)
        if reads is not None and where != HOST:
            seconds[where] = seconds.get(where, 0.0) + cards[where].fixed.seconds(reads)
    return seconds


def decode_seconds(
    shape: ModelShape,
    params: PlanParams,
    layer_device: Sequence[int],
    cards: Sequence[Card],
    host: Card,
) -> dict[int, float]:
    """Seconds a token, by device."""
    seconds: dict[int, float] = {}
    for il, where in enumerate(layer_device):
        reads = layer_reads(shape, params, il)
        if reads is None:
            continue
        dense, _ = (host if where == HOST else cards[where]).seconds(reads)
        at = HOST if il < params.n_cpu_moe else where
        _, expert = (host if at == HOST else cards[at]).seconds(reads)
        seconds[where] = seconds.get(where, 0.0) + dense
        seconds[at] = seconds.get(at, 0.0) + expert
    if HOST in layer_device and set(layer_device) != {HOST}:
        seconds[HOST] += HOST_PART
    return seconds


def _prefill_seconds(
    shape: ModelShape,
    params: PlanParams,
    layer_device: Sequence[int],
    cards: Sequence[Card],
    host: Card,
) -> float:
    """Seconds a prompt token: arithmetic, and once a ubatch a card's kernels, its weights, and
    host weights that go to the first card (ggml_backend_sched_backend_id_from_cur and its copies
    in ggml-backend.cpp)."""
    n_ubatch = max(params.n_ubatch, 1)
    offloads = bool(cards) and not cards[0].is_remote and n_ubatch >= OFFLOAD_BATCH
    arithmetic = moved = once = 0.0
    for il, where in enumerate(layer_device[:-1]):
        reads = layer_reads(shape, params, il)
        if reads is None:
            continue
        at = HOST if il < params.n_cpu_moe else where
        touched = _touched_share(shape, il, n_ubatch) * shape.layers[il].expert_bytes
        for active, whole, place, share in (
            (reads.dense, float(reads.dense), where, 1.0),
            (reads.expert, touched, at, 1.0 if at == HOST else _EXPERT_TFLOPS),
        ):
            doing = (cards[0] if offloads else host) if place == HOST else cards[place]
            arithmetic += _flops(active) / (doing.tflops * 1e12 * share)
            moved += whole if place == HOST and offloads else 0.0
            once += whole / doing.bandwidth if place != HOST else 0.0
        once += reads.kernels * _LAUNCH * cards[where].fixed.kernel if where != HOST else 0.0
    arithmetic += _output_seconds(shape, params, layer_device, cards, host)
    once += moved / copy_bandwidth(params, cards[0]) if moved else 0.0
    return arithmetic + once / n_ubatch


def _output_seconds(
    shape: ModelShape,
    params: PlanParams,
    layer_device: Sequence[int],
    cards: Sequence[Card],
    host: Card,
) -> float:
    """The output layer's arithmetic a prompt token: only positions with logits pass it."""
    at = layer_device[-1] if layer_device else HOST
    share = min((params.n_outputs_max or params.n_ubatch) / max(params.n_ubatch, 1), 1.0)
    tflops = (host if at == HOST else cards[at]).tflops
    return share * _flops(output_read_bytes(shape)) / (tflops * 1e12)


def copy_bandwidth(params: PlanParams, card: Card) -> float:
    """Bytes a second from host weights to ``card``."""
    pinned = card.bus * _PINNED
    return min(pinned, _PAGEABLE) if params.use_mmap and card.bus < card.bandwidth else pinned


def _touched_share(shape: ModelShape, il: int, n_tokens: int) -> float:
    """The share of a layer's experts that ``n_tokens`` tokens choose: only those are copied."""
    layer = shape.layers[il]
    used = layer.n_expert_used or shape.n_expert_used
    if not used or used >= shape.n_expert:
        return 1.0
    return 1.0 - (1.0 - used / shape.n_expert) ** n_tokens


def layer_reads(shape: ModelShape, params: PlanParams, il: int) -> Reads | None:
    """What a token reads in block ``il`` (the output layer is the last); None: not in the graph."""
    if il == shape.n_layer_all:
        n_logits = max(shape.n_vocab, 1)
        return Reads(output_read_bytes(shape), 0, 0.0, _OUTPUT_KERNELS, n_logits)
    layer = shape.layers[il]
    if layer.is_nextn:
        return None
    known: tuple[int, int, int] = remembered(
        shape, ("active", il), lambda: (*active_bytes(shape, il), kernels(layer))
    )
    dense, expert, n_kernels = known
    depth = min(params.n_ctx_seq or params.n_ctx, DEPTH, shape.n_swa if layer.is_swa else DEPTH)
    width = 0
    if layer.has_kv:
        # a quantised cache is unpacked as it is read: no faster than f16
        width = row_bytes("f16", layer.k_width) + row_bytes("f16", layer.v_width)
    cache = depth * width + 8.0 * (layer.r_width + layer.s_width)
    return Reads(dense, expert, cache, n_kernels)


def _flops(n_bytes: float) -> float:
    """About two operations a weight, at some 4.5 bits a weight."""
    return 2 * n_bytes * 8 / 4.5
