"""Replacing a tree of the original by ours at the same path deletes nothing: GitOps tools prune what is missing.

The tables are those of the specification, for release 0.31.1. Objects that may be missing are listed with a reason.
"""

from collections.abc import Iterable
from fnmatch import fnmatch

import pytest
from manifests import DEPLOY, REPOSITORY, render

Name = tuple[str, str, str]


def names(kind: str, text: str, namespace: str = "", prefix: str = "") -> set[Name]:
    return {(kind, namespace, f"{prefix}{name}") for name in text.split()}


FAMILIES = ("dlb", "dsa", "fpga", "gpu", "iaa", "qat", "sgx")
MAPPING_CRDS = "acceleratorfunctions.fpga.intel.com fpgaregions.fpga.intel.com"
CRDS = names("CustomResourceDefinition", MAPPING_CRDS).union(
    *(names("CustomResourceDefinition", f"{family}deviceplugins.deviceplugin.intel.com") for family in FAMILIES)
)
REGIONS = ("arria10.dcp1.0", "arria10.dcp1.1", "arria10.dcp1.2", "d5005")
FUNCTIONS = [
    *(f"{region}-nlb{n}-{how}" for region in REGIONS for n in (0, 3) for how in ("orchestrated", "preprogrammed")),
    "d5005-matrix-mult-orchestrated",
]
SAMPLES = (
    names("FpgaRegion", " ".join(REGIONS))
    | names("AcceleratorFunction", " ".join(FUNCTIONS))
    | {(f"{family.capitalize()}DevicePlugin", "", f"{family}deviceplugin-sample") for family in FAMILIES}
)


def certificate(namespace: str, prefix: str) -> set[Name]:
    return names("Issuer", "selfsigned-issuer", namespace, prefix) | names(
        "Certificate", "serving-cert", namespace, prefix
    )


def operator() -> set[Name]:
    place = ("inteldeviceplugins-system", "inteldeviceplugins-")
    return CRDS.union(
        names("Namespace", "inteldeviceplugins-system"),
        names("Deployment", "controller-manager", *place),
        names("Service", "webhook-service controller-manager-metrics-service", *place),
        names("Role", "leader-election-role", *place),
        names("RoleBinding", "leader-election-rolebinding", *place),
        names("ClusterRole", "manager-role gpu-manager-role metrics-reader proxy-role", "", place[1]),
        names("ClusterRoleBinding", "manager-rolebinding proxy-rolebinding", "", place[1]),
        names("MutatingWebhookConfiguration", "mutating-webhook-configuration", "", place[1]),
        names("ValidatingWebhookConfiguration", "validating-webhook-configuration", "", place[1]),
        certificate(*place),
    )


def webhook(namespace: str, prefix: str) -> set[Name]:
    return set[Name]().union(
        names("Namespace", namespace),
        names("Deployment", "webhook", namespace, prefix),
        names("Service", "webhook-service", namespace, prefix),
        names("MutatingWebhookConfiguration", "mutating-webhook-configuration", "", prefix),
        certificate(namespace, prefix),
    )


def fpga_webhook(namespace: str, prefix: str) -> set[Name]:
    return webhook(namespace, prefix).union(
        names("CustomResourceDefinition", MAPPING_CRDS),
        names("Role", "leader-election-role", namespace, prefix),
        names("RoleBinding", "leader-election-rolebinding", namespace, prefix),
        names("ClusterRole", "manager-role", "", prefix),
        names("ClusterRoleBinding", "manager-rolebinding", "", prefix),
    )


def fpga_plugin() -> set[Name]:
    place = ("intelfpgaplugin-system", "intelfpgaplugin-")
    return fpga_webhook(*place).union(
        names("DaemonSet", "intel-fpga-plugin", *place),
        names("ClusterRole", "node-getter", "", place[1]),
        names("ClusterRoleBinding", "get-nodes", "", place[1]),
    )


def plugin(family: str, suffix: str = "", namespace: str = "") -> set[Name]:
    return names("DaemonSet", f"intel-{family}-plugin{suffix}", namespace)


SGX_WEBHOOK = webhook("intelsgxwebhook-system", "intelsgxwebhook-")
ATTESTATION = names("ConfigMap", "sgx-attestation-conf")
DPDK = {kind: names("Pod", f"qat-dpdk-test-{kind}") for kind in ("crypto-perf", "compress-perf")}
ORIGINAL: dict[str, set[Name]] = {
    "operator/default": operator(),
    **{f"operator/device/{family}": operator() for family in FAMILIES if family != "iaa"},
    "operator/samples": SAMPLES,
    "operator/manifests": operator() | SAMPLES,
    "operator/crd": CRDS,
    "fpga_admissionwebhook/default": fpga_webhook("intelfpgawebhook-system", "intelfpgawebhook-"),
    "sgx_admissionwebhook/overlays/default-with-certmanager": SGX_WEBHOOK,
    "fpga_plugin/overlays/af": fpga_plugin(),
    "fpga_plugin/overlays/region": fpga_plugin(),
    **{f"{family}_plugin": plugin(family) for family in ("dlb", "dsa", "gpu", "iaa", "qat")},
    **{f"{family}_plugin/base": plugin(family) for family in ("dlb", "dsa", "gpu", "iaa", "qat", "sgx")},
    **{f"{family}_plugin/overlays/{family}_initcontainer": plugin(family) for family in ("dlb", "dsa", "iaa", "qat")},
    **{
        f"gpu_plugin/overlays/{overlay}": plugin("gpu")
        for overlay in ("nfd_labeled_nodes", "monitoring_shared-dev_nfd", "levelzero", "health", "wsl")
    },
    "gpu_plugin/overlays/fractional_resources": plugin("gpu").union(
        names("ServiceAccount", "gpu-manager-sa"),
        names("ClusterRole", "gpu-manager-role"),
        names("ClusterRoleBinding", "gpu-manager-rolebinding"),
    ),
    "qat_plugin/overlays/debug": plugin("qat", "-debug"),
    "qat_plugin/overlays/e2e": plugin("qat", "-e2e"),
    "sgx_plugin/overlays/epc-hook-initcontainer": plugin("sgx"),
    "sgx_plugin/overlays/epc-nfd": plugin("sgx") | SGX_WEBHOOK,
    "sgx_plugin/overlays/epc-register": plugin("sgx", namespace="kube-system").union(
        names("DaemonSet", "sgx-node-init", "kube-system"),
        names("ServiceAccount", "sgx-plugin", "kube-system"),
        names("ClusterRole", "sgx-plugin"),
        names("ClusterRoleBinding", "sgx-plugin"),
    ),
    "nfd/overlays/node-feature-rules": names("NodeFeatureRule", "intel-dp-devices intel-gpu-platform-labeling"),
    "gpu_tensorflow_test": names("Pod", "training-pod"),
    "qat_dpdk_app": DPDK["crypto-perf"] | DPDK["compress-perf"],
    "qat_dpdk_app/crypto-perf": DPDK["crypto-perf"],
    "qat_dpdk_app/compress-perf": DPDK["compress-perf"],
    "sgx_aesmd": names("DaemonSet", "intel-sgx-aesmd") | ATTESTATION,
    "sgx_enclave_apps": names("Job", "intelsgx-demo-job"),
    "sgx_enclave_apps/overlays/sgx_ecdsa_aesmd_quote": names("Job", "ecdsa-quote-intelsgx-demo-job"),
    "sgx_enclave_apps/overlays/sgx_ecdsa_inproc_quote": names("Job", "inproc-ecdsa-quote-intelsgx-demo-job"),
}
# Kinds and names that ours lacks, and where. docs/deployments.md gives the reasons.
MISSING = {
    # The programs issue their certificates.
    ("Issuer", "*"): ("operator/*", "fpga_*"),
    ("Certificate", "*"): ("operator/*", "fpga_*"),
    # Every replica serves, so there is no leader.
    ("Role", "*-leader-election-role"): ("fpga_*",),
    ("RoleBinding", "*-leader-election-rolebinding"): ("fpga_*",),
}


def may_be_missing(tree: str, name: Name) -> bool:
    return any(
        name[0] == kind and fnmatch(name[2], pattern) and any(fnmatch(tree, each) for each in trees)
        for (kind, pattern), trees in MISSING.items()
    )


def rendered(tree: str) -> Iterable[Name]:
    for each in render(DEPLOY / tree):
        yield each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]


@pytest.mark.parametrize("tree", ORIGINAL)
def test_a_tree_has_all_objects_of_the_original(tree: str) -> None:
    missing = ORIGINAL[tree] - {*rendered(tree)}
    assert {name for name in missing if not may_be_missing(tree, name)} == set()


def test_no_crd_webhook_or_mapping_is_missing() -> None:
    kinds = {kind for kind, _ in MISSING}
    assert not kinds & {
        "AcceleratorFunction",
        "CustomResourceDefinition",
        "FpgaRegion",
        "MutatingWebhookConfiguration",
        "ValidatingWebhookConfiguration",
    }


# Pods that users patch: file -> containers -> volumes, and where they are mounted.
DPDK_VOLUMES = {"hugepage": "/dev/hugepages", "dpdk-runtime": "/var/run/dpdk"}
PODS = {
    "crypto-perf": DPDK_VOLUMES,
    "compress-perf": DPDK_VOLUMES | {"testfile": "/var/data/"},
}


@pytest.mark.parametrize("name", PODS)
def test_the_dpdk_pods_have_the_containers_and_volumes_of_the_original(name: str) -> None:
    (pod,) = (each for each in render(DEPLOY / f"qat_dpdk_app/{name}") if each["kind"] == "Pod")
    (container,) = pod["spec"]["containers"]
    assert container["name"] == name
    assert {each["name"]: each["mountPath"] for each in container["volumeMounts"]} == PODS[name]
    assert {each["name"] for each in pod["spec"]["volumes"]} == {*PODS[name]}
    assert [each["name"] for each in container["env"]] == ["TESTCMD", "PTEST"]


@pytest.mark.parametrize(
    "path",
    [
        "deployments/gpu_plugin/kustomization.yaml",
        "deployments/fpga_admissionwebhook/mappings-collection.yaml",
        "deployments/operator/samples/mappings-collection.yaml",
        "deployments/dsa_plugin/overlays/dsa_initcontainer/dsa-config.yaml",
        "deployments/iaa_plugin/overlays/iaa_initcontainer/iaa-config.yaml",
        "deployments/qat_plugin/base/intel-qat-kernel-plugin.yaml",
        *(f"deployments/operator/samples/deviceplugin_v1_{family}deviceplugin.yaml" for family in FAMILIES),
        *(f"demo/{type_}.conf" for type_ in ("dsa", "iaa")),
    ],
)
def test_files_of_the_original_have_their_paths(path: str) -> None:
    assert (REPOSITORY / path).is_file()
