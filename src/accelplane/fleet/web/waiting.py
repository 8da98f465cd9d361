"""Pods that wait for devices, and why."""

from collections.abc import Iterator, Mapping, Sequence

from accelplane.kube.placement import obstacles

from ..arithmetic import Shortage, candidates, explain, oldest_first, shortages
from ..model import Waiting
from .html import element
from .page import HIDDEN, Context, Page, empty_list, pod_text, search_form
from .query import Query
from .table import Cell, Column, Listing, Table, arranged, show_part

_MAX_CANDIDATES = 5000
_MAX_CAUSES = 32
_MAX_REASONS = 8
_MAX_NODES = 4


def screen(context: Context, query: Query) -> Page:
    """The waiting pods, oldest first."""
    found = [each for each in oldest_first(context.cluster.waiting)[:_MAX_CANDIDATES] if _matches(context, each, query)]
    by_pod: dict[tuple[str, str], list[Shortage]] = {}
    for each in shortages(context.cluster):
        by_pod.setdefault((each.namespace, each.pod), []).append(each)

    def causes(pod: Waiting) -> Sequence[Shortage]:
        return by_pod.get((pod.namespace, pod.name), ())

    table = Table[Waiting](
        screen="waiting",
        caption="Pods that wait for devices",
        columns=(
            Column("pod", "Pod", lambda each: pod_text(context, each.namespace, each.name),
                   lambda each: _name(context, each)),
            Column("requests", "Requests", lambda each: _requests(each.requests), shown=False),
            Column("why", "Why, by resource", lambda each: " ".join(_whys(context, each, causes(each))),
                   lambda each: element("td", element(
                       "ul", *(element("li", why) for why in _whys(context, each, causes(each)))), class_="long")),
            Column("scheduler", "Scheduler", lambda each: _message(context, each),
                   lambda each: element("td", _message(context, each), class_="long")),
            Column("since", "Waits since", lambda each: each.since, kind="time"),
        ),
        key=lambda each: pod_text(context, each.namespace, each.name),
        empty=empty_list(query, "pod", "No pod waits for a device."),
        noun="pod",
    )  # fmt: skip
    listing = Listing(table, arranged(table, found, query))
    form = search_form("waiting", query, "Pod or resource")
    return Page(title="Waiting pods", content=(form, *show_part(listing, query)), listing=listing)


def _matches(context: Context, pod: Waiting, query: Query) -> bool:
    text = query.text.casefold()
    if not text or any(text in resource for resource in pod.requests):
        return True
    return text in f"{pod.namespace}/{pod.name}".casefold() and context.visible(pod.namespace)


def _name(context: Context, pod: Waiting) -> Cell:
    if context.visible(pod.namespace):
        return f"{pod.namespace}/{pod.name}"
    return element("span", HIDDEN, class_="hidden-name")


def _requests(requests: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(requests.items())[:_MAX_CAUSES])


def _message(context: Context, pod: Waiting) -> str:
    """The scheduler's message and gates, which can name other objects of the namespace."""
    if not context.visible(pod.namespace):
        return HIDDEN
    gates = f" Scheduling gates: {', '.join(pod.gates)}." if pod.gates else ""
    return (pod.message or "no message yet") + gates


def _whys(context: Context, pod: Waiting, causes: Sequence[Shortage]) -> Sequence[str]:
    together = bool(candidates(causes, closed=False))
    whys = [explain(each, together=together) for each in causes[:_MAX_CAUSES]]
    if len(causes) > _MAX_CAUSES:
        whys.append(f"{len(causes) - _MAX_CAUSES:,} more resources are not shown.")
    return [*whys, *_exclusions(context, pod, causes)]


def _exclusions(context: Context, pod: Waiting, causes: Sequence[Shortage]) -> Iterator[str]:
    """What excludes each node with enough free devices, by its reasons, which name rules of the pod."""
    nodes_by_reason: dict[str, list[str]] = {}
    for name in candidates(causes, closed=True):
        node = context.cluster.nodes[name]
        found = obstacles(pod.spec, name, node.labels, node.taints, cordoned=node.cordoned, ready=node.ready)
        nodes_by_reason.setdefault("; ".join(found), []).append(name)
    shown = context.visible(pod.namespace)
    for reason, nodes in sorted(nodes_by_reason.items(), key=lambda each: -len(each[1]))[:_MAX_REASONS]:
        rest = f" and {len(nodes) - _MAX_NODES} more" if len(nodes) > _MAX_NODES else ""
        where = f"{', '.join(sorted(nodes)[:_MAX_NODES])}{rest}"
        if reason:
            yield f"Enough is free on {where}, excluded by {reason if shown else 'a rule for nodes'}."
        else:
            yield f"No taint, node selector or node affinity excludes {where}: see the message of the scheduler."
    if len(nodes_by_reason) > _MAX_REASONS:
        yield f"{len(nodes_by_reason) - _MAX_REASONS:,} more reasons are not shown."
