"""--sched-graph FILE: each kind of file holds the graph, whatever its names, or is not written."""

import json
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tiny
from cli_process import Run
from sched_layers import LayeredModel

from pyggml.errors import UserError
from pyggml.sched_graph import SplitGraphs
from pyggml.tools import sched_dot, sched_file, sched_html, sched_json, sched_svg
from pyggml.tools.sched_text import colours, counted, shown_bytes, shown_time

NASTY = '</script><!-- & "x" \\n\nsecond\tline \' @DATA@ ]]> é'
SVG = "{http://www.w3.org/2000/svg}"
HELLO = ("-p", "Hello", "-n", "1", "--temp", "0")


@pytest.fixture(scope="module")
def graphs() -> SplitGraphs:
    return LayeredModel().file()


@pytest.fixture(scope="module")
def nasty(graphs: SplitGraphs) -> SplitGraphs:
    """The same with names that every format has to escape."""
    first, *rest = graphs.graphs
    nodes = tuple(replace(n, name=NASTY + n.name, reason=NASTY) for n in first.nodes)
    leafs = tuple(replace(leaf, name=NASTY + leaf.name) for leaf in first.leafs)
    copies = tuple(replace(c, name=NASTY + c.name) for c in first.copies)
    first = replace(first, nodes=nodes, leafs=leafs, copies=copies)
    return SplitGraphs(NASTY, NASTY, (first, *rest))


# ---------------------------------------------------------------- page
class Page(HTMLParser):
    """What a browser would see: tags, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = f"{tag} {dict(attrs).get('id', '')}".strip()

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data


def test_the_page_holds_the_data(nasty: SplitGraphs) -> None:
    page = Page(sched_html.text(nasty))
    data = json.loads(page.texts["script data"])
    assert [n["name"] for n in data["graphs"][0]["nodes"]] == [
        n.name for n in nasty.graphs[0].nodes
    ]
    for graph, shown in zip(nasty.graphs, data["graphs"], strict=True):
        assert shown.pop("colours") == colours(graph)
    plain = sched_json.as_object(nasty)
    assert data == {key: json.loads(json.dumps(plain[key])) for key in data}
    assert page.texts["h1"] == NASTY


def test_the_page_needs_no_network(nasty: SplitGraphs) -> None:
    page = Page(sched_html.text(nasty))
    assert [tag for tag, _ in page.tags].count("script") == 2
    for _, attributes in page.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action"}
    policy = next(a["content"] for _, a in page.tags if "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'")
    program = page.texts["script"] + page.texts["style"]
    assert not re.search(r"https?:|@import|url\(|fetch\(|import\(|XMLHttp|WebSocket", program)


def test_the_page_names_what_its_script_looks_for(graphs: SplitGraphs) -> None:
    page = Page(sched_html.text(graphs))
    ids = {attributes.get("id") for _, attributes in page.tags}
    wanted = set(re.findall(r'\$\("([a-z]+)"\)', page.texts["script"]))
    assert len(wanted) > 10 and wanted <= ids


# ---------------------------------------------------------------- picture
def test_the_picture_is_xml_with_every_shown_node(nasty: SplitGraphs) -> None:
    root = ET.fromstring(sched_svg.text(nasty))
    titles = [t.text or "" for t in root.iter(f"{SVG}title")][1:]  # but the picture's own
    shown = []
    for graph in nasty.graphs:
        for fold in graph.folds:
            for section in graph.sections[fold.first : fold.first + fold.period]:
                shown += [n for n in graph.nodes[section.start : section.stop] if not n.is_view]
    reasons = [n.reason.replace("\n", " ").replace("\t", " ") for n in shown]
    assert sum(t.endswith(tuple(set(reasons))) for t in titles) == len(shown)
    boxes = [float(v) for r in root.iter(f"{SVG}rect") if (v := r.get("x")) is not None]
    assert min(boxes) >= 0 and max(boxes) <= sched_svg.WIDTH
    assert not [a for e in root.iter() for a in e.attrib if a.endswith(("href", "src"))]


def test_a_picture_of_a_graph_without_layers() -> None:
    graph = LayeredModel(n_layer=0).described(2)
    ET.fromstring(sched_svg.text(SplitGraphs("m", "d", (graph,))))


# ---------------------------------------------------------------- Graphviz
TOKEN = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_][A-Za-z0-9_]*|[0-9]+|->|[{}\[\]=;,])', re.DOTALL
)


def dot_tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = TOKEN.match(text, at)
        assert match, f"not Graphviz: {text[at : at + 40]!r}"
        tokens.append(match[1])
        at = match.end()
    return tokens


def test_the_dot_file_has_every_node_and_edge(nasty: SplitGraphs) -> None:
    text = sched_dot.text(nasty)
    tokens = dot_tokens(text)
    assert tokens[0] == "digraph" and tokens.count("{") == tokens.count("}")
    pairs = list(zip(tokens, tokens[1:], strict=False))
    for i, graph in enumerate(nasty.graphs):
        clusters = [b for a, b in pairs if a == "subgraph" and b.startswith(f"cluster_g{i}_s")]
        assert clusters == [f"cluster_g{i}_s{s.index}" for s in graph.splits]
        places = [
            k for k, t in enumerate(tokens) if t == "->" and tokens[k - 1].startswith(f"g{i}_")
        ]
        edges = sorted((tokens[k - 1], tokens[k + 1]) for k in places)
        wanted = [(f"g{i}_{s}", f"g{i}_{n.id}") for n in graph.nodes for s in n.sources]
        wanted += [(f"g{i}_{c.source}", f"g{i}_{c.id}") for c in graph.copies]
        assert edges == sorted(wanted)
        declared = [
            a
            for (a, b), before in zip(pairs[1:], tokens, strict=False)
            if b == "[" and before != "->" and a.startswith(f"g{i}_")
        ]
        things = [*graph.leafs, *graph.nodes, *graph.copies]
        assert sorted(declared) == sorted(f"g{i}_{t.id}" for t in things)


# ---------------------------------------------------------------- all kinds
@pytest.mark.parametrize("writer", [sched_html, sched_svg, sched_dot, sched_json])
def test_the_same_graph_gives_the_same_file(writer: object) -> None:
    first, second = (writer.text(LayeredModel().file()) for _ in range(2))  # type: ignore[attr-defined]
    assert first == second and len(first) > 1000


def test_json_is_described() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sched-graph.md").read_text()
    plain = json.loads(sched_json.text(LayeredModel(offload=True).file()))
    assert (plain["format"], plain["version"]) == (sched_json.FORMAT, sched_json.VERSION)

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {k for v in value.values() for k in keys(v)}
        return {k for v in value for k in keys(v)} if isinstance(value, list) else set()

    assert {k for k in keys(plain) if f"`{k}`" not in text} == set()


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (345 << 20, "345 MiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes(number: int, shown: str) -> None:
    assert shown_bytes(number) == shown


def test_words() -> None:
    assert [counted(n, "copy") for n in (1, 2)] == ["1 copy", "2 copies"]
    assert counted(1000, "node") == "1,000 nodes"
    assert [shown_time(s) for s in (None, 2e-6, 0.5)] == ["", "2.0 µs", "500.00 ms"]


# ---------------------------------------------------------------- writing
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("graph.png", "the name has to end in one of .html, .svg, .dot, .json"),
        ("graph", "the name has to end in one of"),
        ("missing/graph.svg", "no such file or directory"),
        ("folder.svg", "is a directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_loading(
    name: str, said: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "folder.svg").mkdir()
    path = tmp_path / name
    result = run("-m", str(tmp_path / "no-model.gguf"), *HELLO, "--sched-graph", str(path))
    assert result.code == 1
    assert result.err.startswith(f"error: --sched-graph {path}: ") and said in result.err
    assert [p.name for p in tmp_path.iterdir()] == ["folder.svg"]


def test_a_failure_leaves_the_old_file(
    graphs: SplitGraphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        sched_file.write(str(path), graphs)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_new_files_have_the_usual_rights(graphs: SplitGraphs, tmp_path: Path) -> None:
    path = tmp_path / "graph.SVG"
    sched_file.write(str(path), graphs)
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    assert path.read_text().startswith("<svg")


def test_a_file_that_may_not_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "graph.svg"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    with pytest.raises(UserError, match="permission denied"):
        sched_file.check({"sched_graph": str(path)})


@pytest.mark.parametrize("kind", ["html", "svg", "dot", "json"])
def test_the_command_line_writes_the_graphs_of_the_model(
    kind: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / f"graph.{kind}"
    plain = run(*HELLO)
    result = run(*HELLO, "-ub", "32", "--sched-graph", str(path))
    assert (result.code, result.out) == (0, plain.out)
    text = path.read_text()
    assert "32 tokens" in text or '"n_tokens":32' in text
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if kind == "json":
        graphs = json.loads(text)["graphs"]
        assert [(g["name"], g["n_tokens"]) for g in graphs] == [("prompt", 32), ("token", 1)]
        assert all(len(g["splits"]) == 1 and not g["copies"] for g in graphs)
        names = [n["name"] for n in graphs[0]["nodes"]]
        assert names[-1] == "result_output" and "ffn_out-1" in names


@pytest.mark.parametrize("arch", ["gemma3", "qwen35"])
def test_windows_and_states(
    arch: str, run: Run, tmp_path: Path, tiny_models: dict[str, str]
) -> None:
    path = tmp_path / "graph.json"
    flags = ("-m", tiny_models[arch], "--dry-run", "--sched-graph", str(path))
    assert run(*flags, "-ngl", "99", "--sim-device", "rtx3060").code == 0
    for graph in json.loads(path.read_text())["graphs"]:
        assert {leaf["kind"] for leaf in graph["leafs"]} == {"weight", "input", "memory"}
        assert {n["backend"] for n in graph["nodes"] if not n["is_view"]} == {"CPU", "CUDA0"}


def test_experts_on_the_host(run: Run, tmp_path: Path) -> None:
    path, model = tmp_path / "graph.json", tiny.write_tiny(tmp_path / "m.gguf", "qwen3moe")
    flags = ("-ngl", "99", "-ot", "exps=CPU", "--sim-device", "rtx3060:12GiB", "-ub", "64")
    assert run("-m", str(model), *HELLO, *flags, "--sched-graph", str(path)).code == 0
    prompt, token = json.loads(path.read_text())["graphs"]
    for graph, backend, cause in ((prompt, "CUDA0", "1.off"), (token, "CPU", "1.wgt0")):
        first = next(n for n in graph["nodes"] if n["name"] == "ffn_moe_up-0")
        assert (first["backend"], first["cause"]) == (backend, cause)
        assert "blk.0.ffn_up_exps.weight lies in CPU" in first["reason"]
        assert graph["seconds"] > 0 and len(graph["splits"]) > 2
    assert any(c["kind"] == "used experts" for c in prompt["copies"])
    assert not any(c["kind"] in ("used experts", "weight") for c in token["copies"])


def test_a_dry_run_writes_them_too(run: Run, tmp_path: Path, tiny_models: dict[str, str]) -> None:
    planned, real = tmp_path / "planned.json", tmp_path / "real.json"
    common = ("-m", tiny_models["gemma3"], "-c", "256", "-ub", "32")
    assert run(*common, "--dry-run", "--sched-graph", str(planned)).code == 0
    assert run(*common, *HELLO, "--sched-graph", str(real)).code == 0
    assert planned.read_text() == real.read_text()


def test_a_mistake_is_found_before_a_dry_run(run: Run, tmp_path: Path) -> None:
    result = run("-m", str(tmp_path / "no.gguf"), "--dry-run", "--sched-graph", "graph.txt")
    assert result.code == 1 and result.err.startswith("error: --sched-graph graph.txt: the name")
