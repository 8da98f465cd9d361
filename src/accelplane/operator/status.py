"""The status of a custom resource: the four fields of Go's operator, and conditions.

    status(plugin, observed, now) -> Status      the complete status
    node_names(names) -> tuple                   sorted, without duplicates and without pods that have no node yet

Conditions (all are always set):

    Available                   every node that should have a ready pod has one
    Progressing                 pods are created or replaced: not all are ready, or not all are updated
    Degraded                    a write failed, another program reverts a field, or the resource is malformed
    ImageOverridden             another image runs than the resource names
    ProvisioningConfigMissing   the ConfigMap of the resource does not exist
    OriginalImage               an image of the Go project runs, and this project has one that replaces it
    UnsupportedFields           fields are set that the images do not support
    NodeOverlap                 another resource of the kind selects the same nodes

The transition time of a condition changes with its status only, so equal states have equal statuses.

While pods of an older revision run, Available keeps its status, which they determine, and its `observedGeneration`.
So `kubectl wait --for=condition=Available` after an edit returns when the new pods are ready.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from accelplane.kube.conditions import condition, find_condition, with_transition_times
from accelplane.kube.driftbackoff import FieldConflict
from accelplane.operator.images import Replacement
from accelplane.operator.models import DevicePlugin, GpuSpec, ObjectReference, Status, provisioning_config
from accelplane.operator.overlap import Overlap, format_overlap

AVAILABLE = "Available"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
IMAGE_OVERRIDDEN = "ImageOverridden"
PROVISIONING_CONFIG_MISSING = "ProvisioningConfigMissing"
NODE_OVERLAP = "NodeOverlap"
ORIGINAL_IMAGE = "OriginalImage"
UNSUPPORTED_FIELDS = "UnsupportedFields"
# Of resources with devices for claims only.
DEVICE_CLASS_CONFLICT = "DeviceClassConflict"


class DaemonSetMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0


class DaemonSetStatus(msgspec.Struct, frozen=True, rename="camel"):
    desired_number_scheduled: int = 0
    number_ready: int = 0
    updated_number_scheduled: int = 0
    observed_generation: int = 0


class SeenDaemonSet(msgspec.Struct, frozen=True):
    """The part of a DaemonSet that the status is made from. `msgspec.convert(daemonset, SeenDaemonSet)`."""

    metadata: DaemonSetMetadata = DaemonSetMetadata()
    status: DaemonSetStatus = DaemonSetStatus()


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The observations of a reconciliation. `nodes` are those of the pods.

    `failure` is the error of a write that failed permanently, `malformed` that of a resource which does not fit its
    type. `config_missing` is None if it is unknown. `outdated`: the DaemonSet is not as desired, as its correction is
    postponed. `class_conflicts` is None if device classes do not matter or are unknown.
    """

    daemonset: SeenDaemonSet | None = None
    nodes: Sequence[str] = ()
    replaced: Sequence[Replacement] = ()
    config_missing: bool | None = False
    overlaps: Sequence[Overlap] = ()
    original_images: str = ""
    unsupported: Sequence[str] = ()
    failure: str = ""
    failure_reason: str = "WriteRejected"
    conflicts: Sequence[FieldConflict] = ()
    malformed: str = ""
    outdated: bool = False
    class_conflicts: Sequence[str] | None = None


def node_names(names: Iterable[str]) -> tuple[str, ...]:
    """The nodes of pods, in an order that does not change."""
    return tuple(sorted({name for name in names if name}))


def status(plugin: DevicePlugin, observed: Observation, now: str) -> Status:
    """The status after a reconciliation, from the one before. `now` is the time as the API writes it."""
    before = plugin.status or Status(desired_number_scheduled=0, number_ready=0)
    daemonset = observed.daemonset or SeenDaemonSet()
    generation = plugin.metadata.generation
    progress = _progress(observed, _available_generation(before, generation), _needed_paths(plugin))
    findings = (*progress, *_findings(plugin, observed))
    conditions = [condition(*each[:4], generation=each.generation or generation, now=now) for each in findings]
    effective = {each.field: each.used for each in observed.replaced}
    return Status(
        desired_number_scheduled=daemonset.status.desired_number_scheduled,
        number_ready=daemonset.status.number_ready,
        controlled_daemon_set=_reference(before.controlled_daemon_set, observed),
        node_names=node_names(observed.nodes),
        observed_generation=plugin.metadata.generation,
        conditions=with_transition_times(before.conditions, conditions),
        effective_image=effective.get("image", ""),
        effective_init_image=effective.get("initImage", ""),
    )


def new_class_conflict(plugin: DevicePlugin, observed: Observation) -> str:
    """The conflicts of device classes, empty if there are none or if the status has them already."""
    before = find_condition(plugin.status.conditions, DEVICE_CLASS_CONFLICT) if plugin.status else None
    found = "; ".join(observed.class_conflicts or ())
    return "" if before is not None and before.message == found else found


class _Finding(NamedTuple):
    """The arguments of `condition`. `generation` is given if it is not the current one."""

    type: str
    holds: bool | None
    reason: str
    message: str
    generation: int = 0


def _reference(before: ObjectReference | None, observed: Observation) -> ObjectReference | None:
    daemonset = observed.daemonset
    if daemonset is None:
        # It may exist where the cache does not have it.
        return before if observed.failure or observed.malformed else None
    metadata = daemonset.metadata
    if before is not None and before.uid == metadata.uid:
        # The resource version stays: updating it would require a write for every change of the DaemonSet.
        return before
    return ObjectReference(
        api_version="apps/v1",
        kind="DaemonSet",
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        resource_version=metadata.resource_version,
    )


def _available_generation(before: Status, generation: int) -> int:
    """The generation whose pods were ready at last."""
    known = find_condition(before.conditions, AVAILABLE)
    return known.observed_generation if known is not None else generation - 1


def _needed_paths(plugin: DevicePlugin) -> str:
    """The paths without which pods stay in ContainerCreating, and which not all distributions of Kubernetes have."""
    if not (isinstance(plugin.spec, GpuSpec) and plugin.spec.resource_manager):
        return ""
    return (
        "; resourceManager mounts /var/lib/kubelet/pki/kubelet.crt and /etc/kubernetes/node-feature-discovery: pods "
        "stay in ContainerCreating on nodes without /var/lib/kubelet/pki or with a read-only /etc"
    )


def _progress(observed: Observation, available_generation: int, needed: str) -> tuple[_Finding, _Finding]:
    if observed.daemonset is None:
        return (
            _Finding(AVAILABLE, False, "NoDaemonSet", "the DaemonSet does not exist yet"),
            _Finding(PROGRESSING, not observed.failure, "NoDaemonSet", "the DaemonSet does not exist yet"),
        )
    counts, metadata = observed.daemonset.status, observed.daemonset.metadata
    desired, ready, updated = counts.desired_number_scheduled, counts.number_ready, counts.updated_number_scheduled
    message = f"{ready} of {desired} pods are ready, {updated} are updated{needed if ready < desired else ''}"
    if metadata.generation and not counts.observed_generation:
        pending = "the DaemonSet controller has not processed the DaemonSet yet"
        return _Finding(AVAILABLE, False, "Updating", pending), _Finding(PROGRESSING, True, "Updating", pending)
    processed = counts.observed_generation >= metadata.generation
    current = processed and updated >= desired and not (observed.failure or observed.malformed or observed.outdated)
    if current or ready < desired:
        available_generation = 0
    # A change of the DaemonSet does not make its ready pods unready. But 0 would be omitted: the status counts then.
    available = ready >= desired and (current or available_generation > 0)
    reason = "NoNodes" if desired == 0 else "PodsReady" if available else "PodsNotReady"
    availability = _Finding(
        AVAILABLE, available, reason, message if desired else "no node is selected", available_generation
    )
    if not processed:
        pending = "the DaemonSet controller has not processed the change of the DaemonSet yet"
        return availability, _Finding(PROGRESSING, True, "Updating", pending)
    if desired == 0:
        return availability, _Finding(PROGRESSING, False, "NoNodes", "no node is selected")
    complete = ready >= desired and updated >= desired
    return availability, _Finding(PROGRESSING, not complete, "Complete" if complete else "RollingOut", message)


def _findings(plugin: DevicePlugin, observed: Observation) -> tuple[_Finding, ...]:
    return (
        _degraded(observed),
        _problem(
            IMAGE_OVERRIDDEN,
            "ImageReplaced",
            "; ".join(
                f"{each.field} {each.found} is replaced by {each.used}"
                + (f" from {each.variable} of the operator" if each.variable else "")
                for each in observed.replaced
            ),
            "the images are those of the resource",
        ),
        _config(provisioning_config(plugin.spec), observed.config_missing),
        _problem(ORIGINAL_IMAGE, "ImageOfGoProject", observed.original_images, "no image of the Go project to replace"),
        _problem(
            UNSUPPORTED_FIELDS,
            "ImageTooOld",
            "; ".join(observed.unsupported),
            "the images support all fields that are set",
        ),
        _problem(
            NODE_OVERLAP,
            "SameNodesSelected",
            "; ".join(format_overlap(each, plugin.name) for each in observed.overlaps),
            "no other resource of this kind selects the same nodes",
        ),
        *_class_conflicts(observed.class_conflicts),
    )


def _class_conflicts(found: Sequence[str] | None) -> Iterator[_Finding]:
    if found is not None:
        yield _problem(
            DEVICE_CLASS_CONFLICT, "ClassesConflict", "; ".join(found), "no other class has the same name or resource"
        )


def _config(name: str, missing: bool | None) -> _Finding:
    if missing is None:
        why = f"ConfigMap {name} (provisioningConfig) cannot be read; see the log of the operator"
        return _Finding(PROVISIONING_CONFIG_MISSING, None, "NotKnown", why)
    problem = (
        f"ConfigMap {name} (provisioningConfig) does not exist; create it, new pods wait for it" if missing else ""
    )
    return _problem(
        PROVISIONING_CONFIG_MISSING, "ConfigMapNotFound", problem, "the ConfigMap exists, or none is needed"
    )


def _degraded(observed: Observation) -> _Finding:
    if observed.failure:
        return _Finding(DEGRADED, True, observed.failure_reason, observed.failure)
    if observed.conflicts:
        return _Finding(DEGRADED, True, observed.conflicts[0].reason, "; ".join(map(str, observed.conflicts)))
    return _problem(DEGRADED, "Malformed", observed.malformed, "no errors")


def _problem(kind: str, reason: str, problem: str, otherwise: str) -> _Finding:
    return _Finding(kind, bool(problem), reason if problem else "AsExpected", problem or otherwise)
