"""DLB physical functions (PF): virtual functions (VF) enabled, and given their share of the PF's resources.

Facts: Intel's out-of-tree dlb2 driver and its guide to SR-IOV. A VF starts without resources and is of no use until it
has some, which can be written to `vf<N>_resources/` of its PF only while no driver has it. So a VF that has none at all
is taken for one that nobody has looked after yet; one that has any is left as it is.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.host.drivers import vf_address, vf_links
from accelplane.provision import config as files
from accelplane.provision.binding import read_number, vf_count_step
from accelplane.provision.config import ConfigError, shown
from accelplane.provision.steps import Plan, Planner, Step

# What the original init container gives its one VF.
ONE_VF: Mapping[str, int] = {
    "num_atomic_inflights": 2048,
    "num_dir_credits": 2048,
    "num_dir_ports": 8,
    "num_hist_list_entries": 2048,
    "num_ldb_credits": 8192,
    "num_ldb_ports": 4,
    "num_ldb_queues": 32,
    "num_sched_domains": 32,
    "num_sn0_slots": 2,
    "num_sn1_slots": 2,
}
PFS = ("all", "first")
MAX_VFS = 16

_DRIVER = "dlb2"
_DRIVERS = f"/sys/bus/pci/drivers/{_DRIVER}"
# A device in use, or one that this container must not write to, was never an error to the original.
_NOT_TO_BE_HAD = (errno.EBUSY, errno.EROFS, errno.EACCES, errno.EPERM)


class DlbConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted: how many VFs each PF has, or only the first one. `resources` of each VF, where they are told.

    `force`: VFs that are there in another number are replaced. `file` is where that is written.
    """

    vfs: int = 1
    pfs: str = "all"
    resources: Mapping[str, int] = {}
    file: str = ""
    force: bool = False


class _Vf(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    driver: str
    resources: str  # their directory
    has: Mapping[str, int]


class _Pf(msgspec.Struct, frozen=True, kw_only=True):
    """What a PF shows. `has` is what there is in all, empty when it does not tell."""

    path: str
    total: int | None = None
    count: int = 0
    has: Mapping[str, int] = {}
    vfs: Sequence[_Vf] = ()


def read_config(config_dir: str, environment: Mapping[str, str], *, pfs: str = "all", force: bool = False) -> DlbConfig:
    """From `dlb.conf` or `dlb-<NODE_NAME>.conf`, and `DLB_VFS` and `DLB_PFS`, which win. Raises `ConfigError`.

    `pfs` is what counts where nothing is said.
    """
    file = files.find(config_dir, "dlb", environment.get("NODE_NAME", ""))
    config = parse(file.path, file.text, pfs) if file else DlbConfig(pfs=pfs)
    if text := environment.get("DLB_VFS"):
        config = replace(config, vfs=_within("DLB_VFS", 0, text, text, MAX_VFS, least=1))
    if text := environment.get("DLB_PFS"):
        config = replace(config, pfs=_choice("DLB_PFS", 0, text, text))
    return replace(config, force=force)


def parse(path: str, text: str, pfs: str = "all") -> DlbConfig:
    """From lines `VFs=2`, `PFs=all` or `first`, and resources of each VF as `num_ldb_ports=64`.

    `pfs` is what counts where nothing is said. Raises `ConfigError`.
    """
    found: dict[str, str] = {}
    vfs, resources = 1, dict[str, int]()
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if not line or line.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or key not in ("VFs", "PFs", *ONE_VF):
            raise ConfigError(path, number, shown(line), f"VFs=, PFs=, or one of {', '.join(ONE_VF)} with =")
        if key in found:
            raise ConfigError(path, number, f"{shown(line)} as one more line with {key}", "one only")
        found[key] = value
        if key == "VFs":
            vfs = _within(path, number, line, value, MAX_VFS, least=1)
        elif key == "PFs":
            pfs = _choice(path, number, line, value)
        else:
            resources[key] = _within(path, number, line, value, 2**31 - 1)
    return DlbConfig(vfs=vfs, pfs=pfs, resources=resources, file=path)


def planners(host: Host, config: DlbConfig) -> list[Planner]:
    """A planner for each PF that the configuration is about. Raises `Unreadable`."""
    try:
        names = host.names(_DRIVERS)
    except Missing:
        return []
    addresses = [name for name in names if pci_address(name) and not host.is_vf(f"{_DRIVERS}/{name}")]
    if config.pfs == "first":
        addresses = addresses[:1]
    return [partial(plan, config, address) for address in addresses]


def plan(config: DlbConfig, address: str, host: Host) -> Plan:
    """What the PF needs now."""
    try:
        pf = _look(host, f"{_DRIVERS}/{address}")
    except HostError as error:
        return Plan(device=address, failure=str(error))
    made = Plan(device=address, now=_told(pf))
    if pf.total is None:
        return replace(made, refusal="it has no sriov_totalvfs: SR-IOV is off in the firmware, or this is a VM")
    share, failure = _share(config, pf)
    if failure:
        return replace(made, failure=failure)
    anew = config.force and pf.count not in (0, config.vfs)
    if anew or not pf.count:
        steps = [vf_count_step(pf.path, pf.count, 0, skip_on=_NOT_TO_BE_HAD)] if anew else []
        steps.append(vf_count_step(pf.path, 0, config.vfs, skip_on=_NOT_TO_BE_HAD))
        later = [f"resources of each VF: {_listed(share)}"]
        return replace(made, steps=steps, later=later, back=_way_back(config, pf, address) if anew else None)
    if pf.count != config.vfs:
        return replace(made, refusal=f"{pf.count} VFs are enabled, {config.vfs} wanted, which stays so unless forced")
    notes = [f"{pf.count} VFs are enabled, {len(pf.vfs)} are to be seen"] if len(pf.vfs) != pf.count else []
    bare = [vf for vf in pf.vfs if _is_bare(vf, share)]
    what = f"resources of {len(bare)} VF{'s' * (len(bare) > 1)}: {_listed(share)}"
    return replace(made, steps=[step for vf in bare for step in _provided(vf, share, what)], notes=notes)


def _way_back(config: DlbConfig, pf: _Pf, address: str) -> Planner:
    """VFs that are taken away come back without what they had: to write the old number would not do."""
    had = max((vf.has for vf in pf.vfs), key=lambda has: sum(has.values()), default=config.resources)
    return partial(plan, replace(config, vfs=pf.count, resources=had, force=True), address)


def _look(host: Host, path: str) -> _Pf:
    """Raises `HostError`."""
    try:
        total = read_number(host, f"{path}/sriov_totalvfs")
    except Missing:
        return _Pf(path=path)
    return _Pf(
        path=path,
        total=total,
        count=read_number(host, f"{path}/sriov_numvfs"),
        has=_resources(host, f"{path}/total_resources"),
        vfs=[_vf(host, path, link) for link in vf_links(host, path)],
    )


def _vf(host: Host, path: str, link: str) -> _Vf:
    try:
        driver = host.driver(f"{path}/{link}")
    except Missing:
        driver = ""
    resources = f"{path}/vf{link.removeprefix('virtfn')}_resources"
    return _Vf(
        address=vf_address(host, f"{path}/{link}"), driver=driver, resources=resources, has=_resources(host, resources)
    )


def _resources(host: Host, directory: str) -> dict[str, int]:
    """Those of the directory that are known here. Raises `HostError`."""
    return {name: read_number(host, f"{directory}/{name}") for name in ONE_VF if host.exists(f"{directory}/{name}")}


def _told(pf: _Pf) -> dict[str, str]:
    """The PF for people."""
    now = {"driver": _DRIVER}
    if pf.total is not None:
        now["VFs"] = f"{pf.count} of {pf.total}"
    if pf.vfs:
        drivers = [vf.driver or "no driver" for vf in pf.vfs]
        now["VFs on"] = ", ".join(f"{name} ({drivers.count(name)})" for name in dict.fromkeys(drivers))
        given = [_listed({name: value for name, value in vf.has.items() if value}) or "nothing" for vf in pf.vfs]
        now["VFs have"] = "; ".join(f"{one} ({given.count(one)})" for one in dict.fromkeys(given))
    return now


def _listed(resources: Mapping[str, int]) -> str:
    return ", ".join(f"{name.removeprefix('num_')} {value}" for name, value in resources.items())


def _share(config: DlbConfig, pf: _Pf) -> tuple[dict[str, int], str]:
    """What each VF gets, and why that cannot be, if it cannot."""
    if config.vfs > (pf.total or 0):
        return {}, f"{config.vfs} VFs wanted, it can have {pf.total}"
    if config.vfs > 1 and not pf.has:
        return {}, f"{config.vfs} VFs wanted, and there is no total_resources to divide"
    if config.vfs == 1:
        share = {name: min(value, pf.has.get(name, value)) for name, value in ONE_VF.items()}
    else:
        share = {name: value // config.vfs for name, value in pf.has.items()}
    for name, value in config.resources.items():
        if value * config.vfs > pf.has.get(name, value * config.vfs):
            return {}, f"{name}={value} wanted for each of {config.vfs} VFs, it has {pf.has[name]} in all"
        share[name] = value
    return share, ""


def _is_bare(vf: _Vf, share: Mapping[str, int]) -> bool:
    """Whether nobody has looked after the VF, or somebody has begun to give it that share."""
    if vf.driver == _DRIVER:
        return bool(vf.has) and not any(vf.has.values())
    return not vf.driver and all(value in (0, share.get(name)) for name, value in vf.has.items())


def _provided(vf: _Vf, share: Mapping[str, int], what: str) -> Iterator[Step]:
    """The way of a VF to its share, and to the driver."""
    bind, unbind = (f"{_DRIVERS}/bind", vf.address), (f"{_DRIVERS}/unbind", vf.address)
    if vf.driver:
        yield Step(what=what, path=unbind[0], text=vf.address, undo=bind)
    for name, value in share.items():
        if vf.has.get(name, value) != value:
            path = f"{vf.resources}/{name}"
            yield Step(what=what, path=path, text=str(value), undo=(path, str(vf.has[name])))
    yield Step(what=what, path=bind[0], text=vf.address, undo=unbind)


def _within(file: str, line: int, found: str, value: str, most: int, *, least: int = 0) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) < 11 and least <= int(value) <= most):
        raise ConfigError(file, line, shown(found), f"a number from {least} to {most}")
    return int(value)


def _choice(file: str, line: int, found: str, value: str) -> str:
    if value not in PFS:
        raise ConfigError(file, line, shown(found), f"one of {', '.join(PFS)}")
    return value
