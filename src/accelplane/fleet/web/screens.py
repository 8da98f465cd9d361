"""The screens by name."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from . import device, namespaces, node, nodes, overview, waiting
from .page import Context, Page, ScreenName
from .query import ListQuery, NodesQuery, PlaceQuery, Query, list_query, nodes_query, place_query


class Screen(Struct, frozen=True):
    """A screen: how its query is read, and how it is made. `readings` and `holders`: it shows those of its node."""

    read: Callable[[Mapping[str, str]], Query]
    make: Callable[[Context, Query], Page]
    needs_readings: bool = False
    needs_holders: bool = False


def _place(make: Callable[[Context, PlaceQuery], Page]) -> Callable[[Context, Query], Page]:
    return lambda context, query: make(context, query if isinstance(query, PlaceQuery) else PlaceQuery())


def _list(make: Callable[[Context, ListQuery], Page]) -> Callable[[Context, Query], Page]:
    return lambda context, query: make(context, query if isinstance(query, ListQuery) else ListQuery())


def _nodes(context: Context, query: Query) -> Page:
    return nodes.screen(context, query if isinstance(query, NodesQuery) else NodesQuery())


SCREENS: Mapping[ScreenName, Screen] = {
    "overview": Screen(list_query, _list(overview.screen)),
    "nodes": Screen(nodes_query, _nodes),
    "node": Screen(place_query, _place(node.screen), needs_holders=True),
    "device": Screen(place_query, _place(device.screen), needs_readings=True),
    "waiting": Screen(list_query, _list(waiting.screen)),
    "namespaces": Screen(list_query, _list(namespaces.screen)),
}
PATHS: Mapping[str, ScreenName] = {
    "/": "overview",
    "/nodes": "nodes",
    "/node": "node",
    "/device": "device",
    "/waiting": "waiting",
    "/namespaces": "namespaces",
}
NAMES: Mapping[str, ScreenName] = {name: name for name in SCREENS}
