"""A model in three words: architecture, size, type of its weights (llama_model_desc)."""

from collections.abc import Sequence
from contextlib import suppress

from pyggml.dtypes import GGMLType
from pyggml.errors import ModelError
from pyggml.gguf import Metadata

# general.file_type -> the name llama.cpp shows
FILE_TYPES = {
    0: "all F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K - Medium",
    11: "Q3_K - Small",
    12: "Q3_K - Medium",
    13: "Q3_K - Large",
    14: "Q4_K - Small",
    15: "Q4_K - Medium",
    16: "Q5_K - Small",
    17: "Q5_K - Medium",
    18: "Q6_K",
    19: "IQ2_XXS - 2.0625 bpw",
    20: "IQ2_XS - 2.3125 bpw",
    21: "Q2_K - Small",
    22: "IQ3_XS - 3.3 bpw",
    23: "IQ3_XXS - 3.0625 bpw",
    24: "IQ1_S - 1.5625 bpw",
    25: "IQ4_NL - 4.5 bpw",
    26: "IQ3_S - 3.4375 bpw",
    27: "IQ3_S mix - 3.66 bpw",
    28: "IQ2_S - 2.5 bpw",
    29: "IQ2_M - 2.7 bpw",
    30: "IQ4_XS - 4.25 bpw",
    31: "IQ1_M - 1.75 bpw",
    32: "BF16",
    36: "TQ1_0 - 1.69 bpw ternary",
    37: "TQ2_0 - 2.06 bpw ternary",
    38: "MXFP4 MoE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}
# what a file without that key is called by its most frequent type, where the names differ
GUESSES = {
    GGMLType.F32: 0,
    GGMLType.Q2_K: 10,
    GGMLType.Q3_K: 12,
    GGMLType.Q4_K: 15,
    GGMLType.Q5_K: 17,
    GGMLType.IQ2_XXS: 19,
    GGMLType.IQ2_XS: 20,
    GGMLType.IQ3_XXS: 23,
    GGMLType.IQ1_S: 24,
    GGMLType.IQ4_NL: 25,
    GGMLType.IQ3_S: 26,
    GGMLType.IQ2_S: 28,
    GGMLType.IQ4_XS: 30,
    GGMLType.IQ1_M: 31,
    GGMLType.TQ1_0: 36,
    GGMLType.TQ2_0: 37,
    GGMLType.MXFP4: 38,
}


MAX_LABEL = 24


def describe(metadata: Metadata, n_params: int, types: Sequence[GGMLType]) -> str:
    """As in "gemma3 270M Q4_K - Medium"; `types` are those of the tensors.

    The size is the one the file names, where llama.cpp goes by the number of layers.
    """
    arch, label = metadata.get_str("general.architecture"), ""
    with suppress(ModelError):  # stored as something else: as if it were missing
        label = metadata.get_str("general.size_label", "")
    if not (label.isprintable() and 0 < len(label) <= MAX_LABEL):
        label = size_label(n_params)
    return f"{arch} {label} {file_type(metadata, types)}"


def file_type(metadata: Metadata, types: Sequence[GGMLType]) -> str:
    """Name of the file's overall type; guessed from its tensors if it does not say."""
    with suppress(ModelError):
        return FILE_TYPES.get(metadata.get_int("general.file_type"), "unknown, may not work")
    most = max(types, key=types.count, default=GGMLType.F32)
    return f"(guessed) {FILE_TYPES[GUESSES[most]] if most in GUESSES else most.name}"


def mib(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / (1 << 20):,.1f} MiB"


def size_label(n_params: int) -> str:
    """Three digits at most: 331K, 135M, 1.7B, 32B."""
    if n_params < 999_500:
        return f"{n_params / 1e3:.0f}K"
    if n_params < 999_500_000:
        return f"{n_params / 1e6:.0f}M"
    billions = n_params / 1e9
    return f"{billions:.1f}B" if billions < 9.95 else f"{billions:.0f}B"
