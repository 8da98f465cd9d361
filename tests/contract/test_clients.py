"""`accelplane clients` on its socket: requests, walks over processes, errors."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from clientservices import PLENTY, proc_directory, socket_path
from drmclients import BDF, OTHER_POD, POD, i915, process, xe
from processes import Process, run_main
from trees import write
from waiting import until

from accelplane.cli import clients as command
from accelplane.gpuclients.messages import MAX_BYTES, ClientsError, Report, request_report
from accelplane.gpuclients.service import ClientsService, serving

proc = pytest.fixture(proc_directory)
path = pytest.fixture(socket_path)


@pytest.fixture
async def service(proc: Path, path: str) -> AsyncIterator[ClientsService]:
    """A service without a minimum interval, on its socket."""
    proc.mkdir()
    instance = ClientsService(str(proc), limits=PLENTY, min_interval=0.0, walk_timeout=30.0)
    async with serving(path, instance):
        yield instance


def seconds(report: Report) -> dict[tuple[str, str], Mapping[str, float]]:
    return {(use.name, device.bdf): device.busy_seconds for use in report.containers for device in use.devices}


# The socket.


async def test_a_report_has_the_usage_of_the_requested_pods(service: ClientsService, path: str, proc: Path) -> None:
    process(proc, 10, i915(1, render=10**9), i915(2, render=10**9), xe(3, bdf="0000:04:00.0"))
    process(proc, 11, i915(4, render=5 * 10**9), name="side", container="cd" * 32)
    process(proc, 12, i915(5, render=10**9), pod=OTHER_POD)
    report = await request_report(path, (POD,))
    assert seconds(report) == {
        ("main", BDF): pytest.approx({"render": 2.0, "copy": 0.0, "video": 0.0}),
        ("main", "0000:04:00.0"): {"ccs": 0.0},
        ("side", BDF): pytest.approx({"render": 5.0, "copy": 0.0, "video": 0.0}),
    }
    assert {use.pod for use in report.containers} == {POD}
    assert (report.incomplete, report.processes) == (False, 3)
    assert (await request_report(path, ())).containers == ()


async def test_only_the_owner_may_use_the_socket_which_replaces_an_earlier_one(directory: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(path)
    service = ClientsService(directory)
    async with serving(path, service):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert (await request_report(path, ())).containers == ()
    assert os.listdir(directory) == []


async def test_a_service_does_not_remove_the_socket_of_its_successor(directory: str, path: str) -> None:
    async with serving(path, ClientsService(directory)):
        successor = serving(path, ClientsService(directory))
        await successor.__aenter__()
    assert (await request_report(path, ())).containers == ()
    await successor.__aexit__(None, None, None)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("steps", range(6))
async def test_a_connection_that_is_accepted_while_the_service_ends_is_closed_without_a_task(
    directory: str, path: str, steps: int
) -> None:
    service = ClientsService(directory)
    with socket.socket(socket.AF_UNIX) as client:
        async with serving(path, service):
            client.setblocking(False)
            client.connect(path)
            for _ in range(steps):
                await asyncio.sleep(0)
        # The event loop completes connections that it has accepted.
        for _ in range(10):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        async with asyncio.timeout(30):
            # A connection that nobody has accepted is reset.
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\5junk!",
        (MAX_BYTES + 1).to_bytes(4, "big"),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_client_that_sends_no_request_gets_no_report(
    service: ClientsService, path: str, proc: Path, content: bytes
) -> None:
    process(proc, 10, i915(1))
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(content)
    writer.write_eof()
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
    assert len((await request_report(path, (POD,))).containers) == 1


async def test_connections_beyond_the_limit_are_closed(service: ClientsService, path: str) -> None:
    idle = [await asyncio.open_unix_connection(path) for _ in range(12)]
    closed = [asyncio.create_task(reader.read()) for reader, _writer in idle]
    await until(lambda: sum(task.done() for task in closed) >= 4)
    for _reader, writer in idle:
        writer.close()
    await asyncio.wait(closed)

    async def answered() -> bool:
        try:
            return (await request_report(path, ())).containers == ()
        except ClientsError:
            return False

    await until(answered)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "connection closed after 0 bytes"),
        (b"\0\0\0\x09{}", "connection closed after 2 bytes"),
        (b"\0\0\0\2[]", "invalid report"),
        (b"\x7f\0\0\0", "expected at most 262144"),
        (None, "no report within 0.3 s"),
    ],
)
async def test_a_peer_that_sends_no_report_is_an_error(path: str, answer: bytes | None, message: str) -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        if answer is None:
            await released.wait()
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    with pytest.raises(ClientsError, match=f"{path}: .*{message}"):
        await request_report(path, (POD,), limit=0.3 if answer is None else 30.0)
    released.set()
    server.close()


async def test_without_a_service_there_is_an_error(path: str) -> None:
    with pytest.raises(ClientsError, match=f"{path}: No such file"):
        await request_report(path, (POD,))


# Walks of the service.


async def test_reports_within_the_interval_share_a_walk_unless_a_pod_is_new(proc: Path) -> None:
    now = [100.0]
    service = ClientsService(str(proc), limits=PLENTY, min_interval=1.0, clock=lambda: now[0])
    first = process(proc, 10, i915(1, render=10**9))
    process(proc, 11, i915(2, render=10**9), pod=OTHER_POD)
    assert seconds(await service.report([POD]))["main", BDF]["render"] == 1.0
    write(first / "fdinfo/5", i915(1, render=2 * 10**9))
    assert seconds(await service.report([POD]))["main", BDF]["render"] == 1.0
    assert len((await service.report([POD, OTHER_POD])).containers) == 2
    assert seconds(await service.report([POD]))["main", BDF]["render"] == 2.0
    write(first / "fdinfo/5", i915(1, render=3 * 10**9))
    now[0] += 1
    assert seconds(await service.report([POD]))["main", BDF]["render"] == 3.0


async def test_a_pod_without_requests_for_an_hour_is_forgotten(proc: Path) -> None:
    now = [100.0]
    service = ClientsService(str(proc), limits=PLENTY, min_interval=1.0, clock=lambda: now[0])
    ended_process = process(proc, 10, i915(1, render=10**9), i915(2, render=10**9))
    await service.report([POD])
    (ended_process / "fdinfo/6").unlink()
    now[0] += 3000
    assert seconds(await service.report([POD]))["main", BDF]["render"] == 2.0
    now[0] += 3000
    await service.report([OTHER_POD])
    now[0] += 601
    await service.report([OTHER_POD])
    assert seconds(await service.report([POD]))["main", BDF]["render"] == 1.0


async def test_a_process_that_blocks_its_reader_is_skipped(proc: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    service = ClientsService(str(proc), limits=PLENTY, min_interval=0.0, walk_timeout=2.0, clock=lambda: now[0])
    process(proc, 10, i915(1, render=10**9))
    process(proc, 11, i915(2, render=10**9), container="cd" * 32, name="b")
    file = proc / "11/fdinfo/5"
    file.unlink()
    os.mkfifo(file)  # opening it blocks until a writer opens it
    report = await service.report([POD])
    assert (report.incomplete, service.blocked) == (True, [11])
    assert seconds(report)["main", BDF]["render"] == 1.0
    write(proc / "10/fdinfo/5", i915(1, render=2 * 10**9))
    report = await service.report([POD])
    assert (report.incomplete, seconds(report).keys()) == (True, {("main", BDF)})
    assert seconds(report)["main", BDF]["render"] == 2.0
    assert "files of process 11: a read takes longer than 2 s" in caplog.text
    file.write_text("")
    await until(lambda: not service.blocked)
    file.unlink()
    write(file, i915(2, render=10**9))
    assert (await service.report([POD])).incomplete  # for a minute
    now[0] += 61
    report = await service.report([POD])
    assert (report.incomplete, seconds(report).keys()) == (False, {("main", BDF), ("b", BDF)})
    await service.close()


async def test_after_four_blocked_readers_no_walk_is_started(proc: Path) -> None:
    service = ClientsService(str(proc), limits=PLENTY, min_interval=0.0, walk_timeout=1.0, clock=lambda: 100.0)
    process(proc, 10, i915(1, render=10**9))
    await service.report([POD])
    files = [process(proc, pid) / "fdinfo/9" for pid in range(11, 15)]
    for file in files:
        os.mkfifo(file)
    for _ in files:
        assert (await service.report([POD])).incomplete
    assert sorted(service.blocked) == [11, 12, 13, 14]
    write(proc / "10/fdinfo/5", i915(1, render=2 * 10**9))
    report = await service.report([POD])
    assert (report.incomplete, seconds(report)["main", BDF]["render"]) == (True, 1.0)
    for file in files:
        file.write_text("")
    await until(lambda: not service.blocked)
    assert seconds(await service.report([POD]))["main", BDF]["render"] == 2.0


async def test_a_device_whose_cancelled_read_still_blocks_is_skipped(proc: Path) -> None:
    service = ClientsService(str(proc), limits=PLENTY, min_interval=0.0, walk_timeout=60.0)
    process(proc, 10, i915(1, render=10**9))
    file = process(proc, 11) / "fdinfo/9"
    os.mkfifo(file)
    request = asyncio.create_task(service.report([POD]))
    writers: list[int] = []

    def reads() -> bool:
        with contextlib.suppress(OSError):  # no process reads the file
            writers.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    await until(reads, 60)
    request.cancel()
    await asyncio.wait((request,))
    assert service.blocked == [11]
    async with asyncio.timeout(30):
        report = await service.report([POD])
    assert (report.incomplete, seconds(report)["main", BDF]["render"]) == (True, 1.0)
    os.close(writers.pop())
    await until(lambda: not service.blocked)
    file.unlink()
    assert not (await service.report([POD])).incomplete
    await service.close()


async def test_processes_that_may_not_be_read_are_logged_once(
    proc: Path, path: str, tmp_path: Path, directory: str
) -> None:
    process(proc, 10, i915(1))
    (proc / "10/fdinfo").chmod(0)
    log = tmp_path / "log"
    running = Process("accelplane", "clients", f"-socket={path}", f"-proc={proc}", log=log, powerless=True)
    try:
        await until(lambda: os.path.exists(path), 60)
        for _ in range(2):
            assert (await request_report(path, (POD,))).containers == ()
        await running.wait_for_log(
            "1 processes of pods cannot be read: permission denied; add the capability SYS_PTRACE"
        )
        assert await running.terminate() == 0
    finally:
        running.kill()
        (proc / "10/fdinfo").chmod(0o700)
    assert log.read_text().count("cannot be read") == 1
    assert os.listdir(directory) == []


def test_a_missing_socket_directory_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words, message in (
        (
            [f"-socket={tmp_path}/missing/s"],
            f"-socket: {tmp_path}/missing: found no such directory, expected a directory that the agent can see, too",
        ),
        ([f"-socket={tmp_path}/file/s"], f"-socket: {tmp_path}/file: found a file, expected a directory"),
        ([f"-socket={tmp_path}"], f"-socket: {tmp_path}: Is a directory"),
        ([f"-proc={tmp_path}/missing"], f"-proc: {tmp_path}/missing: not a directory"),
        ([f"-socket={tmp_path}/{'x' * 100}"], "expected at most 103"),
    ):
        result = run_main(command.main, *words)
        assert result.returncode == 1
        assert message in result.stderr
