"""`ensure` with the double of an API server: its writes, and unchanged objects."""

import copy
import json
from typing import Any

import pytest
from kubeapi import KubeApi, Object
from kubekinds import Config, Widget, widget

from accelplane.apiserver.errors import Conflict, StatusError
from accelplane.kube.client import Client
from accelplane.kube.driftbackoff import DriftBackoff
from accelplane.kube.ensure import EnsureResult, NameConflict, delete_owned, ensure
from accelplane.kube.objects import Metadata, Request, trim

KEY = ("configmaps", "n", "mine")
WRITES = "^(POST|PATCH|PUT|DELETE) "


def child(**data: str) -> Config:
    return Config(metadata=Metadata(name="mine", namespace="n", labels={"app": "greeter"}), data=data)


def reference(owner: Widget, uid: str = "", **more: Any) -> Object:
    uid = uid or owner.metadata.uid or ""
    documents = {"apiVersion": "example.com/v1", "kind": "Widget", "name": owner.metadata.name, "uid": uid}
    return {**documents, "controller": True, "blockOwnerDeletion": True, **more}


def config(*owners: Object, **data: str) -> Object:
    return {"metadata": {"name": "mine", "namespace": "n", "ownerReferences": [*owners]}, "data": data}


@pytest.fixture
async def owner(api: KubeApi, client: Client) -> Widget:
    api.put("widgets", widget("w"))
    return await client.get(Widget, "w")


async def cached(client: Client) -> Config:
    """The child as a cache has it."""
    found = await client.get(Config, "mine", "n")
    trim(found)
    return found


async def test_an_absent_object_is_created_with_its_owner(api: KubeApi, client: Client, owner: Widget) -> None:
    result = await ensure(client, child(text="hello"), owner)
    assert (result.action, result.differences) == ("created", ())
    stored = api.objects[KEY]
    assert stored["metadata"]["ownerReferences"] == [reference(owner)]
    assert stored["data"] == result.object.data == {"text": "hello"}
    assert [request.method for request in api.requests if request.path.endswith("configmaps")] == ["POST"]


async def test_nothing_is_written_if_nothing_differs_and_nothing_is_read_with_a_cache(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    await ensure(client, child(text="hello"), owner)
    existing = await cached(client)
    request_count = len(api.requests)
    result = await ensure(client, child(text="hello"), owner, existing=existing)
    assert (result.action, result.object is existing, len(api.requests)) == ("unchanged", True, request_count)
    assert (await ensure(client, child(text="hello"), owner)).action == "unchanged"
    assert api.count(WRITES) == 1


async def test_drift_is_corrected_and_reported_and_fields_of_others_stay(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    await ensure(client, child(text="hello"), owner)
    drifted = copy.deepcopy(api.objects[KEY])
    drifted["data"] = {"text": "go away", "theirs": "x"}
    api.put("configmaps", drifted)
    result = await ensure(client, child(text="hello"), owner, existing=await cached(client))
    assert (result.action, [str(each) for each in result.differences]) == (
        "updated",
        ['data.text: found "go away", expected "hello"'],
    )
    assert api.objects[KEY]["data"] == {"text": "hello", "theirs": "x"}


async def test_obsolete_fields_are_removed(api: KubeApi, client: Client, owner: Widget) -> None:
    await ensure(client, child(one="1", two="2"), owner)
    for data in ({"two": "2", "three": "3"}, {"three": "3"}):
        result = await ensure(client, child(**data), owner, existing=await cached(client))
        assert (result.action, api.objects[KEY]["data"]) == ("updated", data)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([], "without a controller"),
        ([{"kind": "Widget", "name": "other", "uid": "1"}], "controlled by Widget other"),
        ([{"kind": "Gadget", "name": "w", "uid": "1"}], "controlled by Gadget w"),
        ([{"kind": "Widget", "name": "w", "uid": "1", "apiVersion": "other.com/v1"}], "Widget w"),
    ],
)
async def test_a_foreign_object_is_a_name_conflict_and_is_unchanged(
    api: KubeApi, client: Client, owner: Widget, *, others: list[Object], found: str
) -> None:
    foreign = api.put("configmaps", config(*(reference(owner, **each) for each in others), theirs="x"))
    before = copy.deepcopy(foreign)
    for existing in (None, await cached(client)):
        with pytest.raises(NameConflict, match=f"ConfigMap n/mine: found .*{found}.*, expected .*Widget w; delete or"):
            await ensure(client, child(theirs="x"), owner, existing=existing)
    assert api.objects[KEY] == before
    assert api.count(WRITES) == 0


async def test_an_object_that_another_client_creates_first_is_not_overwritten(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    api.fault("GET .*/configmaps/mine", 404)
    foreign = copy.deepcopy(api.put("configmaps", config(theirs="x")))
    with pytest.raises(NameConflict):
        await ensure(client, child(text="hello"), owner)
    assert api.objects[KEY] == foreign


async def test_an_object_of_a_former_owner_is_adopted(api: KubeApi, client: Client, owner: Widget) -> None:
    plain = {"apiVersion": "v1", "kind": "Other", "name": "x", "uid": "o", "controller": False}
    api.put("configmaps", config(plain, reference(owner, "former"), theirs="x"))
    result = await ensure(client, child(text="hello"), owner, existing=await cached(client))
    assert result.action == "adopted"
    found = {each["uid"]: each.get("controller") for each in api.objects[KEY]["metadata"]["ownerReferences"]}
    assert found == {"o": False, owner.metadata.uid: True}
    assert api.objects[KEY]["data"] == {"text": "hello", "theirs": "x"}
    assert (await ensure(client, child(text="hello"), owner)).action == "unchanged"


async def test_adoption_never_leaves_an_object_without_a_controller(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    api.put("configmaps", config(reference(owner, "former")))
    api.fault("PATCH .*/configmaps/mine", 500, skip=1)
    with pytest.raises(StatusError):
        await ensure(client, child(text="hello"), owner)
    assert [each["uid"] for each in api.objects[KEY]["metadata"]["ownerReferences"]] == [owner.metadata.uid]
    assert (await ensure(client, child(text="hello"), owner)).action == "updated"


@pytest.mark.parametrize("former", [False, True], ids=["created", "adopted"])
async def test_nothing_is_written_for_an_owner_that_the_server_does_not_have(
    api: KubeApi, client: Client, owner: Widget, *, former: bool
) -> None:
    """The cache of owners is late. The garbage collector would delete what is created."""
    if former:
        api.put("configmaps", config(reference(owner, "former")))
    leaving = {**widget("w"), "metadata": {"name": "w", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    for change in (
        lambda: api.put("widgets", leaving),
        lambda: api.remove("widgets", "w"),
        lambda: api.put("widgets", widget("w")),
    ):
        change()
        with pytest.raises(Conflict, match=r"GET Widget w: .*deleted since it was read"):
            await ensure(client, child(text="hello"), owner)
    assert api.count(WRITES) == 0


async def test_only_an_object_of_the_owner_is_deleted_and_only_as_it_was_read(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    stored = (await ensure(client, child(text="hello"), owner)).object
    api.put("configmaps", config(theirs="x"))
    assert not await delete_owned(client, stored, Widget, Request("w"))
    api.put("configmaps", config(reference(owner)))
    assert not await delete_owned(client, stored, Widget, Request("other"))
    api.fault("GET .*/configmaps/mine", 200, body=json.dumps(api.objects[KEY]).encode())
    api.put("configmaps", config(theirs="y"))
    with pytest.raises(Conflict):
        await delete_owned(client, stored, Widget, Request("w"))
    assert api.objects[KEY]["data"] == {"theirs": "y"}
    api.put("configmaps", config(reference(owner)))
    assert await delete_owned(client, stored, Widget, Request("w"))
    assert not await delete_owned(client, stored, Widget, Request("w"))


async def test_creations_that_another_program_undoes_are_postponed(api: KubeApi, client: Client, owner: Widget) -> None:
    now = 0.0
    backoff = DriftBackoff(clock=lambda: now)
    for seconds in (1, 2, 4):
        assert (await ensure(client, child(text="hello"), owner, backoff=backoff)).action == "created"
        api.remove("configmaps", "mine", "n")
        result = await ensure(client, child(text="hello"), owner, backoff=backoff)
        assert (result.action, result.found, result.retry_after) == ("absent", None, seconds)
        now += seconds
    assert api.count(WRITES) == 3
    assert [each.reason for each in backoff.conflicts(Request("mine", "n"))] == ["ObjectConflict"]


async def test_a_contested_field_does_not_delay_the_correction_of_others(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    backoff = DriftBackoff(clock=lambda: 0.0)

    async def after(**data: str) -> EnsureResult[Config]:
        """Ensures the object after another program has changed it."""
        if stored := api.get("configmaps", "mine", "n"):
            api.put("configmaps", {**copy.deepcopy(stored), "data": data})
        return await ensure(client, child(text="hello", other="1"), owner, backoff=backoff)

    await after()
    assert (await after(text="theirs", other="1")).action == "updated"
    result = await after(text="theirs", other="2")
    assert (result.action, [each.field for each in result.differences], result.retry_after) == (
        "updated",
        ["data.other"],
        1.0,
    )
    assert api.objects[KEY]["data"] == {"text": "theirs", "other": "1"}
    assert (await after(text="theirs", other="1")).action == "postponed"


async def test_an_object_that_is_being_deleted_is_not_written(api: KubeApi, client: Client, owner: Widget) -> None:
    leaving = config(reference(owner), text="old")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.put("configmaps", leaving)
    result = await ensure(client, child(text="hello"), owner)
    assert (result.action, api.count(WRITES)) == ("terminating", 0)


async def test_an_object_that_changes_between_read_and_write_is_a_conflict(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    await ensure(client, child(text="hello"), owner)
    existing = await client.get(Config, "mine", "n")
    api.put("configmaps", copy.deepcopy(api.objects[KEY]))
    with pytest.raises(Conflict):
        await ensure(client, child(text="new"), owner, existing=existing)
    assert (await ensure(client, child(text="new"), owner)).action == "updated"


async def test_an_object_replaced_by_another_one_is_not_written(api: KubeApi, client: Client, owner: Widget) -> None:
    await ensure(client, child(text="hello"), owner)
    existing = await client.get(Config, "mine", "n")
    api.remove("configmaps", "mine", "n")
    foreign = copy.deepcopy(api.put("configmaps", config(theirs="x")))
    with pytest.raises(Conflict):
        await ensure(client, child(text="new"), owner, existing=existing)
    assert api.objects[KEY] == foreign
    api.remove("configmaps", "mine", "n")
    with pytest.raises(Conflict):
        await ensure(client, child(text="new"), owner, existing=existing)
    assert KEY not in api.objects


async def test_obsolete_fields_of_a_former_manager_are_removed(api: KubeApi, client: Client, owner: Widget) -> None:
    old = config(reference(owner), old="x", text="y")
    fields = {"f:data": {"f:old": {}, "f:text": {}}}
    old["metadata"]["managedFields"] = [{"manager": "old", "operation": "Update", "fieldsV1": fields}]
    api.put("configmaps", old)
    result = await ensure(client, child(text="hello"), owner, former_managers=["old"])
    assert (result.action, api.objects[KEY]["data"]) == ("updated", {"text": "hello"})


def drift(api: KubeApi) -> None:
    drifted = copy.deepcopy(api.objects[KEY])
    drifted["data"] = {"text": "theirs"}
    by_hand = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:data": {"f:text": {}}}}
    drifted["metadata"]["managedFields"] = [*drifted["metadata"]["managedFields"], by_hand]
    api.put("configmaps", drifted)


async def test_repeated_drift_is_postponed_and_its_manager_is_reported(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    now = 0.0
    backoff = DriftBackoff(clock=lambda: now)

    async def again() -> EnsureResult[Config]:
        return await ensure(client, child(text="hello"), owner, backoff=backoff)

    await again()
    for seconds in (1, 2):
        drift(api)
        assert (await again()).action == "updated"
        drift(api)
        result = await again()
        assert (result.action, result.retry_after) == ("postponed", seconds)
        assert api.objects[KEY]["data"] == {"text": "theirs"}
        now += seconds
    assert (await again()).action == "updated"
    (conflict,) = backoff.conflicts(Request("mine", "n"))
    assert (conflict.difference.field, conflict.corrections, conflict.managers) == ("data.text", 3, ("kubectl-edit",))
    changed = child(text="another wish")
    result = await ensure(client, changed, owner, backoff=backoff)
    # Six writes of the budget were used.
    assert result.action == "postponed"
    now += result.retry_after
    assert (await ensure(client, changed, owner, backoff=backoff)).action == "updated"


async def test_a_correction_that_the_api_server_reverts_is_not_counted_and_not_repeated(
    api: KubeApi, client: Client, owner: Widget
) -> None:
    api.admit = lambda thing: {**thing, "data": {"text": "as policy demands"}}
    await ensure(client, child(text="hello"), owner)
    await ensure(client, child(text="hello"), owner)  # hands over its fields
    backoff = DriftBackoff()
    result = await ensure(client, child(text="hello"), owner, backoff=backoff)
    assert (result.action, [each.field for each in result.differences]) == ("unchanged", ["data.text"])
    writes = api.count(WRITES)
    assert (await ensure(client, child(text="hello"), owner, backoff=backoff)).action == "unchanged"
    assert api.count(WRITES) == writes


async def test_owner_and_child_must_be_of_one_namespace(client: Client) -> None:
    owner = Config(metadata=Metadata(name="o", namespace="other", uid="1"))
    with pytest.raises(
        ValueError, match="ConfigMap n/mine: namespace is 'n', expected that of its owner, ConfigMap other/o"
    ):
        await ensure(client, child(), owner)
