"""llama.cpp's server inside this process, out of the xllamacpp wheel."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest


class RealServer:
    """A server with one slot and one thread; its routes answer on loopback."""

    def __init__(self, model: Path, *, chat_template: str = "", jinja: bool = True) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
        params.cpuparams.n_threads = 1
        params.chat_template, params.use_jinja = chat_template, jinja
        params.force_pure_content_parser = True
        self._server = xllamacpp.Server(params)
        # Its loop runs once it has an answer: a server that ends before waits for itself forever.
        self.post("/completion", {"prompt": "a", "n_predict": 1})

    def post(self, route: str, body: dict[str, Any]) -> Any:
        """The answer to a request; the error text when it is refused."""
        request = urllib.request.Request(
            self._server.listening_address + route,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return json.load(refusal)["error"]["message"]

    def apply_template(self, messages: list[dict[str, Any]], **fields: Any) -> str:
        """The prompt of a chat request, or why there is none."""
        answer = self.post("/apply-template", {"messages": messages, **fields})
        return answer if isinstance(answer, str) else answer["prompt"]
