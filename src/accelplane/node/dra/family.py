"""The units of one plugin, with their owners: what its runner lists to the kubelet, and what its DRA driver offers.

A unit changes its owner in this order: no API offers it; it is free in the old API; the record on the disk is changed;
the new API offers it. A unit is free of the device plugin if the kubelet's list has none of its IDs, no container holds
one, and no call names one. It is free of DRA if no claim holds it and no slice names it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from accelplane.devices import Allocation, CdiDevice, Device, Inventory, Unit, natural
from accelplane.dra.events import Reason
from accelplane.dra.families.facts import with_facts
from accelplane.dra.journal import JournalError
from accelplane.dra.model import Offer, Owner, overlap
from accelplane.dra.ownership import OwnershipError, OwnershipRecord, owner_of
from accelplane.host import Host, HostError
from accelplane.host.blocking import SerialThread, ThreadLimitError
from accelplane.host.isolation import BlockedDevices, HostThread
from accelplane.host.pci import DEVICES, pci_address
from accelplane.kubelet.notifier import Notifier
from accelplane.kubelet.server import AllocationError
from accelplane.node.advertised import Key
from accelplane.node.allocations import AllocationReader, Reading
from accelplane.node.allocator import unit_allocation
from accelplane.node.dra.driverview import NO_DRIVER, DriverView
from accelplane.node.dra.other_plugin import OtherPlugin
from accelplane.node.dra.states import UnitState, absent_state, present_state
from accelplane.node.runner import PluginRunner
from accelplane.node.settings import Settings
from accelplane.node.units import units_of

log = logging.getLogger(__name__)

_UNITS_TIMEOUT = 10.0
_FIRST_RETRY, _LAST_RETRY = 1.0, 10.0
_IDLE_TIMEOUT = 1.0


class FamilyUnits:
    """The units of the plugin `name`. All calls come from the event loop. The owner calls `close` at its end.

    It implements `UnitOwners` for the runner and `accelplane.dra.model.Offers` for the driver.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        runner: Callable[[], PluginRunner | None],
        allocations: AllocationReader,
        blocked: BlockedDevices,
        on_event: Callable[[Reason, str], None],
        record: str = "",
    ) -> None:
        """`on_event` gets reason and text of events of the node.

        `record` is the name of the record of owners, the name of the plugin if empty.
        """
        self.name = name
        self._on_event = on_event
        self.settings = settings
        self.driver: DriverView = NO_DRIVER
        self.problem = ""
        self.other_plugin = OtherPlugin(settings, on_event)
        self._runner = runner
        self._allocations = allocations
        self._record = OwnershipRecord(settings.ownership_dir, record or name)
        self._record_thread, self._host_thread = SerialThread(), HostThread(blocked)
        self._open = self._closed = False
        self._found: Mapping[str, Unit] = {}  # of the last scan
        self._absent: dict[str, tuple[Unit, str | None]] = {}  # with the driver of the function
        self._by_id: Mapping[Key, str] = {}
        self._unitless: frozenset[Key] = frozenset()  # IDs that stand for several devices
        self._owners: Mapping[str, Owner] = {}
        self._listed_owners: Mapping[str, Owner] = {}  # at the last list for the kubelet
        self._reading: Reading | None = None
        self._retry = _FIRST_RETRY
        self._owners_changed = False  # since the last report
        self._withheld_since: dict[str, float] = {}
        self._changing: frozenset[str] = frozenset()
        self._holders: Mapping[str, Sequence[str]] = {}  # containers by unit
        self._offers: Mapping[str, Offer] = {}
        self._changes = Notifier()

    # For the runner

    async def observe(self, inventory: Inventory) -> None:
        if self._closed:
            return  # the agent ends: nothing changes its owner any more
        await self._open_record()
        absent = {id_: unit for id_, (unit, _) in self._absent.items()}
        earlier = {**self.driver.bound(), **absent, **self._found}
        runner = self._runner()
        namespace = runner.context.plugin.namespace if runner is not None else ""
        try:
            async with asyncio.timeout(_UNITS_TIMEOUT):
                host = Host(self.settings.root)
                (units, drivers), _host = await self._host_thread.run(
                    host, lambda host: _read(host, namespace, inventory, earlier)
                )
        except (TimeoutError, OSError, HostError, ThreadLimitError) as error:
            self._report(f"cannot read the units: {str(error) or f'no answer within {_UNITS_TIMEOUT:g} s'}")
            return
        self._found = {unit.id: unit for unit in sorted(units, key=lambda unit: natural(unit.id))}
        self._absent = {id_: (earlier[id_], driver) for id_, driver in drivers.items() if id_ not in self._found}
        self._by_id = {
            (resource, id_): unit.id
            for unit in self._found.values()
            for resource, ids in unit.ids.items()
            for id_ in ids
        }
        self._unitless = frozenset((device.resource, device.id) for device in inventory).difference(self._by_id)
        if self._reading is None:
            # A container may have got a unit from an earlier agent that did not know the record.
            self._use_reading(await self._allocations.read(0.0, ask_kubelet=False))
        self._refresh()

    def withheld(self, inventory: Iterable[Device]) -> frozenset[Key]:
        self._listed_owners = owners = self._owners
        return frozenset(
            key
            for device in inventory
            if (key := (device.resource, device.id)) not in self._unitless
            and owners.get(self._by_id.get(key, "")) != "plugin"
        )

    def check_unclaimed(self, resource: str, ids: Iterable[str]) -> None:
        prepared = self.driver.prepared()
        for id_ in ids if prepared else ():
            unit = self._found.get(self._by_id.get((resource, id_), ""))
            held = (self._found.get(name, Unit(id=name, health=name)) for name in prepared)
            names = [each.id for each in held if unit is not None and overlap(unit, each)]
            if claims := [claim for name in names for claim in prepared[name]]:
                raise AllocationError(f"{resource}: device {id_} is held by the resource claim {', '.join(claims)}")

    # Offers

    def units(self) -> Mapping[str, Offer]:
        return self._offers

    async def changed(self) -> None:
        await self._changes.wait()

    async def allocation(self, units: Sequence[str]) -> Allocation:
        runner = self._runner()
        if runner is None:
            raise AllocationError(f"plugin {self.name} does not run")
        return await unit_allocation(runner.context, runner.cdi, [self._device(runner, id_) for id_ in units])

    def cdi_devices(self, names: Sequence[str]) -> Sequence[CdiDevice]:
        runner = self._runner()
        found = runner.context.devices.found if runner is not None else ()
        known = {device.cdi.qualified_name: device.cdi for device in found if device.cdi is not None}
        return [known[name] for name in names if name in known]

    def _device(self, runner: PluginRunner, id_: str) -> Device:
        """The device of the first ID of a unit. Raises `AllocationError`."""
        unit = self._found.get(id_)
        for resource, ids in unit.ids.items() if unit is not None else ():
            device = runner.context.devices.found.resources.get(resource, {}).get(ids[0])
            if device is not None:
                return device
        raise AllocationError(f"device {id_} is no longer on this node")

    def served(self) -> frozenset[str]:
        """The qualified names of the resources that the device plugin serves."""
        runner = self._runner()
        return frozenset(each.server.resource for each in runner.publisher.served.values()) if runner else frozenset()

    # Owners

    @property
    def uses_dra(self) -> bool:
        """Whether the family needs its DRA driver: for units, or because the setting names the family."""
        if self._reading is None:
            return False  # the first scan is not done: the claims of another driver need the units
        wanted = any(self._wanted(unit) == "dra" for unit in self._found.values())
        return bool(self._record.units) or self.is_named or wanted

    @property
    def is_named(self) -> bool:
        """Whether the setting names the family for DRA."""
        return self.settings.device_apis.families.get(self.name) == "dra"

    @property
    def is_plugin_only(self) -> bool:
        """Whether all units belong to the device plugin, now and by the settings."""
        return self._open and not self._record.units and not self.settings.device_apis.may_differ(self.name)

    async def reconcile(self) -> float | None:
        """Lets units change their owners as far as they are free. Call it after every change of the agent.

        Returns the seconds after which it should be called without one, None if that is not needed.
        """
        if not await self._open_record() or self._reading is None:
            return _FIRST_RETRY
        self._refresh()
        await self._publish()
        unlisted = [unit for unit in self._found.values() if self._is_unlisted(unit)]
        await self._read_claims()
        releasable = any(map(self._is_releasable, self._record.units))
        check = bool(unlisted) or self.other_plugin.delay == 0
        if not (check or releasable or self._record.lost):
            return self._delay()
        if check:
            await self.other_plugin.check(self._runner())
        if unlisted:
            # After the check: another plugin that has just ended may have got units for containers.
            self._use_reading(await self._allocations.read(time.monotonic()))
        if releasable:
            await self._release()
        acquired = [unit.id for unit in unlisted if self._is_unlisted(unit) and self._is_free(unit)]
        new = frozenset(acquired).difference(self._record.units)
        if new or self._record.lost:
            await self._change(new, ())
        self._refresh()
        await self._publish()
        return self._delay()

    def _delay(self) -> float | None:
        """The seconds until the next `reconcile`: soon while a unit waits for its new owner."""
        delay = self.other_plugin.delay
        waiting = any(self._is_unlisted(unit) for unit in self._found.values())
        if not waiting and not any(self._owners.get(id_) == "none" for id_ in self._record.units):
            self._report_owners()
            self._retry = _FIRST_RETRY
            return delay
        retry, self._retry = self._retry, min(2 * self._retry, _LAST_RETRY)
        return retry if delay is None else min(retry, delay)

    def _report_owners(self) -> None:
        """After changes of owners, when no other one waits."""
        if self._owners_changed:
            self._owners_changed = False
            owners = list(self._owners.values())
            self._on_event(
                "OwnersChanged",
                f"{owners.count('dra')} devices belong to DRA, {owners.count('plugin')} to the device plugin",
            )

    async def _read_claims(self) -> None:
        """Reads the claims if they keep units from a change: another instance may have unprepared them."""
        prepared = self.driver.prepared()
        if any(id_ in prepared and self._owners.get(id_) == "none" for id_ in self._record.units):
            try:
                await self._record_thread.run(self.driver.held)
            except (JournalError, ThreadLimitError) as error:
                self._report(str(error))

    async def _release(self) -> None:
        """Lets units that are free of DRA belong to the device plugin."""
        # A call that began while DRA owned a unit may not have recorded its claim yet.
        try:
            async with asyncio.timeout(_IDLE_TIMEOUT):
                await self.driver.idle()
        except TimeoutError:
            return
        await self._change((), [id_ for id_ in self._record.units if self._is_releasable(id_)])

    def _refresh(self) -> None:
        """Computes owners, states and offers from what is known now."""
        now = time.monotonic()
        owners: dict[str, Owner] = {}
        offers: dict[str, Offer] = {}
        for unit, state in self._states():
            owner = owners[unit.id] = self._owner(unit)
            if owner == "none":
                self._withheld_since.setdefault(unit.id, now)
            else:
                self._withheld_since.pop(unit.id, None)
            offers[unit.id] = Offer(
                unit=unit,
                owner=owner,
                state=state.state,
                reason=state.reason,
                text=state.text,
                shares=max(map(len, unit.ids.values()), default=1),
                containers=self._holders.get(unit.id, ()),
            )
        for id_ in sorted(owners.keys() & self._owners.keys(), key=natural):
            if self._owners[id_] != owners[id_]:
                log.info("%s: unit %s belongs to %s (was %s)", self.name, id_, owners[id_], self._owners[id_])
        self._owners = owners
        if offers != self._offers:
            self._offers = offers
            self._changes.notify_all()

    async def _publish(self) -> None:
        """Lists the devices again if an owner has changed since the last list."""
        runner = self._runner()
        if self._owners != self._listed_owners and runner is not None and runner.scan.completed.is_set():
            await runner.publish()

    def _wanted(self, unit: Unit) -> Owner:
        return self.settings.device_apis.of_unit(self.name, unit)

    def _owner(self, unit: Unit) -> Owner:
        if not self._open or self._record.lost or unit.id in self._changing:
            return "none"
        wanted = self._wanted(unit)
        if wanted == "dra" and self.other_plugin.problem:
            return "none"
        return owner_of(wanted, recorded=unit.id in self._record.units, held=unit.id in self._holders)

    def _is_releasable(self, id_: str) -> bool:
        """Whether a recorded unit is not wanted by DRA, and free of it."""
        unit = self._found.get(id_) or self._absent.get(id_, (None,))[0]
        wanted = self._wanted(unit or Unit(id=id_, parent=_address(id_), health=id_))
        if wanted == "dra" or self.driver.prepared().get(id_):
            return False
        published = self.driver.published()
        return published is not None and id_ not in published

    def _is_unlisted(self, unit: Unit) -> bool:
        """Whether DRA shall get the unit, and the kubelet's list has none of its IDs any more."""
        runner = self._runner()
        if runner is None or self._wanted(unit) != "dra" or self._owner(unit) != "none":
            return False
        listed = runner.context.devices.listed.resources
        return not any(id_ in listed.get(resource, {}) for resource, ids in unit.ids.items() for id_ in ids)

    def _is_free(self, unit: Unit) -> bool:
        """Whether no container and no call has an ID of the unit, by the last reading."""
        runner, since = self._runner(), self._withheld_since.get(unit.id)
        if runner is None or since is None or self.other_plugin.suspected:
            return False
        namespace, reading = runner.context.plugin.namespace, self._reading
        return not any(
            runner.publisher.calls[resource].must_stay(f"{namespace}/{resource}", id_, since, reading)
            for resource, ids in unit.ids.items()
            for id_ in ids
        )

    async def _change(self, add: Collection[str], remove: Collection[str]) -> None:
        lost = tuple(self._found) if self._record.lost else ()
        self._changing = frozenset((*add, *remove))
        held = self.driver.held
        try:
            changed = await self._record_thread.run(
                lambda: self._record.change(add=(*add, *lost), remove=remove, held=held)
            )
            self._owners_changed |= changed
            self._report("" if changed else "another agent on this node hands out units of this family", "OtherAgent")
            if changed and add:
                # Until the change, another agent may have got the units for containers.
                self._use_reading(await self._allocations.read(time.monotonic()))
        except (JournalError, OwnershipError, ThreadLimitError) as error:
            self._report(str(error))
        finally:
            self._changing = frozenset()

    async def _open_record(self) -> bool:
        if not self._open:
            try:
                self._open = await self._record_thread.run(self._record.open)
            except (OwnershipError, ThreadLimitError) as error:
                self._report(str(error))
        return self._open

    def _use_reading(self, reading: Reading) -> None:
        self._reading = reading
        runner = self._runner()
        namespace = runner.context.plugin.namespace if runner is not None else ""
        holders: dict[str, list[str]] = {}
        for (resource, id_), unit in self._by_id.items():
            key = (f"{namespace}/{resource}", id_)
            if key in reading.held:
                holders.setdefault(unit, []).extend(reading.holders.get(key) or ("a pod of the kubelet's checkpoint",))
        self._holders = {unit: sorted(set(names)) for unit, names in holders.items()}

    def _states(self) -> Iterator[tuple[Unit, UnitState]]:
        runner, prepared = self._runner(), self.driver.prepared()
        bound, cleanup = self.driver.bound(), self.driver.cleanup()
        for id_ in sorted({**self._found, **self._absent, **bound}, key=natural):
            state: UnitState | None = UnitState()
            absent, driver = self._absent.get(id_, (None, ""))
            if id_ in bound and driver is not None:
                unit = bound[id_]
            elif absent is not None:
                unit = absent
                state = absent_state(unit, driver, claimed=bool(prepared.get(id_)))
            else:
                unit = self._found[id_]
                state = _present_state(runner, unit) if runner is not None else state
            if id_ in cleanup and state is not None and state.state != "gone":
                state = UnitState("cleanup", "cleanup", cleanup[id_])
            if state is not None:
                yield unit, state

    def _report(self, problem: str, reason: Reason = "OwnersUnknown") -> None:
        if problem and problem != self.problem:
            log.warning("%s: %s", self.name, problem)
            self._on_event(reason, problem)
        self.problem = problem

    def reopen(self) -> None:
        """Continues after `close`."""
        self._closed = False

    async def close(self) -> None:
        """Waits for the threads and releases the lock. The owners stay as they are."""
        self._closed = True
        await self._host_thread.wait_idle(self.name)
        if await self._record_thread.wait_idle(self.name):
            self._record.close()
            self._open = False


def _read(
    host: Host, namespace: str, devices: Iterable[Device], earlier: Mapping[str, Unit]
) -> tuple[list[Unit], dict[str, str | None]]:
    """The units of the devices, and by ID the drivers of the `earlier` units that are not among them."""
    units = [with_facts(host, namespace, unit) for unit in units_of(host, devices)]
    absent = earlier.keys() - {unit.id for unit in units}
    return units, {id_: _driver(host, earlier[id_]) for id_ in absent}


def _present_state(runner: PluginRunner, unit: Unit) -> UnitState:
    tracker, found = runner.health.tracker, runner.context.devices.found.resources
    devices = (found.get(resource, {}).get(id_) for resource, ids in unit.ids.items() for id_ in ids)
    device = next((device for device in devices if device is not None), None)
    health, warning = tracker.states.get(unit.health), tracker.warnings.get(unit.health)
    return present_state(device, health, warning, runner.outdated) if device is not None else UnitState()


def _driver(host: Host, unit: Unit) -> str | None:
    address = unit.text("pciAddress") or _address(unit.id)
    path = f"{DEVICES}/{address}"
    return host.driver_or_empty(path) if address and host.exists(path) else None


def _address(id_: str) -> str:
    """The PCI address that the ID of a unit begins with, empty if it has none."""
    return pci_address(id_.partition("-")[0]) or ""
