"""QAT physical functions (PF): their services, their virtual functions (VF) enabled and given to vfio-pci, auto-reset.

Facts: Documentation/ABI/testing/sysfs-driver-qat, and the drivers below drivers/crypto/intel/qat. Services can be
written only while the device is down, which takes its VFs away; kernels read them back in an order of their own; any
number in `sriov_numvfs` enables all VFs and restarts the device. Only the drivers of the fourth generation on have
`qat/`. The configuration is that of both generations of the original init container.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from accelplane.host import Host, HostError, Missing, Unreadable
from accelplane.host.drivers import (
    VFIO_PCI,
    driver_of,
    iommu_enabled,
    is_loaded,
    vf_address,
    vf_links,
    vfio_group_is_open,
)
from accelplane.host.pci import DEVICES
from accelplane.plugins.qat.models import VENDOR, QatModel, model_of_pf
from accelplane.provision import config as files
from accelplane.provision.binding import bind_steps, read_number, vf_count_step
from accelplane.provision.config import ConfigError, shown
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
    """What is wanted of every PF with one of `pf_ids`. Empty `services` and `auto_reset` are left as they are.

    `vf_driver` gets the VFs, empty leaves them to whom they are. `force`: VFs that are there in another number are
    replaced, and those of UIO drivers taken. `file` is where that is written.
    """

    services: str = ""
    auto_reset: str = ""
    pf_ids: Sequence[str] = DEFAULT_PF_IDS
    vf_driver: str = VFIO_PCI
    file: str = ""
    force: bool = False


class _Vf(msgspec.Struct, frozen=True):
    address: str
    driver: str


class _Pf(msgspec.Struct, frozen=True, kw_only=True):
    """What a PF shows. Attributes that it has not are None."""

    address: str
    path: str
    model: QatModel
    driver: str
    total: int | None
    count: int
    state: str | None
    services: str | None
    auto_reset: str | None
    vfs: Sequence[_Vf]
    vf_driver_is_loaded: bool


def read_config(config_dir: str, environment: Mapping[str, str], *, force: bool = False) -> QatConfig:
    """From `qat.conf` or `qat-<NODE_NAME>.conf`, the original's environment variables, and `QAT_VF_DRIVER`.

    Raises `ConfigError`.
    """
    pf_ids = tuple(environment.get("ENABLED_QAT_PF_PCIIDS", "").split()) or DEFAULT_PF_IDS
    for number in pf_ids:
        if model_of_pf(number) is None:
            raise ConfigError(
                "ENABLED_QAT_PF_PCIIDS", 0, shown(number), "PCI ids of QAT physical functions, as in 4940"
            )
    vf_driver = environment.get("QAT_VF_DRIVER") or VFIO_PCI
    if vf_driver not in VF_DRIVERS:
        raise ConfigError("QAT_VF_DRIVER", 0, shown(vf_driver), f"one of {', '.join(VF_DRIVERS)}")
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
    """Services and auto-reset of a configuration file, each empty where it says nothing. Raises `ConfigError`.

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
            raise ConfigError(path, number, shown(line), f"{_AUTO_RESET}=on or {_AUTO_RESET}=off")
        if what == _SERVICES and not _is_accepted(value):
            keys = "" if equals and key == _SERVICES else f" (or {_AUTO_RESET}=on or off)"
            raise ConfigError(path, number, shown(line), f"{_SERVICES}= and one of {', '.join(SERVICES)}{keys}")
        if what in found:
            raise ConfigError(path, number, f"{shown(line)} as one more line with {what}", "one only")
        found[what] = value
    return found.get(_SERVICES, ""), found.get(_AUTO_RESET, "")


def planners(host: Host, config: QatConfig) -> list[Planner]:
    """A planner for each PF that the configuration is about. Raises `Unreadable`."""
    wanted = {f"0x{number.removeprefix('0x')}" for number in config.pf_ids}
    return [
        partial(plan, config, device.address) for device in host.pci_devices(f"0x{VENDOR}") if device.device in wanted
    ]


def plan(config: QatConfig, address: str, host: Host) -> Plan:
    """What the PF needs now."""
    try:
        pf = _look(config, address, host)
    except HostError as error:
        return Plan(device=address, failure=str(error))
    made = Plan(device=address, now=_told(pf))
    unbound = [vf for vf in pf.vfs if config.vf_driver not in ("", vf.driver)]
    # Only groups of VFs that would be taken away are tried: while one is, nobody else can open it.
    occupied = {vf.address: why for vf in unbound if (why := _occupied(config, host, vf))}
    free = [vf for vf in unbound if vf.address not in occupied]
    if failure := _failure(config, pf, binds=bool(free)):
        return replace(made, failure=failure)
    if pf.driver != pf.model.pf_driver:
        return replace(made, refusal=f"the driver {pf.driver} has it, expected {pf.model.pf_driver}")
    change = _change(config, pf)
    anew = bool(pf.count) and (bool(change) or (config.force and pf.count != pf.total))
    if anew:
        occupied |= {vf.address: why for vf in pf.vfs if vf not in unbound and (why := _occupied(config, host, vf))}
    if anew and occupied:
        return replace(made, refusal=f"{change or f'{pf.total} VFs'} wanted, but {'; '.join(_occupations(occupied))}")

    steps = [vf_count_step(pf.path, pf.count, 0)] if anew else []
    steps += _services(config, pf, change)
    later: list[str] = []
    notes: list[str] = []
    if anew or not pf.count:
        steps.append(vf_count_step(pf.path, 0, pf.total or 0, explain=_without_iommu))
        later += [f"driver of the VFs -> {config.vf_driver}"] if config.vf_driver else []
    else:
        notes += _shortcomings(pf, occupied)
        what = f"driver of {len(free)} VF{'s' * (len(free) > 1)} -> {config.vf_driver}"
        for vf in free:
            steps += bind_steps(host, vf.address, config.vf_driver, what, part=vf.address)
    if pf.model.detects_services and config.auto_reset not in ("", pf.auto_reset):
        if pf.auto_reset is None:
            notes.append("auto-reset cannot be set: there is no qat/auto_reset, as on kernels before 6.9")
        else:
            steps.append(_set(pf, "auto-reset", "auto_reset", pf.auto_reset, config.auto_reset, part="auto-reset"))
    return replace(made, steps=steps, later=later, notes=notes, back=_way_back(config, pf) if anew else None)


def _way_back(config: QatConfig, pf: _Pf) -> Planner:
    """VFs that are taken away come back with the kernel's own driver: to write the old texts would not do."""
    had_it = any(vf.driver == config.vf_driver for vf in pf.vfs)
    before = replace(
        config,
        services=pf.services or "",
        vf_driver=config.vf_driver if had_it else "",
        auto_reset=pf.auto_reset or "",
        force=False,
    )
    return partial(plan, before, pf.address)


def _look(config: QatConfig, address: str, host: Host) -> _Pf:
    """Raises `HostError`."""
    path = f"{DEVICES}/{address}"
    model = model_of_pf(host.text(f"{path}/device"))
    if model is None:
        raise Unreadable(f"{path}/device", "no QAT physical function any more")
    state = _optional(host, f"{path}/qat/state")
    if state not in (None, "up", "down"):
        raise Unreadable(f"{path}/qat/state", f"found {shown(state)}, expected up or down")
    total = read_number(host, f"{path}/sriov_totalvfs") if host.exists(f"{path}/sriov_totalvfs") else None
    vfs = [vf_address(host, f"{path}/{link}") for link in vf_links(host, path)]
    return _Pf(
        address=address,
        path=path,
        model=model,
        driver=driver_of(host, address),
        total=total,
        count=0 if total is None else read_number(host, f"{path}/sriov_numvfs"),
        state=state,
        services=_optional(host, f"{path}/qat/cfg_services"),
        auto_reset=_optional(host, f"{path}/qat/auto_reset"),
        vfs=[_Vf(vf, driver_of(host, vf)) for vf in vfs],
        vf_driver_is_loaded=not config.vf_driver or is_loaded(host, config.vf_driver),
    )


def _told(pf: _Pf) -> dict[str, str]:
    """The PF for people."""
    now = {"driver": pf.driver or "none"}
    shows = {"state": pf.state, "services": pf.services, "auto-reset": pf.auto_reset}
    now |= {name: value for name, value in shows.items() if value is not None}
    if pf.total is not None:
        now["VFs"] = f"{pf.count} of {pf.total}"
    if pf.vfs:
        drivers = [vf.driver or "no driver" for vf in pf.vfs]
        now["VFs on"] = ", ".join(f"{name} ({drivers.count(name)})" for name in dict.fromkeys(drivers))
    return now


def _failure(config: QatConfig, pf: _Pf, *, binds: bool) -> str:
    """Why the PF cannot be as wanted whatever is written; empty when it can."""
    if not pf.driver:
        return f"no driver has it, expected {pf.model.pf_driver}: load its kernel module"
    if pf.driver != pf.model.pf_driver:
        return ""
    if pf.total is None:
        return "it has no sriov_totalvfs: SR-IOV is off in the firmware, or this is a virtual machine"
    if not pf.total:
        return "it can have no VFs: sriov_totalvfs is 0"
    if _change(config, pf):
        services, most = _words(config.services), _AT_ONCE.get(pf.driver, 2)
        if pf.services is None:
            return f"services {config.services} cannot be set: there is no qat/cfg_services, as on kernels before 6.0"
        if len(services) > most:
            return f"services {config.services} are {len(services)}, the driver {pf.driver} runs {most} at once"
        if "decomp" in services and pf.driver not in _WITH_DECOMP:
            return f"services {config.services} have decomp, which the driver {pf.driver} does not know"
    if (binds or not pf.count) and not pf.vf_driver_is_loaded:
        return f"the driver {config.vf_driver} is not loaded, which the VFs need (modprobe {config.vf_driver})"
    return ""


def _change(config: QatConfig, pf: _Pf) -> str:
    """The change of services that is wanted, for people; empty when none is."""
    if not pf.model.detects_services or not config.services or _words(pf.services or "") == _words(config.services):
        return ""
    return f"services {pf.services} -> {config.services}"


def _occupied(config: QatConfig, host: Host, vf: _Vf) -> str:
    """Why the VF must stay as it is, if it must.

    An open group keeps it even when forced: the kernel would wait for the group's user, and nothing ends that wait.
    """
    if vfio_group_is_open(host, vf.address):
        return "in use, the VFIO group is open"
    if vf.driver in _UIO and not config.force:
        return f"perhaps in use, {vf.driver} does not tell"
    return ""


def _occupations(occupied: Mapping[str, str]) -> list[str]:
    """Which VFs must stay as they are, and why, in few words."""
    told: dict[str, list[str]] = {}
    for address, why in occupied.items():
        told.setdefault(why, []).append(address)
    return [
        f"VF {first}{f' and {len(others)} more' if others else ''}: {why}" for why, (first, *others) in told.items()
    ]


def _shortcomings(pf: _Pf, occupied: Mapping[str, str]) -> Iterator[str]:
    """What is not as wanted of the VFs that are there, and stays so."""
    if pf.count != pf.total:
        yield f"{pf.count} of {pf.total} possible VFs are enabled, which stays so unless forced"
    if pf.count != len(pf.vfs):
        yield f"{pf.count} VFs are enabled, {len(pf.vfs)} are to be seen"
    yield from _occupations(occupied)


def _services(config: QatConfig, pf: _Pf, change: str) -> Iterator[Step]:
    """The way from the services that are to those that should be, and up."""
    if change and pf.state == "up":
        yield _set(pf, "state", "state", "up", "down")
    if change:
        yield _set(pf, "services", "cfg_services", pf.services or "", config.services)
    if change or pf.state == "down":
        yield _set(pf, "state", "state", "down", "up")


def _set(pf: _Pf, what: str, name: str, before: str, after: str, *, part: str = "") -> Step:
    path = f"{pf.path}/qat/{name}"
    return Step(what=f"{what} {before} -> {after}", path=path, text=after, undo=(path, before), part=part)


def _without_iommu(host: Host, error: HostError) -> str:
    if error.errno != errno.EINVAL:
        return ""
    return (
        "the IOMMU does not translate for it"
        if iommu_enabled(host)
        else "no IOMMU is enabled; add intel_iommu=on to the kernel's command line"
    )


def _optional(host: Host, path: str) -> str | None:
    """The attribute's text, None when there is none. Raises `Unreadable`."""
    try:
        return host.text(path)
    except Missing:
        return None


def _words(services: str) -> frozenset[str]:
    return frozenset(word.strip() for word in services.split(";"))


def _is_accepted(services: str) -> bool:
    return _words(services) in _ACCEPTED and services.count(";") == len(_words(services)) - 1
