"""Finalizers: names in an object's metadata that delay its deletion until a controller has cleaned up.

    if greeting.metadata.deletionTimestamp:
        await clean_up(greeting)
        await remove_finalizer(client, greeting, FINALIZER)
        return
    await add_finalizer(client, greeting, FINALIZER)

Both functions write with the resource version that they read, so that the finalizers of others are never lost. After
a conflict they read the object again.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from accelplane.apiserver.errors import Conflict, NotFound

from .client import Client
from .objects import HasIdentity, api_of

_MAX_CONFLICTS = 5


class Finalizable(HasIdentity, Protocol):
    """The metadata that deletion depends on."""

    @property
    def finalizers(self) -> Sequence[str] | None: ...
    @property
    def deletionTimestamp(self) -> object: ...


class HasFinalizers(Protocol):
    """An object with finalizers: `metadata` is an `ObjectMeta` or `accelplane.kube.objects.Metadata`."""

    @property
    def metadata(self) -> Finalizable | None: ...


F = TypeVar("F", bound=HasFinalizers)


async def add_finalizer(client: Client, thing: F, finalizer: str) -> F:
    """Adds a finalizer and returns the object with it.

    Raises `NotFound` if the object was deleted or replaced, and `ValueError` if it is being deleted: the API server
    accepts no new finalizer then.
    """
    changed = await _change(client, thing, finalizer, present=True)
    if changed is None:
        name = f"{api_of(type(thing)).resource.kind} {_metadata(thing).name}"
        raise NotFound(f"add finalizer {finalizer}", f"{name} was deleted", code=404)
    return changed


async def remove_finalizer(client: Client, thing: F, finalizer: str) -> F | None:
    """Removes a finalizer and returns the object without it, or None if the object was deleted or replaced."""
    return await _change(client, thing, finalizer, present=False)


async def _change(client: Client, thing: F, finalizer: str, *, present: bool) -> F | None:
    """Raises `Conflict` if the object changes between read and write each time."""
    kind, uid = type(thing), _metadata(thing).uid
    name, namespace = _metadata(thing).name or "", _metadata(thing).namespace or ""
    conflicts = 0
    while True:
        metadata = _metadata(thing)
        known = list(metadata.finalizers or ())
        if metadata.uid != uid:
            return None
        if (finalizer in known) == present:
            return thing
        if present and metadata.deletionTimestamp:
            raise ValueError(f"{api_of(kind).resource.kind} {name}: is being deleted; cannot add {finalizer}")
        finalizers = [*known, finalizer] if present else [each for each in known if each != finalizer]
        change = {"metadata": {"resourceVersion": metadata.resourceVersion, "finalizers": finalizers}}
        try:
            return await client.patch(kind, name, change, namespace=namespace)
        except NotFound:
            return None
        except Conflict:
            conflicts += 1
            if conflicts == _MAX_CONFLICTS:
                raise
        try:
            thing = await client.get(kind, name, namespace)
        except NotFound:
            return None


def _metadata(thing: HasFinalizers) -> Finalizable:
    if thing.metadata is None:
        raise ValueError(f"{type(thing).__name__}: has no metadata")
    return thing.metadata
