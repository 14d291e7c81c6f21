"""What to say when a model does not fit its devices: what is missing, and which flags would do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyggml.backend import BufferType, Device, tensors_size
from pyggml.errors import OutOfMemory
from pyggml.llama.description import mib
from pyggml.llama.placement import Placement
from pyggml.llama.placement_rules import EXPERTS
from pyggml.llama.weights import OUTPUT
from pyggml.tensor import Tensor

IS_EXPERT = re.compile(EXPERTS)
STEPS = 40  # of the search for equally full devices


@dataclass(frozen=True, slots=True)
class Placed:
    """A weight, the layer it belongs to, and where it is to go."""

    name: str
    layer: int
    tensor: Tensor
    buft: BufferType


def check_capacity(placement: Placement, weights: Sequence[Placed]) -> None:
    """Raise OutOfMemory if the weights of a GPU are more than it has free."""
    for gpu in placement.gpus:
        memory = gpu.memory()
        need = bytes_on(gpu, weights)
        if memory.total and need > memory.free:
            raise OutOfMemory(_Advice(placement, weights, gpu).text(need, memory.free))


def bytes_on(device: Device, weights: Sequence[Placed]) -> int:
    """Memory of a device that its weights take."""
    bufts = dict.fromkeys(w.buft for w in weights if w.buft.device is device and not w.buft.is_host)
    return sum(tensors_size([w.tensor for w in weights if w.buft is b], b) for b in bufts)


class _Advice:
    """About one GPU that is too small."""

    def __init__(self, placement: Placement, weights: Sequence[Placed], gpu: Device) -> None:
        self.placement = placement
        self.gpu = gpu
        self.weights = weights
        self.mine = [w for w in weights if w.buft.device is gpu and not w.buft.is_host]

    def text(self, need: int, free: int) -> str:
        ways = [*self._tensor_split(), *self._n_cpu_moe(need - free), *self._gpu_layers(free)]
        return (
            f"{self.gpu.name} is too small: the weights there need {mib(need)}, "
            f"{mib(free)} are free, {mib(need - free)} are missing\n"
            f"{' or '.join(ways) or 'send tensors elsewhere with --override-tensor'}"
            f"{' would hold the weights; the context needs some room too' if ways else ''}"
        )

    def _layer(self, w: Placed) -> int:
        return self.placement.n_layer if w.layer == OUTPUT else w.layer

    def _layer_bytes(self) -> list[int]:
        """What every layer, and last the output, takes of GPUs by -ngl and not by a rule."""
        sizes = [0] * (self.placement.n_layer + 1)
        for w in self.weights:
            if w.buft.device is self.placement.device(w.layer) and not w.buft.is_host:
                sizes[self._layer(w)] += w.buft.alloc_size(w.tensor)
        return sizes

    def _gpu_layers(self, free: int) -> Iterator[str]:
        """The largest -ngl, for a single GPU."""
        if len(self.placement.gpus) > 1:
            return
        sizes, n = self._layer_bytes(), 0
        fixed = sum(w.buft.alloc_size(w.tensor) for w in self.mine) - sum(sizes)
        if fixed > free:
            return
        for size in reversed(sizes):
            fixed += size
            if fixed > free:
                break
            n += 1
        yield f"--gpu-layers {n}"

    def _n_cpu_moe(self, missing: int) -> Iterator[str]:
        """The smallest -ncmoe that frees enough."""
        experts = [w for w in self.mine if w.layer >= 0 and IS_EXPERT.search(w.name)]
        for il in sorted({w.layer for w in experts}):
            missing -= sum(w.buft.alloc_size(w.tensor) for w in experts if w.layer == il)
            if missing <= 0:
                yield f"--n-cpu-moe {il + 1}"
                return

    def _tensor_split(self) -> Iterator[str]:
        """The -ts that fills several GPUs as equally as possible, if there is one."""
        gpus, n_gpu = self.placement.gpus, self.placement.n_gpu_layers
        if len(gpus) < 2 or not n_gpu:
            return
        sizes = self._layer_bytes()[-n_gpu:]
        room = [gpu.memory().free for gpu in gpus]
        low, high = 0.0, 1.0
        best = _fill(sizes, room)
        for _ in range(STEPS if best else 0):
            middle = (low + high) / 2
            counts = _fill(sizes, [int(r * middle) for r in room])
            if counts:
                best, high = counts, middle
            else:
                low = middle
        if best:
            yield f"--tensor-split {','.join(map(str, best))}"


def _fill(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """How many layers, in order, each device takes if it takes as many as fit; []: it is not."""
    counts, i = [], 0
    for free in room:
        first = i
        while i < len(sizes) and sizes[i] <= free:
            free -= sizes[i]
            i += 1
        counts.append(i - first)
    return counts if i == len(sizes) else []
