"""`ensure`: creates an object that another one owns, or corrects it.

    ensured = await ensure(client, child, owner, existing=cache.get(request))

- No object has the name: it is created, if the API server still has `owner`. Creation never overwrites an object, even
  if another client is faster.
- `owner` controls the object: fields that differ from `child` are corrected by a server-side apply. Fields that `child`
  does not have stay, except those that an earlier `child` had, which are removed.
- A former owner of the same name controls the object, because `owner` was deleted and created again or restored: it is
  adopted.
- The object has another controller or none: `NameConflict` is raised and nothing is written.

If nothing differs, nothing is written. A correction depends on the version that was compared: if the object has changed
since, `ensure` raises `Conflict`, and a controller that lets it pass is called again.

`delete_owned` deletes an object after a live read.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Generic, Literal, TypeVar

import msgspec

from accelplane.apiserver.errors import AlreadyExists, ApiError, Conflict, NotFound

from .client import Client
from .differences import Difference, differences, managers_of, with_found
from .driftbackoff import ABSENT, DriftBackoff
from .fieldmanagers import Entry, managed_fields, transfer_fields
from .objects import Object, Request, api_of, document_of, is_namespaced, is_terminating, metadata_of, request_of
from .owners import controller_of, is_controlled_by, owner_reference, owner_request

T = TypeVar("T", bound=Object)

Action = Literal["created", "adopted", "updated", "unchanged", "postponed", "absent", "terminating"]


class EnsureResult(msgspec.Struct, Generic[T], frozen=True):
    """The result of `ensure`, and the object as written, read, or passed as `existing`.

    created       it was created
    adopted       `owner` controls it now, and it matches `child`
    updated       the `differences` were corrected
    unchanged     nothing was written, or a write left the `differences` in place, for example due to a webhook
    postponed     the `differences` were corrected before and are present again; ensure again in `retry_after` seconds
    absent        another client deletes it after each creation, `object` does not exist; ensure again in `retry_after`
                  seconds
    terminating   it is being deleted; ensure again after its deletion
    """

    object: T
    action: Action
    differences: tuple[Difference, ...] = ()
    retry_after: float = 0.0

    @property
    def found(self) -> T | None:
        """The object, if it exists and stays."""
        return self.object if self.action not in {"absent", "terminating"} else None


class NameConflict(ApiError):
    """An object that must not be adopted has the name of the child. The message has the remedy."""


async def ensure(
    client: Client,
    child: T,
    owner: Object,
    *,
    existing: T | None = None,
    former_managers: Collection[str] = (),
    hash_annotation: str = "",
    backoff: DriftBackoff | None = None,
) -> EnsureResult[T]:
    """Creates or updates an object to match `child`, with `owner` as its controller.

    `existing` is the object from a cache, if the cache has it: it saves a request. Fields of `former_managers` count as
    fields of this program. `hash_annotation` is the annotation for the hash of `child`, by which fields are found that
    `child` had earlier. With `backoff`, differences that come back are corrected less and less often, and the others
    without delay.

    Raises `NameConflict`, `Conflict`, and whatever else the API server answers.
    """
    annotation = hash_annotation or _default_annotation(owner)
    desired, digest = _desired(child, owner, annotation)
    live = existing
    if live is None or not (managed_fields(live) or _is_settled(live, desired, owner)):
        live = await _read(client, desired)
    key = request_of(desired)
    backoff = backoff or DriftBackoff()
    if live is None:
        if (delay := backoff.delay(key, digest, ABSENT)) > 0:
            return EnsureResult(desired, "absent", retry_after=delay)
        await _check_owner_exists(client, owner)
        try:
            created = await client.create(desired)
        except AlreadyExists:
            live = await client.get(type(child), key.name, key.namespace)
        else:
            backoff.record_write(key)
            backoff.record_correction(key, digest, [ABSENT])
            return EnsureResult(created, "created")
    adopts = _check_controller(live, owner)
    if is_terminating(live):
        return EnsureResult(live, "terminating")
    found = differences(document_of(desired), document_of(live))
    if not found:
        return EnsureResult(live, "unchanged")
    later, delay = backoff.postponed(key, digest, found)
    due = tuple(each for each in found if each not in later)
    if not due or (adopts and later) or backoff.is_persistent(key, digest, due):
        return EnsureResult(live, "postponed" if later else "unchanged", found, delay)
    if adopts:
        await _check_owner_exists(client, owner)
    wanted = msgspec.convert(with_found(document_of(desired), later), type(desired))
    try:
        written, changed = await _correct(client, wanted, live, owner, former_managers, backoff=backoff)
    except NotFound as error:
        raise Conflict(f"PATCH {_text(live)}", "deleted since it was read", code=409, reason="Conflict") from error
    if changed:
        managers = partial(_other_managers, managed_fields(live), client.field_manager)
        backoff.record_correction(key, digest, due, managers)
    else:
        backoff.record_persistent(key, digest, due)
    return EnsureResult(written, "adopted" if adopts else "updated" if changed else "unchanged", due, delay)


async def delete_owned(client: Client, thing: Object, kind: type[Object], owner: Request) -> bool:
    """Deletes an object if `owner`, which is of this kind, controls it, as a live read shows.

    Returns whether it was deleted. Raises `Conflict` if it changes between read and deletion.
    """
    key = request_of(thing)
    try:
        live = await client.get(type(thing), key.name, key.namespace)
    except NotFound:
        return False
    metadata = metadata_of(live)
    if metadata.uid != metadata_of(thing).uid or owner_request(live, kind) != owner or is_terminating(live):
        return False
    return await client.delete(
        type(thing), key.name, key.namespace, uid=metadata.uid, resource_version=metadata.resourceVersion
    )


def digest_of(document: Mapping[str, object]) -> str:
    """The hash of a desired object with its owner references."""
    return hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()[:16]


def _default_annotation(owner: Object) -> str:
    group = api_of(type(owner)).resource.group
    return f"{group}/applied-hash" if group else "applied-hash"


def _desired(child: T, owner: Object, annotation: str) -> tuple[T, str]:
    """The child with its controller reference and its hash, and the hash."""
    metadata = metadata_of(child)
    if is_namespaced(type(owner)) and metadata.namespace != metadata_of(owner).namespace:
        raise ValueError(
            f"{_text(child)}: namespace is {metadata.namespace!a}, expected that of its owner, {_text(owner)}"
        )
    document = document_of(child)
    fields = msgspec.convert(document["metadata"], dict[str, object])
    others = [msgspec.to_builtins(each) for each in metadata.ownerReferences or () if not each.controller]
    fields["ownerReferences"] = [*others, msgspec.to_builtins(owner_reference(owner))]
    document["metadata"] = fields
    digest = digest_of(document)
    annotations = msgspec.convert(fields.get("annotations") or {}, dict[str, object])
    fields["annotations"] = {**annotations, annotation: digest}
    return msgspec.convert(document, type(child)), digest


def _is_settled(live: T, desired: T, owner: Object) -> bool:
    return is_controlled_by(live, owner) and not differences(document_of(desired), document_of(live))


async def _read(client: Client, desired: T) -> T | None:
    key = request_of(desired)
    try:
        return await client.get(type(desired), key.name, key.namespace)
    except NotFound:
        return None


async def _check_owner_exists(client: Client, owner: Object) -> None:
    """Raises `Conflict` if the cache of owners is outdated: the garbage collector would delete what is created."""
    key = request_of(owner)
    try:
        live = await client.get(type(owner), key.name, key.namespace)
    except NotFound:
        live = None
    if live is None or is_terminating(live) or metadata_of(live).uid != metadata_of(owner).uid:
        raise Conflict(f"GET {_text(owner)}", "deleted since it was read", code=409, reason="Conflict")


def _check_controller(live: Object, owner: Object) -> bool:
    """Whether the object is adopted. Raises `NameConflict`."""
    if is_controlled_by(live, owner):
        return False
    if owner_request(live, type(owner)) == request_of(owner):
        return True
    controller = controller_of(live)
    found = f"controlled by {controller.kind} {controller.name}" if controller else "without a controller"
    raise NameConflict(
        _text(live),
        f"found an object of this name {found}, expected one controlled by {_text(owner)}; delete or rename it",
    )


async def _correct(
    client: Client, desired: T, live: T, owner: Object, former_managers: Collection[str], *, backoff: DriftBackoff
) -> tuple[T, bool]:
    """Applies the desired object. Returns it as written, and whether that changed anything."""
    metadata, key = metadata_of(live), request_of(desired)
    if (changes := _preparation(live, owner, client.field_manager, former_managers)) is not None:
        test = {"op": "replace", "path": "/metadata/resourceVersion", "value": metadata.resourceVersion}
        prepared = await client.patch(type(desired), key.name, [test, *changes], namespace=key.namespace)
        backoff.record_write(key)
        metadata = metadata_of(prepared)
    document = document_of(desired)
    fields = msgspec.convert(document["metadata"], dict[str, object])
    document["metadata"] = {**fields, "uid": metadata.uid, "resourceVersion": metadata.resourceVersion}
    written = await client.apply(msgspec.convert(document, type(desired)))
    if metadata_of(written).resourceVersion != metadata.resourceVersion:
        backoff.record_write(key)
    return written, metadata_of(written).resourceVersion != metadata_of(live).resourceVersion


def _preparation(
    live: Object, owner: Object, manager: str, former_managers: Collection[str]
) -> list[Mapping[str, object]] | None:
    """The JSON patch that has to precede the apply, if any.

    An apply does not remove the reference to another controller, nor fields that were written by updates.
    """
    changes: list[Mapping[str, object]] = []
    if not is_controlled_by(live, owner) and controller_of(live) is not None:
        # In one step: an object without a controller would be a name conflict if the program ended here.
        others = [each for each in metadata_of(live).ownerReferences or () if not each.controller]
        references = [msgspec.to_builtins(each) for each in (*others, owner_reference(owner))]
        changes.append({"op": "add", "path": "/metadata/ownerReferences", "value": references})
    if (fields := transfer_fields(managed_fields(live), manager, former_managers)) is not None:
        changes.append({"op": "add", "path": "/metadata/managedFields", "value": fields})
    return changes or None


def _other_managers(entries: Sequence[Entry], manager: str, difference: Difference) -> tuple[str, ...]:
    """Who set a field that differs. A missing field has no manager: then it is who wrote the object last."""
    others = [each for each in entries if each.get("manager") != manager and not each.get("subresource")]
    if found := managers_of(difference, others):
        return found
    latest = max(others, key=lambda each: str(each.get("time", "")), default=None)
    return (str(latest.get("manager", "")),) if latest else ()


def _text(thing: Object) -> str:
    return f"{api_of(type(thing)).resource.kind} {request_of(thing)}"
