"""The tree of the labeller: its command, account, rights and security context."""

import ast
import re

import pytest
from deployrights import granted_rights
from manifests import DEPLOY, REPOSITORY, Object, render, trees

from accelplane.cli import labels
from accelplane.cli.goflags import parse
from accelplane.nodelabels.gpu import FRACTIONS, PREFIX

TREES = ("labels", "labels/base", "labels/overlays/gpu", "labels/overlays/own-node-only")


def objects(tree: str) -> dict[str, Object]:
    return {each["kind"]: each for each in render(DEPLOY / tree)}


def policies(objects: list[Object]) -> list[Object]:
    """The admission policies that are bound and deny requests."""
    bound = {
        each["spec"]["policyName"]
        for each in objects
        if each["kind"] == "ValidatingAdmissionPolicyBinding" and each["spec"]["validationActions"] == ["Deny"]
    }
    return [
        each for each in objects if each["kind"] == "ValidatingAdmissionPolicy" and each["metadata"]["name"] in bound
    ]


@pytest.mark.parametrize("tree", trees())
def test_every_account_that_writes_nodes_from_nodes_is_limited_to_its_own(tree: str) -> None:
    """The expressions are tested with an API server, see `tests/cluster/test_epc_and_labels.py`."""
    objects = render(DEPLOY / tree)
    accounts = {
        each["spec"]["template"]["spec"].get("serviceAccountName") for each in objects if each["kind"] == "DaemonSet"
    }
    writers = {
        account
        for account, grants in granted_rights(objects).items()
        for grant in grants
        if grant.resource in ("nodes", "nodes/status") and grant.verb in ("patch", "update", "create", "delete")
    }
    for account in writers & accounts:
        conditions = [each["spec"]["matchConditions"][0]["expression"] for each in policies(objects)]
        patterns = [re.search(r"matches\('(.*)'\)", condition) for condition in conditions]
        names = [f"system:serviceaccount:kube-system:{prefix}{account}" for prefix in ("", "x-")]
        assert any(pattern and all(re.search(pattern[1], name) for name in names) for pattern in patterns), account
    if tree.startswith(("labels", "sgx_plugin/overlays/epc-register")):
        assert writers & accounts


def test_every_kustomization_is_in_the_table() -> None:
    existing = {str(file.parent.relative_to(DEPLOY)) for file in (DEPLOY / "labels").rglob("kustomization.yaml")}
    assert existing == set(TREES)


@pytest.mark.parametrize("tree", TREES)
def test_one_account_has_the_rights_and_runs_the_labeller(tree: str) -> None:
    found = objects(tree)
    account = found["ServiceAccount"]["metadata"]
    assert (account["name"], account["namespace"]) == ("accelplane-labels", "kube-system")
    subject = {"kind": "ServiceAccount", "name": "accelplane-labels", "namespace": "kube-system"}
    assert found["ClusterRoleBinding"]["subjects"] == [subject]
    assert found["ClusterRoleBinding"]["roleRef"]["name"] == found["ClusterRole"]["metadata"]["name"]
    assert found["DaemonSet"]["metadata"]["namespace"] == "kube-system"
    assert found["DaemonSet"]["spec"]["template"]["spec"]["serviceAccountName"] == "accelplane-labels"


@pytest.mark.parametrize("tree", TREES)
def test_the_arguments_are_flags_of_the_labeller(tree: str) -> None:
    (container,) = objects(tree)["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    command, *words = container["args"]
    values, rest = parse(labels.FLAGS, words)
    assert (command, rest) == ("labels", [])
    options = labels.Options.from_flags(values, {"NODE_NAME": "one"})
    assert (options.daemon, options.epc, options.gpu) == (True, True, tree.endswith("gpu"))
    assert {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]} == {
        "NODE_NAME": "spec.nodeName"
    }


def test_the_labeller_satisfies_the_restricted_profile() -> None:
    """No host volumes, no root, no capabilities, the default seccomp profile of the runtime."""
    pod = objects("labels")["DaemonSet"]["spec"]["template"]["spec"]
    assert "volumes" not in pod
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_rights_are_three_verbs_on_nodes() -> None:
    rules = objects("labels")["ClusterRole"]["rules"]
    assert {(tuple(rule["resources"]), tuple(rule["verbs"])) for rule in rules} == {
        (("nodes",), ("get", "watch", "patch")),
        (("nodes/status",), ("patch",)),
    }


def test_the_directory_name_of_the_originals_resolves_to_the_tree() -> None:
    assert render(REPOSITORY / "deployments/labels") == render(DEPLOY / "labels")


def test_the_policy_admits_the_resources_of_the_labeller() -> None:
    policy = objects("labels")["ValidatingAdmissionPolicy"]["spec"]
    (resources,) = (each["expression"] for each in policy["variables"] if each["name"] == "resources")
    published = {labels.EPC, *(f"{PREFIX}/{name}" for name in FRACTIONS)}
    assert set(ast.literal_eval(resources)) == published
