"""The kernel library: object files as the cache."""

import ctypes
import importlib.metadata
import logging
import os
import subprocess
import sys
import threading
import time

import llvmlite.binding as llvm
import pytest
from cpu_products import Products, random_columns, random_weights

from pyggml.backends.cpu import library as source
from pyggml.backends.cpu.compile import export_only
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cpu.library import KEPT_SECONDS, KernelLibrary, source_digest
from pyggml.backends.cpu.object_file import read_object, write_object
from pyggml.backends.cpu.panels import LAYOUTS
from pyggml.backends.cpu.target import Target
from pyggml.dtypes import GGMLType as T

SMALL = ["retire_plan"]  # compiles quickly


def object_of(library, cache):
    return cache / f"kernels-{source_digest(library.target)}" / f"{SMALL[0]}.o"


def test_compiles_once(tmp_path) -> None:
    seen = []
    first = KernelLibrary(cache=tmp_path)
    address = first.addresses(SMALL, lambda *step: seen.append(step))[SMALL[0]]
    assert address and seen == [(0, 1, ""), (1, 1, SMALL[0])]
    assert first.addresses(SMALL)[SMALL[0]] == address
    KernelLibrary(cache=tmp_path).addresses(SMALL, lambda *step: seen.append(step))
    assert len(seen) == 2


def test_damaged_object_is_compiled_again(tmp_path) -> None:
    library = KernelLibrary(cache=tmp_path)
    library.addresses(SMALL)
    path = object_of(library, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert read_object(path) is None
    assert KernelLibrary(cache=tmp_path).addresses(SMALL)[SMALL[0]]
    assert read_object(path) is not None


def test_two_starts_at_once(tmp_path) -> None:
    libraries = [KernelLibrary(cache=tmp_path) for _ in range(2)]
    found = []
    threads = [
        threading.Thread(target=lambda lib=lib: found.append(lib.addresses(SMALL)))
        for lib in libraries
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 2 and all(a[SMALL[0]] for a in found)
    assert [p.suffix for p in object_of(libraries[0], tmp_path).parent.iterdir()] == [".o"]


def test_what_another_program_compiled_meanwhile_is_taken(tmp_path) -> None:
    library, other = (KernelLibrary(cache=tmp_path) for _ in range(2))
    theirs = []

    def compile_before_the_first(done: int, total: int, name: str) -> None:
        if not done:
            other.addresses(SMALL)
            theirs.append(object_of(other, tmp_path).stat())

    assert library.addresses(SMALL, compile_before_the_first)[SMALL[0]]
    assert object_of(library, tmp_path).stat().st_ino == theirs[0].st_ino


def test_unwritable_cache_warns_and_works(tmp_path, caplog) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    library = KernelLibrary(cache=blocked)
    assert library.addresses(SMALL)[SMALL[0]]
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(blocked) in record.getMessage() and "PYGGML_CACHE" in record.getMessage()


def test_kernels_of_old_versions_are_deleted(tmp_path) -> None:
    old, recent = tmp_path / "kernels-old", tmp_path / "kernels-recent"
    for folder in (old, recent):
        folder.mkdir()
        (folder / "x.o").write_bytes(b"")
    long_ago = time.time() - KEPT_SECONDS - 60
    os.utime(old, (long_ago, long_ago))
    library = KernelLibrary(cache=tmp_path)
    mine = tmp_path / f"kernels-{source_digest(library.target)}"
    mine.mkdir()
    os.utime(mine, (long_ago, long_ago))  # old, but opened now
    library.addresses(SMALL)
    assert not old.exists() and recent.exists() and mine.exists()


CALLS_ANOTHER = """
define linkonce_odr i64 @inner() noinline {{ ret i64 {number} }}
define i64 @{name}() {{ %r = call i64 @inner() ret i64 %r }}
"""


def test_functions_of_one_name_in_several_kernels_are_not_mixed_up() -> None:
    """Each compiling process numbers what it compiles from one, so names say nothing."""
    library = KernelLibrary()
    numbers = {"one": 1, "two": 2}
    objects = {}
    for name, number in numbers.items():
        module = llvm.parse_assembly(CALLS_ANOTHER.format(name=name, number=number))
        export_only(name, module)
        objects[name] = library.target.machine().emit_object(module)
    for name, address in library._load(objects).items():
        assert ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == numbers[name]


def test_unknown_kernel_is_named(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        KernelLibrary(cache=tmp_path).addresses(["no_such_kernel"])


def test_folder_depends_on_the_cpu() -> None:
    assert source_digest(Target.host()) != source_digest(Target.portable())


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_folder_depends_on_the_compiler(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, before = Target.host(), source_digest(Target.host())
    found = source._version

    def upgraded(name: str) -> bytes:
        return b"next " + found(name) if name == package else found(name)

    monkeypatch.setattr(source, "_version", upgraded)
    assert source_digest(target) != before


def test_versions_are_those_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file beside the package names it, and where there is none the installation does."""
    for package in ("numba", "llvmlite"):
        installed = importlib.metadata.version(package).encode()
        assert installed in source._version(package)
        with monkeypatch.context() as patch:
            patch.setattr(source.importlib.util, "find_spec", lambda name: None)
            assert source._version(package) == installed


def test_sources_that_changed_meanwhile_are_not_compiled(tmp_path) -> None:
    """Whoever edits a kernel must not find old code under the new name, or the reverse."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pyggml.backends.cpu.compile", tmp_path, "another digest"],
        input=f"{SMALL[0]}\n",
        env={**os.environ, **Target.host().environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "changed meanwhile" in done.stdout
    assert not list(tmp_path.iterdir())


def test_object_files_are_whole_or_absent(tmp_path) -> None:
    path = tmp_path / "x.o"
    assert read_object(path) is None
    write_object(path, b"code")
    assert read_object(path) == b"code"
    path.write_bytes(path.read_bytes() + b"!")
    assert read_object(path) is None


CACHED_RUN = """
import sys
sys.path.insert(0, {tests!r})
from cpu_products import Products, random_columns, random_weights
from pyggml.dtypes import GGMLType
products = Products()
products.device.library.progress = lambda *step: sys.exit(f"compiled {{step}}")
x = random_columns(5, 64)
y = products.product(random_weights(GGMLType.Q4_1, 8, 64), GGMLType.Q4_1, x, repack=True)
assert y.any()
loaded = [name for name in sys.modules if name.split(".")[0] == "numba"]
assert not loaded, loaded
"""


def test_cached_run_needs_no_numba() -> None:
    products = Products()
    raw, x = random_weights(T.Q4_1, 8, 64), random_columns(5, 64)
    products.product(raw, T.Q4_1, x, repack=True)
    products.backend.close()
    script = CACHED_RUN.format(tests=os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("type", [T.Q4_1, T.Q8_0, T.F16], ids=lambda t: t.label)
def test_every_cpu_computes_the_same_bits(type) -> None:
    """Without any CPU feature: the generic forms of all operations."""
    host, portable = Products(), Products(CpuDevice(KernelLibrary(Target.portable())))
    k = 3 * max(32, type.block_size)
    raw, x = random_weights(type, 19, k), random_columns(9, k)
    for n in (1, 9):
        a, b = host.product(raw, type, x[:n]), portable.product(raw, type, x[:n])
        assert (a == b).all()
    host.backend.close()
    portable.backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("type", [*LAYOUTS, T.F32, T.BF16], ids=lambda t: t.label)
def test_every_cpu_computes_the_same_bits_of_more_types(type) -> None:
    test_every_cpu_computes_the_same_bits(type)


@pytest.mark.slow
def test_all_kernels_compile() -> None:
    KernelLibrary().compile_all()


@pytest.mark.slow
def test_an_interrupt_leaves_no_worker_behind(tmp_path) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        KernelLibrary(cache=tmp_path).addresses([*SMALL, "run_plan", "run_worker"], interrupt)
    with pytest.raises(ChildProcessError):  # there is no child to wait for
        os.waitpid(-1, os.WNOHANG)
