"""Health events in the kernel's uevents: recoveries from PCIe errors, and wedged GPUs.

The kernel sends `ERROR_EVENT` for PCI functions (drivers/pci/pci-driver.c, pci_uevent_ers) and `WEDGED` for DRM devices
(Documentation/gpu/drm-uapi, device wedging, Linux 6.15). A GPU that is wedged and needs a recovery is unhealthy until
the driver is bound again, and so is a function whose recovery failed.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from accelplane.devices import Verdict
from accelplane.host import pci_address
from accelplane.host.uevent import Uevent
from accelplane.node.event_store import EventStore, EventVerdict

_RECOVERIES = {"BEGIN_RECOVERY": "began", "SUCCESSFUL_RECOVERY": "succeeded", "FAILED_RECOVERY": "failed"}
OUTCOMES = tuple(_RECOVERIES.values())
_REBOUND = ("bind", "unbind", "remove")
_MAX_FUNCTIONS = 4096
_MAX_WORD = 40

Key = TypeVar("Key")


class HardwareEvents:
    """Counts events by PCI address. `changed` is called when a verdict that events imply comes or goes."""

    def __init__(self, changed: Callable[[], None] = lambda: None, store: EventStore | None = None) -> None:
        """The verdicts are kept in `store`, if there is one."""
        # By PCI address and outcome.
        self.recoveries: Counter[tuple[str, str]] = Counter()
        self.wedged: Counter[str] = Counter()
        self.verdicts: dict[str, Verdict] = {}  # bad ones by PCI address
        self._changed = changed
        self._store = store
        self._bindings: dict[str, int] = {}

    def restore(self) -> None:
        """Adds the verdicts of an earlier process of this boot that are still valid."""
        for address, known in (self._store.load() if self._store is not None else {}).items():
            if pci_address(address) and len(self.verdicts) < _MAX_FUNCTIONS:
                self.verdicts[address], self._bindings[address] = known.verdict, known.binding
        self.evaluate()

    def evaluate(self) -> None:
        """Drops the verdicts of functions that were bound, unbound or removed without an event."""
        if self._store is None:
            return
        for address in list(self.verdicts):
            if self._store.binding(address) != self._bindings[address]:
                self._clear(address)

    def record(self, event: Uevent) -> None:
        if event.action == "overflow":
            self.evaluate()
        elif event.subsystem == "pci":
            self._record_pci(event)
        elif event.subsystem == "drm" and "WEDGED" in event.fields:
            self._record_wedged(event)

    def _record_pci(self, event: Uevent) -> None:
        address = event.devpath.rpartition("/")[2]
        if not pci_address(address):
            return
        outcome = _RECOVERIES.get(event.fields.get("ERROR_EVENT", ""), "")
        if outcome:
            self._count(self.recoveries, (address, outcome))
        if outcome == "failed":
            self._set(address, Verdict("bad", "recovery from a PCIe error failed; see the kernel log", "pci-recovery"))
        elif event.action in _REBOUND:
            self._clear(address)
        elif outcome == "succeeded":
            self._clear(address, cause="pci-recovery")

    def _record_wedged(self, event: Uevent) -> None:
        address = next((part for part in reversed(event.devpath.split("/")) if pci_address(part)), "")
        methods = event.fields["WEDGED"]
        if not address:
            return
        self._count(self.wedged, address)
        if methods == "none":  # the driver has recovered the device itself
            return
        shown = ascii(methods[:_MAX_WORD])
        self._set(address, Verdict("bad", f"the driver declared the device wedged, recovery by {shown}", "wedged"))

    def _count(self, counts: "Counter[Key]", key: "Key") -> None:
        if key in counts or len(counts) < _MAX_FUNCTIONS:
            counts[key] += 1

    def _set(self, address: str, verdict: Verdict) -> None:
        if address in self.verdicts or len(self.verdicts) < _MAX_FUNCTIONS:
            self.verdicts[address] = verdict
            if self._store is not None:
                self._bindings[address] = self._store.binding(address)
            self._save()

    def _clear(self, address: str, cause: str = "") -> None:
        known = self.verdicts.get(address)
        if known is not None and cause in ("", known.cause):
            del self.verdicts[address]
            self._bindings.pop(address, None)
            self._save()

    def _save(self) -> None:
        if self._store is not None:
            verdicts = self.verdicts.items()
            self._store.save({address: EventVerdict(verdict, self._bindings[address]) for address, verdict in verdicts})
        self._changed()
