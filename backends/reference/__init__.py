"""The reference backend: every operation in NumPy, written to be read; it defines what is right."""
