"""Compiles kernels to object files; runs in the processes of `compile_workers.py`.

    python -m pyggml.backends.cpu.compile FOLDER DIGEST

reads kernel names from standard input, one per line, and answers each with a line of JSON:
{"name": ..., "error": ""}. Only these processes import Numba.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any, cast

from pyggml.backends.cpu import kernels
from pyggml.backends.cpu.object_file import write_object
from pyggml.backends.cpu.target import Target

# What generated code may call: LLVM's own, and C functions that every process has.
_EXTERNAL = re.compile(r"llvm\.|(memcpy|memset|memmove|(exp|log|sin|cos|tan|tanh|pow|erf)f?)$")
# What only measurements of the machine call (kernels/probe.py).
PROBES = "probe_"


def import_kernels() -> None:
    """Import every kernel module, which registers the kernels."""
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")


def kernel_names() -> list[str]:
    """All kernels and entry points that models may need."""
    from pyggml.backends.cpu.kernels.access import KERNELS

    import_kernels()
    return sorted(name for name in KERNELS if not name.startswith(PROBES))


def compile_object(name: str, target: Target) -> bytes:
    """Object code that exports one kernel as a C function of its name."""
    code: bytes = target.machine().emit_object(compile_module(name))
    return code


def compile_module(name: str) -> Any:
    """LLVM's code of a kernel for the CPU that Numba generates code for, ready for `Target`."""
    import llvmlite.binding as llvm
    import numba

    from pyggml.backends.cpu.kernels.access import KERNELS

    kernel = KERNELS[name]
    compile_function: Any = numba.njit  # its stubs do not know all options
    compiled = compile_function(
        kernel.signature,
        nogil=True,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(kernel.function)
    (result,) = compiled.overloads.values()
    module = llvm.parse_assembly(result.library.get_llvm_str())
    module.link_in(llvm.parse_assembly(_entry_point(name, kernel.signature, result.fndesc)))
    unknown = [f.name for f in module.functions if f.is_declaration and not _EXTERNAL.match(f.name)]
    assert not unknown, f"kernel {name} calls {unknown}: it must not raise, print or allocate"
    export_only(name, module)
    return module


def export_only(name: str, module: Any) -> None:
    """Hide all functions and variables but one.

    Numba numbers the functions of a process from one: functions of other kernels, compiled by
    other processes, have the same names, and whoever links both would take one for the other.
    """
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = "internal"


def _entry_point(name: str, signature: Any, descriptor: Any) -> str:
    """LLVM text of a C function `name` that calls Numba's function and drops its status."""
    import llvmlite.binding as llvm
    from llvmlite import ir
    from numba.core.registry import cpu_target

    context: Any = cpu_target.target_context
    types = [context.get_value_type(t) for t in signature.args]
    result = signature.return_type
    module = ir.Module(name)
    module.triple = llvm.get_process_triple()
    no_value = str(result) == "none"
    c_result = ir.VoidType() if no_value else context.get_value_type(result)
    function = ir.Function(module, ir.FunctionType(c_result, types), name)
    builder = ir.IRBuilder(function.append_basic_block())
    callee = context.declare_function(module, descriptor)
    _, value = context.call_conv.call_function(
        builder, callee, result, signature.args, function.args
    )
    if no_value:
        builder.ret_void()
    else:
        builder.ret(value)
    return str(module)


def main(folder: str, digest: str) -> None:
    """Serve compile requests until standard input ends.

    `digest` names the sources that the folder is for: code of others must not get into it.
    """
    from numba.core import config

    from pyggml.backends.cpu.library import source_digest

    target = Target(cast(Any, config).CPU_NAME, cast(Any, config).CPU_FEATURES)
    import_kernels()
    current = source_digest(target)
    for line in iter(sys.stdin.readline, ""):
        name, error = line.strip(), ""
        try:
            if digest != current:
                raise RuntimeError("the kernels' sources changed meanwhile: start again")
            write_object(Path(folder) / f"{name}.o", compile_object(name, target))
        except Exception as e:  # a bug in a kernel: the parent process reports it
            error = f"{type(e).__name__}: {e}"
        sys.stdout.write(json.dumps({"name": name, "error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
