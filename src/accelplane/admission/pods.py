"""The containers of a pod, decoded one by one.

Only the fields that matter are decoded. A hostile pod of several megabytes takes little more memory than its text.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Raw, Struct

from accelplane.kube.jsonarray import elements
from accelplane.kube.jsonpatch import Word
from accelplane.kube.quantities import Quantity

NULL: Final = Raw(b"null")
_MAX_RESOURCES = 64 * 1024
_NO_RESOURCES: Final[Mapping[str, Quantity]] = {}


class Resources(Struct, frozen=True):
    limits: Raw = NULL
    requests: Raw = NULL


class Container(Struct, frozen=True, rename="camel"):
    """The part of a container that matters. Lists are not decoded: they may be long."""

    name: str = ""
    resources: Resources | None = None
    env: Raw = NULL
    env_from: Raw = NULL
    volume_mounts: Raw = NULL
    restart_policy: str | None = None


class PodSpec(Struct, frozen=True, rename="camel"):
    containers: Raw = NULL
    init_containers: Raw = NULL
    volumes: Raw = NULL
    runtime_class_name: str | None = None


class Place(Struct, frozen=True):
    """A container and its place in the pod."""

    path: tuple[Word, ...]
    container: Container

    @property
    def is_init(self) -> bool:
        """Whether it has to end before the containers start."""
        return self.path[1] == "initContainers" and self.container.restart_policy != "Always"


_CONTAINER = msgspec.json.Decoder(Container)
_QUANTITIES = msgspec.json.Decoder(dict[str, Quantity])


def containers(spec: PodSpec) -> Iterator[Place | None]:
    """Init containers, then containers. Raises `msgspec.DecodeError`.

    Yields None from time to time, as `elements` does.
    """
    for field, array in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        index = 0
        for element in elements(array):
            if element is None:
                yield None
            else:
                yield Place(("spec", field, index), _CONTAINER.decode(element))
                index += 1


def quantities(resources: Raw, prefix: str) -> Mapping[str, Quantity] | None:
    """The limits or requests whose names begin with `prefix`; None for null. Raises `msgspec.DecodeError`."""
    text = bytes(resources)
    if text == b"null":
        return None
    # A backslash may begin an escape, by which any name can be written.
    if text[:1] == b"{" and prefix.encode() not in text and b"\\" not in text:
        return _NO_RESOURCES
    if len(text) > _MAX_RESOURCES:
        raise msgspec.ValidationError(f"limits or requests of {len(text)} bytes, expected at most {_MAX_RESOURCES}")
    return {name: quantity for name, quantity in _QUANTITIES.decode(text).items() if name.startswith(prefix)}


def is_null(value: Raw) -> bool:
    return len(memoryview(value)) == 4 and bytes(value) == b"null"
