"""Health by commands: verdicts, thresholds, limits of time and output, and what a command gets."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from trees import write
from waiting import until

from accelplane.devices import Device, Verdict
from accelplane.plugins.generic.commands import Check, CommandSource
from accelplane.plugins.generic.config import MAX_CHECKED, HealthCommand

pytestmark = pytest.mark.memory

VALUES = {"path": "/dev/a", "name": "a", "serial": "S1", "address": ""}


def shell(script: str, **options: Any) -> HealthCommand:
    return HealthCommand(command=("/bin/sh", "-c", script), **options)


def device(unit: str = "u") -> Device:
    return Device(resource="thing", id=unit)


@contextlib.asynccontextmanager
async def running(checks: Mapping[str, Check]) -> AsyncIterator[tuple[CommandSource, Callable[[], dict[str, Verdict]]]]:
    """A source that runs, and a function that returns all verdicts so far by unit."""
    source, seen = CommandSource(), dict[str, Verdict]()
    source.set_checks(checks)

    def changed() -> None:
        found = source.verdicts([device(unit) for unit in checks])
        seen.update({unit: verdict for unit, verdict in found.items() if verdict.cause != "no-answer"})

    task = asyncio.create_task(source.run(changed))
    try:
        yield source, lambda: seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def verdict_of(command: HealthCommand, values: Mapping[str, str] = VALUES) -> Verdict:
    async with running({"u": Check(command, values)}) as (_source, seen):
        await until(lambda: "u" in seen())
        return seen()["u"]


async def test_status_0_is_healthy() -> None:
    assert await verdict_of(shell("exit 0")) == Verdict("good")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo; echo '  no carrier\033[1m'; echo more; exit 3", "ended with status 3: no carrier\\x1b[1m"),
        ("echo broken >&2; exit 1", "ended with status 1: broken"),
        ("exit 1", "ended with status 1"),
        ("kill -9 $$", "was killed by signal 9"),
        ("head -c 1000000 /dev/zero | tr '\\0' x; exit 1", f"ended with status 1: {'x' * 200}"),
        ("printf '\\377'; exit 1", "ended with status 1: \\ufffd"),
    ],
)
async def test_the_first_line_of_a_failed_command_is_the_reason(script: str, reason: str) -> None:
    assert await verdict_of(shell(script)) == Verdict("bad", f"health command /bin/sh {reason}")


async def test_a_missing_program_is_a_failure() -> None:
    reason = "health command /no/such: No such file or directory"
    assert await verdict_of(HealthCommand(command=("/no/such",))) == Verdict("bad", reason)


async def test_a_command_is_run_again_after_the_limit_of_open_files_was_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", no_pipe)
        expected = Verdict("bad", "health command /bin/sh: Too many open files")
        async with running({"u": Check(shell("exit 0", period_seconds=1), VALUES)}) as (_source, seen):
            await until(lambda: seen() == {"u": expected})
            patched.undo()
            await until(lambda: seen() == {"u": Verdict("good")})


async def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $! > {pids}; echo $$ >> {pids}; wait"
    verdict = await verdict_of(shell(script, timeout_seconds=1))
    assert verdict == Verdict("bad", "health command /bin/sh did not end within 1 s")
    for pid in pids.read_text().split():
        await until(lambda pid=pid: is_gone(pid))


def is_gone(pid: str) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


async def test_processes_that_a_command_leaves_are_killed_and_do_not_delay_its_result(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert await verdict_of(shell(f"sleep 1000 & echo $! > {pid}", timeout_seconds=60)) == Verdict("good")
    await until(lambda: is_gone(pid.read_text().strip()))


async def test_a_command_gets_the_device_and_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "password")
    output = tmp_path / "output"
    script = f"(echo $0 $1; pwd; env; cat) > {output}"
    command = HealthCommand(command=("/bin/sh", "-c", script, "{path}", "{serial}:{name}{address}"))
    assert await verdict_of(command) == Verdict("good")
    lines = output.read_text().splitlines()
    assert lines[:2] == ["/dev/a S1:a", "/"]
    assert {"DEVICE_PATH=/dev/a", "DEVICE_NAME=a", "DEVICE_SERIAL=S1", "LANG=C.UTF-8"} < {*lines}
    assert not any("SECRET" in line for line in lines)


async def test_a_serial_number_with_syntax_of_a_shell_is_not_given_to_the_command(tmp_path: Path) -> None:
    values = {**VALUES, "serial": f"$(touch {tmp_path}/here)"}
    verdict = await verdict_of(shell("test {serial}"), values)
    assert verdict.answer == "bad"
    assert "serial is '$(touch" in verdict.reason
    assert await verdict_of(shell("test {path}"), values) == Verdict("good")
    assert list(tmp_path.iterdir()) == []


async def test_devices_are_unhealthy_until_their_command_has_ended() -> None:
    source = CommandSource()
    source.set_checks({"u": Check(shell("exit 0"), VALUES)})
    expected = Verdict("bad", "the health command has not finished yet", "no-answer")
    assert source.verdicts([device(), device("without a command")]) == {"u": expected}


async def test_a_device_that_comes_back_has_the_verdict_of_before() -> None:
    """The health of a removed device is forgotten: without a verdict it would be healthy."""
    async with running({"u": Check(shell("exit 1"), VALUES)}) as (source, seen):
        await until(lambda: "u" in seen())
        assert [source.verdicts([device()])["u"].answer for _ in range(2)] == ["bad", "bad"]


@pytest.mark.parametrize(
    ("failure", "success", "results", "expected"),
    [
        (1, 1, "gbgb", "gbgb"),
        (3, 1, "gbbgbbb", "g-----b"),
        (1, 2, "bgbgg", "b---g"),
        (3, 2, "bgg", "b-g"),
        (2, 2, "gggb", "g---"),
    ],
)
async def test_thresholds_count_results_in_a_row(failure: int, success: int, results: str, expected: str) -> None:
    source = CommandSource()
    command = shell("", failure_threshold=failure, success_threshold=success)
    verdicts = [source.judge("u", command, "" if result == "g" else "broken") for result in results]
    assert "".join(verdict.answer[0] if verdict else "-" for verdict in verdicts) == expected


async def test_commands_of_new_and_changed_devices_run_and_those_of_removed_ones_end(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "")

    def check(word: str) -> Check:
        return Check(shell(f"echo {word} >> {log}; sleep 1000", timeout_seconds=60), VALUES)

    async with running({"u": check("first"), "v": check("other")}) as (source, _seen):
        await until(lambda: set(log.read_text().split()) == {"first", "other"})
        source.set_checks({"u": check("second")})
        await until(lambda: log.read_text().split()[-1] == "second")
        await until(lambda: len(children()) == 1)
        source.set_checks({})
        await until(lambda: not children())


async def test_commands_end_with_the_plugin() -> None:
    async with running({"u": Check(shell("sleep 1000", timeout_seconds=60), VALUES)}):
        await until(lambda: len(children()) == 1)
    assert children() == []


async def test_the_number_of_commands_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelplane.plugins.generic.commands.MAX_CHECKED", 2)
    checks = {unit: Check(shell("exit 0"), VALUES) for unit in "abc"}
    async with running(checks) as (_source, seen):
        await until(lambda: len(seen()) == 3)
        assert [seen()[unit].answer for unit in "abc"] == ["good", "good", "bad"]
        assert seen()["c"].reason == "there are more than 2 health commands"
    assert MAX_CHECKED >= 2


def children() -> list[int]:
    """The running children of this process that are a shell."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in pids if not is_gone(pid) and is_shell(pid)]


def is_shell(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/bin/sh\0-c\0")
    return False
