"""What each way of placing a layer costs: time of a token and of a ubatch, and memory.

Layers of equal tensors cost the same. Copies of one of each kind are put before the last layer of
a small graph, which the real scheduler splits; what the graph takes longer is their cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyggml.backend import Backend, Buffer, BufferType, Usage, pad
from pyggml.cost import Rates
from pyggml.estimate import estimate
from pyggml.llama.builder import Builder, GraphShape
from pyggml.llama.context_params import ContextParams
from pyggml.llama.context_placement import compute_buffer_types, new_memory, pin, resolve_flash_attn
from pyggml.llama.loader import Model
from pyggml.llama.placement import Layout, Placement, Weight, place
from pyggml.llama.placement_params import ALL_LAYERS, PlacementParams
from pyggml.llama.planner_rules import OUTPUT
from pyggml.llama.weights import Layer, Want, Weights
from pyggml.placeholder import BASE, PlaceholderBuffer
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor

COPIES = 3  # of a layer, in small graphs
NONE = -1  # no layer but the last


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way to place a layer: on its device or not, and which of its matrices are on the CPU."""

    on_device: bool
    moved: frozenset[str] = frozenset()  # short names of matrices, as ffn_up_exps


ON_CPU, ON_DEVICE = Pattern(False), Pattern(True)


@dataclass(frozen=True, slots=True)
class Mode:
    """What is the same for all layers."""

    kv_offload: bool = True
    op_offload: bool = True
    no_host: bool = False
    output: bool = True  # the matrix after the last layer is on a device


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of a token and of a ubatch, and the bytes of the host's weights that they read."""

    token: float
    token_weights: float
    ubatch: float
    ubatch_weights: float

    def scaled(self, factor: float, other: LayerCost) -> LayerCost:
        """self + factor * other."""
        return LayerCost(
            self.token + factor * other.token,
            self.token_weights + factor * other.token_weights,
            self.ubatch + factor * other.ubatch,
            self.ubatch_weights + factor * other.ubatch_weights,
        )


class Layers:
    """The layers of a model that is only planned, with everything on its first device."""

    def __init__(self, model: Model, params: ContextParams, rates: Mapping[str, Rates]) -> None:
        """`model`: loaded with no_alloc. Close it in the end."""
        self.model = model
        self.rates = rates
        self.params = params.resolved(model.hparams, model.n_cores)
        self.hp = self.params.rope.apply_all(model.hparams)
        self.flash_attn = resolve_flash_attn(model, self.hp, self.params)
        self.memory = new_memory(self.hp, self.params, self.flash_attn)
        self.backends: list[Backend] = [device.init_backend() for device in model.devices]
        wants = [w for w in model.arch.weights(model.hparams) if w.name in model.weights.tensors]
        self.wants: dict[str, Want] = {w.name: w for w in wants}
        self.kinds = tuple(self._kind(il) for il in range(self.n_layer))
        self.movable = self._movable()
        self._bufts: dict[tuple[bool, bool], Mapping[str, BufferType]] = {}
        self._splits: dict[object, _Split] = {}
        self._n_kv = tuple(cache.params.size for cache in self.memory.caches)

    @property
    def n_layer(self) -> int:
        return self.hp.n_layer

    def close(self) -> None:
        for backend in self.backends:
            backend.close()

    # ------------------------------------------------------------ kinds of layers
    def _kind(self, il: int) -> tuple[object, ...]:
        """What tells layers apart."""
        prefix = f"blk.{il}."
        tensors = {
            name.removeprefix(prefix): (t.type, t.ne)
            for name, t in self.model.weights.tensors.items()
            if name.startswith(prefix)
        }
        kept = [(t.type, t.ne) for layer, t in self._kept() if layer == il]
        is_last = il == self.n_layer - 1
        return (*sorted(tensors.items()), *kept, self.hp.swa(il), is_last)

    def _kept(self) -> Iterator[tuple[int, Tensor]]:
        """Keys, values and states with their layers."""
        for part in self.memory.parts:
            yield from part.by_layer

    def _movable(self) -> tuple[str, ...]:
        """Matrices of the feed-forward, those of experts if there are any; largest first."""
        sizes: dict[str, int] = {}
        for name, t in self.model.weights.tensors.items():
            parts = name.split(".")
            if name.startswith("blk.") and parts[2].startswith("ffn_") and parts[-1] == "weight":
                sizes[parts[2]] = sizes.get(parts[2], 0) + t.nbytes
        experts = [n for n in sizes if n.endswith("_exps")]
        dense = [n for n in sizes if n in ("ffn_up", "ffn_gate", "ffn_down")]
        return tuple(sorted(experts or dense, key=lambda n: -sizes[n]))

    def moves(self, name: str, pattern: Pattern) -> bool:
        """Whether a tensor goes to the CPU: its layer, its matrix, or the bias of that."""
        return not pattern.on_device or name.split(".")[2] in pattern.moved

    # ------------------------------------------------------------ where tensors lie
    def bufts(self, *, on_device: bool, no_host: bool) -> Mapping[str, BufferType]:
        """The buffer type of each weight if everything is on the device, or on the CPU."""
        key = on_device, no_host
        if key not in self._bufts:
            model = self.model
            params = PlacementParams(
                n_gpu_layers=ALL_LAYERS if on_device else 0, fit=False, no_host=no_host
            )
            weights = [Weight(w, model.weights.tensors[n], n) for n, w in self.wants.items()]
            layout = Layout(use_mmap=True)
            found = place(params, model.devices, model.hparams, weights, layout)
            self._bufts[key] = found.weights
        return self._bufts[key]

    def buft(self, name: str, pattern: Pattern, mode: Mode) -> BufferType:
        """Where a weight of a layer lies."""
        on_device = not self.moves(name, pattern)
        return self.bufts(on_device=on_device, no_host=mode.no_host)[name]

    def nbytes(self, il: int, pattern: Pattern, mode: Mode) -> int:
        """Bytes of a layer on its device."""
        prefix, total = f"blk.{il}.", 0
        if not pattern.on_device:
            return 0
        for name, t in self.model.weights.tensors.items():
            if name.startswith(prefix) and not self.moves(name, pattern):
                total += _taken(t, self.buft(name, pattern, mode))
        if mode.kv_offload:
            device = self.model.devices[0].buffer_type()
            total += sum(_taken(t, device) for layer, t in self._kept() if layer == il)
        return total

    def ends_bytes(self, mode: Mode) -> int:
        """Bytes on the device that belong to no layer: the output."""
        device = self.model.devices[0].buffer_type()
        return sum(
            _taken(t, buft)
            for name, t in self.model.weights.tensors.items()
            if not name.startswith("blk.") and (buft := self._end(name, mode)) is device
        )

    def _end(self, name: str, mode: Mode) -> BufferType:
        """Where a weight lies that belongs to no layer."""
        on_device = mode.output or name != OUTPUT
        return self.bufts(on_device=on_device, no_host=mode.no_host)[name]

    # ------------------------------------------------------------ small graphs
    def cost(self, il: int, pattern: Pattern, mode: Mode) -> LayerCost:
        """Of a layer between its like; of the last one, what it takes more than on its device."""
        copies = 1 if il == self.n_layer - 1 else COPIES
        mode = replace(mode, output=True)  # what is not of layers is not of interest
        token = self._more(il, pattern, replace(mode, op_offload=True), 1)  # never offloaded
        ubatch = self._more(il, pattern, mode, self._n_tokens)
        return LayerCost(*(x / copies for x in (*token, *ubatch)))

    def compute(self, il: int, pattern: Pattern, mode: Mode) -> tuple[int, ...]:
        """Bytes to compute in, by backend, if a layer is placed so."""
        layer = self._split(il, pattern, replace(mode, output=True), self._n_tokens).sizes
        return tuple(max(pair) for pair in zip(layer, self._logits(mode), strict=True))

    def ends(self, mode: Mode) -> LayerCost:
        """What is always there: the embedding, the last layer on its device, the output."""
        both = [self._split(NONE, ON_DEVICE, mode, n) for n in (1, self._n_tokens)]
        return LayerCost(*(x for s in both for x in (s.seconds, s.weights)))

    @property
    def _n_tokens(self) -> int:
        return min(self.params.n_ctx, self.params.n_ubatch)

    def _more(self, il: int, pattern: Pattern, mode: Mode, n_tokens: int) -> tuple[float, float]:
        """Seconds and bytes of the host's weights that a layer, or its copies, add."""
        without, with_ = (self._split(i, pattern, mode, n_tokens) for i in (NONE, il))
        return with_.seconds - without.seconds, with_.weights - without.weights

    def _logits(self, mode: Mode) -> tuple[int, ...]:
        """Bytes to compute in for the logits of all tokens of a ubatch."""
        return self._split(NONE, ON_DEVICE, mode, self._n_tokens, all_logits=True).sizes

    def _split(
        self, il: int, pattern: Pattern, mode: Mode, n_tokens: int, *, all_logits: bool = False
    ) -> _Split:
        """Copies of a layer, then the last one on its device; or the last one with the pattern.

        The last layer computes no more than the rows whose logits are wanted.
        """
        if il == NONE:
            pattern = ON_DEVICE
        key = (il if il == NONE else self.kinds[il], pattern, mode, n_tokens, all_logits)
        if key not in self._splits:
            shape = GraphShape(n_tokens, n_tokens if all_logits else 1, self._n_kv)
            self._splits[key] = self._new_split(il, pattern, mode, shape)
        return self._splits[key]

    def _new_split(self, il: int, pattern: Pattern, mode: Mode, shape: GraphShape) -> _Split:
        last = self.n_layer - 1
        params = replace(self.params, kv_offload=mode.kv_offload, op_offload=mode.op_offload)
        placement = self._placement(il, pattern)
        self._place_memory(il, pattern, mode)
        builder = Builder(
            self.hp, shape, self.memory, flash_attn=self.flash_attn, n_ctx=params.n_ctx
        )
        if il in (NONE, last):
            layers = [self._layer(last, pattern, mode)]
        else:
            # each with tensors of its own: a weight that is copied once would stay for the next
            layers = [self._layer(il, pattern, mode) for _ in range(COPIES)]
            layers.append(self._layer(last, ON_DEVICE, mode))
        weights = Weights(
            {k: t for part in (self._ends(mode), *layers) for k, t in part.items()}, 0
        )
        numbers = [last] if len(layers) == 1 else [*[il] * COPIES, last]
        weights.layers = tuple(map(Layer, layers, numbers))
        builder.graph.expand(self.model.arch.graph(builder, weights))
        sched = Scheduler(
            self.backends,
            compute_buffer_types(placement),
            op_offload=mode.op_offload,
            no_alloc=True,
            debug=0,
        )
        pin(sched, builder.pins, placement, params, shape.n_tokens)
        sizes = tuple(sched.reserve_size(builder.graph))
        found = estimate(sched, rates=self.rates)
        return _Split(found.seconds, found.host_weights, sizes)

    def _placement(self, il: int, pattern: Pattern) -> Placement:
        layers = list(self.model.placement.layers)
        if il != NONE and not pattern.on_device:
            layers[il] = self.model.devices[-1]
        return replace(self.model.placement, layers=tuple(layers))

    def _place_memory(self, il: int, pattern: Pattern, mode: Mode) -> None:
        """Let keys and values lie where they belong."""
        device, cpu = (self.model.devices[i].buffer_type() for i in (0, -1))
        for layer, t in self._kept():
            away = not mode.kv_offload or (layer == il and not pattern.on_device)
            t.buffer, t.data = _buffer(cpu if away else device, Usage.ANY), BASE

    def _layer(self, il: int, pattern: Pattern, mode: Mode) -> Mapping[str, Tensor]:
        """Fresh tensors of a layer, where the pattern wants them."""
        prefix = f"blk.{il}."
        return {
            name: self._moved(t, self.buft(name, pattern, mode))
            for name, t in self.model.weights.tensors.items()
            if name.startswith(prefix)
        }

    def _ends(self, mode: Mode) -> Mapping[str, Tensor]:
        return {
            name: self._moved(t, self._end(name, mode))
            for name, t in self.model.weights.tensors.items()
            if not name.startswith("blk.")
        }

    def _moved(self, tensor: Tensor, buft: BufferType) -> Tensor:
        moved = Tensor(tensor.type, tensor.ne, name=tensor.name)
        moved.buffer, moved.data = _buffer(buft, Usage.WEIGHTS), BASE
        return moved


@dataclass(frozen=True, slots=True)
class _Split:
    """What a small graph takes: seconds, bytes of the host's weights, bytes to compute in."""

    seconds: float
    weights: float
    sizes: tuple[int, ...]


def _buffer(buft: BufferType, usage: Usage) -> Buffer:
    buffer = PlaceholderBuffer(buft, 0)
    buffer.set_usage(usage)
    return buffer


def _taken(tensor: Tensor, buft: BufferType) -> int:
    return pad(buft.alloc_size(tensor), buft.alignment)


def patterns_of(movable: Sequence[str]) -> tuple[Pattern, ...]:
    """All ways to place a layer; the first is the CPU's."""
    found = [ON_CPU]
    for bits in range(1 << len(movable)):
        found.append(Pattern(True, frozenset(n for i, n in enumerate(movable) if bits >> i & 1)))
    return tuple(found)
