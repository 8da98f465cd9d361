"""The custom resources of the operator (`deviceplugin.intel.com/v1`): the parts that the fleet reads, and their state.

The operator of this project writes conditions and the observed generation. Other operators of these resources write
only the numbers of pods and the names of nodes.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from accelplane.kube.kinds import Condition
from accelplane.kube.objects import GlobalResource, Identity, api

from .model import DevicePlugin

GROUP, VERSION = "deviceplugin.intel.com", "v1"

_MAX_COUNT = 2**31 - 1
_MAX_NAME = 253
_MAX_MESSAGE = 512
_MAX_PROBLEM = 1024
# Conditions that are problems if they hold, the most important one first.
_PROBLEMS = ("Degraded", "ProvisioningConfigMissing", "NodeOverlap", "UnsupportedFields", "DeviceClassConflict")
_AVAILABLE = "Available"


class Status(Struct, kw_only=True):
    """The status of a resource. `nodes` is the number of `nodeNames`, which a cache does not store."""

    desiredNumberScheduled: int = 0
    numberReady: int = 0
    nodeNames: list[str] | None = None
    observedGeneration: int = 0
    conditions: list[Condition] | None = None
    nodes: int = 0


class PluginResource(GlobalResource, Struct, kw_only=True):
    """A resource of one of the kinds of the operator."""

    metadata: Identity
    status: Status | None = None


def _kind(family: str) -> type[PluginResource]:
    name = f"{family}DevicePlugin"
    return type(name, (PluginResource,), {"_api_info": api(GROUP, VERSION, name, f"{name.lower()}s")})


KINDS: Sequence[type[PluginResource]] = tuple(
    map(_kind, ("Dlb", "Dsa", "Fpga", "Generic", "Gpu", "Iaa", "Npu", "Qat", "Sgx"))
)


def relevant_plugin(resource: PluginResource) -> None:
    """A transform of caches that removes what `device_plugin` does not read."""
    resource.metadata.ownerReferences = None
    status = resource.status
    if status is None:
        return
    status.nodes, status.nodeNames = len(set(status.nodeNames or ())), None
    relevant = (*_PROBLEMS, _AVAILABLE)
    status.conditions = [
        Condition(each.type, each.status, (each.message or "")[:_MAX_MESSAGE])
        for each in status.conditions or ()
        if each.type in relevant
    ][: len(relevant)]


def device_plugin(kind: str, resource: PluginResource) -> DevicePlugin:
    """The state of a resource that went through `relevant_plugin`."""
    status = resource.status or Status()
    return DevicePlugin(
        kind,
        _name(resource.metadata.name or ""),
        desired=_count(status.desiredNumberScheduled),
        ready=_count(status.numberReady),
        nodes=_count(status.nodes),
        problem="; ".join(_problems(resource))[:_MAX_PROBLEM],
    )


def unreadable_plugin(kind: str, name: str, reason: str) -> DevicePlugin:
    """A resource whose status has another type than expected."""
    return DevicePlugin(kind, _name(name), problem=f"the resource cannot be decoded: {reason}"[:_MAX_PROBLEM])


def missing_pods(desired: int, ready: int) -> str:
    """How many pods are not ready."""
    return f"{desired - ready:,} of {desired:,} pods {'is' if desired - ready == 1 else 'are'} not ready"


def problems_first(plugins: Sequence[DevicePlugin]) -> tuple[DevicePlugin, ...]:
    """The resources in the order of the page."""
    return tuple(sorted(plugins, key=lambda each: (not each.problem, each.kind, each.name)))


def _problems(resource: PluginResource) -> Iterator[str]:
    status = resource.status
    if status is None:
        yield "the operator has not written a status"
        return
    conditions = {each.type: each for each in status.conditions or ()}
    for kind in _PROBLEMS:
        condition = conditions.get(kind)
        if condition is not None and condition.status == "True":
            yield f"{kind}: {condition.message}" if condition.message else kind
    yield from _missing_pods(status, conditions)
    generation, observed = resource.metadata.generation or 0, status.observedGeneration
    # Operators that do not write the observed generation leave it 0.
    if 0 < observed < generation:
        yield f"the operator has not processed the last change: observed generation {observed} of {generation}"


def _missing_pods(status: Status, conditions: Mapping[str, Condition]) -> Iterator[str]:
    desired, ready = _count(status.desiredNumberScheduled), _count(status.numberReady)
    available = conditions.get(_AVAILABLE)
    if ready < desired:
        yield missing_pods(desired, ready)
    elif available is not None and available.status == "False":
        yield available.message or "not available"


def _name(text: str) -> str:
    return text[:_MAX_NAME]


def _count(number: int) -> int:
    return max(0, min(_MAX_COUNT, number))
