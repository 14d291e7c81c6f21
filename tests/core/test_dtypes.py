"""The type table against ggml's own and the constants of the gguf package."""

import gguf
import pytest
from ggml_oracle import base

from pyggml.dtypes import TYPES, GGMLType

SHARED = [t for t in GGMLType if t.name in gguf.GGMLQuantizationType.__members__]


def test_only_types_newer_than_the_gguf_package_are_unshared() -> None:
    assert {t.name for t in GGMLType} - {t.name for t in SHARED} <= {"NVFP4", "Q1_0", "Q2_0"}
    assert {t.name for t in gguf.GGMLQuantizationType} <= {t.name for t in GGMLType}


@pytest.mark.parametrize("ggml_type", SHARED, ids=lambda t: t.label)
def test_the_gguf_package_agrees(ggml_type: GGMLType) -> None:
    theirs = gguf.GGMLQuantizationType[ggml_type.name]
    assert int(ggml_type) == theirs
    block_size, type_size = gguf.GGML_QUANT_SIZES[theirs]
    # the package still counts Q8_1's scale and sum as f32; in ggml they are f16
    assert ggml_type.type_size == (36 if ggml_type is GGMLType.Q8_1 else type_size)
    assert ggml_type.block_size == block_size


@pytest.mark.parametrize("ggml_type", list(GGMLType), ids=lambda t: t.label)
def test_ggml_agrees(ggml_type: GGMLType) -> None:
    traits = base().ggml_get_type_traits(ggml_type).contents
    if not traits.type_name:
        pytest.skip(f"ggml {base().ggml_version().decode()} is older than {ggml_type.label}")
    assert traits.type_name.decode() == ggml_type.label
    assert (traits.blck_size, traits.type_size) == (ggml_type.block_size, ggml_type.type_size)
    assert traits.is_quantized == ggml_type.is_quantized


@pytest.mark.parametrize("ggml_type", list(GGMLType), ids=lambda t: t.label)
def test_rows_are_whole_blocks(ggml_type: GGMLType) -> None:
    assert ggml_type.row_size(3 * ggml_type.block_size) == 3 * ggml_type.type_size
    assert ggml_type.is_quantized == (TYPES[ggml_type].numpy is None)
