"""Devices of the generic plugin for claims: what slices have, and what containers get."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from accelplane.devices import DeviceNode, Mount
from accelplane.dra.ownership import OwnershipRecord
from accelplane.kubelet.embedded import PodStartError
from accelplane.node.agent import Agent
from accelplane.node.device_api import record_name
from accelplane.node.settings import ConfigurationError
from accelplane.plugins.generic import GenericConfig, GenericPlugin
from accelplane.plugins.gpu import GpuPlugin
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


async def test_the_name_of_a_device_stays_when_its_function_gets_another_one(tree: Tree) -> None:
    function = tree.pci("0000:05:00.0", vendor="0x1ae0", device="0x0056")
    tree.class_device("tty", "ttyS4", parent=function)
    given = plugin(resource("serial", paths({"path": "/dev/ttyS*"})))
    async with node(given, tree, name="generic", dra=True) as kubelet:
        [first] = await kubelet.published(1)
        assert first.startswith("0000-05-00-0-dev-ttys4-")
        tree.class_device("tty", "ttyS5", parent=function)
        assert first in await kubelet.published(2)


async def test_a_failed_command_is_a_taint(tree: Tree) -> None:
    tree.node("/dev/modem")
    group = paths({"path": "/dev/modem"}, health={"command": ["/bin/sh", "-c", "echo no carrier; exit 1"]})
    async with node(plugin(resource("modem", group)), tree, name="generic", dra=True) as kubelet:
        [device] = (await kubelet.published(1)).values()
        assert device.taints == ["devices.example.com/health"]
        assert device.attributes["health"] == "Unhealthy"


async def test_a_device_that_vanished_is_not_prepared(tree: Tree) -> None:
    tree.node("/dev/meter0")
    group = paths({"path": "/dev/meter0"})
    async with node(plugin(resource("meter", group)), tree, name="generic", dra=True) as kubelet:
        [name] = await kubelet.published(1)
        tree.remove("/dev/meter0")
        with pytest.raises((LookupError, PodStartError)):
            await kubelet.claim(name)


async def test_another_plugin_of_the_domain_may_have_other_resources(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device plugin API stays for the resources of the other one."""
    monkeypatch.setattr("accelplane.node.dra.other_plugin._CONFIRM_TIME", 0.0)
    tree.node("/dev/meter0")
    tree.node("/dev/lamp")
    first, second = (resource(name, paths({"path": f"/dev/{name}*"})) for name in ("meter", "lamp"))
    async with node(plugin(first), tree, name="generic", dra=True) as kubelet:
        settings = replace(kubelet.agent.settings, dra_api="")
        other = Agent(settings, {"generic": plugin(second)}, program="other")
        task = asyncio.create_task(other.run())
        await kubelet.until(lambda each: "devices.example.com/lamp" in each.resources())
        assert len(await kubelet.published(1)) == 1
        await kubelet.claim()
        assert kubelet.problems == []
        other.stop()
        await task


async def test_the_domain_does_not_change_while_devices_may_be_for_claims(tree: Tree) -> None:
    """The driver of the old name has to unprepare the claims of running pods."""
    tree.node("/dev/kvm")
    kvm = resource("kvm", paths({"path": "/dev/kvm"}))
    async with node(plugin(kvm), tree, name="generic", dra=True) as kubelet:
        await kubelet.published(1)
        agent = kubelet.agent
        assert agent.dra is not None
        agent.dra.check(agent.settings, ["generic"], {"generic": plugin(kvm)})
        expected = "plugins.generic: the namespace is 'b.example.com', expected 'devices.example.com' while"
        with pytest.raises(ConfigurationError, match=expected):
            agent.dra.check(agent.settings, ["generic"], {"generic": plugin(kvm, domain="b.example.com")})


async def test_two_plugins_with_different_domains_have_records_of_their_own(tree: Tree) -> None:
    """They have different units, and neither waits for the other."""
    tree.node("/dev/kvm")
    tree.node("/dev/fuse")
    kvm, fuse = (resource(name, paths({"path": f"/dev/{name}"})) for name in ("kvm", "fuse"))
    async with node(plugin(kvm), tree, name="generic", dra=True) as kubelet:
        await kubelet.published(1)
        agent = kubelet.agent
        other = OwnershipRecord(
            agent.settings.ownership_dir, record_name("generic", plugin(fuse, domain="b.example.com"))
        )
        assert other.open()
        assert other.change(add=["/dev/fuse"])
        other.close()
        assert record_name("gpu", GpuPlugin()) == "gpu"
        assert kubelet.problems == []
