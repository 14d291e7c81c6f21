"""Headers of GGUF files that lie on a server: only the bytes before the tensors are fetched.

The server must know ranged requests. Of a split model the headers of all parts are fetched.
"""

from __future__ import annotations

import contextlib
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO

from pyggml.errors import GgufError
from pyggml.gguf import part_suffix
from pyggml.gguf_header import Header, read_header
from pyggml.gguf_metadata import ValueType
from pyggml.version import __version__

TIMEOUT = 30.0  # seconds without an answer
MOST = 1 << 30  # no header is as large
LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
REASONS = {
    401: "it wants to know who asks: download the header with the provider's own program",
    403: "it refuses: the file may be private, or its licence must be accepted first",
    404: "there is no such file; on Hugging Face the address of a file has /resolve/main/ in it",
}


def is_address(path: str | Path) -> bool:
    """Whether a model is named by an address instead of a path."""
    return re.match(r"https?://", str(path), re.IGNORECASE) is not None


def fetch_header(url: str, folder: Path) -> Path:
    """Write the header of a model, and those of its parts, into a folder; returns the first file.

    Raises GgufError.
    """
    first, header = _fetch(url, folder)
    count = header.metadata.get_int("split.count", 0, value_type=ValueType.UINT16)
    for i in range(1, count):
        _fetch(_part_address(url, i, count), folder)
    return first


def _part_address(url: str, index: int, count: int) -> str:
    """The address of another part; that of the first must end as the names of parts do."""
    parts = urllib.parse.urlsplit(url)
    suffix = part_suffix(0, count)
    if not parts.path.endswith(suffix):
        raise GgufError(
            f"{url}: it is one of {count} parts: give the address that ends in {suffix}"
        )
    path = parts.path.removesuffix(suffix) + part_suffix(index, count)
    return urllib.parse.urlunsplit(parts._replace(path=path))


def _fetch(url: str, folder: Path) -> tuple[Path, Header]:
    part = _RemotePart(url)
    header = read_header(part, allow_no_data=True)
    start = min((t.offset for t in header.tensors.values()), default=part.size)
    name = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).name or "model.gguf"
    path = folder / name
    path.write_bytes(part.read(0, min(start, part.size)))
    return path, header


class _RemotePart:
    """A file of which only the beginning is read (what `read_header` needs of a GgufPart)."""

    def __init__(self, url: str) -> None:
        _check(url)
        self.path = Path(url)  # for messages; two slashes become one
        self._url = url
        self._opener = urllib.request.build_opener(_Redirects())
        self._data = bytearray()
        self.size = 1  # until the first answer tells
        self._more(1 << 16)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that are there."""
        end = offset + nbytes
        if end > len(self._data):
            self._more(end - len(self._data))
        return bytes(self._data[offset:end])

    def _more(self, nbytes: int) -> None:
        start = len(self._data)
        if start + nbytes > MOST:
            raise GgufError(f"{self._url}: its header would be larger than {MOST >> 20} MiB")
        asked = f"bytes={start}-{start + nbytes - 1}"
        headers = {"Range": asked, "User-Agent": f"pyggml/{__version__}"}
        with self._answer(urllib.request.Request(self._url, headers=headers)) as response:
            self.size = self._total(response, start)
            wanted = min(nbytes, self.size - start)
            data = response.read(wanted)
        if len(data) != wanted:
            raise GgufError(
                f"{self._url}: the server sent {len(data):,} of {wanted:,} bytes: try again"
            )
        self._data += data

    @contextlib.contextmanager
    def _answer(self, request: urllib.request.Request) -> Iterator[HTTPResponse]:
        try:
            with self._opener.open(request, timeout=TIMEOUT) as response:
                yield response
        except urllib.error.HTTPError as e:
            reason = REASONS.get(e.code, e.reason)
            e.close()
            raise GgufError(f"{self._url}: the server answers {e.code}: {reason}") from e
        except urllib.error.URLError as e:
            raise GgufError(f"{self._url}: no answer: {e.reason}") from e
        except (OSError, HTTPException) as e:
            raise GgufError(f"{self._url}: the connection broke: {e}: try again") from e

    def _total(self, response: HTTPResponse, start: int) -> int:
        """Size of the whole file; the answer must be the range that was asked for."""
        found = re.fullmatch(
            r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", "").strip()
        )
        if response.status != 206 or found is None or int(found[1]) != start:
            raise GgufError(
                f"{self._url}: the server does not answer ranged requests, so the whole model "
                "would have to be fetched\ndownload it, or only its header: pyllama-gguf header"
            )
        return int(found[3])


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows other addresses that could have been given."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(url: str) -> None:
    """Raise GgufError unless the address is https, or http of this machine."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
    except ValueError as e:
        raise GgufError(f"{url}: not an address: {e}") from None
    if not host:
        raise GgufError(f"{url}: not an address: it names no server")
    if parts.scheme.lower() != "https" and host.lower() not in LOCAL:
        raise GgufError(f"{url}: only https:// is used, and http:// of this machine")
