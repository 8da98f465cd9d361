"""`accelplane kubelet`: output, commands and exit codes."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_plugin import FakePlugin, listing
from processes import run_command

from accelplane.cli.kubelet import CommandError, parse_pod
from accelplane.kubelet import checkpoint
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.embedded import Pod

GADGET = "example.com/gadget"


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="ak")
    yield path
    shutil.rmtree(path)


class Session:
    """A running command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.seen: list[str] = []

    async def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        await self.process.stdin.drain()

    async def wait_for_line(self, text: str) -> None:
        """Reads until a line has the text."""
        assert self.process.stdout is not None
        async with asyncio.timeout(20):
            while True:
                line = (await self.process.stdout.readline()).decode()
                assert line, f"ended without {text!r}, after:\n{''.join(self.seen)}"
                self.seen.append(line)
                if text in line:
                    return


@contextlib.asynccontextmanager
async def command(directory: str, policy: str = "none") -> AsyncIterator[Session]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from accelplane.cli.main import main; main()",
        "kubelet",
        f"--kubelet-dir={directory}",
        f"--topology-policy={policy}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Session(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_output_of_registrations_device_lists_and_allocations(directory: str) -> None:
    async with command(directory) as session:
        await session.wait_for_line("plugins register at")
        async with FakePlugin(
            directory,
            options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
            devices=listing(("a", "Healthy", [0]), "b\x1b[2J"),
        ) as plugin:
            await plugin.register()
            await session.wait_for_line(f"registered {GADGET} at gadget.sock (get_preferred_allocation_available)")
            await session.wait_for_line(f"{GADGET}: capacity 2, allocatable 2")
            await session.wait_for_line("+ a Healthy on NUMA node 0")
            await session.wait_for_line("+ b\N{REPLACEMENT CHARACTER}[2J Healthy")
            await plugin.send(listing(("a", "Unhealthy"), "c"))
            await session.wait_for_line("- b")
            await session.wait_for_line("~ a Unhealthy")
            await session.wait_for_line("+ c Healthy")
            await session.type(f"pod demo {GADGET}=1")
            await session.wait_for_line("pod demo admitted")
            await session.wait_for_line(f"{GADGET}: c")
            await session.wait_for_line("device /dev/c as /dev/c (rw)")
            await session.wait_for_line("env HAS_c=yes")
            await session.type("status")
            await session.wait_for_line("c  Healthy  held by main of default/demo")
            await session.type("delete demo")
            await session.wait_for_line("pod demo deleted")
            await session.type("restart")
            await session.wait_for_line("kubelet restarted")
            await plugin.abort()
            await plugin.serve()
            await plugin.register()
            await session.wait_for_line(f"{GADGET}: capacity 2, allocatable 1")
        await session.wait_for_line(f"{GADGET}: capacity 2, allocatable 0")
        assert not any("goaway" in line for line in session.seen), "no gRPC log messages"
        await session.type("quit")
        assert await asyncio.wait_for(session.process.wait(), 20) == 0


async def test_invalid_commands_print_what_is_expected(directory: str) -> None:
    async with command(directory) as session:
        for line, answer in [
            ("pods", "unknown command 'pods', expected one of pod, delete, status, restart, help, quit"),
            ("pod demo", "expected: pod NAME RESOURCE=N"),
            (f"pod demo {GADGET}=1", f"{GADGET}: never registered, the container runs without it"),
            ("delete", "expected: delete NAME"),
            ("delete demo", "pod demo deleted"),
            ("delete demo", "no pod default/demo runs here"),
            ("\xff" * 10, "unknown command"),
            ("help", "pod NAME RESOURCE=N"),
            ("status", "no resources"),
        ]:
            await session.type(line)
            await session.wait_for_line(answer)


async def test_a_rejected_registration_is_printed_with_its_reason(directory: str) -> None:
    async with command(directory) as session, FakePlugin(directory) as plugin:
        await session.wait_for_line("plugins register at")
        with pytest.raises(Exception, match="not supported by kubelet"):
            await plugin.register(version="v2")
        await session.wait_for_line(f"rejected registration of {GADGET} at gadget.sock: requested API version")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_end_of_input_is_ignored_and_signals_exit_with_0(directory: str, number: int) -> None:
    async with command(directory) as session:
        await session.wait_for_line("plugins register at")
        assert session.process.stdin is not None
        session.process.stdin.close()
        async with FakePlugin(directory) as plugin:
            await plugin.register()
            await session.wait_for_line(f"registered {GADGET}")
        session.process.send_signal(number)
        assert await asyncio.wait_for(session.process.wait(), 20) == 0


async def test_a_directory_with_a_kubelet_is_rejected(directory: str) -> None:
    async with command(directory) as first:
        await first.wait_for_line("plugins register at")
        async with command(directory) as second:
            await second.wait_for_line("another kubelet")
            assert await asyncio.wait_for(second.process.wait(), 20) == 1
        assert os.path.exists(os.path.join(directory, "device-plugins", "kubelet.sock"))


@pytest.mark.parametrize("name", ["cpu_manager_state", "pki"])
def test_the_directory_of_a_stopped_kubelet_of_a_node_is_rejected_and_stays_unchanged(
    directory: str, name: str
) -> None:
    plugins = Path(directory, "device-plugins")
    plugins.mkdir()
    Path(directory, name).touch()
    checkpoint.write_checkpoint(str(plugins), checkpoint.Checkpoint())
    with socket.socket(socket.AF_UNIX) as plugin:
        plugin.bind(f"{plugins}/gpu.sock")
        answer = run_command("accelplane", "kubelet", "--kubelet-dir", directory)
    assert answer.returncode == 1
    assert f"--kubelet-dir {directory}: found {name} of a node's kubelet, expected a directory" in answer.stderr
    assert sorted(os.listdir(plugins)) == ["gpu.sock", checkpoint.FILE_NAME]


def test_the_directory_has_no_default() -> None:
    answer = run_command("accelplane", "kubelet")
    assert answer.returncode == 2
    assert "Missing option '--kubelet-dir'" in answer.stderr


async def test_an_unknown_policy_is_rejected(directory: str) -> None:
    async with command(directory, policy="strict") as session:
        await session.wait_for_line("'strict' is not one of 'none', 'best-effort'")
        assert await asyncio.wait_for(session.process.wait(), 20) == 2


def test_a_pod_is_parsed_from_command_line_arguments() -> None:
    assert parse_pod(["demo", "a.com/x=1", "a.com/y=20"]) == Pod(
        "demo", containers={"main": {"a.com/x": 1, "a.com/y": 20}}
    )


@pytest.mark.parametrize("words", [[], ["demo"], ["demo", "a.com/x"], ["demo", "=1"], ["demo", "a=0"], ["demo", "a=²"]])
def test_invalid_pod_arguments_are_rejected(words: list[str]) -> None:
    with pytest.raises(CommandError, match=r"expected: pod NAME RESOURCE=N|RESOURCE=N with N of 1 or more"):
        parse_pod(words)
