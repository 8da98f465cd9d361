"""Custom resources GenericDevicePlugin: validation, and the arguments as the plugin reads them."""

import json
from typing import Any

import pytest
from customresources import plugin
from operatorvalidation import POLICY, own_image, warnings_of

from accelplane.cli.genericplugin import ALL_FLAGS
from accelplane.cli.goflags import parse
from accelplane.operator import models
from accelplane.operator.daemonsets import render
from accelplane.operator.settings import Settings
from accelplane.operator.validation import verdict

FUSE: dict[str, Any] = {"name": "fuse", "groups": [{"count": 10, "paths": [{"path": "/dev/fuse"}]}]}


def refusal(**spec: Any) -> str:
    found = plugin("generic", **{"image": own_image("intel-generic-plugin"), **spec})
    return verdict(found, POLICY).refusal


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"devices": []}, "devices is empty, expected one resource or more"),
        ({"devices": [FUSE, FUSE]}, "devices: found the name 'fuse' twice, expected one entry with all groups"),
        ({"domain": "Mine"}, "resource 'Mine/any': the part before the slash must be a lower-case DNS name"),
        ({"devices": [{**FUSE, "name": "a/b"}]}, "the part after the slash must have 1 to 63 characters"),
        ({"domain": "1.example", "cdi": "all"}, "domain: found '1.example', expected a letter first"),
        ({"domain": f"{'a' * 60}.example", "dra": {}}, "expected at most 63 characters of a-z, 0-9, - and . because"),
        ({"image": "example.com/other:1.0.0"}, "image has an incorrect image name"),
    ],
)
def test_what_the_plugin_would_reject_is_rejected(spec: dict[str, Any], message: str) -> None:
    assert message in refusal(**{"devices": [FUSE], **spec})


def test_devices_that_do_not_fit_into_arguments_are_rejected() -> None:
    paths = [{"path": f"/dev/{number:04}{'x' * 1500}"} for number in range(50)]
    message = refusal(devices=[{"name": "a", "groups": [{"paths": paths}]}])
    assert "bytes as JSON, expected at most 524288, and 65536 for each device" in message
    many = [{"name": f"a{number}", "groups": [{"paths": paths[:40]}]} for number in range(9)]
    assert "expected at most 524288" in refusal(devices=many)


def test_a_malformed_group_is_no_resource() -> None:
    with pytest.raises(ValueError, match="expected one of paths, usb, pci and rdma in a group"):
        plugin("generic", devices=[{"name": "a", "groups": [{}]}])


def test_binding_is_admitted_with_a_warning() -> None:
    pci = {"vendor": "8086", "device": "1572"}
    devices = [{"name": "nic", "groups": [{"pci": [{**pci, "bind": True}]}]}]
    assert "bind needs a pod without the default profiles of AppArmor and SELinux" in warnings_of(
        "generic", devices=devices
    )
    assert warnings_of("generic", devices=[{"name": "nic", "groups": [{"pci": [pci]}]}]) == ""


def test_the_plugin_reads_the_devices_of_the_resource() -> None:
    """All fields of the resource are in the arguments, and the plugin accepts these."""
    devices = [
        FUSE,
        {
            "name": "all.kinds",
            "groups": [
                {
                    "paths": [{"path": "/dev/a*", "mountPath": "/dev/a", "permissions": "r", "limit": 3}],
                    "env": {"A": "{path}"}, "mounts": [{"path": "/lib", "readOnly": False}], "numaNodes": [1],
                    "health": {"command": ["/check"], "periodSeconds": 10, "timeoutSeconds": 2, "failureThreshold": 3,
                               "successThreshold": 2},
                },
                {"usb": [{"vendor": "046d", "product": "0825", "serial": "A", "separate": True}]},
                {"pci": [{"vendor": "8086", "device": "1572", "addresses": ["0000:3b:00.0"], "iommufd": True}]},
                {"rdma": [{"names": ["mlx5_*"], "interfaces": ["a"], "linkLayer": "Ethernet", "umad": True}]},
            ],
        },
    ]  # fmt: skip
    found = plugin("generic", devices=devices)
    (container,) = render(found, Settings()).spec.template.spec.containers
    given, words = parse(ALL_FLAGS, container.args)
    assert words == []
    read = [json.loads(text) for text in str(given["device"]).split("\0")]
    assert isinstance(found.spec, models.GenericSpec)
    assert plugin("generic", devices=read).spec == found.spec
