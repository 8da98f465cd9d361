"""Values that are fetched on demand with limited concurrency, and cached for a limited time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from msgspec import Struct

from accelplane.kube.tasks import cancel

T = TypeVar("T")


class _Entry(Struct, Generic[T]):
    task: asyncio.Task[T]
    expires: float = 0.0  # 0 until the task has ended


class OnDemand(Generic[T]):
    """Fetches values by key. Concurrent requests for a key share one fetch. Errors are not cached."""

    def __init__(self, fetch: Callable[[str], Coroutine[object, object, T]], *, max_age: float, at_once: int) -> None:
        self._fetch = fetch
        self._max_age = max_age
        self._turn = asyncio.Semaphore(at_once)
        self._entries: dict[str, _Entry[T]] = {}

    async def get(self, key: str) -> T:
        """The value, at most `max_age` seconds old. Raises what `fetch` raises."""
        self._remove_expired()
        entry = self._entries.get(key)
        if entry is None:
            task = asyncio.create_task(self._fetch_in_turn(key), name=f"fetch {key}")
            entry = self._entries[key] = _Entry(task)
            task.add_done_callback(lambda _task: self._ended(key))
        # The cancellation of one caller must not end the fetch for the others.
        return await asyncio.shield(entry.task)

    async def close(self) -> None:
        """Cancels the running fetches."""
        await cancel(*(entry.task for entry in self._entries.values()))
        self._entries.clear()

    async def _fetch_in_turn(self, key: str) -> T:
        async with self._turn:
            return await self._fetch(key)

    def _ended(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.task.cancelled() or entry.task.exception() is not None:
            del self._entries[key]
        else:
            entry.expires = asyncio.get_running_loop().time() + self._max_age

    def _remove_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        for key, entry in list(self._entries.items()):
            if entry.expires and entry.expires <= now:
                del self._entries[key]
