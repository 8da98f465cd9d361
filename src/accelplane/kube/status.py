"""Statuses by server-side apply: a controller writes its own fields and conditions, and only if they change.

    await apply_status(client, resource, status, current)

Conditions are merged by their type if the definition says so (`x-kubernetes-list-type: map`). So several controllers
can write conditions of one resource. Fields that this controller no longer applies are removed.
"""

from collections.abc import Mapping
from functools import cache

import msgspec

from .client import Client
from .differences import differences
from .objects import GlobalResource, Metadata, NamespacedResource, Object, api_of, is_namespaced, metadata_of


class _Resource(msgspec.Struct, kw_only=True):
    """A resource of which only the status is read and written."""

    metadata: Metadata
    status: dict[str, object] = {}


async def apply_status(
    client: Client,
    resource: Object,
    status: msgspec.Struct,
    current: Mapping[str, object] | None,
    *,
    if_unchanged: bool = False,
) -> bool:
    """Writes the status of a resource, unless `current` has it already. Returns whether something was written.

    `current` is the status that the resource has now; conditions of other types in it belong to others. The fields of
    the type of `status` are this controller's: those that are at their defaults are removed. With `if_unchanged` the
    resource version has to be that of `resource`: of several replicas that write the same status, one succeeds.

    Raises `NotFound` if the resource was deleted, `StatusError` if another one has its name, `Conflict` with
    `if_unchanged` if it has changed, and other errors of the API.
    """
    fields: dict[str, object] = msgspec.to_builtins(status)
    desired = {name: value for name, value in fields.items() if value is not None}
    if not differences(desired, current or {}) and not _surplus_fields(status, desired, current):
        return False
    metadata = metadata_of(resource)
    name, namespace = metadata.name or "", metadata.namespace or ""
    kind = _kind(type(resource))
    version = metadata.resourceVersion if if_unchanged else None
    identity = Metadata(name=name, namespace=namespace or None, uid=metadata.uid, resourceVersion=version)
    document = kind(metadata=identity, status=desired)
    written = await client.apply(document, subresource="status")
    if surplus := _surplus_fields(status, desired, written.status):
        # Written by updates, which an apply does not undo: a status of an older program.
        removal = {"metadata": {"uid": metadata.uid}, "status": dict.fromkeys(surplus)}
        await client.patch(kind, name, removal, namespace=namespace, subresource="status")
    return True


def _surplus_fields(
    status: msgspec.Struct, desired: Mapping[str, object], found: Mapping[str, object] | None
) -> list[str]:
    """The existing status fields that are not desired. Conditions are excluded, as others may own them."""
    names = (name for name in status.__struct_encode_fields__ if name not in desired and name != "conditions")
    return [name for name in names if (found or {}).get(name) not in (None, [], {})]


@cache
def _kind(kind: type[Object]) -> type[_Resource]:
    scope = NamespacedResource if is_namespaced(kind) else GlobalResource
    return type(kind.__name__, (scope, _Resource), {"_api_info": api_of(kind)})
