"""What admission fills into a custom resource.

    missing(family, resource, policy)    the fields and what goes in
    patch(family, resource, policy)      the same as a JSON patch

It reads no more than it fills in: whether the rest is right is told by the API server's schema and by `validation`,
which come later and say it better.
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
    """The images, by their fields, that a resource of the family (`gpu`) needs and does not name.

    Raises `msgspec.DecodeError` when the resource is no JSON object with a `spec` that is an object or absent.
    """
    spec = msgspec.json.decode(resource, type=_Resource).spec or _Spec()
    found: dict[str, str] = {}
    if _empty(spec.image):
        found["image"] = policy.reference(f"intel-{family}-plugin")
    if family == "fpga" and _empty(spec.init_image):
        found["initImage"] = policy.reference("intel-fpga-initcontainer")
    return found


def patch(family: str, resource: bytes | msgspec.Raw, policy: ImagePolicy) -> list[Json]:
    """The same as operations of a JSON patch, which are empty when there is nothing to fill in."""
    found = missing(family, resource, policy)
    operations: list[Json] = []
    if found and msgspec.json.decode(resource, type=_Resource).spec is None:
        operations.append({"op": "add", "path": "/spec", "value": {}})
    for field, image in found.items():
        operations.append({"op": "add", "path": f"/spec/{field}", "value": image})
    return operations


def _empty(value: msgspec.Raw) -> bool:
    return bytes(value).strip() in (b'""', b"null")
