"""The objects of a `FakeApiServer` and their history."""

import asyncio
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from .documents import JsonObject, deep_copy
from .managedfields import Manager, update

# The field manager of changes that a test makes directly.
TEST_MANAGER = "another-client"


class Change(NamedTuple):
    """One change of an object: `old` is None for a new one, `new` is None for a deleted one."""

    version: int
    plural: str
    old: JsonObject | None
    new: JsonObject | None


class Storage:
    """Objects by plural name of the kind, namespace and name. A test reads and changes them directly.

    A direct change is not checked: any fields, no conflict. Watches see it.
    """

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0
        self.objects: dict[tuple[str, str, str], JsonObject] = {}
        self.changed = asyncio.Event()
        self._history: list[Change] = []
        # Copies of the objects as they were stored: a test may change the objects themselves.
        self._stored: dict[tuple[str, str, str], JsonObject] = {}
        self._changed_by_plural: dict[str, asyncio.Event] = {}

    def put(self, plural: str, thing: JsonObject) -> JsonObject:
        """Creates or replaces an object, as another client would.

        That client owns the fields that it changes, unless the object has other managed fields than before.
        """
        metadata = thing.setdefault("metadata", {})
        known = self.get(plural, metadata["name"], metadata.get("namespace", ""))
        owners = known["metadata"].get("managedFields") if known else None
        if known and owners and metadata.get("managedFields", owners) == owners:
            thing = update(known, thing, Manager(TEST_MANAGER, "Update"))
        return self.store(plural, thing)

    def store(self, plural: str, thing: JsonObject) -> JsonObject:
        """Stores an object with a new resource version."""
        metadata = thing["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        known = self.objects.get(key)
        self.version += 1
        metadata["uid"] = known["metadata"]["uid"] if known else metadata.get("uid") or str(uuid.uuid4())
        metadata["resourceVersion"] = str(self.version)
        if known is None:
            metadata.setdefault("creationTimestamp", f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
        elif created := known["metadata"].get("creationTimestamp"):
            metadata["creationTimestamp"] = created
        self.objects[key] = thing
        self._record(key, known, thing)
        return thing

    def remove(self, plural: str, name: str, namespace: str = "") -> None:
        """Deletes an object, even if it has finalizers."""
        key = (plural, namespace, name)
        known = self.objects.pop(key)
        self.version += 1
        self._record(key, known, None)

    def get(self, plural: str, name: str, namespace: str = "") -> JsonObject | None:
        return self.objects.get((plural, namespace, name))

    def all(self, plural: str) -> list[JsonObject]:
        return [thing for key, thing in self.objects.items() if key[0] == plural]

    def copy_from(self, other: "Storage") -> None:
        """Copies the objects and the version of another server. Older watches get 410."""
        self.version = self.oldest = other.version
        self.objects = {key: deep_copy(thing) for key, thing in other.objects.items()}
        self._stored.clear()

    def compact(self) -> None:
        """Compacts the history, as etcd does: older watches and continue tokens get 410."""
        self.oldest = self.version
        self._history.clear()

    def since(self, version: int) -> Sequence[Change]:
        return self._history[bisect_right(self._history, version, key=lambda change: change.version) :]

    def change_of(self, plural: str) -> asyncio.Event:
        """The event of the next change of an object of this kind."""
        return self._changed_by_plural.setdefault(plural, asyncio.Event())

    def _record(self, key: tuple[str, str, str], old: JsonObject | None, new: JsonObject | None) -> None:
        before, after, plural = self._stored.pop(key, None) or deep_copy(old), deep_copy(new), key[0]
        if after is not None:
            self._stored[key] = after
        self._history.append(Change(self.version, plural, before, after))
        self.changed.set()
        self.changed = asyncio.Event()
        if event := self._changed_by_plural.pop(plural, None):
            event.set()
