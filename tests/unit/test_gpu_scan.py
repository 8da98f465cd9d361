"""The GPU scan on trees of plain files, table by table of the specification."""

from pathlib import Path
from typing import Any

import pytest
from trees import gpu_card, link, write

from accelplane.devices import CdiDevice, CdiHook, CdiMount, CdiNode, Device, DeviceNode, Mount, Skipped
from accelplane.host import Host, Unreadable
from accelplane.plugins.gpu import GpuConfig, GpuPlugin

pytestmark = pytest.mark.memory


class Scan:
    """The result of one scan."""

    def __init__(self, root: Path | str, **options: Any) -> None:
        host = Host(root)
        items = list(GpuPlugin(GpuConfig(**options)).scan(host))
        self.devices = [item for item in items if isinstance(item, Device)]
        self.skipped = {item.subject: item for item in items if isinstance(item, Skipped)}
        self.notes = host.notes

    @property
    def names(self) -> list[str]:
        return [f"{device.resource}/{device.id}" for device in self.devices]

    @property
    def one(self) -> Device:
        (device,) = self.devices
        return device


def paths(device: Device) -> list[str]:
    return [node.host_path for node in device.nodes]


def test_a_card_is_published_under_its_driver_with_nodes_links_and_a_cdi_device(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0, driver="xe", address="0000:00:02.0", numa=1, device_id="0x56C0")
    nodes = ("/dev/dri/card0", "/dev/dri/renderD128")
    links = ("/dev/dri/by-path/pci-0000:00:02.0-card", "/dev/dri/by-path/pci-0000:00:02.0-render")
    assert Scan(tmp_path).one == Device(
        resource="xe",
        id="card0-0",
        unit="card0",
        nodes=[DeviceNode(path) for path in nodes],
        mounts=[Mount(path) for path in links],
        cdi=CdiDevice(
            kind="intel.cdi.k8s.io/gpu",
            name="card0",
            nodes=[CdiNode(path, path) for path in nodes],
            mounts=[CdiMount(path, path, "none", ("bind", "ro")) for path in links],
        ),
        topology=(1,),
        attributes={
            "driver": "xe",
            "bdf": "0000:00:02.0",
            "kind": "integrated",
            "device-id": "0x56c0",
            "function": "pf",
        },
        path="/sys/class/drm/card0/device",
    )


def test_shares_of_a_card_differ_only_in_their_id(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0)
    shares = Scan(tmp_path, shared_dev_num=3).devices
    assert [device.id for device in shares] == ["card0-0", "card0-1", "card0-2"]
    assert {(device.unit, device.nodes, device.mounts, device.topology) for device in shares} == {
        ("card0", shares[0].nodes, shares[0].mounts, (0,))
    }


def test_cards_of_two_drivers_are_two_resources(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0)
    gpu_card(tmp_path, 1, driver="xe")
    gpu_card(tmp_path, 10, driver=None)
    scan = Scan(tmp_path)
    assert scan.names == ["i915/card0-0", "xe/card1-0", "i915/card10-0"]
    assert any("card10: driver unknown, assuming i915" in note for note in scan.notes)


def test_connectors_render_nodes_and_the_version_file_are_ignored(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0)
    for name in ("card0-DP-1", "renderD128", "xcard1", "card", "card1x"):
        (tmp_path / "sys/class/drm" / name).mkdir()
    write(tmp_path / "sys/class/drm/version", "drm 1.1.0 20060810\n")
    scan = Scan(tmp_path)
    assert scan.names == ["i915/card0-0"]
    assert not scan.skipped


def test_no_drm_class_is_no_devices(tmp_path: Path) -> None:
    assert not Scan(tmp_path, enable_monitoring=True).devices


def test_a_drm_class_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "sys/class/drm", "")
    with pytest.raises(Unreadable, match="/sys/class/drm"):
        Scan(tmp_path)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"vendor": "0x10de"}, "vendor '0x10de' is not Intel"),
        ({"vfs": "7"}, "sriov_numvfs is '7': the virtual functions are published"),
        ({"vfs": ""}, "sriov_numvfs is '', expected a number"),
        ({"vfs": "junk"}, "sriov_numvfs is 'junk', expected a number"),
    ],
)
def test_a_card_that_is_excluded_by_design_is_skipped_without_a_warning(
    tmp_path: Path, facts: dict[str, str], reason: str
) -> None:
    gpu_card(tmp_path, 0, **facts)  # pyright: ignore[reportArgumentType] - a table of keyword arguments
    scan = Scan(tmp_path, enable_monitoring=True)
    assert not scan.devices
    assert reason in scan.skipped["card0"].reason
    assert not scan.skipped["card0"].warning


def test_a_physical_function_names_the_drivers_of_virtual_functions_that_are_no_cards(tmp_path: Path) -> None:
    function = gpu_card(tmp_path, 0, vfs="2")
    for index, driver in enumerate(("vfio-pci", None)):
        other = function.parent / f"0000:03:00.{index + 1}"
        other.mkdir()
        link(function / f"virtfn{index}", other)
        if driver is not None:
            link(other / "driver", tmp_path / "sys/bus/pci/drivers" / driver)
    assert Scan(tmp_path).skipped["card0"].reason == (
        "sriov_numvfs is 2, and the virtual functions are bound to no driver, vfio-pci: none is a card"
    )


def test_a_card_that_is_no_pci_device_is_skipped_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "sys/class/drm/card0/device").mkdir(parents=True)
    skipped = Scan(tmp_path).skipped["card0"]
    assert "vendor does not exist, expected a PCI device" in skipped.reason
    assert not skipped.warning


def test_a_virtual_function_whose_physical_function_is_invisible_is_a_virtual_function(tmp_path: Path) -> None:
    link(gpu_card(tmp_path, 0) / "physfn", "../0000:ff:00.0")
    assert Scan(tmp_path, functions="vf").names == ["i915/card0-0"]


@pytest.mark.parametrize("vfs", ["0", "-1"])
def test_a_physical_function_without_virtual_functions_is_published(tmp_path: Path, vfs: str) -> None:
    gpu_card(tmp_path, 0, vfs=vfs)
    assert Scan(tmp_path).names == ["i915/card0-0"]


def test_virtual_functions_replace_their_physical_function(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0, vfs="2")
    gpu_card(tmp_path, 1, physfn=True)
    gpu_card(tmp_path, 2, physfn=True)
    scan = Scan(tmp_path)
    assert scan.names == ["i915/card1-0", "i915/card2-0"]
    assert {device.attributes["function"] for device in scan.devices} == {"vf"}


def test_a_card_without_a_driver_is_skipped_without_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "sys/class/drm/card0/device/vendor", "0x8086")
    skipped = Scan(tmp_path).skipped["card0"]
    assert "drm does not exist" in skipped.reason
    assert not skipped.warning


def test_a_card_whose_vendor_cannot_be_read_is_skipped_with_a_warning(tmp_path: Path) -> None:
    write(gpu_card(tmp_path, 0) / "vendor", b"\xff\xfe")
    gpu_card(tmp_path, 1)
    scan = Scan(tmp_path)
    assert scan.names == ["i915/card1-0"]
    assert scan.skipped["card0"].warning
    assert "vendor" in scan.skipped["card0"].reason


def test_containers_get_existing_nodes_but_no_control_nodes(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0, nodes=("card0", "controlD64", "renderD128", "renderD129"), by_path=False)
    (tmp_path / "dev/dri/renderD129").unlink()
    assert paths(Scan(tmp_path).one) == ["/dev/dri/card0", "/dev/dri/renderD128"]


def test_a_card_without_a_node_is_skipped_without_a_warning(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0, nodes=())
    skipped = Scan(tmp_path).skipped["card0"]
    assert "no device node in /dev/dri" in skipped.reason
    assert not skipped.warning


def test_containers_do_not_get_nodes_of_another_card(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0, nodes=("card0", "card1"), by_path=False)
    write(tmp_path / "dev/dri/card1", "")
    assert paths(Scan(tmp_path).one) == ["/dev/dri/card0"]


def test_names_that_are_not_utf8_are_skipped(tmp_path: Path) -> None:
    function = gpu_card(tmp_path, 0, mei=("mei0", "mei\udcff"))
    (function / "drm/renderD\udcff").mkdir()
    write(tmp_path / "dev/dri/renderD\udcff", "")
    link(tmp_path / "dev/dri/by-path/pci-0000:03:00.0-\udcff", "../card0")
    card, monitoring = Scan(tmp_path, enable_monitoring=True, monitoring_mode="single").devices
    assert paths(monitoring) == ["/dev/dri/card0", "/dev/dri/renderD128", "/dev/mei0"]
    assert len(card.nodes) == len(card.mounts) == 2


def test_the_tree_of_the_fake_device_generator_is_scanned(tmp_path: Path) -> None:
    card = tmp_path / "sys/class/drm/card0"
    write(card / "device/vendor", "0x8086")
    write(card / "device/numa_node", "1")
    for node in ("card0", "renderD128"):
        (card / "device/drm" / node).mkdir(parents=True)
        write(tmp_path / "dev/dri" / node, "")
    device = Scan(tmp_path).one
    assert (device.resource, device.topology, device.mounts) == ("i915", (1,), ())
    assert device.attributes == {"driver": "i915", "function": "pf"}


class TestPrefix:
    @pytest.mark.parametrize("prefix", ["/fake", "/fake/", "//fake/./"])
    def test_the_prefix_is_part_of_every_path_in_a_response(self, tmp_path: Path, prefix: str) -> None:
        gpu_card(tmp_path / "fake", 0, driver="i915", mei=("mei0",))
        scan = Scan(tmp_path, prefix=prefix, enable_monitoring=True, monitoring_mode="single")
        card, monitoring = scan.devices
        assert paths(card) == ["/fake/dev/dri/card0", "/fake/dev/dri/renderD128"]
        assert card.nodes[0].container_path == "/fake/dev/dri/card0"
        assert card.mounts[0] == Mount("/fake/dev/dri/by-path/pci-0000:03:00.0-card")
        assert paths(monitoring)[-1] == "/fake/dev/mei0"

    def test_the_prefix_may_be_the_root_directory(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0)
        device = Scan("/", prefix=str(tmp_path)).one
        assert paths(device)[0] == f"{tmp_path}/dev/dri/card0"
        assert device.mounts[0].host_path == f"{tmp_path}/dev/dri/by-path/pci-0000:03:00.0-card"

    def test_the_prefix_is_part_of_the_watched_directories(self) -> None:
        assert GpuPlugin(GpuConfig(prefix="/fake")).watch.directories == (
            "/fake/sys/class/drm",
            "/fake/dev/dri",
            "/fake/dev/dri/by-path",
        )


class TestByPath:
    def links(self, root: Path, **options: Any) -> list[str]:
        return [mount.host_path.removeprefix("/dev/dri/by-path/") for mount in Scan(root, **options).one.mounts]

    @pytest.mark.parametrize("mode", ["single", "anything else"])
    def test_single_mounts_the_links_to_the_nodes_of_the_card(self, tmp_path: Path, mode: str) -> None:
        gpu_card(tmp_path, 0)
        link(tmp_path / "dev/dri/by-path/pci-0000:99:00.0-card", "../card0")
        assert self.links(tmp_path, bypath=mode) == ["pci-0000:03:00.0-card", "pci-0000:03:00.0-render"]

    def test_none_mounts_nothing(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0)
        assert self.links(tmp_path, bypath="none") == []

    def test_all_mounts_the_directory_also_for_a_card_without_links(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0, by_path=False)
        (tmp_path / "dev/dri/by-path").mkdir()
        assert Scan(tmp_path, bypath="all").one.mounts == (Mount("/dev/dri/by-path"),)

    @pytest.mark.parametrize("mode", ["single", "all", "links"])
    def test_a_missing_directory_is_reported_once_and_used_after_it_appears(self, tmp_path: Path, mode: str) -> None:
        gpu_card(tmp_path, 0, by_path=False)
        gpu_card(tmp_path, 1, by_path=False)
        before = Scan(tmp_path, bypath=mode)
        link(tmp_path / "dev/dri/by-path/pci-0000:03:00.0-card", "../card0")
        after = Scan(tmp_path, bypath=mode)
        assert [note for note in before.notes if "no by-path links" in note] == before.notes[:1]
        assert before.devices[0] != after.devices[0]

    @pytest.mark.parametrize(
        "target", ["../card7", "../../nowhere", "pci-0000:03:00.0-platform-simple-framebuffer.0-card", "/etc/passwd"]
    )
    def test_a_link_to_another_target_is_skipped_and_reported(self, tmp_path: Path, target: str) -> None:
        gpu_card(tmp_path, 0)
        name = "pci-0000:03:00.0-platform-simple-framebuffer.0-card"
        link(tmp_path / "dev/dri/by-path" / name, target)
        scan = Scan(tmp_path)
        assert len(scan.one.mounts) == 2
        assert [note for note in scan.notes if name in note]

    def test_a_domain_of_five_digits_is_accepted(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0, address="10000:01:00.0")
        assert self.links(tmp_path) == ["pci-10000:01:00.0-card", "pci-10000:01:00.0-render"]

    @pytest.mark.parametrize(
        ("target", "known"),
        [
            ("../../devices/pci0000:00/0000:00:02.0/drm/card0", True),
            ("../../devices/pci0000:00/0000:00:02.0/drm/card0/", True),
            ("../../devices/pci0000:00/0000:00:02.0", True),
            ("../../devices/pci0000:00/0000:00:02.0/drm", False),
            ("../../devices/pci0000:00/0000:00:02.0/card0", False),
            ("../../devices/pci0000:00/000:00:02.0", False),
        ],
    )
    def test_the_address_is_read_from_the_target_of_the_class_link(
        self, tmp_path: Path, target: str, known: bool
    ) -> None:
        card = tmp_path / "sys/class/drm/card0"
        link(card, target)
        real = (card.parent / target).absolute()
        write(real / "device/vendor", "0x8086")
        (real / "device/drm/card0").mkdir(parents=True)
        write(tmp_path / "dev/dri/card0", "")
        link(tmp_path / "dev/dri/by-path/pci-0000:00:02.0-card", "../card0")
        assert self.links(tmp_path) == (["pci-0000:00:02.0-card"] if known else [])

    def test_links_mode_has_a_hook_with_the_links_of_the_host(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0)
        device = Scan(tmp_path, bypath="links", cdi_hook="/opt/hook").one
        assert device.mounts == ()
        assert device.cdi is not None
        assert device.cdi.mounts == ()
        assert device.cdi.hooks == (
            CdiHook(
                "createContainer",
                "/opt/hook",
                (
                    "hook",
                    "create-symlinks",
                    "--link",
                    "../card0::/dev/dri/by-path/pci-0000:03:00.0-card",
                    "--link",
                    "../renderD128::/dev/dri/by-path/pci-0000:03:00.0-render",
                ),
            ),
        )

    def test_a_card_without_links_has_no_hook(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0, by_path=False)
        device = Scan(tmp_path, bypath="links").one
        assert device.cdi is not None
        assert device.cdi.hooks == ()


class TestFilters:
    @pytest.mark.parametrize(
        ("options", "published"),
        [
            ({"allow_ids": "0x56c0"}, ["card0"]),
            ({"allow_ids": "0x56C0, 0x7d55"}, ["card0", "card1"]),
            ({"deny_ids": "0x56c0"}, ["card1", "card2"]),
            ({"allow_bdfs": "0000:03:00.0"}, ["card0"]),
            ({"deny_bdfs": "0000:03:00.0"}, ["card1", "card2"]),
            ({"drivers": "xe"}, ["card2"]),
            ({"drivers": "xe,i915"}, ["card0", "card1", "card2"]),
            ({"kinds": "integrated"}, ["card1"]),
            ({"kinds": "discrete"}, ["card0", "card2"]),
            ({"functions": "vf"}, ["card2"]),
            ({"functions": "pf", "kinds": "discrete"}, ["card0"]),
        ],
    )
    def test_the_filters_select_cards_by_pci_id(
        self, tmp_path: Path, options: dict[str, str], published: list[str]
    ) -> None:
        gpu_card(tmp_path, 0, device_id="0x56c0")
        gpu_card(tmp_path, 1, device_id="0x7d55", address="0000:00:02.0")
        gpu_card(tmp_path, 2, device_id="0x56c", driver="xe", physfn=True)
        scan = Scan(tmp_path, **options)
        assert [device.unit for device in scan.devices] == published
        for skipped in scan.skipped.values():
            assert skipped.reason.startswith("filtered: ")
            assert not skipped.warning

    @pytest.mark.parametrize("option", ["allow_ids", "deny_ids"])
    def test_a_card_without_a_readable_id_is_skipped_with_a_warning_if_ids_are_filtered(
        self, tmp_path: Path, option: str
    ) -> None:
        gpu_card(tmp_path, 0, device_id=None)
        assert Scan(tmp_path).names == ["i915/card0-0"]
        skipped = Scan(tmp_path, **{option: "0x56c0"}).skipped["card0"]
        assert skipped.warning
        assert "device/device" in skipped.reason

    def test_only_the_first_line_of_an_id_counts(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0, device_id="0x56c0\nmore")
        assert Scan(tmp_path, allow_ids="0x56c0").names == ["i915/card0-0"]

    def test_virtual_functions_of_an_integrated_gpu_are_integrated(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0, address="0000:00:02.1", physfn=True)
        assert Scan(tmp_path).one.attributes["kind"] == "integrated"


class TestMonitoring:
    def tree(self, root: Path) -> None:
        gpu_card(root, 0, mei=("mei0", "mei1"), numa=0)
        gpu_card(root, 1, driver="xe", mei=("mei2",), numa=1)
        gpu_card(root, 2, vfs="1")

    def monitoring(self, root: Path, **options: Any) -> dict[str, Device]:
        scan = Scan(root, enable_monitoring=True, **options)
        return {device.resource: device for device in scan.devices if device.id == "all"}

    def test_single_is_one_resource_with_all_nodes_of_all_published_cards(self, tmp_path: Path) -> None:
        self.tree(tmp_path)
        nodes = ("dri/card0", "dri/renderD128", "mei0", "mei1", "dri/card1", "dri/renderD129", "mei2")
        assert self.monitoring(tmp_path, monitoring_mode="single", shared_dev_num=2) == {
            "monitoring": Device(
                resource="monitoring",
                id="all",
                nodes=[DeviceNode(f"/dev/{node}") for node in nodes],
                topology=None,
                path=None,
            )
        }

    def test_split_is_one_resource_per_driver(self, tmp_path: Path) -> None:
        self.tree(tmp_path)
        resources = self.monitoring(tmp_path, monitoring_mode="split")
        assert {resource: paths(device)[0] for resource, device in resources.items()} == {
            "i915_monitoring": "/dev/dri/card0",
            "xe_monitoring": "/dev/dri/card1",
        }

    def test_the_default_publishes_the_resources_of_both_modes(self, tmp_path: Path) -> None:
        self.tree(tmp_path)
        assert set(self.monitoring(tmp_path)) == {"monitoring", "i915_monitoring", "xe_monitoring"}

    def test_there_is_no_monitoring_resource_without_a_card(self, tmp_path: Path) -> None:
        gpu_card(tmp_path, 0, vfs="1")
        assert self.monitoring(tmp_path) == {}

    def test_an_unreadable_management_engine_removes_only_its_nodes(self, tmp_path: Path) -> None:
        write(gpu_card(tmp_path, 0, mei=("mei0",)) / "xe.mei-broken.1/mei", "")
        assert paths(self.monitoring(tmp_path)["monitoring"])[-1] == "/dev/mei0"


class TestCdi:
    def cdi_by_resource(self, root: Path, cdi: str) -> dict[str, tuple[bool, str]]:
        """By resource: whether there are classic nodes, and the CDI name."""
        scan = Scan(root, cdi=cdi, enable_monitoring=True)
        return {
            device.resource: (bool(device.nodes), device.cdi.qualified_name if device.cdi else "")
            for device in scan.devices
        }

    @pytest.mark.parametrize(
        ("mode", "card", "monitoring"),
        [
            ("auto", (True, "intel.cdi.k8s.io/gpu=card0"), (True, "")),
            ("off", (True, ""), (True, "")),
            ("all", (True, "intel.cdi.k8s.io/gpu=card0"), (True, "intel.cdi.k8s.io/gpu=monitoring")),
            ("only", (False, "intel.cdi.k8s.io/gpu=card0"), (False, "intel.cdi.k8s.io/gpu=monitoring")),
        ],
    )
    def test_cdi_mode_selects_device_specs_or_cdi_names(
        self, tmp_path: Path, mode: str, card: tuple[bool, str], monitoring: tuple[bool, str]
    ) -> None:
        gpu_card(tmp_path, 0)
        carried = self.cdi_by_resource(tmp_path, mode)
        assert carried["i915"] == card
        assert carried["monitoring"] == monitoring

    @pytest.mark.parametrize("mode", ["auto", "all", "only"])
    @pytest.mark.parametrize("bypath", ["single", "all", "links", "none"])
    def test_every_cdi_device_is_valid(self, tmp_path: Path, mode: str, bypath: str) -> None:
        gpu_card(tmp_path, 0)
        for device in Scan(tmp_path, cdi=mode, bypath=bypath, enable_monitoring=True).devices:
            if device.cdi is not None:
                device.cdi.check()
