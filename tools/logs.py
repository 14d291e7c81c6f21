"""Where log lines go: stderr by verbosity, and with details to a file."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from pyggml.errors import UserError
from pyggml.tools.ui import Screen

# llama.cpp's levels: it shows the library's information only from level 4 on
LEVELS = {
    0: logging.CRITICAL + 1,
    1: logging.ERROR,
    2: logging.WARNING,
    3: logging.WARNING,
    4: logging.INFO,
    5: logging.DEBUG,
}


def verbosity(values: Mapping[str, Any]) -> int:
    """llama.cpp's level, 0 to 5."""
    if values.get("log_disable"):
        return 0
    level: int = 5 if values.get("verbose") else values.get("verbosity", 3)
    return min(5, max(0, level))


def set_up(values: Mapping[str, Any], screen: Screen | None = None) -> None:
    """Attach handlers to the pyggml logger as -v, -lv, --log-file and --log-disable ask."""
    logger = logging.getLogger("pyggml")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    # a log that cannot be written is no reason to stop, or to print tracebacks
    logging.raiseExceptions = False
    console = _Console(screen)
    console.setLevel(LEVELS[verbosity(values)])
    logger.addHandler(console)
    path = values.get("log_file")
    if path:
        logger.addHandler(_file_handler(Path(path)))
    # what nobody listens to is not even put together
    logger.setLevel(logging.DEBUG if path else console.level)


class _Console(logging.StreamHandler[TextIO]):
    """Lines on stderr, except those that the screen has shown itself."""

    def __init__(self, screen: Screen | None) -> None:
        super().__init__(sys.stderr)
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "shown", False):
            return
        if self.screen is not None:
            self.screen.make_room()
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            return f"{record.levelname.lower()}: {text}"
        return f"{record.levelname[0]} {record.name}: {text}"


def _file_handler(path: Path) -> logging.Handler:
    try:
        handler = logging.FileHandler(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--log-file {path}: {(error.strerror or str(error)).lower()}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    return handler
