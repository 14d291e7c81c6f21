"""The programs that a person runs."""

assert __name__ == "pyggml.tools", "import pyggml.tools, not tools"
