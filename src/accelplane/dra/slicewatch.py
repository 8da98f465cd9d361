"""One watch of a node's slices for all drivers of this process.

Each driver lists its own slices after it has joined the watch. The events that arrive meanwhile are kept, so no change
is lost between the list and the watch.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError, ApiServer, DecodeError, WatchIdleTimeout
from accelplane.apiserver.clock import loop_time
from accelplane.dra.observedslices import ObservedSlices
from accelplane.dra.resourceslice import ResourceSlice, from_api

# Bookmarks come each minute.
_IDLE = 180.0
# As client-go: watches of many nodes do not end at the same time.
_MIN_DURATION, _MAX_DURATION = 300.0, 600.0
_SHORTEST = 1.0  # as client-go: a shorter watch without events is an error

_T = TypeVar("_T")


class _Metadata(Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _Spec(Struct, frozen=True):
    driver: str = ""


class _Head(Struct, frozen=True):
    """What is read of the slices of all drivers. Those of other programs are not decoded."""

    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()


class SliceWatches:
    """The watches of a node's slices: one for each version of the API that a driver uses now."""

    def __init__(self, api: ApiServer, node: str) -> None:
        self._api = api
        self._node = node
        self._watches: dict[str, _Watch] = {}

    @contextlib.asynccontextmanager
    async def following(self, observed: ObservedSlices) -> AsyncGenerator["asyncio.Task[None]"]:
        """Lists `observed` and keeps it current within the block, until the task ends. Raises `ApiError`.

        The task raises `ApiError`, and `Gone` if the list has to be repeated. Others use it too: do not cancel it.
        """
        watch = self._watches.get(observed.path)
        if watch is None or watch.ended:
            watch = self._watches[observed.path] = _Watch(self._api, observed.path, self._node)
        try:
            yield await watch.join(observed)
        finally:
            if watch.leave(observed):
                if self._watches.get(observed.path) is watch:
                    del self._watches[observed.path]
                await watch.stop()


class _Watch:
    def __init__(self, api: ApiServer, path: str, node: str) -> None:
        self._api = api
        self._path = path
        self._query = {"fieldSelector": f"spec.nodeName={node}", "allowWatchBookmarks": "true"}
        self._drivers: dict[str, ObservedSlices] = {}
        self._task: asyncio.Task[None] | None = None
        self._joining = asyncio.Lock()  # a list that is older than the beginning of the watch would be incomplete

    @property
    def ended(self) -> bool:
        return self._task is not None and self._task.done()

    async def join(self, observed: ObservedSlices) -> "asyncio.Task[None]":
        self._drivers[observed.driver] = observed
        async with self._joining:
            version = await observed.list()
            if self._task is None:
                self._task = asyncio.create_task(self._run(version), name=f"watch {self._path}")
            return self._task

    def leave(self, observed: ObservedSlices) -> bool:
        """Whether no driver uses the watch any more."""
        if self._drivers.get(observed.driver) is observed:
            del self._drivers[observed.driver]
        return not self._drivers

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self, version: str) -> None:
        """Follows changes since `version`. Never returns. Raises `ApiError`."""
        while True:
            # Not for cryptography.
            duration = random.uniform(_MIN_DURATION, _MAX_DURATION)  # noqa: S311
            watch = self._api.watch(
                self._path, msgspec.Raw, resource_version=version, query=self._query, duration=duration, idle=_IDLE
            )
            began, count = loop_time(), 0
            with contextlib.suppress(WatchIdleTimeout):
                async with contextlib.aclosing(watch) as events:
                    async for event in events:
                        count += 1
                        head = self._decode(event.object, _Head)
                        version = head.metadata.resource_version or version
                        observed = self._drivers.get(head.spec.driver)
                        if observed is not None and event.type != "BOOKMARK":
                            observed.observe(event.type, from_api(self._decode(event.object, ResourceSlice)))
            if not count and loop_time() - began < _SHORTEST:
                raise ApiError(f"WATCH {self._path}", "ended at once and without events; retrying with backoff")

    def _decode(self, data: msgspec.Raw, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"WATCH {self._path}", f"expected a ResourceSlice: {error}") from None
