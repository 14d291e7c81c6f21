"""The product kernels stay within their instruction budget on every kind of x86 CPU."""

from __future__ import annotations

import platform
from dataclasses import replace

import instruction_counts as ic
import pytest
from instruction_counts import KERNELS, PATHS, Counts, count, counts, problems

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="LLVM compiles for this machine"
)

BUDGETED = sorted({kernel for kernel, _ in ic.read_budget()})

ASSEMBLY = """
	.type	f,@function
f:                                      # @f
	xorl	%eax, %eax
.LBB0_1:                                # outer loop
	incq	%rbx
	.p2align	4
.LBB0_2:                                # products, one of them spelled with a prefix
	vmovups	(%rdi), %ymm0
	{vex}	vpdpbusd	(%rsi), %ymm0, %ymm1
	vmovups	%ymm1, -32(%rsp)        # 32-byte Spill
	vmovups	-32(%rsp), %ymm1        # 32-byte Reload
	vpmaddwd	%ymm1, %ymm2, %ymm3
	testq	%rcx, %rcx
	je	.LBB0_4
	addq	$32, %rdi
.LBB0_4:
	decq	%rcx
	jne	.LBB0_2
.LBB0_5:                                # copies: no products
	decq	%rdx
	jne	.LBB0_5
	decq	%r8
	jne	.LBB0_1
	vpmaddwd	%ymm1, %ymm2, %ymm3     # in no loop
	retq
.Lfunc_end0:
	.type	g,@function
g:
.LBB1_1:                                # four products, around a loop without any
	vfmadd231ps	%ymm0, %ymm1, %ymm2
	vfmadd231ps	%ymm0, %ymm1, %ymm3
.LBB1_2:
	decq	%rdx
	jne	.LBB1_2
	vmulps	%ymm0, %ymm1, %ymm4
	callq	fmaf@PLT
	decq	%rcx
	je	.LBB1_3
	jmp	.LBB1_1
.LBB1_3:
	retq
.Lfunc_end1:
"""


def test_loops_that_multiply_are_counted() -> None:
    assert count(ASSEMBLY) == Counts(short=10, short_spills=1, long=9, long_spills=0)


def test_code_without_products_is_refused() -> None:
    with pytest.raises(AssertionError, match="no loop multiplies"):
        count(
            ASSEMBLY[
                ASSEMBLY.index(".LBB0_5:") : ASSEMBLY.index(
                    "	vpmaddwd	%ymm1, %ymm2, %ymm3     #"
                )
            ]
        )


def test_what_has_grown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Counts(short=100, short_spills=0, long=1000, long_spills=30)
    assert not budget.over(budget)
    assert not Counts(110, 2, 1100, 33).over(budget)
    assert not Counts(1, 0, 1, 0).over(budget)
    assert replace(budget, short=111).over(budget) == [
        "111 instructions in the short loop, the budget is 100"
    ]
    assert replace(budget, long_spills=34).over(budget) == [
        "34 stores to the stack in the long loop, the budget is 30"
    ]
    monkeypatch.setattr(ic, "read_budget", lambda: {("mul_mat_x", "avx2"): budget})
    said = problems({("mul_mat_x", "avx2"): replace(budget, short=200)})
    assert said[0].startswith("mul_mat_x on avx2: 200 instructions")
    assert said[-1].endswith("python tests/instruction_counts.py refresh mul_mat_x")


def test_a_budget_is_kept_row_by_row(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ic, "BUDGET", tmp_path / "budget.csv")
    old, new = Counts(1, 2, 3, 4), Counts(5, 6, 7, 8)
    ic.write_budget({("b", "avx2"): old, ("a", "avx2"): old})
    ic.write_budget({("b", "avx2"): new})
    assert ic.read_budget() == {("a", "avx2"): old, ("b", "avx2"): new}


def test_every_budget_has_all_paths() -> None:
    assert set(BUDGETED) <= set(KERNELS)
    assert set(ic.read_budget()) == {(kernel, path) for kernel in BUDGETED for path in PATHS}


def test_one_kernel_is_within_its_budget() -> None:
    found = counts("avx2", ["mul_mat_q4_0"])
    said = problems({("mul_mat_q4_0", "avx2"): found["mul_mat_q4_0"]})
    assert not said, "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_all_kernels_are_within_their_budget(path: str) -> None:
    found = counts(path, BUDGETED)
    said = problems({(kernel, path): c for kernel, c in found.items()})
    assert not said, "\n".join(said)
