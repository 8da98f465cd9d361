"""Devices of the generic plugin for claims: what slices have, and what containers get."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelplane.devices import DeviceNode, Mount
from accelplane.kubelet.embedded import PodStartError
from accelplane.plugins.generic import GenericConfig, GenericPlugin
from accelplane.testing import Tree, node

Options = dict[str, Any]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def plugin(*devices: Options, domain: str = "devices.example.com", **options: Any) -> GenericPlugin:
    return GenericPlugin(GenericConfig.of({"domain": domain, "devices": devices, **options}))


def resource(name: str, *groups: Options) -> Options:
    return {"name": name, "groups": list(groups)}


def paths(*given: Options, **group: Any) -> Options:
    return {"paths": list(given), **group}


async def test_a_claim_gets_the_nodes_mounts_and_variables_of_its_device(tree: Tree) -> None:
    tree.node("/dev/meter0")
    tree.node("/dev/meter1")
    tree.write("/etc/meter.conf", "x")
    group = paths(
        {"path": "/dev/meter*", "mountPath": "/dev/meter", "permissions": "r"},
        mounts=[{"path": "/etc/meter.conf"}],
        env={"METER": "{name}"},
    )
    async with node(plugin(resource("meter", group)), tree, name="generic", dra=True) as kubelet:
        devices = await kubelet.published(2)
        assert {each.attributes["type"] for each in devices.values()} == {"meter"}
        second = sorted(devices)[1]
        container = await kubelet.claim(second)
        assert container.devices == [DeviceNode("/dev/meter1", "/dev/meter", "r")]
        assert container.mounts == [Mount("/etc/meter.conf")]
        assert container.envs["METER"] == "meter1"
        with pytest.raises(LookupError):
            await kubelet.claim(second)
        assert not any(each.devices for each in kubelet.resources().values())
        assert kubelet.problems == []


async def test_links_and_directories_become_device_nodes(tree: Tree) -> None:
    tree.node("/dev/ttyUSB3")
    tree.link("/dev/serial/by-id/usb-A1", "/dev/ttyUSB3")
    tree.node("/dev/snd/controlC0")
    tree.node("/dev/snd/by-path/pci-1")
    given = (
        resource("serial", paths({"path": "/dev/serial/by-id/usb-A1"})),
        resource("sound", paths({"path": "/dev/snd", "mountPath": "/dev/sound"})),
    )
    async with node(plugin(*given), tree, name="generic", dra=True) as kubelet:
        found = {each.attributes["type"]: name for name, each in (await kubelet.published(2)).items()}
        serial, sound = [await kubelet.claim(found[kind]) for kind in ("serial", "sound")]
        assert serial.devices == [DeviceNode("/dev/ttyUSB3", "/dev/serial/by-id/usb-A1", "mrw")]
        assert {(each.host_path, each.container_path) for each in sound.devices} == {
            ("/dev/snd/controlC0", "/dev/sound/controlC0"),
            ("/dev/snd/by-path/pci-1", "/dev/sound/by-path/pci-1"),
        }


async def test_a_device_with_a_count_is_claimed_so_often(tree: Tree) -> None:
    tree.node("/dev/kvm")
    async with node(
        plugin(resource("kvm", paths({"path": "/dev/kvm"}, count=2))), tree, name="generic", dra=True
    ) as kubelet:
        [(name, device)] = (await kubelet.published(1)).items()
        assert device.capacities["shares"] == "2"
        assert [(await kubelet.claim(name)).devices for _ in range(2)] == [
            [DeviceNode("/dev/kvm", permissions="mrw")]
        ] * 2
        with pytest.raises(LookupError):
            await kubelet.claim(name)


def attributes_of(*kinds: Mapping[str, object]) -> set[frozenset[str]]:
    return {frozenset(name for name in each if "/" not in name) for each in kinds}


async def test_all_kinds_of_devices_have_the_same_attributes(tree: Tree) -> None:
    """A selector that reads a missing one would end the scheduling of the pod."""
    tree.node("/dev/kvm")
    tree.usb("1-2", vendor="1a86", product="7523", serial="A1")
    usb = {"usb": [{"vendor": "1a86"}]}
    given = plugin(resource("kvm", paths({"path": "/dev/kvm"})), resource("serial", usb))
    async with node(given, tree, name="generic", dra=True) as kubelet:
        found = await kubelet.published(2)
        devices = {str(each.attributes["type"]): each.attributes for each in found.values()}
        assert len(attributes_of(*devices.values())) == 1
        assert (devices["serial"]["vendorId"], devices["serial"]["serial"]) == ("1a86", "A1")
        assert (devices["kvm"]["vendorId"], devices["kvm"]["serial"]) == ("", "")
        assert {*GenericPlugin.attribute_defaults} <= {*devices["kvm"]}


async def test_several_usb_devices_that_are_one_belong_to_claims(tree: Tree) -> None:
    for port in ("1-2", "1-3"):
        tree.usb(port, vendor="1a86", product="7523")
    async with node(plugin(resource("pair", {"usb": [{"vendor": "1a86"}]})), tree, name="generic", dra=True) as kubelet:
        [name] = await kubelet.published(1)
        assert len((await kubelet.claim(name)).devices) == 2
        assert not any(each.devices for each in kubelet.resources().values())


async def test_a_failed_command_is_a_taint(tree: Tree) -> None:
    tree.node("/dev/modem")
    group = paths({"path": "/dev/modem"}, health={"command": ["/bin/sh", "-c", "echo no carrier; exit 1"]})
    async with node(plugin(resource("modem", group)), tree, name="generic", dra=True) as kubelet:
        [device] = (await kubelet.published(1)).values()
        assert device.taints == ["devices.example.com/health"]
        assert device.attributes["health"] == "Unhealthy"


async def test_a_device_that_vanished_is_not_prepared(tree: Tree) -> None:
    tree.node("/dev/meter0")
    group = paths({"path": "/dev/meter0"}, mounts=[])
    async with node(plugin(resource("meter", group)), tree, name="generic", dra=True) as kubelet:
        [name] = await kubelet.published(1)
        tree.remove("/dev/meter0")
        with pytest.raises((LookupError, PodStartError)):
            await kubelet.claim(name)
