"""Node commands in separate processes, as in a DaemonSet, or called in this process."""

import asyncio
import contextlib
import functools
import importlib.metadata
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forkserver import ForkedProcess, fork_server
from waiting import until


class Process:
    """A running command. `log()` returns its output."""

    def __init__(
        self,
        command: str,
        *arguments: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        powerless: bool = False,
        interpreter: bool = False,
    ) -> None:
        """`powerless`: file permissions also apply to root. `interpreter`: it starts Python itself."""
        without_capabilities = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
        wrapper = without_capabilities if powerless and os.geteuid() == 0 else []
        environment = {**os.environ, **(env or {})}
        self._log = log
        with open(log, "ab") as output, open(os.devnull, "rb") as nothing:
            self._process: subprocess.Popen[bytes] | ForkedProcess
            if wrapper or interpreter or not _is_forkable(command, env or {}):
                self._process = subprocess.Popen(
                    [*wrapper, _path(command), *arguments],
                    stdout=output,
                    stderr=output,
                    stdin=nothing,
                    env=environment,
                )
            else:
                streams = nothing.fileno(), output.fileno(), output.fileno()
                self._process = fork_server().start(command, arguments, environment, streams)
        self.pid = self._process.pid

    def log(self) -> str:
        return self._log.read_text()

    async def wait_for_log(self, text: str, seconds: float = 15) -> None:
        """Returns when the log has `text`."""
        try:
            await until(lambda: text in self.log() or self._process.poll() is not None, seconds)
        except TimeoutError:
            raise TimeoutError(f"not in the log: {text}\n{self.log()}") from None
        assert text in self.log(), f"ended without {text!r}:\n{self.log()}"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def exit_code(self, seconds: float = 15) -> int:
        """Waits for the end."""
        return await asyncio.to_thread(self._process.wait, seconds)

    async def terminate(self) -> int:
        """Stops it as Kubernetes does; returns the exit code."""
        self.send(signal.SIGTERM)
        return await self.exit_code()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def run_command(
    command: str, *arguments: str, env: Mapping[str, str] | None = None, interpreter: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own until it ends. `interpreter` is that of `Process`."""
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, open(os.devnull, "rb") as nothing:
        if interpreter or not _is_forkable(command, env or {}):
            code = subprocess.run(
                [_path(command), *arguments],
                stdout=output,
                stderr=errors,
                stdin=nothing,
                env=environment,
                timeout=60,
                check=False,
            ).returncode
        else:
            streams = nothing.fileno(), output.fileno(), errors.fileno()
            process = fork_server().start(command, arguments, environment, streams)
            try:
                code = process.wait(60)
            finally:
                process.kill()
        texts: list[str] = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([command, *arguments], code, *texts)


def _path(command: str) -> str:
    return os.path.join(os.path.dirname(sys.executable), command)


def _is_forkable(command: str, env: Mapping[str, str]) -> bool:
    """Whether the command is one of this project, and no variables are for the start of Python, as for coverage."""
    at_start = [name for name in env if name == "LD_PRELOAD" or (name.startswith("PYTHON") and name != "PYTHONPATH")]
    return command in _commands() and not at_start and "COVERAGE_PROCESS_START" not in os.environ


@functools.cache
def _commands() -> frozenset[str]:
    points = importlib.metadata.entry_points(group="console_scripts")
    return frozenset(point.name for point in points if point.module.startswith("accelplane."))


def run_main(main: Callable[[Sequence[str]], int], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Calls a command's entry point in this process, in a tenth of the time of a separate process.

    For commands that end by themselves. Logging and signal handlers are restored.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        finally:
            for number, handler in signals.items():
                signal.signal(number, handler)
            for handler in set(root.handlers).difference(handlers):
                root.removeHandler(handler)
                handler.close()
            root.setLevel(level)
    return subprocess.CompletedProcess(list(arguments), code, output.getvalue(), errors.getvalue())


def installed_plugin(directory: Path, name: str, source: str) -> Mapping[str, str]:
    """The environment in which the class `ThePlugin` in `source` is an installed plugin."""
    module = f"test_plugin_{name}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{module}.py").write_text(source)
    metadata = directory / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[accelplane.plugins]\n{name} = {module}:ThePlugin\n")
    return {"PYTHONPATH": str(directory)}
