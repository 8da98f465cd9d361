"""Pods that wait for devices, and why."""

from collections.abc import Mapping, Sequence

from ..arithmetic import Shortage, explain, fit_together, oldest_first, shortages
from ..model import Waiting
from .html import Element, element, keyed
from .page import HIDDEN, Context, Page, empty_list, moment, pages, part, row_header, search_form, table
from .query import ListQuery

_HEADERS = ("Pod", "Why, by resource", "Scheduler", "Waits since")
_MAX_CANDIDATES = 5000
_MAX_CAUSES = 32


def screen(context: Context, query: ListQuery) -> Page:
    """The waiting pods, oldest first."""
    found = [each for each in oldest_first(context.cluster.waiting)[:_MAX_CANDIDATES] if _matches(context, each, query)]
    reasons = _by_pod(shortages(context.cluster))
    shown = found[query.start : query.start + 100]
    rows = part([_row(context, query.start + index, each, reasons) for index, each in enumerate(shown)])
    following = query.start + len(rows)
    empty = empty_list(query, len(found), noun="pod", otherwise="No pod waits for a device.")
    return Page(
        title="Waiting pods",
        content=(
            search_form("waiting", query, "Pod or resource"),
            table("Pods that wait for devices", _HEADERS, rows, block="rows", empty=empty),
            pages("waiting", query, shown=len(rows), following=following, total=len(found), noun="pod"),
        ),
    )


def _by_pod(found: Sequence[Shortage]) -> Mapping[tuple[str, str], list[Shortage]]:
    by_pod: dict[tuple[str, str], list[Shortage]] = {}
    for each in found:
        by_pod.setdefault((each.namespace, each.pod), []).append(each)
    return by_pod


def _matches(context: Context, pod: Waiting, query: ListQuery) -> bool:
    text = query.text.casefold()
    if not text or any(text in resource for resource in pod.requests):
        return True
    return text in f"{pod.namespace}/{pod.name}".casefold() and context.visible(pod.namespace)


def _row(context: Context, index: int, pod: Waiting, reasons: Mapping[tuple[str, str], Sequence[Shortage]]) -> Element:
    shown = context.visible(pod.namespace)
    name = f"{pod.namespace}/{pod.name}" if shown else HIDDEN
    # The scheduler's message and gates can name other objects of the namespace.
    message = (pod.message or "no message yet") if shown else HIDDEN
    gates = f" Scheduling gates: {', '.join(pod.gates)}." if pod.gates and shown else ""
    causes = reasons.get((pod.namespace, pod.name), ())
    together = fit_together(causes)
    whys = [element("li", explain(each, together=together)) for each in causes[:_MAX_CAUSES]]
    if len(causes) > _MAX_CAUSES:
        whys.append(element("li", f"{len(causes) - _MAX_CAUSES:,} more resources are not shown."))
    return keyed(
        element(
            "tr",
            row_header(name, class_=None if shown else "hidden-name"),
            element("td", element("ul", *whys), class_="long"),
            element("td", message + gates, class_="long"),
            element("td", moment(pod.since)),
        ),
        name if shown else f"{HIDDEN} {index}",
    )
