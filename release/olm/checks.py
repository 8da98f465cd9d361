"""Checks of bundles and catalogs, field by field. Each returns the problems that it finds."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelplane.kube.schemas import violations
from release.kustomize import Object, load_yaml
from release.olm import bundle
from release.version import SEMANTIC

# The kinds that OLM creates from bundles.
_KINDS = {
    *("ClusterRole", "ClusterRoleBinding", "ConfigMap", "ConsoleCLIDownload", "ConsoleLink", "ConsolePlugin"),
    *("ConsoleQuickStart", "ConsoleYAMLSample", "CustomResourceDefinition", "NetworkPolicy", "PodDisruptionBudget"),
    *(
        "PriorityClass",
        "PrometheusRule",
        "Role",
        "RoleBinding",
        "Secret",
        "Service",
        "ServiceAccount",
        "ServiceMonitor",
    ),
    *("VerticalPodAutoscaler", "ClusterServiceVersion"),
}
_CAPABILITIES = {"Basic Install", "Seamless Upgrades", "Full Lifecycle", "Deep Insights", "Auto Pilot"}
_CATEGORIES = {
    *("AI/Machine Learning", "Application Runtime", "Big Data", "Cloud Provider", "Database", "Developer Tools"),
    *(
        "Development Tools",
        "Drivers and plugins",
        "Integration & Delivery",
        "Logging & Tracing",
        "Modernization & Migration",
    ),
    *(
        "Monitoring",
        "Networking",
        "OpenShift Optional",
        "Security",
        "Storage",
        "Streaming & Messaging",
        "Observability",
    ),
}
_MODES = ["OwnNamespace", "SingleNamespace", "MultiNamespace", "AllNamespaces"]
# OLM unpacks a bundle into a ConfigMap, compressed.
MAX_BUNDLE = 1024 * 1024
_CHANNEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_REFERENCE = re.compile(r"[a-z0-9][a-z0-9.:-]*(?:/[a-z0-9._-]+)+(?::[\w.-]+|@sha256:[0-9a-f]{64})")


def bundle_problems(content: Mapping[str, str], *, pinned: bool = True) -> list[str]:
    """What is wrong with the files of a bundle. `pinned` requires a digest of every image."""
    names = bundle.parts(content)
    if not names or not names[0].endswith(".clusterserviceversion.yaml"):
        return ["manifests: found no file *.clusterserviceversion.yaml, expected one"]
    objects = [load_yaml(content[name]) for name in names]
    version = objects[0]
    return [
        *_size(content, names),
        *_metadata(version, bundle.labels(content)),
        *_kinds(names, objects),
        *_definitions(version, objects),
        *_examples(version, objects),
        *_install(version),
        *_webhooks(version),
        *_images(version, pinned=pinned),
        *_dependencies(content),
    ]


def _size(content: Mapping[str, str], names: Sequence[str]) -> Iterator[str]:
    size = sum(len(bundle.oci.compressed(content[name].encode())) for name in names)
    if size > MAX_BUNDLE:
        yield f"manifests: found {size} compressed bytes, expected at most {MAX_BUNDLE}"


def _metadata(version: Object, labels: Mapping[str, str]) -> Iterator[str]:
    found = {name.removeprefix("operators.operatorframework.io.bundle."): text for name, text in labels.items()}
    spec, metadata = version["spec"], version["metadata"]
    annotations = metadata["annotations"]
    package = found.get("package.v1", "")
    channels = found.get("channels.v1", "").split(",")
    expected = {
        "apiVersion": (version.get("apiVersion"), "operators.coreos.com/v1alpha1"),
        "kind": (version.get("kind"), "ClusterServiceVersion"),
        "metadata.name": (metadata["name"], f"{package}.v{spec.get('version')}"),
        "mediatype.v1": (found.get("mediatype.v1"), "registry+v1"),
        "manifests.v1": (found.get("manifests.v1"), "manifests/"),
        "metadata.v1": (found.get("metadata.v1"), "metadata/"),
    }
    yield from (
        f"{field}: found {value!a}, expected {wanted!a}"
        for field, (value, wanted) in expected.items()
        if value != wanted
    )
    yield from (
        f"channels.v1: found {channel!a}, expected letters, digits, '.', '_' and '-'"
        for channel in channels
        if not _CHANNEL.fullmatch(channel)
    )
    if found.get("channel.default.v1") not in channels:
        yield f"channel.default.v1: found {found.get('channel.default.v1')!a}, expected one of {channels}"
    for field in ("displayName", "description", "provider", "maturity", "keywords", "minKubeVersion", "install"):
        if not spec.get(field):
            yield f"spec.{field}: not found"
    for field in ("version", "minKubeVersion"):
        if not SEMANTIC.fullmatch(str(spec.get(field, ""))):
            yield f"spec.{field}: found {spec.get(field)!a}, expected a semantic version"
    for field in ("capabilities", "categories", "containerImage", "createdAt", "alm-examples"):
        if not isinstance(annotations.get(field), str):
            yield f"annotation {field}: not found"
    if annotations.get("capabilities") not in _CAPABILITIES:
        yield f"annotation capabilities: found {annotations.get('capabilities')!a}"
    if unknown := {each.strip() for each in str(annotations.get("categories")).split(",")} - _CATEGORIES:
        yield f"annotation categories: found {sorted(unknown)}"
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(annotations.get("createdAt"))):
        yield f"annotation createdAt: found {annotations.get('createdAt')!a}, expected a time in RFC 3339"
    yield from _upgrades(package, spec, annotations)
    modes = {each["type"]: each["supported"] for each in spec.get("installModes", [])}
    if sorted(modes) != sorted(_MODES) or not any(modes.values()):
        yield f"spec.installModes: found {modes}, expected all four with at least one that is supported"


def _upgrades(package: str, spec: Object, annotations: Mapping[str, str]) -> Iterator[str]:
    older = [*([spec["replaces"]] if "replaces" in spec else []), *spec.get("skips", [])]
    for each in older:
        if not each.startswith(f"{package}.v") or each == f"{package}.v{spec['version']}":
            yield f"spec: found the older version {each!a}, expected another version of {package}"
    skipped = annotations.get("olm.skipRange", "")
    if skipped and not skipped.endswith(f"<{spec['version']}"):
        yield f"annotation olm.skipRange: found {skipped!a}, expected a range below {spec['version']}"


def _kinds(names: Sequence[str], objects: Sequence[Object]) -> Iterator[str]:
    for name, each in zip(names, objects, strict=True):
        if each["kind"] not in _KINDS:
            yield f"{name}: found kind {each['kind']}, which OLM does not create"
        if each["kind"] != "ClusterServiceVersion" and "namespace" in each["metadata"]:
            yield f"{name}: found a namespace, expected none"
    for key, count in Counter((each["kind"], each["metadata"]["name"]) for each in objects).items():
        if count > 1:
            yield f"{' '.join(key)}: found {count} times"


def _definitions(version: Object, objects: Sequence[Object]) -> Iterator[str]:
    shipped = {
        (each["metadata"]["name"], each["spec"]["names"]["kind"], served["name"])
        for each in objects
        if each["kind"] == "CustomResourceDefinition"
        for served in each["spec"]["versions"]
    }
    owned = version["spec"]["customresourcedefinitions"]["owned"]
    listed = {(each["name"], each["kind"], each["version"]) for each in owned}
    yield from (
        f"definition {' '.join(each)}: found in the files or the owned definitions only"
        for each in sorted(shipped ^ listed)
    )
    for each in owned:
        for field in ("displayName", "description"):
            if not each.get(field):
                yield f"owned definition {each['name']}: {field} not found"


def _examples(version: Object, objects: Sequence[Object]) -> Iterator[str]:
    try:
        examples: list[Object] = json.loads(version["metadata"]["annotations"]["alm-examples"])
    except (KeyError, ValueError) as error:
        yield f"annotation alm-examples: {error}"
        return
    schemas = {each["spec"]["names"]["kind"]: each for each in objects if each["kind"] == "CustomResourceDefinition"}
    missing = set(schemas) - {each["kind"] for each in examples}
    yield from (f"annotation alm-examples: found no {kind}" for kind in sorted(missing))
    for each in examples:
        name = f"example {each['kind']} {each['metadata']['name']}"
        if each["kind"] not in schemas:
            yield f"{name}: its kind is not owned"
            continue
        served = {v["name"]: v["schema"]["openAPIV3Schema"] for v in schemas[each["kind"]]["spec"]["versions"]}
        found = each["apiVersion"].rpartition("/")[2]
        if found not in served:
            yield f"{name}: found version {found}, expected {', '.join(served)}"
            continue
        schema = served[found]["properties"]["spec"]
        yield from (f"{name}: {problem}" for problem in violations(each["spec"], schema, "spec"))
        yield from (f"{name}: {field} is not in the definition" for field in _unknown(each["spec"], schema, "spec"))


def _unknown(value: Any, schema: Object, path: str) -> Iterator[str]:
    """The fields that the API server would remove."""
    if isinstance(value, dict) and "properties" in schema:
        for key, each in value.items():
            if key in schema["properties"]:
                yield from _unknown(each, schema["properties"][key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(value, list) and "items" in schema:
        for position, each in enumerate(value):
            yield from _unknown(each, schema["items"], f"{path}[{position}]")


def _install(version: Object) -> Iterator[str]:
    install = version["spec"]["install"]
    if install.get("strategy") != "deployment":
        yield f"spec.install.strategy: found {install.get('strategy')!a}, expected 'deployment'"
    accounts = {
        each["serviceAccountName"]
        for kind in ("clusterPermissions", "permissions")
        for each in install["spec"].get(kind, [])
    }
    for kind in ("clusterPermissions", "permissions"):
        for each in install["spec"].get(kind, []):
            yield from _rules(f"{kind} of {each['serviceAccountName']}", each["rules"])
    for deployment in install["spec"]["deployments"]:
        pod = deployment["spec"]["template"]["spec"]
        if pod["serviceAccountName"] not in accounts:
            yield f"deployment {deployment['name']}: the account {pod['serviceAccountName']} has no permissions"
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        if not deployment["spec"]["selector"]["matchLabels"].items() <= labels.items():
            yield f"deployment {deployment['name']}: its selector does not match the labels of its pods"
        volumes = {each["name"] for each in pod.get("volumes", [])}
        for container in pod["containers"]:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"deployment {deployment['name']}: no volume {mount['name']}"


def _rules(name: str, rules: Sequence[Object]) -> Iterator[str]:
    for rule in rules:
        if not rule.get("verbs") or not (rule.get("resources") or rule.get("nonResourceURLs")):
            yield f"{name}: found a rule without verbs or resources: {rule}"


def _webhooks(version: Object) -> Iterator[str]:
    deployments = {each["name"]: each["spec"] for each in version["spec"]["install"]["spec"]["deployments"]}
    webhooks = version["spec"].get("webhookdefinitions", [])
    for key, count in Counter((each["type"], each["generateName"]) for each in webhooks).items():
        if count > 1:
            yield f"webhook {' '.join(key)}: found {count} times"
    for each in webhooks:
        name = f"webhook {each['generateName']}"
        if each["type"] not in {"MutatingAdmissionWebhook", "ValidatingAdmissionWebhook"}:
            yield f"{name}: found type {each['type']!a}"
        if each["deploymentName"] not in deployments:
            yield f"{name}: found the deployment {each['deploymentName']!a}, expected one of {sorted(deployments)}"
            continue
        containers = deployments[each["deploymentName"]]["template"]["spec"]["containers"]
        ports = {port["containerPort"] for container in containers for port in container.get("ports", [])}
        if each["targetPort"] not in ports:
            yield f"{name}: no container has the port {each['targetPort']}"
        if not each["webhookPath"].startswith("/") or each["sideEffects"] not in {"None", "NoneOnDryRun"}:
            yield f"{name}: found path {each['webhookPath']!a} and side effects {each['sideEffects']!a}"
        if "v1" not in each["admissionReviewVersions"] or not each["rules"]:
            yield f"{name}: found no rules, or no version v1 of reviews"
        # OLM denies bundles whose webhooks could deny requests of OLM itself.
        for rule in each["rules"]:
            if "*" in rule["apiGroups"] or "operators.coreos.com" in rule["apiGroups"]:
                yield f"{name}: found the API groups {rule['apiGroups']}, which OLM does not accept"


def _images(version: Object, *, pinned: bool) -> Iterator[str]:
    related = {each["image"] for each in version["spec"]["relatedImages"]}
    used = {version["metadata"]["annotations"].get("containerImage", "")}
    for deployment in version["spec"]["install"]["spec"]["deployments"]:
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            used.add(container["image"])
            values = [str(each.get("value", "")) for each in container.get("env", [])]
            used |= {value for value in values if _REFERENCE.fullmatch(value)}
    for example in json.loads(version["metadata"]["annotations"].get("alm-examples", "[]")):
        used |= {text for key, text in example.get("spec", {}).items() if key in {"image", "initImage"}}
    yield from (f"image {each}: not in spec.relatedImages" for each in sorted(used - related))
    for each in sorted(related):
        if not _REFERENCE.fullmatch(each) or (pinned and "@sha256:" not in each):
            yield f"image {each}: expected a reference with a registry" + (" and a digest" if pinned else "")


def _dependencies(content: Mapping[str, str]) -> Iterator[str]:
    for each in load_yaml(content.get("metadata/dependencies.yaml", "dependencies: []"))["dependencies"]:
        if each["type"] != "olm.package" or not each["value"].get("packageName") or not each["value"].get("version"):
            yield f"metadata/dependencies.yaml: found {each}, expected a package and a range of versions"


def catalog_problems(blobs: Sequence[Object]) -> list[str]:
    """What is wrong with the blobs of a catalog."""
    found: list[str] = []
    packages = {each["name"]: each for each in blobs if each["schema"] == "olm.package"}
    bundles = {(each["package"], each["name"]) for each in blobs if each["schema"] == "olm.bundle"}
    channels = [each for each in blobs if each["schema"] == "olm.channel"]
    for kind, keys in (
        ("package", [each["name"] for each in blobs if each["schema"] == "olm.package"]),
        ("channel", [f"{each['package']} {each['name']}" for each in channels]),
        ("bundle", [f"{each['package']} {each['name']}" for each in blobs if each["schema"] == "olm.bundle"]),
    ):
        found += [f"{kind} {key}: found {count} times" for key, count in Counter(keys).items() if count > 1]
    for name, package in packages.items():
        if package["defaultChannel"] not in {each["name"] for each in channels if each["package"] == name}:
            found.append(f"package {name}: the default channel {package['defaultChannel']!a} does not exist")
    used: set[tuple[str, str]] = set()
    for channel in channels:
        found += _channel(channel, packages, bundles)
        used |= {(channel["package"], entry["name"]) for entry in channel["entries"]}
    found += [f"bundle {name}: in no channel of {package}" for package, name in sorted(bundles - used)]
    for each in blobs:
        if each["schema"] == "olm.bundle":
            kinds = Counter(prop["type"] for prop in each["properties"])
            if kinds["olm.package"] != 1 or not kinds["olm.gvk"]:
                found.append(f"bundle {each['name']}: expected one property olm.package, and one olm.gvk for each kind")
    return found


def _channel(channel: Object, packages: Mapping[str, Object], bundles: set[tuple[str, str]]) -> Iterator[str]:
    name = f"channel {channel['package']} {channel['name']}"
    entries = {each["name"]: each for each in channel["entries"]}
    if channel["package"] not in packages:
        yield f"{name}: its package does not exist"
    if len(entries) != len(channel["entries"]):
        yield f"{name}: found an entry twice"
    for each in entries:
        if (channel["package"], each) not in bundles:
            yield f"{name}: found the entry {each} without a bundle"
    replaced = {target for each in entries.values() for target in (each.get("replaces"), *each.get("skips", []))}
    heads = [each for each in entries if each not in replaced]
    if len(heads) != 1:
        yield f"{name}: found the heads {heads}, expected one; add replaces or skips"
    reached: set[str] = set()
    current = heads[0] if heads else ""
    while current in entries and current not in reached:
        reached |= {current, *entries[current].get("skips", [])}
        current = entries[current].get("replaces", "")
    if stranded := sorted(set(entries) - reached):
        yield f"{name}: no path of updates leads from {', '.join(stranded)} to the head"
