"""What admission fills in, refuses and warns of: the specification's tables, and what goes beyond."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from customresources import plugin, resource, sample
from hypothesis import given
from hypothesis import strategies as st

from accelplane.kube.quantities import number_of
from accelplane.operator import defaulting, models
from accelplane.operator.overlap import Overlap
from accelplane.operator.settings import ImagePolicy
from accelplane.operator.validation import verdict

POLICY = ImagePolicy(minimum="0.31.1")
FAMILIES = [*models.KINDS]


def own(family: str, tag: str = "0.31.1") -> str:
    return f"intel/intel-{family}-plugin:{tag}"


def judged(family: str, others: list[models.DevicePlugin] | None = None, **spec: Any) -> str:
    """The refusal of a resource that is right but for what is given; empty when it is admitted."""
    right: dict[str, Any] = {"image": own(family)}
    if family == "fpga":
        right["initImage"] = "intel/intel-fpga-initcontainer:0.31.1"
    return verdict(plugin(family, **right | spec), POLICY, others=others or []).refusal


def warned(family: str, **spec: Any) -> str:
    found = verdict(plugin(family, **{"image": own(family)} | spec), POLICY)
    assert found.refusal == ""
    return "\n".join(found.warnings)


# Defaulting


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [{}, {"image": ""}, {"logLevel": 4}])
def test_an_image_that_is_not_named_is_filled_in(family: str, spec: dict[str, Any]) -> None:
    document = json.dumps(resource(family, **spec)).encode()
    expected = {"image": f"intel/intel-{family}-plugin:0.31.1"}
    if family == "fpga":
        expected["initImage"] = "intel/intel-fpga-initcontainer:0.31.1"
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resource_that_names_its_images_is_left_alone(family: str) -> None:
    document = json.dumps(sample(family)).encode()
    assert defaulting.patch(family, document, POLICY) == []


def test_what_the_schema_will_refuse_is_no_matter_of_defaulting() -> None:
    assert defaulting.patch("gpu", b'{"spec":{"image":7,"sharedDevNum":"many"}}', POLICY) == []
    with pytest.raises(msgspec.DecodeError):
        defaulting.patch("gpu", b'{"spec":[]}', POLICY)


# Validation


@pytest.mark.parametrize("family", FAMILIES)
def test_the_samples_are_admitted_without_a_word(family: str) -> None:
    found = verdict(models.decode(sample(family)), POLICY)
    assert (found.refusal, found.warnings) == ("", ())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "image", ["intel-other-plugin:0.31.1", "intel-{}-plugin", "intel-{}-plugin:devel", "intel-{}-plugin:0.30.0"]
)
def test_an_image_that_is_not_the_plugins_is_refused_by_name(family: str, image: str) -> None:
    refusal = judged(family, image=image.format(family))
    assert refusal.startswith("invalid resource: image ")
    assert image.format(family) in refusal


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
def test_an_init_image_is_held_to_its_name_and_version(family: str, name: str) -> None:
    assert judged(family, initImage=f"any/{name}:0.31.1") == ""
    assert judged(family, initImage=f"any/{name}:0.31.0").startswith("invalid resource: initImage has version 0.31.0")
    wrong = judged(family, initImage="any/intel-other-initcontainer:0.31.1")
    assert wrong.startswith("invalid resource: initImage has an incorrect image name")
    assert name in wrong


def test_only_fpgas_need_an_init_image() -> None:
    assert "initImage is incorrect" in judged("fpga", initImage="")
    for family in set(FAMILIES) - {"fpga", "npu"}:
        assert judged(family, initImage="") == ""


def test_gpus_init_image_is_looked_at_and_not_refused() -> None:
    assert "incorrect image name" in warned("gpu", initImage="any/thing:1.0.0")
    assert warned("gpu", initImage="intel/intel-gpu-initcontainer:0.31.1") == ""


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
            ["preferredAllocationPolicy is balanced", "sharedDevNum is 1", "expected none"],
        ),
        ("gpu", {"sharedDevNum": 1, "resourceManager": True}, [], ["resourceManager is true", "sharedDevNum is 1"]),
        ("gpu", {"sharedDevNum": 2, "resourceManager": True}, RM, None),
        ("gpu", {"sharedDevNum": 2}, RM, ["resourceManager is false", "true in GpuDevicePlugin other"]),
        ("gpu", {"sharedDevNum": 2}, [plugin("gpu", "mine", resourceManager=True)], None),
        ("gpu", {"allowIDs": "0x56c0,0x56c1"}, [], None),
        ("gpu", {"denyIDs": "0x56c0"}, [], None),
        ("gpu", {"allowIDs": "0x56c0, 0x56c1"}, [], ["allowIDs is '0x56c0, 0x56c1'", "no spaces"]),
        ("gpu", {"allowIDs": "0x56C0"}, [], ["allowIDs", "lower case"]),
        ("gpu", {"denyIDs": "0x56c0,"}, [], ["denyIDs is '0x56c0,'"]),
        ("gpu", {"denyIDs": "56c0"}, [], ["denyIDs is '56c0'"]),
        ("gpu", {"allowIDs": "0x56c0", "denyIDs": "0x56c1"}, [], ["allowIDs is 0x56c0 and denyIDs is 0x56c1"]),
        ("gpu", {"levelZeroImage": "intel/intel-gpu-plugin:0.31.1"}, [], ["levelZeroImage", "intel-gpu-levelzero"]),
        ("gpu", {"healthManagement": True, "xpumdEndpoint": "/run/xpumd/a"}, [], ["expected one of them"]),
        ("gpu", {"xpumdEndpoint": "/run/xpumd/intelxpuinfo.sock"}, [], None),
        ("gpu", {"xpumdEndpoint": "/socket"}, [], ["xpumdEndpoint is '/socket'"]),
        ("gpu", {"xpumdEndpoint": "/run/../etc/x"}, [], ["xpumdEndpoint"]),
        (
            "iaa", {"provisioningConfig": "a b", "initImage": "intel/intel-idxd-config-initcontainer:0.31.1"}, [],
            ["provisioningConfig is 'a b', expected the name of a ConfigMap"],
        ),
        ("dsa", {"provisioningConfig": "mine"}, [], ["provisioningConfig is 'mine'", "initImage is empty"]),
        ("iaa", {"provisioningConfig": "mine"}, [], ["provisioningConfig is 'mine'", "initImage is empty"]),
        ("qat", {"provisioningConfig": "mine"}, [], ["provisioningConfig is 'mine'", "initImage is empty"]),
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
def test_a_kinds_own_rules_hold(
    family: str, spec: dict[str, Any], others: list[models.DevicePlugin], words: list[str] | None
) -> None:
    refusal = judged(family, others, **spec)
    assert bool(refusal) == (words is not None), refusal
    for word in words or []:
        assert word in refusal


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
        ("gpu", {"image": "x:1", "allowIDs": "x", "denyIDs": "y"}, "allowIDs is 'x'"),
        ("gpu", {"image": "x:1", "allowIDs": "0x0000", "denyIDs": "y"}, "denyIDs is 'y'"),
        ("gpu", {"image": "x:1", "allowIDs": "0x0000", "denyIDs": "0x0000"}, "allowIDs is 0x0000 and denyIDs"),
        ("qat", {"image": "x:1", "initImage": "x:1", "provisioningConfig": "c"}, "initImage"),
        ("qat", {"image": "x:1", "provisioningConfig": "c"}, "provisioningConfig"),
        ("sgx", {"image": "x:1", "initImage": "x:1"}, "image"),
    ],
)  # fmt: skip
def test_of_several_faults_the_first_in_the_order_of_the_original_is_told(
    family: str, spec: dict[str, Any], first: str
) -> None:
    assert judged(family, **spec).startswith(f"invalid resource: {first}")


def test_a_policy_without_shared_gpus_is_a_warning() -> None:
    assert "has no effect without sharedDevNum above 1" in warned("gpu", preferredAllocationPolicy="packed")
    assert warned("gpu") == ""


def test_older_images_may_be_admitted_with_a_warning_while_upgrades_are_on() -> None:
    old = plugin("sgx", image=own("sgx", "0.30.0"))
    found = verdict(old, ImagePolicy(older="warn"))
    assert found.refusal == ""
    assert "0.30.0" in found.warnings[0]
    assert "intel/intel-sgx-plugin:0.31.1 runs instead" in found.warnings[0]
    assert verdict(old, ImagePolicy(older="warn", upgrade="off")).refusal
    assert verdict(old, ImagePolicy()).refusal


def test_an_overlap_is_a_warning() -> None:
    shared = [Overlap("NpuDevicePlugin", "mine", "other", ("n1",))]
    found = verdict(plugin("npu", image=own("npu")), POLICY, overlaps=shared)
    assert found.refusal == ""
    assert "NpuDevicePlugin other selects node n1 as well" in found.warnings[0]


def test_a_name_that_the_daemonset_cannot_have_is_refused() -> None:
    right = {"image": own("sgx")}
    assert verdict(plugin("sgx", "x" * 236, **right), POLICY).refusal == ""
    assert "metadata.name has 237 characters" in verdict(plugin("sgx", "x" * 237, **right), POLICY).refusal


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"nodeSelector": {"a b": "c"}}, "nodeSelector has the key 'a b'"),
        ({"nodeSelector": {"a": "c d"}}, "nodeSelector[a] is 'c d'"),
        (
            {"tolerations": [{"operator": "In", "key": "a"}]},
            "tolerations[0].operator is 'In', expected Exists or Equal",
        ),
        ({"tolerations": [{"key": "a"}, {"key": "a", "effect": "Never"}]}, "tolerations[1].effect is 'Never'"),
        ({"tolerations": [{}]}, "tolerations[0].key is empty"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "tolerations[0].value is 'b'"),
        ({"tolerations": [{"key": "a", "tolerationSeconds": 5}]}, "expected NoExecute"),
        ({"tolerations": [{"key": "a/b/c"}]}, "tolerations[0].key is 'a/b/c'"),
        ({"imagePullSecrets": [{"name": "ok"}, {"name": "No"}]}, "imagePullSecrets[1].name is 'No'"),
        ({"priorityClassName": "a_b"}, "priorityClassName is 'a_b'"),
        ({"resources": {"limits": {"cpu": "much"}}}, "resources.limits[cpu] is 'much', expected an amount"),
        ({"resources": {"requests": {"c p u": "1"}}}, "resources.requests has the key 'c p u'"),
        ({"resources": {"limits": {"cpu": "-1"}}}, "resources.limits[cpu] is '-1'"),
        ({"resources": {"limits": {"cpus": 1}}}, "resources.limits has the key 'cpus', expected cpu, memory"),
        ({"resources": {"limits": {"a.example/b": "1500m"}}}, "[a.example/b] is '1500m', expected a whole number"),
        ({"resources": {"requests": {"a.example/b": 1}}}, "is 1, expected the limit, which is None"),
        (
            {"resources": {"limits": {"hugepages-2Mi": "4Mi"}, "requests": {"hugepages-2Mi": "2Mi"}}},
            "is '2Mi', expected the limit, which is '4Mi'",
        ),
        (
            {"resources": {"limits": {"memory": "1Gi"}, "requests": {"memory": "1025Mi"}}},
            "resources.requests[memory] is '1025Mi', expected no more than the limit '1Gi'",
        ),
        ({"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}, "maxSurge is 1, expected 0"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": 0}}}, "maxUnavailable is 0"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": "half"}}}, "maxUnavailable is 'half'"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": "5"}}}, "maxUnavailable is '5'"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": -1}}}, "maxUnavailable is -1"),
        ({"updateStrategy": {"type": "OnDelete", "rollingUpdate": {}}}, "updateStrategy.type is OnDelete"),
        ({"podAnnotations": {"a b": ""}}, "podAnnotations has the key 'a b'"),
        ({"podAnnotations": {"a": "b" * 300_000}}, "podAnnotations has 300001 bytes"),
    ],
)
def test_what_pods_cannot_be_is_refused_where_it_is_written(spec: dict[str, Any], words: str) -> None:
    for family in FAMILIES:
        assert words in judged(family, **spec)


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
        {"updateStrategy": {"type": "OnDelete"}},
        {"podAnnotations": {"Prefix.example/Name": "ä"}},
    ],
)
def test_what_pods_can_be_is_admitted(spec: dict[str, Any]) -> None:
    for family in FAMILIES:
        assert judged(family, **spec) == ""


@pytest.mark.parametrize(
    ("same", "as_this"),
    [("1", "1000m"), (2, "2"), ("1Ki", "1024"), ("0.5Gi", "512Mi"), ("1e3", "1k"), ("1E", "1000P"), (".5", "500m")],
)
def test_quantities_are_compared_by_what_they_mean(same: str | int, as_this: str) -> None:
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
def test_nothing_that_the_schema_lets_through_is_too_odd_to_be_judged(spec: dict[str, Any]) -> None:
    found = verdict(plugin("gpu", **spec), POLICY)
    assert not found.refusal or found.refusal.startswith("invalid resource: ")


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made | {"kind": "TpuDevicePlugin"},
        lambda made: made | {"apiVersion": "deviceplugin.intel.com/v2"},
        lambda made: made | {"spec": {"sharedDevNum": 0}},
        lambda made: made | {"spec": []},
    ],
)
def test_what_is_no_resource_of_ours_is_not_read(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    with pytest.raises(msgspec.ValidationError):
        models.decode(change(resource("gpu")))
