"""The checks of everything that plugins return: those of other projects are not type-checked.

A device that violates the contract becomes `Skipped`. Of other results the valid part is used, and the problems name
what was found. `node.hook_problems` logs and keeps them by plugin and hook.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from accelplane.devices import (
    HEALTHY,
    UNHEALTHY,
    Allocation,
    Cause,
    CdiDevice,
    Device,
    DeviceNode,
    HealthPolicy,
    Mount,
    Resource,
    Skipped,
    Verdict,
)
from accelplane.devices.names import check_device_id, check_resource_name
from accelplane.devices.unit import ATTRIBUTE_TYPES
from accelplane.kubelet.server import AllocationError
from accelplane.plugins import Config, Plugin, Sample, Watch

if TYPE_CHECKING:
    from accelplane.readings import DevicePlan

# Of `measure` of one plugin. Further families are left out.
MAX_SAMPLES = 2000
# The beginnings of the names of the agent's own families, but for those that plugins of this project measure.
OWN_PREFIXES = ("accelplane_", "process_")
_MEASURED_OWN = frozenset(("accelplane_sgx_epc_bytes",))

_MAX_EXAMINED = 20_000
_MAX_SHOWN = 82
_ANSWERS, _CAUSES = frozenset(("good", "bad", "unknown")), frozenset(get_args(Cause))
_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_NAME = re.compile(rf"(?:[a-z0-9][-a-z0-9.]{{0,252}}/)?{_NAME}")
_LABEL_VALUE = re.compile(rf"(?:{_NAME})?")
# Of the 32 attributes and capacities of a device; the others are those of all drivers.
_MAX_DEFAULTS = 20
_ATTRIBUTE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


def check_plugin(plugin: Plugin[Config]) -> None:
    """Raises `TypeError` that names an attribute which is missing or has a value that the agent cannot use."""
    for name, kind, expected in (
        ("config", Config, "super().__init__(config)"),
        ("namespace", str, "a domain"),
        ("watch", Watch, "a Watch"),
        ("health_policy", HealthPolicy, "a HealthPolicy"),
        ("removal_delay", (int, float), "seconds"),
        ("label_file", str, "a path"),
        ("cdi_kinds", (tuple, list), "a list of CDI kinds"),
        ("attribute_defaults", Mapping, "a mapping"),
        ("capacity_defaults", Mapping, "a mapping"),
    ):
        found: object = getattr(plugin, name, None)
        if not isinstance(found, kind):
            raise TypeError(f"{name} of the plugin is {_shown(found)}, expected {expected}")
    if plugin.health_policy.interval <= 0:
        raise TypeError(f"health_policy.interval is {plugin.health_policy.interval!a}, expected seconds above 0")
    _check_defaults("attribute_defaults", plugin.attribute_defaults, ATTRIBUTE_TYPES, "a text, number, bool or Version")
    _check_defaults("capacity_defaults", plugin.capacity_defaults, (int,), "a whole number")
    count = len(plugin.attribute_defaults) + len(plugin.capacity_defaults)
    if count > _MAX_DEFAULTS:
        raise TypeError(f"attribute_defaults and capacity_defaults are {count}, expected at most {_MAX_DEFAULTS}")


def _check_defaults(field: str, found: object, types: Collection[type], expected: str) -> None:
    for name, value in _mapping(found, field).items():
        if type(name) is not str or not _ATTRIBUTE_NAME.fullmatch(name):
            raise TypeError(f"{field} has the name {_shown(name)}, expected at most 32 letters, digits and _")
        if type(value) not in types:
            raise TypeError(f"{field} has {name}: {_shown(value)}, expected {expected}")


def checked_devices(namespace: str, found: object) -> Iterator[Device | Resource | Skipped]:
    """The devices that `Plugin.scan` returned.

    A device with a name that a kubelet would refuse, with the ID of an earlier one that differs, or with another
    invalid value, becomes `Skipped`. Raises `TypeError` if the result is not iterable.
    """
    names: set[str] = set()
    earlier: dict[tuple[str, str], Device] = {}
    checked: dict[int, object] = {}  # by identity, the values that IDs of one device share
    for item in iterable(found, "devices"):
        try:
            if isinstance(item, Skipped):
                yield _checked_skip(item)
                continue
            if not isinstance(item, (Device, Resource)):
                raise TypeError("scan yielded it, expected a Device, Resource or Skipped")
            resource = item.name if isinstance(item, Resource) else item.resource
            if resource not in names:
                check_resource_name(namespace, resource)
                names.add(resource)
            if isinstance(item, Device):
                check_device_id(item.id)
                _check_values(item, checked)
                if earlier.setdefault((resource, item.id), item) != item:
                    raise ValueError(f"scan yielded two devices with this id of the resource {resource}")
        except (ValueError, TypeError) as error:
            subject = item.id if isinstance(item, Device) else item.name if isinstance(item, Resource) else item
            yield Skipped(_shown(subject), str(error), warning=True)
        else:
            yield item


def _checked_skip(item: Skipped) -> Skipped:
    if type(item.subject) is str and type(item.reason) is str:
        return item
    return Skipped(str(item.subject)[:_MAX_SHOWN], str(item.reason), warning=bool(item.warning))


def _check_values(device: Device, checked: dict[int, object]) -> None:
    """Raises `ValueError` or `TypeError` that names the field."""
    if device.health not in (HEALTHY, UNHEALTHY):
        raise ValueError(f"health is {device.health!a}, expected {HEALTHY!r} or {UNHEALTHY!r}")
    topology = device.topology if isinstance(device.topology, tuple) else ()
    if invalid := [node for node in topology if type(node) is not int or node < 0]:
        raise ValueError(f"topology has {invalid[0]!a}, expected numbers of NUMA nodes; None if there is none")
    for field, value in (("reason", device.reason), ("unit", device.unit), ("part", device.part)):
        if type(value) is not str:
            raise ValueError(f"{field} is {value!a}, expected a text")
    if device.path is not None and type(device.path) is not str:
        raise ValueError(f"path is {device.path!a}, expected a directory of sysfs; None if there are several")
    for field, check in _CHECKS.items():
        value: object = getattr(device, field)
        if value and id(value) not in checked:
            check(field, value)
            checked[id(value)] = value


def _check_files(field: str, found: object) -> None:
    kind = DeviceNode if field == "nodes" else Mount
    for item in iterable(found, f"{kind.__name__} values"):
        if not isinstance(item, kind):
            raise TypeError(f"{field} has {_shown(item)}, expected a {kind.__name__}")
        for path in (item.host_path, item.container_path):
            if type(path) is not str or not path.startswith("/"):
                raise ValueError(f"{field} has the path {_shown(path)}, expected an absolute path")
        if isinstance(item, DeviceNode) and (type(item.permissions) is not str or set(item.permissions) - {*"rwm"}):
            raise ValueError(f"nodes has the permissions {_shown(item.permissions)}, expected letters of r, w and m")


def _check_texts(field: str, found: object) -> None:
    for name, value in _mapping(found, "texts").items():
        if type(name) is not str or type(value) is not str:
            raise ValueError(f"{field} has {_shown(name)}: {_shown(value)}, expected texts")


def _check_attributes(_field: str, found: object) -> None:
    for name, value in _mapping(found, "attributes").items():
        if type(name) is not str or type(value) not in ATTRIBUTE_TYPES:
            raise ValueError(f"attribute {name!a} is {value!a}, expected a text, number, bool or Version")


def _check_capacities(_field: str, found: object) -> None:
    for name, value in _mapping(found, "capacities").items():
        if type(name) is not str or type(value) is not int or value < 0:
            raise ValueError(f"capacity {name!a} is {value!a}, expected a number from 0")


def _check_cdi(_field: str, found: object) -> None:
    if not isinstance(found, CdiDevice):
        raise TypeError(f"cdi is {_shown(found)}, expected a CdiDevice")


_CHECKS: Mapping[str, Callable[[str, object], None]] = {
    "nodes": _check_files,
    "mounts": _check_files,
    "envs": _check_texts,
    "annotations": _check_texts,
    "attributes": _check_attributes,
    "capacities": _check_capacities,
    "cdi": _check_cdi,
}


def checked_verdicts(found: object, units: Collection[str]) -> tuple[dict[str, Verdict], list[str]]:
    """The verdicts by unit that `Plugin.health` returned for `units`, and the problems of others, which are left out.

    An invalid verdict is "unknown". Another cause than those of `Cause`, which are labels of metrics, is "other".
    Raises `TypeError` if the result is not a mapping.
    """
    verdicts: dict[str, Verdict] = {}
    unknown: list[str] = []
    for unit, verdict in _mapping(found, "verdicts by unit").items():
        if isinstance(unit, str) and unit in units:
            verdicts[unit] = _checked_verdict(verdict)
        else:
            unknown.append(_shown(unit))
    if not unknown:
        return verdicts, []
    shown = ", ".join(unknown[:8])
    return verdicts, [f"found verdicts of {shown}, expected the units of the devices that it was called with"]


def _checked_verdict(found: object) -> Verdict:
    if not isinstance(found, Verdict):
        return Verdict("unknown", f"health: found {_shown(found)}, expected a Verdict")
    try:
        # msgspec does not validate the fields of an existing value: an answer such as "Bad" would count as good.
        if found.answer in _ANSWERS and found.cause in _CAUSES and type(found.reason) is str:
            return found
        cause = found.cause if found.cause in _CAUSES else "other"
        return msgspec.convert(msgspec.to_builtins(replace(found, cause=cause)), Verdict)
    except (msgspec.MsgspecError, TypeError) as error:
        return Verdict("unknown", f"health: {error}")


def checked_labels(found: object) -> tuple[dict[str, str], list[str]]:
    """The labels that `Plugin.labels` returned, and the problems of invalid ones, which are left out.

    Raises `TypeError` if the result is not a mapping.
    """
    labels: dict[str, str] = {}
    problems: list[str] = []
    for name, value in _mapping(found, "labels").items():
        if not (isinstance(name, str) and _LABEL_NAME.fullmatch(name)):
            problems.append(f"found the name {_shown(name)}, expected a label name of Kubernetes")
        elif not (isinstance(value, str) and _LABEL_VALUE.fullmatch(value)):
            problems.append(
                f"{name}: found {_shown(value)}, expected a text of at most 63 characters of [A-Za-z0-9_.-]"
            )
        else:
            labels[name] = value
    return labels, problems


def checked_choice(found: object, offered: Collection[str]) -> tuple[list[str], list[str]]:
    """The offered IDs that `Plugin.preferred_allocation` returned, and the problem of others, which are left out.

    Raises `TypeError` if the result is not iterable.
    """
    chosen = list(iterable(found, "ids"))
    ids = [id_ for id_ in chosen if isinstance(id_, str) and id_ in offered]
    others = [_shown(id_) for id_ in chosen if not (isinstance(id_, str) and id_ in offered)]
    return ids, [f"found {', '.join(others[:8])}, expected available ids"] if others else []


def checked_allocation(hook: str, found: object) -> Allocation:
    """The answer of a hook. Raises `AllocationError` that names the hook and the field."""
    if not isinstance(found, Allocation):
        raise AllocationError(f"{hook}: found {_shown(found)}, expected an Allocation")
    try:
        for field in ("nodes", "mounts", "envs", "annotations"):
            _CHECKS[field](field, getattr(found, field))
        for name in iterable(found.cdi_devices, "names of CDI devices"):
            if type(name) is not str:
                raise ValueError(f"cdi_devices has {_shown(name)}, expected texts")
    except (ValueError, TypeError) as error:
        raise AllocationError(f"{hook}: {error}") from None
    return found


class Samples(NamedTuple):
    """Valid samples within the limits, the number of others by cause, and why there are others."""

    samples: list[Sample]
    dropped: Mapping[str, int] = {}
    problems: Sequence[str] = ()


def checked_samples(found: object) -> Samples:
    """The samples that `Plugin.measure` returned. A family that exceeds `MAX_SAMPLES` is left out.

    Raises `TypeError` if the result is not iterable, and the exceptions of its iterator.
    """
    samples: list[Sample] = []
    dropped = Counter[str]()
    problems: dict[str, None] = {}
    # One more than the limit of what is examined: a plugin may yield without end.
    for item in itertools.islice(iterable(found, "samples"), _MAX_EXAMINED + 1):
        cause, problem = _sample_problem(item)
        if isinstance(item, Sample) and not problem:
            samples.append(item)
        else:
            dropped[cause] += 1
            problems[problem] = None
    counts = Counter(sample.name for sample in samples)
    totals = zip(counts, itertools.accumulate(counts.values()), strict=True)
    kept = {name for name, total in totals if total <= MAX_SAMPLES}
    if excess := len(samples) - sum(counts[name] for name in kept):
        problems[f"found {len(samples)} samples, expected at most {MAX_SAMPLES}; {excess} are left out"] = None
        dropped["limit"] = excess
        samples = [sample for sample in samples if sample.name in kept]
    return Samples(samples, dropped, tuple(problems))


def _sample_problem(found: object) -> tuple[str, str]:
    """The cause and the problem of a sample, empty if it is valid. One invalid name would make the page invalid."""
    from accelplane.readings.values import LABEL_NAME, METRIC_NAME  # noqa: PLC0415 - memory of agents without pages

    if not isinstance(found, Sample):
        return "invalid-value", f"found {_shown(found)}, expected a Sample"
    name = found.name
    if type(name) is not str or not METRIC_NAME.fullmatch(name):
        return "invalid-name", f"metric name {_shown(name)}: expected letters, digits, _ and :, and no digit first"
    if name.startswith(OWN_PREFIXES) and name not in _MEASURED_OWN:
        return "invalid-name", f"metric name {name!a}: expected another prefix than {' or '.join(OWN_PREFIXES)}"
    if type(found.value) not in (int, float, bool) or type(found.help) is not str:
        return "invalid-value", f"{name}: found {_shown(found.value)}, expected a number and a help text"
    if not isinstance(found.labels, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - not type-checked
        return "invalid-value", f"{name}: found the labels {_shown(found.labels)}, expected a mapping of texts"
    for label, text in found.labels.items():
        if type(label) is not str or not LABEL_NAME.fullmatch(label):
            return "invalid-name", f"label {_shown(label)} of metric {name}: expected letters, digits and _"
        if type(text) is not str:
            return "invalid-value", f"label {label} of metric {name}: found {_shown(text)}, expected a text"
    return "", ""


def checked_plans(found: object) -> "tuple[list[DevicePlan], list[str]]":
    """The first plan of each device that `Plugin.readings` returned, and the problems of others.

    Raises `TypeError` if the result is not iterable, and the exceptions of its iterator.
    """
    from accelplane.readings import DevicePlan  # noqa: PLC0415 - as above

    plans: dict[str, DevicePlan] = {}
    problems: dict[str, None] = {}
    for item in iterable(found, "plans"):
        if not isinstance(item, DevicePlan) or type(item.device) is not str:
            problems[f"found {_shown(item)}, expected a DevicePlan"] = None
        elif plans.setdefault(item.device, item) is not item:
            problems[f"found two plans of the device {_shown(item.device)}, expected one"] = None
    return list(plans.values()), list(problems)


def iterable(found: object, expected: str) -> Iterable[object]:
    """Raises `TypeError` if it is a text or not iterable, such as the None of a hook without `return` or `yield`."""
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        raise TypeError(f"found {_shown(found)}, expected {expected}")
    return found  # pyright: ignore[reportUnknownVariableType] - of any types


def _mapping(found: object, expected: str) -> Mapping[object, object]:
    if not isinstance(found, Mapping):
        raise TypeError(f"found {_shown(found)}, expected a mapping of {expected}")
    return found  # pyright: ignore[reportUnknownVariableType] - of any types


def _shown(found: object) -> str:
    return ascii(found)[:_MAX_SHOWN]
