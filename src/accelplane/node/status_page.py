"""The content of `/status`."""

from accelplane.node.status import NodeStatus, PluginStatus, ResourceStatus


def report(status: NodeStatus) -> dict[str, object]:
    """The complete agent, as values that JSON can hold."""
    return {
        "version": status.version,
        "kubelet-dir": status.kubelet_dir,
        "root": status.root,
        "config-problem": status.config_problem,
        "not-ready": list(status.unready),
        "plugins": {name: _plugin(plugin) for name, plugin in status.plugins.items()},
    }


def _plugin(plugin: PluginStatus) -> dict[str, object]:
    return {
        "namespace": plugin.namespace,
        "scan": {
            "problem": plugin.scan.problem,
            "scans": plugin.scan.count,
            "failures": plugin.scan.failures,
            "seconds": round(plugin.scan.seconds, 6),
        },
        "resources": {resource.name: _resource(resource) for resource in plugin.resources.values()},
        "health": plugin.health,
        "skipped": plugin.skipped,
    }


def _resource(resource: ResourceStatus) -> dict[str, object]:
    return {
        "stage": resource.stage,
        "problem": resource.problem,
        "devices": [
            {
                "id": device.id,
                "unit": device.unit,
                "health": device.health,
                "reason": device.reason,
                "numa": device.topology,
                "attributes": device.attributes,
            }
            for device in resource.devices.values()
        ],
    }
