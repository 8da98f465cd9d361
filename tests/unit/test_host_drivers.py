"""Driver binding, by its effect on the emulated kernel."""

import errno
import os
from pathlib import Path

import pytest
from kernelhost import KernelHost
from trees_qat import vf

from accelplane.host import Host, Missing, Unreadable, WriteError
from accelplane.host.drivers import BindError, bind, driver_of, vfio_group, vfio_group_is_open
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import QatSpec
from accelplane.simulate.specs import NodeSpec

PF, VF = "0000:61:00.0", "0000:61:00.1"
DEVICE = f"/sys/bus/pci/devices/{VF}"
VFIO = "/sys/bus/pci/drivers/vfio-pci"


class MountedHost(KernelHost):
    """The node in a container. Paths below `read_only` are not writable; `open_groups` are in use."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel, [])
        self.read_only: tuple[str, ...] = ()

    def write(self, path: str, text: str) -> None:
        if self.resolve(path).startswith(self.read_only):
            raise WriteError(path, os.strerror(errno.EROFS), errno.EROFS)
        super().write(path, text)


def host_of(*, model: str = "4xxx", **node: object) -> MountedHost:
    qat = QatSpec(model=model, bdf=PF, vfs=2)  # pyright: ignore[reportArgumentType] - one of the models
    return MountedHost(Kernel(NodeSpec(qats=[qat], **node)))  # pyright: ignore[reportArgumentType]


def manifest_host() -> MountedHost:
    """With the original manifests' mounts: drivers can be written to, functions cannot."""
    host = host_of()
    host.read_only = ("/sys/devices",)
    return host


def test_a_function_is_unbound_from_its_driver_and_bound_to_the_other() -> None:
    host = host_of()
    assert driver_of(host, VF) == "4xxxvf"
    bind(host, VF, "vfio-pci")
    assert driver_of(host, VF) == "vfio-pci"
    assert host.kernel.exists(f"/dev/vfio/{vfio_group(host, VF)}")
    assert driver_of(host, "0000:61:00.2") == "4xxxvf"


def test_a_function_without_driver_is_bound() -> None:
    host = host_of()
    host.kernel.write("/sys/bus/pci/drivers/4xxxvf/unbind", VF)
    bind(host, VF, "vfio-pci")
    assert driver_of(host, VF) == "vfio-pci"


def test_bound_functions_are_unchanged() -> None:
    host = host_of()
    bind(host, VF, "vfio-pci")
    host.writes.clear()
    bind(host, VF, "vfio-pci")
    assert host.writes == []


def test_an_unloaded_driver_is_reported_and_nothing_is_changed() -> None:
    host = host_of(loaded=())
    with pytest.raises(BindError, match=r"driver vfio-pci is not loaded, .*modprobe vfio-pci"):
        bind(host, VF, "vfio-pci")
    assert (driver_of(host, VF), host.writes) == ("4xxxvf", [])


def test_devices_on_the_denylist_keep_their_driver() -> None:
    host = host_of(model="c6xx")
    with pytest.raises(
        BindError, match="skipped: it is on vfio-pci's denylist; load the module with disable_denylist=1"
    ):
        bind(host, VF, "vfio-pci")
    assert (driver_of(host, VF), host.writes) == ("c6xxvf", [])


def test_without_a_denylist_it_is_bound() -> None:
    host = host_of(model="c6xx", disable_denylist=True)
    bind(host, VF, "vfio-pci")
    assert driver_of(host, VF) == "vfio-pci"


def test_without_an_iommu_it_stays_with_its_driver() -> None:
    host = host_of(iommu="off")
    with pytest.raises(BindError, match="no IOMMU is enabled"):
        bind(host, PF, "vfio-pci")
    assert (driver_of(host, PF), host.writes) == ("4xxx", [])


@pytest.mark.parametrize("kept_for", ["", "qat_vfio_pci"])
def test_a_function_rejected_by_the_driver_is_rolled_back_and_published_as_before(kept_for: str) -> None:
    host = host_of()
    host.kernel.write(f"{DEVICE}/driver_override", kept_for or "\n")
    host.kernel.fail(f"{VFIO}/bind", errno.EINVAL)
    with pytest.raises(BindError, match=r"cannot be bound to vfio-pci: .*bind: Invalid argument") as refusal:
        bind(host, VF, "vfio-pci")
    assert refusal.value.errno == errno.EINVAL
    # A function with an override for a missing driver would stay unbound.
    assert driver_of(host, VF) == ("" if kept_for else "4xxxvf")
    assert host.text(f"{DEVICE}/driver_override") == (kept_for or "(null)")


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EIO])
def test_a_function_that_its_driver_keeps_stays_there(number: int) -> None:
    host = host_of()
    host.kernel.fail("/sys/bus/pci/drivers/4xxxvf/unbind", number)
    with pytest.raises(BindError, match="4xxxvf/unbind"):
        bind(host, VF, "vfio-pci")
    assert driver_of(host, VF) == "4xxxvf"
    assert host.text(f"{DEVICE}/driver_override") == "(null)"


def test_an_unexpected_override_error_stops_the_binding() -> None:
    host = host_of()
    host.kernel.fail(f"{DEVICE}/driver_override", errno.EIO)
    with pytest.raises(BindError, match="to driver_override"):
        bind(host, VF, "vfio-pci", new_id=True)
    assert driver_of(host, VF) == "4xxxvf"


class TestWhereFunctionsCannotBeWrittenTo:
    def test_the_id_is_added_to_the_driver_during_binding(self) -> None:
        host = manifest_host()
        bind(host, VF, "vfio-pci", new_id=True)
        assert driver_of(host, VF) == "vfio-pci"
        assert host.writes[-2:] == [(f"{VFIO}/new_id", "8086 4941"), (f"{VFIO}/remove_id", "8086 4941")]
        assert driver_of(host, "0000:61:00.2") == "4xxxvf"

    def test_an_id_that_the_driver_has_is_sufficient(self) -> None:
        host = manifest_host()
        host.kernel.write(f"{VFIO}/new_id", "8086 4941")
        bind(host, VF, "vfio-pci")
        assert driver_of(host, VF) == "vfio-pci"

    def test_an_id_added_by_others_is_not_removed(self) -> None:
        host = manifest_host()
        host.kernel.write(f"{VFIO}/new_id", "8086 4941")
        host.kernel.fail(f"{VFIO}/bind", errno.ENODEV, times=1)
        bind(host, VF, "vfio-pci", new_id=True)
        assert driver_of(host, VF) == "vfio-pci"
        assert "remove_id" not in str(host.writes)

    def test_without_permission_for_new_id_the_function_is_restored(self) -> None:
        host = manifest_host()
        with pytest.raises(BindError, match="its driver_override could not be written"):
            bind(host, VF, "vfio-pci")
        assert driver_of(host, VF) == "4xxxvf"

    def test_a_rejected_id_leaves_the_function_unchanged(self) -> None:
        host = manifest_host()
        host.kernel.fail(f"{VFIO}/new_id", errno.EINVAL)
        with pytest.raises(BindError, match="new_id"):
            bind(host, VF, "vfio-pci", new_id=True)
        assert driver_of(host, VF) == "4xxxvf"

    def test_a_read_only_mount_changes_nothing(self) -> None:
        host = host_of()
        host.read_only = ("/sys",)
        with pytest.raises(BindError, match="Read-only file system"):
            bind(host, VF, "vfio-pci", new_id=True)
        assert driver_of(host, VF) == "4xxxvf"


class TestOpenGroup:
    def test_a_function_in_use_is_not_unbound(self) -> None:
        host = host_of(loaded=("vfio-pci", "igb_uio"))
        bind(host, VF, "vfio-pci")
        host.open_groups.add(f"/dev/vfio/{vfio_group(host, VF)}")
        host.writes.clear()
        with pytest.raises(BindError, match="its VFIO group is open") as refusal:
            bind(host, VF, "igb_uio")
        assert refusal.value.errno == errno.EBUSY
        assert (driver_of(host, VF), host.writes) == ("vfio-pci", [])

    def test_an_unused_function_is_bound(self) -> None:
        host = host_of(loaded=("vfio-pci", "igb_uio"))
        bind(host, VF, "vfio-pci")
        bind(host, VF, "igb_uio")
        assert driver_of(host, VF) == "igb_uio"

    def test_a_missing_vfio_node_is_not_open(self, tmp_path: Path) -> None:
        vf(tmp_path, VF)
        assert not vfio_group_is_open(Host(tmp_path), VF)
        assert not vfio_group_is_open(Host(tmp_path), PF)


@pytest.mark.parametrize("target", ["..", "../..", "a b", "\udcff", ".hidden"])
def test_a_vfio_group_with_an_invalid_name_is_rejected(tmp_path: Path, target: str) -> None:
    function = vf(tmp_path, VF)
    (function / "iommu_group").unlink()
    (function / "iommu_group").symlink_to(f"/sys/{target}")
    with pytest.raises(Unreadable, match="expected a group's number"):
        vfio_group(Host(tmp_path), VF)


def test_a_function_without_iommu_group_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Missing):
        vfio_group(Host(tmp_path), VF)


def test_binding_in_a_plain_tree_changes_nothing(tmp_path: Path) -> None:
    function = vf(tmp_path, VF, driver="4xxxvf")
    (tmp_path / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    bind(Host(tmp_path), VF, "vfio-pci")
    assert (function / "driver_override").read_text() == "vfio-pci"
    assert (tmp_path / "sys/bus/pci/drivers/4xxxvf/unbind").read_text() == VF
    assert (tmp_path / "sys/bus/pci/drivers/vfio-pci/bind").read_text() == VF
