"""The logging flags of all node commands: the flags of klog, and `-log-format`."""

import fnmatch
import logging
import os
import sys
from collections.abc import Callable, Mapping
from logging.handlers import RotatingFileHandler

from accelplane import logs
from accelplane.cli.goflags import Flag, Value, with_defaults

FLAGS = (
    Flag("v", 0, "number for the log level verbosity"),
    Flag("vmodule", "", "comma-separated list of pattern=N settings for file-filtered logging"),
    Flag("logtostderr", True, "log to standard error instead of files"),
    Flag("alsologtostderr", False, "log to standard error as well as files"),
    Flag("stderrthreshold", "ERROR", "logs at or above this threshold go to stderr when writing to files"),
    Flag("log_dir", "", "if non-empty, write log files in this directory (no effect when -logtostderr=true)"),
    Flag("log_file", "", "if non-empty, use this log file (no effect when -logtostderr=true)"),
    Flag("log_file_max_size", 1800, "size in MB at which the log file is rotated; 0 means never"),
    Flag("skip_headers", False, "if true, no headers in log messages"),
    Flag("skip_log_headers", False, "accepted, no effect: log files have no file headers"),
    Flag("add_dir_header", False, "if true, adds the file directory to the header of the log messages"),
    Flag("one_output", False, "accepted, no effect: each message is written once"),
    Flag("log_backtrace_at", ":0", "accepted, no effect: internal errors are logged with a traceback"),
    Flag("legacy_stderr_threshold_behavior", True, "accepted, no effect: -stderrthreshold applies only with log files"),
    Flag("alsologtostderrthreshold", "INFO", "logs at or above this threshold go to stderr with -alsologtostderr"),
    Flag("log-format", "text", "text (klog's format) or json"),
)
_THRESHOLDS = ("stderrthreshold", "alsologtostderrthreshold")


def start(given: Mapping[str, Value], program: str) -> None:
    """Configures logging. Raises `ValueError` with the name of an invalid flag, and `OSError` for a log file."""
    values = with_defaults(FLAGS, given, {})
    thresholds = {name: _threshold(name, str(values[name])) for name in _THRESHOLDS}
    if values["log-format"] not in ("text", "json"):
        raise ValueError(f"-log-format: found {values['log-format']!a}, expected text or json")
    formatter = (
        logs.JsonFormatter()
        if values["log-format"] == "json"
        else logs.KlogFormatter(headers=not values["skip_headers"], directories=bool(values["add_dir_header"]))
    )
    logs.start(
        verbosity=max(0, int(values["v"])),
        formatter=formatter,
        modules=_modules(str(values["vmodule"])),
        outputs=_outputs(values, thresholds, program),
    )


def message_of(error: Exception) -> str:
    """The message of an error. That of an `OSError` has the file name and no errno."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"


def _threshold(name: str, severity: str) -> int:
    try:
        return logs.threshold(severity)
    except ValueError as error:
        raise ValueError(f"-{name}: {error}") from None


def _outputs(values: Mapping[str, Value], thresholds: Mapping[str, int], program: str) -> list[logging.Handler]:
    console = logging.StreamHandler(sys.stderr)
    path = str(values["log_file"])
    if not path and values["log_dir"]:
        path = os.path.join(str(values["log_dir"]), f"{program}.log")
    if values["logtostderr"] or not path:
        return [console]
    console.setLevel(thresholds["alsologtostderrthreshold" if values["alsologtostderr"] else "stderrthreshold"])
    megabytes = int(values["log_file_max_size"])
    file = RotatingFileHandler(
        path, maxBytes=megabytes * 1024 * 1024, backupCount=1, encoding="utf-8", errors="backslashreplace"
    )
    return [file, console]


def _modules(text: str) -> Callable[[str], int | None] | None:
    if not text:
        return None
    patterns: list[tuple[str, int]] = []
    for entry in filter(None, text.split(",")):
        pattern, equals, number = entry.partition("=")
        if not equals or not pattern or not number.isdecimal():
            raise ValueError(f"-vmodule: found {entry!a}, expected PATTERN=LEVEL, for example runner=4")
        patterns.append((pattern, int(number)))
    return lambda module: next((level for pattern, level in patterns if fnmatch.fnmatchcase(module, pattern)), None)
