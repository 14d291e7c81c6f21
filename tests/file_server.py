"""A server for ranged requests of files, and for servers that do not help."""

import contextlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


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


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A server of a folder, which is made."""
    folder.mkdir()
    server = Server(folder)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()
