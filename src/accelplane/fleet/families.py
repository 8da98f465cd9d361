"""The resources of the plugins, by family."""

from collections.abc import Sequence

FAMILIES = ("gpu", "npu", "qat", "dsa", "iaa", "dlb", "sgx", "fpga", "onload")

_PREFIXES = tuple(f"{family}.intel.com/" for family in FAMILIES if family != "onload")
_ONLOAD = "amd.com/onload"


def is_known(resource: str, prefixes: Sequence[str] = ()) -> bool:
    """Whether a resource is one of the plugins, or begins with one of the other prefixes."""
    return resource.startswith((*_PREFIXES, *prefixes)) or resource == _ONLOAD


def family_of(resource: str) -> str:
    """The family of a resource: `gpu` of `gpu.intel.com/i915`; the domain for resources of other plugins."""
    if resource == _ONLOAD:
        return "onload"
    domain = resource.partition("/")[0]
    return domain.removesuffix(".intel.com") if resource.startswith(_PREFIXES) else domain
