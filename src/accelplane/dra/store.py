"""The claims of one driver on disk: the journal and the CDI files, which are written in this order.

    preparing  ->  changes of the node  ->  CDI file  ->  prepared
    unpreparing  ->  changes reverted  ->  CDI file removed  ->  entry removed

So after a crash at any point the journal says what is left to do. All methods block.
"""

import logging
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from accelplane.devices import Unit
from accelplane.dra import cdi, hardware, planning
from accelplane.dra.boot import boot_identity, boot_of
from accelplane.dra.hardware import ClaimDevice
from accelplane.dra.journal import Damaged, Entry, Holding, Journal
from accelplane.dra.model import ClaimError
from accelplane.host import Host

log = logging.getLogger(__name__)


class ClaimStore:
    """Methods raise `JournalError` or `OSError`. `entries` and `damaged` are the journal as it was read last."""

    def __init__(self, driver: str, directory: str, cdi_dir: str) -> None:
        self._driver = driver
        self._journal = Journal(directory)
        self._cdi = cdi.CdiDirectory(cdi_dir)
        self.boot = ""
        self.entries: Mapping[str, Entry] = {}
        self.damaged: Mapping[str, Damaged] = {}

    @property
    def owner(self) -> str:
        return self._journal.owner

    def open(self, boot_id: str, host: Host) -> list[Entry]:
        """Reads the journal, and writes missing CDI files. Returns the entries that a crash has interrupted."""
        self._journal.open()
        self.boot = boot_identity(self._cdi.directory, boot_id)
        with self._journal.lock():
            self._journal.remove_leftovers()
            self._cdi.remove_temporary(self._driver)
            self._read()
        interrupted: list[Entry] = []
        for entry in self.entries.values():
            if entry.state != "prepared":
                interrupted += () if self._journal.alive(entry.owner) else (entry,)
            elif boot_of(entry.boot) == boot_of(self.boot):
                # The kubelet does not ask again for pods that run.
                self._restore_files(entry, host)
        return interrupted

    def _restore_files(self, entry: Entry, host: Host) -> None:
        if problem := cdi.changed_node(host, entry.cdi):
            log.warning("claim %s: CDI file not restored until it is prepared again: %s", entry.claim, problem)
            return
        for file in entry.cdi:
            if self._cdi.ensure(file):
                log.info("claim %s: CDI file %s restored", entry.claim, file.name)

    def close(self) -> None:
        self._journal.close()

    def read(self, uid: str) -> tuple[Entry | None, bool]:
        """The entry of a claim as it is now, and whether another instance works on the claim."""
        with self._journal.lock():
            self._read()
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
        for file in entry.cdi:
            self._cdi.ensure(file)
        return True

    def conflict(self, wanted: Entry) -> tuple[Holding, Entry] | None:
        """A device of the claim that another one holds. Raises `ClaimError` if a damaged file may hold it."""
        with self._journal.lock():
            return self._conflict(wanted)

    def begin(self, entry: Entry) -> tuple[Holding, Entry] | None:
        """Writes the entry, before the first change for the claim, unless another claim holds a device of it."""
        with self._journal.lock():
            if (found := self._conflict(entry)) is None:
                self._journal.save(entry)
                self._read()
        return found

    def commit(
        self, entry: Entry, devices: Sequence[ClaimDevice], edits: Mapping[str, cdi.Edits],
        variables: Sequence[Mapping[str, str]], host: Host,
    ) -> Entry:  # fmt: skip
        """Writes the CDI file and then the entry as prepared. Raises `HostError`, `FpgaError` or `CdiError` too."""
        files = {
            device.holding.cdi_ids[0].partition("=")[2]: cdi.with_numbers(
                host, hardware.files(host, device, edits[device.holding.device])
            )
            for device in devices
        }
        holdings = [
            each if files[each.cdi_ids[0].partition("=")[2]] else replace(each, cdi_ids=each.cdi_ids[1:])
            for each in entry.devices
        ]
        file = cdi.claim_file(self._driver, entry.uid, files, variables)
        entry = replace(entry, state="prepared", owner="", error="", devices=holdings, cdi=[file])
        self._cdi.write(file)
        with self._journal.lock():
            self._journal.save(entry)
            if entry.uid in self.damaged:
                self._journal.remove_damaged(entry.uid)
            self._read()
        return entry

    def undo(self, entry: Entry, host: Host) -> None:
        """Reverts the changes for the claim, and removes its files. Raises `HostError` or `FpgaError` of a step."""
        # A reboot has reverted all changes.
        steps = entry.undo if boot_of(entry.boot) == boot_of(self.boot) else ()
        if steps:
            self._save(replace(entry, state="unpreparing", owner=self.owner, error=""))
        try:
            for step in reversed(steps):
                hardware.undo(host, step)
        except Exception as error:
            self._save(replace(entry, state="unpreparing", owner="", error=str(error)))
            raise
        for name in {cdi.file_name(self._driver, entry.uid), *(file.name for file in entry.cdi)}:
            self._cdi.remove(name)
        with self._journal.lock():
            self._journal.remove(entry.uid)
            self._read()

    def _save(self, entry: Entry) -> None:
        with self._journal.lock():
            self._journal.entries()
            self._journal.save(entry)
            self._read()

    def _conflict(self, wanted: Entry) -> tuple[Holding, Entry] | None:
        self._read()
        if bad := planning.damaged_unit(wanted, self.damaged.values()):
            raise ClaimError(
                f"device {bad[0].device} is held by a claim whose journal file is damaged ({bad[1].uid}), waiting for "
                "its pod to end"
            )
        return planning.conflict(wanted, self.entries.values())

    def _read(self) -> None:
        self.entries = self._journal.entries()
        self.damaged = self._journal.damaged()
