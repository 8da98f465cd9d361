"""Scans that fail, hang or return invalid results: the last devices are kept, and other plugins are not affected."""

import asyncio
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import Run, Start
from gadgets import GADGET, Other, Table, gadgets
from kubelets import Kubelet, embedded_only
from peer import Peer, refusal
from processes import installed_plugin
from trees import npu
from waiting import until

from accelplane.devices import Device, Resource, Skipped
from accelplane.host import Host, WriteError
from accelplane.node import scan_loop
from accelplane.plugins import ScanError

PATIENT = {"safety_interval": 3600.0}


async def test_a_failed_scan_keeps_the_last_devices_and_its_cause_is_logged_once(
    kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = Table(gadgets("a", "b"))
    agent = await start_agent(PATIENT, table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    plugin.found = ScanError("/sys/class/gadget: Input/output error")
    runner = agent.runners["table"]
    runner.scan.request()
    await until(lambda: runner.scan.failures >= 2)
    assert kubelet.resources() == {GADGET: (2, 2)}
    assert len((await kubelet.run_pod("pod", {GADGET: 1})).devices) == 1
    assert (runner.scan.failing, runner.scan.outdated, runner.scan.problem) == (
        True, False, "/sys/class/gadget: Input/output error",
    )  # fmt: skip
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        "table: scan failed: /sys/class/gadget: Input/output error; the devices found last stay advertised for 30 s"
    ]


async def test_after_the_grace_period_devices_are_unhealthy_and_recover_when_the_driver_answers(
    directory: str, kubelet: Kubelet, start_agent: Start
) -> None:
    plugin = Table(gadgets("a", "b"))
    agent = await start_agent({**PATIENT, "scan_grace": 0.5}, table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    plugin.found = ScanError("no eyes")
    agent.runners["table"].scan.request()
    await kubelet.until(lambda resources: resources == {GADGET: (2, 0)})
    async with Peer(f"{directory}/device-plugins/example.com-gadget.sock") as peer:
        assert await refusal(peer.allocate(["a"])) == (
            "UNKNOWN", "example.com/gadget: unhealthy device 'a (scan fails: no eyes)' requested",
        )  # fmt: skip
    plugin.found = gadgets("a", "b")
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    assert agent.runners["table"].scan.problem == ""


async def test_devices_of_the_first_successful_scan_are_published(kubelet: Kubelet, start_agent: Start) -> None:
    plugin = Table(ScanError("not yet"))
    agent = await start_agent(PATIENT, table=plugin)
    await until(lambda: agent.runners["table"].scan.failing)
    plugin.found = gadgets("a")
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})


async def test_a_scan_that_raises_publishes_no_partial_result(kubelet: Kubelet, start_agent: Start) -> None:
    def half() -> Iterable[Device]:
        yield from gadgets("new")
        raise OSError(5, "Input/output error")

    plugin = Table(gadgets("a"))
    agent = await start_agent(PATIENT, table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    plugin.found = half
    agent.runners["table"].scan.request()
    await until(lambda: agent.runners["table"].scan.failing)
    assert [device.id for device in agent.runners["table"].context.devices.listed] == ["a"]


async def test_results_that_are_not_devices_are_skipped_with_a_reason(kubelet: Kubelet, start_agent: Start) -> None:
    plugin = Table(gadgets("a"))
    agent = await start_agent(PATIENT, table=plugin, other=Other(gadgets("b")))
    plugin.found = ["nonsense", None, *gadgets("a")]  # type: ignore[list-item]
    agent.runners["table"].scan.request()
    await until(lambda: len(agent.status().plugins["table"].skipped) == 2)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1), "other.example.com/gadget": (1, 1)})


class ServicePlugin(Table):
    """Queries a service before each scan."""

    answers: asyncio.Event
    fault: Exception | None = None

    async def refresh(self, host: Host) -> None:
        if self.fault:
            raise self.fault
        await self.answers.wait()


async def test_a_service_that_fails_before_a_scan_counts_as_a_failed_scan(kubelet: Kubelet, start_agent: Start) -> None:
    plugin = ServicePlugin(gadgets("a"))
    plugin.answers = asyncio.Event()
    plugin.answers.set()
    agent = await start_agent(PATIENT, table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    plugin.fault = ConnectionRefusedError(111, "Connection refused")
    agent.runners["table"].scan.request()
    await until(lambda: agent.runners["table"].scan.failing)
    assert "Connection refused" in agent.runners["table"].scan.problem
    assert kubelet.resources() == {GADGET: (1, 1)}
    plugin.fault = None
    await until(lambda: not agent.runners["table"].scan.failing)


async def test_a_service_that_does_not_respond_is_a_failed_scan_until_it_does(
    kubelet: Kubelet, start_agent: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_loop, "_REFRESH_DEADLINE", 0.5)
    plugin = ServicePlugin(gadgets("a"))
    plugin.answers = asyncio.Event()
    agent = await start_agent(PATIENT, table=plugin, other=Other(gadgets("b")))
    await kubelet.until(lambda resources: resources == {"other.example.com/gadget": (1, 1)})
    await until(lambda: "did not answer within 0.5 s" in agent.runners["table"].scan.problem)
    plugin.answers.set()
    await kubelet.until(lambda resources: GADGET in resources)


class RecordingPlugin(Table):
    """Records its calls."""

    fault: Exception | None = None

    def __init__(self, *found: Device) -> None:
        super().__init__(found)
        self.calls: list[str] = []

    def prepare(self, host: Host) -> None:
        self.calls.append("prepare")
        if self.fault:
            raise self.fault

    def scan(self, host: Host) -> Iterable[Device | Resource | Skipped]:
        self.calls.append("scan")
        return super().scan(host)


async def test_hardware_is_prepared_before_each_scan(kubelet: Kubelet, start_agent: Start) -> None:
    plugin = RecordingPlugin(*gadgets("a"))
    agent = await start_agent(PATIENT, table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    agent.runners["table"].scan.request()
    await until(lambda: plugin.calls == ["prepare", "scan"] * 2)


async def test_hardware_that_cannot_be_prepared_counts_as_a_failed_scan(kubelet: Kubelet, start_agent: Start) -> None:
    plugin = RecordingPlugin(*gadgets("a"))
    agent = await start_agent(PATIENT, table=plugin)
    runner = agent.runners["table"]
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    plugin.fault = WriteError("/sys/bus/pci/drivers/vfio-pci/bind", "Device or resource busy", 16)
    plugin.found = gadgets("a", "b")
    runner.scan.request()
    await until(lambda: runner.scan.failing)
    assert "/sys/bus/pci/drivers/vfio-pci/bind: Device or resource busy" in runner.scan.problem
    assert plugin.calls[-1] == "prepare"
    assert kubelet.resources() == {GADGET: (1, 1)}
    plugin.fault = None
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


@embedded_only("the kubelet has no part in it")
async def test_devices_that_are_found_and_no_longer_found_are_logged(
    kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plugin = Table([Skipped("a", "no device node")])
    agent = await start_agent(PATIENT, table=plugin)
    await until(agent.runners["table"].scan.completed.is_set)
    for found in (gadgets("a", "b"), gadgets("b")):
        plugin.found = found
        agent.runners["table"].scan.request()
        await kubelet.until(lambda resources, found=found: resources == {GADGET: (len(found), len(found))})
    messages = [record.message for record in caplog.records if record.message.startswith("table: ")]
    assert messages == ["table: a not published: no device node", "table: found: a, b", "table: no longer found: a"]


class Hanging(Table):
    """Its scans block while `release` is cleared."""

    def __init__(self, found: Iterable[Device]) -> None:
        super().__init__(found)
        self.release = threading.Event()
        self.release.set()

    def scan(self, host: Host) -> Iterable[Device | Resource | Skipped]:
        assert self.release.wait(60)
        return super().scan(host)


async def test_a_hanging_scan_makes_its_devices_unhealthy_and_blocks_no_pod(
    kubelet: Kubelet, start_agent: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_loop, "_SCAN_TIMEOUT", 1.0)
    plugin = Hanging(gadgets("a"))
    agent = await start_agent({**PATIENT, "scan_grace": 0.0}, table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    plugin.release.clear()
    agent.runners["table"].scan.request()
    try:
        assert len((await kubelet.run_pod("pod", {GADGET: 1})).devices) == 1
        await kubelet.until(lambda resources: resources == {GADGET: (1, 0)})
        assert agent.runners["table"].scan.problem == "a device does not answer, the scan has taken more than 1 s"
    finally:
        plugin.release.set()
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})


HUNG = """
import pathlib
from accelplane.devices import Device, DeviceNode
from accelplane.plugins import Plugin

class ThePlugin(Plugin):
    namespace = "hung.example.com"

    def scan(self, host):
        pathlib.Path(host.local("/dev/fifo")).read_bytes()
        yield Device(resource="gadget", id="a", nodes=[DeviceNode("/dev/a")], topology=None)
"""


async def test_a_hanging_first_scan_blocks_neither_other_plugins_nor_shutdown(
    tmp_path: Path, run: Run, kubelet: Kubelet, directory: str
) -> None:
    tree = tmp_path / "tree"
    npu(tree, 0)
    os.mkfifo(tree / "dev/fifo")
    env = installed_plugin(tmp_path / "site", "hung", HUNG)
    process = run("accelplane", "node", "--plugins=hung,npu", env=env)
    await kubelet.until(lambda resources: resources == {"npu.intel.com/accel": (1, 1)})
    assert await process.terminate() == 0
    assert [name for name in os.listdir(f"{directory}/device-plugins") if name.endswith(".sock")] == ["kubelet.sock"]
