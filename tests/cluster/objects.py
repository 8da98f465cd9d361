"""Minimal Kubernetes objects for cluster tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
