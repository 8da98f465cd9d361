"""The resources of the plugins and the drivers of their claims, by family."""

from collections.abc import Sequence

FAMILIES = ("gpu", "npu", "qat", "dsa", "iaa", "dlb", "sgx", "fpga", "onload")

_PREFIXES = tuple(f"{family}.intel.com/" for family in FAMILIES if family != "onload")
_ONLOAD = "amd.com/onload"


def is_known_driver(driver: str, prefixes: Sequence[str] = ()) -> bool:
    """Whether the devices of a DRA driver are those of a plugin, or its name begins with one of the other prefixes."""
    return f"{driver}/" in _PREFIXES or driver.startswith(tuple(prefixes))


def is_known(resource: str, prefixes: Sequence[str] = ()) -> bool:
    """Whether a resource is one of the plugins, or begins with one of the other prefixes."""
    return resource.startswith((*_PREFIXES, *prefixes)) or resource == _ONLOAD


def is_driver(resource: str) -> bool:
    """Whether it is a driver of claims in place of a resource of the kubelet."""
    return "/" not in resource


def family_of(resource: str) -> str:
    """The family of a resource or driver: `gpu` of `gpu.intel.com/i915`; the domain for those of other plugins."""
    if resource == _ONLOAD:
        return "onload"
    domain = resource.partition("/")[0]
    return domain.removesuffix(".intel.com") if f"{domain}/" in _PREFIXES else domain
