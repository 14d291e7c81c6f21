"""`python -m pyggml` is `pyllama`."""

from pyggml.tools.main import main

main()
