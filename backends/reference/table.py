"""Which function is the reference of which operation."""

from collections.abc import Callable

import numpy as np

from pyggml.backends.reference import (
    ops_attention,
    ops_elementwise,
    ops_matmul,
    ops_recurrent,
    ops_rows,
)
from pyggml.backends.reference.memory import Array
from pyggml.ops import Op
from pyggml.tensor import Tensor

# Gives the values of the result ([ne3, ne2, ne1, ne0]), or None after writing them itself.
Run = Callable[[Tensor], Array | None]

REFERENCE: dict[Op, Run] = {
    Op.ADD: ops_elementwise.binary(np.add),
    Op.SUB: ops_elementwise.binary(np.subtract),
    Op.MUL: ops_elementwise.binary(np.multiply),
    Op.DIV: ops_elementwise.binary(np.divide),
    Op.ADD_ID: ops_elementwise.add_id,
    Op.SCALE: ops_elementwise.scale,
    Op.CLAMP: ops_elementwise.clamp,
    Op.SQR: ops_elementwise.sqr,
    Op.SQRT: ops_elementwise.sqrt,
    Op.FILL: ops_elementwise.fill,
    Op.UNARY: ops_elementwise.unary,
    Op.GLU: ops_elementwise.glu,
    Op.NORM: ops_rows.norm,
    Op.RMS_NORM: ops_rows.rms_norm,
    Op.L2_NORM: ops_rows.l2_norm,
    Op.SUM_ROWS: ops_rows.sum_rows,
    Op.GET_ROWS: ops_rows.get_rows,
    Op.SET_ROWS: ops_rows.set_rows,
    Op.CPY: ops_rows.copy,
    Op.CONT: ops_rows.copy,
    Op.DUP: ops_rows.copy,
    Op.CONCAT: ops_rows.concat,
    Op.REPEAT: ops_rows.repeat,
    Op.ARGSORT: ops_rows.argsort,
    Op.TOP_K: ops_rows.top_k,
    Op.MUL_MAT: ops_matmul.mul_mat,
    Op.MUL_MAT_ID: ops_matmul.mul_mat_id,
    Op.MUL_MAT_ID_COLD: ops_matmul.mul_mat_id_cold,
    Op.SOFT_MAX: ops_attention.soft_max,
    Op.ROPE: ops_attention.rope,
    Op.FLASH_ATTN_EXT: ops_attention.flash_attn_ext,
    Op.SSM_CONV: ops_recurrent.ssm_conv,
    Op.GATED_DELTA_NET: ops_recurrent.gated_delta_net,
}
