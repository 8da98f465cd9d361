"""A plugin with mistakes in each hook affects no other plugin, and its problems are shown."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agentstatuses import serving_status
from conftest import Start
from gadgets import GADGET, Other, Table, gadgets
from kubelets import Kubelet, embedded_only
from test_inspect import in_background
from waiting import until

from accelplane.devices import Allocation, Device, Verdict
from accelplane.host import Host
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.node.status import SkippedPlugin
from accelplane.pages.server import status_report

OTHER = "other.example.com/gadget"
one_kubelet = embedded_only("the kubelet is not involved")


class Faulty(Table):
    """`health` blocks outside of `Host`, and other hooks return what they must not."""

    def __init__(self) -> None:
        super().__init__([*gadgets("a"), "gadget"])  # type: ignore[list-item]
        self.answers = threading.Event()
        self.asked = threading.Event()

    def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        self.asked.set()
        self.answers.wait(60)
        return {"a": Verdict("bad", "dented"), "a-0": Verdict("good")}

    def labels(self, devices: Iterable[Device]) -> Any:
        return {"example.com/gadgets": 1}

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Any:
        pass

    def measure(self, host: Host, devices: Iterable[Device]) -> Any:
        yield "one"


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    plugin = Faulty()
    yield plugin
    plugin.answers.set()


async def test_a_hook_that_blocks_delays_no_other_plugin(kubelet: Kubelet, start_agent: Start, faulty: Faulty) -> None:
    other = Other(gadgets("b"))
    agent = await start_agent(faulty=faulty, other=other)
    # The first check is left after a second: its device is listed without a verdict.
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1), OTHER: (1, 1)})
    assert faulty.asked.is_set()
    other.found = gadgets("b", "c")
    agent.runners["other"].scan.request()
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1), OTHER: (2, 2)})
    faulty.answers.set()
    agent.runners["faulty"].health.request()
    await kubelet.until(lambda resources: resources == {GADGET: (1, 0), OTHER: (2, 2)})


@one_kubelet
async def test_the_problems_of_hooks_are_shown_with_the_plugin_and_the_hook(
    tmp_path: Path, directory: str, kubelet: Kubelet, start_agent: Start, faulty: Faulty
) -> None:
    faulty.answers.set()
    agent = await start_agent({"nfd_dir": str(tmp_path)}, faulty=faulty, other=Other(gadgets("b")))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 0), OTHER: (1, 1)})
    expected = [
        "health: found verdicts of 'a-0', expected the units of the devices that it was called with",
        "labels: example.com/gadgets: found 1, expected a text of at most 63 characters of [A-Za-z0-9_.-]",
        "measure: found 'one', expected a Sample",
    ]
    async with serving_status(agent) as observer:
        await observer.contents()  # calls `measure`
        await until(lambda: list(agent.status().plugins["faulty"].problems) == expected)
        result = await in_background(
            "--root", str(tmp_path), "--kubelet-dir", directory, "--plugins", "gpu", "-o", "json"
        )
    assert not result.stderr, result.stderr
    report: Any = status_report(agent.status())
    assert report["plugins"]["faulty"]["problems"] == expected
    assert report["plugins"]["other"]["problems"] == []
    (skipped,) = report["plugins"]["faulty"]["skipped"]
    assert (skipped.subject, skipped.warning) == ("'gadget'", True)
    assert json.loads(result.stdout)["problems"] == [f"faulty: {problem}" for problem in expected]
    assert result.returncode == 1


@one_kubelet
async def test_an_invalid_allocation_fails_the_pod_with_the_name_of_the_hook(
    kubelet: Kubelet, start_agent: Start
) -> None:
    faulty = Faulty()
    faulty.answers.set()
    faulty.health = lambda _host, _devices: {}  # type: ignore[method-assign]
    await start_agent(faulty=faulty)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    with pytest.raises(Exception, match="post_allocate: found None, expected an Allocation"):
        await kubelet.run_pod("demo", {GADGET: 1})


def test_skipped_plugins_are_shown_and_the_agent_is_not_ready() -> None:
    skipped = SkippedPlugin("tpu", "KeyError: 'board'")
    status = Agent(Settings(), {}, skipped=lambda: [skipped]).status()
    assert status_report(status)["skipped-plugins"] == [skipped]
    assert list(status.unready) == ["plugin tpu is skipped: KeyError: 'board'"]
