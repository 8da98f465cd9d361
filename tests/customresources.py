"""Custom resources of the operator, as its users write them and as its functions take them."""

from pathlib import Path
from typing import Any

import yaml

from accelplane.operator import models

SAMPLES = Path(__file__).parents[1] / "deploy" / "operator" / "samples"
Object = dict[str, Any]


def resource(family: str, name: str = "mine", **spec: Any) -> Object:
    """The object of a resource."""
    kind = models.KINDS[family].__name__
    return {"apiVersion": "deviceplugin.intel.com/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def plugin(family: str, name: str = "mine", *, metadata: Object | None = None, **spec: Any) -> models.DevicePlugin:
    """The same, read."""
    made = resource(family, name, **spec)
    made["metadata"] |= metadata or {}
    return models.decode(made)


def sample(family: str) -> Object:
    """The sample that comes with the manifests."""
    return yaml.safe_load((SAMPLES / f"deviceplugin_v1_{family}deviceplugin.yaml").read_text())
