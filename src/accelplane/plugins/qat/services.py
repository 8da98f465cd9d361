"""What a QAT device was configured for, as text, and the resource that its virtual functions then are.

Facts: Documentation/ABI/testing/sysfs-driver-qat (`cfg_services`) and debugfs-driver-qat (`dev_cfg`). Kernels write a
set of services in their own order, whichever way it was given.
"""

from typing import NamedTuple

GENERIC = "generic"

_ORDER = ("asym", "sym", "dc", "decomp", "dcc")


class Service(NamedTuple):
    """The resource, and what is wrong if it is `generic` only for want of better knowledge."""

    resource: str
    problem: str = ""


def service(text: str) -> Service:
    """The resource for a text such as `sym;asym` of `cfg_services`, whatever the order of its words."""
    words = {word.strip() for word in text.split(";")}
    if words == {"asym", "sym"}:
        return Service("cy")
    if words <= set(_ORDER):
        return Service("-".join(word for word in _ORDER if word in words))
    expected = f"words of {', '.join(_ORDER)} with ; between"
    return Service(GENERIC, f"its services are {text[:80]!a}, expected {expected}")


def sections(text: str) -> dict[str, dict[str, str]]:
    """The sections of an INI file, the empty name for what stands before the first.

    Comments are lines of their own: values contain semicolons. Raises `ValueError` naming the line.
    """
    found: dict[str, dict[str, str]] = {}
    section = found.setdefault("", {})
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        key, equals, value = stripped.partition("=")
        if stripped[0] == "[" and stripped[-1] == "]":
            section = found.setdefault(stripped[1:-1].strip(), {})
        elif equals and key.strip():
            section[key.strip()] = value.strip()
        else:
            raise ValueError(f"line {number} is {stripped[:80]!a}, expected [section] or key = value")
    return found
