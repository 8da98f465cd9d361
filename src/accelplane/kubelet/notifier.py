"""Wakes all tasks that wait for a change.

A notification is not stored: check the state first, or whether `count` has changed, and then wait.
"""

import asyncio

_LONG, _GRAIN = 30.0, 5.0


class Notifier:
    """`wait` returns at the next `notify_all`."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self.count = 0

    def notify_all(self) -> None:
        self.count += 1
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
        self._waiters.clear()

    async def wait(self, seconds: float | None = None) -> bool:
        """True at the next notification, False after `seconds` without one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters.add(future)
        try:
            async with asyncio.timeout_at(None if seconds is None else coalesced_deadline(loop.time(), seconds)):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(future)


def coalesced_deadline(now: float, seconds: float) -> float:
    """The loop time at which a wait ends: from 30 s on a multiple of 5 s, so that one wake-up serves many waits."""
    end = now + seconds
    return round(end / _GRAIN) * _GRAIN if seconds >= _LONG else end
