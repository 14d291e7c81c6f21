"""The operation cases, as data: every backend's tests run them against the reference.

In a case `x(...)` makes a leaf of uniform values, `x.ids`, `x.mask` and others special ones
(op_case.py). Shapes are in ggml's order. Prime and unequal sizes show swapped dimensions and wrong
tails.
"""

import cases_attention
import cases_elementwise
import cases_experts
import cases_products
import cases_recurrent
import cases_rows
from op_case import Case

CASES: list[Case] = [
    *cases_elementwise.CASES,
    *cases_rows.CASES,
    *cases_attention.CASES,
    *cases_products.CASES,
    *cases_recurrent.CASES,
    *cases_experts.CASES,
]
assert len({case.name for case in CASES}) == len(CASES), "two cases of one name"
