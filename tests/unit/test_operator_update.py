"""Updates of existing DaemonSets: minimal writes, and never the name or selector."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from customresources import plugin
from daemonsetplans import plan

from accelplane.operator import models
from accelplane.operator.daemonsets import PROVISIONING_ANNOTATION, render
from accelplane.operator.settings import Settings
from accelplane.operator.update import HASH_ANNOTATION, provisioning_on

UID = {"uid": "u-1"}
Object = dict[str, Any]
INIT_IMAGES = {
    "dlb": "intel-dlb-initcontainer",
    "dsa": "intel-idxd-config-initcontainer",
    "fpga": "intel-fpga-initcontainer",
    "gpu": "intel-gpu-initcontainer",
    "iaa": "intel-idxd-config-initcontainer",
    "qat": "intel-qat-initcontainer",
    "sgx": "intel-sgx-initcontainer",
}


def desired(family: str, *, settings: Settings | None = None, provisioning: str = "", **spec: Any) -> Any:
    return render(plugin(family, metadata=UID, **spec), settings or Settings(), provisioning=provisioning)


def stored(family: str, *, name: str = "", since: str = "2026-01-01T00:00:00Z", **spec: Any) -> Object:
    """A DaemonSet as the API server returns it, with defaults and metadata."""
    result = plan(desired(family, **spec), []).apply
    assert result is not None
    existing = as_the_server_says(result)
    existing["metadata"] |= {"uid": "d-1", "resourceVersion": "7", "creationTimestamp": since}
    if name:
        existing["metadata"]["name"] = name
    return existing


def as_the_server_says(desired: Any) -> Object:
    existing = deepcopy(desired)
    pod = existing["spec"]["template"]["spec"]
    pod |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                variable["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
        for amounts in container.get("resources", {}).values():
            for name, amount in amounts.items():
                amounts[name] = {"1000m": "1", "0.5Gi": "512Mi"}.get(amount, amount)
    for volume in pod["volumes"]:
        if "hostPath" in volume:
            volume["hostPath"].setdefault("type", "")
        if "configMap" in volume:
            volume["configMap"].setdefault("defaultMode", 420)
    return existing


def plan_differences(family: str, existing: Object, **spec: Any) -> tuple[str, ...]:
    """The differences to the desired DaemonSet. Asserts that the write has the complete DaemonSet."""
    found = plan(desired(family, **spec), [existing])
    assert (found.apply is None) == (not found.differences)
    if found.apply is not None:
        assert plan(desired(family, **spec), [as_the_server_says(found.apply)]).apply is None
        assert found.apply["metadata"]["name"] == existing["metadata"]["name"]  # type: ignore[index,call-overload]
        assert found.apply["spec"]["selector"] == existing["spec"]["selector"]  # type: ignore[index,call-overload]
    return tuple(line for line in found.differences if HASH_ANNOTATION not in line)


@pytest.mark.parametrize("family", models.KINDS)
def test_an_unchanged_daemonset_is_not_written(family: str) -> None:
    spec = {
        "initImage": f"any/{INIT_IMAGES.get(family)}:1.0.0",
        "provisioningConfig": "mine",
        "tolerations": [],
        "nodeSelector": {"a": "b"},
        "resources": {"limits": {"cpu": "1000m", "memory": "0.5Gi"}},
    }
    found = plan(desired(family, **spec), [stored(family, **spec)])
    assert (found.apply, found.differences, found.surplus) == (None, (), ())


def test_a_missing_daemonset_is_created_with_its_hash() -> None:
    found = plan(desired("gpu"), [])
    assert found.current is None
    assert found.apply is not None
    assert len(found.apply["metadata"]["annotations"][HASH_ANNOTATION]) == 16  # type: ignore[index,call-overload]


PLUGIN = "spec.template.spec.containers.intel-{}-plugin"


@pytest.mark.parametrize(
    ("family", "before", "after", "expected"),
    [
        ("gpu", {"image": "x:1"}, {"image": "x:2"}, [f'{PLUGIN}.image: found "x:1", expected "x:2"']),
        ("gpu", {"nodeSelector": {"a": "b"}}, {}, ["spec.template.spec.nodeSelector[kubernetes.io/arch]: missing"]),
        ("gpu", {}, {"nodeSelector": {"a": "b"}}, ["spec.template.spec.nodeSelector.a: missing"]),
        ("gpu", {}, {"sharedDevNum": 2}, [f"{PLUGIN}.args:"]),
        ("gpu", {}, {"tolerations": [{"key": "a"}]}, ["spec.template.spec.tolerations: missing"]),
        ("gpu", {"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, ["spec.template.spec.tolerations:"]),
        # Removed fields change only the hash.
        ("gpu", {"tolerations": [{"key": "a"}]}, {}, []),
        ("sgx", {"initImage": "x:1"}, {}, []),
        ("sgx", {"initImage": "x:1"}, {"initImage": "x:2"}, ["initContainers.intel-sgx-initcontainer.image"]),
        ("dsa", {"initImage": "x:1"}, {"initImage": "x:1", "provisioningConfig": "a"}, ["volumeMounts", "volumes"]),
        (
            "dsa", {"initImage": "x:1", "provisioningConfig": "a"}, {"initImage": "x:1", "provisioningConfig": "b"},
            ['volumes.intel-dsa-config-volume.configMap.name: found "a", expected "b"'],
        ),
        ("dsa", {"initImage": "x:1"}, {"initImage": "x:1", "driver": "vfio-pci"},
         ["args", "volumeMounts[/dev/vfio]", "DSA_DRIVER", "volumes.devfs.hostPath.path"]),
        (
            "qat", {"initImage": "x:1"}, {"initImage": "x:1", "kernelVfDrivers": ["4xxxvf"]},
            ["args", "initContainers.intel-qat-initcontainer.env.ENABLED_QAT_PF_PCIIDS.value"],
        ),
        ("gpu", {"resourceManager": True}, {}, [f"{PLUGIN}.args", "serviceAccountName", "automount"]),
        ("npu", {"podAnnotations": {"a": "b"}}, {"podAnnotations": {"a": "c"}}, ["annotations.a"]),
        ("npu", {}, {"updateStrategy": {"type": "OnDelete"}}, ["spec.updateStrategy.type"]),
        (
            "npu", {"resources": {"limits": {"cpu": "1000m"}}}, {"resources": {"limits": {"cpu": 2}}},
            ['limits.cpu: found "1", expected 2'],
        ),
    ],
)  # fmt: skip
def test_an_edit_of_the_resource_is_written_and_reported(
    family: str, before: Object, after: Object, expected: list[str]
) -> None:
    found = plan(desired(family, **after), [stored(family, **before)])
    assert found.apply is not None
    assert found.differences
    lines = "\n".join(plan_differences(family, stored(family, **before), **after))
    for part in expected:
        assert part.format(family) in lines


@pytest.mark.parametrize(
    ("family", "by_hand"),
    [
        ("fpga", lambda pod: pod.pop("initContainers")),
        ("gpu", lambda pod: pod["containers"][0].update(image="other:1")),
        ("gpu", lambda pod: pod["containers"][0]["securityContext"].pop("capabilities")),
        ("gpu", lambda pod: pod["volumes"].pop()),
        ("gpu", lambda pod: pod["containers"][0].pop("env")),
        ("gpu", lambda pod: pod["containers"][0]["resources"]["limits"].update(cpu="2")),
        ("gpu", lambda pod: pod.update(containers=[])),
        ("gpu", lambda pod: pod["nodeSelector"].update(theirs="x")),
    ],
)
def test_manual_changes_are_reverted(family: str, by_hand: Callable[[Object], object]) -> None:
    existing = stored(family)
    by_hand(existing["spec"]["template"]["spec"])
    assert plan_differences(family, existing)


@pytest.mark.parametrize(
    "added",
    [
        lambda there: there["spec"]["template"]["metadata"].update(annotations={"example.com/restarted": "x"}),
        lambda there: there["spec"]["template"]["spec"]["containers"].append({"name": "mesh", "image": "x"}),
        lambda there: there["metadata"]["labels"].update(theirs="x"),
        lambda there: there["metadata"]["ownerReferences"].insert(0, {"kind": "Other", "name": "x", "uid": "o"}),
        lambda there: there.update(status={"numberReady": 1}),
    ],
)  # fmt: skip
def test_additions_of_others_are_kept(added: Callable[[Object], object]) -> None:
    existing = stored("gpu")
    added(existing)
    assert plan_differences("gpu", existing) == ()


def test_an_adopted_daemonset_keeps_its_name_and_selector_and_gets_all_other_fields() -> None:
    existing = stored("gpu", name="intel-gpu-plugin", image="x:1")
    del existing["metadata"]["annotations"]
    existing["spec"]["selector"] = {"matchLabels": {"app": "intel-gpu-plugin", "older": "yes"}}
    existing["spec"]["template"]["metadata"]["labels"] = {"app": "intel-gpu-plugin", "older": "yes"}
    found = plan(desired("gpu", image="x:2"), [existing])
    items: Any = found.apply
    assert found.surplus == ()
    assert items["metadata"]["name"] == "intel-gpu-plugin"
    assert items["spec"]["selector"] == existing["spec"]["selector"]
    assert items["spec"]["template"]["metadata"]["labels"] == {"app": "intel-gpu-plugin", "older": "yes"}
    assert plan_differences("gpu", existing, image="x:2")


def test_removing_the_service_account_restores_the_default_account() -> None:
    existing = stored("gpu", resourceManager=True)
    items: Any = plan(desired("gpu"), [existing]).apply
    assert items["spec"]["template"]["spec"]["serviceAccountName"] == "default"
    assert plan(desired("gpu"), [as_the_server_says(items)]).apply is None


def test_the_oldest_of_several_daemonsets_is_kept() -> None:
    old = stored("gpu", name="b", since="2026-01-01T00:00:00Z")
    new = stored("gpu", name="a", since="2026-02-01T00:00:00Z")
    found = plan(desired("gpu"), [new, old])
    assert found.current is old
    assert found.surplus == ("a",)


def test_a_daemonset_of_a_former_resource_of_the_same_name_is_adopted() -> None:
    former = stored("gpu", name="intel-gpu-plugin")
    former["metadata"]["ownerReferences"][0]["uid"] = "gone"
    found = plan(desired("gpu"), [former])
    assert (found.current, found.child.metadata.name, found.surplus) == (former, "intel-gpu-plugin", ())
    own = stored("gpu", since="2026-02-01T00:00:00Z")
    found = plan(desired("gpu"), [former, own])
    assert (found.current, found.surplus) == (own, ("intel-gpu-plugin",))


def test_a_daemonset_in_deletion_is_awaited() -> None:
    leaving = stored("gpu")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    found = plan(desired("gpu"), [leaving])
    assert (found.current, found.surplus) == (None, ())
    other = stored("gpu", name="intel-gpu-plugin", since="2026-03-01T00:00:00Z")
    found = plan(desired("gpu"), [leaving, other])
    assert (found.current, found.surplus) == (other, ())


def test_the_hash_of_a_config_that_pods_were_made_with_can_be_read_back() -> None:
    assert provisioning_on(stored("dsa")) == ""
    assert provisioning_on(stored("dsa", provisioning="0123")) == "0123"
    changed = plan(desired("dsa", provisioning="4567"), [stored("dsa", provisioning="0123")])
    assert any(PROVISIONING_ANNOTATION in line for line in changed.differences)
