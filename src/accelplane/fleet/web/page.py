"""What all screens have in common: their context, the frame around them, and how facts are shown."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import Struct

from accelplane import __version__
from accelplane.report.inventory import Holder, ReportedUnit

from ..model import Cluster, NodeReadings
from .html import Element, count, element, keyed, live, render
from .query import ListQuery, NodesQuery, PlaceQuery, Query, link
from .summaries import State, Summary, Totals, held_share, state_of, totals

ScreenName = Literal["overview", "nodes", "node", "device", "waiting", "namespaces"]

HIDDEN = "hidden"
ROWS = 100
MAX_ELEMENTS = 2000
"""Elements of the rows of one page: the document of a screen has at most 2,500."""

_NAVIGATION: tuple[tuple[ScreenName, str, str], ...] = (
    ("overview", "./", "Overview"),
    ("nodes", "nodes", "Nodes"),
    ("waiting", "waiting", "Waiting pods"),
    ("namespaces", "namespaces", "Namespaces"),
)
_LETTERS: Mapping[State, str] = {"healthy": "H", "suspect": "S", "unhealthy": "U", "recovering": "R", "unknown": "?"}


class Context(Struct, frozen=True, kw_only=True):
    """The input of a screen. `visible` returns whether the viewer may see the names of pods in a namespace.

    `readings` and `holders` are those of the node of the screen; `holders` is None if they are not known.
    """

    cluster: Cluster
    summaries: Mapping[str, Summary]
    visible: Callable[[str], bool]
    now: float
    grafana_url: str = ""
    readings: NodeReadings | None = None
    holders: tuple[Holder, ...] | None = None
    holders_problem: str = ""


class Page(Struct, frozen=True, kw_only=True):
    """A screen: its title and its content."""

    title: str
    content: tuple[Element, ...]
    found: bool = True


class Assets(Struct, frozen=True):
    """The relative addresses of style sheet and script."""

    style: str
    script: str


class Frame(Struct, frozen=True, kw_only=True):
    """What surrounds a screen. `events` is the address of its updates; `user` has a name if there is a session."""

    assets: Assets
    screen: ScreenName
    query: Query
    user: str = ""


def document(page: Page, frame: Frame, context: Context) -> str:
    """The HTML of a page."""
    main = element(
        "main",
        element("h1", page.title, id="title", tabindex="-1"),
        *page.content,
        id="main",
    )
    controls = element(
        "p",
        element("a", "Refresh", href=link(_PATHS[frame.screen], frame.query), class_="refresh"),
        element("button", "Pause updates", type="button", id="pause", hidden=True),
        element("span", "", id="connection"),
        class_="controls",
    )
    body = element(
        "body",
        element("a", "Skip to the content", href="#title", class_="skip"),
        _header(frame),
        element("div", *header_blocks(context), class_="state"),
        controls,
        main,
        element("p", "", id="announcement", role="status", aria_live="polite", class_="unseen"),
        element("footer", element("p", f"Accelplane {__version__}. Times are UTC.")),
        data_generation=context.cluster.generation,
        data_events=events_link(frame),
    )
    return "<!DOCTYPE html>\n" + render(element("html", _head(page.title, frame.assets), body, lang="en")) + "\n"


def plain_document(title: str, content: Sequence[Element], assets: Assets) -> str:
    """The HTML of a page without navigation and updates: errors, and the form to sign in."""
    main = element("main", element("h1", title, id="title"), *content, id="main")
    head = _head(title, assets, script=False)
    return "<!DOCTYPE html>\n" + render(element("html", head, element("body", main, class_="plain"), lang="en")) + "\n"


def events_link(frame: Frame) -> str:
    """The address of the updates of a screen."""
    return link("api/v1/events", frame.query, screen=frame.screen)


def header_blocks(context: Context) -> tuple[Element, ...]:
    """The blocks above every screen: the numbers of the cluster, and problems of the data."""
    found = totals(context.cluster, context.summaries)
    summary = element("ul", *_summary(found), class_="numbers", aria_label="The cluster in numbers")
    problem = context.cluster.problem
    text = f"The data may be old or incomplete: {problem}"
    notices = [keyed(element("p", text, class_="notice"), "problem")] if problem else []
    return live(summary, "summary"), live(element("div", *notices), "notices")


def announcement(old: Totals, new: Totals) -> str:
    """The text for assistive technology about a change, empty if it is not significant."""
    if old.unhealthy != new.unhealthy:
        return f"{counted(new.unhealthy, 'device')} unhealthy, {old.unhealthy} before."
    if old.waiting != new.waiting:
        return f"{counted(new.waiting, 'pod')} waiting, {old.waiting} before."
    return ""


# Facts


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 node`, `2 nodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def moment(time: float) -> "Element | str":
    """A time; the script adds how long ago that was."""
    if time <= 0:
        return "-"
    try:
        at = datetime.fromtimestamp(time, UTC)
    except (OverflowError, ValueError, OSError):
        return "-"
    return element("time", f"{at:%Y-%m-%d %H:%M:%S}", datetime=f"{at:%Y-%m-%dT%H:%M:%SZ}")


def badge(unit: ReportedUnit) -> Element:
    """The state of a device in words, with its shape."""
    state = state_of(unit)
    mark = element("span", _LETTERS[state], class_=f"mark {state}", aria_hidden="true")
    return element("span", mark, f" {state}", class_="badge")


def cell(node: str, unit: ReportedUnit) -> Element:
    """A device in the list of nodes: shape and letter are its state, the filled part is held."""
    state, held = state_of(unit), held_share(unit)
    quarter = 0 if not held else max(1, round(held * 4))
    words = f"{unit.plugin} {unit.unit}: {state}, " + (
        "free" if not held else "held" if quarter == 4 else f"about {quarter * 25} % held"
    )
    return element(
        "a",
        _LETTERS[state],
        href=device_link(node, unit),
        class_=f"cell {state} f{quarter}",
        aria_label=words + (", idle" if unit.holders and unit.idle_since else ""),
        title=words,
    )


def device_link(node: str, unit: ReportedUnit) -> str:
    """The address of a device."""
    return link("device", PlaceQuery(node=node, plugin=unit.plugin, unit=unit.unit))


def node_link(node: str) -> Element:
    """A link to a node."""
    return element("a", node, href=link("node", PlaceQuery(node=node)))


def namespace_name(context: Context, namespace: str) -> Element:
    """The name of a namespace if it may be seen, with a link to the devices that it holds."""
    if not namespace:
        return element("span", "unknown")
    if not context.visible(namespace):
        return element("span", HIDDEN, class_="hidden-name")
    return element("a", namespace, href=link("nodes", holder=f"{namespace}/"))


def pod_name(context: Context, namespace: str, pod: str) -> Element:
    """A pod if it may be seen, with a link to its devices."""
    if not pod:
        return element("span", "unknown")
    if not context.visible(namespace):
        return element("span", HIDDEN, class_="hidden-name")
    name = f"{namespace}/{pod}"
    return element("a", name, href=link("nodes", holder=f"{name}/"))


# Tables


def table(
    caption: str, headers: Sequence["Element | str"], rows: Sequence[Element], *, block: str, empty: str
) -> Element:
    """A table with a row of headers. Its rows are a live block. `empty` is the text without rows, if there is one."""
    heads = (header if isinstance(header, Element) else element("th", header, scope="col") for header in headers)
    body = rows
    if empty and not rows:
        body = [keyed(element("tr", element("td", empty, colspan=len(headers), class_="empty")), "")]
    content = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        live(element("tbody", *body), block),
    )
    # Wide tables scroll on their own; the region can be focused, so that the keyboard scrolls it.
    return element("div", content, class_="scroll", role="region", aria_label=caption, tabindex="0")


def optional(*content: Element, shown: bool) -> Element:
    """A section that is hidden as long as its live blocks have no rows; the script shows and hides it."""
    return element("section", *content, hidden=not shown, data_optional=True)


def numeric(text: str) -> Element:
    """The header of a column of numbers."""
    return element("th", text, scope="col", class_="number")


def row(key: str, *cells: "Element | str | None", head: "Element | str") -> Element:
    """A row of a table. Its first cell is a header."""
    rest = (each if isinstance(each, Element) and each.tag == "td" else element("td", each) for each in cells)
    return keyed(element("tr", row_header(head), *rest), key)


def row_header(head: "Element | str", *, class_: str | None = None) -> Element:
    """The header cell of a row. A text, which can be a long name, gets an element that limits its width."""
    return element(
        "th", element("span", head, class_="name") if isinstance(head, str) else head, scope="row", class_=class_
    )


def number(value: int, href: str = "", *, alert: bool = False) -> Element:
    """A cell with a number, which links to the counted objects."""
    text = f"{value:,}"
    shown = element("a", text, href=href) if href and value else text
    return element("td", shown, class_="number alert" if alert and value else "number")


def facts(caption: str, pairs: Sequence[tuple[str, "Element | str"]], *, block: str) -> Element:
    """A list of facts; those without a text are left out."""
    shown = (
        keyed(element("div", element("dt", name), element("dd", value)), name) for name, value in pairs if value != ""
    )
    return element("section", element("h2", caption), live(element("dl", *shown, class_="facts"), block))


def pages(page: str, query: NodesQuery | ListQuery, *, shown: int, following: int, total: int, noun: str) -> Element:
    """Which part of a list is shown, with links to the parts before and after it."""
    start = query.start
    if start and start >= total:
        text = f"Found {counted(total, noun)}; none after {start:,}."
    else:
        text = f"{start + 1:,} to {start + shown:,} of {counted(total, noun)}." if total else f"Found no {noun}."
    first = msgspec.structs.replace(query, start=0)
    following_link = link(page, msgspec.structs.replace(query, start=following))
    navigation = element(
        "nav",
        element("span", text),
        element("a", "First", href=link(page, first)) if start else None,
        element("a", "Next", href=following_link, rel="next") if following < total else None,
        aria_label=f"Parts of the list of {noun}s",
        class_="pages",
    )
    return live(element("div", keyed(navigation, "pages"), id="pages", tabindex="-1"), "pages")


def skip_list() -> Element:
    """A link over a list to `pages`: with the keyboard there can be a thousand links between them."""
    return element("p", element("a", "Skip the list", href="#pages"), class_="skip-list")


def part(rows: Iterable[Element], *, elements: int = MAX_ELEMENTS, limit: int = ROWS) -> Sequence[Element]:
    """The rows of one page, limited by their number and by the number of their elements."""
    shown: list[Element] = []
    total = 0
    for each in itertools.islice(rows, limit):
        total += count(each)
        if total > elements and shown:
            break
        shown.append(each)
    return shown


def more(block: str, number: int, *, noun: str) -> Element:
    """How many rows of a block are not shown; empty for 0."""
    text = f"{number:,} more {f'{noun} is' if number == 1 else f'{noun}s are'} not shown."
    return live(element("div", *([keyed(element("p", text), "more")] if number else [])), f"{block}-more")


def empty_list(query: NodesQuery | ListQuery, total: int, *, noun: str, otherwise: str) -> str:
    """The text of a list without rows: it has others, the filters exclude all, or there are none."""
    if total:
        return f"No {noun} on this part of the list."
    if isinstance(query, NodesQuery):
        has_filters = msgspec.structs.replace(query, start=0, sort="problem") != NodesQuery()
    else:
        has_filters = bool(query.text)
    return f"No {noun} matches the filters." if has_filters else otherwise


def search_form(page: str, query: ListQuery, label: str) -> Element:
    """A form that filters a list by a text."""
    return element(
        "form",
        element("label", f"{label} ", element("input", type="search", name="text", value=query.text, maxlength=253)),
        element("button", "Apply", type="submit"),
        method="get",
        action=page,
        role="search",
        class_="filters",
    )


_PATHS: Mapping[ScreenName, str] = {
    "overview": "./",
    "nodes": "nodes",
    "node": "node",
    "device": "device",
    "waiting": "waiting",
    "namespaces": "namespaces",
}


def _head(title: str, assets: Assets, *, script: bool = True) -> Element:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} · Accelplane"),
        element("link", rel="icon", href="data:,"),
        element("link", rel="stylesheet", href=assets.style),
        element("script", type="module", src=assets.script) if script else None,
    )


def _header(frame: Frame) -> Element:
    items = (
        element("li", element("a", text, href=path, aria_current="page" if name == frame.screen else None))
        for name, path, text in _NAVIGATION
    )
    session = None
    if frame.user:
        session = element(
            "form",
            element("span", f"{frame.user} "),
            element("button", "Sign out", type="submit"),
            method="post",
            action="logout",
            class_="session",
        )
    return element(
        "header",
        element("span", "Accelplane", class_="product"),
        element("nav", element("ul", *items), aria_label="Screens"),
        session,
    )


def _summary(found: Totals) -> list[Element]:
    parts = (
        ("nodes", found.nodes, "node", "nodes", "nodes", False),
        ("devices", found.devices, "device", "devices", "nodes", False),
        ("held", found.held, "held", "held", "nodes?state=held", False),
        ("unhealthy", found.unhealthy, "unhealthy", "unhealthy", "nodes?state=unhealthy", True),
        ("silent", found.silent, "agent not answering", "agents not answering", "nodes?state=unanswered", True),
        ("waiting", found.waiting, "waiting pod", "waiting pods", "waiting", False),
    )
    return [
        keyed(
            element(
                "li",
                element("a", element("b", f"{value:,}"), f" {one if value == 1 else several}", href=href),
                class_="alert" if alert and value else None,
            ),
            key,
        )
        for key, value, one, several, href, alert in parts
    ]
