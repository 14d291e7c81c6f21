"""GGML_SCHED_DEBUG: ggml's text, byte for byte."""

import io

import pytest
from fakes import FakeDevice, cpu
from sched_graphs import F32, I32, input_leaf, place, scheduler, weight

from pyggml import build, env
from pyggml.backend import Usage, alloc_tensors
from pyggml.dtypes import GGMLType
from pyggml.errors import ConfigError
from pyggml.graph import Graph, build_graph
from pyggml.params import RopeParams
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

N_EMBD, N_VOCAB = 4096, 32000

FIRST_LAYER = """
## SPLIT #0: CPU # 0 inputs
node #  0 (  GET_ROWS):             inp_embd (  16K) [  CPU   1.wgt0] use=2,c=1:    \
token_embd.weight (  70M) [  CPU    1.dst]           inp_tokens (   0K) [  CPU    1.inp]

## SPLIT #1: CUDA0 # 2 inputs: [inp_embd (  16K)] [inp_pos (   0K)]\x20
node #  1 (  RMS_NORM):               norm-0 (  16K) [CUDA0    2.sup] use=1,c=1:     \
CUDA0#inp_embd#0 (  16K) [ NULL    4.cpy]
node #  2 (       MUL):          attn_norm-0 (  16K) [CUDA0   1.wgt1] use=3,c=1:               \
norm-0 (  16K) [CUDA0    2.sup] blk.0.attn_norm.weig (  16K) [CUDA0    1.dst]
node #  4 (      ROPE):               Qcur-0 (  16K) [CUDA0    2.sup] use=1,c=1: \
attn_norm-0 (reshape (  16K) [CUDA0   4.vsrc]      CUDA0#inp_pos#0 (   0K) [ NULL    4.cpy]
node #  6 (       MUL):                  k-0 (  16K) [CUDA0    2.sup] use=1,c=1:          \
attn_norm-0 (  16K) [CUDA0   1.wgt1]          attn_norm-0 (  16K) [CUDA0   1.wgt1]
node #  7 (       ADD):               kq_v-0 (  16K) [CUDA0    2.sup] use=1,c=1:    \
Qcur-0 (reshaped) (  16K) [CUDA0   4.vsrc]                  k-0 (  16K) [CUDA0    2.sup]
node #  8 (       ADD):            ffn_inp-0 (  16K) [CUDA0    2.sup] use=0,c=1:               \
kq_v-0 (  16K) [CUDA0    2.sup]     CUDA0#inp_embd#0 (  16K) [ NULL    4.cpy]
"""


def embedding(host: FakeDevice) -> Tensor:
    """Q4_0 rows of a 70 MiB table in host memory."""
    table = new_tensor(GGMLType.Q4_0, N_EMBD, N_VOCAB, name="token_embd.weight")
    buffer = alloc_tensors([table], host.buffer_type())
    assert buffer is not None
    buffer.set_usage(Usage.WEIGHTS)
    tokens = new_tensor(I32, 1, name="inp_tokens").as_input()
    return build.get_rows(table, tokens).named("inp_embd")


def first_layer(gpu: FakeDevice, host: FakeDevice) -> Tensor:
    """Something like attention behind an embedding on the host."""
    embedded = embedding(host)
    normed = build.rms_norm(embedded, 1e-6).named("norm-0")
    normed = build.mul(normed, weight(gpu, N_EMBD, name="blk.0.attn_norm.weight"))
    normed.named("attn_norm-0")
    position = new_tensor(I32, 1, name="inp_pos").as_input()
    q = build.rope_ext(build.reshape(normed, 128, 32, 1), position, None, RopeParams(128))
    q = build.reshape(q.named("Qcur-0"), N_EMBD)
    k = build.mul(normed, normed).named("k-0")
    return build.add(build.add(q, k).named("kq_v-0"), embedded).named("ffn_inp-0")


def test_text_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")
    gpu, host = FakeDevice("CUDA0"), cpu()
    stream = io.StringIO()
    sched = Scheduler([gpu.init_backend(), host.init_backend()], stream=stream)
    place(sched, first_layer(gpu, host))
    assert stream.getvalue() == FIRST_LAYER
    assert sched.dump() == FIRST_LAYER


def test_level_one_prints_splits_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", "1")
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    place(sched, first_layer(gpu, host))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "\n## SPLIT #0: CPU # 0 inputs\n"
        "\n## SPLIT #1: CUDA0 # 2 inputs: [inp_embd (  16K)] [inp_pos (   0K)] \n"
    )
    assert sched.dump(level=1) == captured.err


def test_every_split_is_printed_also_when_reserving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", "1")
    sched = scheduler(cpu())
    sched.reserve(build_graph([build.scale(input_leaf(4, name="x"), 2.0)]))
    place(sched, build.scale(input_leaf(4, name="x"), 2.0))
    assert capsys.readouterr().err == "\n## SPLIT #0: CPU # 0 inputs\n" * 2


def test_silent_without_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GGML_SCHED_DEBUG", raising=False)
    place(scheduler(cpu()), build.scale(input_leaf(4, name="x"), 2.0))
    assert capsys.readouterr() == ("", "")


def test_nodes_that_do_not_run_and_sizes() -> None:
    sched = scheduler(cpu())
    x = input_leaf(1 << 18, name="x")
    y = build.scale(x, 2.0).named("executed")
    z = build.scale(new_tensor(F32, (1 << 18) - 1, name="short").as_input(), 2.0)
    graph = Graph()
    graph.expand(y.as_output())
    graph.expand(z.named("only reserved"), compute=False)
    sched.alloc_graph(graph)
    _, _, first, second = sched.dump().splitlines()
    assert "executed (   1M) [  CPU   3.best] use=0,c=1:" in first
    assert "only reserved (1023K) [  CPU   3.best] use=0,c=0:" in second


@pytest.mark.parametrize(("text", "value"), [("", 0), (" 2 ", 2), ("-1", -1)])
def test_numbers_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, value: int
) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", text)
    assert env.integer("GGML_SCHED_DEBUG") == value


@pytest.mark.parametrize("text", ["yes", "0", "", "-1"])
def test_words_in_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", text)
    monkeypatch.setenv("GGML_SCHED_DEBUG_REALLOC", text)
    place(scheduler(cpu()), build.scale(input_leaf(4, name="x"), 2.0))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("text", "message"), [("many", "is not a number"), ("0", "at least one")])
def test_number_of_copies_has_to_be_one(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv("GGML_SCHED_MAX_COPIES", text)
    with pytest.raises(ConfigError, match=message):
        scheduler(cpu(), parallel=True)
    scheduler(cpu())  # not asked for
