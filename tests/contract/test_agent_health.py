"""Health through the agent: from the verdicts of a plugin to the kubelet's list."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gadgets import WithHealth, gadget, gadgets
from peer import Lists, Peer, refusal
from trees import gpu_card
from waiting import until

from accelplane.devices import Device, HealthPolicy, Phase, Verdict
from accelplane.host import Host
from accelplane.node.agent import Agent
from accelplane.node.runner import PluginRunner
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.simulate.levelzero import LevelZeroService

GOOD = Verdict("good")
HOT = Verdict("bad", "too hot")
UNKNOWN = Verdict("unknown", "no answer")

Running = Callable[..., AbstractAsyncContextManager[tuple[PluginRunner, Peer, Lists]]]


@pytest.fixture
def running(directory: str) -> Running:
    """`async with running(plugin) as (runner, peer, lists)`; by default health is checked every 0.1 s."""

    @asynccontextmanager
    async def run(
        plugin: Plugin[Any], resource: str = "gadget", **more: Any
    ) -> AsyncIterator[tuple[PluginRunner, Peer, Lists]]:
        settings = {"health_interval": 0.1, "safety_interval": 3600.0, **more}
        agent = Agent(
            Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi", **settings), {"test": plugin}
        )
        task = asyncio.create_task(agent.run())
        path = f"{directory}/device-plugins/{plugin.socket_name(resource)}"
        try:
            await until(lambda: os.path.exists(path))
            async with Peer(path) as peer, peer.watch() as lists:
                yield agent.runners["test"], peer, lists
        finally:
            agent.stop()
            await task

    os.mkdir(f"{directory}/device-plugins")
    return run


def phase(runner: PluginRunner, unit: str = "a") -> Phase:
    return runner.health.tracker.states[unit].phase


def source_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("test: health of")]


async def test_new_devices_are_checked_before_they_are_listed(running: Running) -> None:
    plugin = WithHealth(gadgets("a", "b"))
    plugin.verdicts = {"a": HOT, "b": GOOD}
    async with running(plugin, health_interval=3600.0) as (runner, peer, lists):
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        assert await refusal(peer.allocate(["a"])) == (
            "UNKNOWN", "example.com/gadget: unhealthy device 'a (too hot)' requested",
        )  # fmt: skip
        plugin.verdicts = {"c": HOT}
        plugin.found = gadgets("a", "b", "c")
        runner.scan.request()
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy", "c": "Unhealthy"}
        assert plugin.checks[-1] == ("c",), "only the new device is checked"


async def test_with_several_bad_verdicts_required_one_makes_a_device_suspect(running: Running) -> None:
    plugin = WithHealth(gadgets("a"), HealthPolicy(bad_verdicts=3))
    plugin.verdicts = {"a": GOOD}
    async with running(plugin, health_interval=3600.0) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        plugin.verdicts = {"a": HOT}
        runner.request_check()
        await until(lambda: phase(runner) == Phase.SUSPECT)
        assert len(await peer.allocate(["a"])) == 1
        plugin.verdicts = {"a": GOOD}
        await until(lambda: phase(runner) == Phase.HEALTHY)
        assert next(iter(runner.context.devices.listed)).healthy


async def test_a_device_becomes_unhealthy_at_the_first_bad_verdict_and_recovers(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plugin = WithHealth(gadgets("a", "b"))
    plugin.verdicts = {"a": GOOD, "b": GOOD}
    async with running(plugin) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        plugin.verdicts["a"] = HOT
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        assert "too hot" in (await refusal(peer.allocate(["a"])))[1]
        plugin.verdicts["a"] = GOOD
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        assert phase(runner) == Phase.HEALTHY
        assert len(await peer.allocate(["a"])) == 1
    transitions = [record.message for record in caplog.records if ": a is " in record.message]
    assert transitions == [
        "test: a is unhealthy (was healthy): too hot",
        "test: a is recovering (was unhealthy): too hot",
        "test: a is healthy (was recovering)",
    ]


async def test_a_suspect_device_is_checked_again_before_the_interval_ends(running: Running) -> None:
    plugin = WithHealth(gadgets("a"), HealthPolicy(bad_verdicts=2))
    plugin.verdicts = {"a": GOOD}
    async with running(plugin, health_interval=3600.0) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        plugin.verdicts = {"a": HOT}
        runner.request_check()
        assert await lists.next() == {"a": "Unhealthy"}


async def test_a_recovering_device_is_checked_again_before_the_interval_ends(running: Running) -> None:
    plugin = WithHealth(gadgets("a"), HealthPolicy(recovery_delay=0.2))
    plugin.verdicts = {"a": HOT}
    async with running(plugin, health_interval=3600.0) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Unhealthy"}
        plugin.verdicts = {"a": GOOD}
        runner.request_check()
        assert await lists.next() == {"a": "Healthy"}


async def test_without_a_setting_the_policy_of_the_plugin_determines_the_interval(running: Running) -> None:
    plugin = WithHealth(gadgets("a"), HealthPolicy(interval=0.1))
    plugin.verdicts = {"a": GOOD}
    async with running(plugin, health_interval=None) as (_runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        plugin.verdicts = {"a": HOT}
        assert await lists.next() == {"a": "Unhealthy"}


async def test_with_defaults_a_failing_gpu_is_unhealthy_after_one_round_of_queries_and_recovers_after_two(
    running: Running, directory: str
) -> None:
    for index in range(4):
        gpu_card(Path(directory), index)
    healthy = {f"card{index}-0": "Healthy" for index in range(4)}
    service = LevelZeroService(f"{directory}/var/lib/levelzero/server.sock")
    plugin = GpuPlugin(GpuConfig(health_management=True))
    async with service, running(plugin, "i915", health_interval=None) as (_runner, peer, lists):
        assert await lists.next() == healthy
        queries = service.calls["GetDeviceHealth"]
        service.set_health("0000:04:00.0", memory=False)
        assert await lists.next() == {**healthy, "card1-0": "Unhealthy"}
        assert service.calls["GetDeviceHealth"] - queries == 4
        assert "memory not ok" in (await refusal(peer.allocate(["card1-0"])))[1]
        queries = service.calls["GetDeviceHealth"]
        service.set_health("0000:04:00.0")
        assert await lists.next() == healthy
        assert service.calls["GetDeviceHealth"] - queries == 8


async def test_with_defaults_the_health_that_the_driver_reports_is_read_on_a_quiet_node(
    running: Running, directory: str
) -> None:
    """The first source of health is known after the first scan, and sysfs has no events for its content."""
    source = gpu_card(Path(directory), 0, driver="xe") / "gpu_health"
    source.write_text("ok\n")
    unobserved = Path(directory) / "unobserved/gpu_health"  # a write here is no event for the directory of the card
    unobserved.parent.mkdir()
    unobserved.hardlink_to(source)
    async with running(GpuPlugin(GpuConfig()), "xe", health_interval=0.1) as (_runner, _peer, lists):
        assert await lists.next() == {"card0-0": "Healthy"}
        unobserved.write_text("critical\n")
        assert await lists.next() == {"card0-0": "Unhealthy"}


async def test_all_shares_of_a_unit_become_unhealthy_together_and_the_unit_is_checked_once(running: Running) -> None:
    plugin = WithHealth([gadget(f"card{card}-{share}", unit=f"card{card}") for card in (0, 1) for share in (0, 1)])
    plugin.verdicts = {"card0": HOT, "card1": GOOD}
    async with running(plugin) as (_runner, _peer, lists):
        assert await lists.next() == {
            "card0-0": "Unhealthy", "card0-1": "Unhealthy", "card1-0": "Healthy", "card1-1": "Healthy",
        }  # fmt: skip
        assert plugin.checks[0] == ("card0", "card1")


async def test_units_without_a_verdict_have_the_health_that_the_scan_found(running: Running) -> None:
    plugin = WithHealth([gadget("a"), gadget("b", health="Unhealthy", reason="burnt"), gadget("c")])
    plugin.verdicts = {"b": GOOD, "c": GOOD, "stranger": HOT}
    async with running(plugin) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy", "c": "Healthy"}
        assert "'b (burnt)'" in (await refusal(peer.allocate(["b"])))[1]
        assert set(runner.health.tracker.states) == {"b", "c"}


async def test_units_without_a_verdict_are_healthy_again_after_a_failure_of_the_source(running: Running) -> None:
    plugin = WithHealth(gadgets("a", "b"), HealthPolicy(fail_closed=True, recovery_delay=0.1))
    plugin.verdicts = {"a": ConnectionError("gone")}
    async with running(plugin) as (_runner, _peer, lists):
        assert await lists.next() == {"a": "Unhealthy", "b": "Unhealthy"}
        plugin.verdicts = {"a": GOOD}
        await lists.until({"a": "Healthy", "b": "Healthy"})


async def test_a_source_that_fails_changes_no_health(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plugin = WithHealth(gadgets("a", "b"))
    plugin.verdicts = {"a": HOT, "b": GOOD}
    async with running(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        plugin.verdicts = {"a": ConnectionError("the daemon is gone")}
        count = len(plugin.checks)
        await until(lambda: len(plugin.checks) > count + 3)
        assert {unit: state.usable for unit, state in runner.health.tracker.states.items()} == {"a": False, "b": True}
        plugin.verdicts = {"a": GOOD, "b": GOOD}
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
    assert source_messages(caplog) == [
        "test: health of a, b unknown: the daemon is gone",
        "test: health of a, b known again",
    ]


async def test_unknown_health_is_logged_once_and_again_when_it_is_known(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plugin = WithHealth(gadgets("a", "b"))
    plugin.verdicts = {"a": UNKNOWN, "b": GOOD}
    async with running(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        await until(lambda: len(plugin.checks) > 3)
        assert runner.health.tracker.unknown.get("a", "") == "no answer"
        plugin.verdicts["a"] = HOT
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}
        assert runner.health.tracker.unknown.get("a", "") == ""
    assert source_messages(caplog) == ["test: health of a unknown: no answer", "test: health of a known again"]


class ReportingSource(WithHealth):
    """Reports a note about unit `a` only."""

    message = "a: a sensor is missing"

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        if self.message and any(device.unit == "a" for device in devices):
            host.note(self.message)
        return await super().health(host, devices)


async def test_a_note_of_a_health_check_is_logged_once_until_it_is_obsolete(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = ReportingSource(gadgets("a"))
    plugin.verdicts = {"a": GOOD, "b": GOOD}

    async def checked() -> None:
        count = len(plugin.checks)
        await until(lambda: len(plugin.checks) > count + 2)

    async with running(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        await checked()
        plugin.found = gadgets("a", "b")
        runner.scan.request()
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        await checked()
        plugin.message = ""
        await checked()
        plugin.message = "a: a sensor is missing"
        await checked()
    assert [record.message for record in caplog.records] == ["test: a: a sensor is missing"] * 2


@pytest.mark.parametrize("source", [UNKNOWN, ConnectionError("gone")], ids=["no verdict", "no answer"])
async def test_with_fail_closed_devices_of_unknown_health_are_unhealthy(
    running: Running, source: Verdict | Exception
) -> None:
    plugin = WithHealth(gadgets("a"), HealthPolicy(fail_closed=True, recovery_delay=0.1))
    plugin.verdicts = {"a": GOOD}
    async with running(plugin) as (_runner, _peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        plugin.verdicts = {"a": source}
        assert await lists.next() == {"a": "Unhealthy"}
        plugin.verdicts = {"a": GOOD}
        assert await lists.next() == {"a": "Healthy"}


@pytest.mark.parametrize(("fail_closed", "health"), [(False, "Healthy"), (True, "Unhealthy")])
async def test_a_hanging_health_source_delays_the_first_list_by_at_most_one_second(
    running: Running, fail_closed: bool, health: str
) -> None:
    class Hanging(WithHealth):
        async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
            self.checks.append(tuple(device.unit for device in devices))
            await asyncio.Event().wait()
            return {}

    plugin = Hanging(gadgets("a"), HealthPolicy(fail_closed=fail_closed))
    async with running(plugin, health_interval=3600.0) as (runner, peer, lists):
        assert await lists.next() == {"a": health}
        # New devices are listed while the source hangs.
        plugin.found = gadgets("a", "b")
        runner.scan.request()
        assert await lists.next() == {"a": health, "b": health}
        if not fail_closed:
            assert len(await peer.allocate(["b"])) == 1


class Invalid(WithHealth):
    answer: Any = None

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        return self.answer


@pytest.mark.parametrize("answer", [None, ["a"], {"a": None}, {"a": "good"}], ids=str)
async def test_results_that_are_no_verdicts_count_as_a_source_that_fails(running: Running, answer: object) -> None:
    plugin = Invalid(gadgets("a"))
    plugin.answer = answer
    async with running(plugin) as (runner, peer, lists):
        assert await lists.next() == {"a": "Healthy"}
        assert len(await peer.allocate(["a"])) == 1
        plugin.answer = {"a": HOT}
        assert await lists.next() == {"a": "Unhealthy"}
        assert not runner.health.tracker.states["a"].usable


async def test_a_unit_that_returns_is_checked_as_a_new_one(running: Running) -> None:
    plugin = WithHealth(gadgets("a", "b"))
    plugin.verdicts = {"a": HOT, "b": GOOD}
    async with running(plugin, health_interval=3600.0) as (runner, _peer, lists):
        await lists.until({"a": "Unhealthy", "b": "Healthy"})
        plugin.found = gadgets("b")
        runner.scan.request()
        await lists.until({"b": "Healthy"})
        plugin.verdicts = {"a": GOOD, "b": GOOD}
        plugin.found = gadgets("a", "b")
        runner.scan.request()
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}


class Switchable(WithHealth):
    """Has health only while it is `enabled`."""

    enabled = True

    def overrides(self, hook: str) -> bool:
        return super().overrides(hook) and (hook != "health" or self.enabled)


async def test_health_is_cleared_if_the_plugin_has_no_health_source(running: Running) -> None:
    plugin = Switchable(gadgets("a"))
    plugin.verdicts = {"a": HOT}
    async with running(plugin) as (runner, _peer, lists):
        assert await lists.next() == {"a": "Unhealthy"}
        plugin.enabled = False
        runner.scan.request()
        assert await lists.next() == {"a": "Healthy"}
