"""What the driver reads of its Node: the version of the kubelet, and resources that an earlier device plugin has left.

The kubelet sets a resource without a device plugin to 0 after five minutes, and never removes it. The scheduler of
Kubernetes 1.34 makes no claim on such a node for a pod that requests the resource, even if its amount is 0. Later
versions do (kubernetes#133784). It makes claims only for resources that a DeviceClass names.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from accelplane.apiserver import ApiError, ApiServer, object_path, resource_path
from accelplane.devices import natural
from accelplane.dra.registration_policy import Version

log = logging.getLogger(__name__)

_CONCERNED: Version = (1, 34)
_RETRY = 10.0
_RECHECK = 60.0  # while there is a problem
_INTERVAL = 300.0


class _NodeInfo(Struct, frozen=True, rename="camel"):
    kubelet_version: str = ""


class _NodeStatus(Struct, frozen=True, rename="camel"):
    node_info: _NodeInfo = _NodeInfo()
    allocatable: Mapping[str, str] | None = None


class _Node(Struct, frozen=True):
    status: _NodeStatus = _NodeStatus()


class _Release(Struct, frozen=True):
    minor: str = ""


class _ClassSpec(Struct, frozen=True, rename="camel"):
    extended_resource_name: str = ""


class _Class(Struct, frozen=True):
    spec: _ClassSpec = _ClassSpec()


class _Classes(Struct, frozen=True):
    items: list[_Class] | None = None


class ObservedNode:
    """The Node of this process. `problem` says which resources are left, empty if there are none.

    `served` returns the qualified resources that this process serves as device plugin.
    """

    def __init__(self, api: ApiServer, name: str, driver: str, served: Callable[[], Collection[str]]) -> None:
        self.kubelet: Version | None = None
        self.problem = ""
        self._api = api
        self._name = name
        self._driver = driver
        self._served = served
        self._logged = ""

    async def read(self) -> float | None:
        """Reads it. Returns the seconds after which it has to be read again, None if that is not needed."""
        try:
            status = (await self._api.get(object_path(resource_path("", "v1", "nodes"), self._name), _Node)).status
        except ApiError as error:
            log.info("the version of the kubelet is not known: %s", error)
            return _RETRY
        numbers = status.node_info.kubelet_version.removeprefix("v").split(".")
        with contextlib.suppress(ValueError, IndexError):
            self.kubelet = int(numbers[0]), int(numbers[1])
        if self.kubelet != _CONCERNED:
            self.problem = ""
            return None
        try:
            left = await self._left(status.allocatable or {})
        except ApiError as error:
            # Also a role of an earlier version, without the right.
            self._log(f"resources of an earlier device plugin are not known: {error}")
            return _INTERVAL
        problem = _text(self._name, left) if left else ""
        self._log(problem)
        self.problem = problem
        return _RECHECK if problem else _INTERVAL

    def _log(self, text: str) -> None:
        if text and text != self._logged:
            log.warning("%s: %s", self._driver, text)
        self._logged = text

    async def _left(self, allocatable: Mapping[str, str]) -> list[str]:
        """The resources of the driver that keep the scheduler from making claims. Raises `ApiError`."""
        served = self._served()
        left = [
            name
            for name, amount in allocatable.items()
            if name.startswith(f"{self._driver}/") and amount == "0" and name not in served
        ]
        if not left:
            return []
        release = await self._api.get("/version", _Release)
        if release.minor.rstrip("+") != str(_CONCERNED[1]):
            return []
        classes = (await self._api.get(resource_path("resource.k8s.io", "v1", "deviceclasses"), _Classes)).items
        named = {each.spec.extended_resource_name for each in classes or ()}
        return sorted(named.intersection(left), key=natural)


def _text(node: str, left: Collection[str]) -> str:
    patch = [{"op": "remove", "path": f"/status/capacity/{name.replace('/', '~1')}"} for name in left]
    return (
        f"the Node still has {', '.join(left)} of an earlier device plugin with the amount 0, so pods that request it "
        "get no claim on this node with Kubernetes 1.34; five minutes after the end of that plugin, run: kubectl patch "
        f"node {node} --subresource=status --type=json -p '{json.dumps(patch, separators=(',', ':'))}'"
    )
