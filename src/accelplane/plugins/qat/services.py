"""The resource of virtual functions, from the configured services of a QAT device.

Facts: Documentation/ABI/testing/sysfs-driver-qat (`cfg_services`) and debugfs-driver-qat (`dev_cfg`). The kernel
returns services in its own order, not in that of the configuration.
"""

from typing import NamedTuple

GENERIC = "generic"

_ORDER = ("asym", "sym", "dc", "decomp", "dcc")


class Service(NamedTuple):
    """The resource, and the problem if it is `generic` because the services are unknown."""

    resource: str
    problem: str = ""


def service(text: str) -> Service:
    """Returns the resource for a text such as `sym;asym` of `cfg_services`, with words in any order."""
    words = {word.strip() for word in text.split(";")}
    if words == {"asym", "sym"}:
        return Service("cy")
    if words <= set(_ORDER):
        return Service("-".join(word for word in _ORDER if word in words))
    expected = f"words of {', '.join(_ORDER)}, separated by ;"
    return Service(GENERIC, f"services are {text[:80]!a}, expected {expected}")


def sections(text: str) -> dict[str, dict[str, str]]:
    """Returns the sections of an INI file. Values before the first section have the section name "".

    Only whole lines are comments, because values contain semicolons. Raises `ValueError` with the invalid line.
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
