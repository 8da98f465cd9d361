"""Custom resources with `dra`: the pods of the overlays, options, accounts and validation."""

from typing import Any

import pytest
from customresources import plugin
from manifests import APPARMOR, DEPLOY, Object, render
from operatorvalidation import POLICY, original, own_image

from accelplane.cli.goflags import flags_of, parse
from accelplane.node.device_api import DeviceApis
from accelplane.node.settings import Settings as NodeSettings
from accelplane.operator import models
from accelplane.operator.daemonsets import render as render_daemonset
from accelplane.operator.features import unsupported_fields
from accelplane.operator.settings import Settings
from accelplane.operator.validation import verdict

SETTINGS = Settings(namespace="plugins", service_account="plugins")
ADDRESS = "0000:03:00.0"


def daemonset(family: str, **spec: Any) -> Object:
    return render_daemonset(plugin(family, **spec), SETTINGS).as_object()


def pod(family: str, **spec: Any) -> Object:
    return daemonset(family, **spec)["spec"]["template"]["spec"]


def compared(document: Object) -> Object:
    """What a pod needs to prepare claims."""
    spec = document["spec"]["template"]["spec"]
    container = spec["containers"][0]
    paths = {each["name"]: each["hostPath"] for each in spec["volumes"] if "hostPath" in each}
    return {
        "mounts": {
            (each["mountPath"], each.get("readOnly", False), str(paths[each["name"]]))
            for each in container["volumeMounts"]
        },
        "variables": {each["name"] for each in container["env"]},
        "token": spec["automountServiceAccountToken"],
        "account": spec["serviceAccountName"],
        "privileged": container["securityContext"].get("privileged", False),
        "update": document["spec"]["updateStrategy"],
    }


@pytest.mark.parametrize("family", sorted(models.KINDS))
def test_the_pods_of_a_resource_for_claims_are_those_of_the_overlay(family: str) -> None:
    (expected,) = (each for each in render(DEPLOY / f"{family}_plugin/overlays/dra") if each["kind"] == "DaemonSet")
    assert compared(daemonset(family, dra={})) == compared(expected)


@pytest.mark.parametrize(
    ("family", "dra", "options"),
    [
        ("qat", {}, {"dra-api": "dra"}),
        ("qat", {"manageBinding": False}, {"dra-api": "dra", "dra-manage-binding": False}),
        ("gpu", {}, {"dra-api": "dra", "dra-manage-binding": False}),
        ("gpu", {"manageBinding": True}, {"dra-api": "dra"}),
        ("gpu", {"api": "none", "manageBinding": True}, {"dra-api": "none"}),
        (
            "qat",
            {"api": "plugin", "devices": {ADDRESS: "dra"}, "evict": "never", "deviceStatus": True, "takeOver": True},
            {
                "dra-api": f"plugin,{ADDRESS}=dra",
                "dra-evict": "never",
                "dra-device-status": True,
                "dra-take-over": True,
            },
        ),
    ],
)
def test_the_fields_are_options_of_the_plugin(family: str, dra: Object, options: Object) -> None:
    words = pod(family, dra=dra)["containers"][0]["args"]
    values, others = parse(flags_of(NodeSettings), words[words.index("-dra-api") :])
    assert others == []
    assert values == options
    DeviceApis.of(str(values["dra-api"]))


@pytest.mark.parametrize(
    ("dra", "account", "token"),
    [
        (None, "plugins", False),
        ({"api": "plugin"}, "plugins", False),
        ({"api": "none"}, "plugins", False),
        ({}, "accelplane-dra-dsa", True),
        ({"api": "none", "devices": {ADDRESS: "dra"}}, "accelplane-dra-dsa", True),
        ({"deviceStatus": True}, "accelplane-dra-dsa-status", True),
    ],
)
def test_only_pods_that_prepare_claims_have_an_account_with_rights(dra: Object, account: str, token: bool) -> None:
    found = pod("dsa", dra=dra) if dra is not None else pod("dsa")
    assert (found["serviceAccountName"], found["automountServiceAccountToken"]) == (account, token)
    mounts = {each["mountPath"] for each in found["containers"][0]["volumeMounts"]}
    assert ("/var/lib/kubelet/plugins_registry" in mounts) is token


@pytest.mark.parametrize(
    ("dra", "surge"),
    [({}, 1), ({"devices": {ADDRESS: "none"}}, 1), ({"devices": {ADDRESS: "plugin"}}, 0), ({"api": "plugin"}, 0)],
)
def test_two_pods_overlap_during_an_update_if_no_device_has_a_resource(dra: Object, surge: int) -> None:
    strategy = daemonset("gpu", dra=dra)["spec"]["updateStrategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_an_update_strategy_of_the_resource_takes_precedence() -> None:
    strategy = {"type": "OnDelete"}
    assert daemonset("gpu", dra={}, updateStrategy=strategy)["spec"]["updateStrategy"] == strategy


def test_binding_needs_writable_pci_files_and_no_apparmor_profile() -> None:
    template = daemonset("gpu", dra={"manageBinding": True})["spec"]["template"]
    assert template["metadata"]["annotations"] == {f"{APPARMOR}intel-gpu-plugin": "unconfined"}
    mounts = {
        each["mountPath"]: each.get("readOnly", False) for each in template["spec"]["containers"][0]["volumeMounts"]
    }
    assert mounts["/sys/bus/pci"] is mounts["/sys/devices"] is False
    assert mounts["/dev/vfio"] is True
    assert "/sys/bus/pci" not in str(daemonset("gpu", dra={}))
    assert APPARMOR not in str(daemonset("gpu", dra={"manageBinding": False}))


# Validation


def refusal(*, grants_dra: bool = True, **spec: Any) -> str:
    return verdict(plugin("gpu", image=own_image("intel-gpu-plugin"), **spec), POLICY, grants_dra=grants_dra).refusal


def test_an_operator_without_the_rights_refuses_claims_and_names_the_overlay() -> None:
    assert "deploy/operator/overlays/dra" in refusal(grants_dra=False, dra={})
    assert refusal(grants_dra=False, dra={"api": "plugin"}) == ""
    assert refusal(grants_dra=False) == ""
    assert refusal(dra={}) == ""


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"dra": {"devices": {"3:0.0": "dra"}}}, "expected for example 0000:03:00.0"),
        ({"dra": {}, "resourceManager": True, "sharedDevNum": 2}, "resourceManager is true and dra is set"),
        (
            {"dra": {"api": "plugin"}, "updateStrategy": {"rollingUpdate": {"maxSurge": 1}}},
            "maxSurge is 1, expected 0 because two plugin pods",
        ),
    ],
)
def test_contradicting_fields_are_refused(spec: Object, problem: str) -> None:
    assert problem in refusal(**spec)


def test_images_of_the_go_project_do_not_support_claims() -> None:
    (message,) = unsupported_fields(plugin("gpu", image=original("gpu", "0.36.0"), dra={}), POLICY)
    assert message.startswith("dra dra needs image version 1.0.0 or newer")
