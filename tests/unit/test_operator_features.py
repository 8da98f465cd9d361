"""Warnings about images that do not support a field of a custom resource."""

from typing import Any

import pytest
from operatorvalidation import original, own_image, warnings_of

from accelplane.operator.settings import PLACEHOLDER, ImagePolicy

# Family, spec, image field and its name, the first version that supports the spec, and the start of the warning.
FEATURES = [
    ("dsa", {"driver": "vfio-pci"}, "image", "intel-dsa-plugin", "0.36.0", "driver vfio-pci"),
    ("dsa", {"driver": "vfio-pci"}, "initImage", "intel-idxd-config-initcontainer", "0.36.0", "driver vfio-pci"),
    ("gpu", {"allowIDs": "0x56c0"}, "image", "intel-gpu-plugin", "0.34.0", "allowIDs 0x56c0"),
    ("gpu", {"denyIDs": "0x56c0"}, "image", "intel-gpu-plugin", "0.34.0", "denyIDs 0x56c0"),
    ("gpu", {"bypathMode": "none"}, "image", "intel-gpu-plugin", "0.34.1", "bypathMode none"),
    (
        "gpu", {"monitoringMode": "split", "enableMonitoring": True}, "image", "intel-gpu-plugin", "0.36.0",
        "monitoringMode split",
    ),
    ("gpu", {"xpumdEndpoint": "/run/xpumd/a"}, "image", "intel-gpu-plugin", "0.36.0", "xpumdEndpoint /run/xpumd/a"),
    ("npu", {}, "image", "intel-npu-plugin", "0.34.0", "plugin"),
    ("qat", {"kernelVfDrivers": ["6xxxvf"]}, "image", "intel-qat-plugin", "0.34.0", "kernelVfDrivers 6xxxvf"),
    ("sgx", {"dcapInfraResources": True}, "image", "intel-sgx-plugin", "0.34.0", "dcapInfraResources true"),
]  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_a_field_that_the_image_does_not_support_is_a_warning(
    feature: tuple[str, dict[str, Any], str, str, str, str],
) -> None:
    family, spec, field, name, since, subject = feature
    assert warnings_of(family, **spec | {field: f"intel/{name}:0.31.1"}) == (
        f"{subject} needs {field} version {since} or newer, found 'intel/{name}:0.31.1'; "
        f"set {field} to {own_image(name)}"
    )
    assert warnings_of(family, **spec | {field: f"intel/{name}:{since}"}) == ""
    assert warnings_of(family, **spec | {field: own_image(name)}) == ""
    assert "needs" not in warnings_of(family, **spec | {field: own_image(name, "devel")})
    expected = f"set {field} to mirror/intel/{name}:{since}"
    assert expected in warnings_of(family, ImagePolicy(vendor="intel"), **spec | {field: f"mirror/intel/{name}:0.31.1"})


@pytest.mark.parametrize(
    ("image", "warns"),
    [
        (original("gpu"), False),
        (original("gpu", "0.33.9"), False),
        (original("gpu", "0.34.0"), True),
        (original("gpu", "0.36.0"), True),
        (own_image("intel-gpu-plugin"), False),
        (original("gpu", "devel"), False),
    ],
)
def test_images_whose_release_removed_the_resource_manager_are_a_warning(image: str, warns: bool) -> None:
    spec = {"image": image, "resourceManager": True, "sharedDevNum": 2}
    expected = (
        f"resourceManager true needs image version 1.0.0 or newer, or one below 0.34.0, found '{image}'; "
        f"set image to {PLACEHOLDER}/intel-gpu-plugin:"
    )
    for policy in (
        ImagePolicy(minimum="0.30.0"),
        ImagePolicy(minimum="0.30.0", vendor="intel", target="0.36.0", upgrade="off"),
    ):
        assert (expected in warnings_of("gpu", policy, **spec)) is warns
    assert "resourceManager true" not in warnings_of("gpu", **{**spec, "resourceManager": False})


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("dsa", {"driver": "idxd"}),
        ("gpu", {"monitoringMode": "split", "sharedDevNum": 2, "preferredAllocationPolicy": "packed"}),
        ("qat", {"kernelVfDrivers": ["4xxxvf"]}),
        ("sgx", {"dcapInfraResources": False, "enclaveLimit": 5}),
    ],
)
def test_fields_of_the_oldest_release_are_no_warning(family: str, spec: dict[str, Any]) -> None:
    assert warnings_of(family, image=original(family), **spec) == ""
