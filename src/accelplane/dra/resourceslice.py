"""ResourceSlices of the API `resource.k8s.io`: the fields that this program uses, in v1, v1beta2 and v1beta1.

In v1beta1 the content of a device is in the field `basic`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

GROUP = "resource.k8s.io"
PLURAL = "resourceslices"
ApiVersion = Literal["v1", "v1beta2", "v1beta1"]
API_VERSIONS: tuple[ApiVersion, ...] = ("v1", "v1beta2", "v1beta1")

_DECIMAL, _BINARY = ("", "k", "M", "G", "T", "P", "E"), ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_QUANTITY = re.compile(r"(-?[0-9]{1,19})(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")


class OwnerReference(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class Metadata(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """All fields that a client can set, so that an update keeps the others' values."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    finalizers: Sequence[str] | None = None
    owner_references: Sequence[OwnerReference] | None = None


class DeviceAttribute(Struct, frozen=True, omit_defaults=True):
    """Exactly one of the values."""

    string: str | None = None
    integer: int | None = field(name="int", default=None)
    boolean: bool | None = field(name="bool", default=None)
    version: str | None = None


class RequestRange(Struct, frozen=True, omit_defaults=True):
    minimum: str | None = field(name="min", default=None)
    maximum: str | None = field(name="max", default=None)
    step: str | None = None


class RequestPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    default: str | None = None
    valid_values: Sequence[str] | None = None
    valid_range: RequestRange | None = None


class DeviceCapacity(Struct, frozen=True, omit_defaults=True, rename="camel"):
    value: str
    request_policy: RequestPolicy | None = None


class CounterValue(Struct, frozen=True):
    value: str


class CounterSet(Struct, frozen=True):
    name: str
    counters: Mapping[str, CounterValue]


class CounterConsumption(Struct, frozen=True, rename="camel"):
    counter_set: str
    counters: Mapping[str, CounterValue]


class DeviceTaint(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    key: str
    value: str = ""
    effect: str = ""
    time_added: str | None = None


class DeviceContent(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    attributes: Mapping[str, DeviceAttribute] | None = None
    capacity: Mapping[str, DeviceCapacity] | None = None
    consumes_counters: Sequence[CounterConsumption] | None = None
    taints: Sequence[DeviceTaint] | None = None
    allow_multiple_allocations: bool | None = None


class Device(DeviceContent, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """`basic` is the content in v1beta1."""

    name: str = ""
    basic: DeviceContent | None = None


class ResourcePool(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class SliceSpec(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    driver: str = ""
    pool: ResourcePool = ResourcePool()
    node_name: str | None = None
    devices: Sequence[Device] | None = None
    shared_counters: Sequence[CounterSet] | None = None


class ResourceSlice(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A slice, or with nothing but a resource version the bookmark of a watch."""

    api_version: str = ""
    kind: str = ""
    metadata: Metadata = Metadata()
    spec: SliceSpec = SliceSpec()


def from_api(found: ResourceSlice) -> ResourceSlice:
    """The slice of any version as one of v1."""
    devices = [_flat(device) if device.basic is not None else device for device in found.spec.devices or ()]
    return replace(found, spec=replace(found.spec, devices=devices or None))


def to_api(wanted: ResourceSlice, version: ApiVersion) -> ResourceSlice:
    """The body of a request."""
    spec = wanted.spec
    if version == "v1beta1":
        spec = replace(spec, devices=[_wrapped(device) for device in spec.devices or ()] or None)
    return replace(wanted, api_version=f"{GROUP}/{version}", kind="ResourceSlice", spec=spec)


def _flat(device: Device) -> Device:
    return Device(name=device.name, **{name: getattr(device.basic, name) for name in DeviceContent.__struct_fields__})


def _wrapped(device: Device) -> Device:
    content = {name: getattr(device, name) for name in DeviceContent.__struct_fields__}
    return Device(name=device.name, basic=DeviceContent(**content))


def quantity(value: int) -> str:
    """The canonical text, which the API server returns for any text with this value."""
    base, suffixes = (1024, _BINARY) if value and value % 1024 == 0 else (1000, _DECIMAL)
    power = 0
    while value and value % base == 0 and power < len(suffixes) - 1:
        value //= base
        power += 1
    return f"{value}{suffixes[power]}"


def quantity_value(text: str) -> int | None:
    """The value of a text with an integer, None for another text."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    suffix = found[2] or ""
    base, suffixes = (1000, _DECIMAL) if suffix in _DECIMAL else (1024, _BINARY)
    return int(found[1]) * base ** suffixes.index(suffix)
