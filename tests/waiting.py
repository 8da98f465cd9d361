"""Waits for a condition with a timeout."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def until(condition: Callable[[], bool] | Callable[[], Coroutine[Any, Any, bool]], seconds: float = 10) -> None:
    """Waits until the condition is true. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.02)
