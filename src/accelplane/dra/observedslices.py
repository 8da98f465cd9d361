"""The slices of one driver and node in the API server, kept by a watch and by the responses to writes."""

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from accelplane.apiserver import ApiError, ApiServer, DecodeError, WatchIdleTimeout
from accelplane.apiserver.clock import loop_time
from accelplane.dra.resourceslice import ResourceSlice, from_api

# Bookmarks come each minute.
_IDLE = 180.0
# As client-go: watches of many nodes do not end at the same time.
_MIN_DURATION, _MAX_DURATION = 300.0, 600.0
_SHORTEST = 1.0  # as client-go: a shorter watch without events is an error


class ObservedSlices:
    """The slices by name. `changed` is called after each change that another client made.

    `generation` is the highest generation of a pool that was seen, also of slices that are deleted.
    """

    def __init__(self, api: ApiServer, path: str, node: str, driver: str, changed: Callable[[], None]) -> None:
        self._api = api
        self._path = path
        self._query = {"fieldSelector": f"spec.nodeName={node},spec.driver={driver}"}
        self._changed = changed
        self._version = ""
        self._deleted: set[str] = set()  # UIDs
        self.present: Mapping[str, ResourceSlice] = {}
        self.generation = 0

    async def list(self) -> None:
        """Reads all slices. Raises `ApiError`."""
        found: list[ResourceSlice] = []

        def consume(items: Sequence[msgspec.Raw]) -> None:
            found.extend(from_api(_decode(item, self._path)) for item in items)

        self._version = await self._api.list(self._path, consume, query=self._query)
        self._deleted.clear()
        self.present = {}
        for each in found:
            self.record(each)

    async def watch(self) -> None:
        """Follows changes after `list`. Never returns. Raises `ApiError`, `Gone` if `list` has to be repeated."""
        query = {**self._query, "allowWatchBookmarks": "true"}
        while True:
            # Not for cryptography.
            duration = random.uniform(_MIN_DURATION, _MAX_DURATION)  # noqa: S311
            watch = self._api.watch(
                self._path, ResourceSlice, resource_version=self._version, query=query, duration=duration, idle=_IDLE
            )
            began, count = loop_time(), 0
            with contextlib.suppress(WatchIdleTimeout):
                async with contextlib.aclosing(watch) as events:
                    async for event in events:
                        count += 1
                        self._version = event.object.metadata.resource_version or self._version
                        self._observe(event.type, from_api(event.object))
            if not count and loop_time() - began < _SHORTEST:
                raise ApiError(f"WATCH {self._path}", "ended at once and without events; retrying with backoff")

    def record(self, written: ResourceSlice) -> None:
        """Records a slice that was read, or the response to a write."""
        self.present = {**self.present, written.metadata.name: written}
        self.generation = max(self.generation, written.spec.pool.generation)

    def record_deletion(self, deleted: ResourceSlice) -> None:
        """Records that this program deleted a slice."""
        self._deleted.add(deleted.metadata.uid)
        self.present = {name: each for name, each in self.present.items() if name != deleted.metadata.name}

    def _observe(self, kind: str, changed: ResourceSlice) -> None:
        """Events may be older than the responses to writes."""
        name, known = changed.metadata.name, self.present.get(changed.metadata.name)
        if kind == "BOOKMARK" or changed.metadata.uid in self._deleted or (known and not _is_newer(changed, known)):
            return
        if kind == "DELETED":
            self._deleted.add(changed.metadata.uid)
            if known is None:
                return
            self.present = {each: self.present[each] for each in self.present if each != name}
        else:
            self.record(changed)
        self._changed()


def _is_newer(changed: ResourceSlice, known: ResourceSlice) -> bool:
    """Resource versions are opaque in theory, and numbers in all API servers."""
    new, old = changed.metadata.resource_version, known.metadata.resource_version
    return int(new) > int(old) if new.isdecimal() and old.isdecimal() else new != old


def _decode(item: msgspec.Raw, path: str) -> ResourceSlice:
    try:
        return msgspec.json.decode(item, type=ResourceSlice)
    except msgspec.MsgspecError as error:
        raise DecodeError(f"GET {path}", f"expected a ResourceSlice: {error}") from None
