"""Finalizers are added and removed without losing those of others."""

import asyncio

import pytest
from kubeapi import KubeApi
from kubekinds import Widget, widget

from accelplane.apiserver.errors import Conflict, NotFound
from accelplane.kube.client import Client
from accelplane.kube.finalizers import add_finalizer, remove_finalizer

OURS, OTHER = "example.com/ours", "example.com/other"


def finalizers(api: KubeApi) -> list[str]:
    return api.objects["widgets", "", "w"]["metadata"].get("finalizers") or []


def put(api: KubeApi, *names: str, **metadata: str) -> None:
    result = widget("w")
    api.put("widgets", {**result, "metadata": {"name": "w", "finalizers": list(names), **metadata}})


async def test_a_finalizer_is_added_once_and_removed_once(api: KubeApi, client: Client) -> None:
    put(api, OTHER)
    added = await add_finalizer(client, await client.get(Widget, "w"), OURS)
    assert added.metadata.finalizers == finalizers(api) == [OTHER, OURS]
    assert await add_finalizer(client, added, OURS) is added
    removed = await remove_finalizer(client, added, OURS)
    assert removed
    assert removed.metadata.finalizers == finalizers(api) == [OTHER]
    assert await remove_finalizer(client, removed, OURS) is removed
    assert api.count("PATCH") == 2


async def test_a_stale_object_loses_no_finalizer_of_others(api: KubeApi, client: Client) -> None:
    put(api)
    stale = await client.get(Widget, "w")
    put(api, OTHER)
    await add_finalizer(client, stale, OURS)
    assert finalizers(api) == [OTHER, OURS]
    put(api, OURS)
    stale = await client.get(Widget, "w")
    put(api, OURS, OTHER)
    await remove_finalizer(client, stale, OURS)
    assert finalizers(api) == [OTHER]


async def test_two_concurrent_controllers_keep_both_finalizers(api: KubeApi, client: Client) -> None:
    put(api)
    stale = await client.get(Widget, "w")
    await asyncio.gather(*(add_finalizer(client, stale, f"example.com/{number}") for number in range(4)))
    assert sorted(finalizers(api)) == [f"example.com/{number}" for number in range(4)]


async def test_an_object_that_always_changes_is_a_conflict(api: KubeApi, client: Client) -> None:
    put(api)
    thing = await client.get(Widget, "w")
    api.fault("PATCH", 409, times=1_000)
    with pytest.raises(Conflict):
        await add_finalizer(client, thing, OURS)
    assert api.count("PATCH") == 5


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_missing_object_raises_not_found(api: KubeApi, client: Client, replaced: bool) -> None:
    put(api, OURS)
    thing = await client.get(Widget, "w")
    api.remove("widgets", "w")
    if replaced:
        put(api, OURS)
    assert await remove_finalizer(client, thing, OURS) is None
    with pytest.raises(NotFound, match="Widget w was deleted"):
        await add_finalizer(client, thing, OTHER)
    assert not replaced or finalizers(api) == [OURS]


async def test_no_finalizer_is_added_during_deletion(api: KubeApi, client: Client) -> None:
    put(api, OTHER, deletionTimestamp="2026-01-01T00:00:00Z")
    thing = await client.get(Widget, "w")
    with pytest.raises(ValueError, match=f"Widget w: is being deleted; cannot add {OURS}"):
        await add_finalizer(client, thing, OURS)
    assert await remove_finalizer(client, thing, OTHER)
