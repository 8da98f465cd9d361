"""Defaulting of custom resources at admission.

    missing(family, resource, policy)    the fields to fill in, with their values
    patch(family, resource, policy)      the same as a JSON patch

Only the fields to fill in are decoded. The schema and `validation` validate the others, and are called later.
"""

import msgspec

from accelplane.kube.jsontypes import Json
from accelplane.operator.settings import ImagePolicy


class _Spec(msgspec.Struct, rename="camel"):
    image: msgspec.Raw = msgspec.Raw(b'""')
    init_image: msgspec.Raw = msgspec.Raw(b'""')


class _Resource(msgspec.Struct):
    spec: _Spec | None = None


def missing(family: str, resource: bytes | msgspec.Raw, policy: ImagePolicy) -> dict[str, str]:
    """The images by field that a resource of the family (for example `gpu`) needs and does not name.

    Raises `msgspec.DecodeError` if the resource is no JSON object, or its `spec` is neither absent nor an object.
    """
    spec = msgspec.json.decode(resource, type=_Resource).spec or _Spec()
    found: dict[str, str] = {}
    if _empty(spec.image):
        found["image"] = policy.reference(f"intel-{family}-plugin")
    if family == "fpga" and _empty(spec.init_image):
        found["initImage"] = policy.reference("intel-fpga-initcontainer")
    return found


def patch(family: str, resource: bytes | msgspec.Raw, policy: ImagePolicy) -> list[Json]:
    """The missing fields as operations of a JSON patch; empty when nothing is missing."""
    found = missing(family, resource, policy)
    operations: list[Json] = []
    if found and msgspec.json.decode(resource, type=_Resource).spec is None:
        operations.append({"op": "add", "path": "/spec", "value": {}})
    for field, image in found.items():
        operations.append({"op": "add", "path": f"/spec/{field}", "value": image})
    return operations


def _empty(value: msgspec.Raw) -> bool:
    return bytes(value).strip() in (b'""', b"null")
