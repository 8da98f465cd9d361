"""Claims with `access: vfio`: functions are bound to VFIO for a claim, and back."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from draclaims import UnitOffers, World, devices_of, error_of, ref
from drafaults import Faults, FaultyHost
from trees import link, write
from waiting import until

from accelplane.devices import Allocation, Unit
from accelplane.dra import hardware
from accelplane.dra.configuration import VFIO_CLASS
from accelplane.dra.journal import Rebind
from accelplane.dra.model import ClaimError, ClaimRef, Offer
from accelplane.dra.preparer import Preparer
from accelplane.dra.vfio import plan
from accelplane.host import Host
from accelplane.host.drivers import bind, driver_of, driver_override, vfio_group
from accelplane.kubelet.server import AllocationError
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import QatSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

PFS = ("0000:61:00.0", "0000:62:00.0")
VFS = ("0000:61:00.1", "0000:62:00.1")
GPU = "0000:03:00.0"


def vfio_config(**fields: object) -> dict[str, object]:
    parameters = {"apiVersion": "gpu.intel.com/v1alpha1", "kind": "GpuConfig", "access": "vfio", **fields}
    return {"source": "FromClaim", "opaque": {"driver": "gpu.intel.com", "parameters": parameters}}


class SlowHost(FaultyHost):
    """Binding of one function returns when `release` is set."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel, Faults())
        self.slow = ""
        self.started, self.release = threading.Event(), threading.Event()

    def write(self, path: str, text: str) -> None:
        if path.endswith("/bind") and text == self.slow:
            self.started.set()
            self.release.wait(10)
        super().write(path, text)


@pytest.fixture
def host() -> SlowHost:
    qats = [QatSpec(bdf=pf, vfs=1) for pf in PFS]
    return SlowHost(Kernel(NodeSpec(qats=qats, loaded=("vfio-pci",))))


@pytest.fixture
def world(tmp_path: Path, host: SlowHost) -> World:
    units = [
        Unit(id=vf, parent=pf, health=vf, attributes={"pciAddress": vf, "driver": "4xxxvf"})
        for vf, pf in zip(VFS, PFS, strict=True)
    ]
    return World(tmp_path, UnitOffers(*units), host=host)


async def test_function_is_bound_for_the_claim_and_gets_its_driver_back(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device(), config=[vfio_config()])

    devices_of((await preparer.prepare([claim]))["a1"])

    group = vfio_group(world.host, VFS[0])
    nodes = [node["path"] for node in world.cdi_file("a1")[f"a1-{world.device()}"]["deviceNodes"]]
    assert nodes[:2] == ["/dev/vfio/vfio", f"/dev/vfio/{group}"]
    assert driver_of(world.host, VFS[0]) == "vfio-pci"
    assert preparer.bound()[VFS[0]].attributes["driver"] == "vfio-pci"
    await preparer.unprepare([claim])
    assert driver_of(world.host, VFS[0]) == "4xxxvf"


async def test_bound_units_are_known_after_a_restart(world: World) -> None:
    preparer = await world.start()
    await preparer.prepare([world.claim("a1", world.device(), config=[vfio_config()])])
    before = preparer.bound()
    await preparer.close()

    assert (await world.start()).bound() == before


async def test_function_that_was_bound_before_stays_bound(world: World) -> None:
    bind(world.host, VFS[0], "vfio-pci")
    preparer = await world.start(manage_binding=False)
    claim = world.claim("a1", world.device(), config=[vfio_config()])

    devices_of((await preparer.prepare([claim]))["a1"])
    await preparer.unprepare([claim])

    assert driver_of(world.host, VFS[0]) == "vfio-pci"
    assert preparer.bound() == {}


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
async def test_function_gets_its_driver_back_although_the_journal_file_is_damaged(world: World, kept: float) -> None:
    claim = await bound_claim(world)
    damage(world, kept)
    world.offers.offers, world.names = {}, {}  # the plugin does not find it while it is bound to VFIO
    preparer = await world.start()

    assert preparer.prepared() == {VFS[0]: ("a1",)}
    assert await preparer.unprepare([claim]) == {"a1": None}
    assert driver_of(world.host, VFS[0]) == "4xxxvf"
    assert driver_override(world.host, VFS[0]) == ""
    assert world.leftovers() == []


async def test_claim_that_is_prepared_again_after_its_file_was_damaged_gives_the_function_back(world: World) -> None:
    claim = await bound_claim(world)
    damage(world, 0.0)
    preparer = await world.start()

    devices_of((await preparer.prepare([claim]))["a1"])
    assert driver_of(world.host, VFS[0]) == "vfio-pci"
    await preparer.unprepare([claim])

    assert driver_of(world.host, VFS[0]) == "4xxxvf"


async def test_function_stays_bound_after_a_damaged_file_if_binding_is_disabled(world: World) -> None:
    claim = await bound_claim(world)
    damage(world, 0.0)
    preparer = await world.start(manage_binding=False)

    assert await preparer.unprepare([claim]) == {"a1": None}
    assert driver_of(world.host, VFS[0]) == "vfio-pci"


async def bound_claim(world: World) -> ClaimRef:
    """A claim whose function is bound to VFIO, after the end of the process."""
    preparer = await world.start()
    claim = world.claim("a1", world.device(), config=[vfio_config()])
    devices_of((await preparer.prepare([claim]))["a1"])
    await preparer.close()
    return claim


def damage(world: World, kept: float) -> None:
    """Leaves the beginning of the claim's journal file, without its undo steps."""
    path = world.directory / "claims/a1.json"
    text = path.read_text().replace('"undo":', '"undone":')
    path.write_text(text[: int(len(text) * kept)])


async def test_class_of_intel_selects_vfio_without_configuration(world: World) -> None:
    preparer = await world.start()
    requests = [{"name": "r0", "exactly": {"deviceClassName": VFIO_CLASS}}]

    await preparer.prepare([world.claim("a1", world.device(), requests=requests)])

    assert driver_of(world.host, VFS[0]) == "vfio-pci"


async def test_function_is_not_bound_if_binding_is_disabled(world: World) -> None:
    preparer = await world.start(manage_binding=False)

    answer = await preparer.prepare([world.claim("a1", world.device(), config=[vfio_config()])])

    assert "bound to 4xxxvf, expected a VFIO driver" in error_of(answer["a1"])
    assert world.leftovers() == []


async def test_binding_that_blocks_delays_no_other_unit(world: World, host: SlowHost) -> None:
    preparer = await world.start()
    slow, other = (world.claim(f"a{n}", world.device(n), config=[vfio_config()]) for n in (0, 1))
    host.slow = VFS[0]
    call = asyncio.create_task(preparer.prepare([slow]))

    devices_of((await preparer.prepare([other]))["a1"])

    assert not call.done()
    host.release.set()
    devices_of((await call)["a0"])


async def blocked(preparer: Preparer, host: SlowHost, claim: ClaimRef) -> str:
    """The answer while the function of the claim is being bound."""
    host.slow = VFS[0]
    error_of((await preparer.prepare([claim]))[claim.uid])
    await until(host.started.is_set)
    return error_of((await preparer.prepare([claim]))[claim.uid])


async def test_call_that_takes_too_long_is_answered_with_what_it_does(world: World, host: SlowHost) -> None:
    preparer = await world.start(time_limit=0.05)
    claim = world.claim("a0", world.device(), config=[vfio_config()])

    assert f"still preparing {world.device()} (binding, " in await blocked(preparer, host, claim)
    assert "still unpreparing" in error_of((await preparer.unprepare([claim]))["a0"])
    host.release.set()
    await preparer.idle()
    assert world.leftovers() == []


async def test_result_of_a_binding_that_took_long_is_used_by_the_next_call(world: World, host: SlowHost) -> None:
    preparer = await world.start(time_limit=0.05)
    claim = world.claim("a0", world.device(), config=[vfio_config()])
    await blocked(preparer, host, claim)
    host.release.set()
    await preparer.idle()
    writes = list(host.writes)

    await preparer.prepare([claim])
    await preparer.idle()

    assert host.writes == writes
    assert world.journal()["a0"]["state"] == "prepared"


async def test_close_leaves_unfinished_work_to_the_next_start(world: World, host: SlowHost) -> None:
    preparer = await world.start(time_limit=0.05)
    claim = world.claim("a0", world.device(), config=[vfio_config()])
    await blocked(preparer, host, claim)

    await preparer.close(seconds=0.0)

    second = await world.start()
    call = asyncio.create_task(second.prepare([claim]))
    await until(lambda: "in another instance" in str(second._tasks._progress))
    host.release.set()
    await preparer.idle()
    devices_of((await call)["a0"])


def group_tree(root: Path, **drivers: str) -> Host:
    """A GPU bound to xe, and other functions of its IOMMU group with their drivers."""
    for address, driver in {GPU: "xe", **drivers}.items():
        device = root / "sys/bus/pci/devices" / address
        write(device / "class", "0x040300\n")
        write(device / "driver_override", "(null)\n")
        write(device / "device", "0x56c0\n")
        write(root / "sys/kernel/iommu_groups/7/devices" / address, "")
        link(device / "iommu_group", root / "sys/kernel/iommu_groups/7")
        if driver:
            link(device / "driver", root / "sys/bus/pci/drivers" / driver)
    (root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (root / "sys/class/iommu/dmar0").mkdir(parents=True)
    return Host(root)


def refusal(host: Host, holders: dict[str, str] | None = None) -> str:
    with pytest.raises(ClaimError) as raised:
        plan(host, GPU, holders or {}, manage_binding=True)
    return str(raised.value)


def test_gpu_is_not_bound_while_another_function_of_its_group_has_a_driver(tmp_path: Path) -> None:
    host = group_tree(tmp_path, **{"0000:04:00.0": "snd_hda_intel"})

    message = refusal(host)

    assert "0000:04:00.0 of its IOMMU group is bound to snd_hda_intel" in message


def test_gpu_is_not_bound_while_another_function_of_its_group_is_held(tmp_path: Path) -> None:
    host = group_tree(tmp_path, **{"0000:04:00.0": "vfio-pci"})

    assert "0000:04:00.0 of its IOMMU group is held by claim a/b" in refusal(host, {"0000:04:00.0": "claim a/b"})


def test_bridges_and_unbound_functions_of_the_group_do_not_matter(tmp_path: Path) -> None:
    host = group_tree(tmp_path, **{"0000:00:01.0": "pcieport", "0000:04:00.0": "", "0000:05:00.0": "bridge_driver"})
    write(tmp_path / "sys/bus/pci/devices/0000:05:00.0/class", "0x060400\n")

    step = plan(host, GPU, {}, manage_binding=True)

    assert step == Rebind(address=GPU, bound="vfio-pci", driver="xe")


def test_gpu_is_bound_to_the_vfio_driver_of_xe_if_it_is_loaded(tmp_path: Path) -> None:
    host = group_tree(tmp_path)
    (tmp_path / "sys/bus/pci/drivers/xe-vfio-pci").mkdir()

    step = plan(host, GPU, {}, manage_binding=True)

    assert step is not None
    assert step.bound == "xe-vfio-pci"


def test_gpu_with_virtual_functions_is_not_bound(tmp_path: Path) -> None:
    host = group_tree(tmp_path)
    write(tmp_path / f"sys/bus/pci/devices/{GPU}/sriov_numvfs", "4\n")

    assert "has 4 virtual functions" in refusal(host)


def test_gpu_is_not_bound_while_a_process_has_its_node_open(tmp_path: Path) -> None:
    host = group_tree(tmp_path)
    (tmp_path / f"sys/bus/pci/devices/{GPU}/drm/card0").mkdir(parents=True)
    link(tmp_path / "proc/4711/fd/5", "/dev/dri/card0")

    assert "process 4711 has its DRM node open" in refusal(host)


def test_function_without_iommu_group_is_not_bound(tmp_path: Path) -> None:
    write(tmp_path / f"sys/bus/pci/devices/{GPU}/class", "0x030000\n")

    assert "has no IOMMU group" in refusal(Host(tmp_path))


async def test_admin_access_to_all_devices_does_not_need_those_that_are_bound_to_vfio(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = await world.start()
    devices_of((await preparer.prepare([world.claim("a1", world.device(), config=[vfio_config()])]))["a1"])
    world.offers.offers = {**world.offers.offers, VFS[0]: Offer(unit=preparer.bound()[VFS[0]], owner="dra")}
    allocation = world.offers.allocation

    async def of_scanned_units(units: Sequence[str]) -> Allocation:
        if VFS[0] in units:
            raise AllocationError(f"device {VFS[0]} is no longer on this node")
        return await allocation(units)

    monkeypatch.setattr(world.offers, "allocation", of_scanned_units)
    results = [world.result(world.device(number), adminAccess=True) for number in (0, 1)]
    claim = world.api.add(ref("a2"), results)

    assert len(devices_of((await preparer.prepare([claim]))["a2"])) == 2
    assert "UNIT0=0000:62:00.1" in world.cdi_file("a2")["a2-r0"]["env"]
    await preparer.unprepare([claim])
    assert driver_of(world.host, VFS[0]) == "vfio-pci"


async def test_function_that_another_instance_releases_meanwhile_is_checked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver was that of another claim, so nothing would have to be changed or undone."""
    first, second = await world.start(), await world.start()
    a1 = world.claim("a1", world.device(), config=[vfio_config()])
    b2 = world.claim("b2", world.device(), config=[vfio_config()])
    begun, bound, checked, released = (threading.Event() for _ in range(4))
    undo_steps = hardware.undo_steps

    def delayed(host: Host, device: hardware.ClaimDevice, *arguments: Any, **options: Any) -> Any:
        if device.holding.cdi_ids[0].endswith(f"=a1-{world.device()}") or begun.is_set():
            return undo_steps(host, device, *arguments, **options)
        begun.set()
        bound.wait(10)
        found = undo_steps(host, device, *arguments, **options)
        checked.set()
        released.wait(10)
        return found

    monkeypatch.setattr(hardware, "undo_steps", delayed)
    call = asyncio.create_task(second.prepare([b2]))
    await until(begun.is_set)
    devices_of((await first.prepare([a1]))["a1"])
    bound.set()
    await until(checked.is_set)
    await first.unprepare([a1])
    released.set()

    devices_of((await call)["b2"])
    assert driver_of(world.host, VFS[0]) == "vfio-pci"
    await second.unprepare([b2])
    assert driver_of(world.host, VFS[0]) == "4xxxvf"
