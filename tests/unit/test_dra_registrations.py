"""Sockets of other plugins in the kubelet's registry: those that block, and those of plugins that have ended."""

import asyncio
import socket
from pathlib import Path

import pytest

from accelplane import rpc
from accelplane.dra.registrations import GET_INFO, OtherPlugin, OtherRegistrations
from accelplane.kubelet import pluginregistration_v1_pb2 as pb


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


async def test_plugins_that_block_do_not_delay_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners = [listening(tmp_path / f"{number}.sock") for number in range(3)]
    asked: list[str] = []
    all_asked = asyncio.Event()

    async def ask(_self: OtherRegistrations, path: str) -> OtherPlugin | None:
        asked.append(path)
        if len(asked) == len(listeners):
            all_asked.set()
        await all_asked.wait()
        return None

    monkeypatch.setattr(OtherRegistrations, "_ask", ask)
    others = OtherRegistrations(str(tmp_path), "gpu.intel.com")

    assert await asyncio.wait_for(others.update(""), 5) == ()
    assert others.retry is None
    for listener in listeners:
        listener.close()


async def test_sockets_of_plugins_that_have_ended_are_asked_less_and_less_often(tmp_path: Path) -> None:
    listening(tmp_path / "ended.sock").close()
    others = OtherRegistrations(str(tmp_path), "gpu.intel.com")
    retries: list[float | None] = []
    for _ in range(7):
        await others.update("")
        retries.append(others.retry)

    assert retries == [1, 2, 4, 8, 16, 30, 30]
    listening(tmp_path / "new.sock").close()
    await others.update("")
    assert others.retry == 1


async def test_a_plugin_with_an_answer_of_megabytes_is_not_read(tmp_path: Path) -> None:
    async def get_info(_request: pb.InfoRequest) -> pb.PluginInfo:
        return pb.PluginInfo(type="DRAPlugin", name="gpu.intel.com", endpoint="x" * 2_000_000)

    server = rpc.RpcServer({GET_INFO: rpc.unary(pb.InfoRequest, pb.PluginInfo, get_info)})
    await server.start(str(tmp_path / "0.sock"))
    others = OtherRegistrations(str(tmp_path), "gpu.intel.com")

    assert await others.update("") == ()
    assert others.retry == 1
    await server.stop()
