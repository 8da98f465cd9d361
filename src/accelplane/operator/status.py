"""What is told of a custom resource in its status: the four fields of Go's operator as ever, and conditions.

    status(plugin, observed, now) -> Status      the whole of it
    patch(status) -> JsonObject                  as the body of a write to the status subresource
    node_names(names) -> tuple                   sorted, each once, pods that have no node yet left out

Conditions (each is always there, so that one can wait for it):

    Available                   every node that should have a ready pod has one
    Progressing                 pods are being made or replaced: not all are ready, or not all as asked for now
    Degraded                    something needs a look: a write that was refused, or a resource that is malformed
    ImageOverridden             another image runs than the resource names
    ProvisioningConfigMissing   the ConfigMap that it names is not there
    OriginalImage               an image of the Go project runs, and this project has one that replaces it
    UnsupportedFields           fields are set that the images do not support
    NodeOverlap                 another resource of its kind selects the same nodes

A transition's time only changes with the condition's status, so the same state is the same status, to the byte.
"""

from collections.abc import Iterable, Sequence

import msgspec

from accelplane.kube.jsontypes import JsonObject
from accelplane.operator.images import Replacement
from accelplane.operator.models import Condition, DevicePlugin, ObjectReference, Status, provisioning_config
from accelplane.operator.overlap import Overlap, format_overlap

AVAILABLE = "Available"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
IMAGE_OVERRIDDEN = "ImageOverridden"
PROVISIONING_CONFIG_MISSING = "ProvisioningConfigMissing"
NODE_OVERLAP = "NodeOverlap"
ORIGINAL_IMAGE = "OriginalImage"
UNSUPPORTED_FIELDS = "UnsupportedFields"

_LONGEST_MESSAGE = 32768


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


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass has found out. `nodes` are those of the pods.

    `failure` is what the API server refused, `malformed` what is wrong with the resource, if anything; whether its
    ConfigMap is missing may be unknown (None).
    """

    daemonset: SeenDaemonSet | None = None
    nodes: Sequence[str] = ()
    replaced: Sequence[Replacement] = ()
    config_missing: bool | None = False
    overlaps: Sequence[Overlap] = ()
    original_images: str = ""
    unsupported: Sequence[str] = ()
    failure: str = ""
    malformed: str = ""


def node_names(names: Iterable[str]) -> tuple[str, ...]:
    """The nodes of pods, in an order that does not change."""
    return tuple(sorted({name for name in names if name}))


def status(plugin: DevicePlugin, observed: Observed, now: str) -> Status:
    """The status after a pass, from the one before it. `now` is the time as the API writes it."""
    before = plugin.status or Status(desired_number_scheduled=0, number_ready=0)
    seen = observed.daemonset or SeenDaemonSet()
    effective = {each.field: each.used for each in observed.replaced}
    return Status(
        desired_number_scheduled=seen.status.desired_number_scheduled,
        number_ready=seen.status.number_ready,
        controlled_daemon_set=_reference(before.controlled_daemon_set, observed.daemonset),
        node_names=node_names(observed.nodes),
        observed_generation=plugin.metadata.generation,
        conditions=_conditions(plugin, observed, now, before.conditions),
        effective_image=effective.get("image", ""),
        effective_init_image=effective.get("initImage", ""),
    )


def patch(new: Status) -> JsonObject:
    """The body of a merge patch of the status: what is not there any more is taken away."""
    fields: JsonObject = msgspec.json.decode(msgspec.json.encode(new))
    optional = ("controlledDaemonSet", "nodeNames", "conditions", "effectiveImage", "effectiveInitImage")
    return {"status": {**dict.fromkeys(optional), **fields}}


def _reference(before: ObjectReference | None, daemonset: SeenDaemonSet | None) -> ObjectReference | None:
    if daemonset is None:
        return None
    metadata = daemonset.metadata
    if before is not None and before.uid == metadata.uid:
        # Its resource version is the one of the first look; following it would mean a write for every change.
        return before
    return ObjectReference(
        api_version="apps/v1",
        kind="DaemonSet",
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        resource_version=metadata.resource_version,
    )


class _Said(msgspec.Struct, frozen=True):
    type: str
    holds: bool | None
    reason: str
    message: str


def _conditions(
    plugin: DevicePlugin, observed: Observed, now: str, before: Sequence[Condition]
) -> tuple[Condition, ...]:
    known = {condition.type: condition for condition in before}
    made: list[Condition] = []
    for said in (*_progress(observed), *_findings(plugin, observed)):
        value = "Unknown" if said.holds is None else "True" if said.holds else "False"
        old = known.pop(said.type, None)
        since = old.last_transition_time if old is not None and old.status == value else now
        made.append(
            Condition(
                type=said.type,
                status=value,
                reason=said.reason,
                message=said.message[:_LONGEST_MESSAGE],
                last_transition_time=since,
                observed_generation=plugin.metadata.generation,
            )
        )
    # Those that others have put there.
    return (*made, *known.values())


def _progress(observed: Observed) -> tuple[_Said, _Said]:
    if observed.daemonset is None:
        return (
            _Said(AVAILABLE, False, "NoDaemonSet", "there is no DaemonSet yet"),
            _Said(PROGRESSING, not observed.failure, "NoDaemonSet", "the DaemonSet is to be created"),
        )
    counts, metadata = observed.daemonset.status, observed.daemonset.metadata
    wanted, ready, updated = counts.desired_number_scheduled, counts.number_ready, counts.updated_number_scheduled
    told = f"{ready} of {wanted} pods are ready, {updated} as asked for"
    if counts.observed_generation < metadata.generation:
        return (
            _Said(AVAILABLE, False, "Updating", "the DaemonSet has changed and its controller has not looked yet"),
            _Said(PROGRESSING, True, "Updating", "the DaemonSet has changed and its controller has not looked yet"),
        )
    if wanted == 0:
        none = "no node is selected"
        return _Said(AVAILABLE, True, "NoNodes", none), _Said(PROGRESSING, False, "NoNodes", none)
    available = ready >= wanted
    complete = available and updated >= wanted
    return (
        _Said(AVAILABLE, available, "PodsReady" if available else "PodsNotReady", told),
        _Said(PROGRESSING, not complete, "Complete" if complete else "RollingOut", told),
    )


def _findings(plugin: DevicePlugin, observed: Observed) -> tuple[_Said, ...]:
    return (
        _degraded(observed),
        _said(
            IMAGE_OVERRIDDEN,
            "ImageReplaced",
            "; ".join(
                f"{each.field} {each.found} is replaced by {each.used}"
                + (f", as {each.variable} of the operator says" if each.variable else "")
                for each in observed.replaced
            ),
            "the images are those of the resource",
        ),
        _config(provisioning_config(plugin.spec), observed.config_missing),
        _said(ORIGINAL_IMAGE, "ImageOfGoProject", observed.original_images, "no image of the Go project to replace"),
        _said(
            UNSUPPORTED_FIELDS,
            "ImageTooOld",
            "; ".join(observed.unsupported),
            "the images support all fields that are set",
        ),
        _said(
            NODE_OVERLAP,
            "SameNodesSelected",
            "; ".join(format_overlap(each, plugin.name) for each in observed.overlaps),
            "no other resource of this kind selects the same nodes",
        ),
    )


def _config(name: str, missing: bool | None) -> _Said:
    named = f"ConfigMap {name}, named by provisioningConfig,"
    if missing is None:
        why = f"{named} cannot be looked at, the operator's log tells why; its changes do not reach the pods"
        return _Said(PROVISIONING_CONFIG_MISSING, None, "NotKnown", why)
    problem = f"{named} is not in the plugins' namespace: new pods wait for it" if missing else ""
    return _said(PROVISIONING_CONFIG_MISSING, "ConfigMapNotFound", problem, "every ConfigMap that is named is there")


def _degraded(observed: Observed) -> _Said:
    if observed.failure:
        return _Said(DEGRADED, True, "WriteRefused", observed.failure)
    return _said(DEGRADED, "Malformed", observed.malformed, "nothing is in the way")


def _said(kind: str, reason: str, problem: str, otherwise: str) -> _Said:
    return _Said(kind, bool(problem), reason if problem else "AsExpected", problem or otherwise)
