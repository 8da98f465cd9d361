"""What to write so that there is one DaemonSet of a custom resource, and it is as asked for.

    plan(desired, existing, manager=…) -> Plan        what to apply, what to delete, and what differs, for people
    template_hash(daemonset) -> str                   what HASH_ANNOTATION holds
    provisioning_on(daemonset) -> str                 the ConfigMap's hash that its pods have
    ready_to_own(daemonset, manager) -> list | None   `metadata.managedFields` to patch in before the first apply

DaemonSets belong to a resource by their owner reference and never by name: one that an older operator made keeps its
name and its selector. The whole of it is applied (server-side, forced) when something that is asked for is not there,
or when HASH_ANNOTATION shows that what was asked for last was something else; then fields that are no longer asked for
go, which nobody could tell from the object alone. What others have added (annotations of a restart, a mesh's
containers) stays. When nothing differs nothing is written.

The API server says the same in other words: quantities are compared as numbers, and lists of named things by name.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from accelplane.kube.jsontypes import Json, JsonObject
from accelplane.kube.quantities import number_of
from accelplane.operator.daemonsets import PROVISIONING_ANNOTATION, DaemonSet
from accelplane.operator.daemonsets.objects import Selector
from accelplane.operator.models import GROUP

HASH_ANNOTATION = f"{GROUP}/template-hash"
# The field managers of Go's operators: the name of their program.
GO_MANAGERS = ("intel_deviceplugin_operator",)

# By what the API server tells the elements of a list apart; other lists are values as a whole.
_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
}
_QUANTITIES = ("limits", "requests")
# To the API server these are one value each: nobody can add to them and leave the rest ours.
_WHOLE = ("nodeSelector",)
_LONGEST_SHOWN = 80


class Plan(msgspec.Struct, frozen=True):
    """`apply` is the object to apply, or None; `managed_fields` are to be patched in before, when there are any.

    `kept` is the existing DaemonSet that goes on, `surplus` the names of others to delete with their pods.
    """

    apply: JsonObject | None
    kept: JsonObject | None = None
    managed_fields: list[Json] | None = None
    surplus: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def creates(self) -> bool:
        return self.apply is not None and self.kept is None


class _Owner(msgspec.Struct):
    uid: str = ""
    controller: bool = False


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    annotations: dict[str, str] = {}
    owner_references: list[_Owner] = []

    def stays(self, owners: set[str]) -> bool:
        """Whether it is controlled by one of the owners, or there is none to be controlled by, and goes on."""
        owned = not owners or any(owner.uid in owners for owner in self.owner_references if owner.controller)
        return owned and not self.deletion_timestamp


class _PodMetadata(msgspec.Struct):
    annotations: dict[str, str] = {}


class _PodSpec(msgspec.Struct, rename="camel"):
    service_account_name: str = ""


class _Template(msgspec.Struct):
    metadata: _PodMetadata = msgspec.field(default_factory=_PodMetadata)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] = {}


class _Spec(msgspec.Struct):
    selector: _Selector = msgspec.field(default_factory=_Selector)
    template: _Template = msgspec.field(default_factory=_Template)


class _View(msgspec.Struct):
    """The part of an existing DaemonSet that decides something."""

    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


def plan(desired: DaemonSet, existing: Sequence[JsonObject], *, manager: str) -> Plan:
    """What to write. `existing` are all DaemonSets whose controller is a resource of this kind and name.

    The oldest goes on. One that is being deleted, or belongs to a resource of this name that is gone, does not: while
    it has the name that is wanted there is nothing to apply, and its end is the event upon which to look again.
    """
    views = sorted(((_view(each), each) for each in existing), key=lambda pair: _age(pair[0]))
    owners = {owner.uid for owner in desired.metadata.owner_references}
    staying = [pair for pair in views if pair[0].metadata.stays(owners)]
    others = [view.metadata for view, each in views if not staying or each is not staying[0][1]]
    surplus = tuple(each.name for each in others if not each.deletion_timestamp)
    if not staying:
        taken = desired.metadata.name in [each.name for each in others]
        return Plan(None if taken else _hashed(desired), surplus=surplus)
    view, kept = staying[0]
    wanted = _hashed(_adopting(desired, view))
    differences = tuple(_differences(wanted, kept, ()))
    if not differences:
        return Plan(None, kept, surplus=surplus)
    return Plan(wanted, kept, ready_to_own(kept, manager), surplus, differences)


def template_hash(daemonset: DaemonSet) -> str:
    """A short hash of all that is asked for."""
    return hashlib.sha256(msgspec.json.encode(daemonset, order="deterministic")).hexdigest()[:16]


def provisioning_on(daemonset: JsonObject) -> str:
    """The hash of the ConfigMap's content that the pods were made with, empty for none.

    To go on with while the ConfigMap cannot be had, so that pods which run are not replaced by pods which wait for it.
    """
    return _view(daemonset).spec.template.metadata.annotations.get(PROVISIONING_ANNOTATION, "")


def ready_to_own(daemonset: JsonObject, manager: str) -> list[Json] | None:
    """The managed fields with what Go's operator owns handed to `manager`; None when it owns nothing.

    It wrote by updates, whose fields an apply never removes: without this an init container of old would stay for ever.
    """
    entries = _managed_fields(daemonset)
    theirs = [each for each in entries if each.get("manager") in GO_MANAGERS and not each.get("subresource")]
    if not theirs:
        return None
    ours = [each for each in entries if _is_applied_by(each, manager)]
    owned: JsonObject = {}
    for each in (*ours, *theirs):
        fields = each.get("fieldsV1")
        owned = _united(owned, fields) if isinstance(fields, dict) else owned
    made: JsonObject = {**theirs[0], "manager": manager, "operation": "Apply", "fieldsV1": owned}
    return [made, *(each for each in entries if each not in theirs and each not in ours)]


def _managed_fields(daemonset: JsonObject) -> list[JsonObject]:
    metadata = daemonset.get("metadata")
    fields = metadata.get("managedFields") if isinstance(metadata, dict) else None
    return [each for each in fields if isinstance(each, dict)] if isinstance(fields, list) else []


def _is_applied_by(entry: JsonObject, manager: str) -> bool:
    return entry.get("manager") == manager and entry.get("operation") == "Apply" and not entry.get("subresource")


def _united(one: JsonObject, other: JsonObject) -> JsonObject:
    """A set of fields that has those of both."""
    united = dict(one)
    for key, value in other.items():
        mine = united.get(key)
        united[key] = _united(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return united


def _view(daemonset: JsonObject) -> _View:
    return msgspec.convert(daemonset, _View)


def _age(view: _View) -> tuple[str, str]:
    return view.metadata.creation_timestamp, view.metadata.name


def _hashed(daemonset: DaemonSet) -> JsonObject:
    annotations = {**daemonset.metadata.annotations, HASH_ANNOTATION: template_hash(daemonset)}
    metadata = msgspec.structs.replace(daemonset.metadata, annotations=annotations)
    return msgspec.structs.replace(daemonset, metadata=metadata).as_object()


def _adopting(desired: DaemonSet, view: _View) -> DaemonSet:
    """The same DaemonSet under the name and the selector that cannot be changed any more."""
    labels = view.spec.selector.match_labels or desired.spec.selector.match_labels
    template = desired.spec.template
    pod = template.spec
    if not pod.service_account_name and view.spec.template.spec.service_account_name:
        # The API server fills one of the two fields of an account in from the other, so none of them can be emptied.
        pod = msgspec.structs.replace(pod, service_account_name="default")
    metadata = msgspec.structs.replace(template.metadata, labels={**template.metadata.labels, **labels})
    spec = msgspec.structs.replace(
        desired.spec,
        selector=Selector(match_labels=labels),
        template=msgspec.structs.replace(template, metadata=metadata, spec=pod),
    )
    place = view.metadata.namespace or desired.metadata.namespace
    return msgspec.structs.replace(
        desired,
        metadata=msgspec.structs.replace(desired.metadata, name=view.metadata.name, namespace=place),
        spec=spec,
    )


def _differences(wanted: Json, found: Json, path: tuple[str, ...]) -> Iterator[str]:
    """What is wanted and is not so, one line each."""
    key = path[-1] if path else ""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, value in wanted.items():
            if name not in found:
                yield f"{_told((*path, name))}: missing, expected {_shown(value)}"
            else:
                yield from _differences(value, found[name], (*path, name))
        for name in sorted(found.keys() - wanted.keys()) if key in _WHOLE else ():
            yield f"{_told((*path, name))}: {_shown(found[name])}, expected none"
    elif isinstance(wanted, list) and isinstance(found, list) and key in _KEYS:
        yield from _differences_by_name(wanted, found, path)
    elif not _same(wanted, found, path):
        yield f"{_told(path)}: {_shown(found)}, expected {_shown(wanted)}"


def _differences_by_name(wanted: list[Json], found: list[Json], path: tuple[str, ...]) -> Iterator[str]:
    key = _KEYS[path[-1]]
    there = {str(each.get(key)): each for each in found if isinstance(each, dict)}
    for each in wanted:
        name = str(each.get(key)) if isinstance(each, dict) else ""
        if name not in there:
            yield f"{_told((*path, name))}: missing"
        else:
            yield from _differences(each, there[name], (*path, name))


def _same(wanted: Json, found: Json, path: tuple[str, ...]) -> bool:
    if len(path) > 1 and path[-2] in _QUANTITIES:
        return _amount(wanted) == _amount(found)
    return wanted == found


def _amount(value: Json) -> object:
    return number_of(value) if isinstance(value, int | str) else value


def _told(path: tuple[str, ...]) -> str:
    return "".join(f"[{each}]" if "." in each or "/" in each else f".{each}" for each in path).removeprefix(".")


def _shown(value: Json) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
