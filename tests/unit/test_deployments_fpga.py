"""The trees of the FPGA plugin and its pod webhook render to the objects of the Go project's trees.

The tables are those of the specification. Additions are a readiness probe, Pod Security labels, an account of the
webhook, the right to watch nodes, the programming counters, the own certificate, and rights for statuses and Events.
There is no leader election, so there are no rights on leases. `kubectl` renders.
"""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from manifests import (
    DEPLOY,
    REPOSITORY,
    SOCKETS,
    Object,
    Volumes,
    certificate_request,
    flag_values,
    from_fields,
    host_paths,
    in_order,
    mounts,
    object_names,
    one,
    own_certificate,
    own_image,
    plugin_container,
    plugin_daemonset,
    render,
    resources,
    role,
)
from webhookconditions import match_conditions

from accelplane.cli import fpgainit
from accelplane.cli.fpgawebhook import FLAGS
from accelplane.cli.goflags import flags_of, parse
from accelplane.fpga.ids import af_type, resource
from accelplane.plugins.fpga.config import FpgaConfig

PLUGIN, WEBHOOK = DEPLOY / "fpga_plugin", DEPLOY / "fpga_admissionwebhook"
MAPPINGS = "mappings-collection.yaml"
CERT_MANAGER = "overlays/default-with-certmanager"
OWN_CERTIFICATES = "overlays/default-with-own-certificates"
LABELS = {"control-plane": "controller-manager"}
# Namespace and prefix. Trees below the overlays have placeholders.
PLACEHOLDERS = ("system", "")
OF_WEBHOOK = ("intelfpgawebhook-system", "intelfpgawebhook-")
OF_PLUGIN = ("intelfpgaplugin-system", "intelfpgaplugin-")
POD_SECURITY = "pod-security.kubernetes.io"


def allowed(group: str, resources: Sequence[str], verbs: str) -> Object:
    """A rule of a role."""
    return {"apiGroups": [group], "resources": [*resources], "verbs": verbs.split()}


def definitions() -> list[Object]:
    """The CRDs of the operator's tree."""
    bases = DEPLOY / "operator/crd/bases"
    return [
        yaml.load((bases / f"fpga.intel.com_{kind}.yaml").read_text(), yaml.CSafeLoader)
        for kind in ("acceleratorfunctions", "fpgaregions")
    ]


# The webhook.


def namespace(name: str) -> Object:
    labels = {**LABELS, f"{POD_SECURITY}/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def service(namespace: str, prefix: str) -> Object:
    spec = {"selector": LABELS, "ports": [{"port": 443, "targetPort": 9443, "protocol": "TCP"}]}
    return one("v1", "Service", f"{prefix}webhook-service", namespace, spec=spec)


def configuration(namespace: str, prefix: str, *, inject_from: str = "") -> Object:
    webhook = {
        "name": "fpga.mutator.webhooks.intel.com",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {
            "service": {"name": f"{prefix}webhook-service", "namespace": namespace, "path": "/pods"},
        },
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "matchConditions": match_conditions("fpga"),
        "timeoutSeconds": 5,
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
    }
    name = f"{prefix}mutating-webhook-configuration"
    found = one("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", name, webhooks=[webhook])
    if inject_from:
        found["metadata"]["annotations"] = {"cert-manager.io/inject-ca-from": inject_from}
    return found


CONTAINER = {
    "name": "manager",
    "image": own_image("intel-fpga-admissionwebhook"),
    "imagePullPolicy": "IfNotPresent",
    "args": ["-v=1"],
    "ports": [
        {"name": "webhook-server", "containerPort": 9443, "protocol": "TCP"},
        {"name": "health", "containerPort": 8081, "protocol": "TCP"},
    ],
    "readinessProbe": {
        "httpGet": {"path": "/readyz", "port": "health"},
        "initialDelaySeconds": 1,
        "periodSeconds": 10,
    },
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    # The original has 20Mi and 30Mi.
    "resources": resources(("40Mi", "100m"), ("60Mi", "100m")),
    "volumeMounts": [{"name": "cert", "mountPath": "/tmp/k8s-webhook-server/serving-certs", "readOnly": True}],
}
CERTIFICATE = [{"name": "cert", "secret": {"secretName": "webhook-server-cert", "defaultMode": 420}}]


def deployment(namespace: str, prefix: str, *, with_own_certificate: bool = False) -> Object:
    container, volumes = deepcopy(CONTAINER), CERTIFICATE
    health = {"name": "HEALTH_PROBE_BIND_ADDRESS", "value": ":8081"}
    container["env"] = [health, *object_names(prefix, own_certificate=with_own_certificate)]
    if with_own_certificate:
        # The patch leaves empty lists.
        container["volumeMounts"] = volumes = []
    pod = ({"automountServiceAccountToken": True} if with_own_certificate else {}) | {
        "serviceAccountName": f"{prefix}webhook",
        "terminationGracePeriodSeconds": 10,
        "containers": [container],
        "volumes": volumes,
    }
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": {"labels": LABELS}, "spec": pod},
    }
    found = one("apps/v1", "Deployment", f"{prefix}webhook", namespace, spec=spec)
    found["metadata"]["labels"] = LABELS
    return found


def rights(namespace: str, prefix: str) -> list[Object]:
    kinds = ("acceleratorfunctions", "fpgaregions")
    rules = [
        allowed("fpga.intel.com", kinds, "list watch"),
        # Additions to the original.
        allowed("fpga.intel.com", [f"{kind}/status" for kind in kinds], "patch"),
        allowed("", ("nodes", "pods"), "list watch"),
        allowed("events.k8s.io", ("events",), "create patch"),
    ]
    account = f"{prefix}webhook"
    names = (f"{prefix}manager-role", f"{prefix}manager-rolebinding")
    return [one("v1", "ServiceAccount", account, namespace), *role("ClusterRole", names, rules, (namespace, account))]


def webhook_with_own_certificate(names: tuple[str, str]) -> list[Object]:
    return [
        *definitions(),
        deployment(*names, with_own_certificate=True),
        *rights(*names),
        service(*names),
        configuration(*names),
        *own_certificate(*names),
    ]


BASE = [*definitions(), deployment(*PLACEHOLDERS), *rights(*PLACEHOLDERS), service(*PLACEHOLDERS),
        configuration(*PLACEHOLDERS)]  # fmt: skip
WITH_OWN_CERTIFICATE = [namespace("intelfpgawebhook-system"), *webhook_with_own_certificate(OF_WEBHOOK)]
WEBHOOK_TREES = {
    "crd": definitions(),
    "manager": [deployment(*PLACEHOLDERS)],
    "rbac": rights(*PLACEHOLDERS),
    "webhook": [service(*PLACEHOLDERS), configuration(*PLACEHOLDERS)],
    "certmanager": certificate_request(*PLACEHOLDERS),
    "namespace": [namespace("system")],
    # The original has the objects of base here.
    ".": WITH_OWN_CERTIFICATE,
    "base": BASE,
    "default": WITH_OWN_CERTIFICATE,
    OWN_CERTIFICATES: WITH_OWN_CERTIFICATE,
    CERT_MANAGER: [
        namespace("intelfpgawebhook-system"),
        *definitions(),
        deployment(*OF_WEBHOOK),
        *rights(*OF_WEBHOOK),
        service(*OF_WEBHOOK),
        configuration(*OF_WEBHOOK, inject_from="intelfpgawebhook-system/intelfpgawebhook-serving-cert"),
        *certificate_request(*OF_WEBHOOK),
    ],
}

# The plugin.

VOLUMES: Volumes = {
    "devfs": ("/dev", "ro", ""),
    "sysfs": ("/sys/class", "ro", ""),
    "cdidir": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
    # Addition to the original: the counters of hook and tool.
    "fpga-records": ("/run/accelplane-fpga", "ro", "DirectoryOrCreate"),
    **SOCKETS,
}
PROGRAMS: Volumes = {"intel-fpga-sw": ("/opt/intel/fpga-sw", "rw", "DirectoryOrCreate")}
HOOKS: Volumes = {"hooks-dir": ("/etc/containers/oci/hooks.d", "rw", "DirectoryOrCreate")}
MODES = ("af", "region", "regiondevel")
WITHOUT_CDI = "overlays/region-hooks.d"


def plugin(namespace: str, prefix: str, mode: str = "af", *, cdi: bool = True) -> list[Object]:
    """The DaemonSet, its namespace, and the right to read the node's annotation."""
    installed = PROGRAMS if cdi else PROGRAMS | HOOKS
    init = {
        "name": "intel-fpga-initcontainer",
        "image": own_image("intel-fpga-initcontainer"),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": mounts(installed),
    }
    if not cdi:
        init["args"] = ["-enable=hooks.d"]
    container = {
        **plugin_container("intel-fpga-plugin", VOLUMES, resources(("30Mi", "80m"), ("60Mi", "160m"))),
        "args": [f"-mode={mode}"] if cdi else [f"-mode={mode}", "-cdi=off"],
        "env": from_fields(NODE_NAME="spec.nodeName"),
        "terminationMessagePath": "/tmp/termination-log",
    }
    pod = {"initContainers": [init], "containers": [container], "volumes": host_paths(VOLUMES | installed)}
    daemonset = plugin_daemonset("intel-fpga-plugin", pod)
    daemonset["metadata"].update(name=f"{prefix}intel-fpga-plugin", namespace=namespace)
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "watch"]}
    labels = {f"{POD_SECURITY}/{level}": "privileged" for level in ("enforce", "audit", "warn")}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}},
        *role("ClusterRole", (f"{prefix}node-getter", f"{prefix}get-nodes"), [rule], (namespace, "default")),
        daemonset,
    ]


PLUGIN_TREES = {
    ".": plugin(*PLACEHOLDERS),
    "base": plugin(*PLACEHOLDERS),
    **{f"overlays/{mode}": [*plugin(*OF_PLUGIN, mode), *webhook_with_own_certificate(OF_PLUGIN)] for mode in MODES},
    WITHOUT_CDI: [*plugin(*OF_PLUGIN, "region", cdi=False), *webhook_with_own_certificate(OF_PLUGIN)],
}
TREES = {WEBHOOK / path: objects for path, objects in WEBHOOK_TREES.items()}
TREES |= {PLUGIN / path: objects for path, objects in PLUGIN_TREES.items()}


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in in_order(objects)}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.relative_to(DEPLOY)))
def test_an_fpga_tree_renders_only_its_objects(tree: Path) -> None:
    assert by_name(render(tree)) == by_name(TREES[tree])


def test_every_fpga_tree_is_in_a_table() -> None:
    existing = {file.parent for root in (PLUGIN, WEBHOOK) for file in root.rglob("kustomization.yaml")}
    # The first step of the overlay above it.
    existing.remove(WEBHOOK / CERT_MANAGER / "installation")
    # Their tests are in test_deployments_dra.
    existing -= {PLUGIN / "overlays/dra", PLUGIN / "overlays/dra/account"}
    assert existing == {*TREES}


INSTALLED = {
    **{WEBHOOK / path: OF_WEBHOOK for path in ("default", CERT_MANAGER, OWN_CERTIFICATES)},
    **{PLUGIN / path: OF_PLUGIN for path in (*(f"overlays/{mode}" for mode in MODES), WITHOUT_CDI)},
}


@pytest.mark.parametrize("tree", INSTALLED, ids=lambda tree: str(tree.relative_to(DEPLOY)))
def test_the_names_that_the_webhook_gets_are_those_of_its_objects(tree: Path) -> None:
    _, prefix = INSTALLED[tree]
    found = by_name(render(tree))
    pod = found["Deployment", f"{prefix}webhook"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = flag_values(FLAGS, container)
    assert ("ServiceAccount", pod["serviceAccountName"]) in found
    assert ("Service", values["service"]) in found
    assert ("MutatingWebhookConfiguration", values["webhook-configuration"]) in found
    if ("Certificate", f"{prefix}serving-cert") in found:
        (mount,) = container["volumeMounts"]
        assert (values["certificate-secret"], values["cert-dir"]) == ("", mount["mountPath"])
    else:
        assert ("Secret", values["certificate-secret"]) in found
    # The probe uses the address of the health server.
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert values["health-probe-bind-address"] == f":{ports[container['readinessProbe']['httpGet']['port']]}"


def test_without_cdi_plugin_and_init_container_agree_on_the_hook() -> None:
    found = by_name(render(PLUGIN / WITHOUT_CDI))
    pod = found["DaemonSet", f"{OF_PLUGIN[1]}intel-fpga-plugin"]["spec"]["template"]["spec"]
    (container,), (init,) = pod["containers"], pod["initContainers"]
    flag_values, _ = parse(flags_of(FpgaConfig), container["args"])
    config = FpgaConfig.of(flag_values)
    assert (config.own_mode, config.cdi) == ("region", "off")
    values = {flag.name: flag.default for flag in fpgainit.FLAGS} | parse(fpgainit.FLAGS, init["args"])[0]
    assert values["enable"] == "hooks.d"
    assert {mount["mountPath"] for mount in init["volumeMounts"]} == {values["target"], values["hooks-dir"]}


def test_the_example_mappings_are_those_of_the_operators_samples() -> None:
    assert (WEBHOOK / MAPPINGS).read_bytes() == (DEPLOY / "operator/samples" / MAPPINGS).read_bytes()


# Demos.


def mappings() -> dict[str, Object]:
    """The example mappings by the resource names that pods request."""
    documents = yaml.safe_load_all((WEBHOOK / MAPPINGS).read_text())
    return {f"fpga.intel.com/{each['metadata']['name']}": each for each in documents}


def demo(name: str) -> Object:
    """The only container of a demo."""
    document = yaml.safe_load((REPOSITORY / f"demo/{name}.yaml").read_text())
    (container,) = document["spec"].get("template", document)["spec"]["containers"]
    return container


@pytest.mark.parametrize("name", ["test-fpga-orchestrated", "test-fpga-preprogrammed", "intelfpga-job"])
def test_a_demo_requests_the_capabilities_and_huge_pages_of_its_program(name: str) -> None:
    assert demo(name)["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert demo(name)["resources"]["limits"].items() >= {"cpu": 1, "hugepages-2Mi": "20Mi"}.items()


@pytest.mark.parametrize(("how", "mode"), [("orchestrated", "region"), ("preprogrammed", "af")])
def test_a_demo_requests_a_name_of_the_example_mappings(how: str, mode: str) -> None:
    (name,) = {*demo(f"test-fpga-{how}")["resources"]["limits"]} & {*mappings()}
    assert mappings()[name]["spec"]["mode"] == mode


def test_the_job_requests_the_resource_name_of_its_function() -> None:
    spec = mappings()["fpga.intel.com/arria10.dcp1.2-nlb0-preprogrammed"]["spec"]
    container = demo("intelfpga-job")
    assert container["command"] == ["nlb0"]
    assert container["resources"]["limits"][resource(af_type(spec["interfaceId"], spec["afuId"]))] == 1
