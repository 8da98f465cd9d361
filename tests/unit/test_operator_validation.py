"""Defaulting, errors and warnings of admission: the specification's tables and the additions to them."""

import json
import re
from typing import Any

import msgspec
import pytest
from customresources import plugin, resource, sample
from hypothesis import given
from hypothesis import strategies as st
from operatorvalidation import POLICY, original, own_image, warnings_of

from accelplane.kube.quantities import number_of
from accelplane.operator import defaulting, models
from accelplane.operator.overlap import Overlap
from accelplane.operator.settings import PLACEHOLDER, RELEASE, ImagePolicy
from accelplane.operator.validation import verdict

FAMILIES = [*models.KINDS]


def validation_error(family: str, others: list[models.DevicePlugin] | None = None, **spec: Any) -> str:
    """The error for a valid resource with these changes; empty if it is admitted."""
    right: dict[str, Any] = {"image": own_image(f"intel-{family}-plugin")}
    if family == "fpga":
        right["initImage"] = own_image("intel-fpga-initcontainer")
    return verdict(plugin(family, **right | spec), POLICY, others=others or []).refusal


# Defaulting


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [{}, {"image": ""}, {"logLevel": 4}])
def test_an_unset_image_is_filled_in_with_that_of_the_release(family: str, spec: dict[str, Any]) -> None:
    document = json.dumps(resource(family, **spec)).encode()
    expected = {"image": own_image(f"intel-{family}-plugin")}
    if family == "fpga":
        expected["initImage"] = own_image("intel-fpga-initcontainer")
    assert defaulting.missing(family, document, POLICY) == expected
    assert defaulting.patch(family, document, POLICY) == [
        {"op": "add", "path": f"/spec/{field}", "value": image} for field, image in expected.items()
    ]


def test_a_resource_without_a_spec_gets_one() -> None:
    policy = ImagePolicy(vendor="mirror.example/ours", target="0.36.0")
    assert defaulting.patch("sgx", b'{"kind":"SgxDevicePlugin"}', policy) == [
        {"op": "add", "path": "/spec", "value": {}},
        {"op": "add", "path": "/spec/image", "value": "mirror.example/ours/intel-sgx-plugin:0.36.0"},
    ]


def test_an_unset_image_is_filled_in_with_the_override_of_the_environment() -> None:
    policy = ImagePolicy(overrides={"INTEL_SGX_PLUGIN_SHA": "a.example/intel-sgx-plugin@sha256:00"})
    assert defaulting.missing("sgx", b"{}", policy) == {"image": "a.example/intel-sgx-plugin@sha256:00"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resource_with_images_is_unchanged_by_defaulting(family: str) -> None:
    document = json.dumps(sample(family)).encode()
    assert defaulting.patch(family, document, POLICY) == []


def test_defaulting_leaves_invalid_fields_to_the_schema() -> None:
    assert defaulting.patch("gpu", b'{"spec":{"image":7,"sharedDevNum":"many"}}', POLICY) == []
    with pytest.raises(msgspec.DecodeError):
        defaulting.patch("gpu", b'{"spec":[]}', POLICY)


# Validation


@pytest.mark.parametrize("family", FAMILIES)
def test_the_samples_are_admitted_without_warnings(family: str) -> None:
    resource = json.loads(json.dumps(sample(family)).replace(PLACEHOLDER, POLICY.vendor))
    found = verdict(models.decode(resource), POLICY)
    assert (found.refusal, found.warnings) == ("", ())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "image", ["intel-other-plugin:0.31.1", "intel-{}-plugin", "intel-{}-plugin:0.30.0", "x:latest"]
)
def test_a_wrong_image_is_rejected_in_one_line_with_the_image_to_write(family: str, image: str) -> None:
    refusal = validation_error(family, image=image.format(family))
    assert refusal.startswith("invalid resource: image ")
    assert image.format(family) in refusal
    assert refusal.endswith(f"; set image to {own_image(f'intel-{family}-plugin')}")
    assert "\n" not in refusal


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tag_devel_is_admitted_with_a_warning(family: str) -> None:
    name = f"intel-{family}-plugin"
    spec = {"initImage": own_image("intel-fpga-initcontainer")} if family == "fpga" else {}
    warning = warnings_of(family, image=own_image(name, "devel"), **spec)
    assert warning.startswith(f"image has tag devel in '{own_image(name, 'devel')}'")
    assert warning.endswith(f"set image to {own_image(name)}")


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"npu"}))
def test_images_of_the_go_project_are_admitted_without_warnings(family: str) -> None:
    spec = {"initImage": "intel/intel-fpga-initcontainer:0.31.1"} if family == "fpga" else {}
    assert warnings_of(family, image=original(family), **spec) == ""


def test_an_image_that_the_operator_replaces_is_admitted_with_a_warning() -> None:
    newer = ImagePolicy(release="1.2.0", vendor=POLICY.vendor)
    assert warnings_of("sgx", newer, image="mine/intel-sgx-plugin:1.0.0") == (
        "image is 'mine/intel-sgx-plugin:1.0.0'; the operator replaces it with mine/intel-sgx-plugin:1.2.0"
    )
    pinned = ImagePolicy(overrides={"INTEL_SGX_PLUGIN_SHA": "a.example/x@sha256:00"})
    assert "INTEL_SGX_PLUGIN_SHA of the operator replaces it with a.example/x@sha256:00" in warnings_of("sgx", pinned)
    assert warnings_of("sgx", ImagePolicy(release="1.2.0", upgrade="off")) == ""


def test_an_image_of_a_registry_that_cannot_exist_is_admitted_with_a_warning() -> None:
    image = f"{PLACEHOLDER}/intel-sgx-plugin:{RELEASE}"
    assert warnings_of("sgx", image=image) == (
        f"image is '{image}', whose registry does not exist; set image, and -image-vendor of the operator, to the "
        "registry with your images"
    )


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("dlb", "intel-dlb-initcontainer"),
        ("dlb", "intel-dlb-initimage"),
        ("dsa", "intel-idxd-config-initcontainer"),
        ("fpga", "intel-fpga-initcontainer"),
        ("fpga", "intel-fpga-initimage"),
        ("iaa", "intel-idxd-config-initcontainer"),
        ("qat", "intel-qat-initcontainer"),
        ("sgx", "intel-sgx-initcontainer"),
    ],
)
def test_name_and_version_of_an_init_image_are_validated(family: str, name: str) -> None:
    assert validation_error(family, initImage=f"any/{name}:0.31.1") == ""
    assert "initImage version is too low: found 0.31.0" in validation_error(family, initImage=f"any/{name}:0.31.0")
    wrong = validation_error(family, initImage="any/intel-other-initcontainer:0.31.1")
    assert wrong.startswith("invalid resource: initImage has an incorrect image name")
    assert name in wrong
    assert wrong.endswith(f"set initImage to {own_image(name.replace('-initimage', '-initcontainer'))}")


def test_only_fpgas_need_an_init_image() -> None:
    assert "initImage field is incorrect" in validation_error("fpga", initImage="")
    for family in set(FAMILIES) - {"fpga", "npu"}:
        assert validation_error(family, initImage="") == ""


def test_a_wrong_init_image_of_gpus_is_a_warning() -> None:
    assert "incorrect image name" in warnings_of("gpu", initImage="any/thing:1.0.0")
    assert warnings_of("gpu", initImage="intel/intel-gpu-initcontainer:0.31.1") == ""


NO_INIT_IMAGE = [
    "provisioningConfig is mine",
    "initImage is empty",
    f"set initImage to {POLICY.vendor}/",
]
RM = [plugin("gpu", "other", resourceManager=True)]
QAT_INIT = {"initImage": "intel/intel-qat-initcontainer:0.31.1"}


@pytest.mark.parametrize(
    ("family", "spec", "others", "words"),
    [
        ("gpu", {"sharedDevNum": 1}, [], None),
        ("gpu", {}, [], None),
        ("gpu", {"sharedDevNum": 1, "preferredAllocationPolicy": "none"}, [], None),
        ("gpu", {"sharedDevNum": 2, "preferredAllocationPolicy": "packed"}, [], None),
        ("gpu", {"preferredAllocationPolicy": "packed"}, [], None),
        (
            "gpu", {"sharedDevNum": 1, "preferredAllocationPolicy": "balanced"}, [],
            ["preferredAllocationPolicy is balanced", "expected policy none"],
        ),
        ("gpu", {"sharedDevNum": 1, "resourceManager": True}, [], ["resourceManager is true", "sharedDevNum is 1"]),
        ("gpu", {"sharedDevNum": 2, "resourceManager": True}, RM, None),
        ("gpu", {"sharedDevNum": 2}, RM, ["resourceManager is false", "true in GpuDevicePlugin other"]),
        ("gpu", {"sharedDevNum": 2}, [plugin("gpu", "mine", resourceManager=True)], None),
        ("gpu", {"allowIDs": "0x56c0,0x56c1"}, [], None),
        ("gpu", {"denyIDs": "0x56c0"}, [], None),
        ("gpu", {"allowIDs": "0x56c0, 0x56c1"}, [], ["allowIDs is 0x56c0, 0x56c1,", "without spaces"]),
        ("gpu", {"allowIDs": "0x56C0"}, [], ["allowIDs is 0x56C0", "lower case"]),
        ("gpu", {"denyIDs": "0x56c0,"}, [], ["denyIDs is 0x56c0,,"]),
        ("gpu", {"denyIDs": "56c0"}, [], ["denyIDs is 56c0,"]),
        ("gpu", {"allowIDs": "0x56c0", "denyIDs": "0x56c1"}, [], ["allowIDs is 0x56c0 and denyIDs is 0x56c1"]),
        ("gpu", {"levelZeroImage": "intel/intel-gpu-plugin:0.31.1"}, [], ["levelZeroImage", "intel-gpu-levelzero"]),
        ("gpu", {"healthManagement": True, "xpumdEndpoint": "/run/xpumd/a"}, [], ["expected one of them"]),
        ("gpu", {"xpumdEndpoint": "/run/xpumd/intelxpuinfo.sock"}, [], None),
        ("gpu", {"xpumdEndpoint": "/run/".ljust(107, "x")}, [], None),
        ("gpu", {"xpumdEndpoint": "/run/".ljust(108, "x")}, [], ["up to 107 bytes"]),
        ("gpu", {"xpumdEndpoint": "/socket"}, [], ["xpumdEndpoint is /socket,"]),
        ("gpu", {"xpumdEndpoint": "/run/../etc/x"}, [], ["xpumdEndpoint"]),
        (
            "iaa", {"provisioningConfig": "a b", "initImage": "intel/intel-idxd-config-initcontainer:0.31.1"}, [],
            ["provisioningConfig is 'a b', expected the name of a ConfigMap"],
        ),
        ("dsa", {"provisioningConfig": "mine"}, [], NO_INIT_IMAGE),
        ("iaa", {"provisioningConfig": "mine"}, [], NO_INIT_IMAGE),
        ("qat", {"provisioningConfig": "mine"}, [], NO_INIT_IMAGE),
        ("qat", {"provisioningConfig": "mine", **QAT_INIT}, [], ["kernelVfDrivers is empty", "4xxxvf, 420xxvf"]),
        (
            "qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["c6xxvf"], **QAT_INIT}, [],
            ["kernelVfDrivers is c6xxvf"],
        ),
        ("qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["c6xxvf", "4xxxvf"], **QAT_INIT}, [], None),
        ("qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["420xxvf"], **QAT_INIT}, [], None),
        ("qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["6xxxvf"], **QAT_INIT}, [], None),
    ],
)  # fmt: skip
def test_the_rules_of_a_kind_hold(
    family: str, spec: dict[str, Any], others: list[models.DevicePlugin], words: list[str] | None
) -> None:
    refusal = validation_error(family, others, **spec)
    assert bool(refusal) == (words is not None), refusal
    for word in words or []:
        assert word in refusal


def test_the_resource_manager_can_be_changed_in_one_resource_after_the_other() -> None:
    changed = plugin("gpu", image=own_image("intel-gpu-plugin"), sharedDevNum=2)
    assert verdict(changed, POLICY, others=RM).refusal.endswith(
        "true in GpuDevicePlugin other, expected the same in all; set resourceManager to true or change other first"
    )
    found = verdict(changed, POLICY, others=RM, is_update=True)
    assert found.refusal == ""
    assert [each for each in found.warnings if "resourceManager" in each] == [
        "resourceManager is false and true in GpuDevicePlugin other, expected the same in all; change other as well"
    ]


@pytest.mark.parametrize(
    ("family", "spec", "first"),
    [
        ("dlb", {"image": "x:1", "initImage": "x:1"}, "initImage"),
        ("dsa", {"image": "x:1", "provisioningConfig": "c"}, "image"),
        ("iaa", {"initImage": "", "provisioningConfig": "c"}, "provisioningConfig"),
        ("fpga", {"image": "x:1", "initImage": "x:1"}, "image"),
        (
            "gpu", {"image": "x:1", "sharedDevNum": 1, "resourceManager": True, "preferredAllocationPolicy": "packed"},
            "preferredAllocationPolicy",
        ),
        ("gpu", {"image": "x:1", "sharedDevNum": 1, "resourceManager": True}, "resourceManager"),
        ("gpu", {"image": "x:1", "allowIDs": "x", "denyIDs": "y"}, "allowIDs is x"),
        ("gpu", {"image": "x:1", "allowIDs": "0x0000", "denyIDs": "y"}, "denyIDs is y"),
        ("gpu", {"image": "x:1", "allowIDs": "0x0000", "denyIDs": "0x0000"}, "allowIDs is 0x0000 and denyIDs"),
        ("qat", {"image": "x:1", "initImage": "x:1", "provisioningConfig": "c"}, "initImage"),
        ("qat", {"image": "x:1", "provisioningConfig": "c"}, "provisioningConfig"),
        ("sgx", {"image": "x:1", "initImage": "x:1"}, "image"),
    ],
)  # fmt: skip
def test_the_first_error_in_the_order_of_the_original_is_reported(
    family: str, spec: dict[str, Any], first: str
) -> None:
    assert validation_error(family, **spec).startswith(f"invalid resource: {first}")


def test_a_policy_without_shared_gpus_is_a_warning() -> None:
    assert "has no effect without sharedDevNum above 1" in warnings_of("gpu", preferredAllocationPolicy="packed")
    assert warnings_of("gpu") == ""


def test_older_images_may_be_admitted_with_a_warning_while_upgrades_are_on() -> None:
    old = plugin("sgx", image=original("sgx", "0.30.0"))
    found = verdict(old, ImagePolicy(older="warn"))
    assert found.refusal == ""
    assert found.warnings[0] == (
        "image is 'intel/intel-sgx-plugin:0.30.0', older than 0.31.1; the operator replaces it with "
        "intel/intel-sgx-plugin:0.31.1"
    )
    assert verdict(old, ImagePolicy(older="warn", upgrade="off")).refusal
    assert verdict(old, ImagePolicy()).refusal


def test_an_overlap_is_a_warning() -> None:
    shared = [Overlap("NpuDevicePlugin", "mine", "other", ("n1",))]
    found = verdict(plugin("npu", image=own_image("intel-npu-plugin")), POLICY, overlaps=shared)
    assert found.refusal == ""
    assert "NpuDevicePlugin other also selects node n1; change one of the two node selectors" in found.warnings[0]


def test_a_name_too_long_for_the_daemonset_is_rejected() -> None:
    right = {"image": own_image("intel-sgx-plugin")}
    assert verdict(plugin("sgx", "x" * 236, **right), POLICY).refusal == ""
    assert "metadata.name has 237 characters" in verdict(plugin("sgx", "x" * 237, **right), POLICY).refusal


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"nodeSelector": {"a b": "c"}}, "nodeSelector has the key 'a b'"),
        ({"nodeSelector": {"a": "c d"}}, "nodeSelector[a] is 'c d'"),
        (
            {"tolerations": [{"operator": "In", "key": "a"}]},
            "tolerations[0].operator is 'In', expected Exists or Equal; write one of them",
        ),
        ({"tolerations": [{"key": "a"}, {"key": "a", "effect": "Never"}]}, "tolerations[1].effect is 'Never'"),
        ({"tolerations": [{}]}, "tolerations[0].key is empty"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "tolerations[0].value is 'b'"),
        ({"tolerations": [{"key": "a", "tolerationSeconds": 5}]}, "set effect NoExecute or remove tolerationSeconds"),
        ({"tolerations": [{"key": "a/b/c"}]}, "tolerations[0].key is 'a/b/c'"),
        ({"imagePullSecrets": [{"name": "ok"}, {"name": "No"}]}, "imagePullSecrets[1].name is 'No'"),
        ({"priorityClassName": "a_b"}, "priorityClassName is 'a_b'"),
        ({"resources": {"limits": {"cpu": "much"}}}, "resources.limits[cpu] is 'much', expected a quantity"),
        ({"resources": {"requests": {"c p u": "1"}}}, "resources.requests has the key 'c p u'"),
        ({"resources": {"limits": {"cpu": "-1"}}}, "resources.limits[cpu] is '-1'"),
        ({"resources": {"limits": {"cpus": 1}}}, "resources.limits has the key 'cpus', expected cpu, memory"),
        ({"resources": {"limits": {"a.example/b": "1500m"}}}, "[a.example/b] is '1500m', expected an integer"),
        ({"resources": {"requests": {"a.example/b": 1}}}, "is 1 and the limit is unset, expected equal values"),
        (
            {"resources": {"limits": {"hugepages-2Mi": "4Mi"}, "requests": {"hugepages-2Mi": "2Mi"}}},
            "is '2Mi' and the limit is '4Mi', expected equal values",
        ),
        (
            {"resources": {"limits": {"memory": "1Gi"}, "requests": {"memory": "1025Mi"}}},
            "resources.requests[memory] is '1025Mi', expected at most the limit '1Gi'",
        ),
        ({"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}, "maxSurge is 1, expected 0"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": 0}}}, "maxUnavailable is 0"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": "half"}}}, "maxUnavailable is half"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": "5"}}}, "maxUnavailable is 5"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": -1}}}, "maxUnavailable is -1"),
        ({"updateStrategy": {"type": "OnDelete", "rollingUpdate": {}}}, "updateStrategy.type is OnDelete"),
        ({"podAnnotations": {"a b": ""}}, "podAnnotations has the key 'a b'"),
        ({"podAnnotations": {"a": "b" * 300_000}}, "podAnnotations has 300001 bytes"),
    ],
)
def test_invalid_pod_fields_are_rejected_in_one_line_with_the_remedy(spec: dict[str, Any], words: str) -> None:
    for family in FAMILIES:
        refusal = validation_error(family, **spec)
        assert words in refusal
        assert re.fullmatch(r"invalid resource: .+, expected .+; .+", refusal)


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"intel.feature.node.kubernetes.io/gpu": "true", "empty": ""}},
        {"tolerations": [{"operator": "Exists"}, {"key": "a.example/b", "value": "c", "effect": "NoSchedule"}]},
        {"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}]},
        {"tolerations": [{"key": "a", "effect": "PreferNoSchedule"}]},
        {"imagePullSecrets": [{"name": "registry.mine"}], "priorityClassName": "system-node-critical"},
        {"resources": {"limits": {"cpu": 1, "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}}},
        {"resources": {"limits": {"hugepages-2Mi": "4Mi", "a.example/b": 1}, "requests": {"a.example/b": "1"}}},
        {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}}},
        {"updateStrategy": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 1}}},
        {"updateStrategy": {"type": "OnDelete"}},
        {"podAnnotations": {"Prefix.example/Name": "ä"}},
    ],
)
def test_valid_pod_fields_are_admitted(spec: dict[str, Any]) -> None:
    for family in FAMILIES:
        assert validation_error(family, **spec) == ""


@pytest.mark.parametrize(
    ("same", "as_this"),
    [("1", "1000m"), (2, "2"), ("1Ki", "1024"), ("0.5Gi", "512Mi"), ("1e3", "1k"), ("1E", "1000P"), (".5", "500m")],
)
def test_quantities_are_compared_by_value(same: str | int, as_this: str) -> None:
    assert number_of(same) == number_of(as_this) != number_of("7")


TEXTS = st.text(max_size=12)
AMOUNTS = st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=2)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "nodeSelector": st.dictionaries(TEXTS, TEXTS, max_size=3),
        "tolerations": st.lists(
            st.fixed_dictionaries({}, optional=dict.fromkeys(("key", "operator", "value", "effect"), TEXTS)), max_size=3
        ),
        "resources": st.fixed_dictionaries({}, optional=dict.fromkeys(("limits", "requests"), AMOUNTS)),
        "podAnnotations": st.dictionaries(TEXTS, TEXTS, max_size=3),
        "image": TEXTS,
        "allowIDs": TEXTS,
        "xpumdEndpoint": TEXTS,
    },
)  # fmt: skip


@given(SPECS)
def test_any_spec_that_the_schema_accepts_is_validated(spec: dict[str, Any]) -> None:
    found = verdict(plugin("gpu", **spec), POLICY)
    assert not found.refusal or found.refusal.startswith("invalid resource: ")
    assert "\n" not in found.refusal + "".join(found.warnings)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "TpuDevicePlugin"}, "kind is 'TpuDevicePlugin', expected one of DlbDevicePlugin, "),
        ({"kind": "GPUDevicePlugin"}, "kind is 'GPUDevicePlugin', expected GpuDevicePlugin"),
        (
            {"apiVersion": "deviceplugin.intel.com/v2"},
            "apiVersion is 'deviceplugin.intel.com/v2', expected deviceplugin.intel.com/v1",
        ),
        ({"apiVersion": None}, "apiVersion is None, expected deviceplugin.intel.com/v1"),
        ({"spec": {"sharedDevNum": 0}}, "sharedDevNum"),
        ({"spec": []}, "spec"),
    ],
)
def test_a_wrong_kind_version_or_field_is_an_error_with_the_one_to_write(change: dict[str, Any], error: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        models.decode(resource("gpu") | change)
    assert error in str(raised.value)
