"""Dry run: the DaemonSets that the operator creates for custom resources, without a cluster.

    render_text(text, settings) -> RenderResult      YAML in, YAML and warnings out

The schemas of the definitions and the defaulting and validation of admission are applied. What needs a cluster is not
checked: overlaps with other resources, ConfigMaps.
"""

from collections.abc import Iterator

import msgspec

from accelplane.kube.jsontypes import JsonObject
from accelplane.kube.names import is_dns_subdomain
from accelplane.kube.schemas import violations
from accelplane.operator import crds, defaulting, images, models, validation
from accelplane.operator.daemonsets import render
from accelplane.operator.settings import ImagePolicy, Settings

_MAX_BYTES = 1024 * 1024


class RenderError(Exception):
    """The text, or a resource in it, cannot be rendered. The message has one line, which names the resource."""


class RenderResult(msgspec.Struct, frozen=True):
    """The DaemonSets as YAML, and the warnings that admission would return, each with the name of its resource."""

    text: str
    warnings: tuple[str, ...] = ()


def render_text(text: str, settings: Settings) -> RenderResult:
    """Renders all custom resources of a text and ignores other objects. Raises `RenderError`."""
    import yaml  # noqa: PLC0415 - the operator does not need it at start

    if len(text.encode()) > _MAX_BYTES:
        raise RenderError(f"the text has {len(text.encode())} bytes, expected at most {_MAX_BYTES}")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            # A few lines with aliases can expand beyond the memory of the machine.
            raise RenderError("the text has YAML aliases (*name), expected none; write the values instead")
        documents = [msgspec.json.encode(document) for document in yaml.safe_load_all(text)]
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise RenderError(f"the text is no YAML of Kubernetes objects: {' '.join(str(error).split())}") from None
    daemonsets: list[JsonObject] = []
    warnings: list[str] = []
    for document in documents:
        for resource in _resources(document):
            daemonset, found = _render(resource, settings)
            daemonsets.append(daemonset)
            warnings += found
    if not daemonsets:
        raise RenderError(f"found no custom resource, expected one with apiVersion {models.API_VERSION}")
    return RenderResult(yaml.safe_dump_all(daemonsets, sort_keys=False), tuple(warnings))


class _Head(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    items: list[msgspec.Raw] = []


def _resources(document: bytes | msgspec.Raw) -> Iterator[bytes | msgspec.Raw]:
    """The custom resource in a document, or those of a list. A wrong group or kind alone does not hide a resource."""
    try:
        head = msgspec.json.decode(document, type=_Head)
    except msgspec.ValidationError:
        return
    if head.kind.endswith("List"):
        for item in head.items:
            yield from _resources(item)
    elif head.api_version.partition("/")[0] == models.GROUP or head.kind.lower() in models.BY_LOWER_KIND:
        yield document


def _render(document: bytes | msgspec.Raw, settings: Settings) -> tuple[JsonObject, Iterator[str]]:
    """The DaemonSet of a custom resource, and the warnings about it. Raises `RenderError`."""
    resource: JsonObject = _without_nulls(msgspec.json.decode(document))
    kind, metadata = resource.get("kind"), resource.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    title = f"{kind or 'object'} {name or 'without a name'}"
    model = models.BY_KIND.get(kind) if isinstance(kind, str) else None
    if model and resource.get("apiVersion") == models.API_VERSION:
        if problem := next(violations(resource, crds.schema_of(model)), ""):
            raise RenderError(f"{title}: {problem}")
        if not (isinstance(name, str) and is_dns_subdomain(name)):
            raise RenderError(f"{title}: metadata.name is {name!a}, expected a name of a-z, 0-9, - and .")
    try:
        plugin = models.decode(_defaulted(resource, settings.images))
    except msgspec.ValidationError as error:
        raise RenderError(f"{title}: {error}") from None
    verdict = validation.verdict(plugin, settings.images)
    if verdict.refusal:
        raise RenderError(f"{title}: {verdict.refusal}")
    made = render(images.upgrade(plugin, settings.images)[0], settings).as_object()
    return made, (f"{title}: {warning}" for warning in verdict.warnings)


def _without_nulls(resource: JsonObject) -> JsonObject:
    """The resource without null fields, which the API server treats as unset."""
    pruned: JsonObject = {}
    for name, value in resource.items():
        if value is not None:
            pruned[name] = _without_nulls(value) if isinstance(value, dict) else value
    return pruned


def _defaulted(resource: JsonObject, policy: ImagePolicy) -> JsonObject:
    kind = resource.get("kind")
    model = models.BY_KIND.get(kind) if isinstance(kind, str) else None
    spec = resource.get("spec", {})
    if model is None or not isinstance(spec, dict):
        return resource
    return {**resource, "spec": {**spec, **defaulting.missing(model.family, msgspec.json.encode(resource), policy)}}
