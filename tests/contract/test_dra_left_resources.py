"""Resources that an earlier device plugin has left on the Node are reported where they prevent claims."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from apicalls import DRA, recorded
from dranodes import GPU, I915, DraNode
from sliceservers import NODE, SliceServer
from waiting import until

from accelplane.apiserver import ApiServer
from accelplane.node.dra import observednode
from accelplane.node.dra.observednode import ObservedNode
from accelplane.pages.inventory import inventory_problems

REMOVE = '[{"op":"remove","path":"/status/capacity/gpu.intel.com~1i915"}]'


@pytest.fixture
async def node(directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DraNode]:
    """A node of Kubernetes 1.34. It is read again at once while there is a problem."""
    monkeypatch.setattr(observednode, "_RECHECK", 0.05)
    async with SliceServer(34, gates=()) as server:
        node = DraNode(directory, tmp_path, server)
        async with node.kubelet:
            yield node


def set_node(server: SliceServer, version: str, **allocatable: str) -> None:
    status = {"nodeInfo": {"kubeletVersion": version}, "allocatable": allocatable}
    server.put("nodes", {"metadata": {"name": NODE}, "status": status})


def set_class(server: SliceServer, **spec: Any) -> None:
    server.put("deviceclasses", {"metadata": {"name": "i915.gpu.intel.com"}, "spec": spec})


async def test_a_resource_of_an_earlier_device_plugin_is_reported_until_it_is_removed(node: DraNode) -> None:
    """Case 47."""
    set_node(node.server, "v1.34.4", **{I915: "0", "gpu.intel.com/xe": "0", "cpu": "2"})
    set_class(node.server, extendedResourceName=I915)
    async with node.agent_running() as agent:
        await node.until_registered()
        await until(lambda: bool(node.status.problems))
        (problem,) = [each for each in inventory_problems(agent.status()) if "earlier device plugin" in each]
        assert problem.startswith(f"gpu: the Node still has {I915} of an earlier device plugin with the amount 0,")
        assert problem.endswith(f"run: kubectl patch node {NODE} --subresource=status --type=json -p '{REMOVE}'")
        await until(lambda: "ResourceLeft" in [each["reason"] for each in node.server.all("events")])
        (event,) = [each for each in node.server.all("events") if each["reason"] == "ResourceLeft"]
        assert (event["regarding"]["name"], f"gpu: {event['note']}") == (NODE, problem)
        set_node(node.server, "v1.34.4", cpu="2")
        await until(lambda: not node.status.problems)
    assert recorded(node.server.requests) <= DRA


class Case(NamedTuple):
    minor: int = 34
    kubelet: str = "v1.34.4"
    amount: str = "0"
    named: str = I915
    served: Sequence[str] = ()
    reported: bool = False


CASES = [
    Case(reported=True),
    Case(served=(I915,)),
    Case(named=""),
    Case(named="gpu.intel.com/xe"),
    Case(amount="2"),
    Case(minor=35),
    Case(minor=35, kubelet="v1.35.4"),
]


@pytest.mark.parametrize("case", CASES)
async def test_only_resources_of_classes_that_nobody_serves_are_reported_and_only_for_1_34(case: Case) -> None:
    async with SliceServer(case.minor, gates=()) as server:
        set_node(server, case.kubelet, **{I915: case.amount})
        set_class(server, **({"extendedResourceName": case.named} if case.named else {}))
        api = ApiServer(server.config)
        try:
            observed = ObservedNode(api, NODE, GPU, lambda: case.served)
            delay = await observed.read()
        finally:
            api.close()
        assert bool(observed.problem) == case.reported
        assert (delay is None) == (case.kubelet == "v1.35.4")  # without periodic requests


async def test_a_missing_right_to_list_classes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with SliceServer(34, gates=()) as server:
        set_node(server, "v1.34.4", **{I915: "0"})
        server.fault("GET /apis/resource.k8s.io/v1/deviceclasses", 403, times=-1)
        api = ApiServer(server.config)
        try:
            observed = ObservedNode(api, NODE, GPU, lambda: ())
            for _ in range(2):
                await observed.read()
        finally:
            api.close()
        assert observed.kubelet == (1, 34)
        assert observed.problem == ""
        assert caplog.text.count("resources of an earlier device plugin are not known") == 1
