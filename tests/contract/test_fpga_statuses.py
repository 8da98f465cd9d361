"""Statuses and Events of AcceleratorFunctions and FpgaRegions, against the double of an API server.

Also with the rights and definitions of older installations.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from apicalls import FPGA_NAMES, recorded
from kubeapi import KubeApi, Object
from msgspec import Raw
from waiting import until
from webhookprograms import page

from accelplane.admission.mapping_controller import add_fpga_admission
from accelplane.kube.admission import Hook, Kind, Review
from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.testing import apply_json_patch

INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
AFU = "d8424dc4a4a3c413f89e433683f9040b"
REGION = f"fpga.intel.com/region-{INTERFACE}"
FUNCTIONS, REGIONS = "acceleratorfunctions", "fpgaregions"
ALWAYS = 1_000_000


class Host:
    """A program with the webhook and the controllers."""

    def __init__(self, manager: Manager, hooks: list[Hook]) -> None:
        self.manager = manager
        self.hooks = {hook.path: hook for hook in hooks}

    def metric(self, kind: str, state: str) -> float | None:
        labels = {"kind": kind, "state": state}
        return self.manager.metrics.registry.get_sample_value("accelplane_fpga_mappings", labels)


@contextlib.asynccontextmanager
async def hosting(api: KubeApi, *, retry: float = 300, grace: float = 0.05) -> AsyncIterator[Host]:
    client = Client(api.config, field_manager="test", timeout=1)
    manager = Manager(
        client,
        health_address="127.0.0.1:0",
        metrics_address=OFF,
        watch_timeouts=WatchTimeouts(first_delay=0.01, max_delay=0.1),
    )
    host = Host(manager, add_fpga_admission(manager, retry=retry, grace=grace))
    task = asyncio.create_task(manager.run())
    try:
        yield host
        assert not task.done()
        manager.stop()
        async with asyncio.timeout(5):
            await task
        assert recorded(api.requests) <= FPGA_NAMES
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


def function(api: KubeApi, name: str = "a", mode: str = "region", namespace: str = "n") -> None:
    metadata = {"name": name, "namespace": namespace, "generation": 1}
    api.put(FUNCTIONS, {"metadata": metadata, "spec": {"afuId": AFU, "interfaceId": INTERFACE, "mode": mode}})


def region(api: KubeApi, name: str = "a") -> None:
    metadata = {"name": name, "namespace": "n", "generation": 1}
    api.put(REGIONS, {"metadata": metadata, "spec": {"interfaceId": INTERFACE}})


def node(api: KubeApi, name: str, count: str = "1", **more: Any) -> None:
    api.put("nodes", {"metadata": {"name": name}, "status": {"allocatable": {"cpu": "8", REGION: count}}, **more})


def pod(api: KubeApi, name: str, asks: str, *, on: str = "") -> None:
    limits = {f"fpga.intel.com/{asks}": "1"}
    spec: Object = {"containers": [{"name": "c", "resources": {"limits": limits, "requests": limits}}]}
    place = {"nodeName": on} if on else {}
    api.put(
        "pods", {"metadata": {"name": name, "namespace": "n"}, "spec": spec | place, "status": {"phase": "Pending"}}
    )


def status(api: KubeApi, plural: str = FUNCTIONS, name: str = "a") -> Object:
    return (api.get(plural, name, "n") or {}).get("status", {})


def reason(api: KubeApi, plural: str = FUNCTIONS, name: str = "a", kind: str = "Ready") -> str:
    found = {each["type"]: each["reason"] for each in status(api, plural, name).get("conditions", ())}
    return found.get(kind, "")


def events(api: KubeApi) -> list[tuple[str, str, str]]:
    """Kind and name of the object, and the reason."""
    return sorted((each["regarding"]["kind"], each["regarding"]["name"], each["reason"]) for each in api.all("events"))


def writes(api: KubeApi) -> int:
    return api.count("PATCH .*/status$")


async def test_a_status_changes_with_the_allocatable_resources_of_nodes_only(api: KubeApi) -> None:
    function(api)
    region(api, "r")
    async with hosting(api) as host:
        await until(lambda: reason(api) == reason(api, REGIONS, "r") == "NoNode")
        for name in ("one", "two"):
            node(api, name)
        await until(lambda: [status(api).get("nodes"), status(api, REGIONS, "r").get("nodes")] == [2, 2])
        assert status(api)["resource"] == REGION
        before = writes(api)
        # Heartbeats of a node.
        for beat in range(20):
            node(api, "one", spec={"beat": beat})
        node(api, "two", "0")
        await until(lambda: status(api).get("nodes") == status(api, REGIONS, "r").get("nodes") == 1)
        assert writes(api) == before + 2
        assert host.metric("AcceleratorFunction", "accepted") == 1
        assert events(api) == []


async def test_objects_of_the_same_name_get_one_event_each_and_are_accepted_when_one_is_deleted(api: KubeApi) -> None:
    async with hosting(api) as host, hosting(api):
        function(api)
        await until(lambda: reason(api) == "NoNode")
        region(api)
        await until(lambda: reason(api, kind="Accepted") == reason(api, REGIONS, kind="Accepted") == "NameConflict")
        expected = [(kind, "a", "NameConflict") for kind in ("AcceleratorFunction", "FpgaRegion")]
        await until(lambda: events(api) == expected)
        assert host.metric("FpgaRegion", "faulty") == 1
        api.remove(FUNCTIONS, "a", "n")
        await until(lambda: reason(api, REGIONS, kind="Accepted") == "Resolved")
    # Two replicas have watches.
    assert events(api) == expected


async def test_a_restart_writes_no_status_or_event_that_exists(api: KubeApi) -> None:
    function(api)
    function(api, "odd", "afx")
    node(api, "one")
    async with hosting(api):
        await until(lambda: reason(api) == "Offered" and reason(api, name="odd") == "UnknownMode")
        await until(lambda: len(events(api)) == 1)
    before = writes(api)
    async with hosting(api):
        function(api, "new")
        await until(lambda: reason(api, name="new") == "Offered")
    assert (writes(api), len(events(api))) == (before + 1, 1)


async def test_a_pending_pod_whose_name_was_not_replaced_gets_one_event(api: KubeApi) -> None:
    function(api)
    node(api, "one")
    pod(api, "runs", "a", on="one")
    async with hosting(api), hosting(api):
        pod(api, "fine", REGION.removeprefix("fpga.intel.com/"))
        pod(api, "waits", "a")
        pod(api, "lost", "other")
        expected = [("Pod", "lost", "FpgaNameUnknown"), ("Pod", "waits", "FpgaNameNotReplaced")]
        await until(lambda: events(api) == expected)
        pod(api, "waits", "a")
        pod(api, "last", "other")
        await until(lambda: ("Pod", "last", "FpgaNameUnknown") in events(api))
    assert len(events(api)) == 3
    (event,) = (each for each in api.all("events") if each["regarding"]["name"] == "waits")
    assert (event["regarding"]["apiVersion"], event["metadata"]["namespace"]) == ("v1", "n")


async def test_nodes_and_pods_are_not_watched_without_names(api: KubeApi) -> None:
    async with hosting(api):
        await until(lambda: api.count(f"WATCH .*/({FUNCTIONS}|{REGIONS})") == 2)
        assert api.count("/api/v1/(nodes|pods)") == 0
        function(api)
        await until(lambda: api.count("WATCH /api/v1/(nodes|pods)") == 2)


def mutated_resource(host: Host, name: str) -> str:
    """The resource of a mutated pod that requests a name."""
    asks = {f"fpga.intel.com/{name}": "1"}
    container = {"name": "c", "resources": {"limits": asks, "requests": dict(asks)}}
    document = {"metadata": {"namespace": "n"}, "spec": {"containers": [container]}}
    review = Review("u", "CREATE", Kind("", "v1", "Pod"), object=Raw(json.dumps(document).encode()))
    result = apply_json_patch(document, json.loads(msgspec.json.encode(host.hooks["/pods"].handle(review).patch)))
    (resource,) = result["spec"]["containers"][0]["resources"]["limits"]
    return str(resource)


def old(api: KubeApi) -> None:
    """Only the rights and fields of the original's role and definition."""
    api.fault("(GET|WATCH) .*/(nodes|pods)$", 403, times=ALWAYS)
    api.fault("POST .*/events$", 403, times=ALWAYS)
    api.fault("PATCH .*/status$", 404, times=ALWAYS)


async def test_pods_are_mutated_with_the_rights_and_definitions_of_the_original(
    api: KubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    old(api)
    for number in range(50):
        function(api, f"a{number}")
    function(api, "odd", "afx")
    with caplog.at_level(logging.INFO):
        async with hosting(api) as host:
            pod(api, "waits", "a1")
            await until(lambda: "objects not written" in caplog.text and "no events are written" in caplog.text)
            assert mutated_resource(host, "a1") == REGION
            assert await page(host.manager.ports["health"], "/readyz") == (200, "ok")
            await until(lambda: api.count("PATCH .*/status$") >= 2)
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 4, messages
    assert sum("status of AcceleratorFunction objects not written" in each for each in messages) == 1
    assert sum("nodes cannot be listed: " in each for each in messages) == 1
    assert sum("Pending pods cannot be listed: " in each for each in messages) == 1
    assert sum("no events are written in namespace n" in each for each in messages) == 1


async def test_rights_that_are_granted_later_are_used(api: KubeApi) -> None:
    forbidden = [api.fault(pattern, 403, times=ALWAYS) for pattern in ("GET .*/nodes$", "PATCH .*/status$")]
    function(api)
    async with hosting(api, retry=0.05):
        await until(lambda: api.count("PATCH .*/status$") > 1 and api.count("GET .*/nodes$") > 1)
        forbidden[1].times = 0
        await until(lambda: reason(api) == "NodesNotKnown")
        forbidden[0].times = 0
        await until(lambda: reason(api) == "NoNode")


async def test_a_rejected_status_does_not_affect_other_objects(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.fault("PATCH .*/odd/status$", 422, times=ALWAYS)
    api.fault("PATCH .*/a/status$", 409)
    api.fault("PATCH .*/a/status$", 500)
    function(api, "odd")
    function(api)
    async with hosting(api):
        await until(lambda: reason(api) == "NoNode")
        node(api, "one")
        await until(lambda: reason(api) == "Offered")
        await until(lambda: api.count("PATCH .*/odd/status$") == 2)
    assert caplog.text.count("n/odd: status not written") == 1
