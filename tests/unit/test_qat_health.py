"""The health of QAT devices on trees of plain files."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blockedfiles import blocked_files
from trees import write
from trees_qat import pf, vf
from waiting import until

from accelplane.devices import Device
from accelplane.host import Host
from accelplane.plugins.qat import QatPlugin

pytestmark = pytest.mark.memory

PF = "0000:6b:00.0"


class Node:
    """A plugin and the devices that it has found."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plugin = QatPlugin()
        self.devices = self.scan()
        assert self.devices

    def scan(self) -> list[Device]:
        return [item for item in self.plugin.scan(Host(self.root)) if isinstance(item, Device)]

    async def check(self, host: Host | None = None) -> dict[str, str]:
        verdicts = await self.plugin.health(host or Host(self.root), self.devices)
        return {unit: verdict.answer for unit, verdict in verdicts.items()}


class SlowHost(Host):
    """A host whose files are read when `release` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reading, self.release = threading.Event(), threading.Event()

    def raw_text(self, path: str) -> str:
        self.reading.set()
        assert self.release.wait(30)
        return super().raw_text(path)


def test_a_failing_device_is_detected_within_ten_seconds() -> None:
    policy = QatPlugin().health_policy
    assert policy.bad_verdicts == 1
    assert policy.interval < 10


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (b"-1\n\0", "bad"),
        (b"-1\n", "bad"),
        (b"-1", "bad"),
        (b"-1\n0\n", "bad"),
        (b"0\n\0", "good"),
        (b"", "good"),
        (b"-1\0", "good"),
        (b"-1 \n", "good"),
        (b" -1\n", "good"),
        (b"\n-1\n", "good"),
        (b"-10\n", "good"),
        (b"1\n", "good"),
        (b"\xff\n", "unknown"),
        (None, "unknown"),
    ],
)
async def test_the_first_line_of_the_heartbeat_is_the_verdict(
    tmp_path: Path, response: bytes | None, verdict: str, bridge: bool
) -> None:
    pf(tmp_path, vfs=[0, 1], heartbeat=response, bridge=bridge)
    assert await Node(tmp_path).check() == {PF: verdict}


async def test_a_device_that_is_down_is_unhealthy_despite_its_heartbeat(tmp_path: Path) -> None:
    pf(tmp_path, vfs=[0], state="down")
    assert await Node(tmp_path).check() == {PF: "bad"}


async def test_on_kernels_without_a_state_the_heartbeat_is_the_verdict(tmp_path: Path) -> None:
    pf(tmp_path, vfs=[0], state=None)
    assert await Node(tmp_path).check() == {PF: "good"}


async def test_with_an_unreadable_state_the_health_is_unknown(tmp_path: Path) -> None:
    write(pf(tmp_path, vfs=[0]) / "qat/state", b"\xff")
    assert await Node(tmp_path).check() == {PF: "unknown"}


async def test_a_physical_function_without_a_driver_is_unhealthy(tmp_path: Path) -> None:
    (pf(tmp_path, vfs=[0]) / "driver").unlink()
    assert await Node(tmp_path).check() == {PF: "bad"}


async def test_with_a_driver_that_is_no_link_the_health_is_unknown(tmp_path: Path) -> None:
    function = pf(tmp_path, vfs=[0])
    (function / "driver").unlink()
    write(function / "driver", "")
    assert await Node(tmp_path).check() == {PF: "unknown"}


async def test_virtual_machines_have_no_health_verdicts(tmp_path: Path) -> None:
    vf(tmp_path, "0000:00:05.0")
    assert await Node(tmp_path).check() == {}


async def test_a_device_that_responds_slowly_does_not_block_the_event_loop(tmp_path: Path) -> None:
    pf(tmp_path, vfs=[0])
    node, host = Node(tmp_path), SlowHost(tmp_path)
    checking = asyncio.create_task(node.check(host))
    await until(host.reading.is_set)
    host.release.set()
    assert await checking == {PF: "good"}


def recorded(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The calls of functions of `os` from now on: name and path."""
    calls: list[str] = []

    def recorder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: str, *rest: Any, **more: Any) -> Any:
            calls.append(f"{name} {path}")
            return function(path, *rest, **more)

        return call

    for name in names:
        monkeypatch.setattr(os, name, recorder(name, getattr(os, name)))
    return calls


def test_a_second_check_opens_no_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pf(tmp_path, vfs=[0])
    node, host = Node(tmp_path), Host(tmp_path)
    assert node.plugin.all_healthy(Host(tmp_path), node.devices)
    calls = recorded(monkeypatch, "open", "readlink", "stat", "lstat")
    assert node.plugin.all_healthy(host, node.devices)
    assert calls == ["readlink driver", "open state", "open status"]


async def test_a_failed_read_opens_directories_anew(tmp_path: Path) -> None:
    function = pf(tmp_path, vfs=[0])
    node = Node(tmp_path)
    assert await node.check() == {PF: "good"}
    shutil.rmtree(function)
    shutil.rmtree(tmp_path / "sys/kernel/debug")
    (tmp_path / "sys/bus/pci/devices" / PF).unlink()
    assert await node.check() == {PF: "bad"}
    pf(tmp_path, driver="420xx")
    assert await node.check() == {PF: "good"}


async def test_a_scan_makes_the_next_check_open_directories_anew(tmp_path: Path) -> None:
    pf(tmp_path, vfs=[0])
    node = Node(tmp_path)
    assert await node.check() == {PF: "good"}
    debugfs = tmp_path / "sys/kernel/debug"
    debugfs.rename(debugfs.with_name("old"))
    write(debugfs / f"qat_4xxx_{PF}/heartbeat/status", "-1\n")
    node.scan()
    assert await node.check() == {PF: "bad"}


@pytest.mark.parametrize(("heartbeat", "healthy"), [(b"0\n", True), (b"-1\n", False), (None, False)])
def test_all_devices_are_healthy_only_if_each_has_a_heartbeat(
    tmp_path: Path, heartbeat: bytes | None, healthy: bool
) -> None:
    pf(tmp_path, PF, vfs=[0])
    pf(tmp_path, "0000:70:00.0", vfs=[0], heartbeat=heartbeat)
    node = Node(tmp_path)
    for _ in range(2):
        assert node.plugin.all_healthy(Host(tmp_path), node.devices) is healthy


async def test_a_heartbeat_that_blocks_leaves_the_verdicts_of_other_devices(tmp_path: Path) -> None:
    other = "0000:70:00.0"
    pf(tmp_path, vfs=[0])
    pf(tmp_path, other, vfs=[0], heartbeat=b"-1\n")
    node = Node(tmp_path)
    with blocked_files() as blocked:
        blocked.block(f"{PF}/heartbeat/status")
        found = await node.check(Host(tmp_path))
        assert found == {PF: "unknown", other: "bad"}


def test_instances_of_the_kernel_driver_have_no_health() -> None:
    plugin = QatPlugin(QatPlugin.config_type(mode="kernel"))
    assert not plugin.overrides("health")
    assert not plugin.overrides("all_healthy")


async def test_metrics_show_published_functions_and_unknown_health(tmp_path: Path) -> None:
    pf(tmp_path, PF, vfs=[0, 1])
    pf(tmp_path, "0000:70:00.0", vfs=[0], heartbeat=None, services="dc")
    node = Node(tmp_path)
    await node.check()
    samples = list(node.plugin.measure(Host(tmp_path), node.devices))
    assert {type(sample.value) for sample in samples} == {float}  # the metrics page accepts no others
    assert [(sample.name, *sample.labels.values(), sample.value) for sample in samples] == [
        ("qat_virtual_functions", PF, "cy", 2),
        ("qat_virtual_functions", "0000:70:00.0", "dc", 1),
        ("qat_health_unknown", PF, 0),
        ("qat_health_unknown", "0000:70:00.0", 1),
    ]
