"""Runs the tutorial literally: everything that the reader types, in two shells, and compares the output.

Only the virtual environment is not created again: the clone gets that of this tree.
"""

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import memorydirectory
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
DEADLINE = 60.0


class Block(NamedTuple):
    """A fenced block: its language, the terminal or file after it, its lines and its first line number."""

    language: str
    title: str
    lines: list[str]
    number: int


def blocks() -> list[Block]:
    text = PAGE.read_text()
    found = re.finditer(r"^```(\w+) (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], m[3].splitlines(), text.count("\n", 0, m.start()) + 2) for m in found]


class Terminal:
    """A shell that exits at the first failing command. Programs in the foreground read what is typed."""

    def __init__(self, name: str, directory: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._shell = subprocess.Popen(
            ["bash", "--norc", "-e"], cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=name)
        self._reader.start()

    def _read(self) -> None:
        assert self._shell.stdout
        for line in self._shell.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def type(self, text: str) -> None:
        assert self._shell.stdin
        self._shell.stdin.write(f"{text}\n")

    def expect(self, expected: str, where: str) -> None:
        """Waits until a line of the output is the shown one. White space and `…` match any white space and text."""
        pattern = ".*".join(r"\s+".join(map(re.escape, part.split())) for part in expected.split("…"))
        before: list[str] = []
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                pytest.fail(f"{where}: {self.name}: expected {expected!r}, found:\n{''.join(before)}")
            if re.fullmatch(rf"\s*{pattern}\s*", line):
                return
            before.append(line)

    def finish(self) -> int:
        """Ends the input and returns the status of the shell."""
        assert self._shell.stdin
        self._shell.stdin.close()
        return self._shell.wait(DEADLINE)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()
        self._reader.join()
        for pipe in (self._shell.stdin, self._shell.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory with a short path, because paths of sockets are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(dir=memorydirectory.path().parent) as path:
        yield Path(path)


@pytest.fixture
def terminals(directory: Path) -> Iterator[dict[str, Terminal]]:
    hidden = ("PYTEST", "COV_", "COVERAGE", "MAKE", "MFLAGS", "GIT_", "VIRTUAL_ENV", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    # The clone may belong to another user than the one that runs the tests.
    environment |= {
        "REPOSITORY": str(ROOT), "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*", "COLUMNS": "120", "TMPDIR": str(directory),
    }  # fmt: skip
    documents = {name: Terminal(name, directory, environment) for name in ("terminal-1", "terminal-2")}
    try:
        yield documents
    finally:
        for terminal in documents.values():
            terminal.kill()


def reuse_environment(clone: Path) -> None:
    """Makes the virtual environment of this tree that of the clone, and newer than the files it depends on."""
    (clone / ".venv").symlink_to(ROOT / ".venv")
    for name in ("constraints.txt", "pyproject.toml"):
        os.utime(clone / name, (0, 0))


def test_the_tutorial_works_as_written(terminals: dict[str, Terminal], directory: Path) -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("the tutorial begins with a clone, which needs git and a repository")
    prepared = False
    for block in blocks():
        where = f"{PAGE.name}:{block.number}"
        if block.language != "console":
            file = directory / "accelplane" / "tutorial" / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n".join(block.lines) + "\n")
            continue
        terminal = terminals[block.title]
        if not prepared and "$ make demo" in block.lines:
            reuse_environment(directory / "accelplane")
            prepared = True
        for line in block.lines:
            if line.startswith(("$ ", "> ")):
                terminal.type(line[2:])
            else:
                terminal.expect(line, where)
        if any(line.startswith("$ ") for line in block.lines) and not runs_kubelet(block):
            # The next block may depend on the files that these commands make.
            terminal.type("echo finished: $?")
            terminal.expect("finished: 0", where)
    assert prepared
    assert [terminal.finish() for terminal in terminals.values()] == [0, 0]


def runs_kubelet(block: Block) -> bool:
    return any(line.startswith("$ accelplane kubelet") for line in block.lines)


def test_the_tutorial_has_no_block_that_the_test_ignores() -> None:
    fences = re.findall(r"^```(.*)$", PAGE.read_text(), re.MULTILINE)
    assert [fence for fence in fences if fence] == [f"{block.language} {block.title}" for block in blocks()]
