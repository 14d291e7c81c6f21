"""Install the top-level folders as sub-packages of pyggml; all else is in pyproject.toml."""

from setuptools import find_packages, setup

MOUNTED = ("backends", "llama", "tools")
SUBPACKAGES = [f"pyggml.{p}" for m in MOUNTED for p in find_packages(include=[m, f"{m}.*"])]

setup(
    packages=["pyggml", *SUBPACKAGES],
    package_dir={"pyggml": "pyggml", **{f"pyggml.{m}": m for m in MOUNTED}},
)
