"""Rights of accounts: those of the originals' accounts, and those that the table in docs/deployments.md lists."""

import re
from fnmatch import fnmatch

import pytest
from deployrights import Grant, granted_rights, grants, trees_with_bindings
from manifests import DEPLOY, RBAC, REPOSITORY, render

from accelplane.operator.models import KINDS

PLURALS = [f"{kind.__name__.lower()}s" for kind in KINDS.values()]
MAPPINGS = ["acceleratorfunctions", "fpgaregions"]
# Roles manager-role, leader-election-role and proxy-role of the original. All of them are for one account.
OPERATOR = set[Grant]().union(
    grants("cluster", "", ["nodes/proxy"], "get list"),
    grants("cluster", "", ["pods"], "get list watch"),
    grants("cluster", "", ["serviceaccounts"], "create delete get list watch"),
    grants("cluster", "apps", ["daemonsets"], "create delete get list patch update watch"),
    grants("cluster", "coordination.k8s.io", ["leases"], "create"),
    grants("cluster", "coordination.k8s.io", ["leases"], "get update", ["d1c7b6d5.intel.com"]),
    grants("cluster", "deviceplugin.intel.com", PLURALS, "create delete get list patch update watch"),
    grants("cluster", "deviceplugin.intel.com", [f"{plural}/finalizers" for plural in PLURALS], "update"),
    grants("cluster", "deviceplugin.intel.com", [f"{plural}/status" for plural in PLURALS], "get patch update"),
    grants("cluster", "fpga.intel.com", MAPPINGS, "get list watch"),
    grants("cluster", RBAC, ["clusterrolebindings"], "create delete get list watch"),
    grants("cluster", "security.openshift.io", ["securitycontextconstraints"], "use"),
    grants("namespace", "", ["configmaps"], "get list watch create update patch delete"),
    grants("namespace", "coordination.k8s.io", ["leases"], "get list watch create update patch delete"),
    grants("namespace", "", ["events"], "create patch"),
    grants("cluster", "authentication.k8s.io", ["tokenreviews"], "create"),
    grants("cluster", "authorization.k8s.io", ["subjectaccessreviews"], "create"),
)
FPGA_WEBHOOK = grants("cluster", "fpga.intel.com", MAPPINGS, "get list watch").union(
    grants("namespace", "", ["configmaps"], "get list watch create update patch delete"),
    grants("namespace", "coordination.k8s.io", ["leases"], "get list watch create update patch delete"),
    grants("namespace", "", ["events"], "create patch"),
)
# Roles manager-role and leader-election-role of the original, and that of its samples.
ONLOAD_OPERATOR = set[Grant]().union(
    grants("cluster", "apps", ["daemonsets"], "create delete get list patch update watch"),
    grants("cluster", "", ["nodes"], "get list patch watch"),
    grants("cluster", "", ["pods"], "delete get list patch watch"),
    grants("cluster", "", ["pods/eviction"], "create"),
    grants("cluster", "kmm.sigs.x-k8s.io", ["modules"], "create delete get list patch update watch"),
    grants("cluster", "onload.amd.com", ["onloads"], "create delete get list patch update watch"),
    grants("cluster", "onload.amd.com", ["onloads/finalizers"], "update"),
    grants("cluster", "onload.amd.com", ["onloads/status"], "get patch update"),
    grants("namespace", "", ["configmaps"], "get list watch create update patch delete"),
    grants("namespace", "coordination.k8s.io", ["leases"], "get list watch create update patch delete"),
    grants("namespace", "", ["events"], "create patch"),
)
ONLOAD_PODS = grants("namespace", "", ["pods"], "get").union(
    grants("namespace", "security.openshift.io", ["securitycontextconstraints"], "use", ["privileged"])
)
METRICS = grants("cluster", "authentication.k8s.io", ["tokenreviews"], "create").union(
    grants("cluster", "authorization.k8s.io", ["subjectaccessreviews"], "create")
)
# Path pattern -> rights of the original's account. Trees that the original does not have are not in this table.
ORIGINAL = {
    "operator/*": OPERATOR,
    "fpga_admissionwebhook/*": FPGA_WEBHOOK,
    "fpga_plugin/*": FPGA_WEBHOOK,
    "fpga_plugin/overlays/[ar]*": grants("cluster", "", ["nodes"], "get"),
    "onload/config/default*": ONLOAD_OPERATOR,
    "onload/config/samples/default-clusterlocal": ONLOAD_OPERATOR,
    "onload/config/default-with-metrics": METRICS,
    "onload/config/samples/onload/*": ONLOAD_PODS,
    "onload/config/samples/sfptpd/*": ONLOAD_PODS - grants("namespace", "", ["pods"], "get"),
    "sgx_plugin/overlays/epc-register": grants("cluster", "", ["nodes", "nodes/status"], "get list patch"),
    "gpu_plugin/overlays/fractional_resources": grants("cluster", "", ["pods", "nodes/proxy"], "get list"),
}
DOCUMENT = REPOSITORY / "docs/deployments.md"
HEADER = "| Trees | Account | API group | Resources | Names | Verbs | Scope | For |"


def table_rows() -> list[tuple[list[str], str, set[Grant]]]:
    """The rows of the table: patterns of trees, account, grants."""
    lines = DOCUMENT.read_text().splitlines()
    rows: list[tuple[list[str], str, set[Grant]]] = []
    for line in lines[lines.index(HEADER) + 2 :]:
        if not line.startswith("|"):
            break
        cells = line.strip("|").split("|")
        trees, (account,), groups, resources, names, verbs = (re.findall(r"`([^`]*)`", cell) for cell in cells[:6])
        scope, group = cells[6].strip(), groups[0] if groups else ""
        assert scope in ("cluster", "namespace"), line
        rows.append((trees, account, grants(scope, group, resources, " ".join(verbs), names or [""])))
    return rows


def is_within(grant: Grant, others: set[Grant]) -> bool:
    wider = (grant._replace(scope=scope, name=name) for scope in (grant.scope, "cluster") for name in (grant.name, ""))
    return any(each in others for each in wider)


def test_all_rights_beyond_the_originals_are_listed() -> None:
    found: dict[tuple[str, str], set[Grant]] = {}
    expected: dict[tuple[str, str], set[Grant]] = {}
    rows = table_rows()
    for tree in trees_with_bindings():
        original = set[Grant]().union(*(all_of for pattern, all_of in ORIGINAL.items() if fnmatch(tree, pattern)))
        for account, own in granted_rights(render(DEPLOY / tree)).items():
            found[tree, account] = {grant for grant in own if not is_within(grant, original)}
            expected[tree, account] = set[Grant]().union(
                *(row for patterns, of, row in rows if of == account and any(fnmatch(tree, each) for each in patterns))
            )
    assert len(found) > 20
    assert found == expected


@pytest.mark.parametrize("tree", ["operator/default", "operator/device/qat"])
def test_rights_of_the_original_operator_that_are_not_needed_are_not_granted(tree: str) -> None:
    found = granted_rights(render(DEPLOY / tree))["controller-manager"]
    for grant in (
        Grant("cluster", "", "nodes/proxy", "", "get"),
        # Events about pods that wait for an FPGA need pods of all namespaces.
        *([] if tree == "operator/default" else [Grant("cluster", "", "pods", "", "list")]),
        Grant("cluster", "", "serviceaccounts", "", "create"),
        Grant("cluster", "apps", "daemonsets", "", "patch"),
        Grant("cluster", "security.openshift.io", "securitycontextconstraints", "privileged", "use"),
        Grant("cluster", RBAC, "clusterrolebindings", "", "delete"),
        Grant("cluster", "deviceplugin.intel.com", "gpudeviceplugins", "", "delete"),
        Grant("namespace", "", "configmaps", "", "update"),
    ):
        assert is_within(grant, OPERATOR)
        assert not is_within(grant, found)


def test_rights_of_the_original_onload_operator_that_are_not_needed_are_not_granted() -> None:
    found = granted_rights(render(DEPLOY / "onload/config/default"))["controller-manager"]
    for grant in (
        Grant("cluster", "onload.amd.com", "onloads", "", "delete"),
        Grant("cluster", "onload.amd.com", "onloads", "", "create"),
        Grant("cluster", "apps", "daemonsets", "", "delete"),
        Grant("cluster", "", "nodes", "", "get"),
        Grant("cluster", "", "pods", "", "patch"),
        Grant("namespace", "", "configmaps", "", "update"),
        Grant("namespace", "coordination.k8s.io", "leases", "", "delete"),
    ):
        assert is_within(grant, ONLOAD_OPERATOR)
        assert not is_within(grant, found)


OPERATORS = ("operator/default", "operator/overlays/default-with-certmanager", "operator/overlays/ocp")


@pytest.mark.parametrize("tree", OPERATORS)
def test_plugins_have_no_rights_and_no_token(tree: str) -> None:
    objects = render(DEPLOY / tree)
    (account,) = (
        each for each in objects if each["kind"] == "ServiceAccount" and each["metadata"]["name"].endswith("-plugins")
    )
    assert account["automountServiceAccountToken"] is False
    # OpenShift needs this right to admit host paths.
    use = grants("namespace", "security.openshift.io", ["securitycontextconstraints"], "use", ["privileged"])
    assert granted_rights(objects)["plugins"] == use


def test_plugins_with_claims_may_use_the_same_constraint_of_openshift() -> None:
    """The operator binds these roles to the accounts that it creates."""
    roles = [each for each in render(DEPLOY / "operator/overlays/dra") if each["kind"] == "ClusterRole"]
    of_plugins = [each for each in roles if re.search("-dra-(status-)?role$", each["metadata"]["name"])]
    assert len(of_plugins) == 2
    use = {"resources": ["securitycontextconstraints"], "resourceNames": ["privileged"], "verbs": ["use"]}
    for role in of_plugins:
        assert {"apiGroups": ["security.openshift.io"], **use} in role["rules"]


@pytest.mark.parametrize("tree", OPERATORS)
def test_the_gpu_resource_manager_gets_the_rights_that_it_uses(tree: str) -> None:
    (role,) = (each for each in render(DEPLOY / tree) if each["metadata"]["name"].endswith("-gpu-manager-role"))
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["nodes/pods"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]


@pytest.mark.parametrize("tree", OPERATORS)
def test_a_role_grants_reading_of_metrics(tree: str) -> None:
    (role,) = (each for each in render(DEPLOY / tree) if each["metadata"]["name"].endswith("-metrics-reader"))
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
