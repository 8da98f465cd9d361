"""Resources from paths: the combination of matches, IDs, sharing, and files that are no device nodes."""

import contextlib
import os
import socket
from pathlib import Path

import pytest
from generictrees import digest, files, found, plugin, reasons
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write

from accelplane.devices import Device, DeviceNode, Mount
from accelplane.host import Host
from accelplane.node.scan_loop import scan
from accelplane.plugins.generic import GenericConfig, GenericPlugin
from accelplane.plugins.generic.config import MAX_DEVICES
from accelplane.plugins.generic.paths import pattern_of

pytestmark = pytest.mark.memory


def dev(root: Path, *names: str) -> None:
    for name in names:
        write(root / "dev" / name, "")


def one(root: Path, *groups: dict[str, object]) -> Device:
    (device,) = found(root, *groups)
    return device


def test_each_match_of_a_pattern_is_a_device(tmp_path: Path) -> None:
    dev(tmp_path, "ttyUSB0", "ttyUSB1", "ttyS0")
    inventory = found(tmp_path, {"paths": [{"path": "/dev/ttyUSB*"}]})
    assert {device.nodes for device in inventory} == {
        (DeviceNode("/dev/ttyUSB0", permissions="mrw"),),
        (DeviceNode("/dev/ttyUSB1", permissions="mrw"),),
    }


def test_ids_are_the_hashes_of_the_original_project(tmp_path: Path) -> None:
    """Of the number of the share and the paths: containers keep their devices when the plugin is replaced."""
    dev(tmp_path, "snd/controlC0", "snd/pcmC0D0c")
    paths = [{"path": "/dev/snd/controlC0"}, {"path": "/dev/snd/pcmC0D0c"}]
    ids = {device.id for device in found(tmp_path, {"count": 2, "paths": paths})}
    assert ids == {digest(f"{number}/dev/snd/controlC0/dev/snd/pcmC0D0c") for number in (0, 1)}


def test_shares_of_a_device_have_its_unit_and_files(tmp_path: Path) -> None:
    dev(tmp_path, "fuse")
    devices = list(found(tmp_path, {"count": 10, "paths": [{"path": "/dev/fuse"}]}))
    assert len({device.id for device in devices}) == 10
    assert {(device.unit, device.nodes) for device in devices} == {
        ("/dev/fuse", (DeviceNode("/dev/fuse", permissions="mrw"),))
    }


@pytest.mark.parametrize(
    ("names", "limit", "expected"),
    [
        (("a0", "a1", "b0", "b1"), 1, [["/dev/a0", "/dev/b0"], ["/dev/a1", "/dev/b1"]]),
        (("a0", "a1", "b0"), 1, [["/dev/a0", "/dev/b0"]]),
        (("a0", "a1", "a2", "b0"), 2, [["/dev/a0", "/dev/b0"], ["/dev/a1", "/dev/b0"]]),
        (("a0", "a1", "b0"), 10, [["/dev/a0", "/dev/b0"], ["/dev/a1", "/dev/b0"]]),
        (("a0", "b0"), 10, [["/dev/a0", "/dev/b0"]]),
        (("a0",), 10, []),
        (("b0",), 10, []),
    ],
)
def test_a_device_has_one_match_of_each_path(
    tmp_path: Path, names: tuple[str, ...], limit: int, expected: list[list[str]]
) -> None:
    dev(tmp_path, *names)
    assert files(found(tmp_path, {"paths": [{"path": "/dev/a*"}, {"path": "/dev/b*", "limit": limit}]})) == expected


def test_devices_exist_without_optional_files(tmp_path: Path) -> None:
    dev(tmp_path, "video0", "video2", "meta0")
    paths = [{"path": "/dev/video*"}, {"path": "/dev/meta*", "optional": True}]
    assert files(found(tmp_path, {"paths": paths})) == [["/dev/video0", "/dev/meta0"], ["/dev/video2"]]


def test_a_mount_path_and_permissions_apply_to_the_container(tmp_path: Path) -> None:
    dev(tmp_path, "ttyACM3")
    write(tmp_path / "etc/relay.toml", "")
    device = one(
        tmp_path,
        {
            "paths": [
                {"path": " /dev/ttyACM* ", "mountPath": " /dev/meter ", "permissions": "r"},
                {"path": "/etc/relay.toml", "type": "Mount", "readOnly": True},
            ],
            "mounts": [{"path": "/usr/lib/relay", "mountPath": "/relay"}],
            "env": {"METER": "{path}", "NAME": "{name}"},
        },
    )
    assert device.nodes == (DeviceNode("/dev/ttyACM3", "/dev/meter", "r"),)
    assert device.mounts == (Mount("/etc/relay.toml"), Mount("/usr/lib/relay", "/relay"))
    assert device.envs == {"METER": "/dev/meter", "NAME": "ttyACM3"}


def test_a_file_in_two_groups_is_one_device(tmp_path: Path) -> None:
    dev(tmp_path, "ttyUSB0", "ttyUSB1")
    groups = [{"paths": [{"path": path}]} for path in ("/dev/ttyUSB0", "/dev/ttyUSB*", "/dev/tty*0")]
    assert files(found(tmp_path, *groups)) == [["/dev/ttyUSB0"], ["/dev/ttyUSB1"]]


def test_a_resource_without_a_match_is_advertised_and_its_patterns_are_named(tmp_path: Path) -> None:
    inventory = found(tmp_path, {"paths": [{"path": "/dev/a*"}, {"path": "/dev/b*", "optional": True}]})
    assert {name: len(devices) for name, devices in inventory.resources.items()} == {"thing": 0}
    assert reasons(inventory) == ["thing: /dev/a*: no file matches /dev/a*"]


def test_links_keep_their_name_and_dangling_ones_match_nothing(tmp_path: Path) -> None:
    """The runtime follows a link at each start of a container: the link of udev then names the present device."""
    dev(tmp_path, "ttyUSB7")
    link(tmp_path / "dev/serial/by-id/usb-FTDI_A", "../../ttyUSB7")
    link(tmp_path / "dev/serial/by-id/usb-FTDI_B", "../../ttyUSB8")
    assert files(found(tmp_path, {"paths": [{"path": "/dev/serial/by-id/*"}]})) == [["/dev/serial/by-id/usb-FTDI_A"]]


def test_links_cannot_leave_the_root(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside/secret", "")
    link(tmp_path / "root/dev/up", "../../outside/secret")
    link(tmp_path / "root/dev/absolute", str(outside))
    assert files(found(tmp_path / "root", {"paths": [{"path": "/dev/*"}]})) == []


def test_cdi_gets_the_nodes_behind_links_and_directories(tmp_path: Path) -> None:
    dev(tmp_path, "ttyUSB7", "snd/timer", "snd/by-path/pci-0")
    link(tmp_path / "dev/meter", "ttyUSB7")
    inventory = found(
        tmp_path,
        {"paths": [{"path": "/dev/meter"}, {"path": "/dev/snd", "mountPath": "/audio"}]},
        cdi="only",
    )
    (device,) = inventory
    assert (device.nodes, device.mounts) == ((), ())
    assert device.cdi
    assert [(node.path, node.host_path) for node in device.cdi.nodes] == [
        ("/dev/meter", "/dev/ttyUSB7"),
        ("/audio/by-path/pci-0", "/dev/snd/by-path/pci-0"),
        ("/audio/timer", "/dev/snd/timer"),
    ]
    device.cdi.check()


def test_shares_have_one_cdi_device_and_resources_have_different_ones(tmp_path: Path) -> None:
    dev(tmp_path, "fuse")
    groups = [{"count": 3, "paths": [{"path": "/dev/fuse"}]}]
    config = GenericConfig.of({"cdi": "all", "devices": [{"name": name, "groups": groups} for name in ("a", "b.c")]})
    inventory = scan(GenericPlugin(config), Host(tmp_path))
    names = {device.cdi.qualified_name for device in inventory if device.cdi}
    assert len(names) == 2
    assert all(name.startswith("squat.ai/generic=") for name in names)
    assert all(device.nodes for device in inventory)


def test_files_that_are_no_device_nodes_are_skipped_on_a_real_host(tmp_path: Path) -> None:
    directory = tmp_path / "dev"
    write(directory / "plain", "")
    os.mkfifo(directory / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))
    (directory / "directory").mkdir()
    (directory / "null").symlink_to("/dev/null")
    inventory = scan(plugin({"paths": [{"path": f"{directory}/*"}]}), Host())
    assert files(inventory) == [[f"{directory}/directory"], [f"{directory}/null"]]
    assert [reason.partition(": ")[2].partition(",")[0] for reason in reasons(inventory)] == [
        "found no device node and no directory"
    ] * 3
    assert all(skipped.warning for skipped in inventory.skipped)


def test_names_that_the_kubelet_would_reject_are_skipped(tmp_path: Path) -> None:
    dev(tmp_path, "a", "b\n")
    (tmp_path / "dev" / os.fsdecode(b"c\xff")).touch()
    inventory = found(tmp_path, {"paths": [{"path": "/dev/*"}]})
    assert files(inventory) == [["/dev/a"]]
    assert [skipped.subject for skipped in inventory.skipped] == ["/dev/b\\n", "/dev/c\\udcff"]


def test_the_number_of_ids_of_a_resource_is_limited(tmp_path: Path) -> None:
    dev(tmp_path, "a", "b")
    inventory = found(tmp_path, {"count": MAX_DEVICES, "paths": [{"path": "/dev/*"}]})
    assert len(inventory.resources["thing"]) == MAX_DEVICES
    assert reasons(inventory) == ["/dev/b: thing has more than 10000 device IDs, expected at most that; reduce count"]


def test_numa_nodes_of_the_configuration_replace_those_of_the_hardware(tmp_path: Path) -> None:
    dev(tmp_path, "a")
    paths = [{"path": "/dev/a"}]
    assert one(tmp_path, {"paths": paths, "numaNodes": [1]}).topology == (1,)
    assert one(tmp_path, {"paths": paths, "numaNodes": []}).topology is None


def test_directories_of_paths_without_a_pattern_are_watched() -> None:
    groups = {"paths": [{"path": "/dev/serial/by-id/meter"}, {"path": "/dev/fuse"}, {"path": "/dev/tty*"}]}
    assert plugin(groups).watch.directories == ["/dev", "/dev/serial/by-id"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("/dev/tty[^0-4]", "/dev/tty[!0-4]"), (r"/dev/a\*b\?\[\\", r"/dev/a[*]b[?][[]" + "\\"), (" /dev/a ", "/dev/a")],
)
def test_patterns_of_go_are_understood(pattern: str, expected: str) -> None:
    assert pattern_of(pattern) == expected


NAMES = st.sampled_from(("a0", "a1", "b0", "b1", "c", ".d"))
KINDS = st.sampled_from(("file", "directory", "nodes", "link", "dangling", "loop", "up"))
PATTERNS = st.sampled_from(
    ("/dev/a*", "/dev/*", "/dev/a0", "/dev/a?", "/dev/*/b*", "/dev/[ab]1", "/dev/[", "/dev/.d", "/dev/c/c", "/*/c")
)
PATH = st.fixed_dictionaries(
    {"path": PATTERNS},
    optional={
        "type": st.sampled_from(("Device", "Mount")),
        "limit": st.integers(0, 3),
        "optional": st.booleans(),
        "mountPath": st.just("/dev/x"),
    },
)
GROUP = st.fixed_dictionaries(
    {"paths": st.lists(PATH, min_size=1, max_size=3).filter(lambda paths: not all(p.get("optional") for p in paths))},
    optional={"count": st.integers(0, 4)},
)


def grow(root: Path, tree: dict[str, str]) -> None:
    (root / "dev").mkdir(parents=True)
    for name, kind in tree.items():
        path = root / "dev" / name
        match kind:
            case "file":
                path.touch()
            case "directory":
                path.mkdir()
            case "nodes":
                write(path / "b0", "")
                write(path / "c", "")
            case "link":
                path.symlink_to("a0")
            case "dangling":
                path.symlink_to("gone")
            case "loop":
                path.symlink_to(name)
            case _:
                path.symlink_to("../../../../../../etc")


@given(
    tree=st.dictionaries(NAMES, KINDS),
    groups=st.lists(GROUP, min_size=1, max_size=3),
    cdi=st.sampled_from(("off", "all")),
)
def test_scans_of_odd_trees_are_consistent(
    tree: dict[str, str], groups: list[dict[str, object]], cdi: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("odd")
    grow(root, tree)
    subject = plugin(*groups, cdi=cdi)
    inventory = scan(subject, Host(root))
    assert inventory == scan(subject, Host(root))
    shares: dict[tuple[str, str], int] = {}
    for device in inventory:
        for part in (*device.nodes, *device.mounts):
            assert part.host_path.startswith("/dev/")
            assert Host(root).exists(part.host_path)
        shares[device.unit, device.id] = shares.get((device.unit, device.id), 0) + 1
    assert set(shares.values()) <= {1}
    for device in inventory:
        if device.cdi is not None:
            real = [Host(root).resolve(node.host_path) for node in device.cdi.nodes]
            assert real == [node.host_path for node in device.cdi.nodes]
    assert all(skipped.reason for skipped in inventory.skipped)


@given(st.text(max_size=20).map(lambda text: "/" + text))
def test_any_pattern_is_rejected_or_scanned(pattern: str) -> None:
    with contextlib.suppress(ValueError):
        scan(plugin({"paths": [{"path": pattern}]}), Host("/nowhere"))
