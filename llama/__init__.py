"""Models on top of the core: loading, graphs, memory, tokenizers, sampling, sessions."""

assert __name__ == "pyggml.llama", "import pyggml.llama, not llama"
