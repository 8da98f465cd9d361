"""The chart `accelplane` renders each component to the objects of its kustomization. `helm` renders it."""

import json
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from charts import CHARTS, HUB, hook_objects, in_hub, rejected, run_helm, template
from manifests import DEPLOY, Object, in_order, render

import accelplane

CHART = "accelplane"
NAMESPACE = "accelerators"
KEEP = {"helm.sh/resource-policy": "keep"}
# Component -> its kustomization, the namespace in it, and the value of the label control-plane in the chart. All
# components can share one namespace, so each Service needs a selector of its own.
COMPONENTS = {
    "agent": ("accelplane_node", "", ""),
    "labels": ("labels", "kube-system", ""),
    "nodeFeatureRules": ("nfd/overlays/node-feature-rules", "", ""),
    "onload": ("onload/config/default-with-webhook", "onload-operator-system", "onload-operator"),
    "sgxWebhook": (
        "sgx_admissionwebhook/overlays/default-with-own-certificates", "intelsgxwebhook-system", "sgx-webhook",
    ),
    "fpgaWebhook": ("fpga_admissionwebhook/default", "intelfpgawebhook-system", "fpga-webhook"),
    "fleet": ("fleet", "accelplane-fleet", ""),
}  # fmt: skip
WORKLOADS = {
    "agent": "accelplane",
    "labels": "accelplane",
    "onload": "onload-operator",
    "sgxWebhook": "intel-sgx-admissionwebhook",
    "fpgaWebhook": "intel-fpga-admissionwebhook",
    "fleet": "accelplane-fleet",
}


CERT_MANAGER: Object = {"certificate": {"source": "cert-manager"}}
# Component -> its kustomization with a certificate from cert-manager, and the prefix of its objects.
CERTIFIED = {
    "onload": ("onload/config/default-with-certmanager", "onload-operator-"),
    "sgxWebhook": ("sgx_admissionwebhook/overlays/default-with-certmanager", "intelsgxwebhook-"),
    "fpgaWebhook": ("fpga_admissionwebhook/overlays/default-with-certmanager", "intelfpgawebhook-"),
}


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): in_order(each) for each in objects}
    assert len(found) == len(objects)
    return found


def component(name: str, **values: object) -> list[Object]:
    """The objects of one component alone."""
    return template(CHART, NAMESPACE, components={"agent": False, name: True}, **values)


def workload(name: str, **values: object) -> Any:
    """The pod of a component."""
    (found,) = (each for each in component(name, **values) if each["kind"] in ("DaemonSet", "Deployment"))
    return found["spec"]["template"]["spec"]


def kustomized(name: str, tree: str = "") -> list[Object]:
    """The objects of a kustomization of a component, in the namespace of the release."""
    default, namespace, label = COMPONENTS[name]
    text = json.dumps([each for each in in_hub(render(DEPLOY / (tree or default))) if each["kind"] != "Namespace"])
    if namespace:
        # Some objects have the name of the namespace.
        text = text.replace(f'"namespace": "{namespace}"', f'"namespace": "{NAMESPACE}"')
        # Names of the Service, and the reference to the Certificate.
        text = text.replace("-agent-namespaces=kube-system", f"-agent-namespaces={NAMESPACE}")
        text = text.replace(f".{namespace}.svc", f".{NAMESPACE}.svc").replace(f'"{namespace}/', f'"{NAMESPACE}/')
    objects = json.loads(text.replace('"controller-manager"', f'"{label}"') if label else text)
    for each in objects:
        if each["kind"] == "CustomResourceDefinition":
            each["metadata"]["annotations"] = each["metadata"].get("annotations", {}) | KEEP
        if each["kind"] == "Deployment":
            pod = each["spec"]["template"]["spec"]
            # The kustomization removes the items of these lists, not the lists.
            for owner, key in ((pod, "volumes"), (pod["containers"][0], "volumeMounts")):
                if not owner.get(key):
                    owner.pop(key, None)
        if name == "agent":
            each["metadata"]["namespace"] = NAMESPACE
        if each["kind"].startswith("ValidatingAdmissionPolicy"):
            del each["metadata"]["namespace"]  # kubectl's kustomize sets it, and the API server ignores it
    return objects


def test_the_chart_has_the_version_of_the_product_and_of_its_dependency() -> None:
    chart = yaml.safe_load((CHARTS / CHART / "Chart.yaml").read_text())
    versions = {chart["version"], chart["appVersion"], *(each["version"] for each in chart["dependencies"])}
    assert versions == {accelplane.__version__}


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_renders_the_objects_of_its_kustomization(name: str) -> None:
    found, expected = by_name(component(name)), by_name(kustomized(name))
    assert {*found} == {*expected}
    for key, each in expected.items():
        assert found[key] == each, key


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_webhook_with_a_certificate_of_cert_manager_is_that_of_the_kustomization(name: str) -> None:
    tree, prefix = CERTIFIED[name]
    # Webhooks of several components can be in one namespace, so their Secrets have the prefix in the chart.
    text = json.dumps(kustomized(name, tree))
    for secret in ("webhook-ca-cert", "webhook-server-cert"):
        text = text.replace(f'"secretName": "{secret}"', f'"secretName": "{prefix}{secret}"')
    desired = by_name(json.loads(text))
    if name == "sgxWebhook":
        # The limits of the tree are those of the original. The chart has one default for both certificates.
        (container,) = desired["Deployment", f"{prefix}webhook"]["spec"]["template"]["spec"]["containers"]
        container["resources"] = workload(name)["containers"][0]["resources"]
    found = by_name(component(name, **{name: CERT_MANAGER}))
    assert {*found} == {*desired}
    for key, each in desired.items():
        assert found[key] == each, key


def test_webhooks_of_one_namespace_have_certificates_of_their_own() -> None:
    components = dict.fromkeys(("agent", "sgxWebhook", "fpgaWebhook", "onload"), True)
    objects = template(CHART, NAMESPACE, components=components, **dict.fromkeys(CERTIFIED, CERT_MANAGER))
    secrets = [each["spec"]["secretName"] for each in objects if each["kind"] == "Certificate"]
    assert len(secrets) == len({*secrets}) == 2 * len(CERTIFIED)
    mounted = {
        volume["secret"]["secretName"]
        for each in objects
        if each["kind"] == "Deployment"
        for volume in each["spec"]["template"]["spec"]["volumes"]
    }
    assert mounted == {secret for secret in secrets if secret.endswith("webhook-server-cert")}


def test_the_fleet_page_with_a_secret_is_that_of_the_overlay_with_tls() -> None:
    text = json.dumps(
        [each for each in in_hub(render(DEPLOY / "fleet/overlays/secure")) if each["kind"] != "Namespace"]
    )
    text = text.replace("-agent-namespaces=kube-system", f"-agent-namespaces={NAMESPACE}")
    expected = by_name(json.loads(text.replace('"namespace": "accelplane-fleet"', f'"namespace": "{NAMESPACE}"')))
    found = by_name(component("fleet", fleet={"tlsSecret": "accelplane-fleet-tls"}))
    assert {*found} == {*expected}
    for key, each in expected.items():
        assert found[key] == each, key


def test_the_policy_of_the_fleet_page_names_its_peers_and_can_be_omitted() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
    values = {"tlsSecret": "tls", "networkPolicy": {"from": peers}}
    policy = by_name(component("fleet", fleet=values))["NetworkPolicy", "accelplane-fleet"]["spec"]
    assert policy["ingress"] == [{"ports": [{"port": "probes"}]}, {"ports": [{"port": "https"}], "from": peers}]
    pod = workload("fleet", fleet=values)
    ports = {port["name"] for port in pod["containers"][0]["ports"]}
    assert ports == {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    kinds = {each["kind"] for each in component("fleet", fleet={"networkPolicy": {"enabled": False}})}
    assert "NetworkPolicy" not in kinds


def test_the_use_of_gpus_by_containers_is_that_of_the_overlay() -> None:
    components = {"agent": True, "clients": True}
    found = by_name(template(CHART, NAMESPACE, components=components))
    expected = by_name(in_hub(render(DEPLOY / "accelplane_node/overlays/clients")))
    assert {*found} == {*expected}
    for key, each in expected.items():
        each["metadata"]["namespace"] = NAMESPACE
        assert found[key] == in_order(each), key


def test_the_use_of_gpus_by_containers_is_on_the_pages_of_monitoring_and_follows_the_agent() -> None:
    agent = {"nodeSelector": {"zone": "a"}, "image": {"hub": "registry.example.com/x"}}
    components = {"agent": True, "clients": True, "monitoring": True}
    found = by_name(template(CHART, NAMESPACE, components=components, agent=agent, clients={"args": ["-v=2"]}))
    pods = [found["DaemonSet", name]["spec"]["template"]["spec"] for name in ("accelplane-node", "accelplane-clients")]
    node, clients = (pod["containers"][0] for pod in pods)
    assert [each for each in node["args"] if "http-address" in each] == ["-http-address=:9400"]
    assert clients["args"] == ["clients", "--socket=/run/accelplane-clients/clients.sock", "-v=2"]
    assert node["image"] == clients["image"]
    assert pods[0]["nodeSelector"] == pods[1]["nodeSelector"]
    mounts = [mount["mountPath"] for mount in node["volumeMounts"]]
    assert len(mounts) == len({*mounts})


@pytest.mark.parametrize(("version", "expected"), [("1.29.15", 0), ("1.30.0", 2), ("1.30.4-eks-1", 2)])
def test_the_apparmor_field_is_set_on_versions_of_kubernetes_that_have_it(version: str, expected: int) -> None:
    values = f"--set=agent.image.hub={HUB},components.clients=true,agent.qat=true"
    text = run_helm("template", "release", CHARTS / CHART, values, f"--kube-version={version}")
    assert text.count("container.apparmor.security.beta.kubernetes.io/") == 2
    assert text.count("appArmorProfile:") == expected


def test_the_use_of_gpus_by_containers_needs_the_agent() -> None:
    message = rejected(CHART, components={"agent": False, "clients": True})
    assert "components: found clients without agent, expected both" in message


def test_options_of_the_fleet_page_follow_those_of_the_chart() -> None:
    (container,) = workload("fleet", fleet={"args": ["-pods=all"]})["containers"]
    assert container["args"][-1] == "-pods=all"


def test_the_agent_for_qat_nodes_is_that_of_the_overlay() -> None:
    found, expected = (
        by_name(objects)
        for objects in (component("agent", agent={"qat": True}), kustomized("agent", "accelplane_node/overlays/qat"))
    )
    assert found == expected


@pytest.mark.parametrize(
    ("name", "tree", "former", "values"),
    [
        (
            "agent",
            "accelplane_node/overlays/pages",
            "kube-system",
            {"agent": {"pages": {"tlsSecret": "accelplane-agent-tls"}}},
        ),
        ("fleet", "fleet/overlays/authorized-agents", "accelplane-fleet", {"fleet": {"agentAuthority": "agent-ca"}}),
    ],
)
def test_pages_of_agents_with_tls_are_served_and_read_as_in_the_overlays(
    name: str, tree: str, former: str, values: dict[str, Any]
) -> None:
    text = json.dumps([each for each in in_hub(render(DEPLOY / tree)) if each["kind"] != "Namespace"])
    text = text.replace("-agent-namespaces=kube-system", f"-agent-namespaces={NAMESPACE}")
    expected = by_name(json.loads(text.replace(f'"namespace": "{former}"', f'"namespace": "{NAMESPACE}"')))
    found = by_name(component(name, **values))
    assert {*found} == {*expected}
    for key, each in expected.items():
        assert found[key] == each, key


def test_the_monitor_of_agents_with_tls_uses_tls_and_the_token_of_the_user() -> None:
    authorization = {"authorization": {"credentials": {"name": "token-for-agents", "key": "token"}}}
    found = by_name(
        template(
            CHART,
            NAMESPACE,
            components={"agent": True, "clients": True, "monitoring": True},
            agent={"pages": {"tlsSecret": "tls"}},
            monitoring={"agentEndpoint": authorization},
        )
    )
    (endpoint,) = found["PodMonitor", "accelplane-agent"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["port"] == "pages"
    assert endpoint["authorization"] == authorization["authorization"]
    args = found["DaemonSet", "accelplane-node"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [each for each in args if "http-address" in each] == ["--http-address=:9400"]


def test_the_agent_is_the_default() -> None:
    assert template(CHART, NAMESPACE) == component("agent")


def test_the_operator_is_that_of_its_own_chart() -> None:
    found = component("operator", operator={"manager": {"devices": {"gpu": True}}})
    assert found == template("intel-device-plugins-operator", NAMESPACE, manager={"devices": {"gpu": True}})


def test_services_of_components_in_one_namespace_select_different_pods() -> None:
    names = {"operator": True, "onload": True, "agent": True, "labels": True, "fleet": True}
    objects = template(CHART, NAMESPACE, components=names, fleet={"tlsSecret": "tls"})
    objects += template(CHART, NAMESPACE, components={"sgxWebhook": True, "fpgaWebhook": True})
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in objects if each["kind"] == "Deployment"]
    assert len(pods) == 5
    for service in (each for each in objects if each["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        assert sum(selector <= labels.items() for labels in pods) == 1, service["metadata"]["name"]


def test_two_servers_for_the_same_webhooks_are_rejected() -> None:
    message = rejected(CHART, components={"operator": True, "sgxWebhook": True})
    assert "components: found operator and sgxWebhook or fpgaWebhook" in message


def test_the_monitor_selects_the_metrics_of_the_operator() -> None:
    components = {"agent": False, "operator": True, "monitoring": True}
    objects = by_name(template(CHART, NAMESPACE, components=components, monitoring={"labels": {"release": "x"}}))
    monitor = objects["ServiceMonitor", "inteldeviceplugins-controller-manager"]
    assert monitor["metadata"]["labels"] == {"release": "x"}
    service = objects["Service", "inteldeviceplugins-controller-manager-metrics-service"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_the_configuration_of_the_agent_is_a_configmap_in_its_pod() -> None:
    config = {"enabled": ["gpu"], "plugins": {"gpu": {"shared-dev-num": 4}}}
    values = {"config": config, "args": ["--log-format=json"]}
    (found,) = (each for each in component("agent", agent=values) if each["kind"] == "ConfigMap")
    assert yaml.safe_load(found["data"]["agent.yaml"]) == config
    pod = workload("agent", agent=values)
    (container,) = pod["containers"]
    assert container["args"] == ["node", "--config=/etc/accelplane/agent.yaml", "--log-format=json"]
    assert {"name": "config", "configMap": {"name": found["metadata"]["name"]}} in pod["volumes"]
    assert {"name": "config", "mountPath": "/etc/accelplane", "readOnly": True} in container["volumeMounts"]


def test_the_kubelet_directory_is_mounted_at_the_path_of_the_default() -> None:
    pod = workload("agent", agent={"kubeletDirectory": "/var/lib/k0s/kubelet"})
    (volume,) = (each for each in pod["volumes"] if each["name"] == "kubeletsockets")
    assert volume["hostPath"] == {"path": "/var/lib/k0s/kubelet/device-plugins"}
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "kubeletsockets")
    assert mount["mountPath"] == "/var/lib/kubelet/device-plugins"


@pytest.mark.parametrize("name", WORKLOADS)
def test_pod_settings_reach_the_pod_of_a_component(name: str) -> None:
    digest = f"sha256:{'c' * 64}"
    values: Object = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "accelerator", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "system-node-critical",
    }
    settings = {**values, "image": {"digest": digest}, "resources": {"limits": {"memory": "1Gi"}}}
    pod = workload(name, imagePullSecrets=[{"name": "registry"}], **{name: settings})
    assert pod["nodeSelector"].items() >= values["nodeSelector"].items()
    assert pod["affinity"].items() >= values["affinity"].items()
    assert (pod["tolerations"], pod["priorityClassName"]) == (values["tolerations"], values["priorityClassName"])
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    (container,) = pod["containers"]
    assert container["image"] == f"{HUB}/{WORKLOADS[name]}:{accelplane.__version__}@{digest}"
    assert container["resources"]["limits"]["memory"] == "1Gi"


def test_definitions_can_be_installed_by_other_means() -> None:
    for name in ("onload", "fpgaWebhook"):
        kinds = {each["kind"] for each in component(name, crds={"install": False})}
        assert "CustomResourceDefinition" not in kinds


# helm test


def awaited_workloads(objects: list[Object]) -> list[str]:
    """The workloads that `helm test` waits for."""
    (pod,) = (
        each for each in objects if each["kind"] == "Pod" and each["metadata"]["name"] == "release-test-workloads"
    )
    (container,) = pod["spec"]["containers"]
    compile(container["command"][-1], "workloads", "exec")
    namespace, *workloads = container["args"]
    assert namespace == NAMESPACE
    return workloads


@pytest.mark.parametrize(
    "names", [["agent"], ["agent", "operator", "labels", "onload", "fleet"], ["sgxWebhook", "fpgaWebhook"]]
)
def test_helm_test_waits_for_the_pods_of_all_components_and_may_read_only_them(names: list[str]) -> None:
    components = {"agent": False} | dict.fromkeys(names, True)
    workloads = {
        f"{each['kind'].lower()}s/{each['metadata']['name']}"
        for each in template(CHART, NAMESPACE, components=components)
        if each["kind"] in ("DaemonSet", "Deployment")
    }
    objects = hook_objects(CHART, NAMESPACE, components=components)
    assert {*awaited_workloads(objects)} == workloads
    (role,) = (each for each in objects if each["kind"] == "Role")
    (rule,) = role["rules"]
    assert rule["verbs"] == ["get"]
    assert {*rule["resourceNames"]} == {each.partition("/")[2] for each in workloads}


SHORTAGE: dict[str, Callable[[str, Object], str]] = runpy.run_path(str(CHARTS / CHART / "files/test-workloads.py"))
PROCESSED: Object = {"metadata": {"generation": 2}}


@pytest.mark.parametrize(
    ("workload", "status", "words"),
    [
        ("daemonsets/a", {"desiredNumberScheduled": 2, "updatedNumberScheduled": 2, "numberReady": 2}, ""),
        ("daemonsets/a", {"desiredNumberScheduled": 2, "updatedNumberScheduled": 1, "numberReady": 2}, "found 1 ready"),
        ("daemonsets/a", {"desiredNumberScheduled": 2, "updatedNumberScheduled": 2}, "found 0 ready pods, expected 2"),
        ("daemonsets/a", {"desiredNumberScheduled": 0}, "found no node"),
        ("daemonsets/a", {"observedGeneration": 1, "desiredNumberScheduled": 1, "numberReady": 1}, "last change"),
        ("deployments/a", {"updatedReplicas": 1, "readyReplicas": 1}, ""),
        ("deployments/a", {"updatedReplicas": 1}, "found 0 ready pods, expected 1"),
    ],
)
def test_helm_test_reports_missing_objects(workload: str, status: Object, words: str) -> None:
    found = PROCESSED | {"spec": {"replicas": 1}, "status": {"observedGeneration": 2} | status}
    text = SHORTAGE["shortage"](workload, found)
    assert words in text
    assert bool(text) == bool(words)


def test_helm_test_succeeds_without_pods() -> None:
    assert hook_objects(CHART, NAMESPACE, components={"agent": False, "nodeFeatureRules": True}) == []


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"components": {"agnet": True}}, "agnet"),
        ({"agent": {"kubeletDirectory": "kubelet"}}, "kubeletDirectory"),
        ({"labels": {"image": {"tga": "1"}}}, "tga"),
        ({"fleet": {"tlsSecrets": "x"}}, "tlsSecrets"),
        ({"agent": {"pages": {"tlsSecrets": "x"}}}, "tlsSecrets"),
        ({"fleet": {"networkPolicy": {"form": []}}}, "form"),
        ({"clients": {"image": {}}}, "image"),
        ({"operator": {"enable": True}}, "enable"),
        ({"sgxWebhook": {"certificate": {"source": "certmanager"}}}, "source"),
        ({"onload": {"certificate": {"issuer": "x"}}}, "issuer"),
    ],
)
def test_invalid_values_are_rejected_with_their_key(values: Object, word: str) -> None:
    assert word in rejected(CHART, **{"components": {"operator": True}} | values)
