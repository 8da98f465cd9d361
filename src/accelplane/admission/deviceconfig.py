"""Validation of opaque device configuration in ResourceClaims, ResourceClaimTemplates and DeviceClasses.

The rules are those of the node, which checks a claim again when it is prepared: this webhook reports the same problem
when the object is created. Parameters of other drivers are ignored.

Facts: Kubernetes API `resource.k8s.io`, where these fields are the same in v1, v1beta2 and v1beta1.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from accelplane.dra.claims import GROUP, Opaque
from accelplane.dra.configuration import KINDS, Source, parse
from accelplane.dra.model import ClaimError
from accelplane.kube.admission import ALLOWED, Decision, Review, Validator, deny

PATH = "/validate-resource-k8s-io-device-configuration"


class Configuration(Struct, frozen=True):
    opaque: Opaque | None = None


class Devices(Struct, frozen=True):
    config: Sequence[Configuration] | None = None


class Spec(Struct, frozen=True):
    """The spec of any of the kinds. A template has the spec of its claims in its spec, a class has `config`."""

    devices: Devices | None = None
    config: Sequence[Configuration] | None = None
    spec: "Spec | None" = None


class ConfiguredObject(Struct, frozen=True):
    """The part of the object that matters."""

    spec: Spec | None = None


_DECODER = msgspec.json.Decoder(ConfiguredObject)
_SOURCES: Mapping[str, Source] = {
    "DeviceClass": "FromClass",
    "ResourceClaim": "FromClaim",
    "ResourceClaimTemplate": "FromClaim",
}


def validator() -> Validator[ConfiguredObject]:
    """The webhook for objects of the three kinds."""
    return Validator(PATH, ConfiguredObject, decide)


def decide(review: Review, found: ConfiguredObject) -> Decision:
    """Denies the object if its configuration for a driver of this project is invalid; the message has all problems.

    An update that does not change the configuration is allowed. Raises `msgspec.DecodeError`.
    """
    source = _SOURCES.get(review.kind.kind) if review.kind.group == GROUP else None
    if source is None:
        kind = f"{review.kind.group[:80]}/{review.kind.kind[:80]}"
        return deny(f"found kind {kind!a}, expected {', '.join(_SOURCES)} of {GROUP}", code=400, reason="BadRequest")
    path, configurations = _configurations(review.kind.kind, found)
    problems = list(_problems(path, source, configurations))
    if not problems:
        return ALLOWED
    if review.operation == "UPDATE":
        _path, before = _configurations(review.kind.kind, _DECODER.decode(review.old_object))
        if _parameters(before) == _parameters(configurations):
            return ALLOWED
    return deny("; ".join(problems), code=422, reason="Invalid")


def _problems(path: str, source: Source, configurations: Sequence[Configuration]) -> Iterator[str]:
    for number, each in enumerate(configurations):
        if each.opaque is None or each.opaque.driver not in KINDS:
            continue
        try:
            parse(each.opaque.driver, bytes(each.opaque.parameters), source)
        except ClaimError as error:
            yield f"{path}[{number}].opaque.parameters: {error}"


def _parameters(configurations: Sequence[Configuration]) -> Sequence[tuple[str, object]]:
    """The driver and the decoded parameters of each entry. The API server may encode them in another order."""
    found = (each.opaque for each in configurations if each.opaque is not None)
    return [(each.driver, msgspec.json.decode(each.parameters)) for each in found]


def _configurations(kind: str, found: ConfiguredObject) -> tuple[str, Sequence[Configuration]]:
    """The path of the list in the object, and the list."""
    spec = found.spec or Spec()
    if kind == "DeviceClass":
        return "spec.config", spec.config or ()
    path = "spec.devices.config"
    if kind == "ResourceClaimTemplate":
        path, spec = "spec.spec.devices.config", spec.spec or Spec()
    return path, (spec.devices or Devices()).config or ()
