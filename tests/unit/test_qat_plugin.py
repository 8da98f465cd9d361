"""The QAT plugin: Allocate responses, preferred devices, and kernel mode."""

import contextlib
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write
from trees_qat import pf

from accelplane.devices import Allocation, Device, Inventory, Skipped
from accelplane.host import Host, Missing
from accelplane.plugins.base import ScanError
from accelplane.plugins.qat import QatConfig, QatPlugin, kernelmode

pytestmark = pytest.mark.memory

VFS = [f"0000:{bus:02x}:00.{function}" for bus in range(3, 7) for function in range(5)]


def devices(*ids: str) -> list[Device]:
    return [Device(resource="cy", id=id_, unit=id_.rpartition(":")[0]) for id_ in ids]


@pytest.mark.parametrize(
    ("policy", "must", "size", "chosen"),
    [
        ("none", [], 3, ["03:00.0", "04:00.0", "05:00.0"]),
        ("none", ["04:00.1"], 3, ["04:00.1", "03:00.0", "05:00.0"]),
        ("packed", [], 4, ["03:00.0", "03:00.1", "03:00.2", "03:00.3"]),
        ("balanced", [], 4, ["03:00.0", "04:00.0", "05:00.0", "06:00.0"]),
        ("packed", ["05:00.2"], 3, ["05:00.2", "05:00.0", "05:00.1"]),
        ("balanced", ["03:00.0"], 4, ["03:00.0", "04:00.0", "05:00.0", "06:00.0"]),
        ("balanced", [], 0, []),
        ("none", [], 0, []),
    ],
)
async def test_the_policy_includes_the_required_devices(
    policy: str, must: list[str], size: int, chosen: list[str]
) -> None:
    plugin = QatPlugin(QatConfig(allocation_policy=policy))
    available = devices(VFS[-1], *VFS[:-1])
    answer = await plugin.preferred_allocation(available, devices(*(f"0000:{id_}" for id_ in must)), size, {})
    assert answer == [f"0000:{id_}" for id_ in chosen]


@pytest.mark.parametrize("policy", ["none", "packed", "balanced"])
async def test_a_request_for_more_devices_than_available_is_rejected(policy: str) -> None:
    with pytest.raises(ValueError, match=r"AllocationSize \(21\) is greater"):
        await QatPlugin(QatConfig(allocation_policy=policy)).preferred_allocation(devices(*VFS), [], 21, {})


async def test_a_container_gets_its_addresses_in_the_requested_order(tmp_path: Path) -> None:
    pf(tmp_path, vfs=[0, 1, 2])
    plugin = QatPlugin()
    found = {item.id: item for item in plugin.scan(Host(tmp_path)) if isinstance(item, Device)}
    devices = [found["0000:6b:00.3"], found["0000:6b:00.1"]]
    answer = await plugin.post_allocate(devices, Allocation.of(devices))
    assert answer.envs == {"QAT0": "0000:6b:00.3", "QAT1": "0000:6b:00.1"}
    assert [node.host_path.rpartition("/")[2] for node in answer.nodes][1] == "vfio"
    assert len(answer.nodes) == 3


LINES = """Checking status of all devices.
There is 4 QAT acceleration device(s) in the system:
 qat_dev0 - type: c6xx,  inst_id: 0,  node_id: 0,  bsf: 0000:3b:00.0,  #accel: 5 #engines: 10 state: up
 qat_dev1 - type: c6xxvf,  inst_id: 1,  node_id: 0,  bsf: 3b:01.0,  #accel: 1 #engines: 1 state: up
 qat_dev2 - type: c6xx,  inst_id: 2,  node_id: 1,  bsf: 0000:b1:00.0,  #accel: 5 #engines: 10 state: down
 qat_dev3 - type: 4xxx,  inst_id: 3,  node_id: 1,  bsf: 0000:b2:00.0,  #accel: 5 #engines: 10 state: up
 qat_dev4 - type: c6xx,  node_id: 1,  inst_id: 4,  #accel: 5 state: up
"""

SSL = "[GENERAL]\nServicesEnabled = cy;dc\n[KERNEL]\nNumberCyInstances = 0\n[SSL]\n"
SSL += "NumberCyInstances = {cy}\nNumberDcInstances = 0\nNumProcesses = {processes}\nLimitDevAccess = {pinned}\n"


def test_status_lines_of_devices_are_parsed_and_others_ignored() -> None:
    assert [tuple(endpoint) for endpoint in kernelmode.endpoints(LINES)] == [
        ("dev0", "c6xx", "0000:3b:00.0", "up"),
        ("dev1", "c6xxvf", "3b:01.0", "up"),
        ("dev2", "c6xx", "0000:b1:00.0", "down"),
        ("dev3", "4xxx", "0000:b2:00.0", "up"),
    ]


@given(st.text() | st.lists(st.sampled_from([*LINES.splitlines(), "type: c6xx,", "state: up", "\0"])).map("\n".join))
def test_any_status_text_is_parsed(text: str) -> None:
    kernelmode.endpoints(text)


@given(st.text() | st.lists(st.sampled_from([*SSL.splitlines(), "NumProcesses = 9" * 40, "[X]"])).map("\n".join))
def test_any_configuration_file_is_parsed_or_rejected(text: str) -> None:
    with contextlib.suppress(ValueError):
        kernelmode.processes_of(text)


def machine(root: Path, *configured: tuple[int, str], iommu: bool = False) -> str:
    """A machine with C62x devices, and the output of `adf_ctl status`."""
    (root / "sys/class/iommu" / ("dmar0" if iommu else "")).mkdir(parents=True)
    lines: list[str] = []
    for number, text in configured:
        address = f"0000:{number + 0x3B:02x}:00.0"
        write(root / f"etc/c6xx_dev{number}.conf", text)
        (root / f"sys/bus/pci/drivers/c6xx/{address}/uio/uio{number}").mkdir(parents=True)
        write(root / f"sys/bus/pci/drivers/c6xx/{address}/numa_node", f"{number}\n")
        lines.append(f" qat_dev{number} - type: c6xx,  inst_id: {number},  bsf: {address},  state: up")
    return "\n".join(lines)


class QatScan:
    def __init__(self, root: Path, text: str) -> None:
        items = list(kernelmode.scan(Host(root), text))
        self.devices = list(Inventory.of(items))
        self.skipped = {item.subject: item.reason for item in items if isinstance(item, Skipped)}


def test_a_section_is_a_device_for_each_of_its_processes(tmp_path: Path) -> None:
    text = SSL.format(cy=2, processes=2, pinned=0)
    result = QatScan(tmp_path, machine(tmp_path, (0, text), (1, text)))
    assert [(device.resource, device.id, dict(device.envs)) for device in result.devices] == [
        ("cy2_dc0", "SSL_dev0_0", {"QAT_SECTION_NAME": "SSL", "QAT_SECTION_NAME_cy2_dc0_0": "SSL"}),
        ("cy2_dc0", "SSL_dev0_1", {"QAT_SECTION_NAME": "SSL", "QAT_SECTION_NAME_cy2_dc0_1": "SSL"}),
    ]
    assert [node.host_path for node in result.devices[0].nodes] == [
        "/dev/qat_adf_ctl",
        "/dev/qat_dev_processes",
        "/dev/usdm_drv",
        "/dev/uio0",
        "/dev/uio1",
    ]
    assert result.devices[0].topology == (0, 1)


def test_a_pinned_section_has_one_device_per_process_and_qat_device(tmp_path: Path) -> None:
    texts = [SSL.format(cy=1, processes=processes, pinned=1) for processes in (1, 2)]
    result = QatScan(tmp_path, machine(tmp_path, (0, texts[0]), (1, texts[1])))
    assert [(device.id, device.unit, device.topology) for device in result.devices] == [
        ("SSL_dev0_0", "dev0", (0,)),
        ("SSL_dev1_0", "dev1", (1,)),
        ("SSL_dev1_1", "dev1", (1,)),
    ]


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (SSL.format(cy=1, processes=1, pinned=1), SSL.format(cy=1, processes=1, pinned=0), "LimitDevAccess differs"),
        (SSL.format(cy=1, processes=1, pinned=0), SSL.format(cy=1, processes=2, pinned=0), "NumProcesses differs"),
        (SSL.format(cy=1, processes=1, pinned=1), SSL.format(cy=2, processes=1, pinned=1), "instances differ"),
        (SSL.format(cy=1, processes=1, pinned=1), "[GENERAL]", "only 1 of 2 devices have the section"),
    ],
)
def test_a_section_that_devices_disagree_on_is_skipped_and_the_others_stay(
    tmp_path: Path, one: str, other: str, reason: str
) -> None:
    good = "\n[SHIM]\nNumProcesses=1\nNumberCyInstances=1\nNumberDcInstances=1\n"
    result = QatScan(tmp_path, machine(tmp_path, (0, one + good), (1, other + good)))
    assert reason in result.skipped["section 'SSL'"]
    assert [device.id for device in result.devices] == ["SHIM_dev0_0"]


@pytest.mark.parametrize("text", ["junk", "[SSL]\nNumProcesses = many", SSL.format(cy=1, processes=99999, pinned=0)])
def test_a_device_with_an_invalid_file_is_skipped_and_the_others_are_kept(tmp_path: Path, text: str) -> None:
    result = QatScan(tmp_path, machine(tmp_path, (0, text), (1, SSL.format(cy=1, processes=1, pinned=0))))
    assert "expected" in result.skipped["dev0"]
    assert [device.id for device in result.devices] == ["SSL_dev1_0"]


def test_unusable_devices_are_reported(tmp_path: Path) -> None:
    machine(tmp_path, (0, SSL), iommu=True)
    result = QatScan(tmp_path, LINES)
    assert {subject.split()[0]: reason.partition(":")[0] for subject, reason in result.skipped.items()} == {
        "dev0": "physical functions are unusable while the IOMMU is enabled",
        "dev1": "/sys/bus/pci/drivers/c6xxvf/0000",
        "dev2": "state is down, expected up",
        "dev3": "unsupported in kernel mode, use dpdk mode",
        "1": "found 'qat_dev4 - type",
    }


def test_without_iommu_information_nothing_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Missing):
        list(kernelmode.scan(Host(tmp_path), LINES))


def adf_ctl(directory: Path, script: str) -> str:
    program = write(directory / "adf_ctl", f"#!/bin/sh\n{script}\n")
    os.chmod(program, stat.S_IRWXU)
    return str(program)


async def test_status_is_what_adf_ctl_prints(tmp_path: Path) -> None:
    assert await kernelmode.status(adf_ctl(tmp_path, 'echo "$1"; echo also >&2')) == "status\nalso\n"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo no driver; exit 3", r"failed with 3: 'no driver\\n'"),
        ("exec yes", "more than 65536 bytes"),
        ("yes & yes", "more than 65536 bytes"),
    ],
    ids=["fails", "endless", "endless children"],
)
async def test_a_failing_adf_ctl_is_reported(tmp_path: Path, script: str, problem: str) -> None:
    with pytest.raises(ScanError, match=problem):
        await kernelmode.status(adf_ctl(tmp_path, script))


async def test_a_missing_adf_ctl_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match="expected it in PATH"):
        await kernelmode.status(str(tmp_path / "adf_ctl"))


async def test_in_kernel_mode_the_plugin_runs_adf_ctl_and_renumbers_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = machine(tmp_path, (0, SSL.format(cy=1, processes=3, pinned=1)))
    write(tmp_path / "bin/status", lines)
    adf_ctl(tmp_path / "bin", f"cat {tmp_path}/bin/status")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    plugin, host = QatPlugin(QatConfig(mode="kernel")), Host(tmp_path)
    await plugin.refresh(host)
    plugin.prepare(host)
    found = [item for item in plugin.scan(host) if isinstance(item, Device)]
    assert await plugin.health(host, found) == {}
    assert list(plugin.measure(host, found)) == []
    answer = await plugin.post_allocate(found[1:], Allocation.of(found[1:]))
    assert answer.envs == {
        "QAT_SECTION_NAME": "SSL",
        "QAT_SECTION_NAME_cy1_dc0_0": "SSL",
        "QAT_SECTION_NAME_cy1_dc0_1": "SSL",
    }


def test_a_section_variable_of_another_form_is_rejected() -> None:
    with pytest.raises(ValueError, match="has 5 parts"):
        kernelmode.renumber_sections(Allocation(envs={"QAT_SECTION_NAME_cy1_0": "SSL"}))
