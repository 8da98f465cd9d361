"""Which DaemonSets the operator creates and deletes if its caches are late, or another program interferes."""

import asyncio
import copy
import json

import pytest
from customresources import resource
from kubeapi import KubeApi, Object
from pluginoperators import IMAGE, NAMESPACE, condition, daemonset, has_condition, operator, put
from waiting import until

from accelplane.operator.settings import ImagePolicy

pytestmark = pytest.mark.virtual_time

CREATED = "POST .*/daemonsets$"


def stall_watches(api: KubeApi, plural: str) -> None:
    """Sends nothing more to the open watches of one kind."""
    api.pause_watches(f"/{plural}$")


async def test_a_deleted_resource_gets_no_daemonset_while_its_watch_is_stalled(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        stall_watches(api, "gpudeviceplugins")
        api.remove("gpudeviceplugins", "mine")
        # As the garbage collector does.
        api.remove("daemonsets", "intel-gpu-plugin-mine", NAMESPACE)
        await asyncio.sleep(4)
        assert (api.count(CREATED), api.all("daemonsets")) == (1, [])


async def test_a_daemonset_that_another_program_deletes_is_created_again_with_backoff(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        for _ in range(500):
            if daemonset(api) is not None:
                api.remove("daemonsets", "intel-gpu-plugin-mine", NAMESPACE)
            await asyncio.sleep(0.1)
        assert 3 < api.count(CREATED) <= 10
        degraded = condition(api, "Degraded") or {}
        assert (degraded["status"], degraded["reason"]) == ("True", "ObjectConflict")
        assert degraded["message"].startswith("deleted by another program after ")
        assert any(each["reason"] == "ObjectConflict" for each in api.all("events"))
        await until(lambda: daemonset(api) is not None, 300)
        await until(lambda: has_condition(api, "Available", "True"), 20)
        await asyncio.sleep(600)
        await until(lambda: has_condition(api, "Degraded", "False"), 20)


async def test_a_duplicate_that_another_program_creates_again_is_deleted_with_backoff(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        duplicate = copy.deepcopy(daemonset(api) or {})
        duplicate["metadata"] |= {"name": "x", "uid": "", "creationTimestamp": "2030-01-01T00:00:00Z"}
        for _ in range(600):
            if api.get("daemonsets", "x", NAMESPACE) is None:
                api.put("daemonsets", copy.deepcopy(duplicate))
            await asyncio.sleep(0.1)
        assert 3 < api.count("DELETE .*/daemonsets/x") <= 10
        await until(lambda: api.get("daemonsets", "x", NAMESPACE) is None, 300)
    assert api.count("DELETE ") == api.count("DELETE .*/daemonsets/x")


async def test_orphaned_daemonsets_stay_although_the_watch_is_late(api: KubeApi) -> None:
    """`kubectl delete --cascade=orphan` removes the owner reference before the resource."""
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        stall_watches(api, "daemonsets")
        orphan = copy.deepcopy(daemonset(api) or {})
        del orphan["metadata"]["ownerReferences"]
        api.put("daemonsets", orphan)
        api.remove("gpudeviceplugins", "mine")
        await until(lambda: api.count("GET .*/daemonsets/intel-gpu-plugin-mine") > 1)
        await asyncio.sleep(2)
    assert daemonset(api)
    assert api.count("DELETE .*/daemonsets") == 0


async def test_deletions_name_the_object_and_its_version(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        metadata = (daemonset(api) or {})["metadata"]
        api.remove("gpudeviceplugins", "mine")
        await until(lambda: not api.all("daemonsets"))
    (deletion,) = [each for each in api.requests if each.method == "DELETE"]
    assert deletion.body["preconditions"] == {key: metadata[key] for key in ("uid", "resourceVersion")}


def adopted(api: KubeApi, uid: str, namespace: str = NAMESPACE, **labels: str) -> Object:
    """A DaemonSet as the Go operator named it, which the resource names in its status."""
    reference = {"apiVersion": "deviceplugin.intel.com/v1", "kind": "GpuDevicePlugin", "name": "mine", "uid": uid}
    about = {"name": "intel-gpu-plugin", "namespace": namespace, "labels": labels}
    about |= {"ownerReferences": [reference | {"controller": True, "blockOwnerDeletion": True}]}
    selected = {"app": "intel-gpu-plugin"}
    spec = {"selector": {"matchLabels": selected}, "template": {"metadata": {"labels": selected}, "spec": {}}}
    return api.put("daemonsets", {"metadata": about, "spec": spec})


def record(api: KubeApi, owner: Object, found: Object) -> None:
    """Writes `status.controlledDaemonSet`, as the operator did before."""
    metadata = found["metadata"]
    reference = {"apiVersion": "apps/v1", "kind": "DaemonSet", **{key: metadata[key] for key in ("name", "uid")}}
    status = {"controlledDaemonSet": reference | {"namespace": metadata["namespace"]}}
    stored = copy.deepcopy(owner) | {"status": status | {"desiredNumberScheduled": 0, "numberReady": 0}}
    api.put("gpudeviceplugins", json.loads(json.dumps(stored)))


async def test_a_daemonset_without_its_label_is_found_by_the_status(api: KubeApi) -> None:
    owner = put(api, resource("gpu", image=IMAGE))
    found = adopted(api, owner["metadata"]["uid"])
    record(api, owner, found)
    async with operator(api, "gpu"):
        await until(lambda: has_condition(api, "Available", "True"))
        (only,) = api.all("daemonsets")
        assert only["metadata"]["uid"] == found["metadata"]["uid"]
        assert only["metadata"]["labels"]["app"] == "intel-gpu-plugin"
    assert api.count(CREATED) == 0


async def test_a_daemonset_in_another_namespace_is_reported_and_no_second_one_is_created(api: KubeApi) -> None:
    owner = put(api, resource("gpu", image=IMAGE))
    record(api, owner, adopted(api, owner["metadata"]["uid"], "former", app="intel-gpu-plugin"))
    before = copy.deepcopy(api.get("daemonsets", "intel-gpu-plugin", "former"))
    async with operator(api, "gpu"):
        await until(lambda: has_condition(api, "Degraded", "True"))
        degraded = condition(api, "Degraded") or {}
        assert degraded["reason"] == "OtherNamespace"
        assert degraded["message"] == (
            "DaemonSet former/intel-gpu-plugin: found a DaemonSet of this resource, expected one in namespace plugins; "
            "delete it, or set DEVICEPLUGIN_NAMESPACE of the operator to former"
        )
        await asyncio.sleep(100)
        assert api.all("daemonsets") == [before]
        api.remove("daemonsets", "intel-gpu-plugin", "former")
        await until(lambda: has_condition(api, "Available", "True"), 60)
        assert has_condition(api, "Degraded", "False")


async def test_a_daemonset_of_another_namespace_that_cannot_be_read_is_reported(api: KubeApi) -> None:
    owner = put(api, resource("gpu", image=IMAGE))
    record(api, owner, adopted(api, owner["metadata"]["uid"], "former", app="intel-gpu-plugin"))
    refusing = api.fault("GET .*/namespaces/former/daemonsets", 403, times=1_000_000)
    async with operator(api, "gpu"):
        await until(lambda: has_condition(api, "Degraded", "True"))
        assert "cannot be read" in (condition(api, "Degraded") or {})["message"]
        assert api.count(CREATED) == 0
        refusing.times = 0
        api.remove("daemonsets", "intel-gpu-plugin", "former")
        await until(lambda: has_condition(api, "Available", "True"), 60)


async def test_an_image_that_another_program_writes_again_is_upgraded_with_backoff(api: KubeApi) -> None:
    """A GitOps tool restores the resource, while `-image-upgrade=spec` changes it."""
    old, new = "intel/intel-gpu-plugin:0.30.0", "intel/intel-gpu-plugin:0.31.1"

    def image(thing: Object | None) -> str:
        return (thing or {})["spec"]["image"]

    async with operator(api, "gpu", images=ImagePolicy(upgrade="spec")):
        put(api, resource("gpu", image=old))
        await until(lambda: has_condition(api, "Available", "True"))
        for generation in range(2, 600):
            stored = copy.deepcopy(api.get("gpudeviceplugins", "mine") or {})
            if image(stored) == new:
                stored["spec"]["image"] = old
                put(api, stored, generation=generation)
            await asyncio.sleep(0.1)
        assert 3 < api.count("PATCH .*/gpudeviceplugins/mine") <= 10
        await until(lambda: has_condition(api, "Degraded", "True"), 60)
        degraded = condition(api, "Degraded") or {}
        assert (degraded["status"], degraded["reason"]) == ("True", "FieldConflict")
        assert f'spec.image: found "{old}", expected "{new}"' in degraded["message"]
        found = daemonset(api)
        assert found
        assert found["spec"]["template"]["spec"]["containers"][0]["image"] == new
        await until(lambda: image(api.get("gpudeviceplugins", "mine")) == new, 300)


async def test_available_waits_for_the_new_pods_after_an_edit(api: KubeApi) -> None:
    def available() -> tuple[str, int]:
        found = condition(api, "Available") or {}
        return found["status"], found["observedGeneration"]

    def counts(**more: int) -> None:
        found = copy.deepcopy(daemonset(api) or {})
        found["metadata"]["generation"] = more.pop("generation")
        found["status"] = {"desiredNumberScheduled": 2, "numberReady": 2, **more}
        api.put("daemonsets", found)

    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        counts(generation=1, observedGeneration=1, updatedNumberScheduled=2)
        await until(lambda: (condition(api, "Available") or {})["message"].startswith("2 of 2"))
        edited = copy.deepcopy(api.get("gpudeviceplugins", "mine") or {})
        edited["spec"]["logLevel"] = 4
        put(api, edited, generation=2)
        counts(generation=2, observedGeneration=1, updatedNumberScheduled=2)
        await asyncio.sleep(5)
        assert available() == ("True", 1)
        counts(generation=2, observedGeneration=2, updatedNumberScheduled=1)
        await asyncio.sleep(5)
        assert available() == ("True", 1)
        counts(generation=2, observedGeneration=2, updatedNumberScheduled=2)
        await until(lambda: available() == ("True", 2))
