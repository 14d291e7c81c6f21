"""ggml and llama.cpp rebuilt in Python: tensors, graphs, allocator, scheduler, GGUF.

Models live in `pyggml.llama`, kernels in `pyggml.backends`, programs in `pyggml.tools`.
"""

from pyggml.version import __version__

__all__ = ["__version__"]
