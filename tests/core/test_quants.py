"""Dequantizing: every type against the gguf package, real ggml and blocks worked out by hand."""

from typing import Any

import gguf.quants
import numpy as np
import pytest
from core.make_iq_grids import TARGET, make
from ggml_oracle import ggml_dequantize, ggml_quantize_file, ggml_version, type_traits
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from pyggml.dtypes import TYPES, GGMLType
from pyggml.errors import UserError
from pyggml.quants import DEQUANTIZABLE, QUANTIZABLE, dequantize, quantize
from pyggml.quants_base import CODECS

T = GGMLType
GGUF = [t for t in DEQUANTIZABLE if t not in (T.Q8_1, T.Q8_K, T.Q1_0, T.Q2_0)]
GGML = [t for t in DEQUANTIZABLE if t not in (T.F32, T.Q8_1)]  # ggml cannot decode Q8_1 either
SCALES = ("d", "dmin", "m")


def random_blocks(type: GGMLType, rows: int = 24) -> NDArray[np.uint8]:
    """Random rows of four blocks with finite scales: [rows, 4 * type_size]."""
    rng = np.random.default_rng(type)
    raw = rng.integers(0, 256, (rows, 4 * type.type_size), dtype=np.uint8)
    blocks: NDArray[Any] = raw.reshape(-1).view(CODECS[type].layout)
    if blocks.dtype.names is None:
        blocks[:] = rng.standard_normal(blocks.shape) if type != T.BF16 else blocks & 0xBFFF
    elif type == T.IQ1_M:
        blocks["scales"][:, 3] &= 0xBFFF  # the top bit of the exponent of the spread scale
    for name in set(SCALES) & set(blocks.dtype.names or ()):
        if blocks[name].dtype.kind == "f":
            blocks[name] = rng.standard_normal(blocks[name].shape)
    return raw


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32)


def label(type: GGMLType) -> str:
    return type.label


@pytest.mark.parametrize("type", GGUF, ids=label)
def test_dequantizes_as_the_gguf_package(type: GGMLType) -> None:
    raw = random_blocks(type)
    with np.errstate(over="ignore"):  # the largest scale of mxfp4
        expected = gguf.quants.dequantize(raw, GGMLQuantizationType(type))
    np.testing.assert_array_equal(bits(dequantize(raw, type)), bits(expected))


@pytest.mark.parametrize("type", GGML, ids=label)
def test_dequantizes_as_ggml(type: GGMLType) -> None:
    raw = random_blocks(type)
    np.testing.assert_array_equal(bits(dequantize(raw, type)), bits(ggml_dequantize(raw, type)))


@pytest.mark.parametrize("type", DEQUANTIZABLE, ids=label)
def test_any_bytes_decode_like_ggml_up_to_the_sign_of_nan(type: GGMLType) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (500, type.type_size), dtype=np.uint8)
    values = dequantize(raw, type)
    assert values.shape == (500, type.block_size)
    if type in GGML:
        np.testing.assert_array_equal(values, ggml_dequantize(raw, type))


@pytest.mark.parametrize("type", [T.MXFP4, T.NVFP4], ids=label)
def test_every_scale_byte_of_the_fp4_types(type: GGMLType) -> None:
    raw = np.full((256, type.type_size), 0x75, np.uint8)  # 5: 6 / 2, 7: 12 / 2
    raw[:, : 1 if type == T.MXFP4 else 4] = np.arange(256)[:, None]
    np.testing.assert_array_equal(bits(dequantize(raw, type)), bits(ggml_dequantize(raw, type)))


# ggml takes seconds to prepare the neighbours of the larger codebooks
SEARCH_TABLES = [
    T.IQ2_XXS,
    T.IQ3_XXS,
    T.IQ3_S,
    *(pytest.param(t, marks=pytest.mark.slow) for t in (T.IQ2_XS, T.IQ2_S, T.IQ1_S, T.IQ1_M)),
]


@pytest.mark.parametrize("type", SEARCH_TABLES, ids=label)
def test_codebook_types_give_back_what_ggml_encoded(type: GGMLType) -> None:
    x = np.random.default_rng(2).standard_normal((2, 512)).astype(np.float32)
    raw = ggml_quantize_file(x, type, imatrix=np.ones(512, np.float32))
    error = np.square(dequantize(raw, type) - x).mean()
    assert error < {"iq1": 0.35, "iq2": 0.15, "iq3": 0.06}[type.label[:3]]


def test_tables_agree_with_ggml() -> None:
    assert ggml_version()
    assert set(DEQUANTIZABLE) == {t for t in TYPES if t.is_quantized} | {T.F32, T.F16, T.BF16}
    for type in TYPES:
        traits = type_traits(type)
        assert (traits.blck_size, traits.type_size) == (type.block_size, type.type_size)
        assert bool(traits.is_quantized) == type.is_quantized


def test_grids_are_those_of_the_gguf_package() -> None:
    made = make()
    with np.load(TARGET) as stored:
        assert set(stored.files) == set(made)
        for name, grid in made.items():
            assert stored[name].dtype == grid.dtype
            np.testing.assert_array_equal(stored[name], grid)


def half(value: float) -> list[int]:
    return list(np.float16(value).tobytes())


def test_q8_1_by_hand() -> None:
    raw = np.array(half(0.5) + half(7) + [2, 254] + [0] * 30, np.uint8)
    assert dequantize(raw, T.Q8_1)[:3].tolist() == [1, -1, 0]
    x = np.array([127, -3.4, 2.5] + [0] * 29, np.float32)
    d, s = quantize(x, T.Q8_1)[:4].view(np.float16)
    assert (d, s) == (1, 127 - 3 + 3)  # halves round away from zero


def test_q1_0_by_hand() -> None:
    raw = np.array(half(0.5) + [0b00000101] + [0] * 14 + [0x80], np.uint8)
    values = dequantize(raw, T.Q1_0)
    assert np.flatnonzero(values > 0).tolist() == [0, 2, 127]
    assert set(np.abs(values)) == {0.5}


def test_q2_0_by_hand() -> None:
    raw = np.array(half(0.5) + [0b11100100] + [0b01010101] * 15, np.uint8)
    assert dequantize(raw, T.Q2_0).tolist() == [-0.5, 0, 0.5, 1] + [0] * 60


def test_nvfp4_by_hand() -> None:
    # scales 1, 2, 2**-9 (the smallest) and 448 (the largest); low nibbles come first
    raw = np.array([0x38, 0x40, 0x01, 0x7E] + [0x91] * 32, np.uint8)
    values = dequantize(raw, T.NVFP4).reshape(4, 2, 8)
    assert values[:, 0, 0].tolist() == [0.5, 1, 2**-10, 224]
    np.testing.assert_array_equal(values[:, 1], -values[:, 0])


def test_q4_0_by_hand() -> None:
    raw = np.array(half(2) + [0xF0] + [0x88] * 15, np.uint8)
    expected = [0.0] * 32
    expected[0], expected[16] = -16, 14
    assert dequantize(raw, T.Q4_0).tolist() == expected


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits_in = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFFC00000, 0x00000001]
    stored = quantize(np.array(bits_in, np.uint32).view(np.float32), T.BF16).view(np.uint16)
    assert stored.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFC0, 0x0000]
    assert dequantize(stored.view(np.uint8), T.BF16)[1] == np.float32(1.015625)


def test_f16_rounds_to_nearest_even_and_overflows_to_infinity() -> None:
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, -1e9, 2**-25], np.float32)
    expected = [1, 1 + 2**-9, 65504, np.inf, -np.inf, 0]
    assert dequantize(quantize(x, T.F16), T.F16).tolist() == expected


def test_f32_is_a_copy() -> None:
    x = np.array([[1.5, -0.0], [np.inf, 1e-45]], np.float32)
    raw = quantize(x, T.F32)
    assert raw.shape == (2, 8)
    np.testing.assert_array_equal(bits(dequantize(raw, T.F32)), bits(x))


@pytest.mark.parametrize("type", [T.Q4_0, T.Q6_K, T.BF16], ids=label)
def test_leading_shape_is_kept(type: GGMLType) -> None:
    x = np.random.default_rng(3).standard_normal((2, 3, 512)).astype(np.float32)
    raw = quantize(x, type)
    assert raw.shape == (2, 3, type.row_size(512))
    values = dequantize(raw, type)
    assert values.shape == x.shape
    np.testing.assert_array_equal(dequantize(raw[1, 2], type), values[1, 2])
    strided = np.repeat(raw, 2, axis=1)[:, ::2]
    assert not strided.flags.c_contiguous
    np.testing.assert_array_equal(dequantize(strided, type), values)
    assert dequantize(raw[:0], type).shape == (0, 3, 512)
    assert quantize(x[:0], type).shape == (0, 3, type.row_size(512))


def test_unsupported_types_are_named() -> None:
    with pytest.raises(UserError, match=r"no conversion between i32 and f32; known: f32, f16, q4_"):
        dequantize(np.zeros(4, np.uint8), T.I32)
    with pytest.raises(UserError, match=r"iq2_xxs has no quantizer here; use one of f32, f16, q4_"):
        quantize(np.zeros(256, np.float32), T.IQ2_XXS)


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="a row of q4_K is a multiple of 256 values, not 100"):
        quantize(np.zeros((2, 100), np.float32), T.Q4_K)
    with pytest.raises(UserError, match="a row of q4_0 is a multiple of 18 bytes, not 20 of uint8"):
        dequantize(np.zeros(20, np.uint8), T.Q4_0)
    with pytest.raises(UserError, match="a row of q4_0 .* not 18 of int8"):
        dequantize(np.zeros(18, np.int8), T.Q4_0)


def test_what_can_be_quantized() -> None:
    left = {t.label for t in DEQUANTIZABLE} - {t.label for t in QUANTIZABLE}
    assert left == {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"}
