"""The agent under random orders of events, on a loop with virtual time: a state machine, and a long run of `churn`."""

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import churn
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scripted import OTHER, PF
from thoroughness import examples


def test_random_operations_violate_no_invariant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # records of exceptions keep open directories
    churn.run(1, examples(3000))


def test_a_health_file_that_blocks_keeps_one_thread_and_makes_its_card_unhealthy() -> None:
    with closing(churn.ChurnSetup()) as setup:
        setup.enable("gpu")
        setup.plug("gpu", PF, "")
        setup.plug("gpu", OTHER, "")
        setup.complete_work()
        setup.check_rest()
        setup.threads.blocks.add("card0")
        setup.advance(600)
        assert [thread.blocked for thread in setup.threads.waiting] == ["/sys/class/drm/card0/device/gpu_health"]
        assert setup.kubelet.lists["gpu.intel.com/xe"] == {"card0-0": False, "card2-0": True}
        setup.threads.blocks.clear()
        setup.threads.unblock("card0")
        setup.complete_work()
        setup.check_rest()


def test_a_card_whose_driver_reports_a_critical_state_stays_unhealthy_when_it_blocks() -> None:
    with closing(churn.ChurnSetup()) as setup:
        setup.enable("gpu")
        setup.set_health(PF, good=False)
        setup.plug("gpu", PF, "")
        setup.complete_work()
        setup.check_rest()
        setup.block(PF)
        setup.agent.runners["gpu"].request_check()
        for _ in range(10):
            setup.advance(1)
            assert setup.kubelet.lists["gpu.intel.com/xe"] == {"card0-0": False}


class AgentMachine(RuleBasedStateMachine):
    """Events in any order; all work is completed after every few events. It finds short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.setup = churn.ChurnSetup()

    @rule(operation=st.sampled_from(churn.OPERATIONS), data=st.data())
    def operate(self, operation: Callable[[churn.ChurnSetup, churn.Choose], None], data: st.DataObject) -> None:
        def choose(options: Any) -> Any:
            return data.draw(st.sampled_from(options))

        operation(self.setup, choose)

    @invariant()
    def check(self) -> None:
        churn.check(self.setup)

    def teardown(self) -> None:
        try:
            self.setup.complete_work()
            self.setup.check_rest()
        finally:
            self.setup.close()


TestAgentMachine = AgentMachine.TestCase
TestAgentMachine.settings = settings(max_examples=examples(25), stateful_step_count=30)
