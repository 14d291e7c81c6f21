"""Headers from a server that knows ranged requests, and from some that do not."""

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from model_shapes import SHAPES, write_header

from pyggml.dtypes import GGMLType
from pyggml.errors import GgufError
from pyggml.gguf import open_gguf, part_suffix
from pyggml.gguf_metadata import ValueType
from pyggml.gguf_remote import fetch_header, is_address
from pyggml.gguf_writer import NewFile, NewTensor, number, string, write_files

N = 1 << 18  # values of a tensor: far more bytes than a header


class Server:
    """Serves the files of a folder at /files/, and other things elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.sent = 0
        self.paths: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.folder = folder
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.paths.append(request.path)
        _, kind, name = request.path.split("?")[0].split("/", 2)
        if kind == "moved":
            request.send_response(302)
            target = name.replace("~", "/") if "~" in name else f"/files/{name}"
            request.send_header("Location", target)
            request.end_headers()
            return
        path = self.folder / name
        if kind not in ("files", "whole", "short", "lies") or not path.exists():
            request.send_error(403 if kind == "secret" else 404)
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"])
        assert asked is not None
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        if kind == "whole":
            request.send_response(200)
            start, stop = 0, len(data)
        else:
            request.send_response(206)
            shown = start + (kind == "lies")
            request.send_header("Content-Range", f"bytes {shown}-{stop - 1}/{len(data)}")
        body = data[start:stop]
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        with contextlib.suppress(ConnectionError):  # nobody wants the whole file
            request.wfile.write(body[: len(body) // 2] if kind == "short" else body)
        self.sent += len(body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(folder)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


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
