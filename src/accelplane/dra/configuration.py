"""Opaque configuration of claims and device classes: `apiVersion: <driver>/v1alpha1` and the kinds of each driver.

The last configuration that applies to a request replaces the others completely. Configurations of claims come after
those of classes. Fields that only an administrator may set (`CLASS_ONLY`) have the value of the last class that
configures the request, and are an error in a claim. No field is a path of the host.

Imports no code of nodes: the operator's webhook checks claims with it, too.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from accelplane.dra.claims import AllocatedConfig
from accelplane.dra.model import ClaimError

VERSION = "v1alpha1"
MAX_PARAMETERS = 10 * 1024  # as in the API

# Intel's GPU driver binds the devices of this class to VFIO, without configuration.
VFIO_CLASS = "gpu-vfio.intel.com"

_AFFINITY_MASK = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?(,[0-9]{1,3}(\.[0-9]{1,3})?){0,63}")
_AFU_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class DeviceConfig(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base class. `CLASS_ONLY` are the fields, as written in YAML, that a claim cannot set."""

    CLASS_ONLY: ClassVar[frozenset[str]] = frozenset()

    api_version: str = ""
    kind: str = ""


class GpuConfig(DeviceConfig, frozen=True, kw_only=True):
    """`byPath` replaces the option of the plugin; `affinityMask` is `ZE_AFFINITY_MASK` of the containers."""

    access: Literal["drm", "vfio"] = "drm"
    iommufd: bool = False
    by_path: Literal["none", "single", "links", "all"] | None = None
    affinity_mask: str = ""

    def __post_init__(self) -> None:
        if self.affinity_mask and not _AFFINITY_MASK.fullmatch(self.affinity_mask):
            raise ValueError(f"affinityMask is {self.affinity_mask[:40]!a}, expected a mask such as 0.1 or 0,1")
        if self.iommufd and self.access != "vfio":
            raise ValueError("iommufd is set, which needs access: vfio")


class NpuConfig(DeviceConfig, frozen=True, kw_only=True):
    pass


class DlbConfig(DeviceConfig, frozen=True, kw_only=True):
    pass


class QatConfig(DeviceConfig, frozen=True, kw_only=True):
    """`driver` is the driver that the functions have to be bound to; the option of the plugin binds them."""

    driver: Literal["vfio-pci", "igb_uio"] | None = None
    iommufd: bool = False


class WorkQueueConfig(DeviceConfig, frozen=True, kw_only=True):
    """With `requireClientsZero` a queue that a process has open is not prepared."""

    require_clients_zero: bool = False


class FpgaConfig(DeviceConfig, frozen=True, kw_only=True):
    """`afu` is the ID of an accelerator function, or the name of its file in the store without the extension.

    Without `verify`, a claim that is prepared already is not checked again for its function. `release: reset` resets
    the port after the last pod of the claim.
    """

    CLASS_ONLY: ClassVar[frozenset[str]] = frozenset(("verify", "release"))

    afu: str = ""
    verify: bool = True
    release: Literal["keep", "reset"] = "keep"

    def __post_init__(self) -> None:
        if self.afu and not _AFU_NAME.fullmatch(self.afu):
            raise ValueError(f"afu is {self.afu[:40]!a}, expected 32 hexadecimal digits or a name")


class SgxConfig(DeviceConfig, frozen=True, kw_only=True):
    """With `aesmd: socket` containers get the directory of the socket of the node's aesmd."""

    CLASS_ONLY: ClassVar[frozenset[str]] = frozenset(("aesmd",))

    aesmd: Literal["socket", "none"] = "none"


KINDS: Mapping[str, type[DeviceConfig]] = {
    "gpu.intel.com": GpuConfig,
    "npu.intel.com": NpuConfig,
    "dlb.intel.com": DlbConfig,
    "qat.intel.com": QatConfig,
    "dsa.intel.com": WorkQueueConfig,
    "iaa.intel.com": WorkQueueConfig,
    "fpga.intel.com": FpgaConfig,
    "sgx.intel.com": SgxConfig,
}

ConfigT = TypeVar("ConfigT", bound=DeviceConfig)
Source: TypeAlias = Literal["FromClass", "FromClaim"]


class _Header(Struct, frozen=True, rename="camel"):
    api_version: str = ""
    kind: str = ""


def parse(driver: str, parameters: bytes, source: Source) -> DeviceConfig:
    """The configuration in opaque parameters of the driver. Raises `ClaimError` that names the field."""
    where = f"configuration of {'the device class' if source == 'FromClass' else 'the claim'} for {driver}"
    if len(parameters) > MAX_PARAMETERS:
        raise ClaimError(f"{where}: {len(parameters)} bytes, expected at most {MAX_PARAMETERS}")
    kind = KINDS.get(driver)
    try:
        found: dict[str, Any] = msgspec.json.decode(parameters, type=dict[str, Any])
        header = msgspec.convert({key: found[key] for key in ("apiVersion", "kind") if key in found}, _Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ClaimError(f"{where}: expected an object with apiVersion and kind: {error}") from None
    if kind is None:
        raise ClaimError(f"{where}: found {header.kind[:40]!a}, but this driver has no configuration")
    if header.api_version != f"{driver}/{VERSION}":
        raise ClaimError(f"{where}: apiVersion is {header.api_version[:80]!a}, expected {driver}/{VERSION}")
    if header.kind != kind.__name__:
        raise ClaimError(f"{where}: kind is {header.kind[:40]!a}, expected {kind.__name__}")
    names = [each.encode_name for each in fields(kind) if each.encode_name not in ("apiVersion", "kind")]
    for name in found.keys() - {"apiVersion", "kind", *names}:
        listed = f"expected {', '.join(names)}" if names else "it has no fields"
        raise ClaimError(f"{where}: unknown field {name[:40]!a} of {kind.__name__}{_nearest(name, names)} ({listed})")
    if source == "FromClaim" and (forbidden := sorted(kind.CLASS_ONLY & found.keys())):
        raise ClaimError(f"{where}: {forbidden[0]} can only be set in a device class, remove it from the claim")
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ClaimError(f"{where}: {_nearest_value(str(error), found, kind)}") from None


def for_request(
    driver: str, request: str, device_class: str, configs: Iterable[AllocatedConfig], kind: type[ConfigT]
) -> ConfigT:
    """The configuration of a request of an allocated claim. Raises `ClaimError`."""
    found: DeviceConfig = kind()
    if isinstance(found, GpuConfig) and device_class == VFIO_CLASS:
        found = GpuConfig(access="vfio")
    by_class: DeviceConfig = found
    # Each of them is checked, also those that do not apply.
    for source, config, applies in parsed(driver, configs, request):
        if not applies:
            continue
        found = config
        if source == "FromClass":
            by_class = config
    restricted = {
        each.name: getattr(by_class, each.name) for each in fields(kind) if each.encode_name in kind.CLASS_ONLY
    }
    found = replace(found, **restricted) if restricted else found
    assert isinstance(found, kind)  # noqa: S101 - the driver has one kind
    return found


def parsed(
    driver: str, configs: Iterable[AllocatedConfig], request: str = ""
) -> Sequence[tuple[Source, DeviceConfig, bool]]:
    """The configurations for the driver, of classes first, and whether they apply. Raises `ClaimError`."""
    ordered = sorted(configs, key=lambda each: each.source != "FromClass")
    return [
        (each.source, parse(driver, bytes(each.opaque.parameters), each.source), each.applies_to(request))
        for each in ordered
        if each.opaque is not None and each.opaque.driver == driver
    ]


def _nearest_value(problem: str, found: Mapping[str, Any], kind: type[DeviceConfig]) -> str:
    """The problem, with the field and the nearest valid value if a field has another value than the listed ones."""
    for each in fields(kind):
        value = found.get(each.encode_name)
        choices = [choice for choice in _choices(each.type) if isinstance(choice, str)]
        if isinstance(value, str) and choices and value not in choices:
            return f"{each.encode_name} is {value[:40]!a}{_nearest(value, choices)} (expected {', '.join(choices)})"
    return problem


def _nearest(word: str, choices: Sequence[str]) -> str:
    """The nearest of the choices for a message, empty without choices."""
    close = difflib.get_close_matches(word, choices, 1, 0.0)
    return f"; did you mean {close[0]}?" if close else ""


def _choices(annotation: Any) -> list[Any]:
    arguments: Sequence[Any] = getattr(annotation, "__args__", ())
    return [choice for each in arguments for choice in (_choices(each) or [each])]
