"""The DRA driver of one plugin: it prepares claims, publishes slices and serves the kubelet, from one set of units."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from msgspec import Struct

from accelplane.apiserver import ApiServer
from accelplane.devices import Unit, natural
from accelplane.dra import catalog
from accelplane.dra.catalog import Evict
from accelplane.dra.events import EventWriter, Reason
from accelplane.dra.families.devices import other
from accelplane.dra.model import ClaimRef, DeviceHealth, DeviceName, Features, Offer, Pool
from accelplane.dra.preparer import Preparer
from accelplane.dra.publisher import Pace, SlicePublisher
from accelplane.dra.service import CHECK_INTERVAL, DriverService
from accelplane.dra.slicewatch import SliceWatches
from accelplane.host import Host
from accelplane.kubelet.notifier import Notifier
from accelplane.kubelet.podresources import PodResources
from accelplane.node.dra.family import FamilyUnits
from accelplane.node.dra.observednode import ObservedNode
from accelplane.node.publishers.labels import LabelFile, dra_label_path
from accelplane.node.settings import Settings
from accelplane.node.status import DraStatus, DraUnit
from accelplane.node.watcher import Watcher
from accelplane.plugins.base import Plugin

log = logging.getLogger(__name__)

_MAX_EVENTS = 8
_CDI_DELAY = 1.0  # other files may be removed at the same time
# A driver is replaced when one of these changes.
_SETTINGS = ("dra_evict", "dra_manage_binding", "dra_device_status", "dra_take_over")


class NodeAccess(Struct, frozen=True, kw_only=True):
    """The API server, the name of this node, and the UID of the pod of this process, empty outside of a pod."""

    api: ApiServer
    node: str
    instance: str = ""


class Driver:
    """The driver `name` while `run` runs. It implements `DriverView` for the units of its family."""

    def __init__(
        self,
        plugin: Plugin[Any],
        units: FamilyUnits,
        access: NodeAccess,
        pace: Pace,
        watches: SliceWatches,
        *,
        events: EventWriter,
        watcher: Watcher,
        changed: Notifier,
    ) -> None:
        """The driver of the plugin's namespace. `changed` is notified after changes of the status.

        Raises `ValueError` for a namespace that cannot be the name of a driver.
        """
        settings = self._settings = units.settings
        self.name = name = plugin.namespace
        self._family = other(plugin.attribute_defaults, plugin.capacity_defaults)
        self._units = units
        self._node = ObservedNode(access.api, access.node, name, units.served)
        self._pool_name = access.node
        self._watcher = watcher
        self._changed = changed
        self._writer = events
        self._events: list[str] = []
        self._named: Mapping[str, Offer] | None = None  # the offers that `_device_names` are of
        self._device_names: Mapping[str, DeviceName] = {}
        self._publisher = SlicePublisher(
            access.api,
            access.node,
            name,
            pace=pace,
            watches=watches,
            always=units.is_named,
            on_event=self._record_event,
            changed=self._slices_changed,
        )
        self._label = LabelFile(dra_label_path(settings.nfd_dir, name)) if settings.nfd_dir else None
        self._preparer = self._make_preparer(access)
        self._cdi_changed = asyncio.Event()
        self._health_changed = Notifier()
        self._registrations = Notifier()
        self._service = DriverService(
            name,
            settings.kubelet_dir,
            self._preparer,
            self._health,
            self._health_changed,
            pool=access.node,
            kubelet_version=lambda: self._node.kubelet,
            registered=self._set_registered,
            on_event=self._record_event,
            instance=access.instance,
            check_interval=lambda: settings.safety_interval if watcher.complete else CHECK_INTERVAL,
        )

    def _make_preparer(self, access: NodeAccess) -> Preparer:
        settings = self._settings
        return Preparer(
            access.api,
            self.name,
            access.node,
            self._units,
            directory=f"{settings.kubelet_dir}/plugins/{self.name}",
            cdi_dir=settings.cdi_dir,
            cdi_groups=settings.cdi_groups,
            host=Host(settings.root),
            manage_binding=settings.dra_manage_binding,
            holders=PodResources(settings.pod_resources_socket).list_holders,
            names=self._names,
            on_event=self._record_event,
            device_status=settings.dra_device_status,
            take_over=settings.dra_take_over,
        )

    async def run(self) -> None:
        """Serves until `stop`, or until cancelled. Raises `JournalError` or `OSError` without a usable journal."""
        await self._preparer.restore()
        self._units.driver = self
        self._watcher.directories(self._subscriber, self._service.directories, self._service.wake.notify_all)
        self._watcher.directories(f"cdi {self._subscriber}", (self._settings.cdi_dir,), self._cdi_changed.set)
        self._change_label(LabelFile.remove_of_earlier_boot)  # the kubelet has deleted the slices
        self._update()
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._publisher.run(), self._follow_units(), self._follow_claims(), self._read_node(),
                self._follow_cdi_files(),
            )
        ]  # fmt: skip
        served = asyncio.create_task(self._service.run())
        try:
            await asyncio.wait((*tasks, served), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._watcher.forget(self._subscriber)
            self._watcher.forget(f"cdi {self._subscriber}")
            for task in (*tasks, served):
                task.cancel()
            results = await asyncio.gather(*tasks, served, return_exceptions=True)
            await self._preparer.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def stop(self) -> None:
        """Ends `run` when the kubelet's calls in progress have ended, or after 25 s."""
        self._service.stop()

    # For the units

    def prepared(self) -> Mapping[str, Sequence[str]]:
        return self._preparer.prepared()

    def held(self) -> Collection[str]:
        return self._preparer.held()

    def bound(self) -> Mapping[str, Unit]:
        return self._preparer.bound()

    def cleanup(self) -> Mapping[str, str]:
        return self._preparer.cleanup()

    async def idle(self) -> None:
        await self._preparer.idle()

    def published(self) -> Collection[str] | None:
        return self._publisher.published

    def is_current(self, settings: Settings) -> bool:
        """Whether the driver runs with these settings."""
        return all(getattr(settings, name) == getattr(self._settings, name) for name in _SETTINGS)

    @property
    def is_unused(self) -> bool:
        """Whether no claim is prepared and no unit published."""
        return not self.prepared() and self.published() == frozenset()

    @property
    def prepared_or_unprepared(self) -> int:
        """The number of claims for which this driver has changed what containers have."""
        return self._service.counters.prepared + self._service.counters.unprepared

    def status(self) -> DraStatus:
        service, offers = self._service.status, self._units.units()
        prepared, held, published = self.prepared(), self._preparer.held_devices(), self._publisher.units
        taints = self._publisher.taints
        devices: dict[str, list[str]] = {}
        for device, name in self._names().items():
            devices.setdefault(name.unit, []).append(device)
        units_problems = (self._units.problem, self._units.other_plugin.problem)
        problems = [service.problem, *units_problems, *self._publisher.problems, self._node.problem]
        return DraStatus(
            driver=self.name,
            pool=self._pool_name,
            stage=service.stage,
            publishing=service.publishing,
            problems=tuple(filter(None, problems)),
            limitations=tuple(self._publisher.limitations),
            events=tuple(self._events),
            prepares=self._service.counters.prepared,
            prepare_failures=self._service.counters.prepare_failures,
            unprepares=self._service.counters.unprepared,
            unprepare_failures=self._service.counters.unprepare_failures,
            units={
                id_: DraUnit(
                    unit=offers[id_].unit.health if id_ in offers else id_,
                    owner=offers[id_].owner if id_ in offers else "none",
                    state=offers[id_].state if id_ in offers else "gone",
                    text=offers[id_].text if id_ in offers else "",
                    published=id_ in published,
                    taints=taints.get(id_, ()),
                    devices=devices.get(id_, ()),
                    claims=prepared.get(id_, ()),
                    shares=shares,
                    held=min(shares, held.get(id_, 0)),
                )
                for id_ in sorted(offers.keys() | prepared.keys(), key=natural)
                for shares in (offers[id_].shares if id_ in offers else 1,)
            },
        )

    @property
    def _subscriber(self) -> str:
        return f"dra {self.name}"

    def _names(self) -> Mapping[str, DeviceName]:
        offers = self._units.units()
        if offers is not self._named:
            # In this order, for other threads.
            self._device_names = catalog.device_names(self.name, offers)
            self._named = offers
        return self._device_names

    def _health(self) -> Sequence[DeviceHealth]:
        return catalog.health(self.name, self._units.units())

    def _pool(self, features: Features) -> Pool:
        return catalog.pool(
            self.name,
            self._pool_name,
            self._units.units(),
            features,
            held=self.prepared().keys(),
            evict=next(each for each in get_args(Evict) if each == self._settings.dra_evict),
            other=self._family,
        )

    def _update(self) -> None:
        self._publisher.set_pool(self._pool)
        self._health_changed.notify_all()
        self._changed.notify_all()

    def _slices_changed(self) -> None:
        # Autoscalers can wait for the label: a node is Ready before it has slices.
        labels = {f"{self.name}/dra": "published"} if self._publisher.units else {}
        self._change_label(lambda file: file.write(labels))
        self._changed.notify_all()

    def remove_label(self) -> None:
        """After the end of the driver. Otherwise the label stays for the next process, as the slices do."""
        self._change_label(LabelFile.remove)

    def _change_label(self, change: Callable[[LabelFile], object]) -> None:
        if self._label is not None:
            try:
                change(self._label)
            except OSError as error:
                log.warning("%s: label not changed: %s", self.name, error)

    async def _follow_units(self) -> None:
        while True:
            await self._units.changed()
            self._update()

    async def _follow_claims(self) -> None:
        """Claims change slices and health only by the units, whose states depend on claims."""
        while True:
            await self._preparer.changed()
            self._changed.notify_all()

    async def _follow_cdi_files(self) -> None:
        """Restores files of claims: containers that restart need them, and the kubelet does not prepare again."""
        while True:
            await self._cdi_changed.wait()
            await asyncio.sleep(_CDI_DELAY)
            self._cdi_changed.clear()
            await self._preparer.restore_files()

    async def _read_node(self) -> None:
        """After each registration: a kubelet that starts may be another version."""
        while True:
            count, problem = self._registrations.count, self._node.problem
            delay = await self._node.read()
            if self._node.problem not in ("", problem):
                self._record_event("ResourceLeft", self._node.problem)
            elif self._node.problem != problem:
                self._changed.notify_all()
            if self._registrations.count == count:
                await self._registrations.wait(delay)

    def _set_registered(self, registered: bool) -> None:
        self._publisher.registered(registered)
        self._registrations.notify_all()
        self._changed.notify_all()

    def _record_event(self, reason: Reason, text: str, claim: ClaimRef | None = None) -> None:
        """Of the node, or of a claim."""
        self._writer.record(self.name, reason, text, claim)
        about = f" claim {claim.namespace}/{claim.name}:" if claim is not None else ""
        line = f"{reason}:{about} {text}"
        if line not in self._events:
            self._events = [*self._events, line][-_MAX_EVENTS:]
        self._changed.notify_all()
