"""Health through the agent: verdicts of a plugin, as the kubelet and the pods see them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from gadgets import Patient, gadget, gadgets
from peer import Lists, Peer, refusal
from waiting import until

from accelplane.devices import Device, HealthPolicy, Phase, Verdict
from accelplane.host import Host
from accelplane.node.agent import Agent
from accelplane.node.runner import PluginRunner
from accelplane.node.settings import Settings

GOOD = Verdict("good")
HOT = Verdict("bad", "too hot")
UNKNOWN = Verdict("unknown", "no answer")

Ward = Callable[..., AbstractAsyncContextManager[tuple[PluginRunner, Peer, Lists]]]


@pytest.fixture
def ward(directory: str) -> Ward:
    """`async with ward(plugin) as (runner, peer, lists)`: looked at every 0.1 s if nothing else is said."""

    @asynccontextmanager
    async def watched(plugin: Patient, **more: Any) -> AsyncIterator[tuple[PluginRunner, Peer, Lists]]:
        settings = {"health_interval": 0.1, "safety_interval": 3600.0, **more}
        agent = Agent(
            Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi", **settings), {"ward": plugin}
        )
        task = asyncio.create_task(agent.run())
        path = f"{directory}/device-plugins/example.com-gadget.sock"
        try:
            await until(lambda: os.path.exists(path))
            async with Peer(path) as peer, peer.watch() as lists:
                yield agent.runners["ward"], peer, lists
        finally:
            agent.stop()
            await task

    os.mkdir(f"{directory}/device-plugins")
    return watched


def phase(runner: PluginRunner, unit: str = "a") -> Phase:
    return runner.health.tracker.states[unit].phase


def told_of_the_source(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("ward: health of")]


async def test_newcomers_are_judged_before_they_are_first_published(ward: Ward) -> None:
    plugin = Patient(gadgets("a", "b"))
    plugin.verdicts = {"a": HOT, "b": GOOD}
    async with ward(plugin, health_interval=3600.0) as (runner, peer, lists):
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        assert await refusal(peer.allocate(["a"])) == (
            "UNKNOWN", "example.com/gadget: unhealthy device 'a (too hot)' requested",
        )  # fmt: skip
        plugin.verdicts = {"c": HOT}
        plugin.found = gadgets("a", "b", "c")
        runner.scan.request()
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy", "c": "Unhealthy"}
        assert plugin.asked[-1] == ("c",), "only the newcomer is asked about"


async def test_one_bad_reading_makes_a_device_suspect_and_not_unhealthy(ward: Ward) -> None:
    plugin = Patient(gadgets("a"), HealthPolicy(bad_verdicts=3))
    plugin.verdicts = {"a": GOOD}
    async with ward(plugin, health_interval=3600.0) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        plugin.verdicts = {"a": HOT}
        runner.request_check()
        await until(lambda: phase(runner) == Phase.SUSPECT)
        assert len(await peer.allocate(["a"])) == 1
        plugin.verdicts = {"a": GOOD}
        await until(lambda: phase(runner) == Phase.HEALTHY)
        assert next(iter(runner.publisher.inventory)).healthy


async def test_a_device_falls_sick_and_recovers_with_its_cause(ward: Ward, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plugin = Patient(gadgets("a", "b"))
    plugin.verdicts = {"a": GOOD, "b": GOOD}
    async with ward(plugin) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        plugin.verdicts["a"] = HOT
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        assert "too hot" in (await refusal(peer.allocate(["a"])))[1]
        plugin.verdicts["a"] = GOOD
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        assert phase(runner) == Phase.HEALTHY
        assert len(await peer.allocate(["a"])) == 1
    told = [record.message for record in caplog.records if ": a is " in record.message]
    assert told == [
        "ward: a is suspect (was healthy): too hot",
        "ward: a is unhealthy (was suspect): too hot",
        "ward: a is recovering (was unhealthy): too hot",
        "ward: a is healthy (was recovering)",
    ]


async def test_a_suspicion_is_confirmed_soon_and_not_at_the_next_regular_look(ward: Ward) -> None:
    plugin = Patient(gadgets("a"))
    plugin.verdicts = {"a": GOOD}
    async with ward(plugin, health_interval=3600.0) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        plugin.verdicts = {"a": HOT}
        runner.request_check()
        assert await lists.next() == {"a": "Unhealthy"}


async def test_all_shares_of_a_unit_fall_sick_together_and_the_unit_is_asked_about_once(ward: Ward) -> None:
    plugin = Patient([gadget(f"card{card}-{share}", unit=f"card{card}") for card in (0, 1) for share in (0, 1)])
    plugin.verdicts = {"card0": HOT, "card1": GOOD}
    async with ward(plugin) as (_runner, _peer, lists):
        assert await lists.next() == {
            "card0-0": "Unhealthy", "card0-1": "Unhealthy", "card1-0": "Healthy", "card1-1": "Healthy",
        }  # fmt: skip
        assert plugin.asked[0] == ("card0", "card1")


async def test_units_that_are_not_judged_are_as_healthy_as_the_scan_found_them(ward: Ward) -> None:
    plugin = Patient([gadget("a"), gadget("b", health="Unhealthy", reason="burnt"), gadget("c")])
    plugin.verdicts = {"b": GOOD, "c": GOOD, "stranger": HOT}
    async with ward(plugin) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy", "c": "Healthy"}
        assert "'b (burnt)'" in (await refusal(peer.allocate(["b"])))[1]
        assert set(runner.health.tracker.states) == {"b", "c"}


async def test_units_that_are_not_judged_do_not_stay_sick_after_a_failure_of_the_source(ward: Ward) -> None:
    plugin = Patient(gadgets("a", "b"), HealthPolicy(fail_closed=True))
    plugin.verdicts = {"a": ConnectionError("gone")}
    async with ward(plugin) as (_runner, _peer, lists):
        assert await lists.next() == {"a": "Unhealthy", "b": "Unhealthy"}
        plugin.verdicts = {"a": GOOD}
        await lists.until({"a": "Healthy", "b": "Healthy"})


async def test_a_source_that_fails_leaves_the_health_as_it_was(ward: Ward, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plugin = Patient(gadgets("a", "b"))
    plugin.verdicts = {"a": HOT, "b": GOOD}
    async with ward(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        plugin.verdicts = {"a": ConnectionError("the daemon is gone")}
        asked = len(plugin.asked)
        await until(lambda: len(plugin.asked) > asked + 3)
        assert {unit: state.usable for unit, state in runner.health.tracker.states.items()} == {"a": False, "b": True}
        plugin.verdicts = {"a": GOOD, "b": GOOD}
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
    assert told_of_the_source(caplog) == [
        "ward: health of a, b unknown: the daemon is gone",
        "ward: health of a, b known again",
    ]


async def test_a_source_without_a_verdict_is_told_once_and_when_it_has_one_again(
    ward: Ward, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plugin = Patient(gadgets("a", "b"))
    plugin.verdicts = {"a": UNKNOWN, "b": GOOD}
    async with ward(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        await until(lambda: len(plugin.asked) > 3)
        assert runner.health.tracker.unknown.get("a", "") == "no answer"
        plugin.verdicts["a"] = HOT
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        assert runner.health.tracker.unknown.get("a", "") == ""
    assert told_of_the_source(caplog) == ["ward: health of a unknown: no answer", "ward: health of a known again"]


class Noting(Patient):
    """Finds something odd in card `a`, and nothing in newcomers."""

    odd = "a: a sensor is missing"

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        if self.odd and any(device.unit == "a" for device in devices):
            host.note(self.odd)
        return await super().health(host, devices)


async def test_what_a_plugin_notes_while_it_judges_is_told_once_until_it_is_over(
    ward: Ward, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = Noting(gadgets("a"))
    plugin.verdicts = {"a": GOOD, "b": GOOD}

    async def judged() -> None:
        asked = len(plugin.asked)
        await until(lambda: len(plugin.asked) > asked + 2)

    async with ward(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        await judged()
        plugin.found = gadgets("a", "b")
        runner.scan.request()
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        await judged()
        plugin.odd = ""
        await judged()
        plugin.odd = "a: a sensor is missing"
        await judged()
    assert [record.message for record in caplog.records] == ["ward: a: a sensor is missing"] * 2


@pytest.mark.parametrize("source", [UNKNOWN, ConnectionError("gone")], ids=["no verdict", "no answer"])
async def test_failing_closed_takes_devices_away_whose_health_is_unknown(
    ward: Ward, source: Verdict | Exception
) -> None:
    plugin = Patient(gadgets("a"), HealthPolicy(fail_closed=True))
    plugin.verdicts = {"a": GOOD}
    async with ward(plugin) as (_runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        plugin.verdicts = {"a": source}
        assert await lists.next() == {"a": "Unhealthy"}
        plugin.verdicts = {"a": GOOD}
        assert await lists.next() == {"a": "Healthy"}


@pytest.mark.parametrize(("fail_closed", "health"), [(False, "Healthy"), (True, "Unhealthy")])
async def test_a_source_that_hangs_holds_up_the_first_list_for_a_second_only(
    ward: Ward, fail_closed: bool, health: str
) -> None:
    class Hanging(Patient):
        async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
            self.asked.append(tuple(device.unit for device in devices))
            await asyncio.Event().wait()
            return {}

    plugin = Hanging(gadgets("a"), HealthPolicy(fail_closed=fail_closed))
    async with ward(plugin, health_interval=3600.0) as (runner, peer, lists):
        assert await lists.next() == {"a": health}
        # A change of the devices is published while the source hangs.
        plugin.found = gadgets("a", "b")
        runner.scan.request()
        assert await lists.next() == {"a": health, "b": health}
        if not fail_closed:
            assert len(await peer.allocate(["b"])) == 1


class Odd(Patient):
    answer: Any = None

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        return self.answer


@pytest.mark.parametrize("answer", [None, ["a"], {"a": None}, {"a": "good"}], ids=str)
async def test_answers_that_are_no_verdicts_count_as_a_source_that_fails(ward: Ward, answer: object) -> None:
    plugin = Odd(gadgets("a"))
    plugin.answer = answer
    async with ward(plugin) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        assert len(await peer.allocate(["a"])) == 1
        plugin.answer = {"a": HOT}
        assert await lists.next() == {"a": "Unhealthy"}
        assert not runner.health.tracker.states["a"].usable


async def test_a_unit_that_left_and_comes_back_is_judged_anew(ward: Ward) -> None:
    plugin = Patient(gadgets("a", "b"))
    plugin.verdicts = {"a": HOT, "b": GOOD}
    async with ward(plugin, health_interval=3600.0) as (runner, _peer, lists):
        await lists.until({"a": "Unhealthy", "b": "Healthy"})
        plugin.found = gadgets("b")
        runner.scan.request()
        await lists.until({"b": "Healthy"})
        plugin.verdicts = {"a": GOOD, "b": GOOD}
        plugin.found = gadgets("a", "b")
        runner.scan.request()
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}


class Whimsical(Patient):
    """Judges only while it `cares`."""

    cares = True

    def overrides(self, hook: str) -> bool:
        return super().overrides(hook) and (hook != "health" or self.cares)


async def test_what_a_plugin_once_thought_is_forgotten_when_it_judges_no_more(ward: Ward) -> None:
    plugin = Whimsical(gadgets("a"))
    plugin.verdicts = {"a": HOT}
    async with ward(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Unhealthy"}
        plugin.cares = False
        runner.scan.request()
        assert await lists.next() == {"a": "Healthy"}
