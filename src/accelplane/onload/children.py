"""The objects that the operator owns for one resource: two Modules and the DaemonSet.

    desired_objects(onload, version, image, ...)     the objects as they should be
    Children                                         reads and writes them

Objects of the Go operator are adopted in place: their pods stay, because the DaemonSet has the strategy OnDelete.
"""

import logging
from typing import TypeVar

import msgspec

from accelplane.apiserver import NotFound
from accelplane.kube.cache import Cache
from accelplane.kube.customresource import CustomResource
from accelplane.kube.driftbackoff import DriftBackoff
from accelplane.kube.ensure import ensure
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Request, request_of
from accelplane.kube.owners import is_controlled_by
from accelplane.onload.daemonset import daemonset, node_selector_of, revision_of, with_node_selector, with_selector_of
from accelplane.onload.kmm import Kmm
from accelplane.onload.models import Onload, uses_kmm, uses_sfc
from accelplane.onload.modules import KmmApi, module, names_of, sfc_module, without_reload
from accelplane.onload.names import ADOPTED_ANNOTATION, HASH_ANNOTATION, Names
from accelplane.onload.resources import DaemonSet, Module

log = logging.getLogger(__name__)

T = TypeVar("T", Module, DaemonSet)

# Field managers of the operator: of the Go program, of ours, and of the program that also manages other plugins.
_MANAGERS = ("manager", "onload-operator", "accelplane-operator")


class Existing(msgspec.Struct, frozen=True):
    """The objects that exist."""

    module: Module | None
    sfc: Module | None
    daemonset: DaemonSet | None


class DesiredObjects(msgspec.Struct, frozen=True):
    """The objects that the operator writes. A Module is None if there should be none."""

    module: Module | None
    sfc: Module | None
    daemonset: DaemonSet

    @property
    def revision(self) -> str:
        """The revision of the plugin pods."""
        return revision_of(self.daemonset)

    @property
    def adopted_revision(self) -> str:
        """The revision that counts for pods of the Go operator."""
        return (self.daemonset.metadata.annotations or {}).get(ADOPTED_ANNOTATION, "")


def desired_objects(
    onload: Onload,
    version: str,
    image: str,
    kmm: KmmApi | None,
    existing: Existing,
    *,
    keeps_selector: bool,
    module_policy: str | None = None,
) -> DesiredObjects:
    """The objects of a resource. `version` is the label of nodes for KMM. `module_policy` is the pull policy of the
    Modules if it differs from that of the spec. `keeps_selector`: nodes of the former selector have not been released.

    A changed selector would immediately unload modules and stop device plugins on these nodes.
    """
    made = _adopted(daemonset(onload, image), existing.daemonset)
    if keeps_selector and existing.daemonset is not None:
        made = with_node_selector(made, node_selector_of(existing.daemonset))
    if not uses_kmm(onload.spec.onload) or kmm is None:
        return DesiredObjects(None, None, made)
    if module_policy is not None:
        spec = msgspec.structs.replace(onload.spec.onload, image_pull_policy=module_policy)
        onload = msgspec.structs.replace(onload, spec=msgspec.structs.replace(onload.spec, onload=spec))
    main = _with_live_fields(module(onload, version, kmm), existing.module, kmm, keeps_selector=keeps_selector)
    sfc = sfc_module(onload, version, kmm) if uses_sfc(onload.spec.onload) else None
    if sfc is not None:
        sfc = _with_live_fields(sfc, existing.sfc, kmm, keeps_selector=keeps_selector)
    return DesiredObjects(main, sfc, made)


def _adopted(made: DaemonSet, live: DaemonSet | None) -> DaemonSet:
    if live is None:
        return made
    annotations = live.metadata.annotations or {}
    # Without our hash, it was written by the Go operator: its pods are up to date as they are.
    revision = annotations.get(ADOPTED_ANNOTATION) if HASH_ANNOTATION in annotations else revision_of(made)
    if revision:
        more = {**(made.metadata.annotations or {}), ADOPTED_ANNOTATION: revision}
        made = msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, annotations=more))
    return with_selector_of(made, live)


def _with_live_fields(made: Module, live: Module | None, kmm: KmmApi, *, keeps_selector: bool) -> Module:
    """The Module with the fields of the existing one that must not change now."""
    if live is None:
        return made
    made = without_reload(made, live, kmm)
    if not keeps_selector or "selector" not in live.spec:
        return made
    return msgspec.structs.replace(made, spec={**made.spec, "selector": live.spec["selector"]})


class Children:
    """Reads and writes the objects of resources, and reports changes."""

    def __init__(self, manager: Manager, kmm: Kmm, daemonsets: Cache[DaemonSet]) -> None:
        self._client = manager.client
        self._events = manager.events
        self._kmm = kmm
        self._daemonsets = daemonsets
        self._backoff = DriftBackoff()

    async def existing(self, onload: Onload, kmm: KmmApi | None) -> Existing:
        """The existing objects, including unlabelled ones of older versions of the Go operator."""
        names = names_of(onload)
        key, sfc_key = Request(names.module, names.namespace), Request(names.sfc_module, names.namespace)
        # Modules that are not desired usually do not exist, so the cache is read instead of the server.
        main = await self._kmm.module(key) if kmm is not None else self._kmm.modules.get(key)
        reads = kmm is not None and uses_sfc(onload.spec.onload)
        sfc = await self._kmm.module(sfc_key) if reads else self._kmm.modules.get(sfc_key)
        return Existing(main, sfc, await self._daemonset(Request(names.daemonset, names.namespace)))

    async def ensure(self, resource: CustomResource, made: DesiredObjects, existing: Existing) -> float:
        """Creates or corrects the objects. Returns the seconds until a postponed correction, 0 if there is none.

        The DaemonSet comes first: a plugin pod that starts with a new version has to have the new template. Raises
        `NameConflict` and other errors of the API.
        """
        delays = [await self._ensure(resource, made.daemonset, existing.daemonset)]
        if made.sfc is not None:
            delays.append(await self._ensure(resource, made.sfc, existing.sfc))
        if made.module is not None:
            delays.append(await self._ensure(resource, made.module, existing.module))
        return min(filter(None, delays), default=0.0)

    def conflicts(self, names: Names) -> list[str]:
        """Fields of the objects that other programs change again and again."""
        objects = (names.module, names.sfc_module, names.daemonset)
        keys = (Request(name, names.namespace) for name in objects)
        return [str(each) for key in keys for each in self._backoff.conflicts(key)]

    async def delete_module(self, resource: CustomResource, live: Module) -> None:
        """Deletes a Module that belongs to the resource and is not desired any more."""
        if live.metadata.deletionTimestamp is not None or not is_controlled_by(live, resource):
            return
        name, namespace = live.metadata.name or "", live.metadata.namespace or ""
        if await self._client.delete(Module, name, namespace, uid=live.metadata.uid):
            self._report(resource, "Deleted", f"Module {namespace}/{name} deleted: the spec does not need it")

    async def _ensure(self, resource: CustomResource, made: T, existing: T | None) -> float:
        ensured = await ensure(
            self._client,
            made,
            resource,
            existing=existing,
            former_managers=[each for each in _MANAGERS if each != self._client.field_manager],
            hash_annotation=HASH_ANNOTATION,
            backoff=self._backoff,
        )
        if ensured.action in {"created", "adopted", "updated"}:
            changes = f": {'; '.join(map(str, ensured.differences))}" if ensured.differences else ""
            name = f"{type(made).__name__} {request_of(made)}"
            self._report(resource, ensured.action.capitalize(), f"{name} {ensured.action}{changes}")
        return ensured.retry_after

    def _report(self, resource: CustomResource, reason: str, note: str) -> None:
        log.info("Onload %s: %s", request_of(resource), note)
        self._events.record(resource, "Normal", reason, note)

    async def _daemonset(self, key: Request) -> DaemonSet | None:
        if (found := self._daemonsets.get(key)) is not None:
            return found
        try:
            return await self._client.get(DaemonSet, key.name, key.namespace)
        except NotFound:
            return None
