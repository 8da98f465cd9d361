"""The API's rules for ResourceSlices, so that one bad device does not prevent the publication of all.

Facts: validation of `resource.k8s.io` in Kubernetes 1.34 to 1.38. Where versions differ, the strictest rule applies.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from accelplane.dra.resourceslice import (
    CounterConsumption,
    CounterSet,
    CounterValue,
    Device,
    DeviceAttribute,
    DeviceCapacity,
    DeviceTaint,
    RequestPolicy,
    RequestRange,
    ResourceSlice,
    quantity_value,
)

Layout = Literal["together", "separate"]
"""Where counter sets are: with Kubernetes 1.34 in the slice of their devices, later in slices of their own."""

MAX_DEVICES = 64  # of a slice; 128 if no device has taints or consumes counters
MAX_ATTRIBUTES = 32  # with capacities
MAX_VALUE = 64  # bytes
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
MAX_TAINTS = 4  # 16 since Kubernetes 1.35
MAX_COUNTER_SETS = 8  # of a slice in the separate layout
MAX_COUNTERS = 32  # of a counter set, and of a slice in the layout of 1.34
MAX_CONSUMED_COUNTERS = 1024  # of a slice in the layout of 1.34
MAX_CONSUMED_SETS = 2  # of a device in the separate layout
MAX_VALID_VALUES = 10

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_NUMBER = r"(0|[1-9][0-9]{0,17})"  # 1.38 has the limit of 18 digits
_PRERELEASE = r"(0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"
_SEMANTIC_VERSION = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_PRERELEASE}(\.{_PRERELEASE})*)?(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?"
)


class Problem(Struct, frozen=True):
    """A violated rule: the name of the device, empty for the slice, the field, and what was found and expected."""

    device: str
    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def problems(checked: ResourceSlice, layout: Layout) -> Iterator[Problem]:
    """The violated rules, none for a slice that the API server accepts."""
    spec = checked.spec
    if not is_subdomain(checked.metadata.name, 253):
        yield _found("metadata.name", checked.metadata.name, "a DNS subdomain of at most 253 characters")
    if not is_subdomain(spec.driver, 63):
        yield _found("spec.driver", spec.driver, "a DNS subdomain of at most 63 characters")
    parts = spec.pool.name.split("/")
    if len(spec.pool.name) > 253 or not all(is_subdomain(part, 253) for part in parts):
        yield _found("spec.pool.name", spec.pool.name, "DNS subdomains joined by /, with at most 253 characters")
    if not is_subdomain(spec.node_name or "", 253):
        yield _found("spec.nodeName", spec.node_name or "", "a DNS subdomain of at most 253 characters")
    if not 0 <= spec.pool.generation <= MAX_INTEGER:
        yield _found("spec.pool.generation", spec.pool.generation, "an integer from 0")
    if not 0 < spec.pool.resource_slice_count <= MAX_INTEGER:
        yield _found("spec.pool.resourceSliceCount", spec.pool.resource_slice_count, "an integer from 1")
    devices, sets = spec.devices or (), spec.shared_counters or ()
    yield from _counter_set_problems(sets, devices, layout)
    if len(devices) > MAX_DEVICES:
        yield _found("spec.devices", len(devices), f"at most {MAX_DEVICES} devices")
    yield from _duplicates("spec.devices", (device.name for device in devices))
    counters = {each.name: each.counters for each in sets}
    for number, device in enumerate(devices):
        yield from _device_problems(device, f"spec.devices[{number}]", counters, layout)


def is_label(text: str) -> bool:
    """Whether it is a DNS label (RFC 1123)."""
    return _LABEL.fullmatch(text) is not None


def is_subdomain(text: str, size: int) -> bool:
    """Whether it is a DNS subdomain (RFC 1123) of at most `size` characters."""
    return len(text) <= size and _SUBDOMAIN.fullmatch(text) is not None


def is_qualified_name(name: str) -> bool:
    """Whether it is the name of an attribute or capacity: an identifier of C, or `<domain>/<identifier>`."""
    domain, slash, identifier = name.rpartition("/")
    return _IDENTIFIER.fullmatch(identifier) is not None and (not slash or is_subdomain(domain, 63))


def is_semantic_version(text: str) -> bool:
    """Whether it is a semantic version 2.0.0 that an attribute may have."""
    return len(text) <= MAX_VALUE and _SEMANTIC_VERSION.fullmatch(text) is not None


def _counter_set_problems(sets: Sequence[CounterSet], devices: Sequence[Device], layout: Layout) -> Iterator[Problem]:
    path = "spec.sharedCounters"
    yield from _duplicates(path, (each.name for each in sets))
    for number, each in enumerate(sets):
        yield from _counter_problems("", f"{path}[{number}]", each.name, each.counters)
    if layout == "separate":
        if sets and devices:
            yield _found("spec", "devices and sharedCounters", "one of both")
        if len(sets) > MAX_COUNTER_SETS:
            yield _found(path, len(sets), f"at most {MAX_COUNTER_SETS} counter sets")
        return
    number_of_counters = sum(len(each.counters) for each in sets)
    if number_of_counters > MAX_COUNTERS:
        yield _found(path, number_of_counters, f"at most {MAX_COUNTERS} counters in all sets")
    consumed = sum(len(each.counters) for device in devices for each in device.consumes_counters or ())
    if consumed > MAX_CONSUMED_COUNTERS:
        yield _found("spec.devices", consumed, f"at most {MAX_CONSUMED_COUNTERS} consumed counters")


def _device_problems(
    device: Device, path: str, counters: Mapping[str, Mapping[str, CounterValue]], layout: Layout
) -> Iterator[Problem]:
    name, attributes, capacities = device.name, device.attributes or {}, device.capacity or {}
    if not is_label(name):
        yield _found(f"{path}.name", name, "a DNS label of at most 63 characters", name)
    if len(attributes) + len(capacities) > MAX_ATTRIBUTES:
        count = len(attributes) + len(capacities)
        yield _found(path, count, f"at most {MAX_ATTRIBUTES} attributes and capacities", name)
    for key, attribute in attributes.items():
        yield from _named_problems(name, f"{path}.attributes[{key}]", key, _attribute_problem(attribute))
    for key, capacity in capacities.items():
        problem = _capacity_problem(capacity, multiple=bool(device.allow_multiple_allocations))
        yield from _named_problems(name, f"{path}.capacity[{key}]", key, problem)
    taints = device.taints or ()
    if len(taints) > MAX_TAINTS:
        yield _found(f"{path}.taints", len(taints), f"at most {MAX_TAINTS} taints", name)
    for number, taint in enumerate(taints):
        if problem := _taint_problem(taint, layout):
            yield Problem(name, f"{path}.taints[{number}]", problem)
    yield from _consumption_problems(name, f"{path}.consumesCounters", device.consumes_counters or (), counters, layout)


def _consumption_problems(
    device: str,
    path: str,
    consumed: Sequence[CounterConsumption],
    counters: Mapping[str, Mapping[str, CounterValue]],
    layout: Layout,
) -> Iterator[Problem]:
    yield from _duplicates(path, (each.counter_set for each in consumed), device)
    for number, each in enumerate(consumed):
        yield from _counter_problems(device, f"{path}[{number}]", each.counter_set, each.counters)
        if layout == "together" and not set(each.counters) <= set(counters.get(each.counter_set, ())):
            yield _found(f"{path}[{number}]", each.counter_set, "a counter set of the slice with all counters", device)
    if layout == "separate" and len(consumed) > MAX_CONSUMED_SETS:
        yield _found(path, len(consumed), f"at most {MAX_CONSUMED_SETS} counter sets", device)
    number_of_counters = sum(len(each.counters) for each in consumed)
    if layout == "together" and number_of_counters > MAX_COUNTERS:
        yield _found(path, number_of_counters, f"at most {MAX_COUNTERS} counters", device)


def _counter_problems(device: str, path: str, name: str, counters: Mapping[str, CounterValue]) -> Iterator[Problem]:
    if not is_label(name):
        yield _found(path, name, "a DNS label as the name of a counter set", device)
    if not 0 < len(counters) <= MAX_COUNTERS:
        yield _found(f"{path}.counters", len(counters), f"1 to {MAX_COUNTERS} counters", device)
    for key, counter in counters.items():
        if not is_label(key):
            yield _found(f"{path}.counters", key, "DNS labels as names", device)
        if quantity_value(counter.value) is None:
            yield _found(f"{path}.counters[{key}]", counter.value, "a quantity", device)


def _named_problems(device: str, path: str, name: str, problem: str) -> Iterator[Problem]:
    if not is_qualified_name(name):
        yield _found(path, name, "an identifier of at most 32 characters, after a DNS subdomain and / or alone", device)
    if problem:
        yield Problem(device, path, problem)


def _attribute_problem(attribute: DeviceAttribute) -> str:
    values = [attribute.string, attribute.integer, attribute.boolean, attribute.version]
    if sum(value is not None for value in values) != 1:
        return "expected exactly one value"
    if attribute.string is not None and not _is_value(attribute.string):
        return f"found {attribute.string[:80]!a}, expected text of at most {MAX_VALUE} bytes"
    if attribute.integer is not None and not MIN_INTEGER <= attribute.integer <= MAX_INTEGER:
        return f"found {attribute.integer}, expected an integer of 64 bits"
    if attribute.version is not None and not is_semantic_version(attribute.version):
        return f"found {attribute.version[:80]!a}, expected a semantic version of at most {MAX_VALUE} bytes"
    return ""


def _is_value(text: str) -> bool:
    try:
        return len(text.encode()) <= MAX_VALUE
    except UnicodeEncodeError:
        return False


def _capacity_problem(capacity: DeviceCapacity, *, multiple: bool) -> str:
    value, policy = quantity_value(capacity.value), capacity.request_policy
    if value is None:
        return f"found {capacity.value[:40]!a}, expected a quantity"
    if policy is None:
        return ""
    if not multiple:
        return "found requestPolicy, which needs allowMultipleAllocations"
    return _policy_problem(policy, value)


def _policy_problem(policy: RequestPolicy, capacity: int) -> str:
    values = policy.valid_values or ()
    if values and policy.valid_range is not None:
        return "found validValues and validRange, expected one of both"
    if policy.default is None:
        return "found no default, which validValues and validRange need" if values or policy.valid_range else ""
    default = quantity_value(policy.default)
    if default is None:
        return f"found {policy.default[:40]!a}, expected a quantity"
    if values:
        return _values_problem([quantity_value(each) for each in values], default, capacity)
    return _range_problem(policy.valid_range, default, capacity) if policy.valid_range is not None else ""


def _values_problem(values: Sequence[int | None], default: int, capacity: int) -> str:
    numbers = [each for each in values if each is not None]
    if len(numbers) < len(values) or len(values) > MAX_VALID_VALUES or numbers != sorted(set(numbers)):
        return f"validValues: expected at most {MAX_VALID_VALUES} different quantities in ascending order"
    if numbers[-1] > capacity or default not in numbers:
        return f"validValues: expected the default, {default}, and no value above the capacity, {capacity}"
    return ""


def _range_problem(limits: RequestRange, default: int, capacity: int) -> str:
    """Older servers fail with an internal error for a step of 0, and for values beyond 64 bits."""
    given = {"min": limits.minimum, "max": limits.maximum, "step": limits.step}
    numbers = {name: quantity_value(text) for name, text in given.items() if text is not None}
    if any(number is None or not 0 <= number <= MAX_INTEGER for number in numbers.values()):
        return "validRange: expected integers of 64 bits from 0"
    minimum, maximum, step = (numbers.get(name) for name in given)
    if minimum is None:
        return "validRange: found no min"
    greatest = capacity if maximum is None else maximum
    if not minimum <= default <= greatest <= capacity:
        return f"validRange: expected min <= default <= max <= {capacity}, found {minimum}, {default}, {greatest}"
    if step is None:
        return ""
    if step == 0 or minimum + step > capacity:
        return f"validRange: step is {step}, expected at least 1 and at most the capacity less min"
    if (default - minimum) % step or (maximum is not None and (maximum - minimum) % step):
        return f"validRange: expected default and max at a multiple of the step, {step}, from min"
    return ""


def _taint_problem(taint: DeviceTaint, layout: Layout) -> str:
    prefix, slash, name = taint.key.rpartition("/")
    if not _LABEL_NAME.fullmatch(name) or (slash and not is_subdomain(prefix, 253)):
        return f"key is {taint.key[:80]!a}, expected the name of a label"
    if taint.value and not _LABEL_NAME.fullmatch(taint.value):
        return f"value is {taint.value[:80]!a}, expected the value of a label"
    effects = ("NoSchedule", "NoExecute") if layout == "together" else ("None", "NoSchedule", "NoExecute")
    return "" if taint.effect in effects else f"effect is {taint.effect[:40]!a}, expected one of {', '.join(effects)}"


def _duplicates(path: str, names: Iterable[str], device: str = "") -> Iterator[Problem]:
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(device or name, path, f"found {name[:80]!a} {count} times, expected different names")


def _found(path: str, found: object, expected: str, device: str = "") -> Problem:
    shown = ascii(found[:80]) if isinstance(found, str) else found
    return Problem(device, path, f"found {shown}, expected {expected}")
