"""What all screens have in common: their context, the frame around them, and how facts are shown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from accelplane import __version__
from accelplane.report.inventory import Holder, ReportedUnit

from ..model import Cluster, Node, NodeReadings
from ..use import Use, UseHistory
from .html import Element, element, keyed, live, render
from .query import Query, ScreenName, link
from .summaries import STATES, State, Summary, Totals, held_share, is_idle, state_of, totals
from .table import Cell, Listing, counted

HIDDEN = "hidden"
_MAX_OPTIONS = 150

_NAVIGATION: Sequence[tuple[ScreenName, str]] = (
    ("overview", "Overview"),
    ("devices", "Devices"),
    ("nodes", "Nodes"),
    ("pods", "Pods"),
    ("waiting", "Waiting pods"),
    ("namespaces", "Namespaces"),
    ("groups", "Groups"),
)
_LETTERS: Mapping[State, str] = {"healthy": "H", "suspect": "S", "unhealthy": "U", "recovering": "R", "unknown": "?"}
_STATE_FILTERS = (
    ("idle,suspect,unhealthy,recovering,unknown", "idle or not healthy"),
    ("healthy", "healthy"), ("suspect", "suspect"), ("unhealthy", "unhealthy or recovering"),
    ("recovering", "recovering"), ("unknown", "unknown"), ("held", "held"), ("unheld", "free"),
    ("idle", "held and idle"), ("unanswered", "agent not answering"), ("no-agent", "without agent"),
    ("unregistered", "not registered"), ("cordoned", "cordoned"), ("not-ready", "node not ready"),
)  # fmt: skip
# The dashboards of this project, below an address without placeholders.
_DASHBOARDS = (
    "/d/accelplane-fleet",
    "/d/accelplane-node?var-node={node}",
    "/d/accelplane-node?var-node={node}&var-plugin={plugin}&var-device={device}",
)


class Context(Struct, frozen=True, kw_only=True):
    """The input of a screen. `visible` returns whether the viewer may see the names of pods in a namespace.

    `readings` and `holders` are those of the node of the screen; `holders` is None if they are not known.
    """

    cluster: Cluster
    summaries: Mapping[str, Summary]
    visible: Callable[[str], bool]
    now: float
    use: UseHistory
    grafana_url: str = ""
    readings: NodeReadings | None = None
    holders: tuple[Holder, ...] | None = None
    holders_problem: str = ""

    def use_of(self, node: str, unit: ReportedUnit) -> Use:
        """The use of a device, without values if it is not known."""
        return self.use.of(node, unit, self.now)


class Page(Struct, frozen=True, kw_only=True):
    """A screen: its title, its content, and the main table for downloads."""

    title: str
    content: Sequence[Element | None]
    found: bool = True
    listing: Listing[Any] | None = None


class Assets(Struct, frozen=True):
    """The relative addresses of style sheet and script."""

    style: str
    script: str


class Frame(Struct, frozen=True, kw_only=True):
    """What surrounds a screen. `user` has a name if there is a session."""

    assets: Assets
    screen: ScreenName
    query: Query
    user: str = ""


def document(page: Page, frame: Frame, context: Context) -> str:
    """The HTML of a page."""
    found = totals(context.cluster, context.summaries)
    controls = element(
        "p",
        element("a", "Refresh", href=link(frame.screen, frame.query), class_="refresh"),
        element("button", "Pause updates", type="button", id="pause", hidden=True),
        element("span", "", id="connection"),
        class_="controls",
    )
    attributes: dict[str, str | int] = {
        "data_generation": context.cluster.generation,
        "data_events": link("api/v1/events", None, screen=frame.screen),
        "data_state": f"{counted(found.unhealthy, 'device')} unhealthy, {counted(found.waiting, 'pod')} waiting.",
    }
    body = element(
        "body",
        element("a", "Skip to the content", href="#title", class_="skip"),
        _header(frame),
        element("div", *_state(context, found), class_="state"),
        controls,
        element("main", element("h1", page.title, id="title", tabindex="-1"), *page.content, id="main"),
        element("p", "", id="announcement", role="status", aria_live="polite", class_="unseen"),
        element("footer", element("p", f"Accelplane {__version__}. ", element("span", "Times are UTC.", id="zone"))),
        **attributes,
    )
    return "<!DOCTYPE html>\n" + render(element("html", _head(page.title, frame.assets), body, lang="en")) + "\n"


def plain_document(title: str, content: Sequence[Element], assets: Assets) -> str:
    """The HTML of a page without navigation and updates: errors, and the form to sign in."""
    main = element("main", element("h1", title, id="title"), *content, id="main")
    head = _head(title, assets, script=False)
    return "<!DOCTYPE html>\n" + render(element("html", head, element("body", main, class_="plain"), lang="en")) + "\n"


# Facts


def badge(unit: ReportedUnit) -> Element:
    """The state of a device in words, with its shape."""
    state = state_of(unit)
    mark = element("span", _LETTERS[state], class_=f"mark {state}", aria_hidden="true")
    return element("span", mark, f" {state}", class_="badge")


def device_cell(node: str, unit: ReportedUnit, *, selected: bool = True) -> Element:
    """A device in the list of nodes: shape and letter are its state, the filled part is held."""
    state, held = state_of(unit), held_share(unit)
    quarter = 0 if not held else max(1, round(held * 4))
    words = f"{unit.plugin} {unit.unit}: {state}, " + (
        "free" if not held else "held" if quarter == 4 else f"about {quarter * 25} % held"
    )
    words += (", idle" if is_idle(unit) else "") + ("" if selected else ", not selected")
    return element(
        "a",
        _LETTERS[state],
        href=device_link(node, unit),
        class_=f"cell {state} f{quarter}" + ("" if selected else " other"),
        aria_label=words,
        title=words,
    )


def legend() -> Element:
    """The signs of `device_cell`."""
    marks = (
        element("li", element("span", _LETTERS[state], class_=f"mark {state}", aria_hidden="true"), f" {state}")
        for state in STATES
    )
    return element(
        "ul", *marks, element("li", "The filled part of a cell is held."), class_="legend", aria_label="Signs"
    )


def device_link(node: str, unit: ReportedUnit) -> str:
    """The address of a device."""
    return link("device", Query(node=node, plugin=unit.plugin, unit=unit.unit))


def node_link(node: str) -> Element:
    """A link to a node."""
    return element("a", node, href=link("node", Query(node=node)))


def namespace_name(context: Context, namespace: str) -> Element:
    """The name of a namespace if it may be seen, with a link to the devices that it holds."""
    return _name(context, namespace, namespace, namespace)


def pod_name(context: Context, namespace: str, pod: str) -> Element:
    """A pod if it may be seen, with a link to its devices."""
    return _name(context, namespace, pod and f"{namespace}/{pod}", f"{namespace}/{pod}")


def pod_text(context: Context, namespace: str, pod: str) -> str:
    """The name of a pod for sorting and downloads."""
    return f"{namespace}/{pod}" if context.visible(namespace) else HIDDEN


def joined(items: Sequence[Cell], limit: int) -> Sequence[Cell]:
    """The first items, separated by commas, and how many more there are."""
    found = [part for each in items[:limit] for part in (", ", each)][1:]
    return [*found, f" and {len(items) - limit} more"] if len(items) > limit else found


def alert(text: Cell, *, bad: bool | str) -> Cell:
    """A cell that is marked if it is bad; a text is the class."""
    return element("td", text, class_=bad if isinstance(bad, str) else "bad") if bad else text


def count_cell(value: int, href: str = "", *, bad: bool = False) -> Element:
    """A number, which links to the counted objects."""
    text = f"{value:,}"
    return element(
        "td", element("a", text, href=href) if href and value else text, class_="alert" if bad and value else None
    )


def facts(caption: str, pairs: Iterable[tuple[str, Cell]], *, block: str) -> Element:
    """A list of facts; those without a text are left out."""
    shown = (
        keyed(element("div", element("dt", name), element("dd", value)), name) for name, value in pairs if value != ""
    )
    return element("section", element("h2", caption), live(element("dl", *shown, class_="facts"), block))


def section(heading: str, *content: Element | None) -> Element:
    """A part of a screen."""
    return element("section", element("h2", heading), *content)


def grafana_link(context: Context, node: Node | None = None, unit: ReportedUnit | None = None) -> Element | None:
    """A link to the dashboard of the cluster, of a node or of a device; None without one.

    An address with placeholders is that of a device; below one without them are the dashboards of this project.
    """
    template = context.grafana_url
    if template and "{" not in template:
        template = template.rstrip("/") + _DASHBOARDS[(node is not None) + (unit is not None)]
    elif unit is None:
        return None
    values = {
        "{node}": node.name if node else "",
        "{plugin}": unit.plugin if unit else "",
        "{device}": (unit.device or unit.unit) if unit else "",
    }
    for name, value in values.items():
        template = template.replace(name, quote(value, safe="", errors="replace"))
    return element("p", element("a", "Open in Grafana", href=template, rel="noreferrer")) if template else None


# Filters


def filters(context: Context, screen: ScreenName, query: Query, *more: Element, problem: str = "") -> Element:
    """The form of the filters of devices, folded on small screens."""
    summaries = context.summaries.values()
    families = sorted(frozenset[str]().union(*(each.families for each in summaries)))[:_MAX_OPTIONS]
    models = sorted(frozenset[str]().union(*(each.models for each in summaries)))[:_MAX_OPTIONS]
    form = element(
        "form",
        choice("family", "Family", [(each, each) for each in families], query.family),
        choice("state", "State", _STATE_FILTERS, query.state),
        choice("model", "Model", [(each, each) for each in models], query.model),
        text_input("labels", "Node labels", query.labels, hint="zone=a,!test", problem=problem),
        text_input("holder", "Holder", query.holder, hint="namespace/pod"),
        text_input("text", "Text", query.text, hint="name or reason"),
        *more,
        *(
            element("input", type="hidden", name=name, value=getattr(query, name))
            for name in ("node", "sort")
            if getattr(query, name)
        ),
        element("button", "Apply", type="submit"),
        element("a", "Clear", href=screen),
        method="get",
        action=screen,
        role="search",
        aria_label="Filters",
        class_="filters",
    )
    return element("details", element("summary", "Filters"), form, class_="fold", open=True)


def choice(name: str, label: str, options: Sequence[tuple[str, str]], chosen: str, *, first: str = "all") -> Element:
    known = [("", first), *options]
    if chosen not in dict(known):
        known.append((chosen, chosen))
    made = (element("option", text, value=value, selected=value == chosen) for value, text in known)
    return element("label", f"{label} ", element("select", *made, name=name))


def text_input(name: str, label: str, value: str, *, hint: str = "", problem: str = "") -> Element:
    field = element(
        "input", type="search", name=name, value=value, placeholder=hint or None, maxlength=253,
        aria_invalid="true" if problem else None, aria_describedby=f"{name}-problem" if problem else None,
    )  # fmt: skip
    return element(
        "label", f"{label} ", field, element("span", problem, id=f"{name}-problem", class_="bad") if problem else None
    )


def search_form(screen: ScreenName, query: Query, label: str) -> Element:
    """A form that filters a list by a text."""
    return element(
        "form",
        text_input("text", label, query.text),
        element("button", "Apply", type="submit"),
        method="get",
        action=screen,
        role="search",
        aria_label=label,
        class_="filters",
    )


def empty_list(query: Query, noun: str, otherwise: str) -> str:
    """The text of a list without rows: the filters exclude all, or there are none."""
    return f"No {noun} matches the filters." if query.has_filters else otherwise


# Frame


def _name(context: Context, namespace: str, text: str, holder: str) -> Element:
    if not text:
        return element("span", "unknown")
    if not context.visible(namespace):
        return element("span", HIDDEN, class_="hidden-name")
    return element("a", text, href=link("devices", Query(holder=f"{holder}/")))


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
        element("li", element("a", text, href=link(name), aria_current="page" if name == frame.screen else None))
        for name, text in _NAVIGATION
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
    text = frame.query.text if frame.screen == "search" else ""
    find = element(
        "form",
        element(
            "label",
            element("span", "Search nodes, devices and pods", class_="unseen"),
            element("input", type="search", name="text", value=text, maxlength=253, placeholder="node, device or pod"),
        ),
        element("button", "Search", type="submit"),
        method="get",
        action="search",
        role="search",
        aria_label="Everything",
        class_="find",
    )  # fmt: skip
    return element(
        "header",
        element("span", "Accelplane", class_="product"),
        element("nav", element("ul", *items), aria_label="Screens"),
        find,
        session,
    )


def _state(context: Context, found: Totals) -> tuple[Element, Element]:
    """The blocks above every screen: the numbers of the cluster, and problems of the data."""
    unhealthy = Query(state="unhealthy")
    parts = (
        ("nodes", found.nodes, "node", "nodes", link("nodes"), False),
        ("devices", found.devices, "device", "devices", link("devices"), False),
        ("held", found.held, "held", "held", link("devices", Query(state="held")), False),
        ("unhealthy", found.unhealthy, "unhealthy", "unhealthy", link("devices", unhealthy), True),
        ("silent", found.silent, "agent not answering", "agents not answering",
         link("nodes", Query(state="unanswered")), True),
        ("waiting", found.waiting, "waiting pod", "waiting pods", link("waiting"), False),
    )  # fmt: skip
    items = [
        keyed(
            element(
                "li",
                element("a", element("b", f"{value:,}"), f" {one if value == 1 else several}", href=href),
                class_="alert" if bad and value else None,
            ),
            key,
        )
        for key, value, one, several, href, bad in parts
    ]
    problem = context.cluster.problem
    text = f"The data may be old or incomplete: {problem}"
    notices = [keyed(element("p", text, class_="notice"), "problem")] if problem else []
    summary = element("ul", *items, class_="numbers", aria_label="The cluster in numbers")
    return live(summary, "summary"), live(element("div", *notices), "notices")
