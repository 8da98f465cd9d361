"""The API server's double under the names that these tests use."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from accelplane.kube.testing import FakeApiServer as KubeApi
from accelplane.kube.testing import Fault

__all__ = ["Fault", "KubeApi", "Object", "kube_api"]

Object = dict[str, Any]


@asynccontextmanager
async def kube_api() -> AsyncIterator[KubeApi]:
    """A running server."""
    async with KubeApi() as api:
        yield api
