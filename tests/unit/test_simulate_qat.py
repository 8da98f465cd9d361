"""The emulated QAT drivers: one row for each rule of Linux."""

import errno

import pytest
from kernels import refusal

from accelplane.host import Host
from accelplane.simulate import NodeSpec, QatSpec
from accelplane.simulate.kernel import Kernel, write_tree
from accelplane.simulate.offload import QAT_PRODUCTS

pytestmark = pytest.mark.memory

BDF = "0000:61:00.0"
PF = f"/sys/bus/pci/devices/{BDF}"
DEBUG = f"/sys/kernel/debug/qat_4xxx_{BDF}"


@pytest.mark.parametrize("model", QAT_PRODUCTS)
def test_every_product_has_its_drivers_and_ids(model: str) -> None:
    product = QAT_PRODUCTS[model]
    kernel = Kernel(NodeSpec(qats=[QatSpec(model=model, vfs=2)]))  # pyright: ignore[reportArgumentType]
    driver = kernel.readlink(f"{PF}/driver").rpartition("/")[2]
    assert driver == product.driver
    assert kernel.readlink(f"{PF}/virtfn1/driver").rpartition("/")[2] == f"{driver}vf"
    assert kernel.read(f"{PF}/device").strip() == f"0x{product.device_id}"
    assert kernel.read(f"{PF}/virtfn0/device").strip() == f"0x{product.vf_device_id}"
    assert kernel.exists(f"{PF}/qat/state") == (product.generation >= 4)
    assert kernel.exists(f"/sys/kernel/debug/qat_{driver}_{BDF}/heartbeat/status")
    for module in (product.module, f"{product.module}vf", "intel_qat"):
        assert kernel.exists(f"/sys/module/{module}")


def test_default_services_of_a_pf_depend_on_its_number() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec()] * 4))
    found = [kernel.read(f"/sys/bus/pci/devices/0000:{bus}:00.0/qat/cfg_services") for bus in (61, 65, 69, "6d")]
    assert found == ["sym;asym\n", "dc\n"] * 2


@pytest.mark.parametrize(
    ("model", "services", "code", "read_back"),
    [
        ("4xxx", "sym", 0, "sym"),
        ("4xxx", "sym;asym\n", 0, "asym;sym"),  # in the order of the driver's mask
        ("4xxx", "dc;sym", 0, "sym;dc"),
        ("4xxx", "dcc", 0, "dcc"),
        ("4xxx", "sym;asym;dc", errno.EINVAL, ""),  # two at most
        ("4xxx", "dcc;sym", errno.EINVAL, ""),  # only alone
        ("4xxx", "decomp", errno.EINVAL, ""),  # not on this generation
        ("4xxx", "sym;sym", errno.EINVAL, ""),
        ("4xxx", "sym,asym", errno.EINVAL, ""),
        ("4xxx", "", errno.EINVAL, ""),
        ("420xx", "asym;dc", 0, "asym;dc"),
        ("6xxx", "asym;sym;dc", 0, "asym;sym;dc"),
        ("6xxx", "decomp;sym;asym", 0, "asym;sym;decomp"),
        ("6xxx", "asym;sym;dc;decomp", errno.EINVAL, ""),
    ],
)
def test_services_are_those_that_the_generation_has(model: str, services: str, code: int, read_back: str) -> None:
    spec = QatSpec(model=model, state="down", services="dc")  # pyright: ignore[reportArgumentType]
    kernel = Kernel(NodeSpec(qats=[spec]))
    assert refusal(kernel, f"{PF}/qat/cfg_services", services) == code
    assert kernel.read(f"{PF}/qat/cfg_services").strip() == (read_back or "dc")


def test_services_are_changed_only_while_the_device_is_down() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec()]))
    assert refusal(kernel, f"{PF}/qat/cfg_services", "dc") == errno.EINVAL
    assert refusal(kernel, f"{PF}/qat/state", "down") == 0
    assert not kernel.exists(f"{DEBUG}/heartbeat")
    assert refusal(kernel, f"{PF}/qat/cfg_services", "dc") == 0
    assert refusal(kernel, f"{PF}/qat/state", "up\n") == 0
    assert (kernel.read(f"{PF}/qat/state"), kernel.read(f"{PF}/qat/cfg_services")) == ("up\n", "dc\n")
    assert "[GENERAL]\nServicesEnabled = dc\n" in kernel.read(f"{DEBUG}/dev_cfg")


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("qat/state", "up", 0),  # already
        ("qat/state", "sideways", errno.EINVAL),
        ("qat/auto_reset", "on", 0),
        ("qat/auto_reset", "perhaps", errno.EINVAL),
        ("qat/pm_idle_enabled", "0", errno.EINVAL),  # is up
        ("qat/rp2srv", "3", 0),
        ("qat/rp2srv", "64", errno.EINVAL),
        ("qat/num_rps", "3", errno.EACCES),
    ],
)
def test_a_write_gets_the_drivers_errno(file: str, text: str, code: int) -> None:
    assert refusal(Kernel(NodeSpec(qats=[QatSpec()])), f"{PF}/{file}", text) == code


def test_taking_a_device_down_removes_its_virtual_functions() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=16, vf_driver="vfio-pci")]))
    assert refusal(kernel, f"{PF}/qat/state", "down") == 0
    assert kernel.read(f"{PF}/sriov_numvfs") == "0\n"
    assert kernel.list("/dev/vfio") == ["vfio"]
    assert refusal(kernel, f"{PF}/qat/state", "up") == 0
    assert kernel.read(f"{PF}/sriov_numvfs") == "0\n"


@pytest.mark.parametrize("text", ["1", "15", "16"])
def test_any_number_enables_all_virtual_functions_and_starts_the_device(text: str) -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(state="down")]))
    assert refusal(kernel, f"{PF}/sriov_numvfs", text) == 0
    assert (kernel.read(f"{PF}/sriov_numvfs"), kernel.read(f"{PF}/qat/state")) == ("16\n", "up\n")
    assert len([name for name in kernel.list("/sys/bus/pci/drivers/4xxxvf") if ":" in name]) == 16


def test_without_an_iommu_there_are_no_virtual_functions() -> None:
    assert refusal(Kernel(NodeSpec(qats=[QatSpec()], iommu="off")), f"{PF}/sriov_numvfs", "16") == errno.EINVAL


@pytest.mark.parametrize(
    ("file", "text"), [("qat/state", "down"), ("qat/state", "up"), ("sriov_numvfs", "16"), ("driver/unbind", BDF)]
)
def test_a_device_in_use_is_busy(file: str, text: str) -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec()]))
    kernel.hold(BDF)
    assert refusal(kernel, f"{PF}/{file}", text) == errno.EBUSY
    kernel.release(BDF)
    assert refusal(kernel, f"{PF}/{file}", text) == 0


def test_a_device_that_does_not_start_stays_down() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(state="down")]))
    kernel.qat(BDF).refuses_to_start = True
    assert refusal(kernel, f"{PF}/qat/state", "up") == errno.EFAULT
    assert refusal(kernel, f"{PF}/sriov_numvfs", "16") == errno.EFAULT
    assert (kernel.read(f"{PF}/sriov_numvfs"), kernel.read(f"{PF}/qat/state")) == ("0\n", "down\n")


def test_the_heartbeat_ends_with_a_zero_byte() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec()]))
    assert kernel.read_bytes(f"{DEBUG}/heartbeat/status") == b"0\n\0"
    kernel.qat(BDF).healthy = False
    assert kernel.read_bytes(f"{DEBUG}/heartbeat/status") == b"-1\n\0"


def test_unbinding_the_driver_removes_its_files_and_binding_resets_them() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=3)]))
    kernel.write("/sys/bus/pci/drivers/4xxx/unbind", BDF)
    assert not kernel.exists(f"{PF}/qat")
    assert kernel.list("/sys/kernel/debug") == []
    assert kernel.list("/sys/bus/pci/devices") == [BDF]
    kernel.write("/sys/bus/pci/drivers/4xxx/bind", BDF)
    assert kernel.read(f"{PF}/qat/state") == "up\n"


def test_faults_occur_the_requested_number_of_times() -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=2)]))
    kernel.fail(f"{PF}/qat/state", errno.EIO, times=2)
    assert [refusal(kernel, f"{PF}/qat/state", "up") for _ in range(3)] == [errno.EIO, errno.EIO, 0]
    kernel.fail(f"{PF}/virtfn*/driver_override", errno.EPERM)
    kernel.fail("/sys/bus/pci/drivers/4xxxvf/unbind", errno.EBUSY, text="0000:61:00.2")
    for _ in range(3):
        assert refusal(kernel, f"{PF}/virtfn1/driver_override", "x") == errno.EPERM
        assert refusal(kernel, f"{PF}/virtfn1/driver/unbind", "0000:61:00.2\n") == errno.EBUSY
    assert refusal(kernel, f"{PF}/virtfn0/driver/unbind", "0000:61:00.1\n") == 0
    kernel.set_content(f"{PF}/qat/state", b"\xff\0", times=1)
    kernel.fail(f"{PF}/qat/cfg_services", errno.EIO, on="read")
    assert kernel.read_bytes(f"{PF}/qat/state") == b"\xff\0"
    assert kernel.read_bytes(f"{PF}/qat/state") == b"up\n"
    with pytest.raises(OSError, match="Input/output error"):
        kernel.read(f"{PF}/qat/cfg_services")
    kernel.clear_faults()
    assert kernel.read(f"{PF}/qat/cfg_services") == "sym;asym\n"


def test_a_written_tree_has_the_files_of_the_kernel(tmp_path: object) -> None:
    kernel = Kernel(NodeSpec(qats=[QatSpec(vfs=16, vf_driver="vfio-pci", services="sym;asym")]))
    kernel.fail(f"{PF}/qat/auto_reset", errno.EIO, on="read")
    write_tree(kernel, str(tmp_path))
    host = Host(str(tmp_path))
    assert host.text(f"{PF}/qat/cfg_services") == "sym;asym"
    assert host.driver(f"{PF}/virtfn15") == "vfio-pci"
    assert host.exists(f"/dev/vfio/{host.link(f'{PF}/virtfn15/iommu_group').rpartition('/')[2]}")
    assert host.text(f"{PF}/qat/auto_reset") == ""
    host.write(f"{PF}/sriov_numvfs", "0")
    assert host.exists(f"{PF}/virtfn0")
