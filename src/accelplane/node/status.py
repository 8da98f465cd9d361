"""What the agent knows of itself, as values: for `/status`, `/healthz` and `/readyz`."""

from collections.abc import Iterator, Mapping

from accelplane import __version__
from accelplane.kubelet.server import Stage
from accelplane.node.agent import Agent
from accelplane.node.runner import PluginRunner


def report(agent: Agent) -> dict[str, object]:
    """The whole state, ready for JSON."""
    return {
        "version": __version__,
        "kubelet-dir": agent.settings.kubelet_dir,
        "root": agent.settings.root,
        "config-problem": agent.config_problem,
        "not-ready": list(unready(agent)),
        "plugins": {name: _plugin(runner) for name, runner in agent.runners.items()},
    }


def unhealthy(agent: Agent) -> Iterator[str]:
    """What only a restart would mend."""
    for name in agent.ended_plugins():
        yield f"plugin {name} has ended"


def unready(agent: Agent) -> Iterator[str]:
    """What keeps the node from having all its devices advertised, one line for each cause."""
    for name, runner in agent.runners.items():
        if not runner.looked.is_set():
            yield f"{name}: first scan not done"
        if runner.blind:
            yield f"{name}: scan fails: {runner.problem}"
        for resource, served in runner.publisher.served.items():
            server = served.server
            if server.stage != Stage.REGISTERED:
                yield f"{runner.plugin.namespace}/{resource}: {server.stage}: {server.problem or 'not yet registered'}"


def _plugin(runner: PluginRunner) -> Mapping[str, object]:
    return {
        "namespace": runner.plugin.namespace,
        "scan": {
            "problem": runner.problem,
            "scans": runner.scans,
            "failures": runner.scan_failures,
            "seconds": round(runner.scan_seconds, 6),
        },
        "resources": {
            f"{runner.plugin.namespace}/{resource}": {
                "stage": served.server.stage,
                "problem": served.server.problem,
                "devices": [
                    {
                        "id": device.id,
                        "unit": device.unit,
                        "health": device.health,
                        "reason": device.reason,
                        "numa": device.topology,
                        "attributes": device.attributes,
                    }
                    for device in runner.publisher.inventory.resources.get(resource, {}).values()
                ],
            }
            for resource, served in runner.publisher.served.items()
        },
        "health": {
            unit: {"phase": state.phase, "reason": state.reason, "unknown": runner.health.unknown.get(unit, "")}
            for unit, state in runner.health.states.items()
        },
        "skipped": runner.inventory.skipped,
    }
