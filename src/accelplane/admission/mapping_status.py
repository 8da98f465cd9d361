"""The status of an AcceleratorFunction or FpgaRegion.

    resource            the resource that pods get instead of the name
    nodes               the number of nodes that offer the resource; absent if nodes may not be listed
    observedGeneration  the generation of the object that the status is about
    conditions          Accepted: pods may request the name. Ready: a node offers the resource. Both are always present

A transition time changes only with the status of its condition, so equal states have equal statuses.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from accelplane.admission.mappings import PREFIX, AcceleratorFunction, Fault, FpgaRegion, Names, fault_of
from accelplane.kube.conditions import Condition, condition, find_condition, merge_conditions

ACCEPTED, READY = "Accepted", "Ready"


class MappingStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    resource: str = ""
    nodes: int | None = None
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()

    @property
    def fault(self) -> Fault | None:
        """The reason why the object is not accepted, None if it is."""
        found = find_condition(self.conditions, ACCEPTED)
        return Fault(found.reason, found.message) if found is not None and found.status == "False" else None


def status_before(thing: AcceleratorFunction | FpgaRegion) -> MappingStatus:
    """The current status; an empty one if it cannot be decoded."""
    try:
        return msgspec.json.decode(thing.status, type=MappingStatus | None) or MappingStatus()
    except msgspec.MsgspecError:
        return MappingStatus()


def status_of(thing: AcceleratorFunction | FpgaRegion, names: Names, offers: Mapping[str, int] | None) -> MappingStatus:
    """The new status of an object in a namespace with these names.

    `offers` is the number of nodes by resource, None if it is not known.
    """
    fault = fault_of(thing, names)
    name = f"{PREFIX}{thing.metadata.name}"
    resource = "" if fault or name not in names.targets else names.targets[name].resource
    nodes = offers.get(resource, 0) if resource and offers is not None else None
    generation = thing.metadata.generation
    if fault is not None:
        said = [
            _Said(ACCEPTED, False, fault.reason, f"pods that ask for {name} are refused: {fault}"),
            _Said(READY, False, fault.reason, "pods cannot ask for it"),
        ]
    else:
        said = [
            _Said(ACCEPTED, True, "Resolved", f"pods of its namespace may ask for {name}"),
            _readiness(resource, nodes),
        ]
    now = [condition(*each, generation=generation) for each in said]
    return MappingStatus(resource, nodes, generation or 0, merge_conditions(status_before(thing).conditions, now))


def patch(new: MappingStatus) -> Mapping[str, object]:
    """A merge patch of the status. Fields without a value are removed."""
    fields = msgspec.json.decode(msgspec.json.encode(new), type=dict[str, object])
    return {"status": {**dict.fromkeys(MappingStatus.__struct_encode_fields__), **fields}}


class _Said(NamedTuple):
    kind: str
    holds: bool | None
    reason: str
    message: str


def _readiness(resource: str, nodes: int | None) -> _Said:
    if nodes is None:
        return _Said(READY, None, "NodesNotKnown", f"who offers {resource} is not known: nodes may not be listed")
    if nodes == 0:
        return _Said(READY, False, "NoNode", f"no node offers {resource}")
    return _Said(READY, True, "Offered", f"{nodes} {'node offers' if nodes == 1 else 'nodes offer'} {resource}")
