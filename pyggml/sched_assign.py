"""Which backend every tensor of a graph belongs to, and why (passes 1 to 4 of the scheduler)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from pyggml.backend import Backend, Buffer, BufferType, buffer_of, is_weight
from pyggml.errors import UserError
from pyggml.graph import Graph
from pyggml.ops import OPS, Op, TensorFlag
from pyggml.tensor import Tensor

log = logging.getLogger("pyggml.sched")

_INPUT = int(TensorFlag.INPUT)
VIEW_OPS = frozenset(op for op, info in OPS.items() if info.is_view)
# their small extra operands (rope factors, sinks) say nothing about where to run them
_WEIGHTS_DO_NOT_DECIDE = frozenset((Op.ROPE, Op.FLASH_ATTN_EXT))


class Assignment:
    """Backend ids (positions in `backends`, best first) of tensors; a missing tensor has none."""

    def __init__(
        self, backends: Sequence[Backend], bufts: Sequence[BufferType], *, op_offload: bool
    ) -> None:
        self.backends = backends
        self.bufts = bufts
        self.last = len(backends) - 1
        self.op_offload = op_offload
        self.ids: dict[Tensor, int] = {}
        self.causes: dict[Tensor, str] = {}
        self._told: set[tuple[Op, BufferType]] = set()  # that work has to go elsewhere
        self._readers: dict[BufferType, tuple[bool, ...]] = {}  # which backends read it
        # better backends with the same memory, as a BLAS library beside the CPU
        self._upgrades = [
            [b for b in range(k) if bufts[b] is bufts[k]] for k in range(len(backends))
        ]

    def clear(self) -> None:
        """Forget all tensors."""
        self.ids.clear()
        self.causes.clear()

    def set(self, tensor: Tensor, backend_id: int, cause: str) -> None:
        """Assign one tensor."""
        self.ids[tensor] = backend_id
        self.causes[tensor] = cause

    def assign(self, graph: Graph) -> None:
        """Give every node and leaf a backend. Raises UserError if nobody can run a node."""
        for tensors in (graph.leafs, graph.nodes):
            for tensor in tensors:
                if tensor not in self.ids:
                    self._from_memory(tensor)
        work = [node for node in graph.nodes if node.op not in VIEW_OPS]
        self._spread(work, skip_last=True)
        self._spread(reversed(work), skip_last=True)
        self._spread(work, skip_last=False)
        self._spread(reversed(work), skip_last=False)
        self._improve(work)
        self._complete(graph)

    # ------------------------------------------------------------ who can read and run what
    def reads(self, buft: BufferType, backend_id: int) -> bool:
        """Whether a backend can use tensors in this kind of memory."""
        readers = self._readers.get(buft)
        if readers is None:
            readers = tuple(backend.supports_buft(buft) for backend in self.backends)
            self._readers[buft] = readers
        return readers[backend_id]

    def can_read(self, tensor: Tensor, backend_id: int) -> bool:
        """Whether a backend can use the tensor where it lies or will lie."""
        buffer = buffer_of(tensor)
        if buffer is not None:
            return self.reads(buffer.buft, backend_id)
        home = self._home(tensor)
        return home is not None and self.reads(self.bufts[home], backend_id)

    def _home(self, tensor: Tensor) -> int | None:
        home = self.ids.get(tensor)
        if home is None and tensor.view_src is not None:
            home = self.ids.get(tensor.view_src)
        return home

    def _runner(self, buffer: Buffer, node: Tensor) -> int:
        """The best backend that reads the buffer and can run the node; -1: none."""
        for b, backend in enumerate(self.backends):
            if self.reads(buffer.buft, b) and backend.supports_op(node):
                return b
        return -1

    # ------------------------------------------------------------ pass 1: memory decides
    def _from_memory(self, tensor: Tensor) -> None:
        buffer = buffer_of(tensor)
        if buffer is not None:  # the same for a view and its source
            runner = self._runner(buffer, tensor)
            if runner >= 0:
                self.set(tensor, runner, "1.dst")
            else:
                self._away_from_memory(tensor, buffer)
        elif int(tensor.flags) & _INPUT:
            self.set(tensor, self.last, "1.inp")
        elif tensor.op not in _WEIGHTS_DO_NOT_DECIDE:
            for slot, src in enumerate(tensor.src):
                if src is not None and is_weight(src):
                    self._by_weight(tensor, slot, src)
                    return

    def _away_from_memory(self, tensor: Tensor, buffer: Buffer) -> None:
        """Let a node that writes where nobody can run it work on a copy that is copied back.

        ggml gives up here.
        """
        runner = self._first_able(tensor)
        if tensor.view_src is None or runner < 0:
            raise UserError(
                f"{tensor!r} lies in a {buffer.name} buffer, where no backend can run "
                f"{tensor.op_desc}\nbackends: {self._names()}"
            )
        self.set(tensor, runner, "1.back")
        if (tensor.op, buffer.buft) not in self._told:
            self._told.add((tensor.op, buffer.buft))
            log.debug(
                "%r lies in a %s buffer, where no backend can run it: %s does, with copies of all "
                "it writes to, there and back",
                *(tensor, buffer.name, self.backends[runner].name),
            )

    def _first_able(self, node: Tensor) -> int:
        """The best backend that can run a node; -1: none."""
        able = (b for b, backend in enumerate(self.backends) if backend.supports_op(node))
        return next(able, -1)

    def _by_weight(self, node: Tensor, slot: int, weight: Tensor) -> None:
        buffer = buffer_of(weight)
        assert buffer is not None
        runner = self._runner(buffer, node)
        if self.op_offload and runner == self.last and buffer.buft.is_host:
            for b, backend in enumerate(self.backends[:runner]):
                if backend.supports_op(node) and backend.device.offload_op(node):
                    self.set(node, b, "1.off")
                    return
        if runner >= 0:
            self.set(node, runner, f"1.wgt{slot}")

    # ------------------------------------------------------------ pass 2: neighbours decide
    def _spread(self, nodes: Iterable[Tensor], *, skip_last: bool) -> None:
        """Carry the current backend along; with skip_last the CPU stops it and is not carried."""
        ids, backends = self.ids, self.backends
        current = -1
        for node in nodes:
            backend_id = ids.get(node, -1)
            if backend_id >= 0:
                current = -1 if skip_last and backend_id == self.last else backend_id
            elif current >= 0 and backends[current].supports_op(node):
                self.set(node, current, "2.sup")

    # ------------------------------------------------------------ pass 3: what is left
    def _improve(self, nodes: Iterable[Tensor]) -> None:
        for node in nodes:
            backend_id = self.ids.get(node)
            if backend_id is None:
                self._choose_by_sources(node)
                continue
            for better in self._upgrades[backend_id]:
                readable = (self.can_read(s, better) for s in node.src if s is not None)
                if self.backends[better].supports_op(node) and all(readable):
                    self.set(node, better, "3.upg")
                    break

    def _choose_by_sources(self, node: Tensor) -> None:
        """The backend that reads most sources where they are; the first of several."""
        most = -1
        for b, backend in enumerate(self.backends):
            if not backend.supports_op(node):
                continue
            readable = sum(src is not None and self.can_read(src, b) for src in node.src)
            if readable > most:
                most = readable
                self.set(node, b, "3.best")

    # ------------------------------------------------------------ pass 4: views and sources
    def _complete(self, graph: Graph) -> None:
        ids = self.ids
        for node in graph.nodes:
            if node not in ids:
                self._settle(node)
            for src in node.src:
                if src is None or src in ids:
                    continue
                root = src.view_src
                if root is not None and root in ids:
                    self.set(src, ids[root], "4.vsrc")
                else:
                    self.set(src, ids[node], "4.cur")
        for leaf in graph.leafs:  # a leaf that is itself a result
            ids.setdefault(leaf, self.last)

    def _settle(self, node: Tensor) -> None:
        root = node.view_src
        if root is not None and root in self.ids:
            self.set(node, self.ids[root], "4.vsrc")
            return
        runner = self._first_able(node)
        if runner >= 0:
            self.set(node, runner, "")
            return
        raise UserError(f"no backend can run {node!r}\nbackends: {self._names()}")

    def _names(self) -> str:
        return ", ".join(backend.name for backend in self.backends)
