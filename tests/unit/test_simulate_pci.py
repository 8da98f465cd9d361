"""The emulated kernel's PCI core, VFIO and SR-IOV: one row for each rule of Linux."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from accelplane.simulate import DlbSpec, DsaSpec, NodeSpec, QatSpec, TreeError
from accelplane.simulate.kernel import Kernel

DEVICES, DRIVERS = "/sys/bus/pci/devices", "/sys/bus/pci/drivers"
VFIO = f"{DRIVERS}/vfio-pci"
QAT, VF = "0000:61:00.0", "0000:61:00.1"


@contextmanager
def refused(code: int) -> Iterator[None]:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is looked at
        yield
    assert errno.errorcode[caught.value.errno] == errno.errorcode[code]


def node(**more: object) -> Kernel:
    return Kernel(NodeSpec(qats=[QatSpec(vfs=2)], **more))  # pyright: ignore[reportArgumentType] - the tests' own rows


def driver(kernel: Kernel, bdf: str) -> str:
    path = f"{DEVICES}/{bdf}/driver"
    return kernel.readlink(path).rpartition("/")[2] if kernel.exists(path) else ""


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        (f"{DRIVERS}/4xxxvf/bind", VF, errno.EBUSY),  # has a driver
        (f"{VFIO}/bind", VF, errno.ENODEV),  # the driver does not know the id
        (f"{VFIO}/bind", "0000:ff:00.0", errno.ENODEV),  # no such device
        (f"{DRIVERS}/4xxxvf/bind", f"{VF}\n\n", errno.ENODEV),  # only one newline is ignored
        (f"{VFIO}/unbind", VF, errno.ENODEV),  # another driver has it
        (f"{VFIO}/new_id", "8086", errno.EINVAL),
        (f"{VFIO}/new_id", "", errno.EINVAL),
        (f"{DRIVERS}/4xxxvf/new_id", "8086 4941", errno.EEXIST),  # in the driver's own table
        (f"{VFIO}/remove_id", "8086 4941", errno.ENODEV),  # was never added
        ("/sys/bus/pci/drivers_probe", "0000:ff:00.0", errno.ENODEV),
        (f"{DEVICES}/{VF}/driver_override", "x" * 4095, errno.EINVAL),
        (f"{DEVICES}/{VF}/vendor", "0x8086", errno.EACCES),
        (f"{DEVICES}/{QAT}/sriov_totalvfs", "3", errno.EACCES),
        (f"{DEVICES}/{QAT}/sriov_numvfs", "many", errno.EINVAL),
        (f"{DEVICES}/{QAT}/sriov_numvfs", "-1", errno.EINVAL),
        (f"{DEVICES}/{QAT}/sriov_numvfs", "", errno.EINVAL),
        (f"{DEVICES}/{QAT}/sriov_numvfs", "3", errno.ERANGE),
        (f"{DEVICES}/{QAT}/sriov_numvfs", "1", errno.EBUSY),  # has some
        (f"{DEVICES}/{VF}/uevent", "shout", errno.EINVAL),
        (f"{DEVICES}/{VF}/absent", "", errno.ENOENT),
        (f"{DEVICES}/{VF}", "", errno.EISDIR),
    ],
)
def test_a_write_gets_the_kernels_errno(file: str, text: str, code: int) -> None:
    kernel = node()
    with refused(code):
        kernel.write(file, text)
    assert driver(kernel, VF) == "4xxxvf"


def test_bind_and_unbind_move_the_links() -> None:
    kernel = node()
    kernel.write(f"{DRIVERS}/4xxxvf/unbind", VF)
    assert driver(kernel, VF) == ""
    assert not kernel.exists(f"{DRIVERS}/4xxxvf/{VF}")
    kernel.write(f"{DRIVERS}/4xxxvf/bind", f"{VF}\n")
    assert driver(kernel, VF) == "4xxxvf"
    assert kernel.readlink(f"{DRIVERS}/4xxxvf/{VF}") == f"../../../../devices/pci0000:61/{VF}"


def test_an_override_names_the_only_driver_that_is_tried() -> None:
    kernel = node()
    override = f"{DEVICES}/{VF}/driver_override"
    assert kernel.read(override) == "(null)\n"
    kernel.write(override, "vfio-pci\n")
    assert kernel.read(override) == "vfio-pci\n"
    kernel.write(f"{DRIVERS}/4xxxvf/unbind", VF)
    with refused(errno.ENODEV):
        kernel.write(f"{DRIVERS}/4xxxvf/bind", VF)
    kernel.write("/sys/bus/pci/drivers_probe", VF)
    assert driver(kernel, VF) == "vfio-pci"
    kernel.write(override, "\n")
    assert kernel.read(override) == "(null)\n"


def test_a_new_id_binds_every_unbound_device_with_it() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=2, vf_driver="none"), QatSpec(vfs=1)]))
    kernel.write(f"{VFIO}/new_id", "8086 4941")
    assert [driver(kernel, bdf) for bdf in (VF, "0000:61:00.2", "0000:65:00.1")] == ["vfio-pci", "vfio-pci", "4xxxvf"]
    with refused(errno.EEXIST):
        kernel.write(f"{VFIO}/new_id", "8086 4941")
    kernel.write(f"{VFIO}/remove_id", "8086 4941")
    kernel.write(f"{VFIO}/unbind", VF)
    with refused(errno.ENODEV):
        kernel.write(f"{VFIO}/bind", VF)


def test_a_vfio_device_has_a_group_node_and_a_device_node() -> None:
    kernel = node()
    group = kernel.readlink(f"{DEVICES}/{VF}/iommu_group").rpartition("/")[2]
    assert kernel.list("/dev/vfio") == ["vfio"]
    kernel.write(f"{DRIVERS}/4xxxvf/unbind", VF)
    kernel.write(f"{DEVICES}/{VF}/driver_override", "vfio-pci")
    kernel.write(f"{VFIO}/bind", VF)
    assert kernel.list("/dev/vfio") == [group, "devices", "vfio"]
    assert kernel.list("/dev/vfio/devices") == kernel.list(f"{DEVICES}/{VF}/vfio-dev") == ["vfio0"]
    numbers = kernel.read(f"/sys/class/vfio/{group}/dev").strip()
    assert kernel.readlink(f"/dev/char/{numbers}") == f"../vfio/{group}"
    assert kernel.resolve(f"/sys/dev/char/{numbers}") == f"/sys/devices/virtual/vfio/{group}"
    assert kernel.list(f"/sys/kernel/iommu_groups/{group}/devices") == [VF]
    kernel.write(f"{VFIO}/unbind", VF)
    assert kernel.list("/dev/vfio") == ["vfio"]
    assert not kernel.exists(f"{DEVICES}/{VF}/vfio-dev")


@pytest.mark.parametrize("hold", [VF, "vfio/{group}"])
def test_a_vfio_device_in_use_is_not_unbound(hold: str) -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=2, vf_driver="vfio-pci")]))
    name = hold.format(group=kernel.readlink(f"{DEVICES}/{VF}/iommu_group").rpartition("/")[2])
    kernel.hold(name)
    for file, text in ((f"{VFIO}/unbind", VF), (f"{DEVICES}/{QAT}/sriov_numvfs", "0"), (f"{DEVICES}/{VF}/remove", "1")):
        with refused(errno.EBUSY):
            kernel.write(file, text)
    with refused(errno.EBUSY):
        kernel.unload("vfio-pci")
    kernel.release(name)
    kernel.write(f"{DEVICES}/{QAT}/sriov_numvfs", "0")
    assert kernel.list("/dev/vfio") == ["vfio"]


@pytest.mark.parametrize(
    ("spec", "bdf", "code"),
    [
        (NodeSpec(qats=[QatSpec(model="c6xx", vfs=1, vf_driver="none")]), VF, errno.EINVAL),  # on the denylist
        (NodeSpec(dsas=[DsaSpec(driver="none")]), "0000:60:01.0", errno.EINVAL),  # on the denylist
        (NodeSpec(dsas=[DsaSpec(driver="none", model="11fb")]), "0000:60:01.0", 0),
        (NodeSpec(dsas=[DsaSpec(driver="none")], disable_denylist=True), "0000:60:01.0", 0),
        (NodeSpec(dsas=[DsaSpec(driver="none", model="1212")], iommu="off"), "0000:60:01.0", errno.EINVAL),
        (NodeSpec(dsas=[DsaSpec(driver="none", model="1212")], iommu="off", noiommu=True), "0000:60:01.0", 0),
    ],
)
def test_vfio_rejects_some_devices(spec: NodeSpec, bdf: str, code: int) -> None:
    kernel = Kernel(spec)
    kernel.write(f"{DEVICES}/{bdf}/driver_override", "vfio-pci")
    if code:
        with refused(code):
            kernel.write(f"{VFIO}/bind", bdf)
    else:
        kernel.write(f"{VFIO}/bind", bdf)
    assert driver(kernel, bdf) == ("" if code else "vfio-pci")


def test_without_an_iommu_the_group_is_noiommu() -> None:
    spec = NodeSpec(dsas=[DsaSpec(driver="vfio-pci")], iommu="off", noiommu=True)
    kernel = Kernel(spec)
    assert kernel.read(f"{DEVICES}/0000:60:01.0/iommu_group/name") == "vfio-noiommu\n"
    assert "noiommu-0" in kernel.list("/dev/vfio")
    kernel.write(f"{VFIO}/unbind", "0000:60:01.0")
    assert kernel.list("/sys/kernel/iommu_groups") == kernel.list("/sys/class/iommu") == []


def test_only_drivers_with_sriov_create_virtual_functions() -> None:
    kernel = Kernel(NodeSpec(dlbs=[DlbSpec(vfs=1)]))
    kernel.write(f"{DEVICES}/0000:62:00.0/driver_override", "vfio-pci")
    kernel.write(f"{DRIVERS}/dlb2/unbind", "0000:62:00.0")  # which removes the virtual functions
    kernel.write(f"{VFIO}/bind", "0000:62:00.0")
    with refused(errno.ENOENT):  # vfio-pci makes no virtual functions
        kernel.write(f"{DEVICES}/0000:62:00.0/sriov_numvfs", "1")
    kernel.write(f"{VFIO}/unbind", "0000:62:00.0")
    with refused(errno.ENOENT):  # nor does a function without a driver
        kernel.write(f"{DEVICES}/0000:62:00.0/sriov_numvfs", "1")


def test_igb_uio_gives_a_uio_node() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(model="c6xx", vfs=2, vf_driver="igb_uio")]))
    assert kernel.list(f"{DEVICES}/{VF}/uio") == ["uio0"]
    assert kernel.exists("/dev/uio0")
    assert kernel.resolve("/sys/class/uio/uio1/device").endswith("/0000:61:00.2")


def test_virtual_functions_lead_to_their_physical_one_and_back() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec()]))
    before = set(kernel.list("/sys/kernel/iommu_groups"))
    kernel.write(f"{DEVICES}/{QAT}/sriov_numvfs", "16")
    names = [name for name in kernel.list(f"{DEVICES}/{QAT}") if name.startswith("virtfn")]
    assert len(names) == 16
    for name in names:
        assert kernel.resolve(f"{DEVICES}/{QAT}/{name}/physfn") == kernel.resolve(f"{DEVICES}/{QAT}")
    assert kernel.readlink(f"{DEVICES}/{QAT}/virtfn15") == "../0000:61:02.0"
    assert len(kernel.list("/sys/kernel/iommu_groups")) == len(before) + 16
    kernel.write(f"{DEVICES}/{QAT}/sriov_numvfs", "0")
    assert set(kernel.list("/sys/kernel/iommu_groups")) == before
    assert kernel.list(DEVICES) == [QAT]


def test_without_autoprobe_virtual_functions_stay_unbound_until_forced() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec()]))
    kernel.write(f"{DEVICES}/{QAT}/sriov_drivers_autoprobe", "0")
    kernel.write(f"{DEVICES}/{QAT}/sriov_numvfs", "16")
    assert driver(kernel, VF) == ""
    with refused(errno.ENODEV):
        kernel.write(f"{DRIVERS}/4xxxvf/bind", VF)
    kernel.write(f"{DEVICES}/{VF}/driver_override", "4xxxvf")
    kernel.write(f"{DRIVERS}/4xxxvf/bind", VF)
    assert driver(kernel, VF) == "4xxxvf"


def test_a_device_behind_a_bridge_is_below_the_bridge_in_sysfs() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(bridge=True)]))
    assert kernel.resolve(f"{DEVICES}/{QAT}") == f"/sys/devices/pci0000:60/0000:60:1f.0/{QAT}"


def test_removing_a_function_takes_everything_of_it() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=2, vf_driver="vfio-pci")]))
    kernel.write(f"{DEVICES}/{QAT}/remove", "1")
    assert kernel.list(DEVICES) == []
    assert kernel.list("/dev/vfio") == ["vfio"]
    assert kernel.list("/sys/kernel/iommu_groups") == kernel.list("/sys/kernel/debug") == []


def test_loading_and_unloading_modules_adds_and_removes_their_files() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=1, vf_driver="none")], loaded=[]))
    assert not kernel.exists(VFIO)
    assert not kernel.exists("/dev/vfio")
    kernel.load("vfio-pci")
    kernel.load("vfio-pci")
    assert kernel.exists("/sys/module/vfio_pci/parameters/disable_denylist")
    kernel.write(f"{DEVICES}/{VF}/driver_override", "vfio-pci")
    kernel.write(f"{VFIO}/bind", VF)
    kernel.unload("vfio-pci")
    assert driver(kernel, VF) == ""
    assert not kernel.exists("/sys/module/vfio")
    assert not kernel.exists("/dev/vfio")


def test_hardware_is_plugged_and_unplugged_even_in_use() -> None:
    kernel = Kernel(NodeSpec())
    first, second = kernel.plug(QatSpec(vfs=2, vf_driver="vfio-pci")), kernel.plug(DsaSpec(bdf="0000:60:01.0"))
    kernel.hold("0000:61:00.2")
    kernel.unplug(first)
    assert kernel.list(DEVICES) == [second]
    with pytest.raises(TreeError, match="no PCI function"):
        kernel.unplug(first)
    with pytest.raises(TreeError, match="already in use"):
        kernel.plug(DsaSpec(bdf=second))
    with pytest.raises(TreeError, match="no device, queue or node of that name"):
        kernel.hold(first)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (NodeSpec(qats=[QatSpec(bdf=QAT), QatSpec(bdf=QAT)]), "two devices of the description have this address"),
        (NodeSpec(dsas=[DsaSpec(driver="vfio-pci")], iommu="off"), "cannot be set up as described"),
        (NodeSpec(qats=[QatSpec(bdf="0000:61:1f.0", vfs=16)]), "cannot be set up as described"),
    ],
)
def test_invalid_descriptions_are_rejected(spec: NodeSpec, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        Kernel(spec)


def uevents_of(change: Callable[[Kernel], None]) -> list[tuple[str, str, str]]:
    uevents: list[tuple[str, str, str]] = []
    kernel = Kernel(
        NodeSpec(qats=[QatSpec(total_vfs=1)]),
        listen=lambda uevent: uevents.append((uevent.action, uevent.devpath, uevent.fields.get("DRIVER", ""))),
    )
    change(kernel)
    return uevents


def test_every_change_sends_a_uevent() -> None:
    path = f"/devices/pci0000:61/{VF}"

    def bind(kernel: Kernel) -> None:
        kernel.write(f"{DEVICES}/{QAT}/sriov_numvfs", "1")
        kernel.write(f"{DRIVERS}/4xxxvf/unbind", VF)
        kernel.write(f"{DEVICES}/{VF}/driver_override", "vfio-pci")
        kernel.write(f"{VFIO}/bind", VF)
        kernel.write(f"{DEVICES}/{VF}/uevent", "change")
        kernel.write(f"{DEVICES}/{QAT}/sriov_numvfs", "0")

    assert uevents_of(bind) == [
        ("add", path, ""),
        ("bind", path, "4xxxvf"),
        ("change", f"/devices/pci0000:61/{QAT}", ""),
        ("unbind", path, ""),
        ("add", "/devices/virtual/vfio/1", ""),
        ("add", f"{path}/vfio-dev/vfio0", ""),
        ("bind", path, "vfio-pci"),
        ("change", path, "vfio-pci"),
        ("remove", f"{path}/vfio-dev/vfio0", ""),
        ("remove", "/devices/virtual/vfio/1", ""),
        ("unbind", path, ""),
        ("remove", path, ""),
    ]
