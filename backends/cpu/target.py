"""The CPU that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True)
class Target:
    """An LLVM CPU name and its features ("+avx2,-sse4a,...")."""

    cpu: str
    features: str

    @classmethod
    def host(cls) -> Target:
        """This machine's CPU."""
        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    @classmethod
    def portable(cls) -> Target:
        """The least that every CPU of this architecture can do."""
        return cls("generic", "")

    def environment(self) -> dict[str, str]:
        """What makes Numba, and so `kernels.simd`, generate code for this CPU."""
        return {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": self.features}

    def machine(self) -> llvm.TargetMachine:
        """LLVM's code generator; position-independent, so constants are near their code."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_triple(llvm.get_process_triple())
        return target.create_target_machine(
            cpu=self.cpu, features=self.features, opt=3, reloc="pic", codemodel="small"
        )
