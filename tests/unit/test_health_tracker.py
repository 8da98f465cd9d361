"""The states of units that are added and removed while checks overlap."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from accelplane.devices import Device, HealthPolicy, Phase, Verdict
from accelplane.host import Host
from accelplane.node.health import HealthTracker
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

GOOD, BAD = Verdict("good"), Verdict("bad", "dented")
UNKNOWN = Verdict("unknown", "no response")


def card(number: int) -> Device:
    return Device(resource="gadget", id=f"card{number}-0", unit=f"card{number}", topology=None)


class Source(Plugin[Config]):
    """Each check waits until the test sets its result."""

    namespace = "example.com"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[asyncio.Future[Mapping[str, Verdict]]] = []
        self.units: list[list[str]] = []
        self.policy = HealthPolicy(recovery_delay=3.0)

    @property
    def health_policy(self) -> HealthPolicy:
        return self.policy

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        self.calls.append(asyncio.get_running_loop().create_future())
        self.units.append([device.unit for device in devices])
        return await self.calls[-1]


class Checks:
    """A tracker, and checks of it that are in progress."""

    def __init__(self, *units: str) -> None:
        self.source = Source()
        self.tracker = HealthTracker("gadgets")
        self.tracker.retain(units)

    async def start(self, *devices: Device) -> asyncio.Task[None]:
        task = asyncio.create_task(self.tracker.check(self.source, Host(), devices))
        await asyncio.sleep(0)
        return task

    async def run(self, *devices: Device, **verdicts: Verdict) -> None:
        task = await self.start(*devices)
        self.source.calls[-1].set_result(verdicts)
        await task

    @property
    def phases(self) -> dict[str, str]:
        return {unit: state.phase.value for unit, state in self.tracker.states.items()}


async def test_the_first_verdict_on_a_unit_applies_immediately() -> None:
    checks = Checks("card0")
    checks.source.policy = HealthPolicy(bad_verdicts=3)
    await checks.run(card(0), card0=BAD)
    device = checks.tracker.apply(card(0))
    assert (device.healthy, device.reason) == (False, "dented")


async def test_a_good_verdict_with_a_reason_is_a_warning_until_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    checks, warm = Checks("card0"), Verdict("good", "warm", "temperature")
    for verdict, warnings in ((warm, {"card0": warm}), (warm, {"card0": warm}), (UNKNOWN, {"card0": warm}), (GOOD, {})):
        await checks.run(card(0), card0=verdict)
        assert (checks.tracker.warnings, checks.phases) == (warnings, {"card0": "healthy"})
        assert checks.tracker.apply(card(0)).healthy
    assert caplog.text.count("gadgets: warning of card0: warm") == 1
    assert caplog.text.count("gadgets: the warning of card0 has ended") == 1
    await checks.run(card(0), card0=warm)
    await checks.run(card(0), card0=BAD)
    assert (checks.tracker.warnings, checks.phases) == ({}, {"card0": "unhealthy"})
    await checks.run(card(0), card0=warm)
    checks.tracker.retain(())
    assert not checks.tracker.warnings


@pytest.mark.parametrize("verdict", [BAD, UNKNOWN])
async def test_a_unit_that_leaves_during_a_check_gets_no_state(verdict: Verdict) -> None:
    checks = Checks("card0")
    check = await checks.start(card(0))
    checks.tracker.retain(())
    checks.source.calls[0].set_result({"card0": verdict})
    await check
    assert (checks.tracker.states, checks.tracker.unknown) == ({}, {})
    assert checks.tracker.apply(card(0)).healthy


@pytest.mark.parametrize(
    ("verdict", "problem"),
    [
        (Verdict("Bad", "dented"), "Invalid enum value 'Bad'"),  # type: ignore[arg-type]
        (Verdict("bad", OSError("no answer")), "unsupported"),  # type: ignore[arg-type]
        (Verdict("bad", None), "Expected `str`, got `null`"),  # type: ignore[arg-type]
        (Verdict("bad", "dented", []), "unhashable"),  # type: ignore[arg-type]
        ("bad", "health: found 'bad', expected a Verdict"),
    ],
)
async def test_an_invalid_verdict_is_unknown_and_affects_no_other_unit(verdict: Verdict, problem: str) -> None:
    checks = Checks("card0", "card1")
    await checks.run(card(0), card(1), card0=verdict, card1=BAD)
    assert checks.phases == {"card0": "healthy", "card1": "unhealthy"}
    assert problem in checks.tracker.unknown["card0"]


async def test_verdicts_of_other_units_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that uses IDs in place of units has no health otherwise, without a message."""
    checks = Checks("card0")
    for _ in range(2):
        await checks.run(card(0), **{"card0": GOOD, "card0-0": BAD})
    assert caplog.messages == [
        "gadgets: health: found verdicts of 'card0-0', expected the units of the devices that it was called with"
    ]
    assert checks.phases == {"card0": "healthy"}


async def test_a_cause_that_is_no_word_of_the_list_is_other() -> None:
    checks = Checks("card0")
    await checks.run(card(0), card0=Verdict("bad", "hot", "temperature 105.3"))  # type: ignore[arg-type]
    assert (checks.tracker.states["card0"].phase, checks.tracker.states["card0"].cause) == (Phase.UNHEALTHY, "other")
    assert dict(checks.tracker.history.failures) == {"other": 1}


async def test_a_unit_that_returns_during_a_check_does_not_get_its_verdict() -> None:
    checks = Checks("card0", "card1")
    check = await checks.start(card(0), card(1))
    checks.tracker.retain(("card1",))
    checks.tracker.retain(("card0", "card1"))
    checks.source.calls[0].set_result({"card0": BAD, "card1": BAD})
    await check
    assert checks.phases == {"card1": "unhealthy"}


async def test_a_check_that_ends_late_does_not_replace_the_verdict_of_a_newer_one() -> None:
    checks = Checks("card0", "card1")
    old = await checks.start(card(0), card(1))
    await checks.run(card(0), card0=BAD)
    checks.source.calls[0].set_result({"card0": GOOD, "card1": GOOD})
    await old
    assert checks.phases == {"card0": "unhealthy", "card1": "healthy"}


@pytest.mark.parametrize("result", [{}, ConnectionError("gone")], ids=["no verdict", "error"])
async def test_a_check_that_fails_late_does_not_change_a_newer_state(result: dict[str, Verdict] | Exception) -> None:
    checks = Checks("card0")
    checks.source.policy = HealthPolicy(fail_closed=True)
    old = await checks.start(card(0))
    await checks.run(card(0), card0=GOOD)
    if isinstance(result, Exception):
        checks.source.calls[0].set_exception(result)
    else:
        checks.source.calls[0].set_result(result)
    await old
    assert checks.phases == {"card0": "healthy"}
    assert checks.tracker.unknown == {}


async def test_new_units_that_are_checked_during_a_check_of_all_keep_their_state() -> None:
    checks = Checks("card0")
    regular = await checks.start(card(0))
    checks.tracker.retain(("card0", "card1"))
    await checks.run(card(1), card1=BAD)
    checks.source.calls[0].set_result({"card0": GOOD})
    await regular
    assert checks.phases == {"card0": "healthy", "card1": "unhealthy"}


async def test_only_retained_units_are_checked() -> None:
    checks = Checks("card0")
    await checks.run(card(0), card(1), card0=GOOD, card1=BAD)
    assert checks.source.units == [["card0"]]
    await checks.tracker.check(checks.source, Host(), [card(1)])
    assert len(checks.source.units) == 1
    assert checks.phases == {"card0": "healthy"}


@pytest.mark.parametrize("interval", [0.5, 4.0, 30.0])
async def test_the_next_check_is_due_when_a_state_has_to_be_confirmed(interval: float) -> None:
    checks = Checks("card0")
    await checks.run(card(0), card0=GOOD)
    assert checks.tracker.next_check_in(interval) == interval
    checks.source.policy = HealthPolicy(bad_verdicts=2, recovery_delay=3.0)
    await checks.run(card(0), card0=BAD)
    assert (checks.phases["card0"], checks.tracker.next_check_in(interval)) == (Phase.SUSPECT, min(interval, 1.0))
    await checks.run(card(0), card0=BAD)
    assert (checks.phases["card0"], checks.tracker.next_check_in(interval)) == (Phase.UNHEALTHY, interval)
    await checks.run(card(0), card0=GOOD)
    assert checks.phases["card0"] == Phase.RECOVERING
    assert 0 < checks.tracker.next_check_in(interval) <= min(interval, 3.0)
