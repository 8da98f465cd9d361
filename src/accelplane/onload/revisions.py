"""Versions of Onload over time: the target of the nodes, and the history for rollbacks.

    target(onload, history)                             the resource whose version the nodes should have
    record_outcome(onload, history, outcome, now)       the history after an observation
    module_version(onload, live, live_sfc)              the version of the Modules

All functions are pure.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from accelplane.kube.ensure import digest_of
from accelplane.kube.jsontypes import as_list, as_mapping
from accelplane.onload.models import ModuleParameters, Onload, Revision, RevisionState, uses_kmm
from accelplane.onload.modules import KmmApi, module, sfc_module
from accelplane.onload.resources import Module

MAX_HISTORY = 5
_MAX_LABEL_VALUE = 63
_DIGEST_LENGTH = 8

Outcome = Literal["progressing", "complete", "failed"]


def revision(onload: Onload) -> Revision:
    """The revision of a spec."""
    spec = onload.spec.onload
    return Revision(
        version=spec.version,
        user_image=spec.user_image,
        kernel_mappings=spec.kernel_mappings,
        module_parameters=spec.module_parameters if spec.module_parameters != ModuleParameters() else None,
    )


def target(onload: Onload, history: Sequence[Revision]) -> Onload:
    """The resource itself, or with the last verified revision if its own has failed and it rolls back."""
    back = rollback(onload, history)
    if back is None:
        return onload
    spec = msgspec.structs.replace(
        onload.spec.onload,
        version=back.version,
        user_image=back.user_image,
        kernel_mappings=back.kernel_mappings,
        module_parameters=back.module_parameters,
    )
    return msgspec.structs.replace(onload, spec=msgspec.structs.replace(onload.spec, onload=spec))


def rollback(onload: Onload, history: Sequence[Revision]) -> Revision | None:
    """The revision that nodes return to, if the revision of the spec has failed."""
    if not _rolls_back(onload) or not history:
        return None
    newest = history[0]
    if newest.state != "Failed" or not _is_same(newest, revision(onload)):
        return None
    return next((each for each in history[1:] if each.state == "Verified"), None)


def record_outcome(onload: Onload, history: Sequence[Revision], outcome: Outcome, now: str) -> tuple[Revision, ...]:
    """The history, the newest first. `outcome` is that of the nodes with `target(onload, history)`."""
    desired, rolled_back = revision(onload), rollback(onload, history) is not None
    known = next((each for each in history if _is_same(each, desired)), None)
    others = [each for each in history if not _is_same(each, desired)]
    state: RevisionState = "Progressing"
    if known is not None and (known is history[0] or known.state == "Verified"):
        state = known.state
    if not rolled_back and outcome == "complete":
        state = "Verified"
    elif not rolled_back and outcome == "failed" and state == "Progressing" and _rolls_back(onload):
        state = "Failed" if any(each.state == "Verified" for each in others) else state
    changed = known is None or known.state != state
    time = now if changed or known is None else known.time
    return _limited([msgspec.structs.replace(desired, state=state, time=time), *others])


def module_version(onload: Onload, live: Module | None, live_sfc: Module | None) -> str:
    """The version of the Modules and of the labels of nodes: that of the spec.

    KMM would reload modules on all nodes at once if the mappings of a version change. So a change that concerns nodes
    with the version gets a version with a suffix. Appended mappings concern none of these nodes.
    """
    version = onload.spec.onload.version
    if live is None or not uses_kmm(onload.spec.onload):
        return version
    current = str(_container(live).get("version", ""))
    if current != version and not re.fullmatch(rf"{re.escape(version)}-[0-9a-f]{{{_DIGEST_LENGTH}}}", current):
        return version
    desired = [module(onload, version, KmmApi())]
    found = [live]
    if live_sfc is not None and any(each.sfc is not None for each in onload.spec.onload.kernel_mappings):
        desired.append(sfc_module(onload, version, KmmApi()))
        found.append(live_sfc)
    if all(_extends(new, old) for new, old in zip(desired, found, strict=True)):
        return current
    content = [[_mappings(each), _parameters(each)] for each in desired]
    suffixed = f"{version}-{digest_of({'modules': content})[:_DIGEST_LENGTH]}"
    return suffixed if len(suffixed) <= _MAX_LABEL_VALUE else current


def _rolls_back(onload: Onload) -> bool:
    return onload.spec.upgrade is not None and onload.spec.upgrade.auto_rollback


def _is_same(one: Revision, other: Revision) -> bool:
    return _content(one) == _content(other)


def _content(each: Revision) -> tuple[object, ...]:
    return each.version, each.user_image, each.kernel_mappings, each.module_parameters


def _limited(history: Sequence[Revision]) -> tuple[Revision, ...]:
    """The newest entries, of which the last verified one is never dropped."""
    kept = list(history[:MAX_HISTORY])
    if not any(each.state == "Verified" for each in kept):
        verified = next((each for each in history[MAX_HISTORY:] if each.state == "Verified"), None)
        if verified is not None:
            kept[-1] = verified
    return tuple(kept)


def _container(live: Module) -> Mapping[str, object]:
    loader = as_mapping(live.spec.get("moduleLoader")) or {}
    return as_mapping(loader.get("container")) or {}


def _mappings(each: Module) -> list[tuple[str, str]]:
    found = (as_mapping(item) or {} for item in as_list(_container(each).get("kernelMappings")) or ())
    return [(str(item.get("regexp", "")), str(item.get("containerImage", ""))) for item in found]


def _parameters(each: Module) -> list[object]:
    modprobe = as_mapping(_container(each).get("modprobe")) or {}
    return list(as_list(modprobe.get("parameters")) or ())


def _extends(new: Module, old: Module) -> bool:
    """Whether nodes that have the old Module's module are not concerned by the new one."""
    before, after = _mappings(old), _mappings(new)
    return after[: len(before)] == before and _parameters(new) == _parameters(old)
