"""A node of a snapshot from the facts of its object and the reports of its agents."""

from collections.abc import Sequence

from msgspec.structs import asdict, replace

from accelplane.report.inventory import AdvertisedResource, Holder, PluginInventory

from .agents import Report
from .model import Node, NodeResource
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
    plugins: dict[str, PluginInventory] = {}
    advertised: dict[str, AdvertisedResource] = {}
    for inventory in inventories:
        for plugin in inventory.plugins:
            plugins.setdefault(plugin.name, plugin)
            for each in plugin.resources:
                advertised.setdefault(each.name, each)
    resources = {name: NodeResource(**asdict(each)) for name, each in advertised.items()}
    for each in facts.resources if facts else ():
        known = resources.get(each.name, each)
        resources[each.name] = replace(known, capacity=each.capacity, allocatable=each.allocatable)
    return Node(
        name=name,
        labels=facts.labels if facts else {},
        ready=facts.ready if facts else False,
        cordoned=facts.cordoned if facts else False,
        taints=facts.taints if facts else (),
        agents=tuple(report.agent for report in sorted(reports, key=lambda each: each.place.name)),
        resources=tuple(resources[name] for name in sorted(resources)),
        units=tuple(unit for plugin in plugins.values() for unit in plugin.units),
        skipped=tuple(each for plugin in plugins.values() for each in plugin.skipped),
        holders=() if inventories else holders or (),
        holders_known=not inventories and holders is not None,
    )
