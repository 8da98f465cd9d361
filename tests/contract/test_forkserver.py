"""Forked commands behave as commands with an interpreter of their own."""

import signal
import subprocess
from pathlib import Path

import pytest
from processes import Process, installed_plugin, run_command

pytestmark = pytest.mark.untraced  # commands whose coverage is measured are not forked

BOTH = pytest.mark.parametrize("interpreter", [False, True])
# A plugin that cannot be loaded is skipped with a log message. This one ends the command there.
PLUGIN = """
import os, sys
from accelplane.node import plugins

def end(*_):
    raise SystemExit({})

print(sys.argv[1:], os.environ['WORD'], sys.stdin.read(), file=sys.stderr)
plugins.log.exception = end
raise ImportError
"""


@BOTH
@pytest.mark.parametrize(("code", "expected", "message"), [("", 0, ""), ("7", 7, ""), ("'text'", 1, "text\n")])
def test_a_command_has_its_arguments_environment_and_exit_code(
    tmp_path: Path, interpreter: bool, code: str, expected: int, message: str
) -> None:
    env = {**installed_plugin(tmp_path, f"ending{expected}", PLUGIN.format(code)), "WORD": "here"}
    result = run_command("accelplane", "node", "-once", env=env, interpreter=interpreter)
    assert (result.returncode, result.stdout) == (expected, "")
    assert result.stderr == f"['node', '-once'] here \n{message}"


@BOTH
def test_a_traceback_is_printed_and_the_exit_code_is_1(tmp_path: Path, interpreter: bool) -> None:
    env = installed_plugin(tmp_path, "interrupted", "class Stop(BaseException): pass\nraise Stop('stopped')\n")
    result = run_command("accelplane", "node", "-once", env=env, interpreter=interpreter)
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith("Stop: stopped\n")


@BOTH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_the_exit_code_after_a_signal_is_its_negative_number(
    tmp_path: Path, interpreter: bool, number: signal.Signals
) -> None:
    env = installed_plugin(tmp_path, "waiting", "import sys, time\nprint('ready', file=sys.stderr)\ntime.sleep(60)\n")
    process = Process("accelplane", "node", log=tmp_path / "log", env=env, interpreter=interpreter)
    try:
        await process.wait_for_log("ready", 60)
        process.send(number)
        assert await process.exit_code(60) == -number
        process.send(number)  # has no effect
    finally:
        process.kill()


async def test_a_process_that_runs_raises_a_timeout(tmp_path: Path) -> None:
    env = installed_plugin(tmp_path, "waiting", "import time\ntime.sleep(60)\n")
    process = Process("accelplane", "node", log=tmp_path / "log", env=env)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            await process.exit_code(0.05)
    finally:
        process.kill()
