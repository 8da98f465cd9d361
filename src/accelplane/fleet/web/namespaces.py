"""What each namespace holds."""

from ..arithmetic import NamespaceUse, namespaces
from .html import element
from .page import HIDDEN, Context, Page, empty_list, namespace_name, search_form
from .query import Query
from .table import Column, Listing, Table, arranged, moment, show_part


def screen(context: Context, query: Query) -> Page:
    """The namespaces with their allocations, the largest first."""
    found = [each for each in namespaces(context.cluster, context.now) if _matches(context, each, query)]
    # With the order of the names, hidden namespaces would be found between known ones.
    found.sort(key=lambda each: (-each.ids, -each.device_hours, each.namespace, each.resource))
    table = Table[NamespaceUse](
        screen="namespaces",
        caption="What namespaces hold",
        columns=(
            Column("namespace", "Namespace", lambda each: each.namespace if context.visible(each.namespace) else HIDDEN,
                   lambda each: namespace_name(context, each.namespace)),
            Column("resource", "Resource", lambda each: each.resource),
            Column("held_ids", "Held IDs", lambda each: each.ids, kind="number"),
            Column("share", "Share of all", lambda each: each.share, lambda each: f"{each.share:.1%}", "number"),
            Column("idle_ids", "Idle IDs", lambda each: each.idle, kind="number"),
            Column("device_hours", "Device hours", lambda each: round(each.device_hours, 1), kind="number"),
        ),
        key=lambda each: f"{each.namespace} {each.resource}" if context.visible(each.namespace) else HIDDEN,
        empty=empty_list(query, "namespace", "No namespace holds a device."),
    )  # fmt: skip
    listing = Listing(table, arranged(table, found, query))
    since = element("p", "Device hours are since the start of this server at ", moment(context.cluster.started), ".")
    form = search_form("namespaces", query, "Namespace or resource")
    return Page(title="Namespaces", content=(form, since, *show_part(listing, query)), listing=listing)


def _matches(context: Context, use: NamespaceUse, query: Query) -> bool:
    text = query.text.casefold()
    if not text or text in use.resource:
        return True
    return text in use.namespace.casefold() and context.visible(use.namespace)
