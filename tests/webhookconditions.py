"""The conditions under which the API server calls the webhooks for pods."""

from typing import Any


def match_conditions(family: str) -> list[dict[str, Any]]:
    """Those of `fpga` or `sgx`."""
    provider = "has(object.metadata.annotations) && 'sgx.intel.com/quote-provider' in object.metadata.annotations || "
    containers = "(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : []))"
    requested = f"c.resources.requests.exists(name, name.startsWith('{family}.intel.com/'))"
    expression = f"{containers}.exists(c, has(c.resources) && has(c.resources.requests) && {requested})"
    if family == "sgx":
        return [{"name": "uses-sgx", "expression": provider + expression}]
    return [{"name": "uses-fpgas", "expression": expression}]
