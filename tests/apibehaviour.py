"""Behaviour of the API server that its double has, too: each function runs against both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
from lightkube.core.resource import ApiInfo, NamespacedResourceG
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Node, Pod, PodEviction

from accelplane.apiserver import AlreadyExists, Conflict, NotFound, StatusError
from accelplane.kube.client import Client, Selection
from accelplane.kube.objects import Metadata, api

NAMESPACE = "behaviour"

# A client with this field manager.
Connect = Callable[[str], Client]


class ConfigMetadata(NamespacedResourceG, msgspec.Struct):
    metadata: Metadata
    _api_info: ClassVar[ApiInfo] = api("", "v1", "ConfigMap", "configmaps")


def config(name: str, labels: dict[str, str] | None = None, **data: str) -> ConfigMap:
    return ConfigMap(metadata=ObjectMeta(name=name, namespace=NAMESPACE, labels=labels), data=data)


def version(thing: Any) -> str:
    return thing.metadata.resourceVersion


async def create_sets_metadata_and_never_overwrites(connect: Connect) -> None:
    client = connect("one")
    created = await client.create(config("created", a="1"))
    assert created.metadata
    assert all((created.metadata.uid, created.metadata.resourceVersion, created.metadata.creationTimestamp))
    with pytest.raises(AlreadyExists):
        await client.create(config("created", a="2"))
    assert (await client.get(ConfigMap, "created", NAMESPACE)).data == {"a": "1"}
    generated = await client.create(
        ConfigMap(metadata=ObjectMeta(generateName="generated-", namespace=NAMESPACE), data={})
    )
    assert generated.metadata
    assert (generated.metadata.name or "").startswith("generated-")


async def stale_replacement_is_a_conflict(connect: Connect) -> None:
    client = connect("one")
    old = await client.create(config("replaced", a="1"))
    new = await client.patch(ConfigMap, "replaced", {"data": {"a": "2"}}, namespace=NAMESPACE)
    with pytest.raises(Conflict):
        await client.replace(old)
    new.data = {"b": "3"}
    assert (await client.replace(new)).data == {"b": "3"}


async def merge_patch_removes_nulls_and_checks_the_version(connect: Connect) -> None:
    client = connect("one")
    old = await client.create(config("merged", a="1", b="2"))
    new = await client.patch(ConfigMap, "merged", {"data": {"a": None, "c": "3"}}, namespace=NAMESPACE)
    assert new.data == {"b": "2", "c": "3"}
    stale = {"metadata": {"resourceVersion": version(old)}, "data": {"b": "9"}}
    with pytest.raises(Conflict):
        await client.patch(ConfigMap, "merged", stale, namespace=NAMESPACE)


async def json_patch_is_applied_completely_or_not_at_all(connect: Connect) -> None:
    client = connect("one")
    await client.create(config("patched", a="1", b="2"))
    steps: list[dict[str, Any]] = [
        {"op": "remove", "path": "/data/b"},
        {"op": "add", "path": "/data/x~1y", "value": "3"},
        {"op": "replace", "path": "/data/a", "value": "4"},
    ]
    # A key with a slash is invalid for a ConfigMap, so it is renamed.
    steps.append({"op": "move", "from": "/data/x~1y", "path": "/data/xy"})
    assert (await client.patch(ConfigMap, "patched", steps, namespace=NAMESPACE)).data == {"a": "4", "xy": "3"}
    failing = [{"op": "remove", "path": "/data/xy"}, {"op": "test", "path": "/data/a", "value": "other"}]
    with pytest.raises(StatusError) as caught:
        await client.patch(ConfigMap, "patched", failing, namespace=NAMESPACE)
    assert caught.value.code == 422
    assert (await client.get(ConfigMap, "patched", NAMESPACE)).data == {"a": "4", "xy": "3"}


async def write_without_a_difference_keeps_the_version(connect: Connect) -> None:
    client = connect("one")
    created = await client.apply(config("unchanged", a="1"))
    assert version(await client.apply(config("unchanged", a="1"))) == version(created)
    same = await client.patch(ConfigMap, "unchanged", {"data": {"a": "1"}}, namespace=NAMESPACE)
    assert version(same) == version(created)


async def apply_removes_own_fields_and_keeps_those_of_others(connect: Connect) -> None:
    one, two = connect("one"), connect("two")
    await one.apply(config("applied", {"l": "1"}, a="1", b="2"))
    await two.apply(config("applied", b="2", c="3"), force=False)
    await one.patch(ConfigMap, "applied", {"data": {"d": "4"}}, namespace=NAMESPACE)
    found = await one.apply(config("applied", a="1"))
    assert found.data == {"a": "1", "b": "2", "c": "3", "d": "4"}
    assert found.metadata
    assert not found.metadata.labels


async def apply_without_force_is_a_conflict_that_names_manager_and_field(connect: Connect) -> None:
    one, two = connect("one"), connect("two")
    await one.apply(config("contested", a="1"))
    with pytest.raises(Conflict, match=r'1 conflict: conflict with "one": \.data\.a'):
        await two.apply(config("contested", a="2"), force=False)
    assert (await two.apply(config("contested", a="2"))).data == {"a": "2"}
    with pytest.raises(Conflict, match='conflict with "two"'):
        await one.apply(config("contested", a="1"), force=False)


async def update_takes_fields_over(connect: Connect) -> None:
    one, two = connect("one"), connect("two")
    await one.apply(config("taken", a="1", b="2"))
    await two.patch(ConfigMap, "taken", {"data": {"a": "9"}}, namespace=NAMESPACE)
    with pytest.raises(Conflict, match='conflict with "two" using v1'):
        await one.apply(config("taken", a="1", b="2"), force=False)
    # The field belongs to the other manager, so an apply without it does not remove it.
    assert (await one.apply(config("taken", b="2"))).data == {"a": "9", "b": "2"}


async def dry_run_returns_the_result_and_stores_nothing(connect: Connect) -> None:
    client = connect("one")
    assert (await client.create(config("dry", a="1"), dry_run=True)).data == {"a": "1"}
    with pytest.raises(NotFound):
        await client.get(ConfigMap, "dry", NAMESPACE)
    created = await client.create(config("dry", a="1"))
    change = {"data": {"a": "2"}}
    assert (await client.patch(ConfigMap, "dry", change, namespace=NAMESPACE, dry_run=True)).data == change["data"]
    assert (await client.apply(config("dry", b="3"), dry_run=True)).data == {"a": "1", "b": "3"}
    assert await client.delete(ConfigMap, "dry", NAMESPACE, dry_run=True)
    found = await client.get(ConfigMap, "dry", NAMESPACE)
    assert (found.data, version(found)) == ({"a": "1"}, version(created))


async def finalizers_delay_the_deletion(connect: Connect) -> None:
    client = connect("one")
    result = config("finalized", a="1")
    assert result.metadata
    result.metadata.finalizers = ["example.com/one", "example.com/two"]
    await client.create(result)
    assert await client.delete(ConfigMap, "finalized", NAMESPACE)
    found = await client.get(ConfigMap, "finalized", NAMESPACE)
    assert found.metadata
    assert found.metadata.deletionTimestamp
    more = {"metadata": {"finalizers": ["example.com/one", "example.com/two", "example.com/three"]}}
    with pytest.raises(StatusError) as caught:
        await client.patch(ConfigMap, "finalized", more, namespace=NAMESPACE)
    assert caught.value.code == 422
    await client.patch(ConfigMap, "finalized", {"metadata": {"finalizers": ["example.com/two"]}}, namespace=NAMESPACE)
    await client.get(ConfigMap, "finalized", NAMESPACE)
    await client.patch(ConfigMap, "finalized", {"metadata": {"finalizers": None}}, namespace=NAMESPACE)
    with pytest.raises(NotFound):
        await client.get(ConfigMap, "finalized", NAMESPACE)


async def delete_checks_the_uid(connect: Connect) -> None:
    client = connect("one")
    created = await client.create(config("deleted"))
    with pytest.raises(Conflict):
        await client.delete(ConfigMap, "deleted", NAMESPACE, uid="another")
    assert created.metadata
    assert await client.delete(ConfigMap, "deleted", NAMESPACE, uid=created.metadata.uid)
    assert not await client.delete(ConfigMap, "deleted", NAMESPACE)


async def selectors_choose_objects_of_lists(connect: Connect) -> None:
    client = connect("one")
    for name, labels in {"s-1": {"s": "1", "t": "x"}, "s-2": {"s": "2"}, "s-3": {"s": "3", "t": "y"}}.items():
        await client.create(config(name, labels))
    found = {
        selector: [
            one.metadata.name
            for one in (await client.list(ConfigMap, Selection(NAMESPACE, selector), page=2)).items
            if one.metadata
        ]
        for selector in ("s", "s=1", "s,s!=1", "s in (1, 3)", "s,s notin (1,3)", "s,!t", "s,t", "s,t==y", "s,t!=y")
    }
    assert found == {
        "s": ["s-1", "s-2", "s-3"],
        "s=1": ["s-1"],
        "s,s!=1": ["s-2", "s-3"],
        "s in (1, 3)": ["s-1", "s-3"],
        "s,s notin (1,3)": ["s-2"],
        "s,!t": ["s-2"],
        "s,t": ["s-1", "s-3"],
        "s,t==y": ["s-3"],
        "s,t!=y": ["s-1", "s-2"],
    }
    named = await client.list(ConfigMap, Selection(NAMESPACE, fields="metadata.name=s-2"))
    assert [one.metadata.name for one in named.items if one.metadata] == ["s-2"]


async def watch_reports_what_enters_and_leaves_a_selection(connect: Connect) -> None:
    client = connect("one")
    selection = Selection(NAMESPACE, labels="w=1")
    since = (await client.list(ConfigMap, selection)).resource_version
    await client.create(config("w-1", {"w": "0"}, a="1"))
    for value in ("1", "1", "0", "1"):
        change = {"metadata": {"labels": {"w": value}}, "data": {"a": f"{value}{since}"}}
        await client.patch(ConfigMap, "w-1", change, namespace=NAMESPACE)
    await client.patch(ConfigMap, "w-1", {"data": {"a": "last"}}, namespace=NAMESPACE)
    await client.delete(ConfigMap, "w-1", NAMESPACE)
    events: list[str] = []
    watch = client.watch(ConfigMap, selection, since, duration=30, idle=30)
    async for event in watch:
        if event.type != "BOOKMARK":
            events.append(event.type)
        if len(events) == 5:
            break
    await watch.aclose()
    assert events == ["ADDED", "DELETED", "ADDED", "MODIFIED", "DELETED"]


async def only_the_metadata_is_sent_if_no_more_is_accepted(connect: Connect) -> None:
    client = connect("one")
    await client.create(config("partial", {"p": "1"}, a="1"))
    found = await client.get(ConfigMetadata, "partial", NAMESPACE)
    assert found.metadata.labels == {"p": "1"}
    listed = await client.list(ConfigMetadata, Selection(NAMESPACE, labels="p=1"))
    assert [one.metadata.name for one in listed.items] == ["partial"]


async def status_is_written_by_its_subresource_only(connect: Connect) -> None:
    client = connect("one")
    await client.create(Node(metadata=ObjectMeta(name="behaviour")))
    try:
        change = {"status": {"capacity": {"example.com/a": "1"}}}
        found = await client.patch(Node, "behaviour", change)
        assert not (found.status and found.status.capacity)
        labelled = {**change, "metadata": {"labels": {"example.com/l": "1"}}}
        found = await client.patch(Node, "behaviour", labelled, subresource="status")
        assert found.status
        assert found.status.capacity == {"example.com/a": "1"}
        found = await client.patch(Node, "behaviour", {"spec": {"unschedulable": True}})
        assert found.status
        assert found.status.capacity == {"example.com/a": "1"}
    finally:
        await client.delete(Node, "behaviour")


async def eviction_deletes_the_pod(connect: Connect) -> None:
    client = connect("one")
    eviction = PodEviction(metadata=ObjectMeta(name="evicted", namespace=NAMESPACE))
    with pytest.raises(NotFound):
        await client.create(eviction)
    spec = PodSpec(containers=[Container(name="a", image="example.com/none")], nodeSelector={"example.com/no": "node"})
    await client.create(Pod(metadata=ObjectMeta(name="evicted", namespace=NAMESPACE), spec=spec))
    await client.create(eviction)
    with pytest.raises(NotFound):
        await client.get(Pod, "evicted", NAMESPACE)


ALL = [
    create_sets_metadata_and_never_overwrites,
    stale_replacement_is_a_conflict,
    merge_patch_removes_nulls_and_checks_the_version,
    json_patch_is_applied_completely_or_not_at_all,
    write_without_a_difference_keeps_the_version,
    apply_removes_own_fields_and_keeps_those_of_others,
    apply_without_force_is_a_conflict_that_names_manager_and_field,
    update_takes_fields_over,
    dry_run_returns_the_result_and_stores_nothing,
    finalizers_delay_the_deletion,
    delete_checks_the_uid,
    selectors_choose_objects_of_lists,
    watch_reports_what_enters_and_leaves_a_selection,
    only_the_metadata_is_sent_if_no_more_is_accepted,
    status_is_written_by_its_subresource_only,
    eviction_deletes_the_pod,
]
