"""Custom resources of the operator, as manifests and as decoded values."""

from pathlib import Path
from typing import Any

import yaml

from accelplane.operator import models

SAMPLES = Path(__file__).parents[1] / "deploy" / "operator" / "samples"
Object = dict[str, Any]
# What a resource of a kind must have.
_REQUIRED: dict[str, Object] = {
    "generic": {"devices": [{"name": "fuse", "groups": [{"paths": [{"path": "/dev/fuse"}]}]}]},
}


def resource(family: str, name: str = "mine", **spec: Any) -> Object:
    """The object of a resource."""
    kind = models.KINDS[family].__name__
    found = {**_REQUIRED.get(family, {}), **spec}
    return {"apiVersion": "deviceplugin.intel.com/v1", "kind": kind, "metadata": {"name": name}, "spec": found}


def plugin(family: str, name: str = "mine", *, metadata: Object | None = None, **spec: Any) -> models.DevicePlugin:
    """The same, read."""
    result = resource(family, name, **spec)
    result["metadata"] |= metadata or {}
    return models.decode(result)


def sample(family: str) -> Object:
    """The sample of the deployment tree."""
    return yaml.safe_load((SAMPLES / f"deviceplugin_v1_{family}deviceplugin.yaml").read_text())


# Specs that the Go project's definitions accept, although its webhooks or operator reject most of them.
ACCEPTED_BY_THE_ORIGINAL: tuple[tuple[str, Object], ...] = (
    *((family, {}) for family in models.KINDS),
    *((family, {"image": "x"}) for family in models.KINDS),
    *((family, {"tolerations": [{}, {"operator": "In", "effect": "Never"}]}) for family in models.KINDS),
    *((family, {"nodeSelector": {"a b": "c d" * 50}}) for family in models.KINDS),
    ("dsa", {"provisioningConfig": "mine"}),
    ("dsa", {"provisioningConfig": "a b", "initImage": ""}),
    ("dsa", {"driver": "vfio-pci", "sharedDevNum": 1_000_000}),
    ("iaa", {"provisioningConfig": "mine"}),
    ("iaa", {"provisioningConfig": "mine", "initImage": "x"}),
    ("qat", {"provisioningConfig": "mine"}),
    ("qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["c3xxxvf"]}),
    ("qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["c3xxxvf"], "initImage": "x"}),
    ("qat", {"provisioningConfig": "mine", "initImage": "x"}),
    ("qat", {"kernelVfDrivers": ["4xxxvf"] * 100, "maxNumDevices": 1_000_000}),
    ("gpu", {"sharedDevNum": 1, "preferredAllocationPolicy": "packed"}),
    ("gpu", {"sharedDevNum": 1, "resourceManager": True}),
    ("gpu", {"allowIDs": "0x56C0, 1"}),
    ("gpu", {"denyIDs": "," * 1000}),
    ("gpu", {"allowIDs": "0x56c0", "denyIDs": "0x56c1"}),
    ("gpu", {"monitoringMode": "split", "bypathMode": "all"}),
    ("fpga", {"mode": "regiondevel", "initImage": "x" * 5000}),
    ("sgx", {"enclaveLimit": 1_000_000, "provisionLimit": 1_000_000, "dcapInfraResources": True}),
    ("npu", {"sharedDevNum": 1_000_000, "logLevel": 1_000_000}),
)

# Specs that break a rule about fields that the Go project's definitions do not have.
BROKEN_RULES: tuple[tuple[str, Object], ...] = (
    ("gpu", {"healthManagement": True, "xpumdEndpoint": "/run/xpumd/a.sock"}),
    ("gpu", {"xpumdEndpoint": "/socket"}),
    ("gpu", {"xpumdEndpoint": "/run/../etc/x"}),
    ("gpu", {"xpumdEndpoint": "run/xpumd/a.sock"}),
    *(
        ("npu", {"updateStrategy": {"rollingUpdate": {field: value}}})
        for field, values in (("maxSurge", (1, "1", "10%")), ("maxUnavailable", (0, -1, "0%", "101%", "half", "5")))
        for value in values
    ),
    ("sgx", {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {}}}),
    *(("qat", {"dra": {"devices": {address: "dra"}}}) for address in ("03:00.0", "0000:03:00.A", "gpu")),
    ("npu", {"dra": {"api": "plugin"}, "updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}),
    ("npu", {"dra": {"devices": {"0000:03:00.0": "plugin"}}, "updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}),
)
# Specs with fields of ours that all rules accept.
ACCEPTED_WITH_DRA: tuple[tuple[str, Object], ...] = (
    *((family, {"dra": {}}) for family in models.KINDS),
    (
        "gpu",
        {
            "dra": {
                "api": "plugin",
                "devices": {"0000:03:00.0": "dra", "0000:04:00.0": "none"},
                "evict": "sick",
                "manageBinding": True,
                "deviceStatus": True,
                "takeOver": True,
            }
        },
    ),
    ("npu", {"dra": {}, "updateStrategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}}}),
)
