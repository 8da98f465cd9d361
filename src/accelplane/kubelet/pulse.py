"""A pulse: tells everyone who waits, at this moment, that something may have changed. It holds no state."""

import asyncio


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
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(seconds):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
