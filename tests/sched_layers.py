"""A graph that looks like a mixture of experts: attention on a GPU, experts on the host."""

from fakes import FakeDevice, cpu
from sched_graphs import I32, input_leaf, large_batch, scheduler, weight

from pyggml import build
from pyggml.graph import Graph
from pyggml.sched import Scheduler
from pyggml.sched_graph import SplitGraph, SplitGraphs, describe
from pyggml.tensor import Tensor, new_tensor

N_EMBD, N_EXPERT, N_USED = 8, 4, 2


class LayeredModel:
    """`n_layer` layers; the first `on_gpu` have their experts on the GPU too."""

    def __init__(self, n_layer: int = 5, on_gpu: int = 0, *, offload: bool = False) -> None:
        gpu = FakeDevice("CUDA0", offloads=large_batch if offload else lambda node: False)
        self.gpu, self.host, self.n_layer, self.on_gpu = gpu, cpu(), n_layer, on_gpu

    def graph(self, n_tokens: int) -> Graph:
        """Embedding, layers, output."""
        tokens = new_tensor(I32, n_tokens, name="inp_tokens").as_input()
        mask = input_leaf(1, n_tokens, name="attn_inp_mask")
        table = weight(self.host, N_EMBD, 16, name="token_embd.weight")
        x = build.get_rows(table, tokens).named("embd")
        for il in range(self.n_layer):
            x = self._layer(x, mask, il)
        norm = build.mul(
            build.rms_norm(x, 1e-5), weight(self.gpu, N_EMBD, name="output_norm.weight")
        )
        head = weight(self.gpu, N_EMBD, 16, name="output.weight")
        graph = Graph()
        graph.expand(build.mul_mat(head, norm.named("result_norm")).named("result_output"))
        graph.nodes[-1].as_output()
        return graph

    def _layer(self, x: Tensor, mask: Tensor, il: int) -> Tensor:
        def on(device: FakeDevice, *ne: int, name: str) -> Tensor:
            return weight(device, *ne, name=f"blk.{il}.{name}.weight")

        n_tokens = x.ne[1]
        gain = on(self.gpu, N_EMBD, name="attn_norm")
        normed = build.mul(build.rms_norm(x, 1e-5).named(f"norm-{il}"), gain).named(
            f"attn_norm-{il}"
        )
        q = build.mul_mat(on(self.gpu, N_EMBD, N_EMBD, name="attn_q"), normed)
        q = build.mul(q.named(f"Qcur-{il}"), mask)
        attn = build.add(build.reshape(q, N_EMBD, n_tokens), x).named(f"attn_out-{il}")
        home = self.gpu if il < self.on_gpu else self.host
        ids = new_tensor(I32, N_USED, n_tokens, name=f"ffn_moe_topk-{il}").as_input()
        column = build.reshape(attn, N_EMBD, 1, n_tokens)
        experts = on(home, N_EMBD, N_EMBD, N_EXPERT, name="ffn_up_exps")
        up = build.mul_mat_id(experts, column, ids).named(f"ffn_moe_up-{il}")
        rows = build.sum_rows(build.reshape(up, N_USED * N_EMBD, n_tokens))
        return build.add(attn, rows.named(f"ffn_moe_out-{il}")).named(f"l_out-{il}")

    def split(self, n_tokens: int) -> tuple[Scheduler, list[int]]:
        """A scheduler that has split the graph, and its bytes to compute in."""
        sched = scheduler(self.gpu, self.host)
        return sched, sched.reserve_size(self.graph(n_tokens))

    def described(self, n_tokens: int, name: str = "prompt") -> SplitGraph:
        """The split graph as data."""
        sched, sizes = self.split(n_tokens)
        return describe(sched, name, n_tokens, sizes)

    def file(self) -> SplitGraphs:
        """A prompt and a token."""
        graphs = self.described(64), self.described(1, "token")
        return SplitGraphs('layered <model> & "more"', "4 experts\nof 8", graphs)
