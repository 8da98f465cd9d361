"""Logging in klog's format: headers, verbosities, thresholds, files; and JSON lines. Each test uses a process."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelplane import logs
from accelplane.cli import logflags
from accelplane.cli.goflags import parse

pytestmark = pytest.mark.memory

HEADER = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d{6} +(\d+) (\S+):(\d+)\] (.*)")

# The messages of a program with two modules: `cdi.py` and `watch.py` of a package `node`.
PROGRAM = """
import logging, sys
from accelplane.cli import logflags
from accelplane.cli.goflags import parse
given, _ = parse(logflags.FLAGS, sys.argv[1:])
logflags.start(given, "prog")
def say(module):
    code = '''
from accelplane.logs import v
log.error("%s error", module)
log.warning("%s warning", module)
log.info("%s info", module)
log.log(v(1), "%s v1", module)
log.log(v(4), "%s v4", module)
'''
    exec(compile(code, f"/src/node/{module}.py", "exec"), {"log": logging.getLogger(module), "module": module})
say("cdi")
say("watch")
"""


def logged(*arguments: str, program: str = PROGRAM, **environment: str) -> list[str]:
    """The lines on standard error."""
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert result.stdout == b""
    return result.stderr.decode().splitlines()


def texts(lines: list[str]) -> list[str]:
    return [line.partition("] ")[2] for line in lines]


def log_texts(module: str, *kinds: str) -> list[str]:
    return [f"{module} {kind}" for kind in kinds]


def test_lines_have_klogs_header() -> None:
    lines = logged("-v=4")
    found = [match.groups() for line in lines if (match := HEADER.fullmatch(line))]
    assert [(letter, file, line, text) for letter, _thread, file, line, text in found[:5]] == [
        ("E", "cdi.py", "3", "cdi error"),
        ("W", "cdi.py", "4", "cdi warning"),
        ("I", "cdi.py", "5", "cdi info"),
        ("I", "cdi.py", "6", "cdi v1"),
        ("I", "cdi.py", "7", "cdi v4"),
    ]
    assert len(found) == len(lines) == 10
    assert all(int(thread) > 0 for _letter, thread, *_rest in found)


@pytest.mark.parametrize(
    ("arguments", "cdi", "watch"),
    [
        ([], ("error", "warning", "info"), ("error", "warning", "info")),
        (["-v=-5"], ("error", "warning", "info"), ("error", "warning", "info")),
        (["-v=1"], ("error", "warning", "info", "v1"), ("error", "warning", "info", "v1")),
        (["-v=99"], ("error", "warning", "info", "v1", "v4"), ("error", "warning", "info", "v1", "v4")),
        (["-vmodule=cdi=4"], ("error", "warning", "info", "v1", "v4"), ("error", "warning", "info")),
        (["-vmodule=c?i=1,wat*=4,"], ("error", "warning", "info", "v1"), ("error", "warning", "info", "v1", "v4")),
        (["-vmodule=*=1,cdi=4"], ("error", "warning", "info", "v1"), ("error", "warning", "info", "v1")),
        (["-v=1", "-vmodule=cdi=0"], ("error", "warning", "info", "v1"), ("error", "warning", "info", "v1")),
    ],
)
def test_verbosity_filters_messages(arguments: list[str], cdi: list[str], watch: list[str]) -> None:
    assert texts(logged(*arguments)) == [*log_texts("cdi", *cdi), *log_texts("watch", *watch)]


def test_a_message_is_one_line_with_any_quoted_text() -> None:
    code = r'logging.error("name: %s", "a\nE1121 00:00:00.000000 1 b.py:1] c\x1b[2J\x85")'
    program = PROGRAM.replace('say("cdi")', code)
    quoted = r"name: a\nE1121 00:00:00.000000 1 b.py:1] c\x1b[2J\x85"
    assert next(line for line in logged(program=program) if "name:" in line).endswith(quoted)


CONTROLS = r"a\x7f\x85\x9b2J\u061c\u200f\u2028\u202e\u2066 ü"


def test_characters_that_control_a_terminal_are_escaped_in_all_formats() -> None:
    code = f'try: raise ValueError("{CONTROLS}")\nexcept ValueError: logging.exception("{CONTROLS}")'
    program = PROGRAM.replace('say("cdi")', code)
    lines = logged(program=program)
    assert lines[0].endswith(f"] {CONTROLS}")
    assert f"ValueError: {CONTROLS}" in lines
    (line, *_) = logged("-log-format=json", program=program)
    assert line.isprintable()
    text = ast.literal_eval(f'"{CONTROLS}"')
    assert json.loads(line)["msg"] == text
    assert json.loads(line)["stack"].endswith(f"ValueError: {text}")


def test_headers_can_be_omitted_or_have_the_directory() -> None:
    assert logged("-skip_headers")[0] == "cdi error"
    match = HEADER.fullmatch(logged("-add_dir_header")[0])
    assert match
    assert match[3] == "node/cdi.py"


def test_json_lines_have_the_same_content() -> None:
    first, *_, last = (json.loads(line) for line in logged("-v=4", "-log-format=json"))
    assert isinstance(first.pop("ts"), float)
    assert first == {"level": "error", "v": 0, "logger": "cdi", "caller": "cdi.py:3", "msg": "cdi error"}
    assert (last["level"], last["v"], last["msg"]) == ("info", 4, "watch v4")


class TestFiles:
    def test_log_files_get_all_messages_and_errors_also_go_to_stderr(self, tmp_path: Path) -> None:
        lines = logged("-logtostderr=false", f"-log_file={tmp_path}/log", "-v=1")
        assert texts(lines) == ["cdi error", "watch error"]
        expected = ("error", "warning", "info", "v1")
        assert texts((tmp_path / "log").read_text().splitlines()) == [
            *log_texts("cdi", *expected),
            *log_texts("watch", *expected),
        ]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["-stderrthreshold=FATAL"], ()),
            (["-stderrthreshold=2"], ("error",)),
            (["-stderrthreshold=warning"], ("error", "warning")),
            (["-stderrthreshold=INFO"], ("error", "warning", "info", "v1")),
            (["-alsologtostderr"], ("error", "warning", "info", "v1")),
            (["-alsologtostderr", "-alsologtostderrthreshold=1"], ("error", "warning")),
        ],
    )
    def test_severe_messages_are_also_written_to_stderr(
        self, tmp_path: Path, arguments: list[str], expected: tuple[str, ...]
    ) -> None:
        lines = logged("-logtostderr=false", f"-log_dir={tmp_path}", "-v=1", *arguments)
        assert texts(lines) == [*log_texts("cdi", *expected), *log_texts("watch", *expected)]
        assert len((tmp_path / "prog.log").read_text().splitlines()) == 8

    def test_log_files_are_not_used_with_logtostderr(self, tmp_path: Path) -> None:
        assert len(logged(f"-log_file={tmp_path}/log")) == 6
        assert len(logged("-logtostderr=false")) == 6
        assert list(tmp_path.iterdir()) == []

    def test_messages_with_invalid_unicode_are_logged(self, tmp_path: Path) -> None:
        program = PROGRAM.replace('say("cdi")', 'logging.error("\\xfcber \\udcff")')
        lines = logged(
            "-logtostderr=false", f"-log_file={tmp_path}/log", program=program, LC_ALL="C", PYTHONUTF8="0",
            PYTHONCOERCECLOCALE="0",
        )  # fmt: skip
        assert "Logging error" not in "".join(lines)
        assert texts((tmp_path / "log").read_text().splitlines())[0] == "über \\udcff"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("-vmodule=cdi", "-vmodule: found 'cdi', expected PATTERN=LEVEL"),
        ("-vmodule==4", "-vmodule: found '=4', expected PATTERN=LEVEL"),
        ("-vmodule=cdi=-1", "-vmodule: found 'cdi=-1', expected PATTERN=LEVEL"),
        ("-log-format=xml", "-log-format: found 'xml', expected text or json"),
        ("-stderrthreshold=LOUD", "-stderrthreshold: found severity 'LOUD', expected one of INFO"),
        ("-stderrthreshold=4", "-stderrthreshold: found severity '4'"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_reported_with_its_flag(tmp_path: Path, argument: str, message: str) -> None:
    values, _words = parse(logflags.FLAGS, ["-logtostderr=false", f"-log_file={tmp_path}/log", argument])
    with pytest.raises(ValueError, match=re.escape(message)):
        logflags.start(values, "prog")


def test_a_log_file_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    values, _words = parse(logflags.FLAGS, ["-logtostderr=false", f"-log_file={tmp_path}/none/log"])
    with pytest.raises(FileNotFoundError, match="none/log"):
        logflags.start(values, "prog")


def test_an_exception_is_logged_with_its_traceback() -> None:
    program = PROGRAM.replace('say("cdi")', 'try: 1 / 0\nexcept ZeroDivisionError: logging.exception("failed")')
    lines = logged(program=program)
    assert lines[0].endswith("] failed")
    assert "ZeroDivisionError: division by zero" in lines
    entry = json.loads(logged("-log-format=json", program=program)[0])
    assert entry["stack"].endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("name", ["", "x", "-1", "4", "²", "WARN"])
def test_a_severity_is_one_of_four(name: str) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        logs.threshold(name)
