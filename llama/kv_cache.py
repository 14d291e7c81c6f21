"""The KV cache: tensors per layer, cells that say what they hold, and the inputs of attention.

Cells are written through `set_rows` by index, so a graph does not change while the cache fills.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pyggml import build
from pyggml.backend import alloc_tensors, pad
from pyggml.dtypes import GGMLType
from pyggml.errors import UserError
from pyggml.llama.batch import Ubatch
from pyggml.llama.hparams import HParams
from pyggml.llama.kv_cells import Cells, IntArray
from pyggml.llama.memory_part import Alloc, MemoryPart, Where
from pyggml.llama.recurrent_state import RecurrentState
from pyggml.tensor import Tensor, new_tensor

N_KV_STEP = 256  # graphs look at a multiple of this many cells, so that they can be reused
ROT_STEP = 64  # heads of other sizes are not rotated
ALL_POSITIONS = (1 << 31) - 1  # beyond every position


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Leafs of one cache that are filled before each run."""

    mask: Tensor  # [n_kv, n_tokens], F16 with flash attention, else F32; 0 or -inf
    k_idxs: Tensor  # I64 [n_tokens]
    v_idxs: Tensor  # I64 [n_tokens], or [n_tokens * n_embd_v_gqa] if v is stored transposed
    k_rot: Tensor | None = None  # F32 [n, n]: turns queries and keys, if keys are stored turned
    v_rot: Tensor | None = None  # the same for values


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParams:
    """How a cache is laid out."""

    size: int
    type_k: GGMLType
    type_v: GGMLType
    v_trans: bool  # element (cell i, dim j) of v at j * size + i: for attention without flash
    n_seq_max: int = 1
    n_swa: int = 0
    reuse: bool = False  # cells that a sequence's window has left behind are free
    rotate: bool = True  # heads before they are quantized


class KvCache(MemoryPart):
    """Keys and values of some layers. It has neither memory nor cells until `allocate`."""

    def __init__(self, hp: HParams, layers: Sequence[int], params: CacheParams) -> None:
        self.hp = hp
        self.layers = tuple(layers)
        self.params = params
        self.cells = Cells(0, params.n_seq_max)
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        for il in layers:
            n_k, n_v = hp.n_embd_k_gqa(il), hp.n_embd_v_gqa(il)
            self.k[il] = new_tensor(params.type_k, n_k, params.size, name=f"cache_k_l{il}")
            if hp.values_in_keys:
                continue
            self.v[il] = new_tensor(params.type_v, n_v, params.size, name=f"cache_v_l{il}")
        self.k_rot = self._rotation(params.type_k, hp.n_embd_head_k)
        # values gain more from the smallest rotation
        self.v_rot = min(ROT_STEP, self._rotation(params.type_v, hp.n_embd_head_v))

    def _rotation(self, type: GGMLType, head: int) -> int:
        """Size of the matrix that turns heads of a type: the largest that divides them, or 0.

        Turning spreads outliers over the blocks of a head. Scores do not change if queries turn as
        well, and outputs are turned back. llama.cpp leaves keys that hold the values as they are.
        """
        wanted = self.params.rotate and type.is_quantized and not self.hp.values_in_keys
        if not wanted or head % ROT_STEP:
            return 0
        return head & -head

    def allocate(self, where: Where, alloc: Alloc = alloc_tensors) -> None:
        """Place the tensors; they start as zeros, since masked cells are still multiplied.

        Raises OutOfMemory.
        """
        super().allocate(where, alloc)
        self.cells = Cells(self.params.size, self.params.n_seq_max)

    def find_slot(self, cells: Cells, n: int) -> IntArray | None:
        """Where n tokens would go in `cells`, which are the cache's or a copy to try things on."""
        return cells.find_slot(n, self.params.n_swa if self.params.reuse else 0)

    @property
    def k_bytes(self) -> int:
        return sum(t.nbytes for t in self.k.values())

    @property
    def v_bytes(self) -> int:
        return sum(t.nbytes for t in self.v.values())

    @property
    def by_layer(self) -> Sequence[tuple[int, Tensor]]:
        return (*self.k.items(), *self.v.items())

    def n_kv(self) -> int:
        """How many cells the next graph must look at."""
        used = pad(self.cells.last_used() + 1, N_KV_STEP)
        return min(self.params.size, max(N_KV_STEP, used))

    # ------------------------------------------------------------ graph parts
    def inputs(self, n_tokens: int, n_kv: int, *, flash_attn: bool) -> AttentionInputs:
        """New input leafs for a graph."""
        suffix = "_swa" if self.params.n_swa else ""
        type_ = GGMLType.F16 if flash_attn else GGMLType.F32
        n_v = self.hp.n_embd_v_gqa(self.layers[0]) if self.params.v_trans else 1
        mask = new_tensor(type_, n_kv, n_tokens, name=f"attn_inp_kq_mask{suffix}")
        k_idxs = new_tensor(GGMLType.I64, n_tokens, name=f"attn_inp_k_idxs{suffix}")
        v_idxs = new_tensor(GGMLType.I64, n_tokens * n_v, name=f"attn_inp_v_idxs{suffix}")
        return AttentionInputs(
            mask.as_input(),
            k_idxs.as_input(),
            v_idxs.as_input(),
            rotation_input("attn_inp_k_rot", self.k_rot),
            rotation_input("attn_inp_v_rot", self.v_rot),
        )

    def store_k(self, il: int, k: Tensor, inputs: AttentionInputs) -> Tensor:
        """Write new keys [head, n_head_kv, n_tokens]."""
        rows = build.reshape(k, k.ne[0] * k.ne[1], k.ne[2])
        return build.set_rows(self.k[il], rows, inputs.k_idxs)

    def store_v(self, il: int, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """Write new values [head, n_head_kv, n_tokens]."""
        cache = self.v[il]
        if not self.params.v_trans:
            return build.set_rows(
                cache, build.reshape(v, v.ne[0] * v.ne[1], v.ne[2]), inputs.v_idxs
            )
        # one element per row: a transposed row is scattered over the cells
        flat = build.reshape(cache, 1, cache.nelements)
        return build.set_rows(flat, build.reshape(v, 1, v.nelements), inputs.v_idxs)

    def keys(self, il: int, n_kv: int) -> Tensor:
        """[head, n_kv, n_head_kv], heads interleaved in memory."""
        k, head = self.k[il], self.hp.n_embd_head_k
        row = k.type.row_size
        return build.view(k, (head, n_kv, self.hp.n_head_kv[il]), (k.nb[1], row(head)))

    def values(self, il: int, n_kv: int) -> Tensor:
        """[head, n_kv, n_head_kv], or transposed [n_kv, head, n_head_kv]."""
        if self.hp.values_in_keys:
            k = self.keys(il, n_kv)
            return build.view(k, (self.hp.n_embd_head_v, *k.ne[1:3]), k.nb[1:3])
        v, head, n_head = self.v[il], self.hp.n_embd_head_v, self.hp.n_head_kv[il]
        if not self.params.v_trans:
            return build.view(v, (head, n_kv, n_head), (v.nb[1], v.type.row_size(head)))
        column = v.type.row_size(self.params.size)
        return build.view(v, (n_kv, head, n_head), (column, column * head))

    # ------------------------------------------------------------ input values
    def mask(self, ubatch: Ubatch, n_kv: int) -> npt.NDArray[np.bool_]:
        """True where a token (row) must not see a cell: [n_tokens, n_kv]."""
        pos = self.cells.pos[:n_kv]
        token_pos = ubatch.pos[:, None]
        first_seq = np.fromiter((ids[0] for ids in ubatch.seq_ids), np.intp, ubatch.n_tokens)
        hidden: npt.NDArray[np.bool_] = ~self.cells.seq[first_seq, :n_kv] | (pos > token_pos)
        if self.params.n_swa:
            hidden |= token_pos - pos >= self.params.n_swa
        return hidden

    def v_indices(self, slots: IntArray) -> npt.NDArray[np.int64]:
        """Where set_rows writes values."""
        cells = slots.astype(np.int64)
        if not self.params.v_trans:
            return cells
        dims = np.arange(self.hp.n_embd_v_gqa(self.layers[0]), dtype=np.int64)
        return (cells[:, None] + dims[None, :] * self.params.size).reshape(-1)


def rotation_input(name: str, n: int) -> Tensor | None:
    """A leaf for hadamard(n)."""
    return new_tensor(GGMLType.F32, n, n, name=name).as_input() if n else None


@functools.cache
def hadamard(n: int) -> npt.NDArray[np.float32]:
    """Orthonormal and symmetric, so its own inverse; n is a power of two (Sylvester)."""
    signs = np.ones((1, 1), np.float32)
    while len(signs) < n:
        signs = np.block([[signs, signs], [signs, -signs]])
    matrix: npt.NDArray[np.float32] = signs * np.float32(n**-0.5)
    return matrix


def rotate(x: Tensor, rot: Tensor | None) -> Tensor:
    """Each piece of n channels of x times an [n, n] matrix; x itself if there is none."""
    if rot is None:
        return x
    n = rot.ne[0]
    packed = x if x.is_contiguous else build.cont(x)
    pieces = build.reshape(packed, n, x.nelements // n)
    return build.reshape(build.mul_mat(rot, pieces), *x.ne)


class Memory:
    """What a model remembers: keys and values of attention, states of recurrent layers.

    There is one cache, or one for full and one for sliding-window layers.
    """

    def __init__(self, caches: Sequence[KvCache], state: RecurrentState | None = None) -> None:
        self.caches = tuple(caches)
        self.state = state
        parts: list[KvCache | RecurrentState] = [*caches]
        self.parts = (*parts, state) if state else tuple(parts)
        self._of_layer = {il: i for i, cache in enumerate(caches) for il in cache.layers}

    def index_of_layer(self, il: int) -> int:
        return self._of_layer[il]

    def _check(self, *seqs: int) -> None:
        n = self.caches[0].params.n_seq_max
        for seq in seqs:
            if not 0 <= seq < n:
                raise UserError(f"there is no sequence {seq}: they are 0..{n - 1} (n_seq_max)")

    def clear(self) -> None:
        """Forget everything."""
        for part in self.parts:
            part.cells.clear()

    def free(self) -> None:
        """Give the memory back."""
        for part in self.parts:
            part.free()

    def pos_max(self, seq: int) -> int:
        """Last position of a sequence, -1 if there is none."""
        self._check(seq)
        return max(cache.cells.pos_max(seq) for cache in self.caches)

    def pos_min(self, seq: int) -> int:
        """First position that every layer still holds, -1 if there is none."""
        self._check(seq)
        of_state = [int(self.state.cells.pos[seq])] if self.state else []
        return max([*of_state, *(cache.cells.pos_min(seq) for cache in self.caches)])

    def can_continue(self, seq: int, n: int) -> bool:
        """Whether a token at position n of a sequence finds all that it may see, in every layer."""
        self._check(seq)
        if self.state and self.state.cells.pos[seq] != n - 1:
            return False
        return all(cache.cells.can_continue(seq, n, cache.params.n_swa) for cache in self.caches)

    def fingerprint(self, seq: int) -> bytes:
        """Equal for two sequences that hold the same cells."""
        of_state = [self.state.cells.cell[seq].tobytes()] if self.state else []
        return b"".join([*of_state, *(cache.cells.seq[seq].tobytes() for cache in self.caches)])

    def can_remove(self, seq: int, p0: int = 0, p1: int = ALL_POSITIONS) -> bool:
        """Whether `remove` can: a recurrent state knows no way back."""
        if seq != -1:
            self._check(seq)
        return self.state is None or self.state.cells.can_remove(seq, p0, p1)

    def remove(self, seq: int, p0: int = 0, p1: int = ALL_POSITIONS) -> None:
        """Forget positions p0..p1-1 of a sequence (-1: of all)."""
        if not self.can_remove(seq, p0, p1):
            raise UserError(
                f"the last positions of {f'sequence {seq}' if seq >= 0 else 'a sequence'}, from "
                f"{p0} on, cannot be removed: this model keeps a state, not its past; remove the "
                "whole sequence"
            )
        for part in self.parts:
            part.cells.remove(seq, p0, p1)

    def remove_from(self, seq: int, p0: int) -> None:
        """Forget position p0 and later ones; all of a sequence that cannot be cut there."""
        self.remove(seq, p0 if self.can_remove(seq, p0) else 0)

    def copy(self, src: int, dst: int, p0: int = 0, p1: int = ALL_POSITIONS) -> None:
        """Let a sequence share another's cells."""
        self._check(src, dst)
        if self.state and src != dst:
            pos = int(self.state.cells.pos[src])
            if pos >= 0 and not p0 <= 0 <= pos < p1:
                raise UserError(
                    f"only the whole of sequence {src} can be copied: this model keeps a state, "
                    "not its past"
                )
            self.remove(dst)
            self.state.cells.copy(src, dst)
        for cache in self.caches:
            cache.cells.copy(src, dst, p0, p1)

    def keep(self, seq: int) -> None:
        """Forget every other sequence."""
        self._check(seq)
        for part in self.parts:
            part.cells.keep(seq)

    def _check_movable(self, seq: int) -> None:
        self._check(seq)
        if any(cache.hp.n_pos > 1 for cache in self.caches):
            raise UserError("the positions of this model cannot be moved: a token has several")

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions; the keys are rotated before the next decode."""
        self._check_movable(seq)
        for part in self.parts:
            part.cells.add(seq, p0, p1, delta)

    def divide(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide positions (self-extend); the keys are rotated before the next decode."""
        self._check_movable(seq)
        for part in self.parts:
            part.cells.divide(seq, p0, p1, d)

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved: every cache must hold all of them, one per token."""
        return not any(cache.params.reuse or cache.hp.n_pos > 1 for cache in self.caches)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def make_memory(
    hp: HParams, params: CacheParams, *, n_ubatch: int, swa_full: bool = False
) -> Memory:
    """One cache, or two if some layers have a sliding window (llama.cpp: iSWA).

    Recurrent layers have a state instead, with a cell for each sequence.
    """
    layers = [il for il in range(hp.n_layer) if not hp.recurrent(il)]
    if hp.delta_net is not None:
        recurrent = [il for il in range(hp.n_layer) if hp.recurrent(il)]
        state = RecurrentState(hp.delta_net, recurrent, params.n_seq_max) if recurrent else None
        return Memory([KvCache(hp, layers, params)], state)
    if not any(hp.is_swa):
        return Memory([KvCache(hp, layers, params)])
    window = params.size
    if not swa_full:
        window = pad(min(params.size, hp.n_swa * params.n_seq_max + n_ubatch), N_KV_STEP)
    # a window cache as large as the other one holds the same cells: it can be cut and shifted
    swa = replace(params, size=window, n_swa=hp.n_swa, reuse=window < params.size)
    full = [il for il in layers if not hp.swa(il)]
    caches = [KvCache(hp, full, params)] if full else []
    return Memory([*caches, KvCache(hp, [il for il in layers if hp.swa(il)], swa)])
