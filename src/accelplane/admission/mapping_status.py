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
from accelplane.kube.conditions import Condition, condition, find_condition, with_transition_times

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
    """The current status without the conditions of others; an empty one if it cannot be decoded."""
    try:
        found = msgspec.json.decode(thing.status, type=MappingStatus | None) or MappingStatus()
    except msgspec.MsgspecError:
        return MappingStatus()
    ours = (find_condition(found.conditions, kind) for kind in (ACCEPTED, READY))
    return msgspec.structs.replace(found, conditions=tuple(each for each in ours if each is not None))


def status_of(
    thing: AcceleratorFunction | FpgaRegion, names: Names, node_counts: Mapping[str, int] | None
) -> MappingStatus:
    """The new status of an object in a namespace with these names.

    `node_counts` is the number of nodes by resource, None if it is not known.
    """
    fault = fault_of(thing, names)
    name = f"{PREFIX}{thing.metadata.name}"
    resource = "" if fault or name not in names.targets else names.targets[name].resource
    nodes = node_counts.get(resource, 0) if resource and node_counts is not None else None
    generation = thing.metadata.generation
    if fault is not None:
        findings = [
            _Condition(ACCEPTED, False, fault.reason, f"pods that request {name} are rejected: {fault}"),
            _Condition(READY, False, fault.reason, "pods cannot request it"),
        ]
    else:
        findings = [
            _Condition(ACCEPTED, True, "Resolved", f"pods of the namespace may request {name}"),
            _readiness(resource, nodes),
        ]
    now = [condition(*each, generation=generation) for each in findings]
    return MappingStatus(resource, nodes, generation or 0, with_transition_times(status_before(thing).conditions, now))


def current_status(thing: AcceleratorFunction | FpgaRegion) -> Mapping[str, object] | None:
    """The current status with all its fields; None if it is no object."""
    try:
        return msgspec.json.decode(thing.status, type=dict[str, object] | None)
    except msgspec.MsgspecError:
        return None


class _Condition(NamedTuple):
    kind: str
    holds: bool | None
    reason: str
    message: str


def _readiness(resource: str, nodes: int | None) -> _Condition:
    if nodes is None:
        return _Condition(
            READY, None, "NodesNotKnown", f"{resource}: the number of nodes is unknown, because nodes cannot be listed"
        )
    if nodes == 0:
        return _Condition(READY, False, "NoNode", f"no node offers {resource}")
    return _Condition(READY, True, "Offered", f"{nodes} {'node offers' if nodes == 1 else 'nodes offer'} {resource}")
