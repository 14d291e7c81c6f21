"""Headers from a server that knows ranged requests, and from some that do not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import Server, served
from model_shapes import SHAPES, write_header

from pyggml.dtypes import GGMLType
from pyggml.errors import GgufError
from pyggml.gguf import open_gguf, part_suffix
from pyggml.gguf_metadata import ValueType
from pyggml.gguf_remote import fetch_header, is_address
from pyggml.gguf_writer import NewFile, NewTensor, number, string, write_files

N = 1 << 18  # values of a tensor: far more bytes than a header


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(tmp_path / "served") as server:
        yield server


def tensor(name: str) -> NewTensor:
    return NewTensor(name, GGMLType.F32, (N,), 4 * N, lambda: (bytes(4 * N),))


def serve(server: Server, n_parts: int = 1) -> str:
    """A model in parts, with data; the address of the first."""
    files = []
    for i in range(n_parts):
        name = "model" + (part_suffix(i, n_parts) if n_parts > 1 else ".gguf")
        metadata = {"general.architecture": string("llama"), "x": number(ValueType.UINT32, 7)}
        metadata |= {
            "split.no": number(ValueType.UINT16, i),
            "split.count": number(ValueType.UINT16, n_parts if n_parts > 1 else 0),
            "split.tensors.count": number(ValueType.INT32, n_parts),
        }
        files.append(NewFile(server.folder / name, metadata, [tensor(f"t{i}")]))
    write_files(files)
    return f"{server.address}/files/{files[0].path.name}"


def test_only_the_header_is_fetched(server, tmp_path):
    url = serve(server)
    path = fetch_header(url, tmp_path)
    with open_gguf(path, allow_no_data=True) as gguf, open_gguf(server.folder / path.name) as whole:
        assert not gguf.has_data and gguf.tensors == whole.tensors
        assert gguf.metadata.get_int("x") == 7
    assert server.sent <= 1 << 20 < whole.nbytes + 1
    assert path.parent == tmp_path and path.stat().st_size < 4096


def test_a_long_header_takes_several_requests(server, tmp_path):
    write_header(server.folder / "q.gguf", SHAPES["qwen3-30b-a3b"])
    path = fetch_header(f"{server.address}/files/q.gguf", tmp_path)
    assert path.read_bytes() == (server.folder / "q.gguf").read_bytes()
    assert len(server.paths) > 2


def test_all_parts_of_a_split_model(server, tmp_path):
    path = fetch_header(serve(server, 3), tmp_path)
    with open_gguf(path, allow_no_data=True) as gguf:
        assert sorted(gguf.tensors) == ["t0", "t1", "t2"] and len(gguf.parts) == 3
    other = f"{server.address}/files/" + path.name.replace("00001-of", "00002-of")
    with pytest.raises(GgufError, match="one of 3 parts.* -00001-of-00003"):
        fetch_header(other, tmp_path)


def test_redirects_and_queries(server, tmp_path):
    name = serve(server).rpartition("/")[2]
    path = fetch_header(f"{server.address}/moved/{name}?download=true", tmp_path)
    assert path.name == "model.gguf"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("whole", "does not answer ranged requests"),
        ("lies", "does not answer ranged requests"),
        ("short", "sent .* of .* bytes: try again"),
        ("gone", "404: there is no such file"),
        ("secret", "403: it refuses"),
        ("moved/http:~~example.com", "only https:// is used"),
        ("moved/file:~~etc~passwd", "file:.* is not allowed"),
    ],
)
def test_servers_that_do_not_help(server, tmp_path, kind, message):
    url = serve(server).replace("/files/", f"/{kind}/")
    with pytest.raises(GgufError, match=message):
        fetch_header(url, tmp_path)
    assert not list(tmp_path.glob("*.gguf"))


def test_what_is_no_model(server, tmp_path):
    (server.folder / "page.gguf").write_bytes(b"<!DOCTYPE html>" + bytes(1000))
    with pytest.raises(GgufError, match="a web page, not a model"):
        fetch_header(f"{server.address}/files/page.gguf", tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.com/m.gguf", "only https:// is used"),
        ("https:///m.gguf", "names no server"),
        ("https://[::1/m.gguf", "not an address"),
        ("http://127.0.0.1:9/m.gguf", "no answer"),
    ],
)
def test_addresses_that_are_not_used(tmp_path, url, message):
    with pytest.raises(GgufError, match=message):
        fetch_header(url, tmp_path)


def test_what_is_an_address():
    assert is_address("https://x/y.gguf") and is_address("HTTP://localhost/y.gguf")
    assert not is_address("models/https.gguf") and not is_address(Path("/x.gguf"))
