"""Uevents about PCIe errors and wedged GPUs."""

import pytest

from accelplane.host.uevent import Uevent
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
