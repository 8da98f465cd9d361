"""The fields of GenericDevicePlugin that are not those of every kind. `devices` is the option of the plugin."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from accelplane.plugins.generic.config import DEFAULT_DOMAIN, Devices

__all__ = ["Cdi", "Devices", "Domain", "NodeSelector", "Policy"]

NodeSelector = Annotated[
    Mapping[str, str],
    Meta(description="Labels of the nodes that run the plugin. kubernetes.io/os=linux when not set."),
]
Domain = Annotated[
    str,
    Meta(
        description=f"Part of the resource names before the slash. {DEFAULT_DOMAIN} when not set.",
        extra_json_schema={"maxLength": 253},
    ),
]
Policy = Annotated[
    Literal["balanced", "packed", "none"] | None,
    Meta(description="Which of the shared devices a container gets: balanced, packed or none. none when not set."),
]
Cdi = Annotated[
    Literal["all", "only", "off"] | None,
    Meta(description="Whether containers get devices by CDI: all (also), only or off. off when not set."),
]
