"""The versions that the nodes of an Onload resource have and should get: labels, history and rollbacks.

    known_history(onload, existing, nodes)              the history in the status, completed with what exists
    plan_rollout(onload, history, nodes) -> Rollout     what each node should get
    record_outcome(rollout, outcome, now)               the history after an observation

A label stands for one content of the Modules: images by kernel, and parameters. KMM compares the label of a node with
that of the Module, and reloads the module at once if both are equal and the content is not. So a label is never used
for another content while a node has it or may return to it. All functions are pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from accelplane.kube.ensure import digest_of
from accelplane.kube.jsontypes import as_list, as_mapping
from accelplane.onload.children import Existing
from accelplane.onload.models import (
    Build,
    KernelMapping,
    ModuleParameters,
    Onload,
    Revision,
    RevisionState,
    Sfc,
    uses_kmm,
)
from accelplane.onload.modules import FIRST_TIME
from accelplane.onload.observed import NodeView
from accelplane.onload.resources import DaemonSet, Module

MAX_HISTORY = 5
_MAX_LABEL_VALUE = 63
_DIGEST_LENGTH = 8

Outcome = Literal["progressing", "complete", "failed"]


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes should get.

    `desired` is the revision of the spec, `target` the one that Modules and nodes get now. They differ while nodes
    return to what they were verified on, because `desired` failed. Then `others` has the labels of nodes that should
    have another version than `target`: they keep it, or return to it later. `keeps` has the labels of nodes that have
    the modules of `target` with another label.
    """

    desired: Revision
    target: Revision
    history: tuple[Revision, ...] = ()
    others: Mapping[str, str] = {}
    keeps: Mapping[str, str] = {}
    rolls_back: bool = False
    may_fail: bool = False
    nodes: Sequence[NodeView] = ()


# History


def known_history(onload: Onload, existing: Existing, nodes: Sequence[NodeView]) -> tuple[Revision, ...]:
    """The history in the status, the newest first. Each entry has a label.

    Entries of earlier releases have none. The status has no entry for the Module of the Go operator, and none at all
    if it was lost: then the existing objects are the entry.
    """
    history = list(onload.status.onload.history if onload.status else ())
    used = _used_labels(nodes)
    if existing.module is not None:
        used.add(_label_of(existing.module))
    for index in range(len(history) - 1, -1, -1):
        if not history[index].label:
            history[index] = _labelled(onload, history[index], history, used)
    if existing.module is not None and uses_kmm(onload.spec.onload):
        label = _label_of(existing.module)
        if label and not any(each.label == label and each.kernel_mappings for each in history):
            history.insert(0, _adopted(onload, existing.module, existing.sfc, existing.daemonset))
    return tuple(history)


def _labelled(onload: Onload, entry: Revision, history: Sequence[Revision], used: set[str]) -> Revision:
    """An entry of an earlier release, which had the version or a suffixed version as label."""
    digest = _digest(entry)
    suffixed, taken = _suffixed(entry.version, digest), {each.label for each in history}
    label = suffixed if suffixed in used or entry.version in taken else entry.version
    policy = onload.spec.onload.image_pull_policy
    return msgspec.structs.replace(entry, label=label, digest=digest, image_pull_policy=policy)


def _adopted(onload: Onload, live: Module, sfc: Module | None, daemonset: DaemonSet | None) -> Revision:
    """The entry of Modules and a DaemonSet that exist."""
    label, wanted = _label_of(live), onload.spec.onload.version
    is_suffixed = re.fullmatch(rf"{re.escape(wanted[:_MAX_PREFIX])}-[0-9a-f]{{{_DIGEST_LENGTH},}}", label)
    with_sfc = {_pair(each) for each in _mappings(sfc)} if sfc is not None else set[tuple[str, str]]()
    parameters = ModuleParameters(onload=_parameters(live), sfc=_parameters(sfc) if sfc is not None else ())
    found = Revision(
        version=wanted if is_suffixed else label,
        label=label,
        user_image=_user_image(daemonset) or onload.spec.onload.user_image,
        kernel_mappings=tuple(_mapping(each, with_sfc) for each in _mappings(live)),
        module_parameters=parameters if parameters != ModuleParameters() else None,
        image_pull_policy=str(_container(live).get("imagePullPolicy", "")),
    )
    return msgspec.structs.replace(found, digest=_digest(found))


def record_outcome(rollout: Rollout, outcome: Outcome, now: str) -> tuple[Revision, ...]:
    """The history, the newest first. `outcome` is that of the nodes with `rollout.target`."""
    desired = rollout.desired
    known = next((each for each in rollout.history if _is_same(each, desired)), None)
    # An entry with the same label has other content only if this does not concern any node.
    replaced = [each for each in rollout.history if _is_same(each, desired) or _is_replaced(each, desired)]
    others = [each for each in rollout.history if each not in replaced]
    state: RevisionState = "Progressing"
    if known is not None and (known is rollout.history[0] or known.state == "Verified"):
        state = known.state
    if not rollout.rolls_back and outcome == "complete":
        state = "Verified"
    elif not rollout.rolls_back and outcome == "failed" and state == "Progressing" and rollout.may_fail:
        state = "Failed"
    changed = known is None or known.state != state
    time = now if changed or known is None else known.time
    return _limited([msgspec.structs.replace(desired, state=state, time=time), *others], rollout.nodes)


def _limited(history: Sequence[Revision], nodes: Sequence[NodeView]) -> tuple[Revision, ...]:
    """The newest entries, the last verified one, and those that nodes have or may return to."""
    used = _used_labels(nodes)
    verified = next((each for each in history if each.state == "Verified"), None)
    return tuple(
        each
        for index, each in enumerate(history)
        if index < MAX_HISTORY or each is verified or (each.label in used and each.kernel_mappings)
    )


# Plan


def plan_rollout(onload: Onload, history: Sequence[Revision], nodes: Sequence[NodeView]) -> Rollout:
    """What each node should get."""
    desired = _desired(onload, history, nodes)
    rolls_back = onload.spec.upgrade is not None and onload.spec.upgrade.auto_rollback
    # Without a verified version, a failure has no consequence.
    earlier = [each for each in history if not _is_same(each, desired) and each.state != "Failed"]
    verified = {found.label for node in nodes if (found := node.verified) is not None}
    fallback = next((each for each in earlier if each.state == "Verified" or each.label in verified), None)
    found = Rollout(
        desired=desired,
        target=desired,
        history=tuple(history),
        keeps=_kept_labels(desired, history, nodes),
        may_fail=rolls_back and fallback is not None,
        nodes=nodes,
    )
    if fallback is None or not found.may_fail or history[0].state != "Failed" or not _is_same(history[0], desired):
        return found
    wanted = {node.name: _verified_revision(node, history) or fallback for node in nodes if node.selected}
    moving = [node for node in nodes if node.selected and not _has(node, wanted[node.name])]
    # A node that is not ready must not delay the others.
    first = [node for node in moving if node.ready] or moving
    goals = [wanted[node.name] for node in first] or [each for each in wanted.values() if not _is_same(each, desired)]
    order = [each.label for each in history]
    target = min(goals, key=lambda each: order.index(each.label), default=fallback)
    others = {name: each.label for name, each in wanted.items() if each != target}
    return msgspec.structs.replace(found, target=target, others=others, keeps={}, rolls_back=True)


def with_revision(onload: Onload, revision: Revision) -> Onload:
    """The resource with another revision."""
    spec = msgspec.structs.replace(
        onload.spec.onload,
        version=revision.version,
        user_image=revision.user_image,
        kernel_mappings=revision.kernel_mappings,
        module_parameters=revision.module_parameters,
        # The API server requires mappings with KMM, and none without.
        module_management="KMM" if revision.kernel_mappings else "External",
    )
    return msgspec.structs.replace(onload, spec=msgspec.structs.replace(onload.spec, onload=spec))


def _verified_revision(node: NodeView, history: Sequence[Revision]) -> Revision | None:
    """The revision on which a node was last verified."""
    found = node.verified
    if found is None:
        return None
    same = [each for each in history if each.label == found.label]
    exact = next((each for each in same if each.user_image == found.user_image), None)
    if exact is not None or not same:
        return exact
    if found.user_image:
        # The node kept its label when it got this userland.
        return msgspec.structs.replace(same[0], user_image=found.user_image)
    return next((each for each in same if each.state != "Failed"), None)


def _has(node: NodeView, revision: Revision) -> bool:
    """Whether a node has a revision, and no change of it is under way."""
    return node.progress is None and node.verified is not None and node.verified.label == revision.label


# Labels


def _desired(onload: Onload, history: Sequence[Revision], nodes: Sequence[NodeView]) -> Revision:
    """The revision of the spec with its label."""
    spec = onload.spec.onload
    plain = Revision(
        version=spec.version,
        user_image=spec.user_image,
        kernel_mappings=spec.kernel_mappings,
        module_parameters=spec.module_parameters if spec.module_parameters != ModuleParameters() else None,
        image_pull_policy=spec.image_pull_policy,
    )
    plain = msgspec.structs.replace(plain, digest=_digest(plain), label=spec.version)
    if not uses_kmm(spec):
        return plain
    known = [each for each in history if each.kernel_mappings]
    exact = [each for each in known if (each.version, each.digest) == (plain.version, plain.digest)]
    for each in exact or [each for each in known if _may_keep_label(each, plain, nodes)]:
        return _like(plain, each)
    # Without a history and a Module, KMM has loaded nothing, whatever labels the nodes have.
    taken = {each.label for each in known} | _used_labels(nodes if known else ())
    labels = (plain.version, *(_suffixed(plain.version, plain.digest, length) for length in (_DIGEST_LENGTH, 16)))
    return msgspec.structs.replace(plain, label=next((each for each in labels if each not in taken), labels[-1]))


def _like(revision: Revision, known: Revision) -> Revision:
    """A revision whose Modules are those of a known one. KMM would also reload modules for another pull policy."""
    return msgspec.structs.replace(revision, label=known.label, image_pull_policy=known.image_pull_policy)


def _may_keep_label(known: Revision, desired: Revision, nodes: Iterable[NodeView]) -> bool:
    """Whether the content of the label changes for no node that has it or may return to it.

    For example, mappings for other kernels do not concern these nodes.
    """
    if known.version != desired.version or known.state == "Failed":
        return False
    users = [node for node in nodes if known.label in _used_labels([node])]
    return bool(users) and all(_same_content(known, desired, node.kernel) for node in users)


def _kept_labels(desired: Revision, history: Sequence[Revision], nodes: Iterable[NodeView]) -> dict[str, str]:
    """The labels of nodes to which a revision with another label gives nothing new: they are not changed.

    KMM does not load modules with such a label, because that of the Module differs. So the node has to have them.
    """
    known = {each.label: each for each in history if each.version == desired.version and each.label != desired.label}
    return {
        node.name: found.label
        for node in nodes
        if (found := known.get(node.module or "")) is not None and _keeps(node, found, desired)
    }


def _keeps(node: NodeView, known: Revision, desired: Revision) -> bool:
    label = known.label
    is_complete = node.gate in {None, label} and node.sfc in {None, label}
    has_modules = node.module_loaded_version in {None, label} and (
        node.module_loaded or (node.progress is None and node.gate is not None)
    )
    return is_complete and has_modules and _same_modules(known, desired, node.kernel, with_sfc=node.sfc is not None)


def _same_modules(known: Revision, desired: Revision, kernel: str, *, with_sfc: bool) -> bool:
    """Whether a node with a kernel, and with `sfc` or without, has the modules of both revisions."""
    before, after = _mapping_of(known, kernel), _mapping_of(desired, kernel)
    if before is None or after is None or with_sfc != (before.sfc is not None) or with_sfc != (after.sfc is not None):
        return False
    return _same_content(known, desired, kernel)


def _same_content(known: Revision, desired: Revision, kernel: str) -> bool:
    """Whether KMM would keep the modules that are loaded on a kernel, if both revisions had the same label."""
    before, after = _mapping_of(known, kernel), _mapping_of(desired, kernel)
    if before is None or after is None:
        return before is after and bool(kernel)
    had, has = known.module_parameters or ModuleParameters(), desired.module_parameters or ModuleParameters()
    if (before.kernel_module_image, had.onload) != (after.kernel_module_image, has.onload):
        return False
    if before.sfc is not None and after.sfc is not None:
        return had.sfc == has.sfc
    # A node gets `sfc` with the same label. It loses it with this label only if the Module of `sfc` stays until then.
    return before.sfc is None or not any(each.sfc is not None for each in desired.kernel_mappings)


def _mapping_of(revision: Revision, kernel: str) -> KernelMapping | None:
    return first_mapping(revision.kernel_mappings, kernel)


def first_mapping(mappings: Iterable[KernelMapping], kernel: str) -> KernelMapping | None:
    """The mapping that KMM uses for a kernel."""
    return next((each for each in mappings if _matches(each.regexp, kernel)), None)


def _matches(regexp: str, kernel: str) -> bool:
    try:
        return re.search(regexp, kernel) is not None
    except re.error:
        return regexp == kernel


_MAX_PREFIX = _MAX_LABEL_VALUE - _DIGEST_LENGTH - 1


def _suffixed(version: str, digest: str, length: int = _DIGEST_LENGTH) -> str:
    return f"{version[: _MAX_LABEL_VALUE - length - 1]}-{digest[:length]}"


def _used_labels(nodes: Iterable[NodeView]) -> set[str]:
    """The labels that nodes have or may return to."""
    found: set[str | None] = set()
    for node in nodes:
        found |= {node.module, node.sfc, node.module_loaded_version, node.sfc_loaded_version}
        found.add(node.verified.label if node.verified is not None else None)
    return {each for each in found if each}


# Content


def _is_same(one: Revision, other: Revision) -> bool:
    return (one.version, one.digest, one.user_image) == (other.version, other.digest, other.user_image)


def _is_replaced(entry: Revision, desired: Revision) -> bool:
    same_label = entry.label == desired.label and bool(entry.kernel_mappings) == bool(desired.kernel_mappings)
    return same_label and (entry.version, entry.digest) != (desired.version, desired.digest)


def _digest(revision: Revision) -> str:
    """The digest of the Modules without their version. Earlier releases used its begin as suffix of a label."""
    parameters = revision.module_parameters or ModuleParameters()
    pairs = [(each.regexp, each.kernel_module_image) for each in revision.kernel_mappings]
    content: list[list[object]] = [[pairs, [FIRST_TIME, *parameters.onload]]]
    if any(each.sfc is not None for each in revision.kernel_mappings):
        with_sfc = [
            (each.regexp, each.kernel_module_image) for each in revision.kernel_mappings if each.sfc is not None
        ]
        content.append([with_sfc, [FIRST_TIME, *parameters.sfc]])
    return digest_of({"modules": content})


def _container(live: Module) -> Mapping[str, object]:
    loader = as_mapping(live.spec.get("moduleLoader")) or {}
    return as_mapping(loader.get("container")) or {}


def _label_of(live: Module) -> str:
    return str(_container(live).get("version", ""))


def _mappings(live: Module) -> list[Mapping[str, object]]:
    return [as_mapping(item) or {} for item in as_list(_container(live).get("kernelMappings")) or ()]


def _pair(found: Mapping[str, object]) -> tuple[str, str]:
    return str(found.get("regexp") or found.get("literal") or ""), str(found.get("containerImage", ""))


def _mapping(found: Mapping[str, object], with_sfc: set[tuple[str, str]]) -> KernelMapping:
    regexp, image = pair = _pair(found)
    try:
        build = msgspec.convert(found.get("build"), Build | None)
    except msgspec.ValidationError:
        build = None
    return KernelMapping(regexp=regexp, kernel_module_image=image, sfc=Sfc() if pair in with_sfc else None, build=build)


def _parameters(live: Module) -> tuple[str, ...]:
    modprobe = as_mapping(_container(live).get("modprobe")) or {}
    return tuple(str(each) for each in as_list(modprobe.get("parameters")) or () if each != FIRST_TIME)


def _user_image(live: DaemonSet | None) -> str:
    template = as_mapping((live.spec if live is not None else {}).get("template")) or {}
    spec = as_mapping(template.get("spec")) or {}
    first = next(iter(as_list(spec.get("initContainers")) or ()), None)
    return str((as_mapping(first) or {}).get("image", ""))
