"""What of a model lies where: layers on devices, weights and caches in buffer types (llama.cpp)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyggml.backend import BufferType, Device, DeviceType
from pyggml.errors import ConfigError, ModelError
from pyggml.llama.hparams import HParams
from pyggml.llama.placement_devices import (
    ON_CPU,
    assign_layers,
    choose_devices,
    is_gpu,
    shares_of,
)
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.placement_probe import Support
from pyggml.llama.placement_rules import CPU, Rule
from pyggml.llama.weights import INPUT, OUTPUT, Want
from pyggml.tensor import Tensor

log = logging.getLogger("pyggml.placement")

MIB = 1 << 20
Place = tuple[Device, BufferType]


@dataclass(slots=True)
class RuleUse:
    """What a rule has done to the weights."""

    rule: Rule
    tensors: int = 0
    bytes: int = 0
    shadowed: int = 0  # tensors that match, and that an earlier rule has placed
    places: dict[str, int] = field(default_factory=dict)  # bytes per buffer type
    unusable: list[str] = field(default_factory=list)  # weights that cannot be used there


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision for one model.

    `layers` holds the device of each layer, and last that of the output.
    """

    params: PlacementParams
    devices: tuple[Device, ...]  # GPUs in order of use, accelerators, the CPU
    layers: tuple[Device, ...]
    weights: Mapping[str, BufferType]  # by the names of wants
    rules: tuple[RuleUse, ...]

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(d for d in self.devices if is_gpu(d))

    @property
    def cpu(self) -> Device:
        return self.devices[-1]

    @property
    def n_layer(self) -> int:
        """Layers without the output, those that only predict further tokens included."""
        return len(self.layers) - 1

    @property
    def n_gpu_layers(self) -> int:
        """Layers on GPUs; the output counts as one."""
        return sum(is_gpu(device) for device in self.layers)

    def device(self, layer: int) -> Device:
        """Where a layer (or INPUT, OUTPUT) is computed if nothing else is decided."""
        return self.cpu if layer == INPUT else self.layers[-1 if layer == OUTPUT else layer]

    def cache(self, il: int, name: str, *, offload: bool = True) -> BufferType:
        """Where keys, values or states of a layer lie; without `offload` on the CPU.

        Rules that name caches are stronger than both.
        """
        use = self.cache_rule(name)
        if use is not None:
            return named_buffer_type(use.rule, self.devices)
        return (self.device(il) if offload else self.cpu).buffer_type()

    def cache_rule(self, name: str) -> RuleUse | None:
        """The rule that decides about a tensor of keys, values or states."""
        matching = (u for u in self.rules if u.rule.names_caches and u.rule.matches(name))
        return next(matching, None)

    def report(self, caches: Iterable[str]) -> None:
        """Tell the log; warn of rules that place nothing, caches of these names included."""
        n_gpu, n_all, main = self.n_gpu_layers, len(self.layers), self.params.main_gpu
        if main and self.gpus and self.params.split_mode != "none":
            log.warning("--main-gpu %d has no effect without --split-mode none", main)
        for gpu in self.gpus:
            free = gpu.memory().free // MIB
            log.info("using device %s (%s) - %d MiB free", gpu.name, gpu.description, free)
        if self.gpus:
            if n_gpu:
                log.info("offloading output layer to GPU")
                log.info("offloading %d repeating layers to GPU", n_gpu - 1)
            log.info("offloaded %d/%d layers to GPU", n_gpu, n_all)
        useful = {id(use) for use in map(self.cache_rule, caches) if use is not None}
        for use in self.rules:
            _report_rule(use, of_caches=id(use) in useful)


def cache_names(hp: HParams) -> Iterator[str]:
    """What the tensors of keys, values and states are called."""
    for il in range(hp.n_layer):
        if hp.recurrent(il):
            yield from (f"cache_r_l{il}", f"cache_s_l{il}")
        else:
            yield f"cache_k_l{il}"
            if not hp.values_in_keys:
                yield f"cache_v_l{il}"


def _report_rule(use: RuleUse, *, of_caches: bool) -> None:
    if use.tensors:
        places = ", ".join(f"{n / MIB:.2f} MiB in {name}" for name, n in use.places.items())
        log.info("%s: %d tensors, %s", use.rule, use.tensors, places)
    elif use.shadowed:
        log.warning(
            "%s places no tensor: earlier rules have placed all %d that match",
            *(use.rule, use.shadowed),
        )
    elif not of_caches:
        log.warning("%s places no tensor: no name matches", use.rule)
    if use.unusable:
        log.warning(
            "%s: %s cannot compute with %s there, which is copied back for each use",
            *(use.rule, use.rule.buft, _some(use.unusable)),
        )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


# ---------------------------------------------------------------- names of buffer types
def named_buffer_type(rule: Rule, devices: Sequence[Device]) -> BufferType:
    """The buffer type that a rule names, in any case of letters. Raises ConfigError."""
    wanted = rule.buft.lower()
    if wanted == CPU.lower():
        return devices[-1].buffer_type()
    for device in devices:
        if device.buffer_type().name.lower() == wanted:
            return device.buffer_type()
    known = ", ".join(buffer_type_names(devices))
    raise ConfigError(f"{rule}: unknown buffer type {rule.buft!r}\navailable buffer types: {known}")


def buffer_type_names(devices: Sequence[Device]) -> list[str]:
    """What rules may name, the CPU first."""
    names = [device.buffer_type().name for device in reversed(devices)]
    return list(dict.fromkeys(names))


def use_devices(params: PlacementParams, available: Sequence[Device]) -> tuple[Device, ...]:
    """As `choose_devices`. Raises ConfigError if a rule names no buffer type of those devices."""
    devices = choose_devices(params, available)
    for rule in params.rules:
        try:
            named_buffer_type(rule, devices)
        except ConfigError:
            for device in available:
                if device.buffer_type().name.lower() == rule.buft.lower():
                    raise ConfigError(
                        f"{rule}: {device.name} is not among the devices in use "
                        f"(--device, --split-mode none)\navailable buffer types: "
                        f"{', '.join(buffer_type_names(devices))}"
                    ) from None
            raise
    return devices


# ---------------------------------------------------------------- where each weight goes
@dataclass(frozen=True, slots=True)
class Layout:
    """What else decides about weights."""

    repack: bool = True
    use_mmap: bool = True


def cpu_list(devices: Sequence[Device], *, repack: bool, no_host: bool) -> list[Place]:
    """Where weights of the CPU may lie, best first; each with the device that is asked."""
    cpus = [d for d in devices if d.type == DeviceType.CPU]
    plain = [(d, d.buffer_type()) for d in cpus]
    accelerators = [(d, d.buffer_type()) for d in devices if d.type == DeviceType.ACCEL]
    places = [(d, b) for d, b in accelerators if b not in [buft for _, buft in plain]]
    hosts = ((d, d.host_buffer_type()) for d in devices if is_gpu(d) and not no_host)
    pinned = next(((d, b) for d, b in hosts if b is not None), None)
    if pinned is not None:
        places.append(pinned)
    if repack:
        places += [(d, b) for d in cpus for b in d.extra_buffer_types()]
    return places + plain


def gpu_list(device: Device, cpu_places: Sequence[Place]) -> list[Place]:
    """Where weights of a GPU's layers may lie, best first."""
    own = (device.buffer_type(), *device.extra_buffer_types())
    return [*((device, buft) for buft in own), *cpu_places]


@dataclass(frozen=True, slots=True)
class Weight:
    """A wanted tensor and the name that its data has in the file."""

    want: Want
    tensor: Tensor
    source: str

    @property
    def names(self) -> tuple[str, ...]:
        """What rules may call it: tied tensors have two names."""
        return tuple(dict.fromkeys((self.want.name, self.source)))


class _Placer:
    """Chooses buffer types one after the other and counts what the rules do."""

    def __init__(self, placement: Placement, layout: Layout, support: Support) -> None:
        self.placement = placement
        self.layout = layout
        self.support = support
        self.bufts = [named_buffer_type(u.rule, placement.devices) for u in placement.rules]
        self.cpu_places = cpu_list(
            placement.devices, repack=layout.repack, no_host=placement.params.no_host
        )
        self._of_device = {d: gpu_list(d, self.cpu_places) for d in placement.gpus}

    def place(self, weight: Weight) -> BufferType:
        want, tensor = weight.want, weight.tensor
        use, wanted = self._overridden(weight)
        layer_device = self.placement.device(want.layer)
        places = self._of_device.get(layer_device, self.cpu_places)
        if wanted is self.placement.cpu.buffer_type():
            # llama.cpp: the CPU's word means the best of its buffer types
            places = [*self.cpu_places, *places]
        elif wanted is not None:
            if use is not None and not self.support(wanted.device, wanted, want.op, tensor):
                use.unusable.append(want.name)
            return self._counted(use, tensor, wanted)
        for device, buft in places:
            if self.support(device, buft, want.op, tensor):
                return self._counted(use, tensor, self._mapped(buft))
        raise ModelError(
            f"tensor {tensor.name!r} is {tensor.type.label}, which no device can use for "
            f"{want.op.name}: convert the model to another type"
        )

    def _mapped(self, buft: BufferType) -> BufferType:
        """With a mapped file pinned memory would be a second copy."""
        if self.layout.use_mmap and buft is buft.device.host_buffer_type():
            return self.placement.cpu.buffer_type()
        return buft

    def _overridden(self, weight: Weight) -> tuple[RuleUse | None, BufferType | None]:
        first, wanted = None, None
        for use, buft in zip(self.placement.rules, self.bufts, strict=True):
            if not any(use.rule.matches(name) for name in weight.names):
                continue
            if first is None:
                first, wanted = use, buft
            else:
                use.shadowed += 1
        return first, wanted

    def _counted(self, use: RuleUse | None, tensor: Tensor, buft: BufferType) -> BufferType:
        if use is not None:
            nbytes = tensor.nbytes
            use.tensors += 1
            use.bytes += nbytes
            use.places[buft.name] = use.places.get(buft.name, 0) + nbytes
            log.debug(
                "tensor %s (%d MiB %s) buffer type overridden to %s",
                *(tensor.name, nbytes // MIB, tensor.type.label, buft.name),
            )
        return buft


def place(
    params: PlacementParams,
    devices: Sequence[Device],
    hp: HParams,
    weights: Iterable[Weight],
    layout: Layout,
    support: Support | None = None,
) -> Placement:
    """Decide for a model; `devices` as `choose_devices` returns them.

    Whoever tries many placements of a model keeps the Support. Raises ConfigError, ModelError.
    """
    gpus = [d for d in devices if is_gpu(d)]
    shares = shares_of(params, gpus, devices[-1])
    positions = assign_layers(hp.n_layer + hp.n_nextn, params.n_gpu_layers, shares)
    layers = tuple(devices[-1] if i == ON_CPU else gpus[i] for i in positions)
    for il, device in enumerate(layers):
        is_swa = il < hp.n_layer and hp.swa(il)
        log.debug("layer %3d assigned to device %s, is_swa = %d", il, device.name, is_swa)
    uses = tuple(map(RuleUse, params.rules))
    placement = Placement(params, tuple(devices), layers, {}, uses)
    n_used = max(hp.experts.n_used, default=1) if hp.experts else 1
    placer = _Placer(placement, layout, support or Support(n_used))
    return replace(placement, weights={w.want.name: placer.place(w) for w in weights})
