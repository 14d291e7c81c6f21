"""The node descriptor: what a compiled kernel sees of a graph node.

A plan is an int64 array of shape (n_nodes, WORDS). A kernel is a C function

    void kernel(intp node, int32 ith, int32 chunk, int32 n_chunks)

that does chunk `chunk` of `n_chunks` of the node at address `node`, on thread `ith` (which only
chooses the thread's scratch memory: the result must not depend on it). Floats among the
parameters are stored as the bits of a float64.
"""

from typing import Final

# Constants are plain module integers: Numba freezes them into the kernels.
KERNEL: Final = 0  # address of the kernel
N_CHUNKS: Final = 1
SCRATCH: Final = 2  # address of scratch memory
SCRATCH_STRIDE: Final = 3  # bytes of scratch per thread
FAULTS: Final = 4  # address of two words of the plan: number of the first step that failed, plus 1
STEP: Final = 5  # number of the step; the second word is what was wrong (kernels/faults.py)
CLAIM: Final = 8  # chunks handed out; graph number in the upper half; own cache line
DONE: Final = 9  # chunks finished, likewise
DST: Final = 16  # operand record: address, ne[4], nb[4]
OPERAND_WORDS: Final = 9
MAX_SOURCES: Final = 6
SRC: Final = DST + OPERAND_WORDS  # first source; the others follow; address 0 = absent
PARAMS: Final = SRC + MAX_SOURCES * OPERAND_WORDS  # = 79
N_PARAMS: Final = 17
WORDS: Final = PARAMS + N_PARAMS  # = 96
BYTES: Final = 8 * WORDS
