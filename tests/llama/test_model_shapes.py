"""The generated headers are those of the published models."""

import math
from pathlib import Path

import pytest
from model_shapes import SHAPES, write_header

from pyggml.errors import GgufError
from pyggml.gguf import open_gguf
from pyggml.llama import architectures
from pyggml.llama.weights import WantList

# billions of weights, and GiB of the usual files (their model cards)
PUBLISHED = {
    "deepseek-r1": (671.03, 376.7),
    "mixtral-8x22b": (140.62, 79.7),
    "qwen3-30b-a3b": (30.53, 17.28),
    "gpt-oss-120b": (116.83, 59.02),
    "glm-4.5-air": (110.47, 67.85),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_those_of_the_published_model(name: str, tmp_path: Path) -> None:
    with open_gguf(write_header(tmp_path / "m.gguf", name), allow_no_data=True) as gguf:
        billions, gib = PUBLISHED[name]
        assert sum(math.prod(t.ne) for t in gguf.tensors.values()) / 1e9 == pytest.approx(
            billions, rel=1e-4
        )
        assert gguf.nbytes / 2**30 == pytest.approx(gib, rel=2e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_the_architecture_finds_every_tensor_and_knows_them_all(name: str, tmp_path: Path) -> None:
    with open_gguf(write_header(tmp_path / "m.gguf", name), allow_no_data=True) as gguf:
        arch = architectures.find(gguf.metadata.get_str("general.architecture"))
        want: WantList = arch.weights(arch.hparams(gguf.metadata))
        missing = {w.name for w in want if w.required} - gguf.tensors.keys()
        assert missing == set()
        unknown = gguf.tensors.keys() - {w.name for w in want}
        assert {n for n in unknown if not n.startswith(tuple(want.ignored))} == set()


def test_only_planners_may_open_them(tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.gguf", "qwen3-30b-a3b")
    with pytest.raises(GgufError, match="--dry-run"):
        open_gguf(path)
