"""A node of a snapshot from the facts of its object and the reports of its agents."""

from collections.abc import Sequence

import msgspec

from .agents import Report
from .inventory import Inventory
from .model import Holder, Node, Resource, Skipped, Unit
from .objects import NodeFacts


def compose(
    name: str, facts: NodeFacts | None, reports: Sequence[Report], holders: tuple[Holder, ...] | None
) -> Node | None:
    """The node; None if it has neither a resource of ours nor an agent.

    `holders` are those by the API server, None if assigned pods are not watched.

    If two agents report the same plugin, as during an update, the one that answered last counts.
    """
    if not reports and (facts is None or not facts.resources):
        return None
    inventories = [
        report.inventory
        for report in sorted(reports, key=lambda each: (each.state == "connected", each.answered), reverse=True)
        if report.inventory is not None
    ]
    plugins: set[str] = set()
    resources: dict[str, Resource] = {}
    units: list[Unit] = []
    skipped: list[Skipped] = []
    for inventory in inventories:
        new = set(inventory.plugins) - plugins
        plugins |= new
        units += [unit for unit in inventory.units if unit.plugin in new]
        skipped += [each for each in inventory.skipped if each.plugin in new]
        _add_resources(resources, inventory)
    for each in facts.resources if facts else ():
        known = resources.get(each.name, each)
        resources[each.name] = msgspec.structs.replace(known, capacity=each.capacity, allocatable=each.allocatable)
    return Node(
        name=name,
        labels=facts.labels if facts else {},
        ready=facts.ready if facts else False,
        cordoned=facts.cordoned if facts else False,
        agents=tuple(report.agent for report in sorted(reports, key=lambda each: each.place.name)),
        resources=tuple(resources[name] for name in sorted(resources)),
        units=tuple(units),
        skipped=tuple(skipped),
        holders=() if inventories else holders or (),
        holders_known=not inventories and holders is not None,
    )


def _add_resources(resources: dict[str, Resource], inventory: Inventory) -> None:
    for resource in inventory.resources:
        resources.setdefault(resource.name, resource)
