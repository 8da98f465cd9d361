"""Simulated trees, read through `Host` as by plugins."""

import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from accelplane.host import Host
from accelplane.host.inotify import Inotify
from accelplane.simulate import GpuSpec, NodeSpec, NpuSpec, SimulatedNode, TreeError

pytestmark = pytest.mark.memory

CONFIGS = Path(__file__).parents[2] / "src/accelplane/simulate/configs"


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_card_is_found_by_class_bus_number_and_name(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).plug_gpu(GpuSpec(bdf="0000:00:02.0"))
    host = Host(tmp_path)
    function = "/sys/devices/pci0000:00/0000:00:02.0"
    card = f"{function}/drm/card0"
    assert host.resolve("/sys/class/drm/card0") == card
    assert host.resolve("/sys/dev/char/226:0") == card
    assert host.resolve("/sys/dev/char/226:128") == f"{function}/drm/renderD128"
    assert host.resolve("/sys/class/drm/card0/device") == function
    assert host.resolve("/sys/bus/pci/devices/0000:00:02.0") == function
    assert host.resolve("/sys/bus/pci/drivers/i915/0000:00:02.0") == function
    assert host.names("/sys/class/drm") == ["card0", "renderD128", "version"]
    assert host.names(f"{function}/drm") == ["card0", "renderD128"]


def test_both_ways_of_reading_the_pci_address_give_it(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).plug_gpu(GpuSpec(bdf="0042:01:02.0"))
    host = Host(tmp_path)
    assert host.link("/sys/class/drm/card0").removesuffix("/drm/card0").rpartition("/")[2] == "0042:01:02.0"
    assert host.link("/sys/class/drm/card0/device") == "../../../0042:01:02.0"


@pytest.mark.parametrize(
    ("spec", "driver", "device", "connectors"),
    [
        (GpuSpec(), "i915", "0x56c0", []),
        (GpuSpec(driver="xe"), "xe", "0xe20b", ["card0-DP-1"]),
        (GpuSpec(driver="xe", device_id="0x0bd5", pci_class="0x038000"), "xe", "0x0bd5", []),
        (GpuSpec(connectors=["HDMI-A-1", "DP-2"]), "i915", "0x56c0", ["card0-DP-2", "card0-HDMI-A-1"]),
    ],
)
def test_a_card_has_its_model_attributes(
    tmp_path: Path, spec: GpuSpec, driver: str, device: str, connectors: list[str]
) -> None:
    node = SimulatedNode(tmp_path)
    node.plug_gpu(spec)
    host = Host(tmp_path)
    assert host.text("/sys/class/drm/card0/device/vendor") == "0x8086"
    assert host.text("/sys/class/drm/card0/device/device") == device
    assert host.driver("/sys/class/drm/card0/device") == driver
    assert [name for name in host.names("/sys/class/drm") if "-" in name] == connectors
    uevent = host.text("/sys/class/drm/card0/device/uevent").splitlines()
    assert {f"DRIVER={driver}", f"PCI_SLOT_NAME={node.device('card0').bdf}"} <= set(uevent)
    assert all(host.link(f"/sys/class/drm/{name}/device") == "../../card0" for name in connectors)
    functions = [function.device for function in host.pci_devices("0x8086") if function.cls.startswith("0x03")]
    assert functions == [device]


def test_by_path_links_lead_to_the_cards_own_nodes(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    first = node.device(node.plug_gpu())
    node.plug_gpu(GpuSpec(by_path=False))
    host = Host(tmp_path)
    assert {name: host.resolve(f"/dev/dri/by-path/{name}") for name in host.names("/dev/dri/by-path")} == {
        f"pci-{first.bdf}-card": "/dev/dri/card0",
        f"pci-{first.bdf}-render": "/dev/dri/renderD128",
    }


@pytest.mark.parametrize(
    ("nodes", "numa_node", "expected"),
    [(1, None, (0,)), (2, None, (1,)), (0, None, None), (1, 3, (3,)), (2, -1, None)],
)
def test_numa_nodes_are_assigned_in_turn_by_default(
    tmp_path: Path, nodes: int, numa_node: int | None, expected: tuple[int, ...] | None
) -> None:
    node = SimulatedNode(tmp_path, numa_nodes=nodes)
    card = node.device(node.plug_gpu(GpuSpec(index=1, numa_node=numa_node)))
    npu = node.device(node.plug_npu(NpuSpec(index=1, numa_node=numa_node)))
    host = Host(tmp_path)
    for found in (
        host.topology_of("/sys/class/drm/card1"),
        host.topology_of_nodes(card.nodes),
        host.topology_of("/sys/class/accel/accel1"),
        host.topology_of_nodes(npu.nodes),
    ):
        assert found == expected
    assert host.notes == []


def test_virtual_functions_are_cards_that_lead_to_their_physical_one(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    physical = node.device(node.plug_gpu(GpuSpec(driver="xe", bdf="0000:03:00.0", vfs=9)))
    host = Host(tmp_path)
    virtual = node.devices()[1:]
    assert [device.name for device in virtual] == [f"card{index}" for index in range(1, 10)]
    assert (virtual[6].bdf, virtual[8].bdf) == ("0000:03:00.7", "0000:03:01.1")
    assert host.vf_count("/sys/class/drm/card0/device") not in ("0", "-1")
    for number, device in enumerate(virtual):
        assert device.physical == "card0"
        assert host.is_vf(f"/sys/class/drm/{device.name}/device")
        assert host.vf_count(f"/sys/class/drm/{device.name}/device") in ("0", "-1")
        assert host.resolve(f"{device.path}/physfn") == physical.path
        assert host.resolve(f"{physical.path}/virtfn{number}") == device.path
        assert host.driver(f"/sys/class/drm/{device.name}/device") == "xe"


def test_a_card_without_virtual_functions_could_have_some(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).plug_gpu()
    host = Host(tmp_path)
    assert host.vf_count("/sys/class/drm/card0/device") == "0"
    assert int(host.text("/sys/class/drm/card0/device/sriov_totalvfs")) > 0


def test_tiles_and_memory_are_where_each_driver_shows_them(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.build(NodeSpec(gpus=[GpuSpec(tiles=2, memory=4096), GpuSpec(driver="xe", tiles=3, memory=4096)]))
    node.plug_gpu(GpuSpec(memory=0))
    host = Host(tmp_path)
    assert len(list(host.glob("/sys/class/drm/card0/gt/gt*"))) == 2
    assert host.text("/sys/class/drm/card0/lmem_total_bytes") == "4096"
    assert len(list(host.glob("/sys/class/drm/card1/device/tile?"))) == 3
    assert int(host.text("/sys/class/drm/card1/device/tile2/physical_vram_size_bytes"), 16) == 4096
    assert not host.exists("/sys/class/drm/card2/lmem_total_bytes")


def test_the_firmware_interface_is_numbered_as_the_kernel_does(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.plug_gpu(GpuSpec(driver="xe", bdf="0000:04:00.0"))
    node.plug_gpu(GpuSpec(mei=False))
    node.plug_gpu(GpuSpec(bdf="0000:04:00.1"))
    host = Host(tmp_path)
    assert [path.rpartition("device/")[2] for path in host.glob("/sys/class/drm/card*/device/*.mei-*/mei/*")] == [
        "xe.mei-gscfi.1024/mei/mei0",
        "i915.mei-gscfi.1025/mei/mei1",
    ]
    assert host.exists("/dev/mei0")
    assert host.resolve("/sys/class/mei/mei1").endswith("/i915.mei-gscfi.1025/mei/mei1")
    assert host.resolve("/sys/class/mei/mei1/device").endswith("/i915.mei-gscfi.1025")


def test_an_npu_is_an_accelerator_of_its_driver(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    name = node.plug_npu()
    host = Host(tmp_path)
    assert name == "accel0"
    assert host.text("/sys/class/accel/accel0/device/device") == "0x643e"
    assert host.driver("/sys/class/accel/accel0/device") == "intel_vpu"
    assert host.exists("/dev/accel/accel0")
    assert host.resolve("/sys/dev/char/261:0") == node.device("accel0").class_path


def test_unplugging_removes_all_files_of_a_device_and_none_of_the_others(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.plug_gpu(GpuSpec(index=5))
    node.plug_npu()
    before = everything(tmp_path)
    node.unplug(node.plug_gpu(GpuSpec(bdf="0000:06:01.0", vfs=2)))
    assert everything(tmp_path) == before
    node.unplug("accel0")
    node.unplug("card5")
    assert node.devices() == ()
    assert everything(tmp_path / "dev") == set()
    assert Host(tmp_path).names("/sys/class/drm") == ["version"]


def test_a_virtual_function_can_be_removed_alone(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.plug_gpu(GpuSpec(vfs=2))
    node.unplug("card1")
    assert [device.name for device in node.devices()] == ["card0", "card2"]
    host = Host(tmp_path)
    assert [path.rpartition("/")[2] for path in host.glob("/sys/class/drm/card0/device/virtfn*")] == ["virtfn1"]
    node.unplug("card0")
    assert node.devices() == ()


def test_numbers_that_became_free_are_used_again(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    assert [node.plug_gpu(), node.plug_gpu(), node.plug_gpu()] == ["card0", "card1", "card2"]
    node.unplug("card1")
    assert [node.plug_gpu(), node.plug_gpu()] == ["card1", "card3"]
    assert Host(tmp_path).names("/sys/class/mei") == ["mei0", "mei1", "mei2", "mei3"]


def test_device_nodes_of_a_card_are_created_last_and_removed_first(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.unplug(node.plug_gpu())
    (tmp_path / "dev/dri/by-path").mkdir(parents=True)
    (tmp_path / "dev/dri/keep").touch()
    inotify = Inotify()
    watched = {inotify.add(str(tmp_path / path)): path for path in ("sys/class/drm", "dev/dri", "sys/bus/pci/devices")}
    try:
        node.plug_gpu()
        node.unplug("card0")
        events = [(watched[event.watch], event.name) for event in inotify.read() if event.watch in watched]
    finally:
        inotify.close()
    events = [(path, name) for path, name in events if name not in ("by-path", "")]
    bus, card, render = ("sys/bus/pci/devices", "0000:01:00.0"), ("sys/class/drm", "card0"), ("dev/dri", "renderD128")
    additions, removals = events[: len(events) // 2], events[len(events) // 2 :]
    assert additions.index(bus) < additions.index(card) < additions.index(render)
    assert removals.index(render) < removals.index(card) < removals.index(bus)


def test_a_published_card_is_complete(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    done = threading.Event()
    broken: list[str] = []

    def look() -> None:
        while not done.is_set():
            try:
                cards = [name for name in os.listdir(tmp_path / "dev/dri") if name.startswith("card")]
            except FileNotFoundError:
                continue
            for card in cards:
                device = tmp_path / f"sys/class/drm/{card}/device"
                missing = [name for name in ("vendor", "uevent", "driver") if not (device / name).exists()]
                if missing and (tmp_path / "dev/dri" / card).exists():
                    broken.append(f"{card} without {missing}")

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for index in range(40):
            node.unplug(node.plug_gpu(GpuSpec(index=index)))
    finally:
        done.set()
        watcher.join()
    assert broken == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GpuSpec(index=0), "card0: already plugged in"),
        (GpuSpec(bdf="0000:01:00.0"), "0000:01:00.0: already exists"),
        (GpuSpec(bdf="0000:00:1f.7", vfs=1), "no address left on the bus for virtual function 0"),
        (GpuSpec(bdf="0000:01:00.7", vfs=120), "/sys/devices/pci0000:00/0000:00:1c.0/0000:01:01.0: already exists"),
    ],
)
def test_a_failed_plug_removes_all_files(tmp_path: Path, spec: GpuSpec, message: str) -> None:
    node = SimulatedNode(tmp_path)
    node.plug_gpu()
    node.plug_gpu(GpuSpec(bdf="0000:01:01.0"))
    before = everything(tmp_path), node.devices()
    with pytest.raises(TreeError, match=message):
        node.plug_gpu(spec)
    assert (everything(tmp_path), node.devices()) == before


@pytest.mark.parametrize("path", ["sys/class/drm/version", "sys/class/drm/card0", "dev/dri/renderD128", "dev/mei0"])
def test_a_conflicting_file_is_reported_and_kept(tmp_path: Path, path: str) -> None:
    directory = tmp_path / os.path.dirname(path)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if path.endswith("version"):
        directory.write_text("mine")
    else:
        directory.mkdir()
        (tmp_path / path).write_text("mine")
    before = (tmp_path / path).lstat().st_ino if directory.is_dir() else directory.stat().st_ino
    node = SimulatedNode(tmp_path)
    with pytest.raises(TreeError, match=f"/{path}: "):
        node.plug_gpu()
    assert ((tmp_path / path) if directory.is_dir() else directory).lstat().st_ino == before
    assert node.devices() == ()
    assert Host(tmp_path).names("/sys/bus/pci/devices") == ["0000:00:1c.0"]  # the root port may stay


def test_a_partially_removed_device_can_be_unplugged(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    node.plug_gpu()
    (tmp_path / "dev/dri/card0").unlink()
    shutil.rmtree(tmp_path / "sys/devices/pci0000:00/0000:00:1c.0/0000:01:00.0")
    node.unplug("card0")
    assert Host(tmp_path).names("/sys/class/drm") == ["version"]


def test_unplugging_an_unknown_device_lists_the_plugged_devices(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    with pytest.raises(TreeError, match="'card9': not plugged in, found no devices"):
        node.unplug("card9")
    node.plug_gpu()
    with pytest.raises(TreeError, match="found card0"):
        node.device("card9")


def test_a_root_that_is_not_writable_is_reported(tmp_path: Path) -> None:
    (tmp_path / "sys").write_text("in the way")
    with pytest.raises(TreeError, match="/sys/devices/pci0000:00"):
        SimulatedNode(tmp_path).plug_gpu()


def test_device_nodes_have_the_kernels_or_the_given_numbers(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "probe", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("needs CAP_MKNOD")
    real = SimulatedNode(tmp_path / "real", device_nodes="char", numa_nodes=2)
    card = real.device(real.plug_gpu(GpuSpec(index=1)))
    null = SimulatedNode(tmp_path / "null", device_nodes="char", numbers=(1, 3))
    null.plug_gpu()
    assert os.stat(f"{real.root}/dev/dri/renderD129").st_rdev == os.makedev(226, 129)
    assert os.stat(f"{null.root}/dev/dri/renderD128").st_rdev == os.makedev(1, 3)
    assert Host(real.root).topology_of_nodes(card.nodes) == (1,)


def test_hundreds_of_cards_have_addresses_and_numbers_of_their_own(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path, numa_nodes=3)
    for index in (*range(0, 1024, 7), 1023):
        node.plug_gpu(GpuSpec(index=index, mei=False, connectors=()))
    assert len({device.bdf for device in node.devices()}) == len(node.devices()) == 148
    assert len(list((tmp_path / "sys/dev/char").iterdir())) == 2 * 148


def test_the_demo_node_has_the_required_devices(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path)
    names = node.build(NodeSpec.load(CONFIGS / "demo.yaml"))
    assert names == ["card0", "card1", "card4", "card5", "accel0"]
    assert {(device.driver, device.numa_node) for device in node.devices() if device.kind == "gpu"} == {
        ("i915", 0),
        ("xe", 1),
    }
    assert [device.name for device in node.devices() if device.physical] == ["card2", "card3"]


steps = st.lists(
    st.one_of(
        st.builds(
            GpuSpec,
            driver=st.sampled_from(["i915", "xe"]),
            vfs=st.integers(0, 2),
            tiles=st.integers(1, 3),
            mei=st.booleans(),
            by_path=st.booleans(),
        ),
        st.builds(NpuSpec),
        st.integers(0, 5),
    ),
    max_size=8,
)


@settings(max_examples=examples(25), deadline=None)
@given(steps=steps)
def test_any_sequence_of_plugging_leaves_no_dangling_link(tmp_path: Path, steps: list[GpuSpec | NpuSpec | int]) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    node = SimulatedNode(root)
    for step in steps:
        if isinstance(step, GpuSpec):
            node.plug_gpu(step)
        elif isinstance(step, NpuSpec):
            node.plug_npu(step)
        elif node.devices():
            node.unplug(node.devices()[step % len(node.devices())].name)
    links = [path for path in root.rglob("*") if path.is_symlink()]
    assert [path for path in links if not path.exists()] == []
    assert [path for path in links if not path.resolve().is_relative_to(root)] == []
    cards = {device.name for device in node.devices() if device.kind == "gpu"}
    assert {path.name for path in root.glob("sys/class/drm/card*") if "-" not in path.name} == cards
    assert {path.name for path in root.glob("dev/dri/card*")} == cards
