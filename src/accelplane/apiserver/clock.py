"""The clock of deadlines and delays in asynchronous code."""

import asyncio


def loop_time() -> float:
    """The monotonic clock of the running event loop, by which its timers are due."""
    return asyncio.get_running_loop().time()
