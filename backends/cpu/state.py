"""The thread pool's shared memory: byte offsets of int64 words. Hot words have their own line."""

from typing import Final

SEQ: Final = 0  # number of the graph being run
PLAN: Final = 64  # address of its first node
# fixed while graphs run
THREADS: Final = 128  # how many threads take part, the caller included
SPINS: Final = 136  # rounds a worker waits for work before it sleeps
STOP: Final = 144
WORKER_COUNT: Final = 152  # threads the pool has, the caller included
YIELD: Final = 160  # addresses of C functions: give the core away, lock, unlock
ACQUIRE: Final = 168
RELEASE: Final = 176
WORKERS: Final = 192  # one record per thread
WORKER_BYTES: Final = 128
ACTIVE: Final = 0  # inside a record: looks at a plan
LOCK: Final = 8  # address of the lock it sleeps on
ASLEEP: Final = 64  # set by the worker, taken back by whoever wakes it

SPINS_BEFORE_YIELD: Final = 10000  # rounds of waiting for a node's last chunks
