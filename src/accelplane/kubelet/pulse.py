"""A pulse: tells everyone who waits, at this moment, that something may have changed. It holds no state."""

import asyncio

_LONG, _GRAIN = 30.0, 5.0


class Pulse:
    """`wait` returns at the next `fire`. Look at the state first, then wait: nothing runs in between."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seconds: float | None = None) -> bool:
        """True at the next pulse, False when `seconds` pass without one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout_at(None if seconds is None else end_of_wait(loop.time(), seconds)):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)


def end_of_wait(now: float, seconds: float) -> float:
    """When a wait that begins `now` is over.

    One of half a minute or more ends when the clock stands at a multiple of 5 seconds, a little sooner or later than
    asked for, so that the process is woken once for many of them.
    """
    end = now + seconds
    return round(end / _GRAIN) * _GRAIN if seconds >= _LONG else end
