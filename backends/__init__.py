"""Backends: one folder each; they import only the core."""

assert __name__ == "pyggml.backends", "import pyggml.backends, not backends"
