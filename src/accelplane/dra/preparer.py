"""Prepares the claims of one driver: `Preparer`.

A claim is read from the API server, its devices are checked, the journal gets what undoes the changes, the changes are
made and read back, and the CDI file is written. A claim that is prepared already is answered from the journal. Work
that takes longer than the time limit of a call continues, and the next call gets its result.

There is a lock for each claim and one for each physical unit, so a device that blocks delays no other one. A task that
has the lock of a claim waits for locks of units, never for that of another claim.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from accelplane.apiserver import ApiError, ApiServer
from accelplane.devices import CdiError, Unit
from accelplane.dra import cdi, hardware, planning, vfio
from accelplane.dra.boot import boot_of
from accelplane.dra.claims import ClaimReader
from accelplane.dra.hardware import ClaimDevice
from accelplane.dra.journal import Entry, Holding, JournalError, Rebind, UndoStep, valid_uid
from accelplane.dra.model import ClaimError, ClaimRef, DeviceName, Offers, PreparedDevice
from accelplane.dra.store import ClaimStore
from accelplane.fpga import FpgaError
from accelplane.host import Host, HostError
from accelplane.host.blocking import ThreadLimitError, in_thread
from accelplane.kubelet.notifier import Notifier
from accelplane.kubelet.podresources import NodeHolders, PodResourcesError
from accelplane.kubelet.server import AllocationError

log = logging.getLogger(__name__)

TIME_LIMIT = 40.0  # the kubelet waits for 45 s
ORPHAN_DELAY = 120.0  # longer than the kubelet takes to end the containers of a pod that was deleted by force
MAX_CLAIMS_PER_CALL = 1024
_MAX_TEXT = 300
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_CONFLICT_ATTEMPTS = 8
_OTHER_INSTANCE_INTERVAL = 0.2
_EXPECTED = (AllocationError, CdiError, ClaimError, FpgaError, HostError, JournalError, OSError, ThreadLimitError)

_Devices: TypeAlias = Sequence[PreparedDevice]
_Work: TypeAlias = Callable[[ClaimRef], Awaitable[_Devices]]


class _Progress(Struct):
    """What the task of a claim does, and the time of the loop at which it began."""

    since: float
    device: str = "the claim"
    activity: str = "after another call"


class Preparer:
    """The `ClaimPreparer` of a driver, with its journal in `directory` and the files of claims in `cdi_dir`.

    `names` has the names of all devices of the driver. `holders` returns the containers of the node that have devices,
    and raises `PodResourcesError`. Without `manage_binding` no function is bound to VFIO. `on_event` is called with
    reason and text of events of the node. The owner calls `restore` before it serves, and `close` at the end.
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
        host: Host,
        manage_binding: bool,
        holders: Callable[[], Awaitable[NodeHolders]],
        names: Callable[[], Mapping[str, DeviceName]],
        on_event: Callable[[str, str], None] = lambda _reason, _text: None,
        time_limit: float = TIME_LIMIT,
        orphan_delay: float = ORPHAN_DELAY,
    ) -> None:
        self.driver = driver
        self._node = node
        self._offers = offers
        self._host = host
        self._manage_binding = manage_binding
        self._holders = holders
        self._names = names
        self._on_event = on_event
        self._time_limit = time_limit
        self._orphan_delay = orphan_delay
        self._claims = ClaimReader(api)
        self._store = ClaimStore(driver, directory, cdi_dir)
        self._tasks: dict[tuple[str, str], asyncio.Task[_Devices]] = {}
        self._progress: dict[str, _Progress] = {}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # with the number of their users
        self._unused_since: dict[str, float] = {}
        self._orphans: asyncio.Task[None] | None = None
        self._changed = Notifier()

    # The protocol `ClaimPreparer`.

    async def prepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, Sequence[PreparedDevice] | ClaimError]:
        return await self._answers("prepare", claims, self._prepare)

    async def unprepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, ClaimError | None]:
        answers = await self._answers("unprepare", claims, self._unprepare)
        return {uid: answer if isinstance(answer, ClaimError) else None for uid, answer in answers.items()}

    def prepared(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, dict[str, None]] = {}
        for entry in self._store.entries.values():
            for holding in entry.devices:
                found.setdefault(holding.unit, {})[entry.claim] = None
        return {unit: tuple(claims) for unit, claims in found.items()}

    def bound(self) -> Mapping[str, Unit]:
        return {unit.id: unit for entry in self._store.entries.values() for unit in entry.bound}

    def cleanup(self) -> Mapping[str, str]:
        found = {unit: file.problem for file in self._store.damaged.values() for unit in file.units}
        for entry in self._store.entries.values():
            if entry.error:
                found.update(dict.fromkeys((each.unit for each in entry.devices if not each.admin), entry.error))
        return found

    async def changed(self) -> None:
        await self._changed.wait()

    # The life of the owner.

    async def restore(self) -> None:
        """Reads the journal, writes missing CDI files, and starts to finish what a crash has interrupted.

        Raises `JournalError` or `OSError` if the journal or the directory of CDI files cannot be used.
        """
        host = self._host.fresh()
        interrupted = await in_thread(lambda: self._store.open(host.text_or_empty(_BOOT_ID), host))
        for file in self._store.damaged.values():
            log.error("%s", file.problem)
            self._on_event("ClaimJournalDamaged", f"{file.problem}; its devices are not used until its pod ends")
        for entry in interrupted:
            self._start("restore", ClaimRef(entry.namespace, entry.uid, entry.name), self._finish)
        if len(self._store.entries) > len(interrupted):
            self._orphans = asyncio.ensure_future(self._remove_orphans())
            self._orphans.add_done_callback(_log_failure)
        self._changed.notify_all()

    async def idle(self) -> None:
        """Waits for the end of all work on claims."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self, seconds: float = 5.0) -> None:
        """Waits for work in progress, at most `seconds`. The next `restore` finishes what is not finished then."""
        if self._orphans is not None:
            self._orphans.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        if not self._tasks:
            await in_thread(self._store.close)

    # Calls and tasks.

    async def _answers(self, kind: str, claims: Sequence[ClaimRef], work: _Work) -> dict[str, _Devices | ClaimError]:
        """Raises `ValueError` for too many claims."""
        if len(claims) > MAX_CLAIMS_PER_CALL:
            raise ValueError(f"found {len(claims)} claims in a call, expected at most {MAX_CLAIMS_PER_CALL}")
        answers = await asyncio.gather(*(self._answer(kind, ref, work) for ref in claims))
        return {ref.uid: answer for ref, answer in zip(claims, answers, strict=True)}

    async def _answer(self, kind: str, ref: ClaimRef, work: _Work) -> _Devices | ClaimError:
        """The result of the task for the claim, which a cancelled call does not cancel."""
        if not valid_uid(ref.uid):
            return ClaimError(f"found the UID {ref.uid[:80]!a}, expected letters, digits and hyphens")
        task = self._tasks.get((kind, ref.uid)) or self._start(kind, ref, work)
        await asyncio.wait((task,), timeout=self._time_limit)
        if not task.done():
            progress = self._progress.get(ref.uid) or _Progress(asyncio.get_running_loop().time() - self._time_limit)
            seconds = asyncio.get_running_loop().time() - progress.since
            return ClaimError(f"still {kind[:-1]}ing {progress.device} ({progress.activity}, {seconds:.0f} s so far)")
        try:
            return task.result()
        except (*_EXPECTED, Exception) as error:
            if not isinstance(error, _EXPECTED):
                log.exception("claim %s/%s", ref.namespace, ref.name)
                return _claim_error(error, f"internal error: {type(error).__name__}: ")
            return _claim_error(error)

    def _start(self, kind: str, ref: ClaimRef, work: _Work) -> "asyncio.Task[_Devices]":
        async def run() -> _Devices:
            try:
                async with self._locked((_claim_lock(ref.uid),)):
                    self._progress[ref.uid] = _Progress(asyncio.get_running_loop().time())
                    try:
                        return await work(ref)
                    finally:
                        del self._progress[ref.uid]
            finally:
                del self._tasks[kind, ref.uid]
                self._changed.notify_all()

        task = self._tasks[kind, ref.uid] = asyncio.create_task(run())
        task.add_done_callback(_log_failure)
        return task

    @contextlib.asynccontextmanager
    async def _locked(self, names: Iterable[str]) -> AsyncGenerator[None]:
        """Holds the locks with these names, acquired in the order of the names."""
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted(set(names)):
                lock, users = self._locks.get(name, (asyncio.Lock(), 0))
                self._locks[name] = lock, users + 1
                stack.callback(self._release, name)
                await stack.enter_async_context(lock)
            yield

    def _release(self, name: str) -> None:
        lock, users = self._locks.pop(name)
        if users > 1:
            self._locks[name] = lock, users - 1

    def _report(self, uid: str, device: str, activity: str) -> None:
        """Records what the task of the claim does. Others, such as the removal of orphans, have no record."""
        if (progress := self._progress.get(uid)) is not None:
            progress.device, progress.activity = device, activity

    async def _read(self, uid: str) -> Entry | None:
        """The entry of the claim, when no other instance works on it any more."""
        while True:
            entry, busy = await in_thread(lambda: self._store.read(uid))
            if not busy:
                return entry
            self._report(uid, "the claim", "in another instance of this driver")
            await asyncio.sleep(_OTHER_INSTANCE_INTERVAL)

    # Prepare. The lock of the claim is held.

    async def _prepare(self, ref: ClaimRef) -> _Devices:
        entry = await self._read(ref.uid)
        units = {unit: offer.unit for unit, offer in self._offers.units().items()}
        if entry is not None and await in_thread(partial(self._store.is_prepared, entry, self._host.fresh(), units)):
            return [holding.prepared for holding in entry.devices]
        claim = await self._claims.allocated(ref)
        if entry is not None and entry.state != "prepared":
            await self._finish(ref)
            entry = None
        node = planning.Node(driver=self.driver, pool=self._node, names=self._names(), offers=self._offers.units())
        devices = planning.claim_devices(node, ref.uid, claim)
        if entry is not None and planning.differs(entry, devices):
            await self._finish(ref)
            entry = None
        self._report(ref.uid, devices[0].holding.device, "waiting for another claim")
        wanted = Entry(
            uid=ref.uid, namespace=ref.namespace, name=ref.name, state="preparing", boot=self._store.boot,
            owner=self._store.owner, devices=[device.holding for device in devices],
        )  # fmt: skip
        addresses = [device.address for device in devices if device.vfio]
        locks = await in_thread(lambda: vfio.group_locks(self._host.fresh(), addresses))
        locks |= {_unit_lock(holding) for holding in wanted.devices}
        for _attempt in range(_CONFLICT_ATTEMPTS):
            async with self._locked(locks):
                conflict = await in_thread(lambda: self._store.conflict(wanted))
                if conflict is None:
                    return await self._make(wanted, entry, devices)
            await self._resolve(*conflict)
        raise ClaimError(f"device {wanted.devices[0].device} is held by other claims again and again")

    async def _make(self, wanted: Entry, before: Entry | None, devices: Sequence[ClaimDevice]) -> _Devices:
        """Prepares a claim whose units are free; their locks are held."""
        edits = {device.holding.device: await self._plugin_edits(device) for device in devices}
        variables = await planning.request_variables(devices, wanted.uid, self._offers.allocation)
        holders = planning.function_holders(wanted.uid, self._store.entries.values(), self._offers.units())
        host, manage = self._host.fresh(), self._manage_binding
        steps = await in_thread(
            lambda: [hardware.undo_steps(host, each, holders, manage_binding=manage) for each in devices]
        )
        undo = list(self._earlier_undo(wanted.uid, before))
        undo += [step for own in steps for step in own if step not in undo]
        wanted = replace(
            wanted, undo=undo, bound=planning.bound_units(devices, undo), config=planning.used_config(devices)
        )
        if (conflict := await in_thread(lambda: self._store.begin(wanted))) is not None:
            raise _held(*conflict)
        self._changed.notify_all()
        try:
            holdings = await self._apply(wanted, devices, steps)
            done = await in_thread(lambda: self._store.commit(holdings, devices, edits, variables, self._host.fresh()))
        except Exception as error:
            problem = _claim_error(error)
            try:
                await self._undo(wanted)
            except ClaimError as second:
                raise _claim_error(second, f"{problem}; and it could not be undone: ") from error
            raise problem from error
        return [holding.prepared for holding in done.devices]

    async def _plugin_edits(self, device: ClaimDevice) -> cdi.Edits:
        if device.vfio:
            return cdi.Edits()
        found = await self._offers.allocation((device.unit.id,))
        return cdi.edits(found.nodes, found.mounts, self._offers.cdi_devices(found.cdi_devices))

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
                self._report(entry.uid, device.holding.device, word)
                holdings[place] = await in_thread(partial(hardware.apply, self._host.fresh(), device, own))
        return replace(entry, devices=holdings)

    # Conflicts.

    async def _resolve(self, wanted: Holding, holder: Entry) -> None:
        """Undoes the holder's preparation if no pod uses it. Raises `ClaimError` if it holds the device."""
        ref = ClaimRef(holder.namespace, holder.uid, holder.name)
        name = _claim_lock(holder.uid)
        if name in self._locks or await in_thread(lambda: self._store.alive(holder)):
            raise _held(wanted, holder)
        async with self._locked((name,)):
            if holder.state == "prepared" and not await self._is_orphan(holder):
                raise _held(wanted, holder)
            log.warning("claim %s: undone, because no pod uses it", holder.claim)
            try:
                await self._finish(ref)
            except ClaimError as error:
                raise _claim_error(
                    error, f"device {wanted.device} cannot be reset after claim {holder.claim}: "
                ) from None

    async def _is_orphan(self, entry: Entry) -> bool:
        """Whether the claim is gone or unused and no container has it, since some time.

        The kubelet ends containers of a pod that was deleted by force after it has forgotten the pod.
        """
        ids = {name for holding in entry.devices for name in holding.cdi_ids}
        try:
            claim = await self._claims.find(ClaimRef(entry.namespace, entry.uid, entry.name)) if entry.name else None
            unused = bool(entry.name) and (claim is None or not claim.in_use)
            used = not unused or any(ids.intersection(each.cdi_names) for each in (await self._holders()).claims)
        except (ApiError, PodResourcesError) as error:
            log.info("claim %s: not known whether a pod uses it: %s", entry.claim, error)
            used = True
        if used:
            self._unused_since.pop(entry.uid, None)
            return False
        now = asyncio.get_running_loop().time()
        return now - self._unused_since.setdefault(entry.uid, now) >= self._orphan_delay

    async def _remove_orphans(self) -> None:
        """Undoes what claims without pods have left, after a loss of the kubelet's state."""
        for delay in (0.0, self._orphan_delay):
            await asyncio.sleep(delay)
            for entry in list(self._store.entries.values()):
                name = _claim_lock(entry.uid)
                if entry.state == "prepared" and name not in self._locks:
                    async with self._locked((name,)):
                        if await self._is_orphan(entry):
                            log.warning("claim %s: undone, because no pod uses it", entry.claim)
                            with contextlib.suppress(ClaimError):  # it stays in the journal with the error
                                await self._finish(ClaimRef(entry.namespace, entry.uid, entry.name))
            if not self._unused_since:
                return

    # Unprepare. The lock of the claim is held.

    async def _unprepare(self, ref: ClaimRef) -> _Devices:
        if await self._read(ref.uid) is not None:
            return await self._finish(ref)
        damaged = self._store.damaged.get(ref.uid)
        units = [Holding(request="", pool="", device="", unit=unit) for unit in damaged.units] if damaged else []
        undo = damaged.undo if damaged else ()
        # Also if nothing is known: a file of the claim may be left.
        entry = Entry(uid=ref.uid, namespace=ref.namespace, name=ref.name, state="unpreparing", boot=self._store.boot,
                      devices=units, undo=undo)  # fmt: skip
        return await self._undo_locked(entry)

    async def _finish(self, ref: ClaimRef) -> _Devices:
        """Undoes the entry of the claim, whatever its state."""
        entry = await self._read(ref.uid)
        return () if entry is None else await self._undo_locked(entry)

    async def _undo_locked(self, entry: Entry) -> _Devices:
        addresses = [step.address for step in entry.undo if isinstance(step, Rebind)]
        names = await in_thread(lambda: vfio.group_locks(self._host.fresh(), addresses))
        names |= {_unit_lock(each) for each in entry.devices}
        async with self._locked(names):
            self._report(entry.uid, ", ".join(each.device or each.unit for each in entry.devices)[:80], "undoing")
            await self._undo(entry)
        return ()

    async def _undo(self, entry: Entry) -> None:
        """Reverts the entry and removes it. Raises `ClaimError` if a step fails. The locks of its units are held."""
        try:
            await in_thread(lambda: self._store.undo(entry, self._host.fresh()))
        except _EXPECTED as error:
            raise _claim_error(error) from error
        finally:
            self._changed.notify_all()
        self._unused_since.pop(entry.uid, None)


def _claim_lock(uid: str) -> str:
    return f"claim {uid}"


def _unit_lock(holding: Holding) -> str:
    return f"unit {holding.lock or holding.unit}"


def _held(wanted: Holding, holder: Entry) -> ClaimError:
    if holder.error:
        return ClaimError(f"device {wanted.device} could not be reset after claim {holder.claim}: {holder.error}")
    return ClaimError(f"device {wanted.device} is still held by claim {holder.claim}, waiting for its pod to end")


def _claim_error(error: Exception, prefix: str = "") -> ClaimError:
    """The error as one line of at most 300 characters."""
    text = f"{prefix}{error.strerror or error if isinstance(error, OSError) else error}"
    if isinstance(error, OSError) and error.filename:
        text += f" ({error.filename})"
    text = " ".join(text.split())
    return ClaimError(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…")


def _log_failure(task: "asyncio.Task[Any]") -> None:
    """Logs why a task failed: its call may not wait for it any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s", error)
