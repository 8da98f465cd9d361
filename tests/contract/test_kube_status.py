"""Statuses by server-side apply, against the double of an API server."""

from typing import Any, ClassVar

import msgspec
import pytest
from kubeapi import KubeApi

from accelplane.apiserver import Conflict, NotFound
from accelplane.kube.client import Client
from accelplane.kube.conditions import Condition, condition, with_transition_times
from accelplane.kube.customresource import compact, custom_resource
from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, api
from accelplane.kube.status import apply_status


class Widget(GlobalResource, msgspec.Struct, kw_only=True):
    metadata: Metadata
    _api_info: ClassVar[ApiInfo] = api("example.com", "v1", "Widget", "widgets")


class WidgetStatus(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    ready_pods: int = 0
    nodes: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()


def ready(status: bool = True) -> Condition:
    return condition("Ready", status, "Why", "message")


def stored(api: KubeApi) -> Any:
    return api.objects["widgets", "", "w"].get("status")


async def put(api: KubeApi, client: Client, **status: Any) -> Widget:
    api.put("widgets", {"metadata": {"name": "w"}, "spec": {}, "status": status})
    return await client.get(Widget, "w")


async def test_a_status_is_written_if_it_changes_and_fields_at_their_defaults_go(api: KubeApi, client: Client) -> None:
    widget = await put(api, client)
    first = WidgetStatus(1, ("a", "b"), (ready(),))
    assert await apply_status(client, widget, first, None)
    assert stored(api) == msgspec.to_builtins(first) | {
        "nodes": ["a", "b"],
        "conditions": [msgspec.to_builtins(ready())],
    }
    assert not await apply_status(client, widget, first, stored(api))
    assert await apply_status(client, widget, WidgetStatus(1), stored(api))
    assert {name: value for name, value in stored(api).items() if value} == {"readyPods": 1}
    assert api.count("PATCH .*/widgets/w/status$") == 2


async def test_conditions_of_others_stay_and_are_no_change(api: KubeApi, client: Client) -> None:
    other = msgspec.to_builtins(condition("Theirs", False, "Why"))
    widget = await put(api, client, conditions=[other])
    assert await apply_status(client, widget, WidgetStatus(conditions=(ready(),)), {"conditions": [other]})
    assert {each["type"] for each in stored(api)["conditions"]} == {"Ready", "Theirs"}
    known = msgspec.convert(stored(api)["conditions"], list[Condition])
    same = WidgetStatus(conditions=with_transition_times(known, [ready()]))
    assert not await apply_status(client, widget, same, stored(api))
    assert await apply_status(client, widget, WidgetStatus(conditions=(ready(False),)), stored(api))
    assert {each["type"]: each["status"] for each in stored(api)["conditions"]} == {"Ready": "False", "Theirs": "False"}


async def test_fields_that_an_older_program_wrote_by_updates_are_removed(api: KubeApi, client: Client) -> None:
    widget = await put(api, client, readyPods=3, nodes=["a"], unknown=1)
    assert await apply_status(client, widget, WidgetStatus(4), stored(api))
    assert stored(api) == {"readyPods": 4, "unknown": 1}


async def test_only_one_of_several_replicas_writes_with_a_precondition(api: KubeApi, client: Client) -> None:
    widget = await put(api, client)
    assert await apply_status(client, widget, WidgetStatus(1), None, if_unchanged=True)
    with pytest.raises(Conflict):
        await apply_status(client, widget, WidgetStatus(2), None, if_unchanged=True)
    assert stored(api) == {"readyPods": 1}


async def test_the_status_of_another_resource_of_the_same_name_is_not_written(api: KubeApi, client: Client) -> None:
    widget = await put(api, client)
    api.remove("widgets", "w")
    with pytest.raises(NotFound):
        await apply_status(client, widget, WidgetStatus(1), None)
    await put(api, client)
    with pytest.raises(Conflict):
        await apply_status(client, widget, WidgetStatus(1), None)
    assert stored(api) == {}


class Model(msgspec.Struct):
    kind: str
    spec: dict[str, int]


@pytest.mark.parametrize("namespaced", [False, True])
async def test_a_custom_resource_is_decoded_where_it_is_used(api: KubeApi, client: Client, namespaced: bool) -> None:
    kind = custom_resource("example.com", "v2", "Thing", namespaced=namespaced)
    namespace = "n" if namespaced else ""
    api.put("things", {"metadata": {"name": "t", "namespace": namespace}, "spec": {"size": 1}, "status": None})
    thing = await client.get(kind, "t", namespace)
    compact(thing)
    assert thing.decode(Model) == Model("Thing", {"size": 1})
    assert thing.document()["apiVersion"] == "example.com/v2"
    assert "status" not in thing.document()
    api.put("things", {"metadata": {"name": "t", "namespace": namespace}, "spec": "not an object"})
    thing = await client.get(kind, "t", namespace)
    with pytest.raises(msgspec.ValidationError):
        thing.decode(Model)
