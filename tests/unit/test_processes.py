"""The limit of open files, and ending child processes."""

import asyncio
import subprocess
import sys

import pytest

from accelplane.processes import end_process

IGNORES_SIGTERM = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)"
WRITES = "import os; os.write(1, b'x'); [os.write(1, b'x' * 65536) for _ in range(64)]"
SLEEP = "import time; time.sleep(300)"


async def start(script: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def test_a_process_ends_on_sigterm() -> None:
    process = await start(SLEEP)
    assert not await end_process(process, 60)
    assert process.returncode == -15


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    process = await start(f"{IGNORES_SIGTERM}; {SLEEP}")
    assert process.stdout is not None
    await process.stdout.readline()
    assert await end_process(process, 0.05)
    assert process.returncode == -9


async def test_a_process_is_killed_at_once_without_a_timeout() -> None:
    process = await start(SLEEP)
    assert await end_process(process)
    assert process.returncode == -9


async def test_a_process_with_unread_output_is_reported_as_ended() -> None:
    process = await start(f"{WRITES}; {SLEEP}")
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    assert await end_process(process)
    assert process.returncode == -9


async def test_a_process_that_has_ended_keeps_its_exit_status(caplog: pytest.LogCaptureFixture) -> None:
    process = await start("raise SystemExit(3)")
    assert process.stdout is not None
    await process.stdout.read()
    assert not await end_process(process, 60)
    assert process.returncode == 3
    assert await end_process(process) is False
    assert not caplog.records


async def test_a_cancelled_call_leaves_no_task() -> None:
    process = await start(f"{IGNORES_SIGTERM}; {SLEEP}")
    assert process.stdout is not None
    await process.stdout.readline()
    ending = asyncio.create_task(end_process(process, 60))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait((ending,))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert await end_process(process)


@pytest.mark.parametrize(("soft", "hard"), [(100, 4096), (64, 64)])
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(soft: int, hard: int) -> None:
    program = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from accelplane.processes import raise_file_limit\n"
        "raise_file_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == f"{hard} {hard}\n"
