"""Claims over units in any order, with crashes and reboots: no unit has two holders, and nothing is left over."""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import memorydirectory
from draclaims import UnitOffers, World, kill, ref
from drafaults import Faults, Killed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from thoroughness import examples
from trees import write

from accelplane.devices import Unit, UnitNode
from accelplane.dra import durable
from accelplane.dra.model import ClaimError, ClaimRef, DeviceName

UNITS = ("0000:03:00.0", "0000:04:00.0")
DEVICES = {
    "gpu-a": DeviceName(unit=UNITS[0]),
    "gpu-a-t0": DeviceName(unit=UNITS[0], slot="t0", tile=0),
    "gpu-a-t1": DeviceName(unit=UNITS[0], slot="t1", tile=1),
    "gpu-b": DeviceName(unit=UNITS[1], multiple=True),
}
CLAIMS = tuple(f"c{number}" for number in range(4))

uids = st.sampled_from(CLAIMS)
allocations = st.lists(st.sampled_from(sorted(DEVICES)), min_size=1, max_size=2, unique=True)
shares = st.sampled_from(["", "11111111-a", "22222222-b"])


class ClaimMachine(RuleBasedStateMachine):
    """One driver with two units, one of which is shared and one of which has parts."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(
            tempfile.mkdtemp(prefix="claims-", dir=memorydirectory.path() if memorydirectory.in_memory() else None)
        )
        self.runner = asyncio.Runner()
        self.faults = Faults()
        self.patch = self.faults.of_files()
        self.patch.__enter__()
        units = []
        for number, address in enumerate(UNITS):
            write(self.root / f"dev/dri/card{number}", "")
            nodes = [UnitNode(f"/dev/dri/card{number}")]
            units.append(Unit(id=address, health=address, attributes={"pciAddress": address}, nodes=nodes))
        self.world = World(self.root, UnitOffers(*units))
        self.world.names = dict(DEVICES)
        self.preparer = self._run(self.world.start())
        self.answered: dict[str, Sequence[str]] = {}

    def _run(self, work):
        return self.runner.run(work)

    def _entries(self) -> list[str]:
        """The UIDs with a file in the journal, damaged ones included."""
        return sorted({path.stem for path in (self.world.directory / "claims").iterdir()})

    async def _calls(self, *calls: tuple[str, ClaimRef]) -> None:
        """Makes the calls at the same time. Restarts the driver if it is killed."""
        tasks = [getattr(self.preparer, kind)([claim]) for kind, claim in calls]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await self.preparer.idle()
        if any(isinstance(answer, Killed) for answer in answers):
            kill(self.preparer)
            self.faults.arm(0, "kill")
            self.preparer = await self.world.start()
        self.faults.arm(0, "kill")
        for (kind, claim), answer in zip(calls, answers, strict=True):
            if isinstance(answer, BaseException):
                continue
            found = answer[claim.uid]
            if kind == "prepare" and len(calls) == 1 and not isinstance(found, ClaimError):
                names = [name for device in found for name in device.cdi_ids]
                assert self.answered.setdefault(claim.uid, names) == names
                defined = {f"k8s.gpu.intel.com/claim={name}" for name in self.world.cdi_file(claim.uid) or ()}
                assert set(names) <= defined
            if kind == "unprepare" and len(calls) == 1 and found is None:
                assert claim.uid not in self._entries()
                assert self.world.cdi_file(claim.uid) is None

    @rule(uid=uids, devices=allocations, share=shares, admin=st.sampled_from([False, False, True]))
    def start_pod(self, uid: str, devices: list[str], share: str, admin: bool) -> None:
        """The scheduler allocates the claim unless it is allocated, and the kubelet has it prepared."""
        if self.world.api.path(ref(uid)) not in self.world.api.objects and uid not in self._entries():
            self.answered.pop(uid, None)
            fields = {"shareID": share} if share else {}
            results = [
                self.world.result(device, f"r{number}", adminAccess=admin, **fields)
                for number, device in enumerate(devices)
            ]
            self.world.api.add(ref(uid), results)
        self._run(self._calls(("prepare", ref(uid))))

    @rule(uid=uids)
    def delete(self, uid: str) -> None:
        self.world.api.objects.pop(self.world.api.path(ref(uid)), None)

    @rule(uid=uids)
    def unprepare(self, uid: str) -> None:
        self._run(self._calls(("unprepare", ref(uid))))

    @rule(calls=st.lists(st.tuples(st.sampled_from(["prepare", "unprepare"]), uids), min_size=2, max_size=5))
    def calls_at_the_same_time(self, calls: list[tuple[str, str]]) -> None:
        self._run(self._calls(*[(kind, ref(uid)) for kind, uid in calls]))

    @rule(
        kind=st.sampled_from(["prepare", "unprepare"]),
        uid=uids,
        step=st.integers(1, 20),
        fault=st.sampled_from(["kill", "fail"]),
    )
    def call_with_a_fault(self, kind: str, uid: str, step: int, fault: str) -> None:
        self.faults.arm(step, fault)  # pyright: ignore[reportArgumentType] - one of both
        self._run(self._calls((kind, ref(uid))))

    @rule(graceful=st.booleans())
    def restart(self, graceful: bool) -> None:
        if graceful:
            self._run(self.preparer.close())
        else:
            kill(self.preparer)
        self.preparer = self._run(self.world.start(orphan_delay=1000.0))

    @rule()
    def reboot(self) -> None:
        kill(self.preparer)
        self.world.reboot()
        self.preparer = self._run(self.world.start(orphan_delay=1000.0))

    @precondition(lambda self: self._entries())
    @rule(data=st.data())
    def damage_a_file(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self._entries()))
        path = data.draw(
            st.sampled_from(
                [
                    self.world.directory / f"claims/{uid}.json",
                    self.world.cdi_dir / f"k8s.gpu.intel.com-claim_{uid}.json",
                ]
            )
        )
        if path.exists():
            content = path.read_bytes()
            durable.write(str(path), content[: len(content) * 3 // 4], 0o600)

    @invariant()
    def no_unit_has_two_holders(self) -> None:
        held: dict[str, list[str]] = {}
        for path in (self.world.directory / "claims").glob("*.json"):
            try:
                entry = self.world.read(path)
            except ValueError:
                continue
            for device in entry["devices"]:
                if not device["admin"]:
                    held.setdefault(device["unit"], []).append(f"{device['slot']}")
        for slots in held.values():
            assert len(slots) == 1 or "" not in slots
            assert len(set(slots)) == len(slots)

    @invariant()
    def every_file_belongs_to_an_entry(self) -> None:
        entries = self._entries()
        for name in self.world.leftovers():
            assert not name.endswith(".tmp")
            assert any(uid in name for uid in entries), name

    def teardown(self) -> None:
        self._run(self._end())
        self.patch.__exit__(None, None, None)
        self.runner.close()
        shutil.rmtree(self.root)

    async def _end(self) -> None:
        for uid in CLAIMS:
            assert await self.preparer.unprepare([ref(uid)]) == {uid: None}
        assert self.world.leftovers() == []
        assert self.preparer.prepared() == {}
        await self.preparer.close()


TestClaims = ClaimMachine.TestCase
TestClaims.settings = settings(max_examples=examples(12), stateful_step_count=20)
