"""Quantizing: bytes equal to ggml's reference quantizers, and bounds on the error."""

import numpy as np
import pytest
from ggml_oracle import ggml_dequantize, ggml_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from pyggml.dtypes import GGMLType
from pyggml.quants import QUANTIZABLE, STEP, dequantize, quantize

T = GGMLType
Floats = NDArray[np.float32]
ORACLE = [t for t in QUANTIZABLE if t != T.F32]


def label(type: GGMLType) -> str:
    return type.label


def make_data() -> dict[str, Floats]:
    """Rows of 512 that take every path of the quantizers: [rows, 512]."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((96, 512))
    exponents = np.linspace(-40, 12, 96)[:, None]
    data = {
        "normal": normal,
        "magnitudes": normal * 2**exponents,
        "outliers": normal * np.where(rng.random(normal.shape) < 0.01, 100, 1),
        "sparse": np.where(rng.random(normal.shape) < 0.03, normal, 0),
        "positive": np.abs(normal),
        "negative": -np.abs(normal),
        "uniform": rng.uniform(-1, 1, normal.shape),
        "integers": rng.integers(-3, 4, normal.shape),  # many ties
        "halves": rng.integers(-254, 255, normal.shape) / 2,  # many halves to round
        "constant": np.repeat([[1], [-1], [0.3], [-0.3], [1e-3], [-7e4]], 512, axis=1),
        "zero": np.stack([np.zeros(512), np.full(512, -0.0)]),
        "cosine": (0.1 + 2 * np.cos(np.arange(4096))).reshape(8, 512),
    }
    return {name: values.astype(np.float32) for name, values in data.items()}


DATA = make_data()


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("type", ORACLE, ids=label)
def test_bytes_are_those_of_ggml(type: GGMLType, name: str) -> None:
    x = DATA[name]
    ours, theirs = quantize(x, type), ggml_quantize(x, type)
    if type == T.IQ4_NL:
        # ggml leaves the levels of an all-zero block undefined; its scale is 0
        written = np.abs(x).reshape(len(x), -1, 32).max(axis=2) >= 1e-15
        ours, theirs = (a.reshape(len(x), -1, 18)[written] for a in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("type", ORACLE, ids=label)
def test_huge_values_overflow_their_scales_as_in_ggml(type: GGMLType) -> None:
    x = DATA["normal"] * np.float32(2**40)
    np.testing.assert_array_equal(quantize(x, type), ggml_quantize(x, type))


@pytest.mark.parametrize("type", ORACLE, ids=label)
def test_tiny_values_decode_as_in_ggml(type: GGMLType) -> None:
    # in this range ggml's levels come from undefined conversions of infinity; the scales are 0
    x = DATA["normal"] * np.float32(2**-140)
    ours = dequantize(quantize(x, type), type)
    if type != T.MXFP4:
        np.testing.assert_array_equal(ours, decoded_by_ggml(x, type))
    assert np.abs(ours - x).max() <= np.abs(x).max()


def decoded_by_ggml(x: Floats, type: GGMLType) -> Floats:
    raw = ggml_quantize(x, type)
    return dequantize(raw, type) if type == T.Q8_1 else ggml_dequantize(raw, type)


def test_mxfp4_exponent_next_to_powers_of_two() -> None:
    # log2 in F32 reaches the next power a few values early: as many as in ggml
    below = np.arange(48, dtype=np.uint32)
    powers = (np.arange(4, 252, dtype=np.uint32) << 23)[:, None] - below
    x = np.zeros((*powers.shape, 32), np.float32)
    x[..., 0] = powers.view(np.float32)
    np.testing.assert_array_equal(quantize(x, T.MXFP4), ggml_quantize(x, T.MXFP4))


def test_nvfp4_every_scale() -> None:
    largest = np.concatenate([np.linspace(0, 0.2, 500), np.geomspace(1e-3, 4000, 2000)])
    x = np.outer(largest, np.linspace(-1, 1, 64)).astype(np.float32)
    np.testing.assert_array_equal(quantize(x, T.NVFP4), ggml_quantize(x, T.NVFP4))


@pytest.mark.parametrize("type", QUANTIZABLE, ids=label)
def test_result_does_not_depend_on_how_rows_are_grouped(type: GGMLType) -> None:
    x = np.resize(DATA["outliers"], (STEP // 512 + 3, 512))
    whole = quantize(x, type)
    np.testing.assert_array_equal(whole[-1], quantize(x[-1], type))
    np.testing.assert_array_equal(dequantize(whole, type)[-1], dequantize(whole[-1], type))
    one_block = quantize(x[0, : type.block_size], type)
    np.testing.assert_array_equal(whole[0, : type.type_size], one_block)


# test-quantize-fns: root of the summed squares over n, n = 4096, for 0.1 + 2 cos(i)
LIMITS = {T.Q1_0: 0.025, T.Q2_0: 0.01, T.TQ1_0: 0.01, T.TQ2_0: 0.01, T.Q2_K: 0.0075}
LIMITS |= {T.Q3_K: 0.004, T.NVFP4: 0.003}


@pytest.mark.parametrize("type", QUANTIZABLE, ids=label)
def test_error_is_below_ggmls_limit(type: GGMLType) -> None:
    x = DATA["cosine"].reshape(4096)
    error = dequantize(quantize(x, type), type) - x
    assert np.sqrt(np.square(error).sum()) / 4096 < LIMITS.get(type, 0.002)


@pytest.mark.parametrize("type", QUANTIZABLE, ids=label)
def test_zeros_stay_zero(type: GGMLType) -> None:
    assert not dequantize(quantize(np.zeros((3, 512), np.float32), type), type).any()


# largest relative error of a constant row: FP4 ends at 6 of 8, the scales of NVFP4 have 3 bits
CONSTANT = {T.MXFP4: 1 / 4, T.NVFP4: 1 / 16, T.Q8_K: 2**-23, T.F32: 0}


@pytest.mark.parametrize("type", QUANTIZABLE, ids=label)
@given(value=st.floats(1, 1000, width=32), negative=st.booleans())
@settings(deadline=None, max_examples=25)
def test_constant_rows(type: GGMLType, value: float, negative: bool) -> None:
    value = -value if negative else value
    values = dequantize(quantize(np.full(256, value, np.float32), type), type)
    assert len(set(values)) == 1 or type == T.Q1_0
    assert abs(values[0] - value) <= abs(value) * CONSTANT.get(type, 2**-8)


# Half a step, or a whole one where the side opposite to the extreme lacks the last level, relative
# to the largest magnitude m of the block; a range counts as 2 m.
STEPS = {
    T.F32: 0,
    T.F16: 2**-11,
    T.BF16: 2**-8,
    T.Q4_0: 1 / 8,
    T.Q4_1: 1 / 15,
    T.Q5_0: 1 / 16,
    T.Q5_1: 1 / 31,
    T.Q8_0: 1 / 254,
    T.Q8_1: 1 / 254,
    T.Q8_K: 1 / 254,
    T.Q1_0: 2,
    T.Q2_0: 1 / 2,
    T.TQ1_0: 1 / 2,
    T.TQ2_0: 1 / 2,
    T.MXFP4: 1 / 4,
    T.NVFP4: 1 / 4,
}
# Blocks of no larger magnitude are zeros: half the smallest scale times the largest level.
ZEROS = {T.NVFP4: 2**-10 * 6}
rows = arrays(np.float32, 256, elements=st.floats(-1000, 1000, width=32))


@pytest.mark.parametrize("type", STEPS, ids=label)
@given(x=rows)
@settings(deadline=None, max_examples=100)
def test_error_of_any_value_is_at_most_a_step(type: GGMLType, x: Floats) -> None:
    error = np.abs(dequantize(quantize(x, type), type) - x).reshape(-1, type.block_size)
    largest = np.abs(x).reshape(error.shape).max(axis=1, keepdims=True)
    # the scale is rounded to F16 after the values were divided by it
    assert (error <= largest * (STEPS[type] + 2**-10) + ZEROS.get(type, 2**-14)).all()


# The searches weigh errors by magnitude, so single small values may be far off: a bound on the
# root mean square instead, relative to the largest magnitude of the super-block.
SEARCHED = {T.Q2_K: 0.35, T.Q3_K: 0.2, T.Q4_K: 0.09, T.Q5_K: 0.05, T.Q6_K: 0.04}
SEARCHED |= {T.IQ4_NL: 0.1, T.IQ4_XS: 0.1}


@pytest.mark.parametrize("type", SEARCHED, ids=label)
@given(x=rows)
@settings(deadline=None, max_examples=100)
def test_mean_error_of_searched_types(type: GGMLType, x: Floats) -> None:
    error = dequantize(quantize(x, type), type) - x
    bound = SEARCHED[type] * np.abs(x).max() + 2**-14
    assert np.sqrt(np.square(error).mean()) <= bound


@pytest.mark.parametrize("type", QUANTIZABLE, ids=label)
@given(x=arrays(np.uint32, 256).map(lambda bits: bits.view(np.float32)))
@settings(deadline=None, max_examples=60)
def test_any_float_gives_a_block(type: GGMLType, x: Floats) -> None:
    raw = quantize(x, type)
    assert dequantize(raw, type).shape == x.shape
    np.testing.assert_array_equal(raw, quantize(x, type))
