"""QAT physical functions (PF): their services, virtual functions (VF) and their driver, auto-reset.

Facts: Documentation/ABI/testing/sysfs-driver-qat, and the drivers below drivers/crypto/intel/qat. Services can be
written only while the device is down, which disables its VFs; kernels return them in another order; any number in
`sriov_numvfs` enables all VFs and restarts the device. Only the drivers from the fourth generation have `qat/`. The
configuration is that of both generations of the original init container.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from accelplane.host import Host, HostError, Unreadable, drivers
from accelplane.host.drivers import VFIO_PCI
from accelplane.host.pci import DEVICES
from accelplane.plugins.qat.models import VENDOR, QatModel, model_of_pf
from accelplane.provision import config as files
from accelplane.provision.binding import bind_steps, missing_vfs, read_number, vf_count_step, vf_drivers
from accelplane.provision.config import ConfigError, quote
from accelplane.provision.steps import Plan, Planner, Step

DEFAULT_PF_IDS = ("37c8", "4940", "4942", "4944", "4946", "4948")
SERVICES = (
    *("sym", "asym", "sym;asym", "dc", "sym;dc", "asym;dc", "dcc"),
    *("decomp", "sym;decomp", "asym;decomp", "asym;sym;dc", "asym;sym;decomp"),
)
VF_DRIVERS = (VFIO_PCI, "igb_uio", "none")

_ACCEPTED = frozenset(frozenset(services.split(";")) for services in SERVICES)
_AT_ONCE = {"6xxx": 3}  # services, by PF driver; the others run two
_WITH_DECOMP = frozenset(("6xxx",))
_UIO = frozenset(("igb_uio", "uio_pci_generic"))
_SERVICES, _AUTO_RESET = "ServicesEnabled", "AutoresetEnabled"


class QatConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of every PF with one of `pf_ids`. Empty `services` and `auto_reset` are not changed.

    The VFs are bound to `vf_driver`; if it is empty, their drivers are not changed. With `force`, VFs in another number
    are replaced, also those bound to UIO drivers. `file` is the path of the file.
    """

    services: str = ""
    auto_reset: str = ""
    pf_ids: Sequence[str] = DEFAULT_PF_IDS
    vf_driver: str = VFIO_PCI
    file: str = ""
    force: bool = False


class _Pf(msgspec.Struct, frozen=True, kw_only=True):
    """A PF in sysfs. Attributes that do not exist are None. `vfs` are the drivers by PCI address."""

    address: str
    path: str
    model: QatModel
    driver: str
    total: int | None
    count: int
    state: str | None
    services: str | None
    auto_reset: str | None
    vfs: Mapping[str, str]
    vf_driver_is_loaded: bool


def read_config(config_dir: str, environment: Mapping[str, str], *, force: bool = False) -> QatConfig:
    """From `qat.conf` or `qat-<NODE_NAME>.conf`, the original's environment variables, and `QAT_VF_DRIVER`.

    Raises `ConfigError`.
    """
    pf_ids = tuple(environment.get("ENABLED_QAT_PF_PCIIDS", "").split()) or DEFAULT_PF_IDS
    for number in pf_ids:
        if model_of_pf(number) is None:
            raise ConfigError(
                "ENABLED_QAT_PF_PCIIDS", 0, quote(number), "PCI ids of QAT physical functions, as in 4940"
            )
    vf_driver = environment.get("QAT_VF_DRIVER") or VFIO_PCI
    if vf_driver not in VF_DRIVERS:
        raise ConfigError("QAT_VF_DRIVER", 0, quote(vf_driver), f"one of {', '.join(VF_DRIVERS)}")
    file = files.find(config_dir, "qat", environment.get("NODE_NAME", ""))
    services, auto_reset = parse(file.path, file.text) if file else ("", "")
    return QatConfig(
        services=services,
        auto_reset=auto_reset,
        pf_ids=pf_ids,
        vf_driver="" if vf_driver == "none" else vf_driver,
        file=file.path if file else "",
        force=force,
    )


def parse(path: str, text: str) -> tuple[str, str]:
    """Services and auto-reset of a configuration file, each empty if not set. Raises `ConfigError`.

    A line is `ServicesEnabled=…`, `AutoresetEnabled=on` or `off`, or, as older files have it, services behind any
    other key or alone.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        key, equals, value = (part.strip() for part in line.partition("="))
        value = value if equals else key
        if not value or line.startswith("#"):
            continue
        what = _AUTO_RESET if equals and key == _AUTO_RESET else _SERVICES
        if what == _AUTO_RESET and value not in ("on", "off"):
            raise ConfigError(path, number, quote(line), f"{_AUTO_RESET}=on or {_AUTO_RESET}=off")
        services = _split(value)
        accepted = services in _ACCEPTED and value.count(";") == len(services) - 1
        if what == _SERVICES and not accepted:
            keys = "" if equals and key == _SERVICES else f" (or {_AUTO_RESET}=on or off)"
            raise ConfigError(path, number, quote(line), f"{_SERVICES}= and one of {', '.join(SERVICES)}{keys}")
        if what in found:
            raise ConfigError(path, number, f"{quote(line)} as a second line with {what}", "one line")
        found[what] = value
    return found.get(_SERVICES, ""), found.get(_AUTO_RESET, "")


def planners(host: Host, config: QatConfig) -> list[Planner]:
    """A planner for each PF that the configuration covers. Raises `Unreadable`."""
    desired = {f"0x{number.removeprefix('0x')}" for number in config.pf_ids}
    return [
        partial(plan, config, device.address) for device in host.pci_devices(f"0x{VENDOR}") if device.device in desired
    ]


def plan(config: QatConfig, address: str, host: Host) -> Plan:
    """The writes that the PF needs now."""
    try:
        pf = _read(config, address, host)
    except HostError as error:
        return Plan(device=address, failure=str(error))
    made = Plan(device=address, now=_properties(pf))
    unbound = [vf for vf, driver in pf.vfs.items() if config.vf_driver not in ("", driver)]
    # Only groups of VFs that would be unbound are opened: while one is open here, no other process can open it.
    in_use = {vf: why for vf in unbound if (why := _use(config, host, vf, pf.vfs[vf]))}
    free = [vf for vf in unbound if vf not in in_use]
    if failure := _failure(config, pf, binds=bool(free)):
        return replace(made, failure=failure)
    if pf.driver != pf.model.pf_driver:
        return replace(made, skip_reason=f"bound to the driver {pf.driver}, expected {pf.model.pf_driver}")
    change = _change(config, pf)
    replaced = bool(pf.count) and (bool(change) or (config.force and pf.count != pf.total))
    if replaced:
        others = [vf for vf in pf.vfs if vf not in unbound]
        in_use |= {vf: why for vf in others if (why := _use(config, host, vf, pf.vfs[vf]))}
    if replaced and in_use:
        return replace(made, skip_reason=f"{change or f'{pf.total} VFs'} needed, but {'; '.join(_uses(in_use))}")

    steps = [vf_count_step(pf.path, pf.count, 0)] if replaced else []
    steps += _services(config, pf, change)
    later: list[str] = []
    notes: list[str] = []
    if replaced or not pf.count:
        steps.append(vf_count_step(pf.path, 0, pf.total or 0, explain=_explain_einval))
        later += [f"driver of the VFs -> {config.vf_driver}"] if config.vf_driver else []
    else:
        notes += _remaining_differences(pf, in_use)
        what = f"driver of {len(free)} VF{'s' * (len(free) > 1)} -> {config.vf_driver}"
        for vf in free:
            steps += bind_steps(host, vf, config.vf_driver, what, part=vf)
    if pf.model.detects_services and config.auto_reset not in ("", pf.auto_reset):
        if pf.auto_reset is None:
            notes.append("auto-reset cannot be set: no qat/auto_reset (Linux 6.9 or newer)")
        else:
            steps.append(_set(pf, "auto-reset", "auto_reset", pf.auto_reset, config.auto_reset, part="auto-reset"))
    return replace(made, steps=steps, later=later, notes=notes, rollback=_rollback(config, pf) if replaced else None)


def _rollback(config: QatConfig, pf: _Pf) -> Planner:
    """The rollback planner: VFs that are disabled and enabled again are bound to the kernel's own driver."""
    had_it = config.vf_driver in pf.vfs.values()
    before = replace(
        config,
        services=pf.services or "",
        vf_driver=config.vf_driver if had_it else "",
        auto_reset=pf.auto_reset or "",
        force=False,
    )
    return partial(plan, before, pf.address)


def _read(config: QatConfig, address: str, host: Host) -> _Pf:
    """Raises `HostError`."""
    path = f"{DEVICES}/{address}"
    model = model_of_pf(host.text(f"{path}/device"))
    if model is None:
        raise Unreadable(f"{path}/device", "no longer a QAT physical function")
    state = host.optional_text(f"{path}/qat/state")
    if state not in (None, "up", "down"):
        raise Unreadable(f"{path}/qat/state", f"found {quote(state)}, expected up or down")
    total = read_number(host, f"{path}/sriov_totalvfs") if host.exists(f"{path}/sriov_totalvfs") else None
    vfs = [drivers.vf_address(host, f"{path}/{link}") for link in drivers.vf_links(host, path)]
    return _Pf(
        address=address,
        path=path,
        model=model,
        driver=drivers.driver_of(host, address),
        total=total,
        count=0 if total is None else read_number(host, f"{path}/sriov_numvfs"),
        state=state,
        services=host.optional_text(f"{path}/qat/cfg_services"),
        auto_reset=host.optional_text(f"{path}/qat/auto_reset"),
        vfs={vf: drivers.driver_of(host, vf) for vf in vfs},
        vf_driver_is_loaded=not config.vf_driver or drivers.is_loaded(host, config.vf_driver),
    )


def _properties(pf: _Pf) -> dict[str, str]:
    """The PF, for `Plan.now`."""
    now = {"driver": pf.driver or "none"}
    shows = {"state": pf.state, "services": pf.services, "auto-reset": pf.auto_reset}
    now |= {name: value for name, value in shows.items() if value is not None}
    if pf.total is not None:
        now["VFs"] = f"{pf.count} of {pf.total}"
    if pf.vfs:
        now["VFs on"] = vf_drivers(pf.vfs.values())
    return now


def _failure(config: QatConfig, pf: _Pf, *, binds: bool) -> str:
    """Why the PF can never reach the desired state; empty if it can."""
    if not pf.driver:
        return f"no driver is bound, expected {pf.model.pf_driver}; load its kernel module"
    if pf.driver != pf.model.pf_driver:
        return ""
    if pf.total is None:
        return "no sriov_totalvfs: SR-IOV is disabled in the firmware, or this is a virtual machine"
    if not pf.total:
        return "sriov_totalvfs is 0, expected at least 1"
    if _change(config, pf):
        services, most = _split(config.services), _AT_ONCE.get(pf.driver, 2)
        if pf.services is None:
            return f"services {config.services} cannot be set: no qat/cfg_services (Linux 6.0 or newer)"
        if len(services) > most:
            return (
                f"services {config.services} are {len(services)}, expected at most {most} with the driver {pf.driver}"
            )
        if "decomp" in services and pf.driver not in _WITH_DECOMP:
            return f"services {config.services} contain decomp, which the driver {pf.driver} does not support"
    if (binds or not pf.count) and not pf.vf_driver_is_loaded:
        return f"the driver {config.vf_driver} is not loaded, but the VFs need it (modprobe {config.vf_driver})"
    return ""


def _change(config: QatConfig, pf: _Pf) -> str:
    """The description of the change of services; empty if there is none."""
    if not pf.model.detects_services or not config.services or _split(pf.services or "") == _split(config.services):
        return ""
    return f"services {pf.services} -> {config.services}"


def _use(config: QatConfig, host: Host, vf: str, driver: str) -> str:
    """Why the VF must not be unbound; empty if it may.

    An open group prevents it even with `force`: the kernel would wait for the group's user without a timeout.
    """
    if drivers.vfio_group_is_open(host, vf):
        return "in use: its VFIO group is open"
    if driver in _UIO and not config.force:
        return f"possibly in use: {driver} does not report its users"
    return ""


def _uses(in_use: Mapping[str, str]) -> list[str]:
    """Which VFs are in use, and by what; several for the same reason in one text."""
    by_reason: dict[str, list[str]] = {}
    for address, why in in_use.items():
        by_reason.setdefault(why, []).append(address)
    return [
        f"VF {first}{f' and {len(others)} more' if others else ''}: {why}"
        for why, (first, *others) in by_reason.items()
    ]


def _remaining_differences(pf: _Pf, in_use: Mapping[str, str]) -> Iterator[str]:
    """The differences of the enabled VFs that remain."""
    if pf.count != pf.total:
        yield f"sriov_numvfs is {pf.count}, expected {pf.total}; use --force to replace the VFs"
    if pf.count != len(pf.vfs):
        yield missing_vfs(pf.count, len(pf.vfs))
    yield from _uses(in_use)


def _services(config: QatConfig, pf: _Pf, change: str) -> Iterator[Step]:
    """The steps to the desired services, and to state up."""
    if change and pf.state == "up":
        yield _set(pf, "state", "state", "up", "down")
    if change:
        yield _set(pf, "services", "cfg_services", pf.services or "", config.services)
    if change or pf.state == "down":
        yield _set(pf, "state", "state", "down", "up")


def _set(pf: _Pf, what: str, name: str, before: str, after: str, *, part: str = "") -> Step:
    path = f"{pf.path}/qat/{name}"
    return Step(what=f"{what} {before} -> {after}", path=path, text=after, undo=(path, before), part=part)


def _explain_einval(host: Host, error: HostError) -> str:
    if error.errno != errno.EINVAL:
        return ""
    return (
        "probably the IOMMU does not translate its addresses"
        if drivers.iommu_enabled(host)
        else "probably because no IOMMU is enabled; add intel_iommu=on to the kernel's command line"
    )


def _split(services: str) -> frozenset[str]:
    return frozenset(word.strip() for word in services.split(";"))
