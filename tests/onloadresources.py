"""Onload resources as manifests and as decoded values."""

import copy
from typing import Any

import msgspec

from accelplane.onload.models import Onload

Object = dict[str, Any]

MAPPING: Object = {
    "regexp": r"^.*\.x86_64$",
    "kernelModuleImage": "registry/onload-module:8.1.2.26-${KERNEL_FULL_VERSION}",
}
SPEC: Object = {
    "onload": {
        "kernelMappings": [MAPPING],
        "userImage": "docker.io/onload/onload-user:8.1.2.26-ubi8",
        "version": "8.1.2.26",
    },
    "devicePlugin": {},
    "selector": {"node-role.kubernetes.io/worker": ""},
    "serviceAccountName": "onload-operator-sa",
    "upgrade": {"verify": {"minReadySeconds": 0}},
}
# Defaults that the API server adds to devicePlugin.
DEFAULTS: Object = {
    "maxPodsPerNode": 100,
    "setPreload": True,
    "mountOnload": False,
    "hostOnloadPath": "/opt/onload/",
    "baseMountPath": "/opt/onload",
    "binMountPath": "/usr/bin",
    "libMounthPath": "/usr/lib64",
}


def resource(name: str = "onload", namespace: str = "default", **paths: Any) -> Object:
    """A resource after defaulting, with these fields of its spec: `onload__version="1"`. None removes a field."""
    spec = copy.deepcopy(SPEC)
    spec["devicePlugin"] = {**DEFAULTS}
    for path, value in paths.items():
        *parents, last = path.split("__")
        target = spec
        for each in parents:
            target = target.setdefault(each, {})
        if value is None:
            target.pop(last, None)
        else:
            target[last] = value
    return {
        "apiVersion": "onload.amd.com/v1alpha1",
        "kind": "Onload",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def onload(name: str = "onload", namespace: str = "default", **paths: Any) -> Onload:
    """The same, read."""
    return msgspec.convert(resource(name, namespace, **paths), Onload)
