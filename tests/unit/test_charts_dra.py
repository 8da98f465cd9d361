"""DRA in the chart `accelplane`: objects of the kustomizations, flags of the agent, versions of Kubernetes."""

import json
from pathlib import Path

import pytest
import yaml
from charts import CHARTS, HUB, in_hub, rejected, run_helm, template
from manifests import APPARMOR, DEPLOY, Object, in_order, overlay, render

CHART = "accelplane"
NAMESPACE = "accelerators"


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): in_order(each) for each in objects}
    assert len(found) == len(objects)
    return found


def agent(**values: object) -> dict[tuple[str, str], Object]:
    return by_name(template(CHART, NAMESPACE, agent=values))


DRA_TREES = ("accelplane_node/overlays/dra", "dra", "dra/extended-resources")


def with_dra(**dra: object) -> dict[tuple[str, str], Object]:
    return agent(dra={"enabled": True, **dra})


def dra_flags(**dra: object) -> list[str]:
    (container,) = with_dra(**dra)["DaemonSet", "accelplane-node"]["spec"]["template"]["spec"]["containers"]
    return container["args"][1:]


def test_the_agent_with_dra_and_the_device_classes_are_those_of_the_kustomizations() -> None:
    objects = [each for tree in DRA_TREES for each in in_hub(render(DEPLOY / tree))]
    for each in objects:
        if each["kind"].startswith("ValidatingAdmissionPolicy"):
            del each["metadata"]["namespace"]  # kubectl's kustomize sets it, and the API server ignores it
    expected = by_name(
        json.loads(json.dumps(objects).replace('"namespace": "kube-system"', f'"namespace": "{NAMESPACE}"'))
    )
    found = with_dra(extendedResources=True)
    assert {*found} == {*expected}
    for key, each in expected.items():
        assert found[key] == each, key
    kinds = {kind for kind, _ in with_dra(classes=False)}
    assert "DeviceClass" not in kinds
    assert "ValidatingAdmissionPolicy" in kinds


@pytest.mark.parametrize(
    ("values", "drivers"),
    [
        ({"dra": {"api": {"gpu": "dra", "qat": "plugin"}}}, ["gpu.intel.com", "qat.intel.com"]),
        ({"dra": {"api": {"tpu": "dra"}, "drivers": ["tpu.example.com"]}}, ["tpu.example.com"]),
        ({"dra": {"api": {"generic": "dra"}}}, ["squat.ai"]),
        (
            {"dra": {"api": {"generic": "dra"}}, "config": {"plugins": {"generic": {"domain": "devices.example.com"}}}},
            ["devices.example.com"],
        ),
    ],
)
def test_the_agent_may_publish_the_drivers_that_the_values_name(values: dict[str, Object], drivers: list[str]) -> None:
    dra = {"enabled": True, "deviceStatus": True, **values.pop("dra")}
    rules = agent(dra=dra, **values)["ClusterRole", "accelplane-dra-node"]["rules"]
    named = {rule["resources"][0]: rule["resourceNames"] for rule in rules if "resourceNames" in rule}
    assert named == {"resourceslices/driver": drivers, "resourceclaims/driver": drivers}


def test_an_agent_with_dra_has_a_driver() -> None:
    """A rule without names would be for all drivers."""
    assert "agent.dra.drivers: found none" in rejected(CHART, agent={"dra": {"enabled": True, "api": {"tpu": "dra"}}})


def test_the_rights_for_the_device_status_are_those_of_the_component(tmp_path: Path) -> None:
    tree = overlay(
        tmp_path, resources=["deploy/accelplane_node/overlays/dra"], components=["deploy/dra/components/device-status"]
    )
    expected, found = by_name(tree), with_dra(deviceStatus=True)
    assert found["ClusterRole", "accelplane-dra-node"] == expected["ClusterRole", "accelplane-dra-node"]
    assert dra_flags(deviceStatus=True) == ["-dra-api=dra", "-dra-device-status"]


def test_binding_for_vfio_is_that_of_the_component(tmp_path: Path) -> None:
    tree = overlay(
        tmp_path, resources=["deploy/accelplane_node/overlays/dra"], components=["deploy/dra/components/vfio"]
    )
    (expected,) = (each for each in in_hub(tree) if each["kind"] == "DaemonSet")
    expected["metadata"]["namespace"] = NAMESPACE
    # Kubernetes before 1.30 reads the annotation only.
    annotations = {f"{APPARMOR}accelplane-node": "unconfined"}
    expected["spec"]["template"]["metadata"]["annotations"] = annotations
    assert with_dra(vfio=True)["DaemonSet", "accelplane-node"] == in_order(expected)


def test_the_values_of_dra_become_flags() -> None:
    assert dra_flags() == ["-dra-api=dra"]
    by_family = {"qat": "none", "gpu": "dra"}
    assert dra_flags(api=by_family, devices={"0000:03:00.0": "plugin"}) == [
        "-dra-api=gpu=dra,qat=none,0000:03:00.0=plugin"
    ]
    assert dra_flags(evict="sick", manageBinding=False, takeOver=True) == [
        "-dra-api=dra", "-dra-evict=sick", "-dra-manage-binding=false", "-dra-take-over",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dra", "problem"),
    [
        ({"api": "both"}, "api"),
        ({"api": {"gpu": "claims"}}, "api"),
        ({"devices": {"03:00.0": "dra"}}, "propertyName '03:00.0'"),
        ({"evict": "always"}, "evict"),
        ({"shares": 2}, "shares"),
    ],
)
def test_wrong_values_of_dra_are_rejected(dra: Object, problem: str) -> None:
    assert problem in rejected(CHART, agent={"dra": {"enabled": True, **dra}})


def test_the_sockets_of_drivers_are_at_the_path_of_the_kubelet() -> None:
    directory = "/var/lib/k0s/kubelet"
    objects = agent(kubeletDirectory=directory, dra={"enabled": True})
    pod = objects["DaemonSet", "accelplane-node"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert f"-kubelet-dir={directory}" in container["args"]
    paths = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"]}
    for mount in container["volumeMounts"]:
        if mount["name"] in ("kubeletsockets", "dra-drivers", "dra-registration", "podresources"):
            assert mount["mountPath"] == paths[mount["name"]]
            assert mount["mountPath"].startswith(f"{directory}/")


@pytest.mark.parametrize(
    ("version", "surge", "api"), [("1.32.0", 0, "v1beta1"), ("1.33.1", 1, "v1beta1"), ("1.34.0", 1, "v1")]
)
def test_updates_and_classes_with_dra_follow_the_version_of_kubernetes(version: str, surge: int, api: str) -> None:
    values = f"--set=agent.image.hub={HUB},agent.dra.enabled=true"
    text = run_helm("template", "release", CHARTS / CHART, values, f"--kube-version={version}")
    objects = [each for each in yaml.safe_load_all(text) if each]
    (daemonset,) = (each for each in objects if each["kind"] == "DaemonSet")
    assert daemonset["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": 1 - surge}
    classes = {each["apiVersion"] for each in objects if each["kind"] == "DeviceClass"}
    assert classes == {f"resource.k8s.io/{api}"}


def test_agents_and_operator_with_dra_are_one_release() -> None:
    """Objects have different names, or helm would not install them."""
    components = {"agent": True, "operator": True}
    subchart = {"manager": {"dra": True}}
    objects = by_name(
        template(CHART, NAMESPACE, components=components, agent={"dra": {"enabled": True}}, operator=subchart)
    )
    assert len([kind for kind, _ in objects if kind == "ValidatingAdmissionPolicy"]) == 6
