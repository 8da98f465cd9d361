"""Writes the device classes of FPGA functions and regions, and watches the device classes of the cluster.

The classes exist while an FpgaDevicePlugin has devices for claims. This resource controls them, which is the evidence
that a class is the operator's, and lets the garbage collector delete them with it. A class of another program with the
same name or the same extended resource name stays as it is, and is reported in the status of the resource.

It works with the rights of `deploy/operator/components/dra` on Kubernetes 1.34 and newer. Without them nothing is
written and reported.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from accelplane.admission.mappings import AcceleratorFunction, FpgaRegion, remove_metadata
from accelplane.apiserver import StatusError
from accelplane.apiserver.errors import ApiError
from accelplane.fpga.ids import NAMESPACE
from accelplane.kube.controller import Result
from accelplane.kube.customresource import CustomResource, compact
from accelplane.kube.driftbackoff import DriftBackoff
from accelplane.kube.ensure import NameConflict, delete_owned, ensure
from accelplane.kube.informer import Informer
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Request, request_of, untrimmed
from accelplane.kube.owners import owner_request
from accelplane.operator.daemonsets.dra import uses_dra
from accelplane.operator.deviceclasses import DeviceClass, fpga_classes, name_conflicts
from accelplane.operator.resources import KINDS, read
from accelplane.operator.settings import Settings

log = logging.getLogger(__name__)

_FPGA = KINDS["fpga"]
# One reconcile is for all classes: each depends on all objects with its IDs.
_ALL = Request("(all)")
_DEBOUNCE = 1.0
_UNSERVED_RETRY = 300.0


class ExtendedNameConflict(ApiError):
    """Another device class has the extended resource name of a class."""


class DeviceClasses:
    """The device classes of the cluster, and problems with those of the operator's families."""

    def __init__(self, manager: Manager) -> None:
        self._informer = Informer(manager.client, watch_timeouts=manager.watch_timeouts)
        self.cache = self._informer.cache(DeviceClass, transform=untrimmed)
        self._fpga_problems: Sequence[str] = ()
        self._subscribers: list[Callable[[], None]] = []
        self._reported = False
        self.cache.subscribe(lambda _old, _new: self._notify())
        manager.add_runnable(self._run, leader_only=True)

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Calls `subscriber` after each change of a class or of a problem."""
        self._subscribers.append(subscriber)

    @property
    def retry_after(self) -> float:
        """The seconds until the classes may be known, 0 if they are."""
        if self._informer.synced.is_set():
            return 0.0
        return _UNSERVED_RETRY if self._informer.initialized.is_set() else _DEBOUNCE

    def conflicts(self, driver: str) -> Sequence[str] | None:
        """Conflicts of the classes of a driver, one line for each. None if the classes are not known."""
        if self.retry_after:
            return None
        own = self._fpga_problems if driver == NAMESPACE else ()
        return (*own, *name_conflicts(self.cache, driver))

    def report_fpga(self, problems: Sequence[str]) -> None:
        """Sets why classes of FPGAs are not as desired."""
        if problems != self._fpga_problems:
            self._fpga_problems = problems
            self._notify()

    async def _run(self) -> None:
        await self._informer.run_while_served(self._log_rejected, retry=_UNSERVED_RETRY)

    def _notify(self) -> None:
        for each in self._subscribers:
            each()

    def _log_rejected(self, error: StatusError) -> None:
        level = logging.DEBUG if self._reported else logging.INFO
        log.log(level, "device classes are not read, and none is created for FPGAs: %s", error)
        self._reported = True


class FpgaClassController:
    """Makes the device classes match the AcceleratorFunctions and FpgaRegions of all namespaces."""

    def __init__(self, manager: Manager, settings: Settings, classes: DeviceClasses) -> None:
        self._client = manager.client
        self._settings = settings
        self._classes = classes
        self._backoff = DriftBackoff()
        self._plugins = manager.cache(_FPGA, transform=compact, optional=True)
        self._functions = manager.cache(AcceleratorFunction, transform=remove_metadata, optional=True)
        self._regions = manager.cache(FpgaRegion, transform=remove_metadata, optional=True)
        controller = manager.controller("fpgadeviceclass", self.reconcile).starts_with(_ALL)
        controller.watches(self._plugins, lambda _: (_ALL,), debounce=_DEBOUNCE)
        controller.watches(self._functions, lambda _: (_ALL,), debounce=_DEBOUNCE)
        controller.watches(self._regions, lambda _: (_ALL,), debounce=_DEBOUNCE)
        controller.watches(classes.cache, lambda _: (_ALL,), debounce=_DEBOUNCE)

    async def reconcile(self, _request: Request) -> Result | None:
        """Creates, corrects and deletes classes."""
        if (delay := self._classes.retry_after) > 0:
            return Result(requeue_after=delay)
        owners = self._owners()
        desired: Mapping[str, DeviceClass] = {}
        if owners:
            desired = fpga_classes(self._functions, self._regions, self._settings.fpga_naming)
        problems: list[str] = []
        delays: list[float] = []
        for _, each in sorted(desired.items()):
            try:
                delays.append(await self._ensure(each, owners))
            except (NameConflict, ExtendedNameConflict, StatusError) as error:
                if isinstance(error, StatusError) and not error.permanent:
                    raise
                problems.append(str(error))
        # Objects that cannot be read may need any class.
        if self._all_readable():
            for each in self._classes.cache:
                if each.metadata.name not in desired:
                    await self._delete(each)
        self._classes.report_fpga(tuple(problems))
        waiting = [each for each in delays if each > 0]
        return Result(requeue_after=min(waiting)) if waiting else None

    def _all_readable(self) -> bool:
        caches = (self._plugins, self._functions, self._regions)
        return not any(each.unreadable for each in caches) and None not in map(_uses_dra, self._plugins)

    def _owners(self) -> list[CustomResource]:
        """The resources with devices for claims, the oldest first."""
        found = [each for each in self._plugins if not each.metadata.deletionTimestamp and _uses_dra(each)]
        return sorted(found, key=lambda each: (each.metadata.creationTimestamp or "", each.metadata.name or ""))

    async def _ensure(self, desired: DeviceClass, owners: Sequence[CustomResource]) -> float:
        """Returns the seconds until the next check. Raises `NameConflict`, `ExtendedNameConflict`."""
        existing, owner = self._classes.cache.get(request_of(desired)), owners[0]
        controller = owner_request(existing, _FPGA) if existing is not None else None
        if existing is None or existing.extended_name != desired.extended_name:
            self._check_extended_name(desired)
        if existing is not None and controller is not None:
            current = next((each for each in owners if request_of(each) == controller), None)
            if current is None:
                # Its resource has no devices for claims any more. The deletion triggers the creation for another one.
                if self._all_readable():
                    await self._delete(existing)
                return 0.0
            owner = current
        ensured = await ensure(self._client, desired, owner, existing=existing, backoff=self._backoff)
        if ensured.action in ("created", "adopted", "updated"):
            log.info("DeviceClass %s %s", desired.metadata.name, ensured.action)
        return ensured.retry_after

    def _check_extended_name(self, desired: DeviceClass) -> None:
        name, resource = desired.metadata.name, desired.extended_name
        named = [each for each in self._classes.cache if each.extended_name == resource]
        others = [each.metadata.name or "" for each in named if each.metadata.name != name]
        if resource and others:
            raise ExtendedNameConflict(
                f"DeviceClass {name}",
                f"is not written because extendedResourceName {resource} is that of device class "
                f"{', '.join(sorted(others))}; remove it there",
            )

    async def _delete(self, existing: DeviceClass) -> None:
        """Deletes a class if a resource of the operator controls it."""
        controller = owner_request(existing, _FPGA)
        if controller is not None and await delete_owned(self._client, existing, _FPGA, controller):
            log.info("DeviceClass %s deleted", existing.metadata.name)


def _uses_dra(resource: CustomResource) -> bool | None:
    """None for a malformed resource."""
    try:
        return uses_dra(read(resource))
    except msgspec.ValidationError:
        return None
