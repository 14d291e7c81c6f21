"""Where a context's tensors lie and its nodes run: caches, attention, norms, several GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from pyggml import build, env
from pyggml.backend import Backend, BufferType, Device, alloc_tensors
from pyggml.dtypes import GGMLType
from pyggml.errors import OutOfMemory, UserError
from pyggml.llama.builder import Pins
from pyggml.llama.context_params import CACHE_TYPES, ContextParams
from pyggml.llama.hparams import HParams
from pyggml.llama.kv_cache import N_KV_STEP, CacheParams, KvCache, Memory, make_memory
from pyggml.llama.loader import Model
from pyggml.llama.placement import Placement
from pyggml.llama.recurrent_state import RecurrentState
from pyggml.params import FlashAttnParams
from pyggml.placeholder import plan_tensors
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

log = logging.getLogger("pyggml.context")

MIB = 1 << 20
_LESS_CACHE = ", --cache-type-k and -v, fewer --gpu-layers, or --no-kv-offload"
SMALL_BATCH = 32  # below it, and when everything is on GPUs, norms run where their layer is


# ---------------------------------------------------------------- attention
def resolve_flash_attn(model: Model, hp: HParams, params: ContextParams) -> bool:
    """Whether attention runs as one operation. Raises UserError if it must and cannot.

    It runs where the keys lie. If a device cannot, no layer does it: all compute alike.
    """
    wanted = params.flash_attn
    device = next(_without_flash_attn(model.placement, hp, params), None)
    types = f"keys of {params.type_k} and values of {params.type_v}"
    others = device is not None and any(_can(d, hp, params, 0) for d in model.devices)
    if wanted == "on" and device is not None and not others:
        raise UserError(
            f"--flash-attn on: no device can run it for this model with {types}; use auto"
        )
    use = device is None if wanted == "auto" else wanted == "on"
    if not use and CACHE_TYPES[params.type_v].is_quantized:
        name = device.name if device is not None else ""
        raise UserError(
            f"--cache-type-v {params.type_v}: quantized values need flash attention, "
            f"which {name} cannot run for this model with {types}; use f16, bf16 or f32"
        )
    if device is not None and wanted == "auto" and others:
        log.warning(
            "flash attention is off: %s cannot run it with %s and heads of %d",
            *(device.name, types, hp.n_embd_head_k),
        )
    if not use and len(set(hp.n_head_kv)) > 1:
        # transposed values of different widths cannot be written with one list of indices
        raise UserError("the layers of this model differ in width: it needs --flash-attn on")
    return use


def _without_flash_attn(
    placement: Placement, hp: HParams, params: ContextParams
) -> Iterator[Device]:
    """Devices that hold keys and cannot attend to them in one operation."""
    for il in range(hp.n_layer):
        device = keys_device(placement, il, params)
        if not _can(device, hp, params, il):
            yield device


def keys_device(placement: Placement, il: int, params: ContextParams) -> Device:
    """Where the keys of a layer lie."""
    return placement.cache(il, f"cache_k_l{il}", offload=params.kv_offload).device


def _can(device: Device, hp: HParams, params: ContextParams, il: int) -> bool:
    type_k, type_v = CACHE_TYPES[params.type_k], CACHE_TYPES[params.type_v]
    q = new_tensor(build.F32, hp.n_embd_head_k, 1, hp.n_head[il])
    k = new_tensor(type_k, hp.n_embd_head_k, N_KV_STEP, hp.n_head_kv[il])
    v = new_tensor(type_v, hp.n_embd_head_v, N_KV_STEP, hp.n_head_kv[il])
    mask = new_tensor(GGMLType.F16, N_KV_STEP, 1)
    node = build.flash_attn_ext(q, k, v, mask, FlashAttnParams(hp.kq_scale))
    return device.supports_op(node)


# ---------------------------------------------------------------- memory
def new_memory(hp: HParams, params: ContextParams, flash_attn: bool) -> Memory:
    """The caches and states of a context of resolved parameters; nothing is placed yet."""
    cache = CacheParams(
        size=params.n_ctx,
        type_k=CACHE_TYPES[params.type_k],
        type_v=CACHE_TYPES[params.type_v],
        v_trans=not (flash_attn or hp.values_in_keys),
        n_seq_max=params.n_seq_max,
        rotate=not env.integer("LLAMA_ATTN_ROT_DISABLE"),
    )
    return make_memory(hp, cache, n_ubatch=params.n_ubatch, swa_full=params.swa_full)


def place_memory(memory: Memory, model: Model, params: ContextParams) -> None:
    """Give caches and states their memory and tell the log. Raises OutOfMemory."""
    placement = model.placement

    def where(il: int, name: str) -> BufferType:
        return placement.cache(il, name, offload=params.kv_offload)

    try:
        for part in memory.parts:
            part.allocate(where, plan_tensors if model.no_alloc else alloc_tensors)
    except OutOfMemory as e:
        memory.free()
        names = sorted({where(il, t.name).name for part in memory.parts for il, t in part.by_layer})
        raise OutOfMemory(
            f"a context of {params.n_ctx} tokens needs {memory.nbytes / MIB:,.0f} MiB for keys and "
            f"values, which {_all_of(names)} not have: use a smaller --ctx-size"
            f"{'' if names == [placement.cpu.name] else _LESS_CACHE}"
            f"\n{e}"
        ) from e
    for cache in memory.caches:
        _report_cache(cache, params)
    if memory.state:
        _report_state(memory.state, params)
    _report_cache_rules(memory, placement)


def _all_of(names: Sequence[str]) -> str:
    return f"{names[0]} does" if len(names) == 1 else f"{' and '.join(names)} together do"


def _report_cache(cache: KvCache, params: ContextParams) -> None:
    """llama.cpp's lines."""
    for buffer in cache.buffers:
        log.info("%12s KV buffer size = %8.2f MiB", buffer.name, buffer.size / MIB)
    log.info(
        "size = %7.2f MiB (%6u cells, %3d layers, %2u seqs), K (%s): %7.2f MiB, V (%s): %7.2f MiB",
        *(cache.nbytes / MIB, cache.params.size, len(cache.layers), params.n_seq_max),
        *(params.type_k, cache.k_bytes / MIB, params.type_v, cache.v_bytes / MIB),
    )


def _report_state(state: RecurrentState, params: ContextParams) -> None:
    """llama.cpp's lines."""
    for buffer in state.buffers:
        log.info("%12s RS buffer size = %8.2f MiB", buffer.name, buffer.size / MIB)
    log.info(
        "size = %7.2f MiB (%6u cells, %3d layers, %2u seqs), R (f32): %7.2f MiB, "
        "S (f32): %7.2f MiB",
        *(state.nbytes / MIB, params.n_seq_max, len(state.layers), params.n_seq_max),
        *(sum(t.nbytes for t in part.values()) / MIB for part in (state.r, state.s)),
    )


def _report_cache_rules(memory: Memory, placement: Placement) -> None:
    counts: dict[str, tuple[int, int]] = {}
    for t in (t for part in memory.parts for t in part.tensors):
        use = placement.cache_rule(t.name)
        if use is not None:
            n, nbytes = counts.get(str(use.rule), (0, 0))
            counts[str(use.rule)] = n + 1, nbytes + t.nbytes
    for rule, (n, nbytes) in counts.items():
        log.info("%s: %d tensors of caches, %.2f MiB", rule, n, nbytes / MIB)


# ---------------------------------------------------------------- the scheduler
def compute_buffer_types(placement: Placement) -> list[BufferType]:
    """What each device computes in; the CPU in memory that the first GPU reads quickly."""
    pinned = placement.gpus[0].host_buffer_type() if placement.gpus else None
    default = [device.buffer_type() for device in placement.devices]
    return default if pinned is None else [*default[:-1], pinned]


def is_pipeline_parallel(placement: Placement, params: ContextParams) -> bool:
    """llama.cpp's conditions for several ubatches in flight, which cost copies of all inputs."""
    return (
        len(placement.gpus) > 1
        and placement.n_gpu_layers > placement.n_layer
        and placement.params.split_mode == "layer"
        and params.kv_offload
        and not placement.params.rules
        and all(d.caps.is_async and d.caps.events for d in placement.devices[:-1])
    )


def pin(
    sched: Scheduler, pins: Pins, placement: Placement, params: ContextParams, n_tokens: int
) -> None:
    """Tell the scheduler what its rules alone would not find (llama.cpp's graph callback).

    Norms run where their layer is, not where the layer before ended; attention runs where the
    keys lie, so that they need not be copied.
    """
    if not placement.gpus:
        return
    if n_tokens < SMALL_BATCH or placement.n_gpu_layers > placement.n_layer:
        for node, il in pins.norms:
            _pin(sched, node, placement.device(il))
    for node, il in pins.attention:
        device = keys_device(placement, il, params)
        if device is not placement.device(il):
            _pin(sched, node, device)


def _pin(sched: Scheduler, node: Tensor, device: Device) -> None:
    backend = backend_of(sched.backends, device)
    if backend.supports_op(node):
        sched.set_tensor_backend(node, backend)


def backend_of(backends: Sequence[Backend], device: Device) -> Backend:
    """The backend of a device."""
    return next(backend for backend in backends if backend.device is device)


def less_compute(placement: Placement, params: ContextParams) -> str:
    """What helps if computing takes too much memory; empty without a GPU."""
    if not placement.gpus:
        return ""
    ways = ["fewer --gpu-layers"]
    on_gpus = {gpu.buffer_type() for gpu in placement.gpus}
    if params.op_offload and not on_gpus.issuperset(placement.weights.values()):
        ways.append("--no-op-offload (weights of the CPU need no place on a GPU then)")
    return f"; so do {' or '.join(ways)}"
