"""An agent of this process with its pages and its status socket, as `accelplane node` serves them."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from waiting import until

from accelplane.node import status_socket
from accelplane.node.agent import Agent
from accelplane.node.watcher import Watcher
from accelplane.pages import server as pages
from accelplane.pages.local_status import local_status
from accelplane.pages.observer import Observer


@asynccontextmanager
async def serving_status(agent: Agent, port: int = 0) -> AsyncIterator[Observer]:
    """Serves the socket, and with a port the pages. The kubelet's directory has to exist."""
    observer = Observer(agent)
    settings = agent.settings
    path = f"{status_socket.directory(settings)}/{agent.program}.sock"
    task = asyncio.create_task(
        status_socket.serve(settings, agent.program, lambda: local_status(agent.status, observer), Watcher())
    )
    try:
        await until(lambda: os.path.exists(path))
        if not port:
            yield observer
            return
        async with pages.serving(f"127.0.0.1:{port}", agent.status, observer):
            yield observer
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await observer.close()
