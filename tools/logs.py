"""Where log lines go: stderr by verbosity, and with details to a file."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyggml.errors import UserError

# llama.cpp's levels: it shows the library's information only from level 4 on
LEVELS = {
    0: logging.CRITICAL + 1,
    1: logging.ERROR,
    2: logging.WARNING,
    3: logging.WARNING,
    4: logging.INFO,
    5: logging.DEBUG,
}


def set_up(values: Mapping[str, Any]) -> None:
    """Attach handlers to the pyggml logger as -v, -lv, --log-file and --log-disable ask."""
    logger = logging.getLogger("pyggml")
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.NullHandler())
    if values.get("log_disable"):
        return
    verbosity = 5 if values.get("verbose") else values.get("verbosity", 3)
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(LEVELS[min(5, max(0, verbosity))])
    console.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
    logger.addHandler(console)
    path = values.get("log_file")
    if path:
        logger.addHandler(_file_handler(Path(path)))


def _file_handler(path: Path) -> logging.Handler:
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--log-file {path}: cannot be written ({error.strerror})") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    return handler
