"""`intel_xpumanager_sidecar` as a process, with doubles of XPU Manager: valid, slow, huge, malformed, missing."""

import asyncio
import contextlib
import signal
import ssl
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest
from cluster.pki import Authority
from processes import Process
from waiting import until

from accelplane.cli.xpumanager import Options, Sidecar

LABEL = "gpu.intel.com/xe-links"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def page(*ends: tuple[int, int]) -> bytes:
    lines = ["# TYPE xpum_topology_link gauge"]
    for local, remote in ends:
        lines.append(
            f'xpum_topology_link{{local_device_id="{local}",local_subdevice_id="0",local_on_subdevice="true",'
            f'remote_device_id="{remote}",remote_subdevice_id="1",lane_count="4"}} 1'
        )
    return "\n".join(lines).encode()


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Manager:
    """A double of XPU Manager: its responses, and the received requests."""

    def __init__(self) -> None:
        self.answer = response(page((0, 1)))
        self.endless = b""  # sent again and again after the answer
        self.hangs = False
        self.requests: list[str] = []
        self.port = 0
        self.handling = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handling += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self.answer)
            while self.endless:
                writer.write(self.endless)
                await writer.drain()
            await writer.drain()
            if self.hangs:
                await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.handling -= 1


@contextlib.asynccontextmanager
async def manager(context: ssl.SSLContext | None = None) -> AsyncGenerator[Manager]:
    playing = Manager()
    server = await asyncio.start_server(playing.handle, "127.0.0.1", 0, ssl=context)
    playing.port = server.sockets[0].getsockname()[1]
    try:
        yield playing
    finally:
        await until(lambda: not playing.handling)
        server.close()
        await server.wait_closed()


def sidecar(directory: Path, port: int, **options: object) -> Sidecar:
    values = {"xpum-port": port, "tmp-dir-prefix": str(directory), "dst-file-path": str(directory / "labels.txt")}
    return Sidecar(Options.from_flags({**values, **options}))  # type: ignore[arg-type, dict-item]


def written(directory: Path) -> str:
    """The label file, the only file in its directory."""
    assert [file.name for file in directory.iterdir()] == ["labels.txt"]
    return (directory / "labels.txt").read_text()


async def test_the_links_become_labels_in_a_file_that_anyone_can_read(tmp_path: Path) -> None:
    async with manager() as playing:
        await sidecar(tmp_path, playing.port).update()
    assert written(tmp_path) == f"{LABEL}=0.0-1.1\n"
    assert stat.S_IMODE((tmp_path / "labels.txt").stat().st_mode) == 0o644
    assert playing.requests[0].startswith("GET /metrics HTTP/1.1\r\n")


async def test_the_file_is_written_only_if_the_labels_change(tmp_path: Path) -> None:
    async with manager() as playing:
        running = sidecar(tmp_path, playing.port)
        await running.update()
        inode = (tmp_path / "labels.txt").stat().st_ino
        await running.update()
        assert (tmp_path / "labels.txt").stat().st_ino == inode
        playing.answer = response(page((0, 1), (2, 1)))
        await running.update()
    assert written(tmp_path) == f"{LABEL}=0.0-1.1_1.1-2.0\n"


async def test_options_change_prefix_lanes_and_sub_devices(tmp_path: Path) -> None:
    async with manager() as playing:
        playing.answer = response(page((0, 1)).replace(b'"true"', b'"false"').replace(b'"4"', b'"2"'))
        options = {"label-namespace": "example.com", "lane-count": 2, "allow-subdeviceless-links": True}
        await sidecar(tmp_path, playing.port, **options).update()
    assert written(tmp_path) == "example.com/xe-links=0.0-1.1\n"


BAD = {
    "error": response(page((5, 6)), "500 Internal Server Error"),
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "malformed": response(page((5, 6)) + b"\n<html>"),
    "not UTF-8": response(page((5, 6)) + b"\n# \xff\n"),
    "no HTTP": b"hello\r\n\r\n",
    "cut": response(page((5, 6)))[:-10],
    "nothing": b"",
    "huge": b"HTTP/1.1 200 OK\r\nContent-Length: 900000000\r\n\r\n",
}


@pytest.mark.parametrize("fault", BAD)
async def test_labels_stay_for_some_time_when_the_metrics_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    async with manager() as playing:
        running = sidecar(tmp_path, playing.port)
        await running.update()
        playing.answer = BAD[fault]
        playing.endless = b"# x\n" * 10_000 if fault == "huge" else b""
        await running.update()
        await running.update()
        assert written(tmp_path) == f"{LABEL}=0.0-1.1\n"
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
        playing.answer, playing.endless = response(page((0, 2))), b""
        await running.update()
        assert written(tmp_path) == f"{LABEL}=0.0-2.1\n"


async def test_labels_become_empty_when_they_are_too_old(tmp_path: Path) -> None:
    async with manager() as playing:
        running = sidecar(tmp_path, playing.port, **{"stale-timeout": 0})
        await running.update()
        playing.answer = BAD["error"]
        await running.update()
    assert written(tmp_path) == f"{LABEL}=\n"


async def test_without_xpu_manager_the_label_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with manager() as playing:
        port = playing.port
    await sidecar(tmp_path, port).update()
    assert written(tmp_path) == f"{LABEL}=\n"
    assert f"127.0.0.1:{port}" in caplog.text


async def test_a_server_that_does_not_answer_times_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with manager() as playing:
        playing.answer, playing.hangs = b"HTTP/1.1 200 OK\r\n", True
        await sidecar(tmp_path, playing.port).update()
    assert "no response within 5 s" in caplog.text


async def test_a_missing_directory_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with manager() as playing:
        await sidecar(tmp_path / "missing", playing.port).update()
    assert "missing" in caplog.text


def certificates(directory: Path, *names: str) -> ssl.SSLContext:
    """Writes ca.crt and server.crt; returns the server's end."""
    authority = Authority("test authority")
    pair = authority.server("XPU Manager", *names)
    (directory / "pair.pem").write_bytes(pair.certificate + pair.key)
    (directory / "server.crt").write_bytes(pair.certificate)
    (directory / "ca.crt").write_bytes(authority.credentials.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "pair.pem")
    return context


@pytest.mark.parametrize("trusted", ["ca.crt", "server.crt"])
async def test_metrics_are_served_by_https_with_a_certificate(tmp_path: Path, trusted: str) -> None:
    (labels := tmp_path / "features").mkdir()
    async with manager(certificates(tmp_path, "127.0.0.1")) as playing:
        await sidecar(labels, playing.port, cert=str(tmp_path / trusted)).update()
    assert written(labels) == f"{LABEL}=0.0-1.1\n"


@pytest.mark.parametrize("fault", ["another authority", "another name", "no certificate", "no file"])
async def test_an_untrusted_server_gets_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    (labels := tmp_path / "features").mkdir()
    context = certificates(tmp_path, "example.com" if fault == "another name" else "127.0.0.1")
    trusted = tmp_path / "ca.crt"
    if fault == "another authority":
        trusted.write_bytes(Authority("another one").credentials.certificate)
    elif fault == "no certificate":
        trusted.write_text("not a certificate")
    elif fault == "no file":
        trusted.unlink()
    async with manager(context) as playing:
        await sidecar(labels, playing.port, cert=str(trusted)).update()
        assert playing.requests == []
    assert written(labels) == f"{LABEL}=\n"
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def process(directory: Path, *arguments: str) -> Process:
    return Process(
        "intel_xpumanager_sidecar",
        f"-tmp-dir-prefix={directory}",
        f"-dst-file-path={directory}/labels.txt",
        *arguments,
        log=directory.parent / "log",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_removes_the_file_and_ends_the_process(tmp_path: Path, number: signal.Signals) -> None:
    (labels := tmp_path / "features").mkdir()
    async with manager() as playing:
        running = process(labels, f"-xpum-port={playing.port}", "-startup-delay=0", "-interval=1")
        await until((labels / "labels.txt").exists)
        await until(lambda: len(playing.requests) > 1)
        running.send(number)
        assert await running.exit_code() == 0
    assert [*labels.iterdir()] == []


async def test_a_signal_during_the_startup_delay_ends_the_process(tmp_path: Path) -> None:
    (labels := tmp_path / "features").mkdir()
    running = process(labels, "-startup-delay=1000", "-v=1")
    await running.wait_for_log("waiting 1000 s")
    assert await running.terminate() == 0


@pytest.mark.parametrize("flag", ["-interval=0", "-xpum-port=0", "-xpum-port=65536"])
async def test_contradictory_options_are_fatal(tmp_path: Path, flag: str) -> None:
    running = process(tmp_path, flag)
    assert await running.exit_code() == 255
    assert flag.partition("=")[0] in running.log()
