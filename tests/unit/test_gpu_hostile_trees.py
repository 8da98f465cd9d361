"""With any files at the path of a card, a scan neither raises nor publishes another card's files."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from trees import gpu_card, npu

from accelplane.devices import Device, Inventory, Skipped
from accelplane.host import Host, HostError
from accelplane.plugins.base import Config, Plugin, ScanError
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.npu import NpuConfig, NpuPlugin

pytestmark = pytest.mark.memory

SPOTS = st.sampled_from(
    [
        *(f"sys/class/drm/card0/{name}" for name in ("device", "device/vendor", "device/device", "device/driver")),
        *(f"sys/class/drm/card0/device/{name}" for name in ("drm", "drm/card0", "drm/renderD128", "sriov_numvfs")),
        *(f"sys/class/drm/card0/device/{name}" for name in ("physfn", "numa_node", "local_cpulist", "slaves")),
        *(f"sys/class/drm/card0/device/{name}" for name in ("i915.mei-x", "i915.mei-x/mei", "i915.mei-x/mei/mei0")),
        *("sys/class/drm/card0", "sys/class/drm", "sys/class/drm/card" + 250 * "0", "sys/devices"),
        *("dev/dri/card0", "dev/dri/renderD128", "dev/dri", "dev/dri/by-path"),
        *(f"dev/dri/by-path/pci-0000:03:00.0-{name}" for name in ("card", "render", "\udcff", "x" * 200)),
        *(f"sys/class/accel/accel0/device/{name}" for name in ("vendor", "device", "driver", "npu_busy_time_us")),
        *(
            "sys/class/accel",
            "sys/class/accel/accel0",
            "sys/class/accel/accel0/device",
            "dev/accel",
            "dev/accel/accel0",
        ),
    ]
)


def removed(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
    else:
        os.rename(path, f"{path}.moved")


def make_empty(path: str) -> None:
    removed(path)
    os.mkdir(path)


def fifo(path: str) -> None:
    removed(path)
    os.mkfifo(path)


def deep(path: str) -> None:
    removed(path)
    os.makedirs(f"{path}/card0/device/drm/card0/\udcfe")


def make_file(content: bytes) -> Callable[[str], None]:
    def fill(path: str) -> None:
        removed(path)
        Path(path).write_bytes(content)

    return fill


def linked(target: str) -> Callable[[str], None]:
    def make(path: str) -> None:
        removed(path)
        os.symlink(target, path)

    return make


DEEDS = st.one_of(
    st.sampled_from([removed, make_empty, fifo, deep, make_file(b"7" * 70_000), make_file(b"9" * 5_000)]),
    st.binary(max_size=40).map(make_file),
    st.sampled_from(
        [
            *(".", "..", "/", "../../../..", "/sys/class/drm/card1", "/sys/class/drm/card1/device", "/dev/dri/card1"),
            *(
                "/etc/passwd",
                "loop",
                "device",
                "card0",
                "vendor",
                "\udcff",
                "/dev/dri/by-path",
                "0000:00:02.0",
                "x/" * 2000,
            ),
        ]
    ).map(linked),
)


def apply_change(root: str, location: str, change: Callable[[str], None]) -> None:
    """Applies the change at the location, if it still exists."""
    try:
        os.makedirs(f"{root}/{os.path.dirname(location)}", exist_ok=True)
        if not os.path.lexists(f"{root}/{location}"):
            Path(f"{root}/{location}").touch()
        change(f"{root}/{location}")
    except OSError:
        pass


def scan_plugin(plugin: Plugin[Config], root: str) -> tuple[list[object], Host] | str:
    host = Host(root)
    try:
        return list(plugin.scan(host)), host
    except (HostError, ScanError) as error:
        return str(error)


CONFIGS = st.builds(
    GpuConfig,
    enable_monitoring=st.booleans(),
    bypath=st.sampled_from(["single", "links", "all", "none"]),
    deny_ids=st.sampled_from(["", "0x1234"]),
    cdi=st.sampled_from(["auto", "all", "only"]),
)


@given(st.lists(st.tuples(SPOTS, DEEDS), min_size=1, max_size=5), CONFIGS)
@settings(max_examples=examples(150), deadline=None)
def test_an_inconsistent_tree_raises_no_exception(
    tmp_path: Path, changes: list[tuple[str, Callable[[str], None]]], config: GpuConfig
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as root:
        gpu_card(Path(root), 0, mei=("mei0",))
        gpu_card(Path(root), 1, driver="xe")
        npu(Path(root), 0, busy_us=7)
        for location, change in changes:
            apply_change(root, location, change)
        for plugin in (GpuPlugin(config), NpuPlugin(NpuConfig(accept_unknown_ids=True))):
            first, second = scan_plugin(plugin, root), scan_plugin(plugin, root)
            if isinstance(first, str) or isinstance(second, str):
                assert first == second
                continue
            (found, host), (again, other) = first, second
            assert found == again
            assert host.notes == other.notes
            inventory = Inventory.of([item for item in found if isinstance(item, (Device, Skipped))])
            list(plugin.measure(host, inventory))
            for device in inventory:
                check_ownership(device)
                for text in (*(node.host_path for node in device.nodes), *(mount.host_path for mount in device.mounts)):
                    assert text.startswith("/dev/")
                    text.encode()


def check_ownership(device: Device) -> None:
    """A card publishes only its own device nodes."""
    if device.unit.startswith("card"):
        nodes = {node.host_path for node in (*device.nodes, *(device.cdi.nodes if device.cdi else ()))}
        cards = {path for path in nodes if path.startswith("/dev/dri/card")}
        assert cards <= {f"/dev/dri/{device.unit}"}
        if device.unit == "card1":
            assert not any("0000:03:00.0" in mount.host_path for mount in device.mounts)
