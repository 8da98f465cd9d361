"""Custom resources in, the DaemonSets that the operator would make of them out; nothing is asked of a cluster.

    rendered(text, settings) -> str      YAML in, YAML out: for tests, for support, and to look before applying

The definitions' schemas and admission's defaults and checks are applied as well, but for what needs a cluster:
overlaps, ConfigMaps.
"""

from collections.abc import Iterator

import msgspec

from accelplane.kube.jsontypes import JsonObject
from accelplane.kube.names import is_dns_subdomain
from accelplane.kube.schemas import violations
from accelplane.operator import crds, defaulting, images, models, validation
from accelplane.operator.daemonsets import render
from accelplane.operator.settings import ImagePolicy, Settings

_MOST_BYTES = 1024 * 1024


class NotRendered(Exception):
    """The text, or a resource in it, cannot be rendered; the message says which and why."""


def rendered(text: str, settings: Settings) -> str:
    """The DaemonSets of all custom resources in the text; other objects are passed over. Raises `NotRendered`."""
    import yaml  # noqa: PLC0415 - the operator itself has no use for it

    if len(text.encode()) > _MOST_BYTES:
        raise NotRendered(f"the text has more than {_MOST_BYTES} bytes")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            # A few lines of them can stand for more than a machine's memory holds.
            raise NotRendered("the text has YAML aliases (*name), expected none")
        documents = [msgspec.json.encode(document) for document in yaml.safe_load_all(text)]
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise NotRendered(f"this is no YAML of Kubernetes objects: {error}") from None
    made = [_daemonset(each, settings) for document in documents for each in _resources(document)]
    if not made:
        raise NotRendered(f"there is no resource of {models.GROUP}/{models.VERSION}")
    return yaml.safe_dump_all(made, sort_keys=False)


class _Head(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    items: list[msgspec.Raw] = []


def _resources(document: bytes | msgspec.Raw) -> Iterator[bytes | msgspec.Raw]:
    """The custom resource in a document, or those of a list."""
    try:
        head = msgspec.json.decode(document, type=_Head)
    except msgspec.ValidationError:
        return
    if head.kind.endswith("List"):
        for item in head.items:
            yield from _resources(item)
    elif head.api_version.partition("/")[0] == models.GROUP:
        yield document


def _daemonset(document: bytes | msgspec.Raw, settings: Settings) -> JsonObject:
    resource: JsonObject = _without_nulls(msgspec.json.decode(document))
    kind, metadata = resource.get("kind"), resource.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    told = f"{kind or 'object'} {name or 'without a name'}"
    model = models.BY_KIND.get(kind) if isinstance(kind, str) else None
    if model and (problem := next(violations(resource, crds.schema_of(model)), "")):
        raise NotRendered(f"{told}: {problem}")
    if model and not (isinstance(name, str) and is_dns_subdomain(name)):
        raise NotRendered(f"{told}: metadata.name is {name!a}, expected a name of a-z, 0-9, - and .")
    try:
        plugin = models.decode(_defaulted(resource, settings.images))
    except msgspec.ValidationError as error:
        raise NotRendered(f"{told}: {error}") from None
    verdict = validation.verdict(plugin, settings.images)
    if verdict.refusal:
        raise NotRendered(f"{told}: {verdict.refusal}")
    return render(images.upgrade(plugin, settings.images)[0], settings).as_object()


def _without_nulls(resource: JsonObject) -> JsonObject:
    """What the API server makes of `tolerations: null` and the like before it looks at anything."""
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
