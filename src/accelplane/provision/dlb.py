"""DLB physical functions (PF): virtual functions (VF), and their share of the PF's resources.

Facts: Intel's out-of-tree dlb2 driver and its guide to SR-IOV. A VF needs resources, which can be written to
`vf<N>_resources/` of its PF only while no driver is bound to the VF. A VF without any is set up, and one that has some
is not changed.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.host.drivers import vf_address, vf_links
from accelplane.provision import config as files
from accelplane.provision.binding import missing_vfs, read_number, vf_count_step, vf_drivers
from accelplane.provision.config import ConfigError, quote
from accelplane.provision.steps import Plan, Planner, Step

# The resources that the original init container writes to its single VF.
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
# The original treats a device in use, and one that its container cannot write to, as success.
SKIP_ERRNOS = (errno.EBUSY, errno.EROFS, errno.EACCES, errno.EPERM)


class DlbConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state: `vfs` of every PF, or of the first one, with the `resources` that the file sets for each VF.

    With `force`, VFs in another number are replaced. `file` is the path of the file.
    """

    vfs: int = 1
    pfs: str = "all"
    resources: Mapping[str, int] = {}
    file: str = ""
    force: bool = False


class _Vf(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    driver: str
    resources: str  # their directory, `has` its entries
    has: Mapping[str, int]


class _Pf(msgspec.Struct, frozen=True, kw_only=True):
    """A PF in sysfs. `has` is its `total_resources`, empty if it has no such directory."""

    path: str
    total: int | None = None
    count: int = 0
    has: Mapping[str, int] = {}
    vfs: Sequence[_Vf] = ()


def read_config(config_dir: str, environment: Mapping[str, str], *, pfs: str = "all", force: bool = False) -> DlbConfig:
    """From `dlb.conf` or `dlb-<NODE_NAME>.conf`, and `DLB_VFS` and `DLB_PFS`, which win. Raises `ConfigError`.

    `pfs` is the default.
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

    `pfs` is the default. Raises `ConfigError`.
    """
    found: dict[str, str] = {}
    vfs, resources = 1, dict[str, int]()
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if not line or line.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or key not in ("VFs", "PFs", *ONE_VF):
            raise ConfigError(path, number, quote(line), f"VFs=, PFs=, or one of {', '.join(ONE_VF)} with =")
        if key in found:
            raise ConfigError(path, number, f"{quote(line)} as a second line with {key}", "one line")
        found[key] = value
        if key == "VFs":
            vfs = _within(path, number, line, value, MAX_VFS, least=1)
        elif key == "PFs":
            pfs = _choice(path, number, line, value)
        else:
            resources[key] = _within(path, number, line, value, 2**31 - 1)
    return DlbConfig(vfs=vfs, pfs=pfs, resources=resources, file=path)


def planners(host: Host, config: DlbConfig) -> list[Planner]:
    """A planner for each PF that the configuration covers. Raises `Unreadable`."""
    names = host.optional_names(_DRIVERS)
    addresses = [name for name in names if pci_address(name) and not host.is_vf(f"{_DRIVERS}/{name}")]
    if config.pfs == "first":
        addresses = addresses[:1]
    return [partial(plan, config, address) for address in addresses]


def plan(config: DlbConfig, address: str, host: Host) -> Plan:
    """The writes that the PF needs now."""
    try:
        pf = _read(host, f"{_DRIVERS}/{address}")
    except HostError as error:
        return Plan(device=address, failure=str(error))
    made = Plan(device=address, now=_properties(pf))
    if pf.total is None:
        return replace(
            made, skip_reason="no sriov_totalvfs: SR-IOV is disabled in the firmware, or this is a virtual machine"
        )
    share, failure = _share(config, pf)
    if failure:
        return replace(made, failure=failure)
    replaced = config.force and pf.count not in (0, config.vfs)
    if replaced or not pf.count:
        steps = [vf_count_step(pf.path, pf.count, 0, skip_on=SKIP_ERRNOS)] if replaced else []
        steps.append(vf_count_step(pf.path, 0, config.vfs, skip_on=SKIP_ERRNOS))
        later = [f"resources of each VF: {_format(share)}"]
        return replace(made, steps=steps, later=later, rollback=_rollback(config, pf, address) if replaced else None)
    if pf.count != config.vfs:
        return replace(
            made, skip_reason=f"sriov_numvfs is {pf.count}, expected {config.vfs}; use --force to replace the VFs"
        )
    shown_vfs = len(pf.vfs)
    notes = [missing_vfs(pf.count, shown_vfs)] if shown_vfs != pf.count else []
    bare = [vf for vf in pf.vfs if _is_bare(vf, share)]
    what = f"resources of {len(bare)} VF{'s' * (len(bare) > 1)}: {_format(share)}"
    return replace(made, steps=[step for vf in bare for step in _setup_steps(vf, share, what)], notes=notes)


def _rollback(config: DlbConfig, pf: _Pf, address: str) -> Planner:
    """The rollback planner: VFs that are disabled and enabled again have lost their resources."""
    had = max((vf.has for vf in pf.vfs), key=lambda has: sum(has.values()), default=config.resources)
    return partial(plan, replace(config, vfs=pf.count, resources=had, force=True), address)


def _read(host: Host, path: str) -> _Pf:
    """Raises `HostError`."""
    if not host.exists(f"{path}/sriov_totalvfs"):
        return _Pf(path=path)
    return _Pf(
        path=path,
        total=read_number(host, f"{path}/sriov_totalvfs"),
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
    """The known resources in the directory. Raises `HostError`."""
    return {name: read_number(host, f"{directory}/{name}") for name in ONE_VF if host.exists(f"{directory}/{name}")}


def _properties(pf: _Pf) -> dict[str, str]:
    """The PF, for `Plan.now`."""
    now = {"driver": _DRIVER}
    if pf.total is not None:
        now["VFs"] = f"{pf.count} of {pf.total}"
    if pf.vfs:
        now["VFs on"] = vf_drivers(vf.driver for vf in pf.vfs)
        given = [_format({name: value for name, value in vf.has.items() if value}) or "nothing" for vf in pf.vfs]
        now["VFs have"] = "; ".join(f"{one} ({given.count(one)})" for one in dict.fromkeys(given))
    return now


def _format(resources: Mapping[str, int]) -> str:
    return ", ".join(f"{name.removeprefix('num_')} {value}" for name, value in resources.items())


def _share(config: DlbConfig, pf: _Pf) -> tuple[dict[str, int], str]:
    """The resources of each VF, and the problem if the PF has too few."""
    if config.vfs > (pf.total or 0):
        return {}, f"{config.vfs} VFs expected, but sriov_totalvfs is {pf.total}"
    if config.vfs > 1 and not pf.has:
        return {}, f"{config.vfs} VFs expected, but there is no total_resources to divide"
    if config.vfs == 1:
        share = {name: min(value, pf.has.get(name, value)) for name, value in ONE_VF.items()}
    else:
        share = {name: value // config.vfs for name, value in pf.has.items()}
    for name, value in config.resources.items():
        if value * config.vfs > pf.has.get(name, value * config.vfs):
            return {}, f"{name}={value} for each of {config.vfs} VFs, but total_resources has {pf.has[name]}"
        share[name] = value
    return share, ""


def _is_bare(vf: _Vf, share: Mapping[str, int]) -> bool:
    """Whether the VF has no resources yet, or only a part of that share."""
    if vf.driver == _DRIVER:
        return bool(vf.has) and not any(vf.has.values())
    return not vf.driver and all(value in (0, share.get(name)) for name, value in vf.has.items())


def _setup_steps(vf: _Vf, share: Mapping[str, int], what: str) -> Iterator[Step]:
    """The steps that write the share to the VF, and bind it to the driver again."""
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
        raise ConfigError(file, line, quote(found), f"a number from {least} to {most}")
    return int(value)


def _choice(file: str, line: int, found: str, value: str) -> str:
    if value not in PFS:
        raise ConfigError(file, line, quote(found), f"one of {', '.join(PFS)}")
    return value
