"""The agent under controlled orders of events, on a loop with virtual time (random ones: `test_churn.py`).

At rest the kubelet's lists equal the node's devices, no request was lost, and nothing outlives its owner.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import OTHER, PF, VF, Setup
from trees import link, write

from accelplane.devices import HealthPolicy

THING = "a.example.com/thing"


@pytest.fixture
def setup() -> Iterator[Setup]:
    instance = Setup()
    yield instance
    instance.close()


@pytest.fixture
def idle_setup(setup: Setup) -> Setup:
    """With one device listed."""
    setup.plug("a", "u0", "d0")
    setup.complete_work()
    setup.check_rest()
    return setup


def until_scanning(setup: Setup) -> None:
    """Runs until a scan waits in its thread."""
    for _ in range(200):
        if setup.scans("a"):
            return
        setup.advance(0.01)
    raise AssertionError("no scan was started")


def test_a_device_that_appears_between_the_scan_and_the_start_of_its_watch_is_found(setup: Setup) -> None:
    setup.hold()
    until_scanning(setup)
    setup.plug("a", "u0", "d0")
    setup.threads.running[0].execute()
    setup.plug("a", "u0", "d1")  # in a directory that only this scan has named
    setup.complete_work()
    setup.check_rest()
    assert setup.kubelet.lists[THING] == {"d0": True, "d1": True}


def test_a_health_request_during_a_check_causes_another_check(idle_setup: Setup) -> None:
    idle_setup.hold()
    idle_setup.set_health("u0", good=True)
    while not idle_setup.replies:
        idle_setup.step()
    idle_setup.set_health("u0", good=False)
    idle_setup.step(10)
    idle_setup.complete_work()
    idle_setup.check_rest()
    assert idle_setup.kubelet.lists[THING] == {"d0": False}


def test_a_device_is_listed_after_its_cdi_file_is_written(setup: Setup) -> None:
    """Also if a scan finds it while a change of health is published."""
    setup.enabled["a"].cdi = True
    setup.plug("a", "u0", "d0")
    setup.complete_work()
    file = Path(setup.settings.cdi_dir, "a.example.com-thing-{}.yaml")
    os.unlink(str(file).format("d0"))
    setup.hold()
    setup.immediate_replies = True
    setup.set_health("u0", good=False)
    until_scanning(setup)
    setup.plug("a", "u0", "d1")
    setup.step(50)
    assert any("CdiPublisher.publish" in thread.function.__qualname__ for thread in setup.threads.running)
    while setup.scans("a"):
        (scan,) = (thread for thread in setup.threads.running if "ScanLoop" in thread.function.__qualname__)
        setup.threads.deliver(setup.threads.running.index(scan))
        setup.step(50)
    while "d1" not in setup.kubelet.lists[THING]:
        setup.threads.deliver()
        setup.step(50)
    assert os.path.exists(str(file).format("d1"))
    setup.complete_work()
    setup.check_rest()


def test_a_reload_during_the_restart_delay_of_a_plugin_starts_one_background_task(idle_setup: Setup) -> None:
    idle_setup.enabled["a"].crash = True
    idle_setup.plug("a", "u0", "d1")
    idle_setup.advance(1)
    assert idle_setup.agent.status().plugins["a"].crashed
    idle_setup.enable("a", label="new")
    idle_setup.advance(1)
    idle_setup.complete_work()
    idle_setup.loop.errors.clear()
    idle_setup.check_rest()


def test_a_plugin_that_is_enabled_again_during_a_scan_waits_for_its_thread(idle_setup: Setup) -> None:
    idle_setup.hold()
    idle_setup.plug("a", "u0", "d1")
    until_scanning(idle_setup)
    idle_setup.disable("a")
    idle_setup.advance(10)
    idle_setup.enable("a")
    idle_setup.advance(10)
    assert idle_setup.scans("a") == 1
    idle_setup.complete_work()
    idle_setup.check_rest()


def test_the_agent_ends_only_after_the_thread_of_its_last_scan(idle_setup: Setup) -> None:
    idle_setup.hold()
    idle_setup.plug("a", "u0", "d1")
    until_scanning(idle_setup)
    idle_setup.agent.stop()
    idle_setup.step(100)
    assert not idle_setup.task.done()
    idle_setup.threads.deliver_all()
    idle_setup.step(100)
    assert idle_setup.task.done()


def test_an_id_removed_during_allocate_stays_listed(idle_setup: Setup) -> None:
    call = idle_setup.loop.create_task(idle_setup.kubelet.allocate(THING, "d0"))
    idle_setup.unplug("a", "u0", "d0")
    idle_setup.plug("a", "u0", "d1")
    idle_setup.complete_work()
    idle_setup.check_rest()
    assert call.done()
    assert idle_setup.kubelet.allocated == {THING: {"d0"}}
    idle_setup.kubelet.release(THING, "d0")
    idle_setup.complete_work()
    assert idle_setup.kubelet.lists[THING] == {"d1": True}


@pytest.mark.parametrize("event", ["crash", "disable and enable", "agent restart", "kubelet restart"])
def test_an_id_allocated_after_the_start_stays_listed(idle_setup: Setup, event: str) -> None:
    idle_setup.plug("a", "u0", "d1")
    idle_setup.restart_agent()  # so that its first reading is conclusive
    idle_setup.complete_work()
    idle_setup.loop.run(idle_setup.kubelet.allocate(THING, "d0"))
    idle_setup.advance(300)
    if event == "disable and enable":
        idle_setup.disable("a")
        idle_setup.complete_work()
    idle_setup.unplug("a", "u0", "d0")
    match event:
        case "crash":
            idle_setup.enabled["a"].crash = True
            idle_setup.set_health("u0", good=True)
        case "disable and enable":
            idle_setup.enable("a")
        case "agent restart":
            idle_setup.restart_agent()
        case _:
            idle_setup.restart_kubelet()
    idle_setup.complete_work()
    idle_setup.check_rest()
    assert idle_setup.kubelet.lists[THING] == {"d0": False, "d1": True}
    idle_setup.kubelet.release(THING, "d0")
    idle_setup.complete_work()
    assert idle_setup.kubelet.lists[THING] == {"d1": True}


def test_an_id_that_reappears_briefly_stays_listed_until_its_allocation_is_recorded(idle_setup: Setup) -> None:
    idle_setup.kubelet.records = False
    idle_setup.loop.run(idle_setup.kubelet.allocate(THING, "d0"))
    idle_setup.unplug("a", "u0", "d0")
    idle_setup.advance(0.1)
    idle_setup.plug("a", "u0", "d0")
    idle_setup.advance(0.1)
    idle_setup.unplug("a", "u0", "d0")
    idle_setup.advance(60)
    assert idle_setup.kubelet.lists[THING] == {"d0": False}
    idle_setup.kubelet.records = True
    idle_setup.kubelet.release(THING, "d0")
    idle_setup.advance(300)
    assert idle_setup.kubelet.lists.get(THING, {}) == {}


def test_allocated_ids_are_listed_when_the_checkpoint_becomes_readable(idle_setup: Setup) -> None:
    idle_setup.plug("a", "u0", "d1")
    idle_setup.complete_work()
    idle_setup.loop.run(idle_setup.kubelet.allocate(THING, "d0"))
    idle_setup.unplug("a", "u0", "d0")
    idle_setup.complete_work()
    idle_setup.kubelet.records = False
    idle_setup.kubelet.spoil_checkpoint()
    idle_setup.restart_agent()
    idle_setup.advance(5)
    idle_setup.kubelet.records = True
    idle_setup.kubelet.crashes.clear()  # nothing could tell the agent of the holder
    idle_setup.kubelet.release(THING, "other")
    idle_setup.complete_work()
    idle_setup.check_rest()
    assert idle_setup.kubelet.lists[THING] == {"d0": False, "d1": True}


def test_an_outdated_checkpoint_is_renewed_where_the_kubelet_does_not_answer(idle_setup: Setup) -> None:
    idle_setup.plug("a", "u0", "d1")
    idle_setup.complete_work()
    idle_setup.loop.run(idle_setup.kubelet.allocate(THING, "d0"))
    idle_setup.unplug("a", "u0", "d0")
    idle_setup.complete_work()
    idle_setup.kubelet.records = False
    idle_setup.kubelet.release(THING, "d0")
    idle_setup.kubelet.records = True
    idle_setup.advance(100)
    assert idle_setup.kubelet.lists[THING] == {"d1": True}


def test_a_new_device_is_not_listed_before_its_check(idle_setup: Setup) -> None:
    idle_setup.hold()
    idle_setup.bad.add("u1")
    idle_setup.plug("a", "u1", "d5")
    until_scanning(idle_setup)
    idle_setup.threads.deliver_all()
    runner = idle_setup.agent.runners["a"]
    while len(runner.context.devices.found) < 2:
        idle_setup.step()
    idle_setup.loop.create_task(runner.publish())  # as after a change of health
    idle_setup.advance(0.2)
    assert "d5" not in idle_setup.kubelet.lists[THING]
    idle_setup.complete_work()
    idle_setup.check_rest()


def test_a_recovering_unit_with_a_failed_source_is_not_checked_continuously(idle_setup: Setup) -> None:
    idle_setup.enabled["a"].policy = HealthPolicy(good_verdicts=2, recovery_delay=3.0, interval=30.0)
    idle_setup.set_health("u0", good=False)
    idle_setup.advance(1)
    idle_setup.set_health("u0", good=True)
    idle_setup.advance(0.5)
    idle_setup.enabled["a"].answers = False
    checks = idle_setup.enabled["a"].checks
    idle_setup.advance(20)
    assert idle_setup.enabled["a"].checks - checks <= 21
    idle_setup.enabled["a"].answers = True
    idle_setup.complete_work()
    idle_setup.check_rest()


def test_a_stream_that_ends_during_register_causes_immediate_registration(idle_setup: Setup) -> None:
    idle_setup.kubelet.ends_streams = 1
    idle_setup.restart_kubelet()
    idle_setup.advance(2)
    idle_setup.check_rest()


def test_a_crash_while_the_agent_ends_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    setup.enabled["a"].crash = True
    setup.restart_agent()
    assert "crashed while the agent ended it" in caplog.text
    setup.close()  # checks that no task has an exception that nothing retrieved


@pytest.fixture
def functions(setup: Setup) -> Setup:
    """With a device on each of three PCI functions, of a plugin that reads its health at intervals."""
    setup.enable("b")
    for unit, id_ in ((PF, "d0"), (VF, "d1"), (OTHER, "d2")):
        for name in ("a", "b"):
            setup.plug(name, unit, id_)
    setup.complete_work()
    setup.check_rest()
    return setup


def lists(setup: Setup) -> list[dict[str, bool]]:
    return [setup.kubelet.lists.get(f"{name}.example.com/thing", {}) for name in ("a", "b")]


def test_a_source_of_health_that_the_first_scan_finds_is_read_at_intervals(setup: Setup) -> None:
    setup.plug("b", OTHER, "d0")
    setup.enable("b")
    setup.advance(1)
    setup.bad.add(OTHER)
    setup.advance(10)
    setup.check_rest()
    assert lists(setup)[1] == {"d0": False}


def test_a_source_of_health_that_a_later_scan_finds_is_read_at_intervals(setup: Setup) -> None:
    setup.enable("b")
    setup.complete_work()
    setup.plug("b", OTHER, "d0")
    setup.advance(1)
    setup.bad.add(OTHER)
    setup.advance(10)
    setup.check_rest()
    assert lists(setup)[1] == {"d0": False}


def test_a_device_that_blocks_affects_only_itself(functions: Setup) -> None:
    functions.threads.blocks.add(PF)
    functions.plug("a", OTHER, "d3")
    functions.unplug("b", OTHER, "d2")
    functions.plug("b", VF, "d4")
    functions.advance(1)
    assert lists(functions)[0] == {"d0": True, "d1": True, "d2": True, "d3": True}
    functions.complete_work()
    functions.check_rest()
    assert lists(functions) == [
        {"d0": False, "d1": True, "d2": True, "d3": True},
        {"d0": False, "d1": True, "d4": True},
    ]
    functions.threads.unblock(PF)
    functions.complete_work()
    functions.check_rest()


def test_two_plugins_that_wait_for_one_device_both_continue_without_it(functions: Setup) -> None:
    functions.hold()
    functions.plug("a", PF, "d3")
    functions.plug("b", PF, "d4")
    functions.advance(1)
    assert [functions.scans("a"), functions.scans("b")].count(1) == 2
    functions.threads.blocks.add(PF)
    functions.complete_work()
    functions.check_rest()
    assert not any(runner.scan.failing for runner in functions.agent.runners.values())


def test_a_plugin_that_is_enabled_again_while_a_device_blocks_its_scan_continues_without_it(functions: Setup) -> None:
    functions.hold()
    functions.plug("a", PF, "d3")
    until_scanning(functions)
    functions.threads.blocks.add(PF)
    functions.threads.deliver_all()
    functions.disable("a")
    functions.advance(0.2)  # before the device is known to block
    assert not functions.agent.blocked.by_device
    functions.advance(10)
    functions.enable("a")
    functions.complete_work()
    functions.check_rest()
    assert lists(functions)[0] == {"d1": True, "d2": True}


def test_a_device_that_blocks_is_known_by_its_address_also_if_its_links_are_read_late(setup: Setup) -> None:
    write(setup.root / "devices" / OTHER / "d0", "")
    setup.threads.blocks.add("link")
    setup.hold()
    link(setup.root / "a/link", setup.root / "devices" / OTHER)
    until_scanning(setup)
    setup.threads.deliver()
    setup.advance(1)
    assert not setup.agent.blocked.by_device
    setup.threads.deliver()
    setup.advance(0.1)
    assert setup.agent.blocked.by_device.keys() == {OTHER}
    setup.threads.unblock("link")
    setup.threads.blocks.clear()
    shutil.rmtree(setup.root / "a")


def test_an_id_that_another_device_gets_while_its_earlier_one_blocks_is_that_of_the_new_device(
    functions: Setup,
) -> None:
    functions.hold()
    functions.unplug("a", PF, "d0")
    functions.plug("a", OTHER, "d0")
    functions.threads.blocks.add(PF)
    functions.plug("a", PF, "d5")
    functions.complete_work()
    functions.check_rest()
    assert lists(functions)[0] == {"d0": True, "d1": True, "d2": True}


def test_a_wedged_function_and_its_virtual_functions_stay_unhealthy_after_a_restart(functions: Setup) -> None:
    functions.wedge(PF)
    functions.complete_work()
    functions.check_rest()
    functions.restart_agent()
    functions.complete_work()
    functions.check_rest()
    assert lists(functions) == [{"d0": False, "d1": False, "d2": True}] * 2
    functions.rebind(PF)
    functions.complete_work()
    functions.check_rest()
    assert lists(functions) == [{"d0": True, "d1": True, "d2": True}] * 2


def test_a_function_that_is_bound_again_during_an_overflow_of_events_is_healthy(functions: Setup) -> None:
    functions.wedge(PF)
    functions.wedge(OTHER)
    functions.complete_work()
    functions.rebind(PF, lost=True)
    functions.complete_work()
    functions.check_rest()
    assert lists(functions) == [{"d0": True, "d1": True, "d2": False}] * 2
