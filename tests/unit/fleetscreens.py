"""Screens of the fleet page for tests: clusters, and what a page of them contains."""

from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

import msgspec

from accelplane.fleet.model import Agent, Cluster, Node, NodeResource
from accelplane.fleet.use import UseHistory
from accelplane.fleet.web.html import KEY, LIVE, Element, element
from accelplane.fleet.web.page import Assets, Context, Frame, Page, document
from accelplane.fleet.web.query import Query, ScreenName
from accelplane.fleet.web.screens import SCREENS
from accelplane.fleet.web.summaries import Summaries
from accelplane.report.inventory import Holder, ReportedUnit

I915 = "gpu.intel.com/i915"
ALL: Callable[[str], bool] = lambda _namespace: True  # noqa: E731
ASSETS = Assets("assets/s.css", "assets/s.js")


class Parsed(HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def unit(name: str = "card0", **changes: Any) -> ReportedUnit:
    return msgspec.structs.replace(
        ReportedUnit("gpu", name, name, "0000:03:00.0", "Flex 170", 0, ids={I915: 2}, since=1764000000), **changes
    )


def node(name: str = "n1", *units: ReportedUnit, **changes: Any) -> Node:
    ids = sum(each.ids.get(I915, 0) for each in units)
    allocated = sum(holder.count for each in units for holder in each.holders)
    resource = NodeResource(
        I915, capacity=ids, allocatable=ids, ids=ids, healthy=ids, allocated=allocated, stage="registered"
    )
    agent = Agent("accelplane/a", "accelplane node", "1.0.0", "connected", holders_source="podresources")
    instance = Node(name, {"zone": "a"}, agents=(agent,), resources=(resource,), units=units)
    return msgspec.structs.replace(instance, **changes)


def holder(namespace: str = "team", pod: str = "p", number: int = 1) -> Holder:
    return Holder(namespace, pod, "main", I915, number, 1764000000)


def cluster(*nodes: Node, **changes: Any) -> Cluster:
    return msgspec.structs.replace(Cluster(7, 100.0, 50.0, {each.name: each for each in nodes}), **changes)


def page(
    name: ScreenName, found: Cluster, query: Query | None = None, visible: Callable[[str], bool] = ALL, **more: Any
) -> Page:
    return SCREENS[name].make(_context(found, visible, more), query or Query())


def html(
    name: ScreenName, found: Cluster, query: Query | None = None, visible: Callable[[str], bool] = ALL, **more: Any
) -> str:
    context, query = _context(found, visible, more), query or Query()
    return document(SCREENS[name].make(context, query), Frame(assets=ASSETS, screen=name, query=query), context)


def _context(found: Cluster, visible: Callable[[str], bool], more: dict[str, Any]) -> Context:
    facts = {"now": 160.0, "use": UseHistory(), **more}
    return Context(cluster=found, summaries=Summaries().of(found), visible=visible, **facts)


def text(name: ScreenName, found: Cluster, query: Query | None = None, **more: Any) -> str:
    return Parsed(html(name, found, query, **more)).text


def blocks(tree: "Element | str") -> Mapping[str, Mapping[str, Element]]:
    """The children of all live elements by name and key, in their order."""
    return {
        block.attributes[LIVE]: {
            child.attributes.get(KEY, ""): child for child in block.children if isinstance(child, Element)
        }
        for block in _live_elements(tree)
    }


def _live_elements(tree: "Element | str") -> Iterator[Element]:
    if isinstance(tree, str):
        return
    if LIVE in tree.attributes:
        yield tree
        return
    for child in tree.children:
        yield from _live_elements(child)


def names_of(found: Page, block: str = "rows") -> list[str]:
    return list(blocks(element("div", *found.content))[block])


FLEET = cluster(
    node("a", unit("card0", phase="unhealthy", reason="bus", model="Max 1550")),
    node("b", unit("card0", holders=(holder("team", "train"),), idle_since=90), unit("card1"), labels={"zone": "b"}),
    node("c", unit("wq0.1", plugin="dsa", ids={"dsa.intel.com/wq": 1}, known=False), cordoned=True),
    Node("d", resources=(NodeResource(I915, capacity=3, allocatable=3),)),
    Node(
        "e",
        agents=(Agent("n/e", "accelplane node", "", "stale"),),
        resources=(NodeResource(I915, capacity=1, allocatable=1),),
        ready=False,
    ),
)
