"""The controller of a kind of custom resources: one DaemonSet for each, as it asks for, and a status that tells of it.

One pass over a resource reads it, upgrades its images, renders its DaemonSet, plans what to write (`update`), writes
that and then the status. Each step is a function of objects elsewhere; here is only their order, and what happens
when the API server refuses. Passes are triggered by the resource, its DaemonSets, where their pods are, the ConfigMap
that it names, the other resources of its kind and, when there are any, by labels of nodes.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from accelplane.apiserver import Conflict, NotFound, StatusError, Unreachable
from accelplane.kube.cache import Cache
from accelplane.kube.client import Selection
from accelplane.kube.controller import Result, TerminalError
from accelplane.kube.informer import Informer
from accelplane.kube.jsontypes import JsonObject
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Request, request_of, untrimmed
from accelplane.kube.owners import controller_of, owner_request
from accelplane.operator import images, models, status
from accelplane.operator.configmaps import ConfigMaps
from accelplane.operator.daemonsets import render
from accelplane.operator.features import unsupported
from accelplane.operator.models import DevicePlugin
from accelplane.operator.overlap import Overlap, overlaps_of
from accelplane.operator.resources import KINDS, CustomResource, DaemonSet, Node, Pod, labels_only, own, place_only
from accelplane.operator.settings import Settings
from accelplane.operator.shared import SharedObjects
from accelplane.operator.update import Plan, plan, provisioning_on

log = logging.getLogger(__name__)

_OWNER = "owner"
_CONFIG = "config"
# A resource that there is not: to look at it is to look whether one that there was has left something.
_NONE = Request("(none)")
_NODES_AGAIN = 300.0
# A thousand pods become ready one by one, and the status has the names of all their nodes.
_SETTLE = 1.0


class PluginController:
    """The controller of one family, added to a manager."""

    def __init__(
        self, manager: Manager, family: str, settings: Settings, config_maps: ConfigMaps, nodes: Cache[Node]
    ) -> None:
        self.family = family
        self._kind = KINDS[family]
        self._settings = settings
        self._client = manager.client
        self._events = manager.events
        self._config_maps = config_maps
        self._shared = SharedObjects(manager.client, settings) if family == "gpu" else None
        ours = Selection(settings.namespace, labels=f"app=intel-{family}-plugin")
        self._resources = manager.cache(self._kind, transform=own)
        self._daemonsets = manager.cache(DaemonSet, ours, transform=untrimmed)
        self._pods = manager.cache(Pod, ours, transform=place_only)
        self._nodes = nodes
        self._looks = False
        self._controller = manager.controller(self._kind.__name__.lower(), self.reconcile)
        self._controller.for_object(self._resources, debounce=_SETTLE).owns(
            self._daemonsets, self._kind, debounce=_SETTLE
        )
        self._resources.add_index(_CONFIG, lambda each: [each.provisioning_config()])
        self._daemonsets.add_index(_OWNER, self._owner_name)
        self._pods.add_index(_OWNER, _owner_uid)
        self._resources.subscribe(self._resource_changed)
        self._pods.subscribe(self._pod_changed)
        self._nodes.subscribe(self._node_changed)
        if self._shared is not None:
            # The last resource may have gone while no operator ran.
            self._controller.starts_with(_NONE)

    # What else a pass is for

    def config_map_changed(self, name: str) -> None:
        """Has the resources looked at that name this ConfigMap."""
        for each in self._resources.by_index(_CONFIG, name):
            self._controller.enqueue(request_of(each))

    def config_maps(self) -> Iterator[str]:
        """The names of all ConfigMaps that resources name."""
        return (name for each in self._resources if (name := each.provisioning_config()))

    def _resource_changed(self, old: CustomResource | None, new: CustomResource | None) -> None:
        if old is None or new is None or _asked(old) != _asked(new):
            self._look_at_all_soon()

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None and new is not None and old.spec.nodeName == new.spec.nodeName:
            return
        pod = new or old
        reference = controller_of(pod) if pod is not None else None
        daemonset = self._daemonsets.get(Request(reference.name, self._settings.namespace)) if reference else None
        owner = owner_request(daemonset, self._kind) if daemonset is not None else None
        if owner is not None:
            self._controller.enqueue(owner, after=_SETTLE)

    def _node_changed(self, old: Node | None, new: Node | None) -> None:
        same = old is not None and new is not None and old.metadata.labels == new.metadata.labels
        if not same and len(self._resources) > 1:
            for request in self._resources.requests():
                self._controller.enqueue(request, after=_SETTLE)

    def _look_at_all_soon(self) -> None:
        # a list tells of each of its objects, and one look is enough for all of them
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look_at_all)

    def _look_at_all(self) -> None:
        self._looks = False
        for request in self._resources.requests():
            self._controller.enqueue(request)

    # One pass

    async def reconcile(self, request: Request) -> Result | None:
        """Makes the cluster be what one resource asks for."""
        resource = self._resources.get(request)
        existing = sorted(self._daemonsets.by_index(_OWNER, request.name), key=_age)
        self._config_maps.only_of(self.family, self.config_maps())
        if resource is None:
            await self._clean_up(request, existing)
            return
        if resource.metadata.deletionTimestamp:
            return
        try:
            plugin = resource.read()
        except msgspec.ValidationError as error:
            problem = f"the resource is malformed: {error}; its DaemonSet stays as it is"
            seen = _seen(existing[0].document()) if existing else None
            observed = status.Observed(daemonset=seen, nodes=self._nodes_of(seen), malformed=problem)
            await self._tell(resource, resource.bare(), observed)
            raise TerminalError(problem) from error
        await self._bring_about(resource, plugin, existing)
        await self._settle_shared(before=False)

    async def _bring_about(self, resource: CustomResource, plugin: DevicePlugin, existing: Sequence[DaemonSet]) -> None:
        plugin, replaced, not_upgraded = await self._upgraded(resource, plugin)
        documents = [each.document() for each in existing]
        missing, provisioning = await self._provisioning(plugin, documents)
        wanted = render(plugin, self._settings, provisioning=provisioning)
        planned = plan(wanted, documents, manager=self._client.field_manager)
        failure: StatusError | None = None
        there = planned.kept
        try:
            await self._settle_shared(before=True)
            if planned.apply is not None:
                there = await self._write(resource, planned, planned.apply)
            await self._delete(resource, [each for each in existing if each.metadata.name in planned.surplus])
        except StatusError as error:
            if not error.permanent:
                raise
            failure = error
            self._events.record(resource, "Warning", "Refused", str(error))
        seen = _seen(there) if there is not None else None
        observed = status.Observed(
            daemonset=seen,
            nodes=self._nodes_of(seen),
            replaced=replaced,
            config_missing=missing,
            overlaps=self._overlaps(plugin),
            original_images=images.original_images(plugin, self._settings.images),
            unsupported=unsupported(plugin, self._settings.images),
            failure=str(failure) if failure else "",
        )
        await self._tell(resource, plugin, observed)
        if failure is not None:
            raise failure
        if not_upgraded is not None and not not_upgraded.permanent:
            raise not_upgraded

    async def _clean_up(self, request: Request, existing: Sequence[DaemonSet]) -> None:
        """Deletes what a resource left behind that is gone; the cache may only not have seen it yet, so ask."""
        if existing:
            try:
                await self._client.get(self._kind, request.name)
            except NotFound:
                log.info("%s %s is gone: deletes its DaemonSets", self._kind.__name__, request)
            else:
                return
        for each in existing:
            if not each.metadata.deletionTimestamp:
                name, namespace = each.metadata.name or "", each.metadata.namespace or ""
                await self._client.delete(DaemonSet, name, namespace, uid=each.metadata.uid)
        await self._settle_shared(before=False)

    async def _settle_shared(self, *, before: bool) -> None:
        """Makes what GPU plugins share before their DaemonSets are written, and deletes it after."""
        if self._shared is None:
            return
        known = [_reads(each) for each in self._resources]
        needed = any(isinstance(each, models.GpuDevicePlugin) and each.spec.resource_manager for each in known)
        # Who cannot be read may need them.
        if needed == before and (needed or None not in known):
            await self._shared.settle(needed=needed)

    async def _upgraded(
        self, resource: CustomResource, plugin: DevicePlugin
    ) -> tuple[DevicePlugin, Sequence[images.Replacement], StatusError | None]:
        """The resource with the images to run, those that are other ones than it names, and why it names others."""
        upgraded, replaced = images.upgrade(plugin, self._settings.images)
        if not replaced or self._settings.images.upgrade != "spec":
            return upgraded, replaced, None
        change = {
            "metadata": {"resourceVersion": resource.metadata.resourceVersion},
            "spec": {each.field: each.used for each in replaced},
        }
        try:
            written = await self._client.patch(self._kind, plugin.name, change)
        except Conflict:
            raise
        except StatusError as error:
            # No reason for the pods to wait: it may be our own webhook that is away.
            log.warning("%s %s: images cannot be upgraded in it: %s", plugin.kind, plugin.name, error)
            return upgraded, replaced, error
        for each in replaced:
            note = f"{each.field} {each.found} is upgraded to {each.used}"
            self._events.record(resource, "Normal", "ImageUpgraded", note)
        return written.read(), (), None

    async def _provisioning(self, plugin: DevicePlugin, existing: Sequence[JsonObject]) -> tuple[bool | None, str]:
        """Whether the ConfigMap that it names is missing (None: nobody knows), and the hash of its content."""
        name = models.provisioning_config(plugin.spec)
        if not name:
            return False, ""
        missing: bool | None = True
        try:
            if (found := await self._config_maps.hash(name)) is not None:
                return False, found
        except Unreachable as error:
            # No reason for the rest to wait: it may be a role that does not allow to see ConfigMaps.
            log.warning("%s %s: %s", plugin.kind, plugin.name, error)
            missing = None
        return missing, provisioning_on(existing[0]) if existing else ""

    async def _write(self, resource: CustomResource, planned: Plan, wanted: JsonObject) -> JsonObject:
        made = msgspec.convert(wanted, DaemonSet)
        name, namespace = made.metadata.name or "", made.metadata.namespace or ""
        if planned.creates:
            await self._check_name(made)
        elif planned.managed_fields is not None:
            # With the version that they were read at: somebody else may own more by now, and that is a conflict.
            version = _seen(planned.kept or {}).metadata.resource_version
            change = [
                {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
                {"op": "replace", "path": "/metadata/managedFields", "value": planned.managed_fields},
            ]
            await self._client.patch(DaemonSet, name, change, namespace=namespace)
        written = await self._client.apply(made)
        if planned.creates:
            log.info("%s %s: DaemonSet %s/%s created", self._kind.__name__, resource.metadata.name, namespace, name)
            self._events.record(resource, "Normal", "Created", f"DaemonSet {namespace}/{name} created")
        else:
            told = "; ".join(planned.differences)
            log.info(
                "%s %s: DaemonSet %s/%s updated: %s",
                self._kind.__name__, resource.metadata.name, namespace, name, told,
            )  # fmt: skip
            self._events.record(resource, "Normal", "Updated", f"DaemonSet {namespace}/{name} updated: {told}")
        return written.document()

    async def _check_name(self, made: DaemonSet) -> None:
        """An apply would take over what has the name already. Raises `StatusError`."""
        name, namespace = made.metadata.name or "", made.metadata.namespace or ""
        try:
            there = await self._client.get(DaemonSet, name, namespace)
        except NotFound:
            return
        if owner_request(there, self._kind) != owner_request(made, self._kind):
            raise StatusError(
                f"APPLY daemonset {namespace}/{name}", "there is one of this name that is not the resource's", code=409
            )
        if there.metadata.uid and _controller_uid(there) != _controller_uid(made):
            raise Conflict(f"APPLY daemonset {namespace}/{name}", "it belongs to a resource that is gone")

    async def _delete(self, resource: CustomResource, surplus: Sequence[DaemonSet]) -> None:
        for each in surplus:
            name, namespace = each.metadata.name or "", each.metadata.namespace or ""
            if await self._client.delete(DaemonSet, name, namespace, uid=each.metadata.uid):
                self._events.record(
                    resource, "Normal", "Deleted", f"DaemonSet {namespace}/{name}: one too many, deleted"
                )

    def _nodes_of(self, seen: status.SeenDaemonSet | None) -> list[str]:
        pods = self._pods.by_index(_OWNER, seen.metadata.uid) if seen is not None else []
        return [each.spec.nodeName for each in pods]

    def _overlaps(self, plugin: DevicePlugin) -> Sequence[Overlap]:
        return overlaps_of(plugin, self.others(plugin.name), self.node_labels()) if len(self._resources) > 1 else ()

    def others(self, name: str) -> list[DevicePlugin]:
        """The other resources of the kind, as far as they can be read."""
        read = (_reads(each) for each in self._resources if each.metadata.name != name)
        return [each for each in read if each is not None]

    def node_labels(self) -> Mapping[str, Mapping[str, str]]:
        """Labels of all nodes, by name."""
        return {each.metadata.name or "": each.metadata.labels or {} for each in self._nodes}

    async def _tell(self, resource: CustomResource, plugin: DevicePlugin, observed: status.Observed) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        new = status.status(plugin, observed, now)
        if new == plugin.status:
            return
        before = plugin.status.effective_image if plugin.status else ""
        if new.effective_image and new.effective_image != before:
            self._events.record(resource, "Normal", "ImageOverridden", f"{new.effective_image} runs")
        try:
            await self._client.patch(self._kind, plugin.name, status.patch(new), subresource="status")
        except NotFound:
            log.info("%s %s is gone: no status to write", plugin.kind, plugin.name)

    def _owner_name(self, daemonset: DaemonSet) -> Sequence[str]:
        owner = owner_request(daemonset, self._kind)
        return [owner.name] if owner else []


def controllers(
    manager: Manager, families: Sequence[str], settings: Settings, *, wait: float = 10.0
) -> Mapping[str, PluginController]:
    """The controllers of these families, by family, added to a manager.

    `wait` is how long, in seconds, a resource waits for news of the ConfigMap that it names.
    """
    made: dict[str, PluginController] = {}

    def changed(name: str) -> None:
        for each in made.values():
            each.config_map_changed(name)

    config_maps = ConfigMaps(
        manager.client, settings.namespace, changed, watch_timeouts=manager.watch_timeouts, wait=wait
    )
    manager.add_runnable(config_maps.run)
    # None of the manager's: not everybody's role allows to list nodes, and the rest works without.
    informer = Informer(manager.client, watch_timeouts=manager.watch_timeouts)
    nodes = informer.cache(Node, transform=labels_only)
    manager.add_runnable(lambda: informer.run_when_permitted(_without_nodes, retry=_NODES_AGAIN))
    for family in families:
        made[family] = PluginController(manager, family, settings, config_maps, nodes)
    return made


def _without_nodes(_error: StatusError) -> None:
    log.info("nodes may not be listed: where two resources of a kind select the same ones is not told")


def _asked(resource: CustomResource) -> tuple[str | None, int | None]:
    """Changes with what is asked for, also when the resource was deleted and made again unseen."""
    return resource.metadata.uid, resource.metadata.generation


def _controller_uid(daemonset: DaemonSet) -> str:
    """The uid of the resource that a DaemonSet belongs to."""
    reference = controller_of(daemonset)
    return reference.uid if reference else ""


def _owner_uid(pod: Pod) -> Sequence[str]:
    reference = controller_of(pod)
    return [reference.uid] if reference else []


def _age(daemonset: DaemonSet) -> tuple[str, str]:
    return daemonset.metadata.creationTimestamp or "", daemonset.metadata.name or ""


def _seen(daemonset: JsonObject) -> status.SeenDaemonSet:
    return msgspec.convert(daemonset, status.SeenDaemonSet)


def _reads(resource: CustomResource) -> DevicePlugin | None:
    try:
        return resource.read()
    except msgspec.ValidationError:
        return None
