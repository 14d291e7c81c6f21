"""Who takes how much memory of which device: weights, memory of sequences, computing.

The numbers are sizes of buffers, of real ones or of placeholders: both are the same to the byte.
Of a mapped file only the tensors that lie in the mapping count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pyggml.backend import Buffer, BufferType, Device, DeviceType, MultiBuffer
from pyggml.llama.context import Context
from pyggml.llama.loader import Model, is_mapping

SIMULATED = "[simulated]"  # how descriptions of simulated devices end
MAKERS = ("NVIDIA ", "GeForce ", "Tesla ", "AMD ", "Radeon ", "Instinct ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Bytes by purpose."""

    model: int = 0
    context: int = 0
    compute: int = 0

    @property
    def own(self) -> int:
        """All of them together."""
        return self.model + self.context + self.compute

    def __add__(self, other: Use) -> Use:
        return Use(
            model=self.model + other.model,
            context=self.context + other.context,
            compute=self.compute + other.compute,
        )


@dataclass(frozen=True, slots=True)
class BufferUse:
    """What lies in buffers of one type."""

    name: str
    device: str
    is_host: bool  # in memory of the host that the CPU reads and writes
    use: Use


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device; `free` is what stays free (negative: so much is missing)."""

    name: str
    description: str
    total: int
    free: int
    use: Use
    simulated: bool

    @property
    def unaccounted(self) -> int:
        """What others have, or the system."""
        return self.total - self.free - self.use.own


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """All devices, the CPU last, and the same bytes by buffer type."""

    devices: tuple[DeviceUse, ...]
    buffers: tuple[BufferUse, ...]

    def lines(self) -> Iterator[str]:
        """llama.cpp's table in MiB: devices with own memory, the host, layouts beyond these."""
        return _lines(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def memory_table(model: Model, *contexts: Context) -> MemoryTable:
    """The table of a model and some of its contexts.

    If they are only planned, it tells what would be free with them.
    """
    uses = _by_buffer_type(model, contexts)
    cpu = next(d for d in model.devices if d.type == DeviceType.CPU)
    owners = {buft: cpu if buft.is_host else buft.device for buft in uses}
    devices = []
    for device in model.devices:
        mine = [buft for buft in uses if owners[buft] is device]
        use = sum((uses[buft] for buft in mine), Use())
        memory = device.memory()
        planned = _footprint(model, contexts, mine) if model.no_alloc else 0
        free = memory.free - planned
        simulated = is_simulated(device)
        devices.append(
            DeviceUse(device.name, device.description, memory.total, free, use, simulated)
        )
    buffers = [
        BufferUse(buft.name, owners[buft].name, buft.is_host, use) for buft, use in uses.items()
    ]
    return MemoryTable(tuple(devices), tuple(buffers))


def _footprint(model: Model, contexts: Sequence[Context], bufts: Collection[BufferType]) -> int:
    """What the buffers of some types take; mappings give their pages back when others need them."""
    buffers = [b for b in model.buffers if not is_mapping(b)]
    for context in contexts:
        buffers += (b for part in context.memory.parts for b in part.buffers)
        buffers += (b for backend in context.backends for b in context.sched.buffers(backend))
    mine = (b for b in buffers if b.buft in bufts)
    return sum(b.buft.footprint(b.size) for one in mine for b in _parts_of(one))


def _parts_of(buffer: Buffer) -> Sequence[Buffer]:
    return buffer.buffers if isinstance(buffer, MultiBuffer) else (buffer,)


def is_simulated(device: Device) -> bool:
    """Whether a device is a model of one that is not there."""
    return device.description.endswith(SIMULATED)


def _by_buffer_type(model: Model, contexts: Sequence[Context]) -> dict[BufferType, Use]:
    found: dict[BufferType, Use] = {}

    def add(buft: BufferType, use: Use) -> None:
        found[buft] = found.get(buft, Use()) + use

    for buffer in model.buffers:
        add(buffer.buft, Use(model=model.bytes_in(buffer)))
    for context in contexts:
        for part in context.memory.parts:
            for buffer in part.buffers:
                add(buffer.buft, Use(context=buffer.size))
        for backend, buft in zip(context.sched.backends, context.sched.bufts, strict=True):
            add(buft, Use(compute=context.sched.buffer_size(backend)))
    return found


# ---------------------------------------------------------------- as text
HEADER = "| {} | {}   {}    {}   {}   {}   {}    {} |"
DEVICE = "| {} | {} = {} + ({} = {} + {} + {}) + {} |"
OTHER = "| {} | {}   {}    {} = {} + {} + {}    {} |"
COLUMNS = ("total", "free", "self", "model", "context", "compute", "unaccounted")


def _lines(table: MemoryTable) -> Iterator[str]:
    rows: list[tuple[str, tuple[str, ...]]] = [(HEADER, ("memory breakdown [MiB]", *COLUMNS))]
    for d in table.devices[:-1]:
        numbers = (d.total, d.free, *_parts(d.use), d.unaccounted)
        name = f"  - {d.name} ({_short(d.description)})"
        rows.append((DEVICE, (name, *map(_mib, numbers))))
    host = table.devices[-1].name
    mine = [b for b in table.buffers if b.device == host]
    hosts = sum((b.use for b in mine if b.is_host), Use())
    others = [(b.name, b.use) for b in mine if not b.is_host]
    for name, use in [("Host", hosts), *others]:
        rows.append((OTHER, (f"  - {name}", "", "", *map(_mib, _parts(use)), "")))
    widths = [max(len(row[i]) for _, row in rows) for i in range(len(COLUMNS) + 1)]
    for template, (name, *cells) in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield template.format(name.ljust(widths[0]), *padded)


def _parts(use: Use) -> tuple[int, ...]:
    return use.own, use.model, use.context, use.compute


def _mib(nbytes: int) -> str:
    return str(int(nbytes / (1 << 20)))


def _short(description: str) -> str:
    """A card's name without its makers'."""
    for maker in MAKERS:
        description = description.removeprefix(maker)
    return description
