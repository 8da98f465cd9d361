"""The emulated kernel as a whole: DLB, SGX, descriptions, and any sequence of writes."""

import errno
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels import attributes, dangling, refusal
from thoroughness import examples

from accelplane.host import Host
from accelplane.simulate import (
    DescriptionError,
    DlbSpec,
    DsaSpec,
    GpuSpec,
    IaaSpec,
    NodeSpec,
    QatSpec,
    QueueSpec,
    SgxSpec,
    SimulatedNode,
)
from accelplane.simulate.kernel import Kernel, write_tree
from accelplane.simulate.offload import offload_address

DLB = "/sys/bus/pci/devices/0000:62:00.0"
EVERYTHING = NodeSpec(
    qats=[QatSpec(vfs=2, vf_driver="vfio-pci"), QatSpec(model="c6xx")],
    dsas=[DsaSpec(queues=[QueueSpec()] * 2, max_queues=3)],
    iaas=[IaaSpec(queues=[QueueSpec(mode="shared")], max_queues=2)],
    dlbs=[DlbSpec(vfs=2, total_vfs=4)],
    sgx=SgxSpec(),
)


def test_a_dlb_and_its_virtual_functions_each_have_a_node() -> None:
    kernel = Kernel(NodeSpec(dlbs=[DlbSpec()]))
    assert kernel.resolve("/sys/class/dlb2/dlb0/device") == kernel.resolve(DLB)
    assert kernel.read("/sys/class/dlb2/dlb0/device/sriov_numvfs") == "0\n"
    kernel.write(f"{DLB}/sriov_numvfs", "2")
    assert [name for name in kernel.list("/dev") if name.startswith("dlb")] == ["dlb0", "dlb1", "dlb2"]
    assert not kernel.exists("/sys/class/dlb2/dlb1/device/sriov_numvfs")
    kernel.write("/sys/bus/pci/drivers/dlb2/unbind", "0000:62:00.1")
    assert [name for name in kernel.list("/dev") if name.startswith("dlb")] == ["dlb0", "dlb2"]
    kernel.write(f"{DLB}/sriov_numvfs", "0")
    assert not [name for name in kernel.list(DLB) if name.startswith(("virtfn", "vf"))]


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("num_ldb_ports", "4", 0),
        ("num_ldb_ports", "0x4\n", 0),
        ("num_ldb_credits", "8192", 0),
        ("num_ldb_credits", "8193", errno.EINVAL),
        ("num_sn0_slots", "17", errno.EINVAL),
        ("num_dir_ports", "-1", errno.EINVAL),
        ("num_dir_ports", "all", errno.EINVAL),
        ("num_planets", "8", errno.ENOENT),
    ],
)
def test_a_virtual_function_gets_the_remaining_resources(file: str, text: str, code: int) -> None:
    kernel = Kernel(NodeSpec(dlbs=[DlbSpec(vfs=2, provisioned=False)]))
    kernel.write("/sys/bus/pci/drivers/dlb2/unbind", "0000:62:00.1")
    assert refusal(kernel, f"{DLB}/vf0_resources/{file}", text) == code


def test_resources_are_shared_and_fixed_while_a_driver_has_the_function() -> None:
    kernel = Kernel(NodeSpec(dlbs=[DlbSpec(vfs=2)]))
    assert kernel.read(f"{DLB}/vf1_resources/num_ldb_ports") == "32\n"
    assert refusal(kernel, f"{DLB}/vf1_resources/num_ldb_ports", "1") == errno.EPERM
    kernel.write("/sys/bus/pci/drivers/dlb2/unbind", "0000:62:00.2")
    assert refusal(kernel, f"{DLB}/vf1_resources/num_ldb_ports", "33") == errno.EINVAL
    kernel.write(f"{DLB}/vf1_resources/num_ldb_ports", "1")
    assert kernel.read(f"{DLB}/avail_resources/num_ldb_ports") == "31\n"
    assert kernel.read(f"{DLB}/total_resources/num_ldb_ports") == "64\n"


@pytest.mark.parametrize("hold", ["dlb1", "0000:62:00.1"])
def test_virtual_functions_of_a_dlb_in_use_stay(hold: str) -> None:
    kernel = Kernel(NodeSpec(dlbs=[DlbSpec(vfs=1)]))
    kernel.hold(hold)
    assert refusal(kernel, f"{DLB}/sriov_numvfs", "0") == errno.EINVAL
    assert refusal(kernel, "/sys/bus/pci/drivers/dlb2/unbind", "0000:62:00.1") == errno.EBUSY
    assert kernel.exists("/dev/dlb1")


def test_sgx_is_published_and_removed_with_its_device_nodes() -> None:
    kernel = Kernel(NodeSpec(sgx=SgxSpec(epc=4096), numa_nodes=2))
    assert kernel.read("/sys/devices/system/node/node1/x86/sgx_total_bytes") == "4096\n"
    assert kernel.read("/sys/class/misc/sgx_enclave/dev") == "10:125\n"
    assert kernel.exists("/dev/sgx_provision")
    kernel.unload("sgx")
    assert not kernel.exists("/dev/sgx_enclave")
    assert not kernel.exists("/sys/devices/system/node/node0/x86")
    kernel.load("sgx")
    assert kernel.exists("/dev/sgx_enclave")
    assert not Kernel(NodeSpec(sgx=SgxSpec(loaded=False))).exists("/dev/sgx_enclave")
    assert not Kernel(NodeSpec(sgx=SgxSpec(provision=False))).exists("/dev/sgx_provision")


def test_a_node_is_built_with_all_families(tmp_path: Path) -> None:
    spec = NodeSpec(
        gpus=[GpuSpec()], qats=EVERYTHING.qats, dsas=EVERYTHING.dsas, dlbs=EVERYTHING.dlbs, sgx=SgxSpec(), numa_nodes=2
    )
    assert SimulatedNode(tmp_path).build(spec) == ["card0"]
    host = Host(tmp_path)
    assert [function.device for function in host.pci_devices("0x8086") if function.cls == "0x0b4000"] == [
        *("0x4940", "0x4941", "0x4941", "0x2710", "0x2711", "0x2711", "0x37c8"),
    ]
    assert host.topology_of("/sys/bus/pci/devices/0000:e1:00.0") == (1,)
    group = host.link("/sys/bus/pci/devices/0000:61:00.1/iommu_group").rpartition("/")[2]
    assert host.topology_of_nodes([f"/dev/vfio/{group}"]) == (0,)
    assert host.exists("/dev/dri/card0")
    assert host.exists("/dev/sgx_enclave")


def test_a_written_tree_has_no_dangling_links(tmp_path: Path) -> None:
    kernel = Kernel(EVERYTHING)
    write_tree(kernel, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_symlink() and not path.exists()] == []
    assert dangling(kernel) == []


def test_yaml_can_describe_every_family(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(
        """
iommu: legacy
loaded: [vfio-pci, igb_uio]
disable-denylist: true
qats: [{}, {model: 6xxx, services: dcc, vfs: 4, vf-driver: vfio-pci, state: up, bridge: true, auto-reset: true}]
dsas: [{queues: [{}, {type: kernel, mode: shared, name: x, size: 4, enabled: false}]}]
iaas: [{index: 3, model: 1216, driver: none}]
dlbs: [{vfs: 2, provisioned: false}]
sgx: {epc: 1048576}
"""
    )
    assert NodeSpec.load(path) == NodeSpec(
        iommu="legacy",
        loaded=["vfio-pci", "igb_uio"],
        disable_denylist=True,
        qats=[
            QatSpec(),
            QatSpec(model="6xxx", services="dcc", vfs=4, vf_driver="vfio-pci", bridge=True, auto_reset=True),
        ],
        dsas=[DsaSpec(queues=[QueueSpec(), QueueSpec(type="kernel", mode="shared", name="x", size=4, enabled=False)])],
        iaas=[IaaSpec(index=3, model="1216", driver="none")],
        dlbs=[DlbSpec(vfs=2, provisioned=False)],
        sgx=SgxSpec(epc=1048576),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qats: [{model: 5xxx}]", r"'5xxx' - at `\$.qats\[0\].model`"),
        ("qats: [{vfs: 4, total-vfs: 3}]", "total-vfs is 3, expected 4 to 127"),
        ("qats: [{services: 'sym asym'}]", "services is 'sym asym'"),
        ("dsas: [{queues: [{}, {}], max-queues: 1}]", "number of queues is 2, expected 0 to 1"),
        ("dsas: [{queues: [{name: a/b}]}]", "name is 'a/b'"),
        ("dlbs: [{vfs: 17}]", "vfs is 17"),
        ("sgx: {epc: -1}", "epc is -1"),
        ("iommu: maybe", "maybe"),
    ],
)
def test_an_error_in_a_description_is_reported_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=message):
        NodeSpec.load(path)


def test_default_addresses_are_unique() -> None:
    kinds = ("qat", "dsa", "iaa", "dlb")
    for numa_nodes in (0, 1, 2, 5):
        places = [offload_address(kind, index, numa_nodes) for kind in kinds for index in range(256)]
        assert len(set(places)) == 4 * 256


def test_a_removed_virtual_function_leaves_no_link_and_can_be_disabled() -> None:
    kernel = Kernel(EVERYTHING)
    physical, virtual = "/sys/bus/pci/devices/0000:62:00.0", "/sys/bus/pci/devices/0000:62:00.1"
    if not kernel.exists(virtual):
        kernel.write(f"{physical}/sriov_numvfs", "1")
    kernel.write(f"{virtual}/remove", "1")
    assert dangling(kernel) == []
    kernel.write(f"{physical}/sriov_numvfs", "0")
    kernel.write(f"{physical}/sriov_numvfs", "1")
    assert kernel.exists(virtual)


NAMES = st.sampled_from(
    ["0000:61:00.0", "0000:61:00.1", "0000:61:00.2", "0000:60:01.0", "0000:62:00.0", "0000:62:00.1"]
)
PARTS = st.sampled_from(["dsa0", "iax1", "wq0.0", "wq0.1", "wq1.0"])
TEXTS = st.one_of(
    NAMES,
    PARTS,
    st.sampled_from(
        ["0", "1", "2", "16", "up", "down", "sym;asym", "vfio-pci", "\n", "user", "dedicated", "8086 4941"]
    ),
    st.text(max_size=12),
)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_sequence_of_writes_confuses_the_kernel(data: st.DataObject) -> None:
    kernel = Kernel(EVERYTHING)
    often = [f"/sys/bus/pci/drivers/{name}/{file}" for name in ("vfio-pci", "4xxx", "4xxxvf", "dlb2", "idxd")
             for file in ("bind", "unbind")]  # fmt: skip
    often += [f"/sys/bus/dsa/drivers/{name}/{file}" for name in ("idxd", "user") for file in ("bind", "unbind")]
    often += [f"/sys/bus/pci/devices/0000:{place}/sriov_numvfs" for place in ("61:00.0", "62:00.0")]
    for _ in range(data.draw(st.integers(1, 25))):
        writable = [path for path in attributes(kernel) if kernel.tree.attribute(path).write]
        path = data.draw(st.one_of(st.sampled_from(writable), st.sampled_from(often)))
        if data.draw(st.booleans()):
            (kernel.hold if data.draw(st.booleans()) else kernel.release)("vfio/vfio")
        refusal(kernel, path, data.draw(TEXTS))
        assert dangling(kernel) == []
    for path in attributes(kernel):
        if kernel.tree.attribute(path).mode & 0o444:
            try:
                kernel.read_bytes(path)
            except OSError as error:
                assert error.errno in (errno.EINVAL, errno.ENXIO, errno.EOPNOTSUPP)  # noqa: PT017 - it need not raise
    nodes = [path for path in attributes(kernel, "/dev") if not path.startswith("/dev/char/")]
    assert len(kernel.list("/dev/char")) == len(nodes) == len(kernel.list("/sys/dev/char"))
