"""Uevents about PCIe errors and wedged GPUs."""

from pathlib import Path

import pytest
from trees import link, write

from accelplane.host.uevent import OVERFLOW, Uevent
from accelplane.node import event_store
from accelplane.node.event_store import EventStore
from accelplane.node.hardware_events import HardwareEvents

ADDRESS = "0000:03:00.0"
PCI = f"/devices/pci0000:00/0000:00:01.0/{ADDRESS}"


def pci(action: str = "change", path: str = PCI, **fields: str) -> Uevent:
    return Uevent(action, path, "pci", fields)


def drm(wedged: str, path: str = f"{PCI}/drm/card0") -> Uevent:
    return Uevent("change", path, "drm", {"WEDGED": wedged})


def causes(events: HardwareEvents) -> dict[str, str]:
    return {address: verdict.cause for address, verdict in events.verdicts.items()}


@pytest.mark.parametrize(
    ("event", "outcome", "cause"),
    [
        (pci(ERROR_EVENT="BEGIN_RECOVERY", DEVICE_ONLINE="0"), "began", None),
        (pci(ERROR_EVENT="SUCCESSFUL_RECOVERY", DEVICE_ONLINE="1"), "succeeded", None),
        (pci(ERROR_EVENT="FAILED_RECOVERY", DEVICE_ONLINE="0"), "failed", "pci-recovery"),
        (pci(ERROR_EVENT="OTHER"), None, None),
        (pci(), None, None),
        (pci(path="/devices/x", ERROR_EVENT="FAILED_RECOVERY"), None, None),
        (Uevent("change", PCI, "block", {"ERROR_EVENT": "FAILED_RECOVERY"}), None, None),
    ],
)
def test_recoveries_are_counted_and_a_failed_one_is_a_bad_verdict(
    event: Uevent, outcome: str | None, cause: str | None
) -> None:
    events = HardwareEvents()
    events.record(event)
    assert dict(events.recoveries) == ({(ADDRESS, outcome): 1} if outcome else {})
    assert causes(events) == ({ADDRESS: cause} if cause else {})


@pytest.mark.parametrize(
    ("event", "wedged"),
    [
        (drm("rebind"), True), (drm("rebind,bus-reset"), True), (drm("\x1b]"), True),
        (drm("rebind", "/devices/platform/x/drm/card1"), False),
    ],
)  # fmt: skip
def test_a_wedged_gpu_is_counted_and_unhealthy(event: Uevent, wedged: bool) -> None:
    events = HardwareEvents()
    events.record(event)
    assert dict(events.wedged) == ({ADDRESS: 1} if wedged else {})
    assert causes(events) == ({ADDRESS: "wedged"} if wedged else {})
    assert all(verdict.reason.isprintable() for verdict in events.verdicts.values())


def test_a_wedged_gpu_that_needs_no_recovery_is_counted_and_healthy() -> None:
    events = HardwareEvents()
    events.record(drm("none"))
    assert dict(events.wedged) == {ADDRESS: 1}
    assert causes(events) == {}


@pytest.mark.parametrize("action", ["bind", "unbind", "remove"])
def test_a_rebind_ends_the_verdict(action: str) -> None:
    changes: list[int] = []
    events = HardwareEvents(lambda: changes.append(len(events.verdicts)))
    events.record(drm("rebind"))
    events.record(pci(action, path=f"{PCI[:-1]}1"))
    assert causes(events) == {ADDRESS: "wedged"}, "another function"
    events.record(pci(action))
    assert causes(events) == {}
    assert changes == [1, 0]


def test_a_recovery_that_succeeds_ends_a_failed_one_and_not_another_verdict() -> None:
    events = HardwareEvents()
    events.record(pci(ERROR_EVENT="FAILED_RECOVERY"))
    events.record(pci(ERROR_EVENT="SUCCESSFUL_RECOVERY"))
    assert causes(events) == {}
    events.record(drm("rebind"))
    events.record(pci(ERROR_EVENT="SUCCESSFUL_RECOVERY"))
    assert causes(events) == {ADDRESS: "wedged"}


def test_the_number_of_devices_is_limited() -> None:
    events = HardwareEvents()
    for number in range(5000):
        events.record(pci(path=f"/devices/{number:04x}:03:00.0", ERROR_EVENT="FAILED_RECOVERY"))
    assert len(events.recoveries) == len(events.verdicts) == 4096


class Binding:
    """A function in a tree of plain files, and a store of verdicts about it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.function = root / f"sys/bus/pci/devices/{ADDRESS}"
        self.bind("xe")
        self.events = self.restarted()

    def bind(self, driver: str) -> None:
        """The kernel makes a new link, while the inode of the earlier one may still exist."""
        link(self.function / "new", self.root / "sys/bus/pci/drivers" / driver)
        (self.function / "new").rename(self.function / "driver")

    def restarted(self) -> HardwareEvents:
        """The events of an agent that starts."""
        events = HardwareEvents(store=EventStore(str(self.root / "cdi"), str(self.root)))
        events.restore()
        return events


def test_a_verdict_survives_a_restart_of_the_agent_until_the_driver_is_bound_again(tmp_path: Path) -> None:
    function = Binding(tmp_path)
    function.events.record(drm("rebind"))
    expected = function.events.verdicts
    restarted = function.restarted()
    assert restarted.verdicts == expected != {}
    restarted.record(pci("bind"))
    assert function.restarted().verdicts == {}


def test_a_verdict_does_not_survive_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = Binding(tmp_path)
    function.events.record(drm("rebind"))
    monkeypatch.setattr(event_store, "BOOT_ID", str(write(tmp_path / "boot_id", "another boot\n")))
    assert function.restarted().verdicts == {}


def test_a_device_that_was_bound_while_no_agent_ran_is_healthy(tmp_path: Path) -> None:
    function = Binding(tmp_path)
    function.events.record(drm("rebind"))
    function.bind("xe")
    assert function.restarted().verdicts == {}


@pytest.mark.parametrize("repaired", [True, False])
def test_verdicts_are_evaluated_again_after_events_were_lost(tmp_path: Path, repaired: bool) -> None:
    function = Binding(tmp_path)
    function.events.record(drm("rebind"))
    if repaired:
        function.bind("xe")
    function.events.record(OVERFLOW)
    assert causes(function.events) == ({} if repaired else {ADDRESS: "wedged"})


@pytest.mark.parametrize("content", ["", "[]", '{"boot_id": 1}', "\udcff"])
def test_an_invalid_file_of_verdicts_is_ignored_with_a_message(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "cdi/.accelplane-events", content.encode("utf-8", "surrogateescape"))
    assert Binding(tmp_path).events.verdicts == {}
    assert "expected verdicts of kernel events" in caplog.text
