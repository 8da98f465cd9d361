"""Prepares the claims of one driver: `Preparer`.

A claim is read from the API server, its devices are checked, the journal gets what undoes the changes, the changes are
made and read back, and the CDI file is written. A claim that is prepared already is answered from the journal. Work
that takes longer than the time limit of a call continues, and the next call gets its result.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from accelplane.apiserver import ApiServer
from accelplane.devices import Unit
from accelplane.dra import cdi, hardware, planning, takeover, vfio
from accelplane.dra.adoption import Adoption, ForeignClaims
from accelplane.dra.boot import BOOT_ID, boot_of
from accelplane.dra.claims import Claim, ClaimReader
from accelplane.dra.claimtasks import EXPECTED, ClaimTasks, Devices, claim_error, claim_lock, log_failure
from accelplane.dra.cleanup import RETRY_DELAY, Cleanup
from accelplane.dra.devicestatus import DeviceStatus
from accelplane.dra.events import Reason
from accelplane.dra.hardware import ClaimDevice
from accelplane.dra.journal import Entry, Holding, JournalError, Rebind, ResetDriver, UndoStep
from accelplane.dra.model import ClaimError, ClaimRef, DeviceName, Offer, Offers, PreparedDevice
from accelplane.dra.store import ClaimStore, EntryChangedError
from accelplane.dra.unusedclaims import UnusedClaims
from accelplane.host import Host
from accelplane.host.blocking import in_thread
from accelplane.kubelet.notifier import Notifier
from accelplane.kubelet.podresources import NodeHolders

log = logging.getLogger(__name__)

TIME_LIMIT = 40.0  # the kubelet waits for 45 s
HOOK_LIMIT = 30.0  # of the plugin's hooks for a claim
ORPHAN_DELAY = 120.0  # longer than the kubelet takes to end the containers of a pod that was deleted by force
_CONFLICT_ATTEMPTS = 8
_OTHER_INSTANCE_INTERVAL = 0.2


class Preparer:
    """The `ClaimPreparer` of a driver, with its journal in `directory` and the files of claims in `cdi_dir`.

    With `cdi_groups` containers get the groups of their device nodes. `names` has the names of all devices of the
    driver. `holders` returns the containers of the node that have devices, and raises `PodResourcesError`. Without
    `manage_binding` no function is bound to VFIO. `on_event` is called with reason and text of events of the node. With
    `device_status` the status of claims shows the prepared devices. With `take_over` the first call adopts the claims
    of a driver of Intel: the kubelet makes none while that one runs. The owner calls `restore` before it serves, and
    `close` at the end.
    """

    def __init__(
        self,
        api: ApiServer,
        driver: str,
        node: str,
        offers: Offers,
        *,
        directory: str,
        cdi_dir: str,
        cdi_groups: bool = False,
        host: Host,
        manage_binding: bool,
        holders: Callable[[], Awaitable[NodeHolders]],
        names: Callable[[], Mapping[str, DeviceName]],
        on_event: Callable[[Reason, str], None] = lambda _reason, _text: None,
        device_status: bool = False,
        take_over: bool = False,
        time_limit: float = TIME_LIMIT,
        orphan_delay: float = ORPHAN_DELAY,
        retry_delay: float = RETRY_DELAY,
        hook_limit: float = HOOK_LIMIT,
    ) -> None:
        self.driver = driver
        self._node = node
        self._offers = offers
        self._host = host
        self._manage_binding = manage_binding
        self._names = names
        self._on_event = on_event
        self._hook_limit = hook_limit
        self._claims = ClaimReader(api)
        self._unused = UnusedClaims(self._claims, holders, orphan_delay)
        self._store = ClaimStore(
            driver, directory, cdi_dir, groups=cdi_groups, names=names, manage_binding=manage_binding
        )
        self._closing: asyncio.Task[None] | None = None
        self._adoption = Adoption(self._store, self._adopt if take_over else None, on_event)
        self._changed = Notifier()
        self._reported: Sequence[Mapping[str, object]] = ()
        self._tasks = ClaimTasks(time_limit, self._notify)
        self._cleanup = Cleanup(self._tasks, self._store, self._unused, retry_delay)
        status = DeviceStatus(api, self._claims, driver, node, self._store.entry)
        self._status = status if device_status else None
        self._status_tasks: set[asyncio.Task[None]] = set()

    # The protocol `ClaimPreparer`.

    async def prepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, Sequence[PreparedDevice] | ClaimError]:
        if (problem := await self._adoption.problem()) is not None:
            return {claim.uid: problem for claim in claims}
        return await self._tasks.answers("prepare", claims, self._prepare)

    async def unprepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, ClaimError | None]:
        if (problem := await self._adoption.problem()) is not None:
            return {claim.uid: problem for claim in claims}
        answers = await self._tasks.answers("unprepare", claims, self._unprepare)
        return {uid: answer if isinstance(answer, ClaimError) else None for uid, answer in answers.items()}

    def prepared(self) -> Mapping[str, Sequence[str]]:
        found = {unit: {file.uid: None} for file in self._store.damaged.values() for unit in file.units}
        for entry in self._store.entries.values():
            for holding in entry.devices:
                found.setdefault(holding.unit, {})[entry.claim] = None
        return {unit: tuple(claims) for unit, claims in found.items()}

    def held(self) -> Collection[str]:
        """The units in `prepared`, with claims of other instances until now. Blocks.

        Raises `JournalError`, also for a damaged file that does not say which units its claim holds.
        """
        self._store.refresh()
        if unknown := next((file for file in self._store.damaged.values() if not file.units), None):
            raise JournalError(f"{unknown.problem}, its devices are not known; remove it when its pod has ended")
        return self.prepared().keys()

    def held_devices(self) -> Mapping[str, int]:
        """The number of devices of each unit that claims without admin access hold."""
        entries = self._store.entries.values()
        return Counter(each.unit for entry in entries for each in entry.devices if not each.admin)

    def bound(self) -> Mapping[str, Unit]:
        present = [entry for entry in self._store.entries.values() if boot_of(entry.boot) == boot_of(self._store.boot)]
        return {unit.id: unit for entry in present for unit in entry.bound}

    def cleanup(self) -> Mapping[str, str]:
        found = {unit: file.problem for file in self._store.damaged.values() for unit in file.units}
        for entry in self._store.entries.values():
            if entry.error:
                found.update(dict.fromkeys((each.unit for each in entry.devices if not each.admin), entry.error))
        return found

    async def changed(self) -> None:
        await self._changed.wait()

    def _notify(self) -> None:
        """Notifies of a change since the last call, if there is one: each makes the agent check its units."""
        found = self.prepared(), self.bound(), self.cleanup()
        if found != self._reported:
            self._reported = found
            self._changed.notify_all()

    # The life of the owner.

    async def restore(self) -> None:
        """Reads the journal, writes missing CDI files, and starts to finish what a crash has interrupted.

        Raises `JournalError` or `OSError` if the journal or the directory of CDI files cannot be used.
        """
        if self._closing is not None:
            if self._tasks.busy:
                self._closing.cancel()  # it waits for these tasks
            await asyncio.wait((self._closing,))
        self._tasks.closed = False
        host = self._host.fresh()
        interrupted = await in_thread(lambda: self._store.open(host.text_or_empty(BOOT_ID), host))
        for file in self._store.damaged.values():
            log.error("%s", file.problem)
            self._on_event("ClaimJournalDamaged", f"{file.problem}; its devices are not used until its pod ends")
        for entry in interrupted:
            self._tasks.start("restore", entry.ref, self._finish_interrupted)
        if len(self._store.entries) > len(interrupted):
            self._cleanup.remove_unused(self._finish_orphan)
        self._notify()

    async def restore_files(self) -> None:
        """Writes CDI files of claims that another program has removed."""
        try:
            await in_thread(lambda: self._store.restore_files(self._host.fresh()))
        except (JournalError, OSError) as error:
            log.warning("%s: CDI files of claims are not restored: %s", self.driver, error)

    async def _adopt(self, found: ForeignClaims) -> None:
        entries = takeover.entries(found, self._names(), self._store.boot)
        units = {holding.unit for entry in entries for holding in entry.devices} & self._offers.units().keys()
        edits = {unit: await self._inherited_edits(unit) for unit in units}
        await in_thread(lambda: self._store.take_over(entries, edits))
        self._notify()

    async def _inherited_edits(self, unit: str) -> cdi.Edits:
        """What the CDI names of another driver mean for the unit, empty if it cannot be used now."""
        try:
            found = planning.plugin_edits(self._offers, await self._offers.allocation((unit,)))
            return await in_thread(lambda: self._store.current_edits(self._host.fresh(), found))
        except EXPECTED as error:
            log.warning("%s: its CDI names of another driver are not defined: %s", unit, error)
            return cdi.Edits()

    async def idle(self) -> None:
        """Waits for the end of all work on claims."""
        await self._tasks.idle()
        if self._status_tasks:
            await asyncio.wait(self._status_tasks)

    async def close(self, seconds: float = 5.0) -> None:
        """Waits for work in progress, at most `seconds`; no other work begins. The next `restore` finishes the rest."""
        self._tasks.closed = True
        self._cleanup.stop()
        self._closing = asyncio.create_task(self._close_when_idle(), name=f"end of the claims of {self.driver}")
        self._closing.add_done_callback(log_failure)
        await asyncio.wait((self._closing, *self._status_tasks), timeout=seconds)
        for task in self._status_tasks:
            task.cancel()

    async def _close_when_idle(self) -> None:
        """Until then other instances find that this one is alive, and do not touch its claims."""
        await self._tasks.idle()
        await self._adoption.idle()
        await in_thread(self._store.close)

    async def _read(self, uid: str) -> Entry | None:
        """The entry of the claim, when no other instance works on it any more."""
        while True:
            entry, busy = await in_thread(lambda: self._store.read(uid))
            if not busy:
                return entry
            self._tasks.report(uid, "the claim", "in another instance of this driver")
            await asyncio.sleep(_OTHER_INSTANCE_INTERVAL)

    # Prepare. The lock of the claim is held.

    async def _prepare(self, ref: ClaimRef) -> Devices:
        for _attempt in range(_CONFLICT_ATTEMPTS):
            try:
                return await self._prepare_once(ref)
            except EntryChangedError:
                continue
        raise ClaimError("the claim is changed by another instance of the driver again and again")

    async def _prepare_once(self, ref: ClaimRef) -> Devices:
        """Raises `EntryChangedError` if another instance has worked on the claim meanwhile."""
        entry = await self._read(ref.uid)
        units = {unit: offer.unit for unit, offer in self._offers.units().items()}
        if entry is not None and await in_thread(partial(self._store.is_prepared, entry, self._host.fresh(), units)):
            return [holding.prepared for holding in entry.devices]
        claim = await self._claims.allocated(ref)
        if entry is not None and entry.state != "prepared":
            await self._finish(entry)
            entry = None
        devices = self._claim_devices(ref, claim)
        if entry is not None and planning.differs(entry, devices):
            await self._finish(entry)
            entry = None
        self._tasks.report(ref.uid, devices[0].holding.device, "waiting for another claim")
        addresses = [device.address for device in devices if device.vfio]
        locks = {*await self._group_locks(addresses), *(_unit_lock(device.holding) for device in devices)}
        for _attempt in range(_CONFLICT_ATTEMPTS):
            async with self._tasks.locked(locks):
                devices = self._claim_devices(ref, claim)  # units may have changed while another claim had the locks
                wanted = Entry(
                    uid=ref.uid, namespace=ref.namespace, name=ref.name, state="preparing", boot=self._store.boot,
                    owner=self._store.owner, devices=planning.holdings(devices, entry),
                )  # fmt: skip
                if not locks.issuperset(map(_unit_lock, wanted.devices)):
                    raise EntryChangedError(ref.uid)
                made = self._store.conflict(wanted) or await self._make(wanted, entry, devices)
            if not isinstance(made, planning.Conflict):
                return made
            await self._resolve(*made)
        raise ClaimError(f"device {devices[0].holding.device} is held by other claims again and again")

    def _claim_devices(self, ref: ClaimRef, claim: Claim) -> list[ClaimDevice]:
        """The devices of the claim by what the node offers now. Raises `ClaimError`."""
        node = planning.Node(driver=self.driver, pool=self._node, names=self._names(), offers=self._offers.units())
        return planning.claim_devices(node, ref.uid, claim)

    async def _make(
        self, wanted: Entry, before: Entry | None, devices: Sequence[ClaimDevice]
    ) -> Devices | planning.Conflict:
        """Prepares a claim whose units are free in this process; their locks are held."""
        try:
            async with asyncio.timeout(self._hook_limit):
                edits, variables = await planning.allocations(devices, wanted.uid, self._offers)
        except TimeoutError:  # the claim could not be unprepared as long as a hook runs
            device = wanted.devices[0].device
            raise ClaimError(f"device {device}: hooks of its plugin have not ended in {self._hook_limit:g} s") from None
        offers = self._offers.units()
        steps, wanted, conflict = await in_thread(lambda: self._begin(wanted, before, devices, offers))
        if conflict is not None:
            return conflict
        self._notify()
        try:
            holdings = await self._apply(wanted, devices, steps)
            done = await in_thread(lambda: self._store.commit(holdings, devices, edits, variables, self._host.fresh()))
        except Exception as error:
            problem = claim_error(error)
            try:
                await self._undo(wanted, before, UNSET)
            except ClaimError as second:
                raise claim_error(second, f"{problem}; and it could not be undone: ") from error
            raise problem from error
        self._write_status(done.ref)
        return [holding.prepared for holding in done.devices]

    def _begin(
        self, wanted: Entry, before: Entry | None, devices: Sequence[ClaimDevice], offers: Mapping[str, Offer]
    ) -> tuple[Sequence[Sequence[UndoStep]], Entry, planning.Conflict | None]:
        """Writes the entry with its undo steps, which are returned by device. Blocks."""
        changes = self._store.check(wanted)
        if isinstance(changes, planning.Conflict):
            return (), wanted, changes
        host = self._host.fresh()
        holders = planning.function_holders(wanted.uid, self._store.entries.values(), offers)
        steps = [hardware.undo_steps(host, each, holders, manage_binding=self._manage_binding) for each in devices]
        undo = list(self._earlier_undo(wanted.uid, before))
        undo += [step for own in steps for step in own if step not in undo]
        wanted = replace(
            wanted, undo=undo, bound=planning.bound_units(devices, undo), config=planning.used_config(devices)
        )
        self._tasks.check_open()
        return steps, wanted, self._store.begin(wanted, before, changes)

    def _earlier_undo(self, uid: str, before: Entry | None) -> Sequence[UndoStep]:
        """The undo steps of the claim's entry before, or of its damaged file."""
        if before is not None:
            return before.undo if boot_of(before.boot) == boot_of(self._store.boot) else ()
        return self._store.damaged[uid].undo if uid in self._store.damaged else ()

    async def _apply(self, entry: Entry, devices: Sequence[ClaimDevice], steps: Sequence[Sequence[UndoStep]]) -> Entry:
        """Makes the changes for the devices. Returns the entry with what the journal has to record about them."""
        holdings = list(entry.devices)
        for place, (device, own) in enumerate(zip(devices, steps, strict=True)):
            if word := hardware.action(device, own):
                self._tasks.report(entry.uid, device.holding.device, word)
                afu = await in_thread(partial(hardware.apply, self._host.fresh(), device, own))
                holdings[place] = replace(holdings[place], afu=afu)
        return replace(entry, devices=holdings)

    # Conflicts.

    async def _resolve(self, wanted: Holding, holder: Entry) -> None:
        """Undoes the holder's preparation if no pod uses it. Raises `ClaimError` if it holds the device.

        Does nothing if the holder is not what it was when the conflict was found.
        """
        name = claim_lock(holder.uid)
        if self._tasks.is_locked(name) or await in_thread(lambda: self._store.alive(holder)):
            raise _held(wanted, holder)
        async with self._tasks.locked((name,)):
            if await self._read(holder.uid) != holder:
                return
            if holder.state == "prepared" and not await self._unused.contains(holder):
                raise _held(wanted, holder)
            why = "no pod uses it" if holder.state == "prepared" else "it was interrupted"
            log.warning("claim %s: undone, because %s", holder.claim, why)
            try:
                await self._finish(holder)
            except ClaimError as error:
                raise claim_error(
                    error, f"device {wanted.device} cannot be reset after claim {holder.claim}: "
                ) from None

    async def _finish_orphan(self, ref: ClaimRef) -> Devices:
        """Undoes the claim if no pod uses it. If that fails it stays in the journal with the error."""
        entry = await self._read(ref.uid)
        if entry is None or entry.state != "prepared" or not await self._unused.contains(entry):
            return ()
        log.warning("claim %s: undone, because no pod uses it", entry.claim)
        return await self._finish(entry)

    async def _finish_interrupted(self, ref: ClaimRef) -> Devices:
        """Undoes the claim unless it was prepared since, by a task before this one or by another instance."""
        entry = await self._read(ref.uid)
        return () if entry is None or entry.state == "prepared" else await self._finish(entry)

    # Unprepare. The lock of the claim is held.

    async def _unprepare(self, ref: ClaimRef) -> Devices:
        while True:
            found = await self._read(ref.uid)
            with contextlib.suppress(EntryChangedError):
                return await self._undo_locked(found or self._store.unknown_entry(ref), found)

    async def _finish(self, entry: Entry) -> Devices:
        """Undoes the entry of the claim. Does nothing if the journal has another one now."""
        with contextlib.suppress(EntryChangedError):
            await self._undo_locked(entry, entry)
        return ()

    async def _undo_locked(self, entry: Entry, known: Entry | None) -> Devices:
        addresses = [step.address for step in entry.undo if isinstance(step, Rebind | ResetDriver)]
        async with self._tasks.locked({*await self._group_locks(addresses), *map(_unit_lock, entry.devices)}):
            self._tasks.report(entry.uid, ", ".join(each.device or each.unit for each in entry.devices)[:80], "undoing")
            await self._undo(entry, None, known)
        return ()

    async def _group_locks(self, addresses: Sequence[str]) -> set[str]:
        if not addresses:
            return set()
        return await in_thread(lambda: vfio.group_locks(self._host.fresh(), addresses))

    async def _undo(self, entry: Entry, before: Entry | None, known: Entry | UnsetType | None) -> None:
        """Reverts the entry to `before`, or removes it. Raises `ClaimError` if a step fails.

        The locks of its units are held. `known` is what the journal has, as in `ClaimStore.undo`.
        """
        try:
            await in_thread(lambda: self._store.undo(entry, self._host.fresh(), before, known=known))
        except EXPECTED as error:
            self._cleanup.repeat_failed(self._finish_interrupted)
            raise claim_error(error) from error
        finally:
            self._notify()
        self._unused.forget(entry.uid)
        self._write_status(entry.ref)

    def _write_status(self, ref: ClaimRef) -> None:
        """Writes `status.devices` of the claim, while calls go on."""
        if self._status is not None and ref.name:
            task = asyncio.create_task(self._status.update(ref), name=f"status {ref.namespace}/{ref.name}")
            self._status_tasks.add(task)
            task.add_done_callback(self._status_tasks.discard)
            task.add_done_callback(log_failure)


def _unit_lock(holding: Holding) -> str:
    return f"unit {holding.lock or holding.unit}"


def _held(wanted: Holding, holder: Entry) -> ClaimError:
    if holder.error:
        return ClaimError(f"device {wanted.device} could not be reset after claim {holder.claim}: {holder.error}")
    return ClaimError(f"device {wanted.device} is still held by claim {holder.claim}, waiting for its pod to end")
