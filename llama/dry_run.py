"""What would lie where and run where, told without loading: the answer of --dry-run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyggml.backend import Buffer, buffer_of
from pyggml.errors import UserError
from pyggml.estimate import estimate
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


@dataclass(frozen=True, slots=True)
class Modelled:
    """Milliseconds, computed and not measured: of a full ubatch and of a single token.

    Both attend to a memory that is full (n_ctx).
    """

    n_tokens: int  # of the ubatch
    pp_ms: float
    tg_ms: float

    @property
    def pp_rate(self) -> float:
        """Tokens per second."""
        return 1e3 * self.n_tokens / self.pp_ms

    @property
    def tg_rate(self) -> float:
        """Tokens per second."""
        return 1e3 / self.tg_ms


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
        rules=tuple(_rules(model, context)),
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


def _rules(model: Model, context: Context) -> Iterator[RulePlace]:
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
        pp, tg = (1e3 * estimate(context.plan_graph(n)[0]).seconds for n in (n_tokens, 1))
    except UserError:
        return None
    return Modelled(n_tokens, pp, tg)


# ---------------------------------------------------------------- for people
def report(model: Model, plan: DryRun) -> Iterator[str]:
    """The plan in lines."""
    yield f"{model.hparams.name or model.gguf.path.name} · {model.description}"
    yield from plan.memory.lines()
    for rule in plan.rules:
        places = ", ".join(f"{n / MIB:,.1f} MiB in {name}" for name, n in rule.places.items())
        yield f"{rule.rule}: {rule.tensors} tensors{', ' + places if places else ''}"
    yield f"graph: pp {_size(plan.pp)}, tg {_size(plan.tg)}"
    if plan.modelled is not None:
        m = plan.modelled
        yield (
            f"modelled, with a full context: pp {m.pp_ms:.1f} ms for {m.n_tokens} tokens "
            f"({m.pp_rate:.1f} t/s), tg {m.tg_ms:.1f} ms for one ({m.tg_rate:.2f} t/s)"
        )


def _size(size: GraphSize) -> str:
    return f"{size.nodes} nodes in {size.splits} {'split' if size.splits == 1 else 'splits'}"
