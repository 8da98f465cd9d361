"""Objects of the Go operator, versions 3.0.0 and 3.0.1, are adopted in place."""

import contextlib
from typing import Any

import pytest
from kubeapi import KubeApi
from onloadoperators import VERSION, operator, running
from onloadresources import MAPPING
from onloadsetup import NAMES, Setup
from waiting import until

NEW = "8.2"
Object = dict[str, Any]
BASE = NAMES.base_labels("device-plugin")


def owner(setup: Setup) -> list[Object]:
    uid = (setup.onload() or {})["metadata"]["uid"]
    reference = {"apiVersion": "onload.amd.com/v1alpha1", "kind": "Onload", "name": "onload", "uid": uid}
    return [{**reference, "controller": True, "blockOwnerDeletion": True}]


def daemonset(setup: Setup, release: str) -> Object:
    """The object as created by a release of the Go operator."""
    name = {"onload.amd.com/name": NAMES.daemonset}
    labels = name if release == "3.0.0" else {**BASE, **name}
    version = "onload-version" if release == "3.0.0" else "onload.amd.com/version"
    init = "onload-onload-device-plugin-init" if release == "3.0.0" else "init"
    lifecycle = {"preStop": {"exec": {"command": ["/bin/sh", "-c", "rm -r /opt/onload"]}}}
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "serviceAccountName": "onload-operator-sa",
            "nodeSelector": {"node-role.kubernetes.io/worker": ""},
            "initContainers": [{"name": init, "image": "docker.io/onload/onload-user:8.1.2.26-ubi8"}],
            "containers": [
                {"name": "device-plugin", "image": "onload/onload-device-plugin:3.0.0", "lifecycle": lifecycle}
            ],
        },
    }
    fields = {
        "f:containers": {'k:{"name":"device-plugin"}': {key: {} for key in (".", "f:image", "f:lifecycle", "f:name")}},
        "f:initContainers": {f'k:{{"name":"{init}"}}': {key: {} for key in (".", "f:image", "f:name")}},
    }
    entry = {
        "manager": "manager",
        "operation": "Update",
        "apiVersion": "apps/v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:selector": {}, "f:template": {"f:spec": fields}}},
    }
    own = {} if release == "3.0.0" else BASE
    metadata = {
        "name": NAMES.daemonset,
        "namespace": "default",
        "labels": {**own, version: VERSION},
        "ownerReferences": owner(setup),
        "managedFields": [entry],
    }
    selector = {"matchLabels": labels}
    return {
        "metadata": metadata,
        "spec": {"selector": selector, "template": template, "updateStrategy": {"type": "OnDelete"}},
    }


def module(setup: Setup) -> Object:
    mapping = {"regexp": MAPPING["regexp"], "containerImage": MAPPING["kernelModuleImage"], "literal": ""}
    container = {
        "modprobe": {"moduleName": "onload", "parameters": ["--first-time"]},
        "version": VERSION,
        "inTreeModuleToRemove": "",
        "kernelMappings": [mapping],
    }
    loader = {"container": container, "serviceAccountName": "onload-operator-sa"}
    spec = {"moduleLoader": loader, "selector": {"node-role.kubernetes.io/worker": ""}}
    labels = NAMES.base_labels("module")
    metadata = {"name": NAMES.module, "namespace": "default", "labels": labels, "ownerReferences": owner(setup)}
    return {"metadata": metadata, "spec": spec}


@contextlib.contextmanager
def managed_by_go(api: KubeApi, release: str) -> Any:
    """A cluster after a complete installation by the Go operator."""
    setup = Setup(api)
    setup.create()
    api.put("daemonsets", daemonset(setup, release))
    api.put("modules", module(setup))
    for name in ("node-0", "node-1"):
        found = api.get("nodes", name) or {}
        found["metadata"]["labels"] |= dict.fromkeys((NAMES.module_label, NAMES.gate_label), VERSION)
        api.put("nodes", found)
    for _ in range(4):
        setup.react()
    yield setup
    assert not setup.violations


def plugin_uids(api: KubeApi) -> set[str]:
    return {each["metadata"]["uid"] for each in api.all("pods") if each["metadata"]["name"].startswith("plugin-")}


@pytest.mark.parametrize("release", ["3.0.0", "3.0.1"])
async def test_adoption_keeps_pods_and_the_next_upgrade_replaces_them(api: KubeApi, release: str) -> None:
    with managed_by_go(api, release) as setup:
        pods, before = plugin_uids(api), api.get("daemonsets", NAMES.daemonset, "default") or {}
        assert len(pods) == 2
        async with running(setup), operator(api):
            await until(lambda: setup.is_ready(VERSION))
            after = api.get("daemonsets", NAMES.daemonset, "default") or {}
            assert plugin_uids(api) == pods
            assert after["metadata"]["uid"] == before["metadata"]["uid"]
            assert after["spec"]["selector"] == before["spec"]["selector"]
            assert after["metadata"]["labels"].items() >= BASE.items()
            pod = after["spec"]["template"]["spec"]
            assert [each["name"] for each in pod["initContainers"]] == ["init"]
            assert "lifecycle" not in pod["containers"][0]
            assert setup.versions() == {(VERSION, None, VERSION)}
            assert setup.most_down == 0

            setup.create(onload__version=NEW)
            await until(lambda: setup.is_ready(NEW))
            assert not plugin_uids(api) & pods
            assert setup.most_down == 1


async def test_an_upgrade_that_the_go_operator_began_is_continued(api: KubeApi) -> None:
    with managed_by_go(api, "3.0.1") as setup:
        setup.create(onload__version=NEW)
        found = api.get("nodes", "node-1") or {}
        del found["metadata"]["labels"][NAMES.gate_label]
        api.put("nodes", found)
        async with running(setup), operator(api):
            await until(lambda: setup.is_ready(NEW))
    assert setup.versions() == {(NEW, None, NEW)}


async def test_the_operator_of_other_plugins_takes_over_what_the_onload_operator_wrote(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create(tolerations=[{"operator": "Exists"}])
    async with running(setup):
        async with operator(api):
            await until(lambda: setup.is_ready(VERSION))
        pods = plugin_uids(api)
        async with operator(api, manager="accelplane-operator"):
            setup.create()
            await until(
                lambda: (
                    "tolerations"
                    not in (api.get("daemonsets", NAMES.daemonset, "default") or {})["spec"]["template"]["spec"]
                )
            )
            await until(lambda: setup.is_ready(VERSION))
    assert plugin_uids(api) == pods
