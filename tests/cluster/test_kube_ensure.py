"""`ensure` and status by server-side apply against a real API server: field ownership, preconditions, adoption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import msgspec
import pytest

from accelplane.apiserver.errors import Conflict
from accelplane.kube.client import Client, load_config
from accelplane.kube.driftbackoff import DriftBackoff
from accelplane.kube.ensure import EnsureResult, NameConflict, ensure
from accelplane.kube.objects import ApiInfo, Metadata, NamespacedResource, Request, api, trim
from accelplane.kube.owners import owner_reference

from .cluster import Cluster

pytestmark = pytest.mark.cluster

NAMESPACE = "ensured"
LABELS = {"app": "ensured"}


class Text(NamespacedResource, msgspec.Struct, omit_defaults=True, kw_only=True):
    metadata: Metadata
    data: dict[str, str] = {}
    _api_info: ClassVar[ApiInfo] = api("", "v1", "ConfigMap", "configmaps")


class Workload(NamespacedResource, msgspec.Struct, omit_defaults=True, kw_only=True):
    metadata: Metadata
    spec: dict[str, Any] = {}
    _api_info: ClassVar[ApiInfo] = api("apps", "v1", "DaemonSet", "daemonsets")


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None) -> Iterator[Cluster]:
    """A control plane without nodes."""
    with Cluster.running([]) as running, running.namespace(NAMESPACE):
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    config = load_config(str(cluster.kubeconfig))
    instance = Client(config, field_manager="ensurer")
    yield instance
    await instance.close()


@pytest.fixture
async def other(cluster: Cluster) -> AsyncIterator[Client]:
    """Another program."""
    config = load_config(str(cluster.kubeconfig))
    instance = Client(config, field_manager="other")
    yield instance
    await instance.close()


@pytest.fixture
async def owner(client: Client) -> AsyncIterator[Text]:
    instance = await client.create(text("owner"))
    yield instance
    for name in ("owner", "mine"):
        await client.delete(Text, name, NAMESPACE)
    await client.delete(Workload, "mine", NAMESPACE)


def text(name: str = "mine", **data: str) -> Text:
    return Text(metadata=Metadata(name=name, namespace=NAMESPACE), data=data)


def workload(*arguments: str, **pod: Any) -> Workload:
    container = {"name": "main", "image": "example.com/none:1", "args": [*arguments]}
    template = {"metadata": {"labels": LABELS}, "spec": {"containers": [container], **pod}}
    spec = {"selector": {"matchLabels": LABELS}, "template": template}
    return Workload(metadata=Metadata(name="mine", namespace=NAMESPACE, labels=LABELS), spec=spec)


async def ensure_repeatedly(client: Client, child: Workload, owner: Text) -> EnsureResult[Workload]:
    """Retries after a conflict as a controller does: the DaemonSet controller writes the status meanwhile."""
    while True:
        try:
            return await ensure(client, child, owner)
        except Conflict:
            await asyncio.sleep(0.1)


async def test_fields_of_others_are_kept_and_obsolete_fields_are_removed(
    client: Client, other: Client, owner: Text
) -> None:
    assert (await ensure(client, text(one="1", two="2"), owner)).action == "created"
    assert (await ensure(client, text(one="1", two="2"), owner)).action == "unchanged"
    await other.patch(Text, "mine", {"data": {"one": "changed", "theirs": "x"}}, namespace=NAMESPACE)
    result = await ensure(client, text(one="1", two="2"), owner)
    assert (result.action, [str(each) for each in result.differences]) == (
        "updated",
        ['data.one: found "changed", expected "1"'],
    )
    assert result.object.data == {"one": "1", "two": "2", "theirs": "x"}
    for data in ({"two": "2"}, {"three": "3"}):
        assert (await ensure(client, text(**data), owner)).object.data == {**data, "theirs": "x"}


async def test_defaults_of_the_api_server_are_no_differences(client: Client, owner: Text) -> None:
    child = workload("-v", nodeSelector={"a": "b"}, priorityClassName="")
    first = await ensure(client, child, owner)
    assert first.action == "created"
    for existing in (first.object, None):
        assert (await ensure(client, child, owner, existing=existing)).action == "unchanged"
    tolerating = workload("-v", tolerations=[{"operator": "Exists"}])
    assert (await ensure_repeatedly(client, tolerating, owner)).action == "updated"
    result = await ensure_repeatedly(client, workload("-v"), owner)
    pod = result.object.spec["template"]["spec"]
    assert ("nodeSelector" in pod, "tolerations" in pod, pod["dnsPolicy"]) == (False, False, "ClusterFirst")


async def test_a_foreign_object_is_not_written(client: Client, other: Client, owner: Text) -> None:
    foreign = await other.create(text(theirs="x"))
    with pytest.raises(NameConflict, match="without a controller"):
        await ensure(client, text(one="1"), owner)
    found = await client.get(Text, "mine", NAMESPACE)
    assert found.metadata.resourceVersion == foreign.metadata.resourceVersion


@pytest.fixture
def no_garbage_collector(cluster: Cluster) -> Iterator[None]:
    """The garbage collector would delete objects whose owner does not exist."""
    with cluster.controller_manager.suspended():
        yield


@pytest.mark.usefixtures("no_garbage_collector")
async def test_an_object_of_a_former_owner_is_adopted(client: Client, other: Client, owner: Text) -> None:
    former = workload("-v")
    reference = owner_reference(owner)
    reference.uid = "00000000-0000-4000-8000-000000000000"
    keeper = await other.create(text("keeper"))
    kept = owner_reference(keeper)
    kept.controller = kept.blockOwnerDeletion = None
    former.metadata.ownerReferences = [reference, kept]
    await other.create(former)
    result = await ensure(client, workload("-w"), owner)
    assert result.action == "adopted"
    references = {each.uid: bool(each.controller) for each in result.object.metadata.ownerReferences or ()}
    assert references == {keeper.metadata.uid: False, owner.metadata.uid: True}
    assert result.object.spec["template"]["spec"]["containers"][0]["args"] == ["-w"]
    assert (await ensure(client, workload("-w"), owner)).action == "unchanged"
    await other.delete(Text, "keeper", NAMESPACE)


@pytest.mark.parametrize("prepared", [False, True], ids=["created", "applied"])
async def test_a_correction_of_an_old_version_is_a_conflict(
    client: Client, other: Client, owner: Text, prepared: bool
) -> None:
    existing = (await ensure(client, text(one="1"), owner)).object
    if prepared:
        existing = (await ensure(client, text(one="2"), owner)).object
    await other.patch(Text, "mine", {"data": {"theirs": "x"}}, namespace=NAMESPACE)
    with pytest.raises(Conflict):
        await ensure(client, text(one="3"), owner, existing=existing)
    await client.delete(Text, "mine", NAMESPACE)
    with pytest.raises(Conflict):
        await ensure(client, text(one="3"), owner, existing=existing)
    await other.create(text(theirs="x"))
    with pytest.raises(Conflict):
        await ensure(client, text(one="3"), owner, existing=existing)
    assert (await client.get(Text, "mine", NAMESPACE)).data == {"theirs": "x"}


async def test_the_manager_that_reverts_a_correction_is_reported(client: Client, other: Client, owner: Text) -> None:
    now = 0.0
    backoff = DriftBackoff(clock=lambda: now)
    await ensure(client, text(one="1"), owner)
    for _ in range(3):
        await other.patch(Text, "mine", {"data": {"one": "theirs"}}, namespace=NAMESPACE)
        existing = await client.get(Text, "mine", NAMESPACE)
        trim(existing)
        result = await ensure(client, text(one="1"), owner, existing=existing, backoff=backoff)
        assert result.action == "updated"
        now += 300
    (conflict,) = backoff.conflicts(Request("mine", NAMESPACE))
    assert (conflict.difference.field, conflict.managers) == ("data.one", ("other",))
