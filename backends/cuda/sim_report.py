"""What happened on simulated cards, as text and as a trace. All of it is modelled."""

from __future__ import annotations

from typing import Any

from pyggml.backends.cuda.sim_clock import Clock
from pyggml.backends.cuda.sim_driver import SimDriver
from pyggml.backends.cuda.sim_memory import MIB
from pyggml.backends.cuda.sim_stream import SimCard

NOTE = "modelled, not measured"


def report(driver: SimDriver, clock: Clock) -> str:
    """Two lines per card and one for the host, about what was since the last restart."""
    lines = [
        line
        for card, model in zip(driver.cards, driver.models, strict=True)
        for line in _card_lines(card, model.props.name)
    ]
    host, waits, all_ms = (
        1e3 * seconds for seconds in (clock.host.busy, clock.waits.busy, clock.now - clock.since)
    )
    lines.append(
        f"CPU: computing {host:.2f} ms, waiting {waits:.2f} ms of {all_ms:.2f} ms ({NOTE})"
    )
    return "\n".join(lines)


def _card_lines(card: SimCard, name: str) -> tuple[str, str]:
    c = card.counters
    busy = ", ".join(f"{unit.name} {1e3 * unit.busy:.2f} ms" for unit in card.units)
    peers = f", to other cards {_amount(c.peer_bytes)}" if c.peer_bytes else ""
    return (
        f"{card.name}: {name}: at most {card.memory.peak / MIB:.1f} of "
        f"{card.memory.total / MIB:.1f} MiB, {c.launches} kernels, {c.syncs} waits",
        f"{card.name}: to the card {_amount(c.h2d_bytes)} in {c.h2d_copies} copies, "
        f"back {_amount(c.d2h_bytes)} in {c.d2h_copies}{peers}; busy: {busy} ({NOTE})",
    )


def _amount(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB" if nbytes >= MIB else f"{nbytes / 1024:.1f} KiB"


def chrome_trace(driver: SimDriver, clock: Clock) -> dict[str, Any]:
    """A process per device, a thread per unit, microseconds."""
    names = {"host": "CPU (its share is modelled)"}
    for card, model in zip(driver.cards, driver.models, strict=True):
        names[card.name] = f"{card.name}: {model.props.name}"
    units = [(unit.device, unit.name) for card in driver.cards for unit in card.units]
    units += [("host", clock.host.name), ("host", clock.waits.name)]
    pids = {device: pid for pid, device in enumerate(names)}
    tids = {unit: tid for tid, unit in enumerate(units)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pids[device], "args": {"name": name}}
        for device, name in names.items()
    ]
    events += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pids[device],
            "tid": tid,
            "args": {"name": unit},
        }
        for (device, unit), tid in tids.items()
    ]
    events += [
        {
            "ph": "X",
            "name": s.name,
            "pid": pids[s.device],
            "tid": tids[s.device, s.unit],
            "ts": 1e6 * (s.start - clock.since),
            "dur": 1e6 * s.seconds,
            "args": {"bytes": round(s.nbytes)} if s.nbytes else {},
        }
        for s in clock.trace or ()
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": NOTE}}
