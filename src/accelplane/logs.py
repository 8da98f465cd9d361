"""Logging with klog's verbosity levels and line format, or with JSON lines, on the standard library's `logging`.

`V(n)` is the level that klog logs at `-v=n`: V(0) is INFO, higher ones are below it.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from accelplane.controls import escape_json, escape_text

_LETTERS = {logging.DEBUG: "I", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_JSON_NAMES = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
MAX_VERBOSITY = 18


def v(verbosity: int) -> int:
    """Returns the logging level of klog's verbosity."""
    return logging.INFO - min(verbosity, MAX_VERBOSITY)


def threshold(name: str) -> int:
    """Returns the level of a klog severity name or number (`ERROR`, `2`). Raises `ValueError`.

    klog's severity INFO includes all verbosities.
    """
    names = ("INFO", "WARNING", "ERROR", "FATAL")
    key = name.upper()
    index = int(key) if key.isdecimal() else names.index(key) if key in names else -1
    if not 0 <= index < len(names):
        raise ValueError(f"found severity {name!a}, expected one of {', '.join(names)} or 0 to {len(names) - 1}")
    return (v(MAX_VERBOSITY), logging.WARNING, logging.ERROR, logging.CRITICAL)[index]


class KlogFormatter(logging.Formatter):
    """Formats `Lmmdd hh:mm:ss.uuuuuu <thread id> file:line] text`, or only the text without headers."""

    def __init__(self, *, headers: bool = True, directories: bool = False) -> None:
        super().__init__()
        self._headers = headers
        self._directories = directories

    def format(self, record: logging.LogRecord) -> str:
        # Untrusted text must not forge log lines or control a terminal.
        text = escape_text(record.getMessage())
        if record.exc_info:
            text += "\n" + escape_text(self.formatException(record.exc_info), keep_lines=True)
        if not self._headers:
            return text
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created * 1e6) % 1_000_000
        file = record.filename
        if self._directories:
            file = f"{os.path.basename(os.path.dirname(record.pathname))}/{file}"
        native = threading.get_native_id()
        return f"{_letter(record)}{stamp}.{micros:06d} {native:7d} {file}:{record.lineno}] {text}"


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: ts (seconds since the epoch), level, v, logger, caller, msg."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": _JSON_NAMES[_letter(record)],
            "v": max(0, logging.INFO - record.levelno),
            "logger": record.name,
            "caller": f"{record.filename}:{record.lineno}",
            "msg": record.getMessage(),
        }
        if record.exc_info:
            entry["stack"] = self.formatException(record.exc_info)
        return escape_json(json.dumps(entry, ensure_ascii=False))


def start(
    *,
    verbosity: int = 0,
    formatter: logging.Formatter | None = None,
    modules: Callable[[str], int | None] | None = None,
    outputs: Sequence[logging.Handler] = (),
) -> None:
    """Configures the root logger to write to `outputs`, standard error by default.

    `modules` may return a higher verbosity for a module's file name, as klog's `-vmodule` does.
    """
    root = logging.getLogger()
    level = v(verbosity)
    for handler in outputs or (logging.StreamHandler(sys.stderr),):
        handler.setFormatter(formatter or KlogFormatter())
        if modules is not None:
            handler.addFilter(lambda record: _passes(record, modules, level))
        root.addHandler(handler)
    root.setLevel(level if modules is None else v(MAX_VERBOSITY))
    for library in ("asyncio", "hpack"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _passes(record: logging.LogRecord, modules: Callable[[str], int | None], default: int) -> bool:
    special = modules(os.path.splitext(record.filename)[0])
    return record.levelno >= (default if special is None else min(default, v(special)))


def _letter(record: logging.LogRecord) -> str:
    return _LETTERS.get(record.levelno, "I")
