"""The claims of one driver on disk: the journal and the CDI files, which are written in this order.

    preparing  ->  changes of the node  ->  CDI file  ->  prepared
    unpreparing  ->  changes reverted  ->  CDI file removed  ->  entry removed

So after a crash at any point the journal says what is left to do. All methods block.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from accelplane.descriptors import read_limited
from accelplane.devices import Unit
from accelplane.dra import cdi, durable, hardware, planning, salvage, takeover
from accelplane.dra.boot import boot_identity, boot_of
from accelplane.dra.hardware import ClaimDevice
from accelplane.dra.journal import CdiFile, Damaged, Entry, Holding, Journal, JournalError, UndoStep
from accelplane.dra.model import ClaimError, ClaimRef, DeviceName
from accelplane.host import Host

log = logging.getLogger(__name__)


class EntryChangedError(Exception):
    """The entry of the claim is not the one that a decision was made about: another instance has changed it."""


class ClaimStore:
    """Methods raise `JournalError` or `OSError`. `entries` and `damaged` are the journal as it was read last."""

    def __init__(
        self,
        driver: str,
        directory: str,
        cdi_dir: str,
        *,
        groups: bool,
        names: Callable[[], Mapping[str, DeviceName]] = dict,
        manage_binding: bool = True,
    ) -> None:
        """With `groups` containers get the groups of device nodes. `names` has the names of all devices."""
        self._driver = driver
        self._groups = groups
        self._directory = directory
        self._journal = Journal(directory)
        self._cdi = cdi.CdiDirectory(cdi_dir, driver)
        self.boot = ""
        self.entries: Mapping[str, Entry] = {}
        self._names = names
        self._manage_binding = manage_binding
        self._damaged: Mapping[str, Damaged] = {}
        self._damaged_devices: Mapping[str, Mapping[str, Sequence[str]]] = {}  # of their CDI files

    @property
    def owner(self) -> str:
        return self._journal.owner

    def open(self, boot_id: str, host: Host) -> list[Entry]:
        """Reads the journal, and writes missing CDI files. Returns the entries that a crash has interrupted."""
        self._journal.open()
        self.boot = boot_identity(self._cdi.directory, boot_id)
        with self._journal.lock():
            self._journal.remove_leftovers()
            self._cdi.remove_temporary()
            self._read()
            interrupted: list[Entry] = []
            for entry in self.entries.values():
                if entry.state != "prepared":
                    interrupted += () if self._journal.alive(entry.owner) else (entry,)
                else:
                    self._restore_files(entry, host)
        return interrupted

    def restore_files(self, host: Host) -> None:
        """Writes missing CDI files of prepared claims."""
        with self._journal.lock():
            self._read()
            for entry in self.entries.values():
                if entry.state == "prepared" and not all(self._cdi.has(file.name) for file in entry.cdi):
                    self._restore_files(entry, host)

    @property
    def damaged(self) -> Mapping[str, Damaged]:
        """The damaged files by UID, completed by the CDI files of their claims."""
        if not self._damaged:
            return {}
        names = self._names()
        return {
            uid: salvage.completed(file, self._damaged_devices[uid], names, manage_binding=self._manage_binding)
            for uid, file in self._damaged.items()
        }

    def _restore_files(self, entry: Entry, host: Host) -> None:
        """The kubelet does not ask again for pods that run. After a reboot the numbers of nodes may be others."""
        if boot_of(entry.boot) != boot_of(self.boot):
            return
        if problem := cdi.changed_node(host, entry.cdi):
            log.warning("claim %s: CDI file not restored until it is prepared again: %s", entry.claim, problem)
            return
        for file in entry.cdi:
            if self._cdi.ensure(file):
                log.info("claim %s: CDI file %s restored", entry.claim, file.name)

    def entry(self, uid: str) -> Entry | None:
        """The entry of a claim as it was read last."""
        return self.entries.get(uid)

    def unknown_entry(self, ref: ClaimRef) -> Entry:
        """An entry with what is left of a claim without one, which may be only its CDI file."""
        damaged = self.damaged.get(ref.uid)
        units = [Holding(request="", pool="", device="", unit=unit) for unit in damaged.units] if damaged else []
        undo = damaged.undo if damaged else ()
        return Entry(
            uid=ref.uid, namespace=ref.namespace, name=ref.name, state="unpreparing", boot=self.boot, devices=units,
            undo=undo,
        )  # fmt: skip

    def close(self) -> None:
        self._journal.close()

    def refresh(self) -> None:
        with self._journal.lock():
            self._read()

    def read(self, uid: str) -> tuple[Entry | None, bool]:
        """The entry of a claim as it is now, and whether another instance works on the claim."""
        self.refresh()
        entry = self.entries.get(uid)
        return entry, entry is not None and self.alive(entry)

    def alive(self, entry: Entry) -> bool:
        """Whether another instance works on the claim."""
        return entry.state != "prepared" and self._journal.alive(entry.owner)

    def is_prepared(self, entry: Entry, host: Host, units: Mapping[str, Unit]) -> bool:
        """Whether the claim is prepared in this boot and nothing has changed since. Writes a missing CDI file."""
        if entry.state != "prepared" or entry.boot != self.boot:
            return False
        problem = cdi.changed_node(host, entry.cdi) or next(
            filter(None, (hardware.changed_function(host, each, units.get(each.unit)) for each in entry.devices)), ""
        )
        if problem:
            log.info("claim %s is prepared again: %s", entry.claim, problem)
            return False
        with self._journal.lock():
            for file in entry.cdi:
                self._cdi.ensure(file)
        return True

    def conflict(self, wanted: Entry) -> planning.Conflict | None:
        """A device of the claim that another one holds, by the journal as it was read last. Does not block.

        Raises `ClaimError` if a damaged file may hold it.
        """
        if bad := planning.damaged_unit(wanted, self.damaged.values()):
            raise ClaimError(
                f"device {bad[0].device} is held by a claim whose journal file is damaged ({bad[1].uid}), waiting for "
                "its pod to end"
            )
        return planning.conflict(wanted, self.entries.values())

    def check(self, wanted: Entry) -> planning.Conflict | int:
        """A conflict by the journal as it is now, or the number of changes by other instances for `begin`."""
        self.refresh()
        return self.conflict(wanted) or self._journal.changes_of_others

    def begin(self, entry: Entry, before: Entry | None, changes: int) -> planning.Conflict | None:
        """Writes the entry, before the first change for the claim, unless another claim holds a device of it.

        `before` is the claim's entry now, and `changes` the result of `check` before the devices were looked at: the
        undo steps are what another instance has left. Raises `EntryChangedError` if they are not.
        """
        with self._unchanged(entry.uid, before):
            if changes != self._journal.changes_of_others:
                raise EntryChangedError(entry.uid)
            if (found := self.conflict(entry)) is None:
                self._journal.save(entry)
                self._read()
        return found

    def commit(
        self, entry: Entry, devices: Sequence[ClaimDevice], edits: Mapping[str, cdi.Edits],
        variables: Sequence[Mapping[str, str]], host: Host,
    ) -> Entry:  # fmt: skip
        """Writes the CDI file and then the entry as prepared. Raises `HostError`, `FpgaError` or `CdiError` too."""
        found = [
            self.current_edits(host, hardware.files(host, device, edits[device.holding.device])) for device in devices
        ]
        named = {each.cdi_ids[0].partition("=")[2]: files for each, files in zip(entry.devices, found, strict=True)}
        holdings = [
            each if files else replace(each, cdi_ids=each.cdi_ids[1:])
            for each, files in zip(entry.devices, found, strict=True)
        ]
        inherited = [
            file
            for each, files in zip(entry.devices, found, strict=True)
            for name in each.inherited
            if (file := cdi.inherited_file(name, files)) is not None
        ]
        own = cdi.claim_file(self._driver, entry.uid, named, variables)
        entry = replace(entry, state="prepared", owner="", error="", devices=holdings, cdi=[own, *inherited])
        with self._journal.lock():
            for file in entry.cdi:
                self._cdi.ensure(file)
            self._journal.save(entry)
            if entry.uid in self.damaged:
                self._journal.remove_damaged(entry.uid)
            self._read()
        return entry

    def current_edits(self, host: Host, found: cdi.Edits) -> cdi.Edits:
        """The edits with numbers and groups of device nodes. Raises `HostError`."""
        return cdi.with_numbers(host, found, groups=self._groups)

    def undo(
        self, entry: Entry, host: Host, before: Entry | None = None, *, known: Entry | UnsetType | None = UNSET
    ) -> None:
        """Reverts the changes for the claim, and removes its files. Raises `HostError` or `FpgaError` of a step.

        If the claim was prepared before, as in `before`, what was prepared then stays. `known` is what the journal has
        of the claim, unset if this instance works on it, so that no other one changes it. Raises `EntryChangedError` if
        the journal has something else.
        """
        # A reboot has reverted all changes.
        steps = [*entry.undo] if boot_of(entry.boot) == boot_of(self.boot) else []
        kept: Sequence[UndoStep] = before.undo if before is not None else ()
        steps = [step for step in steps if step not in kept]
        if steps and known is not UNSET:  # an entry that is being prepared is undone after a crash without this
            with self._unchanged(entry.uid, known):
                self._journal.save(replace(entry, state="unpreparing", owner=self.owner, error=""))
                self._journal.remove_damaged(entry.uid)  # the entry has the rest of it
                self._read()
            known = UNSET
        try:
            for step in reversed(steps):
                hardware.undo(host, step)
        except Exception as error:
            try:
                self._save(replace(entry, state="unpreparing", owner="", error=str(error)))
            except (JournalError, OSError) as second:  # such as a full disk
                log.warning("claim %s: the journal does not have the error: %s", entry.claim, second)
            raise
        restored = before.cdi if before is not None and boot_of(before.boot) == boot_of(self.boot) else ()
        with self._unchanged(entry.uid, known):
            for file in restored:
                self._cdi.ensure(file)
            others = [other for other in self.entries.values() if other.uid != entry.uid]
            used = {file.name for other in others for file in other.cdi} | {file.name for file in restored}
            for name in {cdi.file_name(self._driver, entry.uid), *(file.name for file in entry.cdi)} - used:
                self._cdi.remove(name)
            if before is not None:
                self._journal.save(before)
            else:
                self._journal.remove(entry.uid)
            self._read()

    def foreign_claims(self) -> Mapping[str, Sequence[takeover.PreparedDevice]]:
        """The claims that another driver has prepared and that are not in the journal. Raises `TakeoverError`."""
        try:
            found = takeover.parse(read_limited(f"{self._directory}/{takeover.FILE}", takeover.MAX_FILE))
        except FileNotFoundError:
            return {}
        return {uid: devices for uid, devices in found.items() if uid not in self.entries}

    def take_over(self, entries: Sequence[Entry], edits: Mapping[str, cdi.Edits]) -> None:
        """Writes entries for claims of another driver, whose file is then renamed.

        `edits` are what containers get with each unit; a unit without them keeps its CDI names only as long as the
        CDI file of the other driver exists.
        """
        for entry in entries:
            files: list[CdiFile] = []
            for holding in entry.devices:
                found = edits.get(holding.unit, cdi.Edits())
                made = [cdi.inherited_file(name, found) for name in holding.inherited]
                files += [file for file in made if file is not None]
            entry = replace(entry, cdi=files)  # noqa: PLW2901
            for file in files:
                self._cdi.ensure(file)
            self._save(entry)
        durable.move(f"{self._directory}/{takeover.FILE}", f"{self._directory}/{takeover.IMPORTED}")

    def _save(self, entry: Entry) -> None:
        with self._journal.lock():
            self._journal.save(entry)
            self._read()

    @contextlib.contextmanager
    def _unchanged(self, uid: str, known: Entry | UnsetType | None) -> Generator[None]:
        """Holds the lock of the journal. Raises `EntryChangedError` if it does not have `known` of the claim."""
        with self._journal.lock():
            self._read()
            if known is not UNSET and self.entries.get(uid) != known:
                raise EntryChangedError(uid)
            yield

    def _read(self) -> None:
        self.entries = self._journal.entries()
        damaged = self._journal.damaged()
        self._damaged_devices = {uid: self._cdi.claim_devices(uid) for uid in damaged}
        self._damaged = damaged
