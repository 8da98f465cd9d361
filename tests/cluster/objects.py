"""Minimal Kubernetes objects for cluster tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .build import kubernetes_minor
from .settings import BUSYBOX_IMAGE

Object = dict[str, Any]

SLEEP = ("sleep", "1000000")


def pod(
    name: str,
    *command: str,
    namespace: str = "default",
    node: str | None = None,
    image: str = BUSYBOX_IMAGE,
    resources: Mapping[str, object] | None = None,
    labels: Mapping[str, str] | None = None,
    host_paths: Sequence[str] = (),
    restart: str = "Never",
    **container: object,
) -> Object:
    """A pod of one container that runs ``command`` (by default, sleeps) and exits immediately on SIGTERM.

    ``resources`` are limits, ``host_paths`` are mounted at the same place, more keywords are fields of the
    container.
    """
    volumes = [{"name": f"host-{index}", "hostPath": {"path": path}} for index, path in enumerate(host_paths)]
    mounts = [{"name": f"host-{index}", "mountPath": path} for index, path in enumerate(host_paths)]
    spec: Object = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": "main",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": list(command or SLEEP),
                "resources": {"limits": dict(resources or {})},
                "volumeMounts": mounts,
                **container,
            }
        ],
        "volumes": volumes,
    }
    if node:
        spec["nodeName"] = node
    metadata = {"name": name, "namespace": namespace, "labels": {"app": name, **(labels or {})}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def service(name: str, port: int, *, namespace: str = "default") -> Object:
    """A Service for the pods that are labelled with its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": name}, "ports": [{"port": port, "targetPort": port}]},
    }


def endpoints(name: str, ports: Sequence[int], address: str, *, namespace: str, port_name: str = "") -> list[Object]:
    """Objects that give the Service `name` one endpoint for each port of an address, in place of the controllers.

    API servers find the endpoints of a webhook's Service in EndpointSlices since 1.34, before in Endpoints.
    """

    def named(port: int) -> list[Object]:
        return [{"name": port_name, "protocol": "TCP", "port": port}]

    if kubernetes_minor() < 34:
        subsets = [{"addresses": [{"ip": address}], "ports": named(port)} for port in ports]
        metadata: Object = {"name": name, "namespace": namespace}
        return [{"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}]
    labels = {"kubernetes.io/service-name": name}
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{name}-{port}", "namespace": namespace, "labels": labels},
            "addressType": "IPv4",
            "ports": named(port),
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        }
        for port in ports
    ]
