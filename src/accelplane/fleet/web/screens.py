"""The screens by name."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from . import device, devices, groups, namespaces, node, nodes, overview, pods, search, waiting
from .page import Context, Page
from .query import Query, ScreenName


class Screen(Struct, frozen=True):
    """How a screen is made, whether it shows readings or holders of its node, and values that change by themselves.

    `refresh` is the number of seconds between two updates without a change of the cluster.
    """

    make: Callable[[Context, Query], Page]
    needs_readings: bool = False
    needs_holders: bool = False
    refresh: float = 0.0


# The use of devices is read once a minute, the values of an open device every 2 s.
SCREENS: Mapping[ScreenName, Screen] = {
    "overview": Screen(overview.screen),
    "devices": Screen(devices.screen, refresh=60),
    "nodes": Screen(nodes.screen),
    "node": Screen(node.screen, needs_holders=True, refresh=30),
    "device": Screen(device.screen, needs_readings=True, refresh=2),
    "pods": Screen(pods.screen, refresh=60),
    "waiting": Screen(waiting.screen),
    "namespaces": Screen(namespaces.screen, refresh=60),
    "groups": Screen(groups.screen, refresh=60),
    "search": Screen(search.screen, refresh=60),
}
PATHS: Mapping[str, ScreenName] = {"/" if name == "overview" else f"/{name}": name for name in SCREENS}
