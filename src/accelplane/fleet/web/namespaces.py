"""What each namespace holds."""

from ..arithmetic import NamespaceUse, namespaces
from .html import Element, element
from .page import (
    Context,
    Page,
    empty_list,
    moment,
    namespace_name,
    number,
    numeric,
    pages,
    part,
    row,
    search_form,
    table,
)
from .query import ListQuery

_NUMBERS = ("Held IDs", "Share of all", "Idle IDs", "Device hours")
_HEADERS = ("Namespace", "Resource", *(numeric(name) for name in _NUMBERS))


def screen(context: Context, query: ListQuery) -> Page:
    """The namespaces with their allocations, the largest first."""
    found = [each for each in namespaces(context.cluster, context.now) if _matches(context, each, query)]
    # With the order of the names, hidden namespaces would be found between known ones.
    found.sort(key=lambda each: (-each.ids, -each.device_hours, each.namespace, each.resource))
    shown = found[query.start : query.start + 100]
    rows = part([_row(context, query.start + index, each) for index, each in enumerate(shown)])
    following = query.start + len(rows)
    empty = empty_list(query, len(found), noun="namespace", otherwise="No namespace holds a device.")
    since = element("p", "Device hours are since the start of this server at ", moment(context.cluster.started), ".")
    return Page(
        title="Namespaces",
        content=(
            search_form("namespaces", query, "Namespace or resource"),
            since,
            table("What namespaces hold", _HEADERS, rows, block="rows", empty=empty),
            pages("namespaces", query, shown=len(rows), following=following, total=len(found), noun="row"),
        ),
    )


def _matches(context: Context, use: NamespaceUse, query: ListQuery) -> bool:
    text = query.text.casefold()
    if not text or text in use.resource:
        return True
    return text in use.namespace.casefold() and context.visible(use.namespace)


def _row(context: Context, index: int, use: NamespaceUse) -> Element:
    key = f"{use.namespace} {use.resource}" if context.visible(use.namespace) else f"hidden {index}"
    return row(
        key,
        use.resource,
        number(use.ids),
        element("td", f"{use.share:.1%}", class_="number"),
        number(use.idle),
        element("td", f"{use.device_hours:,.1f}", class_="number"),
        head=namespace_name(context, use.namespace),
    )
