"""Custom resources of any kind, whose spec and status are decoded where they are used.

    Widget = custom_resource("example.com", "v1", "Widget", namespaced=True)
    widgets = manager.cache(Widget, transform=compact)
    spec = widgets.get(request).decode(WidgetModel)

A resource that does not fit its type is thus an object in the cache like others, and its status can have the reason.
"""

from typing import TypeVar

import msgspec
from msgspec import Raw

from .jsontypes import JsonObject
from .objects import GlobalResource, Metadata, NamespacedResource, api, api_of, trim

Model = TypeVar("Model")


class CustomResource(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A custom resource; `custom_resource` makes its kinds."""

    metadata: Metadata
    spec: Raw = Raw()
    status: Raw = Raw()

    def document(self) -> JsonObject:
        """The resource as a JSON object."""
        resource = api_of(type(self)).resource
        document: JsonObject = {
            "apiVersion": f"{resource.group}/{resource.version}",
            "kind": resource.kind,
            "metadata": msgspec.to_builtins(self.metadata),
        }
        for name, raw in (("spec", self.spec), ("status", self.status)):
            if bytes(raw) not in (b"", b"null"):
                document[name] = msgspec.json.decode(raw)
        return document

    def decode(self, model: type[Model]) -> Model:
        """The complete resource as another type. Raises `msgspec.ValidationError`."""
        return msgspec.convert(self.document(), model)


def custom_resource(
    group: str, version: str, kind: str, *, plural: str = "", namespaced: bool = False
) -> type[CustomResource]:
    """A kind of custom resources. The plural is that of `crds.plural_of` unless it is given."""
    scope = NamespacedResource if namespaced else GlobalResource
    return type(kind, (scope, CustomResource), {"_api_info": api(group, version, kind, plural or f"{kind.lower()}s")})


def compact(thing: CustomResource) -> None:
    """A transform for caches: copies spec and status, which otherwise keep the complete page of a list in memory."""
    trim(thing)
    thing.spec, thing.status = thing.spec.copy(), thing.status.copy()
