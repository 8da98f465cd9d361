"""Logging: the standard library's, with klog's verbosity levels and line format, or JSON lines.

Level `V(n)` is what the Go programs log at `-v=n`: V(0) is an ordinary INFO, higher ones are quieter.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

_LETTERS = {logging.DEBUG: "I", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_JSON_NAMES = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
MAX_VERBOSITY = 18
# A message may quote what somebody else has written: that must not look like lines of ours, nor move a cursor.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {10: "\\n", 13: "\\r", 9: "\\t"}


def v(verbosity: int) -> int:
    """The logging level of klog's verbosity `verbosity`."""
    return logging.INFO - min(verbosity, MAX_VERBOSITY)


def threshold(name: str) -> int:
    """The level for one of klog's severity names or numbers (`ERROR`, `2`). Raises `ValueError`.

    All verbosities of a message that is logged at all are INFO to klog.
    """
    names = ("INFO", "WARNING", "ERROR", "FATAL")
    key = name.upper()
    index = int(key) if key.isdecimal() else names.index(key) if key in names else -1
    if not 0 <= index < len(names):
        raise ValueError(f"severity {name!a}: expected one of {', '.join(names)} or 0 to {len(names) - 1}")
    return (v(MAX_VERBOSITY), logging.WARNING, logging.ERROR, logging.CRITICAL)[index]


class KlogFormatter(logging.Formatter):
    """`Lmmdd hh:mm:ss.uuuuuu <thread id> file:line] text`, or only the text without headers."""

    def __init__(self, *, headers: bool = True, directories: bool = False) -> None:
        super().__init__()
        self._headers = headers
        self._directories = directories

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage().translate(_CONTROLS)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
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
    """One JSON object a line: ts (seconds since the epoch), level, v, caller, msg."""

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
        return json.dumps(entry, ensure_ascii=False)


def start(
    *,
    verbosity: int = 0,
    formatter: logging.Formatter | None = None,
    modules: Callable[[str], int | None] | None = None,
    outputs: Sequence[logging.Handler] = (),
) -> None:
    """Directs all logging to `outputs` (standard error when empty).

    `modules` may give a higher verbosity for a module's file name, as klog's `-vmodule` does.
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
