"""Kinds that the tests of the controller runtime use: a custom one, and part of a known one."""

from typing import ClassVar

import msgspec

from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, NamespacedResource, api


class WidgetSpec(msgspec.Struct, omit_defaults=True):
    size: int = 0


class WidgetStatus(msgspec.Struct, omit_defaults=True):
    done: int = 0


class Widget(GlobalResource, msgspec.Struct, omit_defaults=True, kw_only=True):
    """A cluster-scoped custom resource."""

    _api_info: ClassVar[ApiInfo] = api("example.com", "v1", "Widget", "widgets")
    metadata: Metadata
    spec: WidgetSpec = msgspec.field(default_factory=WidgetSpec)
    status: WidgetStatus = msgspec.field(default_factory=WidgetStatus)


class Config(NamespacedResource, msgspec.Struct, omit_defaults=True, kw_only=True):
    """The used fields of a ConfigMap."""

    _api_info: ClassVar[ApiInfo] = api("", "v1", "ConfigMap", "configmaps")
    metadata: Metadata
    data: dict[str, str] = msgspec.field(default_factory=dict[str, str])


def widget(name: str, size: int = 0, **labels: str) -> dict[str, object]:
    return {"metadata": {"name": name, "labels": labels}, "spec": {"size": size}}
