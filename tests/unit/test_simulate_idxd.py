"""The emulated idxd driver, its bus and work queues: one row for each rule of Linux."""

import errno

import pytest
from kernels import refusal

from accelplane.simulate import DsaSpec, IaaSpec, NodeSpec, QueueSpec
from accelplane.simulate.kernel import Kernel

BUS = "/sys/bus/dsa/devices"
DRIVERS = "/sys/bus/dsa/drivers"
DSA_BDF = "0000:60:01.0"


def one(spec: DsaSpec | IaaSpec | None = None, **more: object) -> Kernel:
    spec = spec or DsaSpec()
    lists = {"iaas": [spec]} if isinstance(spec, IaaSpec) else {"dsas": [spec]}
    return Kernel(NodeSpec(**lists, **more))  # pyright: ignore[reportArgumentType] - the tests' own rows


def configure(kernel: Kernel, **changes: str) -> None:
    """Queue 0 with engine 0 in group 0, as the init container's profile has them, but for the changes."""
    profile = {"group_id": "0", "mode": "dedicated", "size": "16", "priority": "10", "block_on_fault": "1"}
    profile |= {"type": "user", "name": "app00", "driver_name": "user"}
    kernel.write(f"{BUS}/engine0.0/group_id", changes.pop("engine", "0"))
    for name, value in (profile | changes).items():
        if value:
            kernel.write(f"{BUS}/wq0.0/{name}", value)


def enable(kernel: Kernel, driver: str = "user") -> tuple[int, int]:
    return refusal(kernel, f"{DRIVERS}/idxd/bind", "dsa0"), refusal(kernel, f"{DRIVERS}/{driver}/bind", "wq0.0")


@pytest.mark.parametrize(
    ("where", "file", "text", "code"),
    [
        ("wq0.0", "mode", "dedicated", 0),
        ("wq0.0", "mode", "alone", errno.EINVAL),
        ("wq0.0", "size", "128", 0),
        ("wq0.0", "size", "129", errno.EINVAL),  # more than the device has
        ("wq0.0", "size", "-1", errno.EINVAL),
        ("wq0.0", "size", "big", errno.EINVAL),
        ("wq0.0", "priority", "15", 0),
        ("wq0.0", "priority", "16", errno.EINVAL),
        ("wq0.0", "group_id", "3", 0),
        ("wq0.0", "group_id", "-1", 0),
        ("wq0.0", "group_id", "4", errno.EINVAL),
        ("wq0.0", "group_id", "-2", errno.EINVAL),
        ("wq0.0", "type", "user", 0),
        ("wq0.0", "type", "mdev", errno.EINVAL),
        ("wq0.0", "name", "x" * 1024, 0),
        ("wq0.0", "name", "x" * 1025, errno.EINVAL),
        ("wq0.0", "name", "", errno.EINVAL),
        ("wq0.0", "driver_name", "user\n", 0),
        ("wq0.0", "driver_name", "x" * 129, errno.EINVAL),
        ("wq0.0", "threshold", "1", errno.EINVAL),  # no more than the size, which is 0
        ("wq0.0", "block_on_fault", "1", 0),
        ("wq0.0", "block_on_fault", "2", errno.EINVAL),
        ("wq0.0", "max_transfer_size", "2147483648", 0),
        ("wq0.0", "max_transfer_size", "2147483649", errno.EINVAL),
        ("wq0.0", "max_transfer_size", "0", errno.EINVAL),
        ("wq0.0", "max_batch_size", "1024", 0),
        ("wq0.0", "max_batch_size", "2048", errno.EINVAL),
        ("wq0.0", "ats_disable", "1", 0),
        ("wq0.0", "op_config", "1", 0),
        ("wq0.0", "op_config", "ffffffff", errno.EINVAL),
        ("wq0.0", "op_config", "zebra", errno.EINVAL),
        ("wq0.0", "clients", "1", errno.EACCES),
        ("wq0.0", "prs_disable", "1", errno.ENOENT),  # the first hardware cannot
        ("engine0.0", "group_id", "0", 0),
        ("engine0.0", "group_id", "9", errno.EINVAL),
        ("group0.0", "read_buffers_reserved", "96", 0),
        ("group0.0", "read_buffers_reserved", "97", errno.EINVAL),
        ("group0.0", "read_buffers_allowed", "8", 0),
        ("group0.0", "tokens_allowed", "97", errno.EINVAL),
        ("group0.0", "use_read_buffer_limit", "1", errno.EPERM),  # the device has no limit
        ("group0.0", "traffic_class_a", "1", errno.EPERM),  # fixed on the first hardware
        ("dsa0", "read_buffer_limit", "96", 0),
        ("dsa0", "read_buffer_limit", "97", errno.EINVAL),
        ("dsa0", "event_log_size", "64", errno.ENOENT),
        ("dsa0", "cmd_status", "1", 0),
        ("dsa0", "state", "enabled", errno.EACCES),
    ],
)
def test_an_attribute_accepts_the_values_of_its_rule(where: str, file: str, text: str, code: int) -> None:
    assert errno.errorcode.get(refusal(one(), f"{BUS}/{where}/{file}", text)) == errno.errorcode.get(code)


@pytest.mark.parametrize(
    ("where", "file", "text", "code"),
    [
        ("group0.0", "traffic_class_a", "7", 0),
        ("group0.0", "traffic_class_b", "8", errno.EINVAL),
        ("group0.0", "desc_progress_limit", "3", 0),
        ("group0.0", "batch_progress_limit", "4", errno.EINVAL),
        ("dsa0", "event_log_size", "64", 0),
        ("dsa0", "event_log_size", "63", errno.EINVAL),
        ("wq0.0", "prs_disable", "1", 0),
    ],
)
def test_later_hardware_has_more(where: str, file: str, text: str, code: int) -> None:
    assert refusal(one(DsaSpec(model="1212")), f"{BUS}/{where}/{file}", text) == code


def test_sizes_are_shared_and_a_threshold_is_for_shared_queues() -> None:
    kernel = one()
    kernel.write(f"{BUS}/wq0.0/size", "100")
    assert refusal(kernel, f"{BUS}/wq0.1/size", "29") == errno.EINVAL
    assert refusal(kernel, f"{BUS}/wq0.1/size", "28") == 0
    assert refusal(kernel, f"{BUS}/wq0.0/threshold", "101") == errno.EINVAL
    assert refusal(kernel, f"{BUS}/wq0.0/threshold", "100") == 0
    kernel.write(f"{BUS}/wq0.0/mode", "dedicated")
    assert kernel.read(f"{BUS}/wq0.0/threshold") == "0\n"
    assert refusal(kernel, f"{BUS}/wq0.0/threshold", "1") == errno.EINVAL


def test_changing_the_type_clears_the_name() -> None:
    kernel = one()
    for file, text in (("type", "user"), ("name", "app"), ("type", "user")):
        kernel.write(f"{BUS}/wq0.0/{file}", text)
    assert kernel.read(f"{BUS}/wq0.0/name") == "app\n"
    kernel.write(f"{BUS}/wq0.0/type", "kernel")
    assert kernel.read(f"{BUS}/wq0.0/name") == "\n"


def test_an_iaa_has_no_batches_and_no_read_buffers() -> None:
    kernel = one(IaaSpec())
    for absent in ("wq0.0/max_batch_size", "group0.0/read_buffers_allowed", "iax0/read_buffer_limit"):
        assert not kernel.exists(f"{BUS}/{absent}")
    assert one(IaaSpec(model="1216")).exists(f"{BUS}/iax0/iaa_cap")


@pytest.mark.parametrize(
    ("changes", "codes", "status"),
    [
        ({}, (0, 0), "0"),
        ({"group_id": ""}, (errno.ENXIO, errno.ENXIO), "0x800d0000"),  # no queue configured
        ({"engine": "-1"}, (errno.ENXIO, errno.ENXIO), "0"),
        ({"name": ""}, (0, errno.ENXIO), "0x80040000"),
        ({"mode": "shared"}, (0, errno.ENXIO), "0x80060000"),  # without a threshold
        ({"mode": "shared", "threshold": "8"}, (0, 0), "0"),
        ({"driver_name": ""}, (0, errno.ENODEV), "0x80200000"),
        ({"driver_name": "dmaengine"}, (0, errno.ENODEV), "0x80200000"),
        ({"size": ""}, (0, 0), "0"),  # the driver uses 16 then
        ({"type": ""}, (0, 0), "0"),
    ],
)
def test_enabling_fails_with_the_status_of_the_problem(
    changes: dict[str, str], codes: tuple[int, int], status: str
) -> None:
    kernel = one()
    kernel.write(f"{BUS}/dsa0/cmd_status", "0")
    configure(kernel, **changes)
    if status == "0" and codes[0]:
        kernel.write(f"{BUS}/dsa0/cmd_status", "0")
    assert enable(kernel) == codes
    assert kernel.read(f"{BUS}/dsa0/cmd_status").strip() == status
    assert kernel.read(f"{BUS}/wq0.0/state").strip() == ("disabled" if codes[1] else "enabled")
    assert kernel.exists("/dev/dsa/wq0.0") == (not codes[1])


def test_a_queue_without_a_group_is_not_enabled_and_others_are() -> None:
    kernel = one(DsaSpec(queues=[QueueSpec()]))
    for file, text in (("driver_name", "user"), ("name", "lone"), ("mode", "dedicated")):
        kernel.write(f"{BUS}/wq0.1/{file}", text)
    assert refusal(kernel, f"{DRIVERS}/user/bind", "wq0.1") == errno.ENXIO
    assert kernel.read(f"{BUS}/dsa0/cmd_status") == "0x80030000\n"


@pytest.mark.parametrize(("iommu", "mode"), [("legacy", "dedicated"), ("off", "dedicated")])
def test_a_user_queue_needs_scalable_mode(iommu: str, mode: str) -> None:
    kernel = one(iommu=iommu)
    configure(kernel, mode=mode)
    assert enable(kernel) == (0, errno.EOPNOTSUPP)
    assert kernel.read(f"{BUS}/dsa0/cmd_status") == "0x80110000\n"
    assert kernel.read(f"{BUS}/dsa0/pasid_enabled") == "0\n"


def test_a_shared_queue_needs_scalable_mode() -> None:
    kernel = one(iommu="legacy")
    configure(kernel, mode="shared", threshold="8")
    assert enable(kernel) == (errno.ENXIO, errno.ENXIO)
    assert kernel.read(f"{BUS}/dsa0/cmd_status") == "0x800c0000\n"


def test_an_enabled_queue_has_a_node_and_udevs_link() -> None:
    kernel = one(DsaSpec(queues=[QueueSpec(), QueueSpec(type="kernel"), QueueSpec(enabled=False)]))
    states = [kernel.read(f"{BUS}/dsa0/wq0.{number}/state").strip() for number in range(4)]
    assert states == ["enabled", "enabled", "disabled", "disabled"]
    assert kernel.list("/dev/dsa") == ["wq0.0"]
    numbers = kernel.read(f"{BUS}/dsa!wq0.0/dev").strip()
    assert (
        numbers == f"{kernel.read(f'{BUS}/dsa0/cdev_major').strip()}:{kernel.read(f'{BUS}/wq0.0/cdev_minor').strip()}"
    )
    assert kernel.readlink(f"/dev/char/{numbers}") == "../dsa/wq0.0"
    assert kernel.resolve(f"/sys/dev/char/{numbers}") == kernel.resolve(f"{BUS}/wq0.0/dsa!wq0.0")
    assert kernel.read(f"{BUS}/group0.1/work_queues") == "wq0.1\n"
    assert kernel.read(f"{BUS}/group0.3/engines") == ""
    with pytest.raises(OSError, match="No such device or address"):
        kernel.read(f"{BUS}/wq0.1/cdev_minor")


def test_the_link_is_missing_while_udev_is_paused() -> None:
    kernel = one()
    kernel.pause_udev(wait=True)
    configure(kernel)
    assert enable(kernel) == (0, 0)
    assert kernel.list("/dev/dsa") == ["wq0.0"]
    links = kernel.list("/dev/char")
    kernel.pause_udev(wait=False)
    assert len(kernel.list("/dev/char")) == len(links) + 1


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("wq0.0/mode", "shared", errno.EPERM),
        ("wq0.0/type", "none", errno.EPERM),
        ("wq0.0/name", "x", errno.EPERM),
        ("wq0.0/group_id", "1", errno.EPERM),
        ("wq0.0/threshold", "1", errno.ENXIO),
        ("wq0.0/block_on_fault", "1", errno.ENXIO),
        ("wq0.0/size", "1", errno.EPERM),
        ("wq0.1/size", "1", errno.EPERM),  # the device is enabled, whichever queue it is
        ("wq0.1/name", "x", 0),
        ("group0.0/read_buffers_allowed", "8", errno.EPERM),
        ("dsa0/read_buffer_limit", "1", errno.EPERM),
        ("engine0.0/group_id", "0", 0),
    ],
)
def test_attributes_of_enabled_devices_are_read_only(file: str, text: str, code: int) -> None:
    assert refusal(one(DsaSpec(queues=[QueueSpec()])), f"{BUS}/{file}", text) == code


def test_binding_twice_is_busy() -> None:
    kernel = one(DsaSpec(queues=[QueueSpec()]))
    assert enable(kernel) == (errno.EBUSY, errno.EBUSY)
    assert refusal(kernel, f"{DRIVERS}/idxd/bind", "wq0.1") == errno.ENODEV
    assert refusal(kernel, f"{DRIVERS}/user/bind", "dsa0") == errno.ENODEV


def test_disabling_a_queue_resets_all_but_size_and_group_also_with_clients() -> None:
    kernel = one(DsaSpec(queues=[QueueSpec()] * 2))
    kernel.hold("wq0.0")
    kernel.hold("wq0.0")
    assert (kernel.read(f"{BUS}/wq0.0/clients"), kernel.read(f"{BUS}/dsa0/clients")) == ("2\n", "2\n")
    kernel.write(f"{BUS}/wq0.0/driver/unbind", "wq0.0")
    files = ("state", "clients", "type", "name", "mode", "size", "group_id")
    assert [kernel.read(f"{BUS}/wq0.0/{file}").strip() for file in files] == [
        *("disabled", "0", "none", "", "shared", "16", "0"),
    ]
    assert kernel.list("/dev/dsa") == ["wq0.1"]


def test_disabling_the_device_disables_its_queues_and_resets_the_configuration() -> None:
    kernel = one(DsaSpec(queues=[QueueSpec()] * 2))
    kernel.write(f"{BUS}/dsa0/driver/unbind", "dsa0")
    assert kernel.read(f"{BUS}/dsa0/state") == "disabled\n"
    assert [kernel.read(f"{BUS}/wq0.1/{file}").strip() for file in ("state", "size", "group_id")] == [
        *("disabled", "0", "-1"),
    ]
    assert not kernel.exists("/dev/dsa")
    configure(kernel)
    assert enable(kernel) == (0, 0)


def test_a_kernel_queue_is_enabled_by_the_dma_engine_driver() -> None:
    kernel = one(iommu="off")
    configure(kernel, type="kernel", driver_name="dmaengine")
    assert enable(kernel, "dmaengine") == (0, 0)
    assert kernel.read(f"{BUS}/wq0.0/type") == "kernel\n"


def test_older_kernels_need_no_driver_name() -> None:
    kernel = one(DsaSpec(driver_name_file=False))
    configure(kernel, driver_name="")
    assert not kernel.exists(f"{BUS}/wq0.0/driver_name")
    assert enable(kernel) == (0, 0)


def test_a_device_bound_to_vfio_leaves_the_bus_and_returns_unconfigured() -> None:
    kernel = one(DsaSpec(model="11fb", queues=[QueueSpec()] * 3))
    kernel.write("/sys/bus/pci/drivers/idxd/unbind", DSA_BDF)
    assert kernel.list(BUS) == []
    assert not kernel.exists("/dev/dsa")
    kernel.write(f"/sys/bus/pci/devices/{DSA_BDF}/driver_override", "vfio-pci")
    kernel.write("/sys/bus/pci/drivers/vfio-pci/bind", DSA_BDF)
    assert kernel.exists("/dev/vfio/0")
    kernel.write("/sys/bus/pci/drivers/vfio-pci/unbind", DSA_BDF)
    kernel.write(f"/sys/bus/pci/devices/{DSA_BDF}/driver_override", "\n")
    kernel.write("/sys/bus/pci/drivers/idxd/bind", DSA_BDF)
    assert kernel.read(f"{BUS}/dsa0/state") == "disabled\n"
    assert kernel.read(f"{BUS}/wq0.0/size") == "0\n"


def test_both_kinds_are_counted_together_in_the_order_of_their_addresses() -> None:
    kernel = Kernel(NodeSpec(dsas=[DsaSpec()] * 2, iaas=[IaaSpec(), IaaSpec(index=12)]))
    assert {name for name in kernel.list(BUS) if name.startswith(("dsa", "iax"))} == {"dsa0", "iax1", "dsa2", "iax12"}
    assert kernel.exists(f"{BUS}/wq12.7")


def test_a_device_that_is_plugged_in_again_is_as_described() -> None:
    kernel = one(DsaSpec(queues=[QueueSpec()]))
    kernel.hold("wq0.0")
    kernel.unplug(DSA_BDF)
    assert not kernel.exists("/dev/dsa")
    assert kernel.plug(DsaSpec(queues=[QueueSpec(), QueueSpec()])) == DSA_BDF
    assert kernel.list("/dev/dsa") == ["wq0.0", "wq0.1"]
    assert kernel.read(f"{BUS}/wq0.0/clients") == "0\n"
