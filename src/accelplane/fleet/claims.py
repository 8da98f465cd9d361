"""Devices for claims (DRA) in a cluster: what ResourceSlices offer, and which pods have or wait for devices by claims.

The driver takes the place of the resource: `gpu.intel.com` beside `gpu.intel.com/i915`.

Facts: Kubernetes documentation "Dynamic Resource Allocation". Only the slices of a pool's highest generation count.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct

from accelplane.dra.claims import GROUP, Allocated, ClaimSpec
from accelplane.dra.resourceslice import Device, ResourceSlice, from_api, quantity_value
from accelplane.kube.kinds import Pod, pod_requests
from accelplane.kube.objects import ApiInfo, GlobalResource, Identity, NamespacedResource, api
from accelplane.report.inventory import Holder

from .model import NodeResource
from .objects import Known

# The driver in an expression of a class: those of other drivers fail without this comparison.
_DRIVER = re.compile(r"""device\.driver\s*==\s*["']([a-z0-9.-]{1,63})["']""")
_EXCLUDING = ("NoSchedule", "NoExecute")


class Consumer(Struct, frozen=True):
    resource: str = ""
    name: str = ""


class ClaimStatus(Struct, frozen=True, rename="camel"):
    allocation: Allocated | None = None
    reserved_for: Sequence[Consumer] | None = None


_ALLOCATED = ClaimStatus(allocation=Allocated())


class ResourceClaim(NamespacedResource, Struct, kw_only=True):
    """A claim."""

    metadata: Identity
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()
    _api_info: ClassVar[ApiInfo] = api(GROUP, "v1", "ResourceClaim", "resourceclaims")

    @property
    def key(self) -> tuple[str, str]:
        """Its namespace and name."""
        return self.metadata.namespace or "", self.metadata.name or ""


class Expression(Struct, frozen=True):
    expression: str = ""


class Selector(Struct, frozen=True):
    cel: Expression | None = None


class ClassSpec(Struct, frozen=True, rename="camel"):
    selectors: Sequence[Selector] | None = None
    extended_resource_name: str | None = None


class DeviceClass(GlobalResource, Struct, kw_only=True):
    """A class."""

    metadata: Identity
    spec: ClassSpec = ClassSpec()
    _api_info: ClassVar[ApiInfo] = api(GROUP, "v1", "DeviceClass", "deviceclasses")


class PodHolder(Struct, frozen=True):
    """A pod that has devices by a claim, and its node. Of several pods with one claim, the first has the `count`."""

    node: str
    holder: Holder


class Offered(Struct, frozen=True):
    """A device of a node, with the number of claims that can have it."""

    node: str
    driver: str
    shares: int = 1
    healthy: bool = True


class Classes(Struct, frozen=True):
    """The drivers that `known` accepts: those of classes by name, and those of resources that are names of classes."""

    known: Known
    drivers: Mapping[str, str] = {}
    resources: Mapping[str, str] = {}

    def driver_of(self, device_class: str) -> str:
        """The driver of a class by its expressions, or else by its name; empty if there is none."""
        parts = device_class.split(".")
        named = (".".join(parts[index:]) for index in range(len(parts)))
        return self.drivers.get(device_class) or next(filter(self.known, named), "")

    def requests(
        self, pod: Pod, known: Known, present: Known, claim_of: Callable[[str], ResourceClaim | None]
    ) -> Mapping[str, int]:
        """What a waiting pod requests: `known` resources, and drivers of its claims that are not allocated.

        If a resource is not `present` on a node, a class may have its name: then the scheduler makes the claim.
        `claim_of` returns a claim of the pod's namespace.
        """
        found: Counter[str] = Counter()
        for name, count in pod_requests(pod.spec, known).items():
            found[name if present(name) else self.resources.get(name) or name] += count
        made = {each.name: each.resourceClaimName for each in pod.status.resourceClaimStatuses or ()}
        for name in {each.resourceClaimName or made.get(each.name) for each in pod.spec.resourceClaims or ()}:
            claim = claim_of(name) if name else None
            if claim is not None and claim.status.allocation is None:
                for request in claim.spec.requests:
                    first = request.alternatives[0]
                    if driver := self.driver_of(first.device_class_name):
                        found[driver] += first.count
        return dict(found)


def read_classes(classes: Iterable[DeviceClass], known: Known) -> Classes:
    """What the classes say."""
    drivers: dict[str, str] = {}
    resources: dict[str, str] = {}
    for each in classes:
        texts = [selector.cel.expression for selector in each.spec.selectors or () if selector.cel is not None]
        driver = next((name for text in texts for name in _DRIVER.findall(text) if known(name)), "")
        drivers[each.metadata.name or ""] = driver
        if driver and each.spec.extended_resource_name:
            resources[each.spec.extended_resource_name] = driver
    return Classes(known, drivers, resources)


def relevant_claim(claim: ResourceClaim) -> None:
    """A transform of caches that removes everything from an allocated claim, for which no pod waits."""
    claim.metadata.ownerReferences = None
    if claim.status.allocation is not None:
        claim.spec, claim.status = ClaimSpec(), _ALLOCATED
    else:
        claim.status = ClaimStatus()


class Claims(Struct, frozen=True):
    """The slices and claims of drivers that `known` accepts; a device is named by driver, pool and name."""

    offered: Mapping[tuple[str, str, str], Offered]
    # The device of which another one is a part.
    whole: Mapping[tuple[str, str, str], tuple[str, str, str]]
    claims: Sequence[ResourceClaim]
    # Whether these are all claims, so that it is known which devices are allocated.
    complete: bool
    known: Known

    def resources(self) -> Mapping[str, Sequence[NodeResource]]:
        """The drivers of each node as resources."""
        used = Counter(device for claim in self.claims for device in self._devices(claim))
        rows: dict[tuple[str, str], list[int]] = {}
        for key, device in self.offered.items():
            row = rows.setdefault((device.node, device.driver), [0, 0, 0])
            row[0] += device.shares
            row[1] += device.shares if device.healthy else 0
            row[2] += min(device.shares, used[key])
        found: dict[str, list[NodeResource]] = {}
        for (node, driver), (ids, healthy, used_ids) in sorted(rows.items()):
            resource = NodeResource(driver, "registered", "", ids, healthy, used_ids, capacity=ids, allocatable=healthy)
            found.setdefault(node, []).append(resource)
        return found

    def holders(self) -> Iterator[PodHolder]:
        """The pods that have devices by claims."""
        nodes = {key[:2]: device.node for key, device in self.offered.items()}
        for claim in self.claims:
            namespace, _name = claim.key
            pods = [each.name for each in claim.status.reserved_for or () if each.resource == "pods"]
            counts = Counter((driver, pool) for driver, pool, _device in self._devices(claim))
            for (driver, pool), count in counts.items():
                for number, pod in enumerate(pods):
                    own = 0 if number else count
                    yield PodHolder(nodes.get((driver, pool), pool), Holder(namespace, pod, "", driver, own, via="dra"))

    def _devices(self, claim: ResourceClaim) -> Iterator[tuple[str, str, str]]:
        """The complete devices that belong to the claim, each as often as it has it or a part of it."""
        for each in (claim.status.allocation or Allocated()).results:
            if self.known(each.driver) and not each.admin_access:
                key = each.driver, each.pool, each.device
                yield self.whole.get(key, key)


def read_claims(
    slices: Iterable[ResourceSlice],
    claims: Sequence[ResourceClaim] | None,
    known: Known,
    some: Sequence[ResourceClaim] = (),
) -> Claims:
    """What the objects say about the drivers that `known` accepts. If `claims` are not known, `some` of them are."""
    present = [each for each in slices if known(each.spec.driver) and each.spec.node_name]
    newest: dict[tuple[str, str], int] = {}
    for each in present:
        pool = each.spec.driver, each.spec.pool.name
        newest[pool] = max(newest.get(pool, 0), each.spec.pool.generation)
    devices = {
        (each.spec.driver, each.spec.pool.name, device.name): (each.spec.node_name or "", device)
        for each in map(from_api, present)
        if each.spec.pool.generation == newest[each.spec.driver, each.spec.pool.name]
        for device in each.spec.devices or ()
    }
    whole: dict[tuple[str, str, str], tuple[str, str, str]] = {}
    for driver, pool, name in devices:
        parent = driver, pool, _parent(devices[driver, pool, name][1])
        if parent in devices:
            whole[driver, pool, name] = parent
    return Claims(
        offered={
            key: Offered(
                node, key[0], _shares(device), not any(each.effect in _EXCLUDING for each in device.taints or ())
            )
            for key, (node, device) in devices.items()
            if key not in whole
        },
        whole=whole,
        claims=some if claims is None else claims,
        complete=claims is not None,
        known=known,
    )


def _parent(device: Device) -> str:
    attribute = (device.attributes or {}).get("parent")
    return (attribute.string or "") if attribute is not None else ""


def _shares(device: Device) -> int:
    capacity = (device.capacity or {}).get("shares")
    if not device.allow_multiple_allocations or capacity is None:
        return 1
    return quantity_value(capacity.value) or 1
