"""The worker process of the Level-Zero service: timeouts, crashes, restarts. A script simulates the worker."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from processes import run_main
from waiting import until

from accelplane.cli import levelzero
from accelplane.gpuservices.zeapi import DEPENDENCY_UNAVAILABLE, UNKNOWN
from accelplane.gpuservices.zeprocess import InitError, Limits, RequestError, ZeProcess, _Child

A, B = "0000:03:00.0", "0000:04:00.0"
LIMITS = Limits(
    request=5, call=0.5, init=60, first_retry=0.01, last_retry=0.02, first_device_retry=1000, last_device_retry=1000,
    first_refresh=0, end=5,
)  # fmt: skip

# Answers as the file says: a line `REQUEST CODE` for each request, by default `= 0 1 1`. It appends its process ID to
# the file `started`.
WORKER = """
import os, sys, time
directory = sys.argv[1]
with open(directory + "/started", "a") as file:
    file.write(f"{os.getpid()}\\n")
for line in sys.stdin:
    actions = dict(line.rstrip("\\n").split("=", 1) for line in open(directory + "/actions"))
    action = actions.get(line.strip(), "print('= 0' if line.strip() == 'init' else '= 0 1 1', flush=True)")
    exec(action)
"""


class Worker:
    """The script: its actions for requests, and the processes that ran it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "worker.py").write_text(WORKER)
        (directory / "started").touch()
        self.set_actions()

    def set_actions(self, **actions: str) -> None:
        """`health_A` stands for the request `health` of the device A."""
        lines = (f"{key.replace('_A', ' ' + A).replace('_B', ' ' + B)}={action}\n" for key, action in actions.items())
        (new := self._directory / "new").write_text("".join(lines))
        new.rename(self._directory / "actions")

    @property
    def started(self) -> list[int]:
        return [int(line) for line in (self._directory / "started").read_text().split()]

    def process(self, limits: Limits = LIMITS) -> ZeProcess:
        command = (sys.executable, str(self._directory / "worker.py"), str(self._directory))
        return ZeProcess("sysman", 0, limits, command)

    @contextlib.asynccontextmanager
    async def running(self, limits: Limits = LIMITS) -> AsyncGenerator[ZeProcess]:
        process = self.process(limits)
        task = asyncio.create_task(process.run())
        try:
            await until(process.initialized.is_set)
            yield process
        finally:
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled()
        assert not any(os.path.exists(f"/proc/{started}") for started in self.started)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


async def fails(process: ZeProcess, request: str, bdf: str = A) -> int:
    with pytest.raises(RequestError) as caught:
        await process.ask(request, bdf)
    return caught.value.code


async def test_concurrent_requests_have_their_own_responses(worker: Worker) -> None:
    worker.set_actions(health_A="print('= 0 0 1', flush=True)")
    async with worker.running() as process:
        found = await asyncio.gather(process.ask("health", A), process.ask("health", B), process.ask("indices"))
    assert found == [("0", "0", "1"), ("0", "1", "1"), ("0", "1", "1")]
    assert len(worker.started) == 1


@pytest.mark.parametrize(
    "action",
    [
        "os._exit(0)",
        "os.kill(os.getpid(), 11)",
        "time.sleep(1000)",
        "print('nonsense', flush=True)",
        "print('=', flush=True)",
        "print('= x', flush=True)",
        "print('x' * 100_000, flush=True)",
        "os.write(1, b'\\xff\\n')",
        "os.close(1); time.sleep(1000)",
    ],
)
async def test_a_request_without_response_is_an_error_and_the_device_is_not_queried_again(
    worker: Worker, action: str
) -> None:
    worker.set_actions(health_A=action)
    async with worker.running() as process:
        first, second = asyncio.create_task(fails(process, "health")), asyncio.create_task(process.ask("health", B))
        assert await first == DEPENDENCY_UNAVAILABLE
        assert await second == ("0", "1", "1")
        assert len(worker.started) == 2
        worker.set_actions()
        assert await fails(process, "temperature") == DEPENDENCY_UNAVAILABLE
        assert await process.ask("indices") == ("0", "1", "1")
        assert len(worker.started) == 2


async def test_a_device_is_queried_again_after_a_delay(worker: Worker) -> None:
    worker.set_actions(health_A="os._exit(1)")
    async with worker.running(Limits(first_device_retry=0.01, first_retry=0.01)) as process:
        assert await fails(process, "health") == DEPENDENCY_UNAVAILABLE
        worker.set_actions()
        found: list[tuple[str, ...]] = []

        async def answered() -> bool:
            with contextlib.suppress(RequestError):
                found.append(await process.ask("health", A))
            return bool(found)

        await until(answered)
    assert found == [("0", "1", "1")]


async def test_a_process_that_ends_without_a_request_is_started_again(worker: Worker) -> None:
    async with worker.running() as process:
        os.kill(worker.started[0], 9)
        await until(lambda: len(worker.started) == 2)
        assert await process.ask("health", A) == ("0", "1", "1")


async def test_an_unknown_device_makes_the_process_enumerate_again(worker: Worker) -> None:
    worker.set_actions(health_A=f"print('= {UNKNOWN} 1 1', flush=True)")
    async with worker.running() as process:
        assert (await process.ask("health", A))[0] == str(UNKNOWN)
        await until(lambda: len(worker.started) == 2)
        assert await process.ask("health", B) == ("0", "1", "1")


async def test_devices_are_not_enumerated_again_too_often(worker: Worker) -> None:
    worker.set_actions(health_A=f"print('= {UNKNOWN} 1 1', flush=True)")
    async with worker.running(Limits()) as process:
        for _ in range(3):
            assert (await process.ask("health", A))[0] == str(UNKNOWN)
        assert len(worker.started) == 1


async def test_a_request_that_waits_too_long_is_an_error(worker: Worker) -> None:
    worker.set_actions(health_A="time.sleep(1000)")
    async with worker.running(Limits(request=0.1, call=1000)) as process:
        assert await fails(process, "health") == DEPENDENCY_UNAVAILABLE
        assert await fails(process, "health", B) == DEPENDENCY_UNAVAILABLE


async def test_requests_while_the_process_cannot_be_started_have_its_error(worker: Worker) -> None:
    worker.set_actions(init="print('= 2013265921', flush=True)")
    process = worker.process(Limits(request=0.001, first_retry=0.001))
    process.initialized.set()  # as after an earlier start
    task = asyncio.create_task(process.run())

    async def refused() -> bool:
        return await fails(process, "health") == 0x78000001

    await until(refused)
    task.cancel()
    await asyncio.wait((task,))


@pytest.mark.parametrize(
    ("action", "limit", "text"),
    [
        ("print('= 2013265921', flush=True)", 60, "uninitialized (0x78000001)"),
        ("print('! no library', flush=True)", 60, "no library"),
        ("os._exit(7)", 60, "ended with status 7"),
        ("time.sleep(1000)", 0.5, "does not initialize within 0.5 s"),
    ],
)
async def test_a_failed_first_initialization_ends_the_service(
    worker: Worker, action: str, limit: float, text: str
) -> None:
    worker.set_actions(init=action)
    with pytest.raises(InitError) as caught:
        await worker.process(Limits(init=limit)).run()
    assert text in str(caught.value)
    # On a busy machine the script may not have run within 0.5 s.
    assert not any(os.path.exists(f"/proc/{started}") for started in worker.started)


async def test_a_message_is_logged_once(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    worker.set_actions(health_A="print('2 a warning\\n1 an error\\n= 0 1 1', flush=True)")
    caplog.set_level(0)
    async with worker.running() as process:
        for _ in range(3):
            await process.ask("health", A)
    found = [(record.levelname, record.message) for record in caplog.records if record.name.endswith("zeprocess")]
    assert found == [("WARNING", "a warning"), ("ERROR", "an error")]


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_an_invalid_call_timeout_prevents_the_start(value: str) -> None:
    result = run_main(levelzero.main, f"-call-timeout={value}")
    assert result.returncode == 255
    assert "-call-timeout" in result.stderr


async def test_a_timeout_while_the_process_ends_does_not_count_as_its_end() -> None:
    child = await _Child.start((sys.executable, "-c", "import os, time; os.close(1); time.sleep(1000)"), os.environ)
    try:
        await until(lambda: child.stdout is not None and child.stdout.at_eof())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await child.receive()
        assert not child.exited.done()
    finally:
        child.transport.kill()
        await until(child.exited.done)
        child.transport.close()
    assert child.exited.result() is None
