"""The controller of one kind of custom resources: a DaemonSet for each resource, and its status.

A reconcile reads the resource, upgrades its images, renders its DaemonSet, plans the changes (`update`), writes them,
and writes the status. Each step is a function of objects in another module; this one has their order and the handling
of errors. A reconcile is triggered by the resource, its DaemonSets, the nodes of their pods, the ConfigMap that it
names and, if there are several resources of the kind, by those and by labels of nodes.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from accelplane.apiserver import NotFound, StatusError, Unreachable
from accelplane.apiserver.errors import ApiError
from accelplane.kube.cache import UnreadableObject
from accelplane.kube.client import Selection
from accelplane.kube.controller import Result, TerminalError
from accelplane.kube.customresource import CustomResource, compact
from accelplane.kube.ensure import NameConflict
from accelplane.kube.jsontypes import JsonObject, as_mapping
from accelplane.kube.kinds import NodeLabels
from accelplane.kube.manager import Manager
from accelplane.kube.namedcaches import NamedCaches
from accelplane.kube.names import is_dns_subdomain
from accelplane.kube.objects import Request, request_of, untrimmed
from accelplane.kube.owners import controller_of, owner_request
from accelplane.kube.status import apply_status
from accelplane.kube.writebudget import WriteBudget
from accelplane.operator import images, models, status
from accelplane.operator.children import Children, OtherNamespace
from accelplane.operator.classcontroller import DeviceClasses, FpgaClassController
from accelplane.operator.daemonsets import provisioning_hash, render
from accelplane.operator.daemonsets.dra import driver, uses_dra
from accelplane.operator.features import unsupported_fields
from accelplane.operator.models import DevicePlugin
from accelplane.operator.nodes import Nodes
from accelplane.operator.overlap import Overlap, overlaps_of
from accelplane.operator.resources import (
    KINDS,
    ConfigMap,
    DaemonSet,
    NamedDaemonSet,
    Pod,
    place_only,
    provisioning_config,
    read,
    read_without_spec,
)
from accelplane.operator.settings import Settings
from accelplane.operator.shared import BindingConflict, RightsMissing, shared_objects
from accelplane.operator.specimages import SpecImages, Upgraded
from accelplane.operator.update import plan, provisioning_on
from accelplane.operator.validation import DRA_NOT_INSTALLED

log = logging.getLogger(__name__)

_OWNER = "owner"
_CONFIG = "config"
# The request of no resource: its reconcile deletes shared objects of the last resource.
_NONE = Request("(none)")
# A thousand pods may become ready one after the other, and the status has the names of their nodes.
_DEBOUNCE = 1.0
# No watch reports the deletion of these objects: a DaemonSet in another namespace, a ClusterRoleBinding.
_UNWATCHED = (OtherNamespace, BindingConflict, RightsMissing)
_UNWATCHED_RETRY = 30.0


class PluginController:
    """The controller of one family, added to a manager."""

    def __init__(
        self,
        manager: Manager,
        family: str,
        settings: Settings,
        *,
        config_maps: NamedCaches[ConfigMap],
        foreign: NamedCaches[NamedDaemonSet],
        nodes: Nodes,
        classes: DeviceClasses | None = None,
    ) -> None:
        self.family = family
        self._kind = KINDS[family]
        self._settings = settings
        self._client = manager.client
        self._events = manager.events
        self._config_maps = config_maps
        self._foreign = foreign
        # Of the resources, in which images and the status are written.
        self._budget = WriteBudget()
        self._images = SpecImages(manager.client, manager.events, settings.images, self._budget)
        self._shared = shared_objects(manager.client, family, settings)
        own_pods = Selection(settings.namespace, labels=f"app=intel-{family}-plugin")
        self._resources = manager.cache(self._kind, transform=compact, optional=True)
        self._daemonsets = manager.cache(DaemonSet, own_pods, transform=untrimmed)
        self._pods = manager.cache(Pod, own_pods, transform=place_only)
        self._nodes = nodes
        self._classes = classes
        self._enqueues_all = False
        self._controller = manager.controller(self._kind.__name__.lower(), self.reconcile)
        self._controller.for_object(self._resources, debounce=_DEBOUNCE).owns(
            self._daemonsets, self._kind, debounce=_DEBOUNCE
        )
        self._resources.add_index(_CONFIG, lambda each: [provisioning_config(each)])
        self._children = Children(manager, self._kind, settings, self._daemonsets)
        self._pods.add_index(_OWNER, _owner_uid)
        self._resources.subscribe(self._resource_changed)
        self._pods.subscribe(self._pod_changed)
        self._nodes.cache.subscribe(self._node_changed)
        if classes is not None:
            classes.subscribe(self._enqueue_all_soon)
        if self._shared:
            # The last resource may have been deleted while no operator ran.
            self._controller.starts_with(_NONE)

    # Further triggers

    def config_map_changed(self, name: str) -> None:
        """Reconciles the resources that name this ConfigMap."""
        for each in self._resources.by_index(_CONFIG, name):
            self._controller.enqueue(request_of(each))

    def config_maps(self) -> Iterator[str]:
        """The names of all ConfigMaps that resources name."""
        return (name for each in self._resources if (name := provisioning_config(each)))

    def _resource_changed(self, old: CustomResource | None, new: CustomResource | None) -> None:
        if old is None or new is None or _version(old) != _version(new):
            self._enqueue_all_soon()

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None and new is not None and old.spec.nodeName == new.spec.nodeName:
            return
        pod = new or old
        reference = controller_of(pod) if pod is not None else None
        daemonset = self._daemonsets.get(Request(reference.name, self._settings.namespace)) if reference else None
        owner = owner_request(daemonset, self._kind) if daemonset is not None else None
        if owner is not None:
            self._controller.enqueue(owner, after=_DEBOUNCE)

    def _node_changed(self, old: NodeLabels | None, new: NodeLabels | None) -> None:
        same = old is not None and new is not None and old.metadata.labels == new.metadata.labels
        if not same and len(self._resources) > 1:
            for request in self._resources.requests():
                self._controller.enqueue(request, after=_DEBOUNCE)

    def _enqueue_all_soon(self) -> None:
        # A list notifies for each of its objects. One call is enough for all of them.
        if not self._enqueues_all:
            self._enqueues_all = True
            asyncio.get_running_loop().call_soon(self._enqueue_all)

    def _enqueue_all(self) -> None:
        self._enqueues_all = False
        for request in self._resources.requests():
            self._controller.enqueue(request)

    # Reconcile

    async def reconcile(self, request: Request) -> Result | None:
        """Makes the DaemonSet and the status match one resource."""
        # Without the nodes, overlaps would disappear from the statuses at each start.
        await self._nodes.wait()
        resource = self._resources.get(request)
        existing = self._children.cached(request)
        self._config_maps.use(self.family, self.config_maps())
        if resource is None:
            return await self._clean_up(request, existing)
        if resource.metadata.deletionTimestamp:
            return None
        try:
            plugin = read(resource)
        except msgspec.ValidationError as error:
            problem = f"the resource is malformed: {error}; its DaemonSet stays as it is"
            observed_daemonset = _seen(existing[0]) if existing else None
            observed = status.Observation(
                daemonset=observed_daemonset, nodes=self._nodes_of(observed_daemonset), malformed=problem
            )
            await self._update_status(resource, read_without_spec(resource), observed)
            raise TerminalError(problem) from error
        result = await self._reconcile_daemonset(resource, plugin)
        await self._reconcile_shared(before=False)
        return result

    async def _reconcile_daemonset(self, resource: CustomResource, plugin: DevicePlugin) -> Result | None:
        upgraded = await self._images.upgraded(resource, plugin)
        plugin = upgraded.plugin
        failure: ApiError | None = None
        try:
            existing = await self._children.existing(resource, plugin)
        except OtherNamespace as error:
            existing, failure = self._children.cached(request_of(resource)), error
        documents = [each.document() for each in existing]
        missing, provisioning = await self._provisioning(plugin, documents)
        planned = plan(render(plugin, self._settings, provisioning=provisioning), documents)
        key = Request(planned.child.metadata.name, self._settings.namespace)
        current = next((each for each in existing if request_of(each) == key), None)
        action, retries = "", [upgraded.retry_after]
        if failure is None:
            try:
                if uses_dra(plugin) and not self._settings.dra_role:
                    raise RightsMissing(f"{plugin.kind} {plugin.name}", DRA_NOT_INSTALLED)
                retries.append(await self._reconcile_shared(before=True))
                ensured = await self._children.ensure(resource, planned, current)
                action, current = ensured.action, ensured.found
                surplus = [each for each in existing if each.metadata.name in planned.surplus]
                retries += [ensured.retry_after, await self._children.delete_surplus(resource, surplus)]
            except (StatusError, NameConflict, BindingConflict, RightsMissing) as error:
                if isinstance(error, StatusError) and not error.permanent:
                    raise
                failure = error
        await self._report_conflict(request_of(resource), key.name, failure)
        observed = self._observation(upgraded, current, key, failure, action)
        if failure is not None:
            self._events.record(resource, "Warning", observed.failure_reason, observed.failure)
        if new_conflict := status.new_class_conflict(plugin, observed):
            self._events.record(resource, "Warning", status.DEVICE_CLASS_CONFLICT, new_conflict)
        await self._update_status(resource, plugin, msgspec.structs.replace(observed, config_missing=missing))
        if isinstance(failure, _UNWATCHED):
            log.warning("%s %s: %s", plugin.kind, plugin.name, failure)
            return Result(requeue_after=_UNWATCHED_RETRY)
        if failure is not None:
            raise failure
        if upgraded.error is not None and not upgraded.error.permanent:
            raise upgraded.error
        delays = [each for each in (*retries, self._children.backoff.expiry(key)) if each > 0]
        return Result(requeue_after=min(delays)) if delays else None

    def _observation(
        self, upgraded: Upgraded, daemonset: DaemonSet | None, key: Request, failure: ApiError | None, action: str
    ) -> status.Observation:
        observed_daemonset = _seen(daemonset) if daemonset is not None else None
        plugin, is_conflict = upgraded.plugin, isinstance(failure, (NameConflict, *_UNWATCHED))
        return status.Observation(
            daemonset=observed_daemonset,
            nodes=self._nodes_of(observed_daemonset),
            replaced=upgraded.replaced,
            overlaps=self._overlaps(plugin),
            original_images=images.original_images(plugin, self._settings.images),
            unsupported=unsupported_fields(plugin, self._settings.images),
            failure=str(failure) if failure else "",
            failure_reason=type(failure).__name__ if is_conflict else "WriteRejected",
            conflicts=(*self._children.backoff.conflicts(key), *upgraded.conflicts),
            outdated=action == "postponed",
            class_conflicts=self._classes.conflicts(driver(plugin)) if self._classes and uses_dra(plugin) else None,
        )

    async def _report_conflict(self, request: Request, name: str, failure: Exception | None) -> None:
        """Watches the DaemonSet that has the name of this resource's one, so that its deletion is noticed."""
        user = f"{self.family}/{request.name}"
        if not isinstance(failure, NameConflict):
            self._foreign.use(user, ())
            return
        self._foreign.use(user, [name])
        try:
            if await self._foreign.get(name) is None:
                self._controller.enqueue(request)  # it was deleted before the watch began
        except Unreachable as error:
            log.warning("%s %s: DaemonSet %s is not watched: %s", self._kind.__name__, request, name, error)

    def foreign_changed(self, name: str) -> None:
        """Enqueues the resource whose DaemonSet has the name of an object that was deleted or has another owner."""
        prefix = f"intel-{self.family}-plugin-"
        if name.startswith(prefix):
            self._controller.enqueue(Request(name.removeprefix(prefix)))

    async def _clean_up(self, request: Request, existing: Sequence[DaemonSet]) -> Result | None:
        delay = await self._children.delete_all(request, existing)
        self._foreign.use(f"{self.family}/{request.name}", ())
        await self._reconcile_shared(before=False)
        return Result(requeue_after=delay) if delay else None

    async def _reconcile_shared(self, *, before: bool) -> float:
        """Creates the shared objects of plugins before their DaemonSets, and deletes them afterwards.

        Returns the seconds until the next check.
        """
        known = [_reads(each) for each in self._resources] if self._shared else []
        delays: list[float] = []
        for shared in self._shared:
            users = [each for each in known if each is not None and shared.needed_by(each)]
            # Who cannot be read may need them.
            if bool(users) == before and (users or None not in known):
                delays.append(await shared.reconcile(users, complete=None not in known))
        return min((each for each in delays if each > 0), default=0.0)

    async def _provisioning(self, plugin: DevicePlugin, existing: Sequence[JsonObject]) -> tuple[bool | None, str]:
        """Whether the named ConfigMap is missing (None: unknown), and the hash of its content."""
        name = models.provisioning_config(plugin.spec)
        if not name:
            return False, ""
        missing: bool | None = True
        try:
            found = await self._config_maps.get(name) if is_dns_subdomain(name) else None
            if found is not None:
                return False, provisioning_hash(found.data or {}, found.binaryData)
        except (Unreachable, UnreadableObject) as error:
            # Not a reason to delay everything else: the role may not allow to read ConfigMaps.
            log.warning("%s %s: %s", plugin.kind, plugin.name, error)
            missing = None
        return missing, provisioning_on(existing[0]) if existing else ""

    def _nodes_of(self, observed_daemonset: status.SeenDaemonSet | None) -> list[str]:
        pods = self._pods.by_index(_OWNER, observed_daemonset.metadata.uid) if observed_daemonset is not None else []
        return [each.spec.nodeName for each in pods]

    def _overlaps(self, plugin: DevicePlugin) -> Sequence[Overlap]:
        if len(self._resources) <= 1:
            return ()
        return overlaps_of(plugin, self.other_resources(plugin.name), self.node_labels())

    def other_resources(self, name: str) -> list[DevicePlugin]:
        """The other resources of the kind, as far as they can be read."""
        read = (_reads(each) for each in self._resources if each.metadata.name != name)
        return [each for each in read if each is not None]

    def node_labels(self) -> Mapping[str, Mapping[str, str]]:
        """Labels of all nodes, by name."""
        return self._nodes.labels()

    async def _update_status(
        self, resource: CustomResource, plugin: DevicePlugin, observed: status.Observation
    ) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        new = status.status(plugin, observed, now)
        if new == plugin.status:
            return
        key = request_of(resource)
        if (delay := self._budget.delay(key)) > 0:
            self._controller.enqueue(key, after=delay)
            return
        before = plugin.status.effective_image if plugin.status else ""
        if new.effective_image and new.effective_image != before:
            self._events.record(resource, "Normal", "ImageOverridden", f"{new.effective_image} runs")
        try:
            if await apply_status(self._client, resource, new, as_mapping(resource.document().get("status"))):
                self._budget.record(key)
        except NotFound:
            log.info("%s %s: deleted, so its status is not written", plugin.kind, plugin.name)


def controllers(
    manager: Manager, families: Sequence[str], settings: Settings, *, wait: float = 10.0, requires_nodes: bool = False
) -> Mapping[str, PluginController]:
    """The controllers of these families, by family, added to a manager.

    `wait` is how long, in seconds, a resource waits for the ConfigMap that it names, and for the nodes.
    `requires_nodes`: other controllers of the manager do not start without the nodes; one watch serves all.
    """
    controllers_by_family: dict[str, PluginController] = {}

    def config_map_changed(name: str, _old: ConfigMap | None, _new: ConfigMap | None) -> None:
        for each in controllers_by_family.values():
            each.config_map_changed(name)

    def foreign_changed(name: str, old: NamedDaemonSet | None, new: NamedDaemonSet | None) -> None:
        if old is not None and (new is None or new.metadata.ownerReferences != old.metadata.ownerReferences):
            for each in controllers_by_family.values():
                each.foreign_changed(name)

    timeouts = manager.watch_timeouts
    config_maps = NamedCaches(
        manager.client, ConfigMap, settings.namespace, config_map_changed, watch_timeouts=timeouts, timeout=wait
    )
    foreign = NamedCaches(
        manager.client, NamedDaemonSet, settings.namespace, foreign_changed, watch_timeouts=timeouts, timeout=wait
    )
    manager.add_runnable(config_maps.run)
    manager.add_runnable(foreign.run)
    nodes = Nodes(manager, timeout=wait, required=requires_nodes)
    classes = DeviceClasses(manager) if settings.dra_role else None
    if classes is not None and "fpga" in families:
        FpgaClassController(manager, settings, classes)
    for family in families:
        controllers_by_family[family] = PluginController(
            manager, family, settings, config_maps=config_maps, foreign=foreign, nodes=nodes, classes=classes
        )
    return controllers_by_family


def _version(resource: CustomResource) -> tuple[str | None, int | None]:
    """Changes with the spec, also if the resource was deleted and created again between two events."""
    return resource.metadata.uid, resource.metadata.generation


def _owner_uid(pod: Pod) -> Sequence[str]:
    reference = controller_of(pod)
    return [reference.uid] if reference else []


def _seen(daemonset: DaemonSet) -> status.SeenDaemonSet:
    return msgspec.convert(daemonset.document(), status.SeenDaemonSet)


def _reads(resource: CustomResource) -> DevicePlugin | None:
    try:
        return read(resource)
    except msgspec.ValidationError:
        return None
