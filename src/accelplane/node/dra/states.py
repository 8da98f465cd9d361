"""The state of a unit for DRA, from its scan, its health and its PCI function. Pure functions."""

from msgspec import Struct

from accelplane.devices import Device, HealthState, Phase, Unit, Verdict
from accelplane.dra.model import State


class UnitState(Struct, frozen=True):
    """`reason` is a short word for a state that is not healthy, `text` describes it."""

    state: State = "healthy"
    reason: str = ""
    text: str = ""


def present_state(device: Device, health: HealthState | None, warning: Verdict | None, outdated: str) -> UnitState:
    """Of a unit that the scan has found. `outdated` is why scans have failed for long, empty if they have not."""
    if outdated:
        return UnitState("unhealthy", "scan", outdated)
    if health is not None and health.phase is Phase.UNHEALTHY:
        return UnitState("unhealthy", health.cause, health.reason)
    if health is not None and health.phase is Phase.RECOVERING:
        return UnitState("recovering", health.cause, health.reason)
    if not device.healthy:
        return UnitState("unhealthy", "other", device.reason)
    if warning is not None and warning.reason:
        return UnitState("degraded", warning.cause, warning.reason)
    return UnitState()


def absent_state(unit: Unit, driver: str | None, *, claimed: bool) -> UnitState | None:
    """Of a unit that the scan does not find any more, None if it is no longer offered.

    `driver` is what its PCI function is bound to, empty without a driver, None without a function.
    """
    if driver is None:
        return UnitState("gone", "gone", "the device was removed") if claimed else None
    if driver == unit.text("driver"):
        return UnitState() if claimed else None  # the plugin's options exclude it
    return UnitState(
        "unbound", "driver", f"the device is bound to {driver or 'no driver'}, which its plugin does not use"
    )
