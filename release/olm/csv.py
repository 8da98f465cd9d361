"""The ClusterServiceVersion: the installation of an operator as OLM performs it.

OLM creates the Deployment, the service accounts and their roles, the webhook configurations and their certificates. It
mounts the certificates itself, and gives names of its own to the webhook configurations.
"""

import copy
import json
from collections.abc import Iterator

from accelplane.operator.images import RELATED_IMAGE, parse
from accelplane.operator.settings import PLACEHOLDER
from release.errors import ReleaseError
from release.images import References
from release.kustomize import Object
from release.olm.products import Product, Sources

# OLM mounts its certificate here.
_CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"  # noqa: S108 - a path in containers
# Names of objects that OLM does not create under these names.
_WITHOUT_OLM = {"WEBHOOK_SERVICE", "MUTATING_WEBHOOK_CONFIGURATION", "VALIDATING_WEBHOOK_CONFIGURATION"}
_WEBHOOK_TYPES = {
    "MutatingWebhookConfiguration": "MutatingAdmissionWebhook",
    "ValidatingWebhookConfiguration": "ValidatingAdmissionWebhook",
}


def cluster_service_version(
    product: Product, sources: Sources, references: References, *, created: str, replaces: str = ""
) -> Object:
    """The ClusterServiceVersion of a product. `created` is a time in RFC 3339, `replaces` an older version."""
    base = product.base()
    version = references.version
    annotations = {
        "alm-examples": json.dumps(_examples(product, sources, references), indent=2),
        **base["annotations"],
        "containerImage": references.of(product.image),
        "createdAt": created,
        "operatorframework.io/suggested-namespace": product.suggested_namespace,
    }
    if product.skip_range:
        annotations["olm.skipRange"] = product.skip_range.format(version=version)
    deployment = sources.one("Deployment")
    upgrade: Object = {"replaces": f"{product.package}.v{replaces}"} if replaces else {}
    if product.skips:
        upgrade["skips"] = list(product.skips)
    spec = {
        **base["spec"],
        "version": version,
        **upgrade,
        "customresourcedefinitions": {"owned": list(_owned(base["definitions"], sources))},
        "install": {
            "strategy": "deployment",
            "spec": {
                **_permissions(sources, deployment),
                "deployments": [_deployment(product, deployment, references)],
            },
        },
        "installModes": [
            {"type": mode, "supported": mode == "AllNamespaces"}
            for mode in ("OwnNamespace", "SingleNamespace", "MultiNamespace", "AllNamespaces")
        ],
        "relatedImages": [
            {"name": name, "image": references.of(name)}
            for name in (product.image, *dict.fromkeys(product.operands.values()))
        ],
    }
    if webhooks := list(_webhooks(sources, deployment)):
        spec["webhookdefinitions"] = webhooks
    return {
        "apiVersion": "operators.coreos.com/v1alpha1",
        "kind": "ClusterServiceVersion",
        "metadata": {
            "name": f"{product.package}.v{version}",
            "namespace": "placeholder",
            "annotations": annotations,
            "labels": {"operatorframework.io/arch.amd64": "supported", "operatorframework.io/os.linux": "supported"},
        },
        "spec": spec,
    }


def _owned(texts: dict[str, Object], sources: Sources) -> Iterator[Object]:
    definitions = sources.of_kind("CustomResourceDefinition")
    unknown = {each["spec"]["names"]["kind"] for each in definitions} ^ set(texts)
    if unknown:
        raise ReleaseError(
            f"definitions: found or missing {', '.join(sorted(unknown))}; update the texts of the bundle"
        )
    for each in definitions:
        kind = each["spec"]["names"]["kind"]
        for version in each["spec"]["versions"]:
            name = each["metadata"]["name"]
            yield {"name": name, "kind": kind, "version": version["name"], **texts[kind]}


def _examples(product: Product, sources: Sources, references: References) -> list[Object]:
    """The samples of the owned kinds, with the images of the release."""
    kinds = {each["spec"]["names"]["kind"] for each in sources.of_kind("CustomResourceDefinition")}
    found: list[Object] = []
    for sample in copy.deepcopy([each for each in sources.samples if each["kind"] in kinds]):
        spec = sample.get("spec", {})
        for field in ("image", "initImage", "levelZeroImage"):
            if str(spec.get(field, "")).startswith(f"{PLACEHOLDER}/"):
                spec[field] = references.of(parse(spec[field]).image)
        sample["metadata"].pop("namespace", None)
        found.append(sample)
    if not found:
        raise ReleaseError(f"{product.samples}: found no examples of the owned kinds")
    return found


def _deployment(product: Product, deployment: Object, references: References) -> Object:
    spec = copy.deepcopy(deployment["spec"])
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = references.of(product.image)
    # Variables of the operands take the place of RELATED_IMAGE_…: clusters with mirrors pull by digest.
    env = [
        each
        for each in container.get("env", [])
        if each["name"] not in _WITHOUT_OLM | set(product.operands) and not each["name"].startswith(RELATED_IMAGE)
    ]
    if references.digests or product.image == "onload-operator":
        env += [{"name": name, "value": references.of(image)} for name, image in product.operands.items()]
    container["env"] = env
    for holder, field, path in ((container, "volumeMounts", "mountPath"), (pod, "volumes", "")):
        kept = [each for each in holder.get(field, []) if each.get(path) != _CERTIFICATES and each["name"] != "cert"]
        if kept:
            holder[field] = kept
        else:
            holder.pop(field, None)
    return {
        "name": deployment["metadata"]["name"],
        "label": deployment["metadata"].get("labels", {}),
        "spec": spec,
    }


def _permissions(sources: Sources, deployment: Object) -> Object:
    """The rules of each service account, for the cluster and for the operator's namespace."""
    operator = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    cluster = {operator: [rule for role in _bound(sources, "ClusterRole", operator) for rule in role["rules"]]}
    local: dict[str, list[Object]] = {}
    for account in sources.everything("ServiceAccount"):
        name = account["metadata"]["name"]
        local[name] = [rule for role in _bound(sources, "Role", name) for rule in role["rules"]]
    return {
        "clusterPermissions": [{"serviceAccountName": name, "rules": rules} for name, rules in cluster.items()],
        "permissions": [{"serviceAccountName": name, "rules": rules} for name, rules in local.items()],
    }


def _bound(sources: Sources, kind: str, account: str) -> Iterator[Object]:
    roles = {each["metadata"]["name"]: each for each in sources.everything(kind)}
    for binding in sources.everything(f"{kind}Binding"):
        if any(subject["name"] == account for subject in binding["subjects"]):
            name = binding["roleRef"]["name"]
            if name not in roles:
                raise ReleaseError(f"{binding['metadata']['name']}: the role {name} is not part of the kustomization")
            yield roles[name]


def _webhooks(sources: Sources, deployment: Object) -> Iterator[Object]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for configuration in sources.of_kind(*_WEBHOOK_TYPES):
        for webhook in configuration["webhooks"]:
            service = webhook["clientConfig"]["service"]
            (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "webhook-server"]
            kept = ("failurePolicy", "matchPolicy", "objectSelector", "reinvocationPolicy", "rules", "sideEffects")
            yield {
                "type": _WEBHOOK_TYPES[configuration["kind"]],
                "generateName": webhook["name"],
                "deploymentName": deployment["metadata"]["name"],
                "containerPort": 443,
                "targetPort": port,
                "webhookPath": service["path"],
                "admissionReviewVersions": webhook["admissionReviewVersions"],
                **{key: webhook[key] for key in kept if key in webhook},
            }
