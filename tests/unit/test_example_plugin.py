"""The example of a third-party plugin: its length, and its documented behaviour."""

import ast
import asyncio
import contextlib
import importlib.util
import io
import shutil
import sys
import tempfile
import tokenize
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from trees import link, write
from waiting import until

from accelplane.devices import Device, DeviceNode, Inventory, Mount
from accelplane.host import Host
from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from accelplane.node import config as configuration
from accelplane.node.agent import Agent
from accelplane.node.plugins import Installed
from accelplane.node.scan_loop import scan
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.plugins import Plugin
from accelplane.testing import Tree, node

EXAMPLE = Path(__file__).parents[2] / "examples" / "generic-devices"
MODULE = EXAMPLE / "accelplane_generic_devices.py"
SAMPLE = EXAMPLE / "generic-devices.yaml"


@pytest.fixture(scope="module")
def generic() -> Iterator[type[Plugin[Any]]]:
    """The plugin's class, from the entry point in its package's metadata, without installation."""
    point = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]["accelplane.plugins"]
    module_name, _, name = point["device-nodes"].partition(":")
    spec = importlib.util.spec_from_file_location(module_name, EXAMPLE / f"{module_name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    yield getattr(module, name)
    del sys.modules[module_name]


def found(generic: type[Plugin[Any]], root: Path, devices: Mapping[str, object]) -> Inventory:
    return scan(generic(generic.config_type.of({"devices": devices})), Host(root))


def ids(inventory: Inventory, resource: str = "thing") -> Sequence[str]:
    return list(inventory.resources.get(resource, {}))


def first(inventory: Inventory) -> Device:
    return next(iter(inventory))


def files(root: Path, *paths: str) -> None:
    for path in paths:
        write(root / path.lstrip("/"), "")


def test_the_example_has_at_most_25_lines_of_code() -> None:
    source = MODULE.read_text()
    documented: set[int] = set()
    for part in ast.walk(ast.parse(source)):
        if isinstance(part, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(part):
            documented.update(range(part.body[0].lineno, (part.body[0].end_lineno or 0) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in silent
        for line in range(token.start[0], token.end[0] + 1)
    }
    assert len(code - documented) <= 25


def test_every_match_of_a_pattern_is_a_device_in_natural_order(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/ttyUSB10", "/dev/ttyUSB2", "/dev/ttyACM0", "/dev/tty0", "/dev/.ttyUSB3")
    groups = [{"paths": [{"path": "/dev/ttyUSB*"}]}, {"paths": [{"path": "/dev/ttyACM?"}]}]
    assert ids(found(generic, tmp_path, {"thing": groups})) == [
        "/dev/ttyACM0-0",
        "/dev/ttyUSB2-0",
        "/dev/ttyUSB10-0",
    ]


def test_a_container_gets_the_device_node_at_the_configured_path(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/ttyUSB7")
    path = {"path": "/dev/ttyUSB*", "mount-path": "/dev/modem", "permissions": "r"}
    device = first(found(generic, tmp_path, {"thing": [{"paths": [path]}]}))
    assert device.nodes == (DeviceNode("/dev/ttyUSB7", "/dev/modem", "r"),)


def test_nodes_are_readable_and_writable_by_default(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/fuse")
    device = first(found(generic, tmp_path, {"thing": [{"paths": [{"path": "/dev/fuse"}]}]}))
    assert device.nodes == (DeviceNode("/dev/fuse", "/dev/fuse", "rw"),)


def test_several_containers_share_a_device(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/fuse")
    inventory = found(generic, tmp_path, {"thing": [{"count": 3, "paths": [{"path": "/dev/fuse"}]}]})
    assert ids(inventory) == ["/dev/fuse-0", "/dev/fuse-1", "/dev/fuse-2"]
    assert {device.unit for device in inventory} == {"/dev/fuse"}


def test_several_paths_make_one_device_as_far_as_all_of_them_match(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/a0", "/dev/a1", "/dev/a2", "/dev/b0", "/dev/b1")
    inventory = found(generic, tmp_path, {"thing": [{"paths": [{"path": "/dev/a*"}, {"path": "/dev/b*"}]}]})
    assert ids(inventory) == ["/dev/a0+/dev/b0-0", "/dev/a1+/dev/b1-0"]
    assert first(inventory).nodes == (DeviceNode("/dev/a0"), DeviceNode("/dev/b0"))


def test_a_path_with_fewer_matches_is_used_up_to_their_number(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/a0", "/dev/a1", "/dev/a2", "/dev/bus")
    paths = [{"path": "/dev/a*"}, {"path": "/dev/bus", "limit": 2}]
    assert ids(found(generic, tmp_path, {"thing": [{"paths": paths}]})) == ["/dev/a0+/dev/bus-0", "/dev/a1+/dev/bus-0"]


def test_a_limit_publishes_no_device_twice(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/bus")
    assert ids(found(generic, tmp_path, {"thing": [{"paths": [{"path": "/dev/bus", "limit": 9}]}]})) == ["/dev/bus-0"]


def test_without_a_required_path_there_is_no_device(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/a0")
    assert not len(found(generic, tmp_path, {"thing": [{"paths": [{"path": "/dev/a0"}, {"path": "/dev/b0"}]}]}))


def test_an_optional_path_may_be_missing(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/a0")
    paths = [{"path": "/dev/a0"}, {"path": "/dev/b0", "optional": True}]
    assert first(found(generic, tmp_path, {"thing": [{"paths": paths}]})).nodes == (DeviceNode("/dev/a0"),)
    files(tmp_path, "/dev/b0")
    assert first(found(generic, tmp_path, {"thing": [{"paths": paths}]})).nodes == (
        DeviceNode("/dev/a0"),
        DeviceNode("/dev/b0"),
    )


def test_optional_paths_without_matches_publish_no_devices(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    assert not len(found(generic, tmp_path, {"thing": [{"paths": [{"path": "/dev/a0", "optional": True}]}]}))


@pytest.mark.parametrize(("permissions", "read_only"), [("rw", False), ("r", True)])
def test_files_are_mounted_and_read_only_without_w(
    generic: type[Plugin[Any]], tmp_path: Path, permissions: str, read_only: bool
) -> None:
    files(tmp_path, "/dev/a0", "/etc/a.conf")
    paths = [
        {"path": "/dev/a0"},
        {"path": "/etc/a.conf", "type": "Mount", "permissions": permissions, "mount-path": "/a.conf"},
    ]
    device = first(found(generic, tmp_path, {"thing": [{"paths": paths}]}))
    assert device.nodes == (DeviceNode("/dev/a0"),)
    assert device.mounts == (Mount("/etc/a.conf", "/a.conf", read_only),)


def test_links_of_udev_are_followed_also_for_the_numa_node(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/ttyUSB3")
    link(tmp_path / "dev/serial/by-id/usb-FTDI_A1", tmp_path / "dev/ttyUSB3")
    usb = tmp_path / "sys/devices/pci0000:80/0000:80:14.0/usb1/ttyUSB3"
    write(usb.parents[1] / "numa_node", "1\n")
    write(usb.parents[1] / "local_cpulist", "4-7\n")
    usb.mkdir(parents=True)
    link(tmp_path / "sys/class/tty/ttyUSB3", usb)
    by_name = found(generic, tmp_path, {"thing": [{"paths": [{"path": "/dev/ttyUSB3"}]}]})
    by_id = found(generic, tmp_path, {"thing": [{"paths": [{"path": "/dev/serial/by-id/usb-FTDI_*"}]}]})
    assert first(by_name).topology == (1,)
    assert ids(by_id) == ["/dev/serial/by-id/usb-FTDI_A1-0"]


def test_two_scans_of_one_tree_are_equal(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/a0", "/dev/a1", "/dev/b0")
    devices = {"thing": [{"count": 2, "paths": [{"path": "/dev/*"}]}]}
    assert found(generic, tmp_path, devices) == found(generic, tmp_path, devices)


@pytest.mark.parametrize(
    ("devices", "fault"),
    [
        ({"thing": [{"count": 1}]}, "[0]: Object missing required field `paths`"),
        ({"thing": [{"paths": [{}]}]}, "[0].paths[0]: Object missing required field `path`"),
        (
            {"thing": [{"paths": [{"path": "/dev/a", "permission": "r"}]}]},
            "[0].paths[0]: found the unknown option 'permission'",
        ),
        (
            {"thing": [{"paths": [{"path": "/dev/a", "permissions": "rx"}]}]},
            "[0].paths[0].permissions: expected a string matching regex '^[rwm]+$'",
        ),
        (
            {"thing": [{"paths": [{"path": "/dev/a", "type": "device"}]}]},
            "[0].paths[0].type: Invalid enum value 'device'",
        ),
        ({"thing": [{"paths": [{"path": "/dev/a", "limit": 0}]}]}, "[0].paths[0].limit: expected an integer >= 1"),
        ({"thing": [{"paths": [{"path": "/dev/a"}], "count": 0}]}, "[0].count: expected an integer >= 1"),
        ({"thing": {"paths": [{"path": "/dev/a"}]}}, ": found a mapping, expected a list"),
    ],
)
def test_errors_in_the_file_are_reported_with_their_key(
    generic: type[Plugin[Any]], devices: Mapping[str, object], fault: str
) -> None:
    config = configuration.AgentConfig(plugins={"device-nodes": {"devices": devices}})
    with pytest.raises(ConfigurationError) as refusal:
        configuration.choose(config, Installed({"device-nodes": generic}), "agent.yaml")
    assert str(refusal.value).startswith(f"agent.yaml: plugins.device-nodes.devices[...]{fault}")


def test_the_sample_configuration_finds_the_devices_in_its_comments(generic: type[Plugin[Any]], tmp_path: Path) -> None:
    files(tmp_path, "/dev/ttyUSB0", "/dev/ttyACM0", "/dev/video0", "/dev/fuse", "/dev/snd/controlC1")
    files(tmp_path, "/dev/snd/pcmC1D0c", "/dev/relay0", "/dev/relay1", "/dev/relay-bus", "/etc/relay/calibration.toml")
    config = configuration.read(str(SAMPLE))
    plugin = configuration.choose(config, Installed({"device-nodes": generic}), str(SAMPLE)).plugins["device-nodes"]
    inventory = scan(plugin, Host(tmp_path))
    assert {name: len(devices) for name, devices in inventory.resources.items()} == {
        "fuse": 50,
        "microphone": 1,
        "relay": 2,
        "serial": 2,
        "video": 1,
    }
    assert inventory.skipped == ()


# End to end: YAML, agent, kubelet, container.


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with short socket paths."""
    path = tempfile.mkdtemp(prefix="ak")
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
async def kubelet(directory: Path) -> AsyncIterator[EmbeddedKubelet]:
    async with EmbeddedKubelet(directory / "kubelet") as running:
        yield running


async def test_a_plugged_serial_port_is_allocated_to_a_container(
    generic: type[Plugin[Any]], directory: Path, kubelet: EmbeddedKubelet
) -> None:
    root = directory / "node"
    files(root, "/dev/null")
    config = directory / "agent.yaml"
    serial = {"serial": [{"paths": [{"path": "/dev/ttyUSB*", "mount-path": "/dev/ttyUSB0"}]}]}
    config.write_text(
        yaml.safe_dump({"plugins": {"device-nodes": {"namespace": "lab.example.com", "devices": serial}}})
    )
    settings = Settings(
        root=str(root), kubelet_dir=str(directory / "kubelet"), cdi_dir=str(directory / "cdi"), safety_interval=3600
    )
    plugins = configuration.choose(
        configuration.read(str(config)), Installed({"device-nodes": generic}), str(config)
    ).plugins
    agent = Agent(settings, plugins)
    async with running(agent):
        await until(lambda: "device-nodes" in agent.runners and agent.runners["device-nodes"].scan.completed.is_set())
        files(root, "/dev/ttyUSB4")
        await kubelet.until(lambda k: capacity(k, "lab.example.com/serial") == 1)
        pod = await kubelet.run_pod(Pod("terminal", containers={"main": {"lab.example.com/serial": 1}}))
    assert pod.containers["main"].devices == (DeviceNode("/dev/ttyUSB4", "/dev/ttyUSB0", "rw"),)


def capacity(kubelet: EmbeddedKubelet, resource: str) -> int:
    status = kubelet.resources().get(resource)
    return status.allocatable if status else 0


@contextlib.asynccontextmanager
async def running(agent: Agent) -> AsyncGenerator[None]:
    task = asyncio.create_task(agent.run())
    try:
        yield
    finally:
        agent.stop()
        await task


async def test_a_pod_claims_a_serial_port_and_two_pods_share_a_node(
    generic: type[Plugin[Any]], directory: Path
) -> None:
    """Without code for it in the plugin, by the namespace of its configuration."""
    tree = Tree(directory / "node")
    tree.node("/dev/ttyUSB0")
    tree.node("/dev/fuse")
    plugin = configuration.choose(
        configuration.read(str(SAMPLE)), Installed({"device-nodes": generic}), str(SAMPLE)
    ).plugins["device-nodes"]
    async with node(plugin, tree, name="device-nodes", dra=True) as kubelet:
        found = {str(each.attributes["type"]): name for name, each in (await kubelet.published(2)).items()}
        serial = await kubelet.claim(found["serial"])
        assert serial.devices == [DeviceNode("/dev/ttyUSB0", "/dev/ttyUSB0", "rw")]
        with pytest.raises(LookupError):
            await kubelet.claim(found["serial"])
        shared = [await kubelet.claim(found["fuse"]) for _ in range(2)]
        assert [each.devices for each in shared] == [[DeviceNode("/dev/fuse", "/dev/fuse", "rw")]] * 2
        assert not any(each.devices for each in kubelet.resources().values())
