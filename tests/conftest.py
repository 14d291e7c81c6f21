"""Real models for end-to-end tests, found on this machine or skipped with a reason."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every machine; `make test-all` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

# Read when NumPy is first imported, after this file. A BLAS thread that waits for one whose core
# another test worker has is several times slower than one thread alone.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell's job in the background ignores Ctrl-C, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

APART = "PYGGML_TEST_APART"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-it-Q4_K_M.gguf"


def find_model(name: str) -> Path:
    """The first of PYGGML_TEST_MODELS, models/ of the repository and the user's cache with it."""
    chosen = os.environ.get("PYGGML_TEST_MODELS")
    folders = [Path(chosen)] if chosen else []
    folders.append(Path(__file__).parent.parent / "models")
    folders.append(Path.home() / ".cache" / "pyggml" / "models")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = ", ".join(map(str, folders))
    pytest.skip(f"{name} not found in {looked}: put it there or set PYGGML_TEST_MODELS")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2 135M Instruct, Q4_1 (llama architecture, BPE vocabulary)."""
    return find_model(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M Instruct, Q4_K_M (262,144 tokens, SPM vocabulary)."""
    return find_model(GEMMA3)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A tool that runs in this process sets up the logger; the next test must not see that."""
    logger = logging.getLogger("pyggml")
    before = logger.handlers[:], logger.propagate, logger.level, logging.raiseExceptions
    yield
    for handler in logger.handlers:
        if handler not in before[0]:
            handler.close()
    logger.handlers[:], logger.propagate, level, logging.raiseExceptions = before
    logger.setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked `apart` in a process of its own."""
    if pyfuncitem.get_closest_marker("apart") is None or APART in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, APART: "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    return True
