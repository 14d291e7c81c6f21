"""Where layers, weights and caches of a model lie, and what is said about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeDevice, cpu
from placed_models import MIB, N_LAYER, blocks_in, loaded, places, write_dense, write_moe
from simulated import simulation
from tiny import write_tiny

from pyggml.backend import Caps, buffer_of
from pyggml.backends.cuda.device import CudaDevice
from pyggml.errors import ConfigError
from pyggml.llama import load
from pyggml.llama.api import Llama
from pyggml.llama.batch import Batch
from pyggml.llama.loader import ModelParams, load_model
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.placement_rules import Rule, cpu_moe, n_cpu_ffn, n_cpu_moe, parse_rules
from pyggml.ops import Op


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("placement") / "dense.gguf"
    return write_dense(path)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("placement") / "moe.gguf"
    return write_moe(path)


# ---------------------------------------------------------------- -ngl
@pytest.mark.parametrize(
    ("n_gpu_layers", "blocks", "output"),
    [
        (0, [], "CPU_Mapped"),
        (1, [], "CUDA0"),
        (3, [2, 3], "CUDA0"),
        (4, [1, 2, 3], "CUDA0"),
        (5, [0, 1, 2, 3], "CUDA0"),
        (999, [0, 1, 2, 3], "CUDA0"),
        (-1, [0, 1, 2, 3], "CUDA0"),
    ],
)
def test_the_output_is_the_first_layer_on_a_gpu(
    dense: Path,
    n_gpu_layers: int,
    blocks: list[int],
    output: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"), loaded(dense, n_gpu_layers=n_gpu_layers) as llama:
        assert blocks_in(llama, "CUDA0") == blocks
        where = places(llama)
        assert where["output.weight"] == where["output_norm.weight"] == output
        assert where["token_embd.weight"] == "CPU_Mapped"
        n = len(blocks) + (output == "CUDA0")
        assert f"offloaded {n}/5 layers to GPU" in caplog.text
        assert "using device CUDA0 (NVIDIA GeForce RTX 3060 [simulated]) - " in caplog.text
        assert (f"offloading {n - 1} repeating layers to GPU" in caplog.text) == (n > 0)


def test_no_device_is_like_no_layer(dense: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), loaded(dense, use=()) as llama:
        assert [d.name for d in llama.model.devices] == ["CPU"]
        # nothing is pinned without a card: products are repacked
        assert set(places(llama).values()) == {"CPU_Mapped", "CPU_REPACK"}
    assert "offload" not in caplog.text


@pytest.mark.parametrize(
    ("split", "first"), [((7.0, 5.0), 8), ((1.0, 0.0), 12), ((0.0, 1.0), 0), ((1.0, 1.0), 7)]
)
def test_layers_are_shared(moe: Path, split: tuple[float, ...], first: int) -> None:
    with loaded(moe, 2, tensor_split=split) as llama:
        assert blocks_in(llama, "CUDA0") == list(range(first))
        assert blocks_in(llama, "CUDA1") == list(range(first, N_LAYER))


def test_the_order_of_devices_is_that_of_the_list(moe: Path) -> None:
    with loaded(moe, 3, tensor_split=(1.0, 0.0, 0.0), use=("CUDA2", "CUDA0", "CUDA1")) as m:
        assert blocks_in(m, "CUDA2") == list(range(N_LAYER))


def test_a_main_gpu_that_has_no_effect_is_a_warning(
    dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(dense, 2, main_gpu=1):
        pass
    with loaded(dense, 2, main_gpu=1, split_mode="none") as llama:
        assert [d.name for d in llama.model.placement.gpus] == ["CUDA1"]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == ["--main-gpu 1 has no effect without --split-mode none"]


# ---------------------------------------------------------------- -ot
def test_the_first_rule_that_matches_counts(moe: Path) -> None:
    one, all_blocks = r"blk\.3\..*=CUDA0", r"blk\..*=CPU"
    for n_gpu_layers in (0, 99):
        with loaded(moe, rules=f"{one},{all_blocks}", n_gpu_layers=n_gpu_layers) as llama:
            assert blocks_in(llama, "CUDA0") == [3]
        with loaded(moe, rules=f"{all_blocks},{one}", n_gpu_layers=n_gpu_layers) as llama:
            assert blocks_in(llama, "CUDA0") == []


def test_rules_for_two_cards(moe: Path) -> None:
    with loaded(moe, 2, rules=r"\.(1[01])\.*=CUDA0,\.([23])\.*=CUDA1", n_gpu_layers=0) as llama:
        assert blocks_in(llama, "CUDA0") == [10, 11] and blocks_in(llama, "CUDA1") == [2, 3]
        assert places(llama)["output.weight"] == "CPU_Mapped"
    with loaded(moe, 2, rules=r"blk\.[45]\.=CPU", tensor_split=(1.0, 1.0)) as llama:
        assert blocks_in(llama, "CUDA0") == [0, 1, 2, 3, 6]
        assert blocks_in(llama, "CUDA1") == [7, 8, 9, 10, 11]


def test_everything_on_the_cpu_leaves_the_card_empty(moe: Path) -> None:
    with loaded(moe, rules=".*=CPU") as llama:
        assert set(places(llama).values()) == {"CPU_Mapped"}
        # rules that do not name caches leave them with their layer
        llama.context()
        assert {b.name for c in llama._contexts for b in c.memory.caches[0].buffers} == {"CUDA0"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("attn=FOO", "-ot attn=FOO: unknown buffer type 'FOO'\navailable buffer types: CPU, CUDA0"),
        ("attn=CUDA1", "unknown buffer type 'CUDA1'"),
        ("attn=CUDA_Host", "unknown buffer type 'CUDA_Host'"),
        ("attn=CPU_REPACK", "unknown buffer type 'CPU_REPACK'"),
    ],
)
def test_unknown_buffer_types_are_refused_before_the_file_is_opened(
    rules: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path / "is-not-there.gguf", rules=rules)
    assert message in str(error.value)


def test_rules_may_only_name_devices_in_use(dense: Path) -> None:
    with pytest.raises(ConfigError, match="CUDA0 is not among the devices in use") as error:
        loaded(dense, 2, rules="attn=CUDA0", use=("CUDA1",))
    assert "available buffer types: CPU, CUDA1" in str(error.value)


def test_names_are_read_in_any_case(dense: Path) -> None:
    with loaded(dense, rules="attn_q=cuda0,attn_k=cpu", n_gpu_layers=0) as llama:
        where = places(llama)
        assert (where["blk.0.attn_q.weight"], where["blk.0.attn_k.weight"]) == (
            *("CUDA0", "CPU_Mapped"),
        )


def test_every_rule_says_what_it_placed(moe: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), loaded(moe, rules="ffn_up_exps=CPU,attn_q=CUDA0") as llama:
        tensors = llama.model.weights.tensors
        up, q = (
            [t for name, t in tensors.items() if part in name]
            for part in ("ffn_up_exps", "attn_q.")
        )
        first, second = llama.model.placement.rules
        assert (first.tensors, first.bytes) == (N_LAYER, sum(t.nbytes for t in up))
        assert second.tensors == 2 * N_LAYER  # and the bias
        size = sum(t.nbytes for t in up) / MIB
        assert f"-ot ffn_up_exps=CPU: 12 tensors, {size:.2f} MiB in CPU" in caplog.text
        assert (
            f"tensor {up[0].name} ({up[0].nbytes // MIB} MiB q8_0) buffer type overridden to CPU"
        ) in caplog.text


def test_rules_that_place_nothing_are_one_warning_each(
    moe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = "ffn_.*_expz=CPU,ffn_.*_exps=CPU,ffn_up_exps=CUDA0,cache_k_l3$=CPU,cache_z=CPU"
    with loaded(moe, rules=rules):
        pass
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "-ot ffn_.*_expz=CPU places no tensor: no name matches",
        "-ot ffn_up_exps=CUDA0 places no tensor: earlier rules have placed all 12 that match",
        "-ot cache_z=CPU places no tensor: no name matches",
    ]


def test_a_weight_that_its_device_cannot_use_is_a_warning(
    dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = FakeDevice("CUDA0", refused=(Op.GET_ROWS,))
    for pattern in ("token_embd", "attn_q"):
        placement = PlacementParams(rules=parse_rules(f"{pattern}=CUDA0"))
        load_model(dense, ModelParams(placement=placement), devices=[card, cpu()]).close()
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == [
        "-ot token_embd=CUDA0: CUDA0 cannot compute with token_embd.weight there, "
        "which is copied back for each use"
    ]


def test_a_tied_output_answers_to_both_names(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", omit=("output",))
    for name in ("token_embd", r"^output\.weight"):
        with loaded(path, rules=f"{name}=CPU") as llama:
            assert places(llama)["output.weight"] == "CPU_Mapped"


# ---------------------------------------------------------------- -cmoe, -ncmoe
def test_cpu_moe_moves_the_routed_experts_only(moe: Path) -> None:
    with loaded(moe, rules=cpu_moe()) as llama:
        on_cpu = [name for name, where in places(llama).items() if where == "CPU_Mapped"]
        parts = Counter(name.split(".", 2)[-1] for name in on_cpu if name.startswith("blk."))
        assert parts == {f"ffn_{part}_exps.weight": N_LAYER for part in ("gate", "up", "down")}


def test_cpu_moe_of_a_dense_model_is_a_warning(
    dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(dense, rules=cpu_moe()) as llama:
        assert blocks_in(llama, "CUDA0") == [0, 1, 2, 3]
    assert "--cpu-moe places no tensor: no name matches" in caplog.text


@pytest.mark.parametrize(("shortcut_first", "where"), [(False, "CUDA0"), (True, "CPU_Mapped")])
def test_the_order_of_flags_decides(moe: Path, shortcut_first: bool, where: str) -> None:
    rules = [*parse_rules(r"blk\.0\.ffn_up_exps=CUDA0"), *n_cpu_moe(3)]
    with loaded(moe, rules=tuple(rules[::-1] if shortcut_first else rules)) as llama:
        found = places(llama)
        assert found["blk.0.ffn_up_exps.weight"] == where
        assert found["blk.2.ffn_up_exps.weight"] == "CPU_Mapped"
        assert found["blk.3.ffn_up_exps.weight"] == "CUDA0"


def test_biases_of_experts_go_with_them(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gpt-oss", n_layer=4)
    weights_only = "_exps.weight=CPU"
    splits = []
    for rules in (cpu_moe(), weights_only):
        with loaded(path, rules=rules, n_ubatch=64) as llama:
            found = {n: w for n, w in places(llama).items() if "_exps.bias" in n}
            assert set(found.values()) == {"CUDA0" if rules == weights_only else "CPU_Mapped"}
            splits.append(llama.context().graph_sizes[1].splits)
    # a token goes to the CPU and back once per layer
    assert splits[0] <= 2 * 4 + 2 < splits[1]


def test_the_dense_feed_forward_can_stay_on_the_cpu(dense: Path) -> None:
    with loaded(dense, rules=n_cpu_ffn(2)) as llama:
        names = [name for name, where in places(llama).items() if where == "CPU_Mapped"]
        assert {name.split(".")[1] for name in names if "ffn_" in name} == {"0", "1"}
        assert not [name for name in names if "attn" in name]


# ---------------------------------------------------------------- memory of the host
def test_mapped_experts_take_no_memory_of_the_host(moe: Path) -> None:
    with loaded(moe, rules="exps=CPU") as llama:
        assert {b.name for b in llama.model.buffers} == {"CUDA0", "CPU_Mapped"}
        tensors = llama.model.weights.tensors.values()
        gguf = llama.model.gguf
        for t in (t for t in tensors if t.name.endswith("_exps.weight")):
            source = gguf.tensors[t.name]
            assert t.data == gguf.parts[source.part].address(source.offset)


@pytest.mark.parametrize(
    ("params", "buffers"),
    [
        ({"load_mode": "none"}, {"CUDA_Host"}),
        ({"load_mode": "none", "no_host": True}, {"CPU", "CPU_REPACK"}),
        ({"load_mode": "none", "no_host": True, "repack": False}, {"CPU"}),
        ({"load_mode": "mmap"}, {"CPU_Mapped"}),
        ({"load_mode": "mmap", "no_host": True}, {"CPU_Mapped", "CPU_REPACK"}),
        ({"load_mode": "mmap", "no_host": True, "repack": False}, {"CPU_Mapped"}),
    ],
)
def test_which_memory_the_weights_of_the_cpu_take(
    dense: Path, params: dict[str, Any], buffers: set[str]
) -> None:
    with loaded(dense, n_gpu_layers=0, **params) as llama:
        assert set(places(llama).values()) == buffers


def test_pinned_experts_are_there_once(moe: Path) -> None:
    with loaded(moe, rules="exps=CPU", load_mode="none") as llama:
        [pinned] = [b for b in llama.model.buffers if b.name == "CUDA_Host"]
        names = {"token_embd.weight", *(n for n in places(llama) if n.endswith("_exps.weight"))}
        tensors = llama.model.weights.tensors
        assert {n for n, w in places(llama).items() if w == "CUDA_Host"} == names
        nbytes = sum(tensors[n].nbytes for n in names)
        assert nbytes <= pinned.size <= nbytes + 256 * len(names)


def test_a_card_that_shares_memory_with_the_host_turns_mapping_off(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps = Caps(is_async=True, host_buffer=True, events=True, mmap_support=False)
    monkeypatch.setattr(CudaDevice, "caps", caps)
    with loaded(dense, n_gpu_layers=0) as llama:
        assert set(places(llama).values()) == {"CUDA_Host"}


def test_rope_factors_are_on_every_layers_device(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", extra=("rope_freqs",), n_layer=4)
    with loaded(path, n_gpu_layers=3) as llama:
        found = places(llama)
        assert [found[f"blk.{il}.rope_freqs.weight"] for il in range(4)] == [
            *("CPU_Mapped", "CPU_Mapped", "CUDA0", "CUDA0")
        ]


# ---------------------------------------------------------------- keys and values
def caches(llama: Llama) -> Iterator[tuple[str, str]]:
    for part in llama.context().memory.parts:
        for t in part.tensors:
            buffer = buffer_of(t)
            assert buffer is not None
            yield t.name, buffer.name


@pytest.mark.parametrize(
    ("params", "on_gpu"),
    [
        ({"n_gpu_layers": 3}, {"k2", "v2", "k3", "v3"}),
        ({"n_gpu_layers": 3, "kv_offload": False}, set()),
        ({"n_gpu_layers": 3, "rules": "attn=CPU"}, {"k2", "v2", "k3", "v3"}),
        ({"n_gpu_layers": 3, "rules": "cache_v=CPU"}, {"k2", "k3"}),
        ({"n_gpu_layers": 3, "rules": "cache_k_l[03]=CPU"}, {"k2", "v2", "v3"}),
        ({"n_gpu_layers": 3, "rules": "cache_._l0$=CUDA0"}, {"k0", "v0", "k2", "v2", "k3", "v3"}),
        ({"n_gpu_layers": 3, "rules": "cache_k_l2=CUDA0", "kv_offload": False}, {"k2"}),
        ({"n_gpu_layers": 3, "rules": "(attn|cache_v_l3)=CPU"}, {"k2", "v2", "k3"}),
    ],
)
def test_keys_and_values_follow_their_layer(
    dense: Path, params: dict[str, Any], on_gpu: set[str]
) -> None:
    with loaded(dense, **params) as llama:
        found = dict(caches(llama))
        assert {
            n.replace("cache_", "").replace("_l", "") for n, w in found.items() if w != "CPU"
        } == (on_gpu)
        assert set(found.values()) <= {"CPU", "CUDA0"}


def test_sizes_of_caches_add_up(dense: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), loaded(dense, n_gpu_layers=3, rules="cache_v_l3=CPU") as llama:
        context = llama.context()
        [cache] = context.memory.caches
        assert [b.name for b in cache.buffers] == ["CPU", "CUDA0"]
        assert sum(b.size for b in cache.buffers) == cache.nbytes
        for buffer in cache.buffers:
            assert f"{buffer.name} KV buffer size = {buffer.size / MIB:8.2f} MiB" in caplog.text
        assert "-ot cache_v_l3=CPU: 1 tensors of caches" in caplog.text
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_states_follow_their_layer(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen35moe")
    with loaded(path) as llama:
        assert {where for _, where in caches(llama)} == {"CUDA0"}
    with loaded(path, rules="cache_s=CPU") as llama:
        for name, where in caches(llama):
            assert where == ("CPU" if name.startswith("cache_s") else "CUDA0")


@pytest.mark.parametrize(
    ("params", "n_gpus"),
    [
        ({"n_gpu_layers": 99}, 1),
        ({"n_gpu_layers": 3, "rules": "cache_k_l[02]=CUDA0,cache_k=CPU"}, 1),
        ({"n_gpu_layers": 99, "type_k": "q8_0"}, 2),
    ],
)
def test_keys_are_moved_where_they_are(dense: Path, params: dict[str, Any], n_gpus: int) -> None:
    def run(n_gpus: int, **params: Any) -> list[np.ndarray]:
        with loaded(dense, n_gpus, **params) as llama:
            context = llama.context()
            context.decode(Batch.of([3 + i % 5 for i in range(40)], 0))
            context.memory.remove(0, 4, 20)
            context.memory.shift(0, 20, 40, -16)
            context.decode(Batch.of([7, 8], 24))
            return [context.all_logits()]

    plain = {"type_k": params["type_k"]} if "type_k" in params else {}
    np.testing.assert_array_equal(run(n_gpus, **params), run(1, n_gpu_layers=0, **plain))


# ---------------------------------------------------------------- from Python
def test_rules_may_be_text_in_python(dense: Path) -> None:
    sim = simulation("rtx3060")
    options = {"n_ctx": 256, "warmup": False, "n_gpu_layers": 99, "tensor_split": [1]}
    with load(dense, devices=sim.devices, rules="ffn_up=CPU", **options) as llama:
        assert places(llama)["blk.0.ffn_up.weight"] == "CPU_Mapped"
    with pytest.raises(ConfigError, match="did you mean 'n_gpu_layers'"):
        load(dense, gpu_layers=3)
    placement = PlacementParams(rules=(Rule("ffn_up", "CPU"),), n_gpu_layers=1)
    with load(dense, devices=sim.devices, placement=placement, n_gpu_layers=5, n_ctx=256) as m:
        assert m.model.placement.params.n_gpu_layers == 5
        assert places(m)["blk.0.ffn_up.weight"] == "CPU_Mapped"
