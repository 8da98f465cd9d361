"""The planners of a node's DSA or IAA devices, in the order of their calls.

First the PCI functions to be bound to another driver: a device is on the bus `dsa` only while its function is bound to
idxd. Then the devices.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from accelplane.host import Host, HostError
from accelplane.host.drivers import DRIVERS, VFIO_PCI, driver_of, driver_override, is_loaded, vfio_group_is_open
from accelplane.host.pci import DEVICES
from accelplane.provision.binding import bind_steps
from accelplane.provision.idxd.check import problems
from accelplane.provision.idxd.config import IDXD, IdxdConfig
from accelplane.provision.idxd.device import Place, observe, places
from accelplane.provision.idxd.plan import current_setup, describe, plan_changes, users
from accelplane.provision.idxd.template import Setup
from accelplane.provision.steps import Plan, Planner, Step

_INTEL = "0x8086"


def planners(host: Host, config: IdxdConfig) -> Iterator[Planner]:
    """One planner for each function to be bound to another driver, and for each device.

    Call each one before the next is taken from the iterator: devices are listed after the functions are bound. Raises
    `Unreadable`.
    """
    functions = [one.address for one in host.pci_devices(_INTEL) if one.device in config.pci_ids]
    for address in functions:
        if config.driver != IDXD or driver_of(host, address) != IDXD:
            yield partial(_function_plan, address, config)
    planned_functions = functions if config.driver != IDXD else ()
    for place in places(host, config.family):
        if _function(host, place) not in planned_functions:
            yield partial(_device_plan, place, config)


def _device_plan(place: Place, config: IdxdConfig, host: Host) -> Plan:
    try:
        found = observe(host, place)
    except HostError as error:
        return Plan(device=place.name, failure=str(error))
    file, setup = config.setup(place.number)
    now = describe(setup, found)
    if setup is None:
        return Plan(device=place.name, now=now, skip_reason=f"{file} has no configuration for it")
    if wrong := list(problems(host, setup, found)):
        return Plan(device=place.name, now=now, failure=f"cannot be set up from {file}: {'; '.join(wrong)}")
    plan = plan_changes(host, setup, found, force=config.force)
    return replace(plan, now=now, rollback=partial(_device_rollback, place, current_setup(found)))


def _device_rollback(place: Place, before: Setup, host: Host) -> Plan:
    try:
        return plan_changes(host, before, observe(host, place), force=True)
    except HostError as error:
        return Plan(device=place.name, failure=str(error))


def _function_plan(address: str, config: IdxdConfig, host: Host) -> Plan:
    driver = config.driver
    before = driver_of(host, address)
    plan = Plan(device=address, now={"driver": before or "none"})
    if before == driver:
        return plan
    if not is_loaded(host, driver):
        missing = f"the driver {driver} is not loaded (modprobe {driver})"
        return replace(plan, skip_reason=missing) if driver == IDXD else replace(plan, failure=missing)
    if before == VFIO_PCI and vfio_group_is_open(host, address):
        return replace(plan, skip_reason=f"in use: its VFIO group is open; it stays bound to {before}")
    try:
        found = [observe(host, place) for place in places(host, "dsa") if _function(host, place) == address]
    except HostError as error:
        return replace(plan, failure=str(error))
    used = [use for device in found for use in users(device)]
    if used and not config.force:
        return replace(plan, skip_reason=f"in use: {', '.join(used)}; it stays bound to {before}")
    steps = list(bind_steps(host, address, driver, f"driver {before or 'none'} -> {driver}"))
    setups = [(device.place, current_setup(device)) for device in found]
    back = partial(_function_rollback, address, before, driver_override(host, address), setups)
    return replace(plan, steps=steps, rollback=back)


def _function_rollback(
    address: str, driver: str, override: str, setups: Sequence[tuple[Place, Setup]], host: Host
) -> Plan:
    """Binds the function to its previous driver, and then restores the setup of its device."""
    now = driver_of(host, address)
    steps: list[Step] = []
    if now not in ("", driver):
        steps.append(_step(f"{DRIVERS}/{now}/unbind", address))
    if driver_override(host, address) != override:
        steps.append(_step(f"{DEVICES}/{address}/driver_override", override or "\n"))
    if driver not in ("", now):
        steps.append(_step(f"{DRIVERS}/{driver}/bind", address))
    if steps:
        return Plan(device=address, steps=steps)
    for place, setup in setups:
        plan = _device_rollback(place, setup, host)
        if plan.steps or plan.failure or plan.skip_reason:
            return plan
    return Plan(device=address)


def _step(path: str, text: str) -> Step:
    return Step(what=f"{path} {text.strip()}", path=path, text=text)


def _function(host: Host, place: Place) -> str:
    """The address of the device's PCI function."""
    return host.resolve(place.path).split("/")[-2]
