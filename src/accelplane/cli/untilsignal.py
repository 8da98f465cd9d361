"""Runs the coroutines of a command until SIGTERM or SIGINT."""

import asyncio
from collections.abc import Coroutine

from accelplane.cli import signals


async def until_signal(*work: Coroutine[object, object, object]) -> None:
    """Runs the coroutines until a signal, or until one of them ends, whose exception is raised. Cancels the others."""
    stop = asyncio.Event()
    for number in signals.ENDING:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(each) for each in (stop.wait(), *work)]
    try:
        done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
