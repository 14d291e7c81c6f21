"""What would lie where and run where, told without loading: the answer of --dry-run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyggml.backend import Buffer, buffer_of
from pyggml.errors import UserError
from pyggml.estimate import DeviceTime, Estimate, estimate
from pyggml.llama.context import Context, GraphSize
from pyggml.llama.loader import Model
from pyggml.llama.memory_table import DeviceUse, MemoryTable, memory_table
from pyggml.tensor import Tensor

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One weight; `bytes` as in the file, `buffer` is the name of its buffer type."""

    name: str
    type: str
    ne: tuple[int, ...]
    bytes: int
    buffer: str


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """What a layer keeps between graphs: keys and values, or a recurrent state."""

    layer: int
    bytes: int
    buffer: str


@dataclass(frozen=True, slots=True)
class RulePlace:
    """What a rule has placed, weights and caches; `places` are bytes by buffer type."""

    rule: str
    tensors: int
    bytes: int
    places: Mapping[str, int]

    def __str__(self) -> str:
        text = f"{self.rule}: {self.tensors} {'tensor' if self.tensors == 1 else 'tensors'}"
        return f"{text}, {_listed(self.places)}" if self.places else text


@dataclass(frozen=True, slots=True)
class Modelled:
    """Times that are computed and not measured, of a full ubatch (pp) and of a single token (tg).

    Both attend to a memory that is full (n_ctx).
    """

    n_tokens: int  # of the ubatch
    pp: Estimate
    tg: Estimate

    @property
    def pp_ms(self) -> float:
        return 1e3 * self.pp.seconds

    @property
    def tg_ms(self) -> float:
        return 1e3 * self.tg.seconds

    @property
    def pp_rate(self) -> float:
        """Tokens per second."""
        return self.n_tokens / self.pp.seconds

    @property
    def tg_rate(self) -> float:
        """Tokens per second."""
        return 1.0 / self.tg.seconds


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan for a model and a context."""

    tensors: tuple[TensorPlace, ...]
    kv: tuple[LayerPlace, ...]
    memory: MemoryTable
    rules: tuple[RulePlace, ...]
    pp: GraphSize
    tg: GraphSize
    modelled: Modelled | None  # None: of a device nobody knows how fast it is

    def as_json(self) -> Mapping[str, Any]:
        """The object that docs/dry-run.md describes."""
        return {
            "tensors": [
                {"name": t.name, "type": t.type, "ne": t.ne, "bytes": t.bytes, "buffer": t.buffer}
                for t in self.tensors
            ],
            "kv": [{"layer": p.layer, "bytes": p.bytes, "buffer": p.buffer} for p in self.kv],
            "devices": [_device(d) for d in self.memory.devices],
            "rules": [{"rule": r.rule, "tensors": r.tensors, "bytes": r.bytes} for r in self.rules],
            "graph": {
                name: {"nodes": size.nodes, "splits": size.splits}
                for name, size in (("pp", self.pp), ("tg", self.tg))
            },
            "modelled": self.modelled
            and {"pp_ms": self.modelled.pp_ms, "tg_ms": self.modelled.tg_ms},
        }


def _device(d: DeviceUse) -> Mapping[str, Any]:
    return {
        "name": d.name,
        "description": d.description,
        "total": d.total,
        "free": d.free,
        "model": d.use.model,
        "context": d.use.context,
        "compute": d.use.compute,
        "simulated": d.simulated,
    }


def dry_run(model: Model, context: Context) -> DryRun:
    """The plan that a model and one of its contexts, planned or real, stand for."""
    sizes = context.graph_sizes
    return DryRun(
        tensors=tuple(_tensors(model)),
        kv=tuple(_layers(context)),
        memory=memory_table(model, context),
        rules=tuple(rules_of(model, context)),
        pp=sizes[max(sizes)],
        tg=sizes[1],
        modelled=_modelled(context),
    )


def _tensors(model: Model) -> Iterator[TensorPlace]:
    for t in model.weights.tensors.values():
        yield TensorPlace(t.name, t.type.label, t.ne[: t.n_dims], t.nbytes, _buffer(t).name)


def _layers(context: Context) -> Iterator[LayerPlace]:
    """By layer; one line for each kind of buffer, as rules may part keys and values."""
    found = Counter[tuple[int, str]]()
    for part in context.memory.parts:
        for il, t in part.by_layer:
            found[il, _buffer(t).name] += t.nbytes
    for (il, name), nbytes in sorted(found.items()):
        yield LayerPlace(il, nbytes, name)


def rules_of(model: Model, context: Context) -> Iterator[RulePlace]:
    """What each rule has placed: weights, keys, values and states."""
    caches = [t for part in context.memory.parts for t in part.tensors]
    placement = model.placement
    for use in placement.rules:
        mine = [t for t in caches if placement.cache_rule(t.name) is use]
        places = Counter(use.places)
        for t in mine:
            places[_buffer(t).name] += t.nbytes
        n, nbytes = use.tensors + len(mine), use.bytes + sum(t.nbytes for t in mine)
        yield RulePlace(str(use.rule), n, nbytes, places)


def _buffer(tensor: Tensor) -> Buffer:
    buffer = buffer_of(tensor)
    assert buffer is not None, f"{tensor!r} has no place"
    return buffer


def _modelled(context: Context) -> Modelled | None:
    n_tokens = min(context.params.n_ctx, context.params.n_ubatch)
    try:
        pp, tg = (estimate(context.plan_graph(n)[0]) for n in (n_tokens, 1))
    except UserError:
        return None
    return Modelled(n_tokens, pp, tg)


# ---------------------------------------------------------------- for people
def report(model: Model, plan: DryRun) -> Iterator[str]:
    """The plan in lines."""
    yield f"{model.hparams.name or model.gguf.path.name} · {model.description}"
    yield from plan.memory.lines()
    yield from _places(plan)
    yield f"graph: pp {_size(plan.pp)}, tg {_size(plan.tg)}"
    if plan.modelled is not None:
        m = plan.modelled
        yield f"modelled pp: {m.n_tokens} tokens in {m.pp_ms:,.1f} ms, {m.pp_rate:,.2f} t/s"
        yield from (f"  {_device_time(d)}" for d in m.pp.devices)
        yield f"modelled tg: 1 token in {m.tg_ms:,.1f} ms, {m.tg_rate:,.2f} t/s"
        yield from (f"  {_device_time(d)}" for d in m.tg.devices)


def _places(plan: DryRun) -> Iterator[str]:
    """Where everything lies, by buffer type."""
    for what, things in (("weights", plan.tensors), ("keys and values", plan.kv)):
        found = Counter[str]()
        for thing in things:
            found[thing.buffer] += thing.bytes
        yield f"{what}: {_listed(found)}"
    yield from map(str, plan.rules)


def _listed(places: Mapping[str, int]) -> str:
    return ", ".join(f"{n / MIB:,.1f} MiB in {name}" for name, n in places.items())


def _device_time(d: DeviceTime) -> str:
    text = f"{d.name} computes {1e3 * d.compute:,.1f} ms in {_splits(d.n_splits)}"
    got, given = d.h2d_bytes / MIB, (d.d2h_bytes + d.peer_bytes) / MIB
    return f"{text}, gets {got:,.1f} MiB, gives {given:,.1f} MiB" if got or given else text


def _size(size: GraphSize) -> str:
    return f"{size.nodes} nodes in {_splits(size.splits)}"


def _splits(n: int) -> str:
    return "1 split" if n == 1 else f"{n} splits"
