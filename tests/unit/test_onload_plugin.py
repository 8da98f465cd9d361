"""The Onload plugin on trees of plain files: NICs, health, and Allocate responses."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write

from accelplane.cli import dropin as dropins
from accelplane.cli.goflags import flags_of, parse
from accelplane.cli.node import dropin
from accelplane.devices import Allocation, Device, DeviceNode, Inventory, Mount, Resource, Skipped
from accelplane.host import Host, HostError
from accelplane.plugins import ScanError
from accelplane.plugins.onload import OnloadConfig, OnloadDropin, OnloadPlugin
from accelplane.plugins.onload.config import join_path
from accelplane.plugins.onload.nics import Nic, find_nics, numa_nodes

pytestmark = pytest.mark.memory

NODES = tuple(DeviceNode(f"/dev/{name}", permissions="mrw") for name in ("onload", "onload_epoll", "sfc_char"))


def interface(root: Path, name: str, *, vendor: str = "0x1924\n", numa: str | None = "0\n") -> Path:
    device = root / "sys/devices" / name
    write(device / "vendor", vendor)
    if numa is not None:
        write(device / "numa_node", numa)
    link(root / "sys/class/net" / name / "device", device)
    return device


def userland(root: Path, directory: str = "opt/onload", *libraries: str) -> None:
    for library in libraries or ("libonload.so", "libonload.so.1", "libonload_ext.so", "libother.so"):
        write(root / directory / "usr/lib64" / library, "")
    write(root / directory / "usr/bin/onload", "")


def module(root: Path) -> None:
    write(root / "sys/module/onload/initstate", "live\n")
    for node in NODES:
        write(root / node.host_path[1:], "")


def tree(root: Path) -> Path:
    interface(root, "sfc0")
    userland(root)
    module(root)
    return root


def scan(root: Path, plugin: type[OnloadPlugin] = OnloadDropin, **options: Any) -> list[Device]:
    entries = list(plugin(OnloadConfig(**options)).scan(Host(root)))
    assert Resource("onload") in entries
    return [entry for entry in entries if isinstance(entry, Device)]


def health(root: Path, **options: Any) -> str:
    """The reason of all devices, empty if they are healthy."""
    devices = scan(root, **options)
    assert {device.healthy for device in devices} == {not devices[0].reason}
    return devices[0].reason


async def allocation(root: Path, **options: Any) -> Allocation:
    plugin = OnloadDropin(OnloadConfig(**options))
    host = Host(root)
    plugin.prepare(host)
    list(plugin.scan(host))
    return await plugin.allocate([])


# NICs


def test_nics_are_the_interfaces_of_vendor_1924_in_the_order_of_their_names(tmp_path: Path) -> None:
    interface(tmp_path, "ens9f1", numa="1\n")
    interface(tmp_path, "ens10", numa=None)
    interface(tmp_path, "eth0", vendor="0x8086\n")
    interface(tmp_path, "eth1", vendor="0x1924\n\n")
    (tmp_path / "sys/class/net/lo").mkdir()
    assert find_nics(Host(tmp_path)) == [Nic("ens10", -1), Nic("ens9f1", 1)]


def test_an_unreadable_interface_is_reported(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth0/device/vendor").mkdir(parents=True)
    host = Host(tmp_path)
    assert find_nics(host) == []
    assert "network interface 'eth0' skipped" in host.notes[0]


def test_an_unreadable_list_of_interfaces_fails_the_scan(tmp_path: Path) -> None:
    write(tmp_path / "sys/class/net", "")
    with pytest.raises(HostError, match="/sys/class/net"):
        find_nics(Host(tmp_path))


@pytest.mark.parametrize(
    ("driver", "cls", "found"),
    [("sfc", "0x020000", True), ("vfio-pci", "0x020000", False), (None, "0x020000", False), ("sfc", "0x010000", False)],
)
def test_a_nic_of_another_network_namespace_is_found_by_its_pci_function(
    tmp_path: Path, driver: str | None, cls: str, found: bool
) -> None:
    function = tmp_path / "sys/bus/pci/devices/0000:21:00.0"
    for name, text in {"vendor": "0x1924", "device": "0x0b03", "class": cls, "numa_node": "1"}.items():
        write(function / name, f"{text}\n")
    if driver:
        link(function / "driver", tmp_path / "sys/bus/pci/drivers" / driver)
    assert find_nics(Host(tmp_path)) == ([Nic("0000:21:00.0", 1)] if found else [])


@pytest.mark.parametrize(
    ("texts", "topology"),
    [
        (("1\n", "0\n", "1\n"), (1, 0)),
        (("-1\n", "x\n", "", "٣", "0x1"), None),
        ((None, "2"), (2,)),
    ],
)
def test_devices_have_the_distinct_numa_nodes_of_all_nics(
    tmp_path: Path, texts: tuple[str | None, ...], topology: tuple[int, ...] | None
) -> None:
    for number, text in enumerate(texts):
        interface(tmp_path, f"sfc{number}", numa=text)
    assert numa_nodes(find_nics(Host(tmp_path))) == topology
    assert {device.topology for device in scan(tmp_path)} == {topology}


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_content_of_sysfs_gives_a_result(tmp_path: Path, vendor: bytes, numa: bytes) -> None:
    device = tmp_path / "sys/class/net/eth0/device"
    write(device / "vendor", vendor)
    write(device / "numa_node", numa)
    nics = find_nics(Host(tmp_path))
    assert [nic.name for nic in nics] == (["eth0"] if vendor in (b"0x1924", b"0x1924\n") else [])
    assert all(-1 <= nic.numa_node < 10**9 for nic in nics)


# Devices


def test_by_default_there_are_100_devices(tmp_path: Path) -> None:
    devices = scan(tree(tmp_path))
    assert [device.id for device in devices] == [f"sfc-{number}" for number in range(100)]
    assert {device.nodes for device in devices} == {NODES}
    assert all(device.healthy for device in devices)


@pytest.mark.parametrize("number", [0, -1, 3])
def test_max_pods_is_the_number_of_devices(tmp_path: Path, number: int) -> None:
    assert len(scan(tree(tmp_path), max_pods=number)) == max(number, 0)


def test_two_scans_of_the_same_tree_have_the_same_devices_and_a_changed_one_others(tmp_path: Path) -> None:
    plugin = OnloadDropin()

    def inventory() -> Inventory:
        return Inventory.of(plugin.scan(Host(tmp_path)))

    tree(tmp_path)
    first = inventory()
    assert inventory() == first
    os.unlink(tmp_path / "dev/onload")
    assert inventory() != first
    module(tmp_path)
    assert inventory() == first


@pytest.mark.parametrize(
    "path",
    ["dev/onload", "dev/onload_epoll", "dev/sfc_char", "sys/module/onload", "opt/onload/usr/lib64/libonload.so"],
)
def test_devices_are_unhealthy_without_a_part_of_onload(tmp_path: Path, path: str) -> None:
    tree(tmp_path)
    (tmp_path / path).rename(tmp_path / "elsewhere")
    assert health(tmp_path).startswith(f"/{path}: ")
    (tmp_path / "elsewhere").rename(tmp_path / path)
    assert health(tmp_path) == ""


def test_devices_are_unhealthy_without_a_nic_unless_none_is_needed(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "sys/class/net/sfc0").rename(tmp_path / "sfc0")
    assert health(tmp_path) == "no sfc devices found"
    assert health(tmp_path, need_nic=False) == ""


def test_the_launcher_is_needed_only_if_it_is_mounted(tmp_path: Path) -> None:
    os.unlink(tree(tmp_path) / "opt/onload/usr/bin/onload")
    assert health(tmp_path) == ""
    assert health(tmp_path, set_preload=False, mount_onload=True).startswith("/opt/onload/usr/bin/onload: no such file")


def test_the_health_of_a_tree_without_modules_follows_the_device_nodes(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "sys/module").rename(tmp_path / "module")
    assert health(tmp_path) == ""


def test_the_device_nodes_of_the_host_count_not_those_of_the_container(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "proc/1/root/dev").mkdir(parents=True)
    assert health(tmp_path) == "/dev/onload: no such device node"
    for node in NODES:
        write(tmp_path / "proc/1/root" / node.host_path[1:], "")
    assert health(tmp_path) == ""


def skipped(root: Path) -> str:
    (entry,) = OnloadPlugin().scan(Host(root))
    assert isinstance(entry, Skipped)
    return entry.reason


def test_the_agent_publishes_nothing_on_nodes_without_onload(tmp_path: Path) -> None:
    assert not [*OnloadPlugin().scan(Host(tmp_path))]
    interface(tmp_path, "sfc0")
    module(tmp_path)
    assert skipped(tmp_path).startswith("/opt/onload/usr/lib64: ")
    (tmp_path / "dev/onload").unlink()
    userland(tmp_path)
    assert not any(device.healthy for device in scan(tmp_path, OnloadPlugin))
    module(tmp_path)
    assert all(device.healthy for device in scan(tmp_path, OnloadPlugin))


def test_an_explanation_lists_nics_and_files(tmp_path: Path) -> None:
    tree(tmp_path)
    explanation = OnloadPlugin().explain(Host(tmp_path))
    assert explanation["nics"] == {"sfc0": 0}
    assert (explanation["kernel-module"], explanation["files"]) == ("usable", "usable")


# Allocate


async def test_a_container_gets_nodes_libraries_and_the_preload_variable(tmp_path: Path) -> None:
    found = await allocation(tree(tmp_path))
    directory = "/opt/onload/usr/lib64"
    names = ("libonload.so", "libonload.so.1", "libonload_ext.so")
    assert found == Allocation(
        nodes=NODES,
        mounts=tuple(Mount(f"{directory}/{name}", f"{directory}/{name}") for name in names),
        envs={"LD_PRELOAD": "/opt/onload/usr/lib64/libonload.so"},
    )
    assert all(mount.read_only for mount in found.mounts)


async def test_mount_paths_in_the_container_follow_the_options_and_those_on_the_host_do_not(tmp_path: Path) -> None:
    userland(tmp_path, "data/onload", "libonload.so")
    interface(tmp_path, "sfc0")
    module(tmp_path)
    options: Mapping[str, Any] = {"host_onload_path": "/data/onload/", "lib_mount_path": "/lib//", "bin_mount_path": ""}
    found = await allocation(tmp_path, **options, base_mount_path="/x/../y", set_preload=False, mount_onload=True)
    assert found.mounts == (
        Mount("/data/onload/usr/lib64/libonload.so", "/y/lib/libonload.so"),
        Mount("/data/onload/usr/bin/onload", "/y/onload"),
    )
    assert found.envs == {}


async def test_mounts_name_the_installed_version_so_that_running_pods_keep_it(tmp_path: Path) -> None:
    interface(tmp_path, "sfc0")
    module(tmp_path)
    top = tmp_path / "opt/onload"
    userland(tmp_path, "opt/onload/versions/1-a", "libonload.so")
    userland(tmp_path, "opt/onload/versions/2-b", "libonload.so", "libonload_ext.so")
    link(top / "current", "versions/1-a")
    link(top / "usr", "current/usr")
    plugin = OnloadDropin()
    plugin.prepare(Host(tmp_path))
    before = await plugin.allocate([])
    assert before.mounts == (
        Mount("/opt/onload/versions/1-a/usr/lib64/libonload.so", "/opt/onload/usr/lib64/libonload.so"),
    )
    link(top / "next", "versions/2-b").rename(top / "current")
    assert [mount.host_path for mount in (await plugin.allocate([])).mounts] == [
        "/opt/onload/versions/2-b/usr/lib64/libonload.so",
        "/opt/onload/versions/2-b/usr/lib64/libonload_ext.so",
    ]


async def test_only_files_are_mounted_and_links_without_a_target_are_not(tmp_path: Path) -> None:
    tree(tmp_path)
    directory = tmp_path / "opt/onload/usr/lib64"
    (directory / "libonload.so.d").mkdir()
    link(directory / "libonload.so.dangling", "nowhere")
    link(directory / "libonload.so.2", "libonload.so.1")
    mounted = [os.path.basename(mount.host_path) for mount in (await allocation(tmp_path)).mounts]
    assert mounted == ["libonload.so", "libonload.so.1", "libonload.so.2", "libonload_ext.so"]


async def test_files_removed_since_the_last_scan_fail_the_allocation(tmp_path: Path) -> None:
    tree(tmp_path)
    plugin = OnloadDropin()
    plugin.prepare(Host(tmp_path))
    os.unlink(tmp_path / "opt/onload/usr/lib64/libonload.so")
    with pytest.raises(HostError, match=r"libonload\.so: no such file"):
        await plugin.allocate([])
    os.unlink(tmp_path / "dev/onload")
    with pytest.raises(ScanError, match="/dev/onload: no such device node"):
        await plugin.allocate([])


def test_a_directory_with_very_many_libraries_is_rejected(tmp_path: Path) -> None:
    tree(tmp_path)
    for number in range(64):
        write(tmp_path / "opt/onload/usr/lib64" / f"libonload.so.{number:02}", "")
    assert "found 67 files of Onload, expected 64 or less" in health(tmp_path)


@pytest.mark.parametrize(
    ("parts", "path"),
    [(("/a/", "/b//c/"), "/a/b/c"), (("", "/b"), "/b"), (("//a",), "/a"), ((), "."), (("a", "../.."), "..")],
)
def test_paths_are_joined_as_in_go(parts: tuple[str, ...], path: str) -> None:
    assert join_path(*parts) == path


# The command


def test_flags_are_those_of_the_original() -> None:
    assert {flag.name: flag.default for flag in flags_of(OnloadConfig)} == {
        "maxPods": 100, "needNic": True, "setPreload": True, "mountOnload": False, "hostOnloadPath": "/opt/onload",
        "baseMountPath": "/opt/onload", "binMountPath": "/usr/bin", "libMountPath": "/usr/lib64",
    }  # fmt: skip
    values, _words = parse(flags_of(OnloadConfig), ["-maxPods=0x10", "--setPreload=false"])
    assert OnloadConfig.of(values) == OnloadConfig(max_pods=16, set_preload=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mountOnload": True}, "setting both usePreload and mountOnload is not supported"),
        ({"maxPods": 100_001}, "maxPods is 100001, expected 100000 or less"),
        (
            {"baseMountPath": "/a:b"},
            "baseMountPath with libMountPath is '/a:b/usr/lib64', .* without white space and colons",
        ),
        ({"hostOnloadPath": "opt"}, "hostOnloadPath is 'opt', expected an absolute path"),
        (
            {"baseMountPath": "", "libMountPath": "lib"},
            "baseMountPath with libMountPath is 'lib', expected an absolute",
        ),
        ({"binMountPath": "\0"}, "baseMountPath with binMountPath is .* expected an absolute path"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        OnloadConfig.of(options)


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_path_is_accepted_or_rejected_with_its_name(base: str, library: str) -> None:
    directory = join_path(base, library)
    if directory.startswith("/") and "\0" not in directory and base.startswith("/"):
        config = OnloadConfig(base_mount_path=base, lib_mount_path=library, bin_mount_path="/", set_preload=False)
        assert config.library_directory == "/" or not {"..", ".", ""} & set(directory.split("/")[1:])
    elif not directory.startswith("/"):
        with pytest.raises(ValueError, match="baseMountPath with libMountPath"):
            OnloadConfig(base_mount_path=base, lib_mount_path=library)


def test_the_command_does_not_start_without_a_nic(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [f"-root={tmp_path}", f"-kubelet-dir={tmp_path}"]
    assert dropin("onload-device-plugin", OnloadDropin, "onload", arguments, absence=OnloadDropin.absence) == 1
    assert capfd.readouterr().err.startswith("onload-device-plugin: no sfc devices found: ")
    assert OnloadDropin(OnloadConfig(need_nic=False)).absence(Host(tmp_path)) == ""
    interface(tmp_path, "sfc0")
    assert OnloadDropin().absence(Host(tmp_path)) == ""
    (tmp_path / "sys/class/net").rename(tmp_path / "net")
    write(tmp_path / "sys/class/net", "")
    assert OnloadDropin().absence(Host(tmp_path)).startswith("/sys/class/net: ")


def test_the_command_prints_its_devices(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["onload-device-plugin", f"-root={tree(tmp_path)}", "-once", "-maxPods=2"])
    with pytest.raises(SystemExit) as end:
        dropins.onload()
    assert end.value.code == 0
    devices = json.loads(capfd.readouterr().out)["onload"]["resources"]["amd.com/onload"]
    assert list(devices) == ["sfc-0", "sfc-1"]


@pytest.mark.parametrize(("arguments", "status"), [(["-maxpods=1"], 2), (["-h"], 0), (["-mountOnload"], 1)])
def test_exit_statuses_are_those_of_the_original(
    arguments: list[str], status: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["onload-device-plugin", *arguments])
    with pytest.raises(SystemExit) as end:
        dropins.onload()
    assert end.value.code == status
    assert capfd.readouterr().err
