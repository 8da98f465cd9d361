"""The slices of one driver and node in the API server, kept by `SliceWatches` and by the responses to writes."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from accelplane.apiserver import ApiServer, DecodeError
from accelplane.dra.resourceslice import ResourceSlice, from_api


class ObservedSlices:
    """The slices by name. `changed` is called after each change that another client made.

    `generation` is the highest generation of a pool that was seen, also of slices that are deleted.
    """

    def __init__(self, api: ApiServer, path: str, node: str, driver: str, changed: Callable[[], None]) -> None:
        self.path = path
        self.driver = driver
        self._api = api
        self._query = {"fieldSelector": f"spec.nodeName={node},spec.driver={driver}"}
        self._changed = changed
        self._deleted: set[str] = set()  # UIDs
        self._events: list[tuple[str, ResourceSlice]] | None = []  # those that arrive during a list
        self.present: Mapping[str, ResourceSlice] = {}
        self.generation = 0

    async def list(self) -> str:
        """Reads all slices; returns the resource version. Raises `ApiError`."""
        found: list[ResourceSlice] = []

        def consume(items: Sequence[msgspec.Raw]) -> None:
            found.extend(from_api(_decode(item, self.path)) for item in items)

        if self._events is None:
            self._events = []
        try:
            version = await self._api.list(self.path, consume, query=self._query)
            self._deleted.clear()
            self.present = {}
            for each in found:
                self.record(each)
        finally:
            events, self._events = self._events, None
            for kind, changed in events or ():
                self.observe(kind, changed)
        return version

    def record(self, written: ResourceSlice) -> None:
        """Records a slice that was read, or the response to a write."""
        self.present = {**self.present, written.metadata.name: written}
        self.generation = max(self.generation, written.spec.pool.generation)

    def record_deletion(self, deleted: ResourceSlice) -> None:
        """Records that this program deleted a slice."""
        self._deleted.add(deleted.metadata.uid)
        self.present = {name: each for name, each in self.present.items() if name != deleted.metadata.name}

    def observe(self, kind: str, changed: ResourceSlice) -> None:
        """Records an event of the watch, which may be older than the list or the response to a write."""
        if self._events is not None:
            self._events.append((kind, changed))
            return
        name, known = changed.metadata.name, self.present.get(changed.metadata.name)
        if changed.metadata.uid in self._deleted or (known and not _is_newer(changed, known)):
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
