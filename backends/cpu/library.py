"""Compiled kernels by name. Object code is the cache, so a normal start imports no Numba.

Each kernel is one object file in a folder named by everything the code depends on: the kernel
sources, the CPU and the compiler's versions. What is missing is compiled by several processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import llvmlite.binding as llvm
import platformdirs

from pyggml.backends.cpu.memory import release_code
from pyggml.backends.cpu.object_file import read_object
from pyggml.backends.cpu.target import Target
from pyggml.quants_iq import GRIDS
from pyggml.threads import usable_cpus

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
# Sources that end up in object code.
SOURCES = (
    *("node.py", "state.py", "attention.py", "panels.py", "compile.py", "target.py"),
    "kernels/*.py",
)

KEPT_SECONDS = 30 * 24 * 3600

Progress = Callable[[int, int, str], None]  # kernels done, kernels in all, name of the last


def no_progress(done: int, total: int, name: str) -> None:
    """Say nothing."""


class KernelLibrary:
    """Addresses of kernels; compiles what no earlier run has left in the cache folder."""

    def __init__(self, target: Target | None = None, cache: Path | None = None) -> None:
        self.target = target or Target.host()
        self.progress: Progress = no_progress
        self._root = cache or default_cache()
        self._folder: Path | None = None
        self._digest = ""  # of the sources when the folder was opened
        self._addresses: dict[str, int] = {}
        self._engines: list[llvm.ExecutionEngine] = []  # they own the code
        self._lock = threading.Lock()

    def addresses(self, names: Collection[str], progress: Progress | None = None) -> dict[str, int]:
        """The address of each kernel; the first use of a kernel takes 0.3 to 3 s to compile it."""
        with self._lock:
            missing = [n for n in dict.fromkeys(names) if n not in self._addresses]
            if missing:
                self._addresses |= self._load(self._objects(missing, progress or self.progress))
            return {n: self._addresses[n] for n in names}

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compile every kernel there is."""
        from pyggml.backends.cpu.compile import kernel_names

        self.addresses(kernel_names(), progress)

    def folder(self) -> Path:
        """Where the code for this processor lies, and what is measured with it."""
        if self._folder is None:
            self._folder = self._open_folder()
        return self._folder

    # ------------------------------------------------------------ object files
    def _objects(self, names: list[str], progress: Progress) -> dict[str, bytes]:
        folder = self.folder()
        found = {n: read_object(folder / f"{n}.o") for n in names}
        missing = [n for n, code in found.items() if code is None]
        if missing:
            log.info("compiling %d kernels for this CPU into %s", len(missing), folder)
            progress(0, len(missing), "")
            self._compile(missing, folder, progress)
            found |= {n: read_object(folder / f"{n}.o") for n in missing}
        lost = [n for n, code in found.items() if code is None]
        if lost:
            raise OSError(f"{folder}: cannot read back the compiled kernels {', '.join(lost)}")
        return {n: code for n, code in found.items() if code is not None}

    def _compile(self, names: list[str], folder: Path, progress: Progress) -> None:
        from pyggml.backends.cpu.compile_workers import compile_all

        for done, name in enumerate(compile_all(names, folder, self.target, self._digest), 1):
            progress(done, len(names), name)

    def _open_folder(self) -> Path:
        self._digest = source_digest(self.target)
        folder = _writable(self._root / f"kernels-{self._digest}")
        with contextlib.suppress(OSError):
            os.utime(folder)
            _drop_unused(self._root)
        return folder

    def _load(self, objects: dict[str, bytes]) -> dict[str, int]:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self.target.machine())
        for code in objects.values():
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engines.append(engine)
        found = {name: engine.get_function_address(name) for name in objects}
        release_code("libllvmlite")
        assert all(found.values()), f"no code for {[n for n, a in found.items() if not a]}"
        return found


def source_digest(target: Target) -> str:
    """Names everything that the object code depends on."""
    h = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(HERE.glob(pattern)):
            h.update(f"{path.name}\n".encode() + path.read_bytes())
    h.update(GRIDS.read_bytes())
    h.update("\n".join([target.cpu, target.features]).encode())
    for package in ("numba", "llvmlite"):
        h.update(b"\n" + _version(package))
    return h.hexdigest()[:20]


def _version(package: str) -> bytes:
    """What tells versions of a package apart, without importing it.

    Its file that says so is found sooner than the metadata of its installation.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError):
            return Path(folder, "_version.py").read_bytes()
    from importlib.metadata import version

    return version(package).encode()


def default_cache() -> Path:
    """PYGGML_CACHE, or the user's cache folder."""
    return Path(os.environ.get("PYGGML_CACHE") or platformdirs.user_cache_dir("pyggml"))


def _writable(folder: Path) -> Path:
    """The folder, created; a temporary one if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        other = Path(tempfile.mkdtemp(prefix="pyggml-kernels-"))
        log.warning(
            "cannot write to the kernel cache %s (%s): compiling into %s for this run; "
            "set PYGGML_CACHE to a writable folder to keep the kernels",
            folder,
            e.strerror or e,
            other,
        )
        return other
    return folder


def _drop_unused(root: Path) -> None:
    """Delete kernels of other versions that no program has opened for long."""
    for folder in root.glob("kernels-*"):
        if time.time() - folder.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def usable_cores() -> int:
    """Cores this process may use."""
    return len(usable_cpus())
