"""Which version of `resource.k8s.io` an API server has, and which optional fields of slices it preserves.

A field whose feature gate is off is dropped without an error. Objects that the server does not store (dry run) show
it. Facts: Kubernetes API concepts (dry run), strategy of ResourceSlices in the API server.
"""

import re
from collections.abc import Callable

from msgspec import Struct

from accelplane.apiserver import ApiServer, NotFound, StatusError, resource_path
from accelplane.dra.claims import not_served, served_version
from accelplane.dra.model import Features
from accelplane.dra.resourceslice import (
    GROUP,
    PLURAL,
    ApiVersion,
    CounterConsumption,
    CounterSet,
    CounterValue,
    Device,
    DeviceCapacity,
    DeviceTaint,
    Metadata,
    RequestPolicy,
    ResourcePool,
    ResourceSlice,
    SliceSpec,
    from_api,
    to_api,
)
from accelplane.dra.slices import slice_name
from accelplane.dra.validation import Layout

GATES = {"taints": "DRADeviceTaints", "counters": "DRAPartitionableDevices", "consumable": "DRAConsumableCapacity"}
"""The feature gate of each of the `Features`."""

# The first minor version that requires counter sets in slices of their own.
_SEPARATE_SINCE = 35
_INVALID = 422
_NAME = "probe"


class Server(Struct, frozen=True):
    """`release` is the version of the API server, as `v1.34.4`."""

    release: str
    version: ApiVersion
    layout: Layout
    features: Features

    @property
    def path(self) -> str:
        """The path of all slices."""
        return resource_path(GROUP, self.version, PLURAL)


class _Release(Struct, rename="camel"):
    minor: str = ""
    git_version: str = ""


async def discover(api: ApiServer, node: str, driver: str) -> Server:
    """Raises `ApiError`, also if the API is not served."""
    try:
        version = await served_version(api)
    except NotFound:
        raise not_served() from None
    release = await api.get("/version", _Release)
    number = re.match(r"[0-9]{1,4}", release.minor)
    older = number is not None and int(number[0]) < _SEPARATE_SINCE
    layouts: tuple[Layout, Layout] = ("together", "separate") if older else ("separate", "together")

    async def features(layout: Layout) -> Features:
        sent = _specimen(node, driver, layout)
        path, body = resource_path(GROUP, version, PLURAL), to_api(sent, version)
        return preserved(sent, from_api(await api.post(path, body, ResourceSlice, query={"dryRun": "All"})))

    try:
        layout, found = layouts[0], await features(layouts[0])
    except StatusError as error:
        if error.code != _INVALID:
            raise
        # During an upgrade another API server may respond than the one whose version is known.
        layout, found = layouts[1], await features(layouts[1])
    return Server(release.git_version, version, layout, found)


def preserved(sent: ResourceSlice, received: ResourceSlice) -> Features:
    """Which of the fields in a request the response has, None for those that are not in the request."""
    return Features(
        taints=_is_preserved(_taints, sent, received),
        counters=_is_preserved(_counters, sent, received),
        consumable=_is_preserved(_consumable, sent, received),
    )


def _specimen(node: str, driver: str, layout: Layout) -> ResourceSlice:
    """A slice with all optional fields."""
    counters = {_NAME: CounterValue("1")}
    device = Device(
        name=_NAME,
        capacity={"shares": DeviceCapacity("1", RequestPolicy(default="1"))},
        allow_multiple_allocations=True,
        taints=[DeviceTaint(key=f"{driver}/{_NAME}", effect="NoSchedule")],
        consumes_counters=[CounterConsumption(_NAME, counters)],
    )
    return ResourceSlice(
        metadata=Metadata(name=slice_name(node, driver, _NAME)),
        spec=SliceSpec(
            driver=driver,
            node_name=node,
            pool=ResourcePool(name=node, generation=0, resource_slice_count=1),
            devices=[device],
            shared_counters=[CounterSet(_NAME, counters)] if layout == "together" else None,
        ),
    )


def _is_preserved(count: Callable[[ResourceSlice], int], sent: ResourceSlice, received: ResourceSlice) -> bool | None:
    return count(received) == count(sent) if count(sent) else None


def _taints(each: ResourceSlice) -> int:
    return sum(bool(device.taints) for device in each.spec.devices or ())


def _counters(each: ResourceSlice) -> int:
    return len(each.spec.shared_counters or ()) + sum(bool(one.consumes_counters) for one in each.spec.devices or ())


def _consumable(each: ResourceSlice) -> int:
    return sum(bool(device.allow_multiple_allocations) for device in each.spec.devices or ())
