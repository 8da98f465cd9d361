"""A failure or the end of the process at each step of Prepare and Unprepare leaves nothing behind.

The device is a function that is bound to VFIO for the claim, in the emulated kernel. It is a QAT function, because the
kernel emulates no GPU; the preparer does not distinguish them.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from draclaims import UnitOffers, World, devices_of, error_of, kill
from drafaults import Faults, FaultyHost, Killed
from thoroughness import places

from accelplane.devices import Unit
from accelplane.dra import durable
from accelplane.dra.model import ClaimRef
from accelplane.dra.preparer import Preparer
from accelplane.host.drivers import driver_of, driver_override
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import QatSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

Call: TypeAlias = Literal["prepare", "unprepare"]

VF = "0000:61:00.1"
VFIO = {"source": "FromClaim", "opaque": {"driver": "gpu.intel.com", "parameters": {
    "apiVersion": "gpu.intel.com/v1alpha1", "kind": "GpuConfig", "access": "vfio"}}}  # fmt: skip


class VfioWorld(World):
    """A node whose function is bound to VFIO for claims. `faults` are those of files and kernel."""

    def __init__(self, root: Path) -> None:
        self.faults = Faults()
        kernel = Kernel(NodeSpec(qats=[QatSpec(bdf="0000:61:00.0", vfs=2)], loaded=("vfio-pci",)))
        unit = Unit(id=VF, parent="0000:61:00.0", health=VF, attributes={"pciAddress": VF, "driver": "4xxxvf"})
        self.host = FaultyHost(kernel, self.faults)
        super().__init__(root, UnitOffers(unit), host=self.host)
        self.vfio_claim = self.claim("a1", self.device(), config=[VFIO])

    @property
    def binding(self) -> tuple[str, str]:
        return driver_of(self.host, VF), driver_override(self.host, VF)


BOUND, UNBOUND = ("vfio-pci", "vfio-pci"), ("4xxxvf", "")


async def _survives(preparer: Preparer, claim: ClaimRef, call: Call) -> bool:
    """Calls the preparer; returns whether its process has not been killed."""
    try:
        await getattr(preparer, call)([claim])
    except Killed:
        kill(preparer)
        return False
    return True


async def _check(world: VfioWorld, preparer: Preparer) -> None:
    """The claim is prepared completely, or nothing is left of it. Then it can be prepared and unprepared."""
    state = "prepared" if world.leftovers() else "absent"
    assert world.binding == (BOUND if state == "prepared" else UNBOUND)
    if state == "prepared":
        assert world.leftovers() == ["a1.json", "k8s.gpu.intel.com-claim_a1.json"]
        assert world.journal()["a1"]["state"] == "prepared"
    assert preparer.cleanup() == {}
    (device,) = devices_of((await preparer.prepare([world.vfio_claim]))["a1"])
    assert len(device.cdi_ids) == 2
    assert world.binding == BOUND
    assert list(preparer.bound()) == [VF]
    assert await preparer.unprepare([world.vfio_claim]) == {"a1": None}
    assert world.leftovers() == []
    assert world.binding == UNBOUND
    assert preparer.bound() == {}


async def _number_of_steps(root: Path, call: Call) -> int:
    world = VfioWorld(root)
    with world.faults.of_files():
        preparer = await _started(world, call)
        assert await _survives(preparer, world.vfio_claim, call)
    return len(world.faults.steps)


async def _started(world: VfioWorld, call: Call) -> Preparer:
    """A preparer before the call. The steps of the call are counted from 1."""
    preparer = await world.start()
    if call == "unprepare":
        devices_of((await preparer.prepare([world.vfio_claim]))["a1"])
    world.faults.arm(0, "kill")
    return preparer


@pytest.mark.parametrize(("call", "first"), [("prepare", 0), ("unprepare", 1)])
async def test_process_killed_at_each_step(tmp_path: Path, call: Call, first: int) -> None:
    steps = await _number_of_steps(tmp_path / "all", call)
    assert steps > 10
    for step in places(steps, first):
        world = VfioWorld(tmp_path / str(step))
        with world.faults.of_files():
            preparer = await _started(world, call)
            world.faults.arm(step + 1, "kill")
            assert not await _survives(preparer, world.vfio_claim, call)
            world.faults.arm(0, "kill")
            await _check(world, await world.start())


async def test_process_killed_again_at_each_step_of_the_recovery(tmp_path: Path) -> None:
    async def recover(step: int) -> int:
        """Kills the process after it has bound the function, and the next one at the step; returns its steps."""
        world = VfioWorld(tmp_path / str(step))
        with world.faults.of_files():
            preparer = await world.start()
            world.faults.arm(9, "kill")
            assert not await _survives(preparer, world.vfio_claim, "prepare")
            assert world.binding == BOUND
            world.faults.arm(step, "kill")
            preparer = world.preparer()
            with contextlib.suppress(Killed):
                await preparer.restore()
                await preparer.idle()
            steps = len(world.faults.steps)
            kill(preparer)
            world.faults.arm(0, "kill")
            await _check(world, await world.start())
        return steps

    steps = await recover(0)
    assert steps > 10
    for step in places(steps, 2):
        await recover(step + 1)


@pytest.mark.parametrize(("call", "first"), [("prepare", 1), ("unprepare", 2)])
async def test_failure_of_each_step(tmp_path: Path, call: Call, first: int) -> None:
    for step in places(await _number_of_steps(tmp_path / "all", call), first):
        world = VfioWorld(tmp_path / str(step))
        with world.faults.of_files():
            preparer = await _started(world, call)
            world.faults.arm(step + 1, "fail")
            await _survives(preparer, world.vfio_claim, call)
            world.faults.arm(0, "fail")
            # The kubelet repeats a failed call, and ends every claim.
            await preparer.unprepare([world.vfio_claim])
            await _check(world, preparer)


@pytest.mark.parametrize("damaged", [False, True])
async def test_failed_undo_keeps_the_claim_and_is_repeated(tmp_path: Path, damaged: bool) -> None:
    world = VfioWorld(tmp_path)
    preparer = await world.start()
    devices_of((await preparer.prepare([world.vfio_claim]))["a1"])
    group = next(node["hostPath"] for node in world.cdi_file("a1")[f"a1-{world.device()}"]["deviceNodes"][1:])
    world.host.open_groups.add(group)
    if damaged:
        durable.write(str(world.directory / "claims/a1.json"), b"", 0o600)

    message = error_of((await preparer.unprepare([world.vfio_claim]))["a1"])

    assert "its VFIO group is open" in message
    assert preparer.cleanup() == {VF: world.journal()["a1"]["error"]}
    assert world.binding == BOUND
    other = error_of((await preparer.prepare([world.claim("b2", world.device())]))["b2"])
    assert "cannot be reset after claim shop/claim-a1" in other
    world.host.open_groups.clear()
    devices_of((await preparer.prepare([world.claim("b2", world.device())]))["b2"])
    assert list(world.journal()) == ["b2"]
    assert world.binding == UNBOUND


async def test_failed_undo_is_repeated_without_a_call_of_the_kubelet(tmp_path: Path) -> None:
    world = VfioWorld(tmp_path)
    preparer = await world.start(retry_delay=0.01)
    devices_of((await preparer.prepare([world.vfio_claim]))["a1"])
    group = next(node["hostPath"] for node in world.cdi_file("a1")[f"a1-{world.device()}"]["deviceNodes"][1:])
    world.host.open_groups.add(group)
    error_of((await preparer.unprepare([world.vfio_claim]))["a1"])

    world.host.open_groups.clear()
    while world.journal():
        await preparer.changed()

    assert world.binding == UNBOUND
    assert preparer.cleanup() == {}
    await preparer.close()


async def test_unit_that_vanished_is_unprepared(tmp_path: Path) -> None:
    world = VfioWorld(tmp_path)
    preparer = await world.start()
    devices_of((await preparer.prepare([world.vfio_claim]))["a1"])
    world.host.kernel.write("/sys/bus/pci/devices/0000:61:00.0/sriov_numvfs", "0")

    assert await preparer.unprepare([world.vfio_claim]) == {"a1": None}
    assert world.leftovers() == []


async def test_undo_is_left_out_after_a_reboot(tmp_path: Path) -> None:
    world = VfioWorld(tmp_path)
    preparer = await world.start()
    devices_of((await preparer.prepare([world.vfio_claim]))["a1"])
    await preparer.close()
    world.host.boot_id = "second"

    preparer = await world.start()

    assert preparer.bound() == {}
    assert await preparer.unprepare([world.vfio_claim]) == {"a1": None}
    # Bound by somebody else in this boot.
    assert world.binding == BOUND


async def test_boot_id_that_cannot_be_read_shows_no_reboot(tmp_path: Path) -> None:
    world = VfioWorld(tmp_path)
    preparer = await world.start()
    devices_of((await preparer.prepare([world.vfio_claim]))["a1"])
    await preparer.close()
    world.host.boot_id = ""

    preparer = await world.start()

    assert await preparer.unprepare([world.vfio_claim]) == {"a1": None}
    assert world.binding == UNBOUND


async def test_full_disk_after_the_first_change_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = VfioWorld(tmp_path)
    preparer = await world.start()
    write, calls = durable.write, iter(range(99))

    def full(path: str, data: bytes, mode: int) -> None:
        if next(calls) > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write(path, data, mode)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", full)
        message = error_of((await preparer.prepare([world.vfio_claim]))["a1"])

    assert "No space left on device" in message
    assert "could not be undone" not in message
    await _check(world, preparer)
