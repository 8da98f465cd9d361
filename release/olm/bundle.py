"""The files of a bundle: manifests, metadata and the configuration of scorecard tests.

`write` makes the directory that catalogs of operators accept, `layout` the image of it.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from release import oci
from release.images import References
from release.kustomize import Object, load_yaml, write_yaml
from release.olm.csv import cluster_service_version
from release.olm.products import Product, Sources

MEDIA_TYPE = "registry+v1"
# Objects that OLM creates from the ClusterServiceVersion, or that only kustomizations need.
_NOT_IN_BUNDLES = {
    *(
        "Namespace",
        "Deployment",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRoleBinding",
        "Issuer",
        "Certificate",
    ),
    *("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"),
}
_SCORECARD = (
    ("basic", "basic-check-spec"),
    *(("olm", f"olm-{name}") for name in ("bundle-validation", "crds-have-validation", "crds-have-resources")),
    *(("olm", f"olm-{name}") for name in ("spec-descriptors", "status-descriptors")),
)
_SCORECARD_IMAGE = "quay.io/operator-framework/scorecard-test:v1.39.2"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller of `make bundle` can choose. `replaces` is the version before this one in the channels."""

    references: References
    created: str
    channels: tuple[str, ...] = ()
    default_channel: str = ""
    replaces: str = ""
    repository: str = ""


def files(product: Product, sources: Sources, options: Options) -> dict[str, str]:
    """The files of a bundle by path."""
    version = cluster_service_version(
        product, sources, options.references, created=options.created, replaces=options.replaces
    )
    if options.repository:
        version["metadata"]["annotations"]["repository"] = options.repository
        version["spec"]["links"] = [{"name": "Source code", "url": options.repository}]
    found = {f"manifests/{product.package}.clusterserviceversion.yaml": write_yaml(version)}
    for each in _objects(sources, version):
        found[f"manifests/{_file_name(each)}"] = write_yaml(each)
    annotations = _annotations(product, options)
    found["metadata/annotations.yaml"] = write_yaml({"annotations": annotations})
    if product.required_packages:
        required = [
            {"type": "olm.package", "value": {"packageName": name, "version": versions}}
            for name, versions in product.required_packages.items()
        ]
        found["metadata/dependencies.yaml"] = write_yaml({"dependencies": required})
    found["tests/scorecard/config.yaml"] = write_yaml(_scorecard())
    found["bundle.Dockerfile"] = _recipe(annotations)
    return found


def write(directory: Path, content: Mapping[str, str]) -> None:
    """Replaces a directory by these files."""
    shutil.rmtree(directory, ignore_errors=True)
    for name, text in content.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def layout(content: Mapping[str, str], annotations: Mapping[str, str], target: Path) -> str:
    """Writes the image of a bundle as an OCI image layout, and returns the digest of its index."""
    kept = {name: text.encode() for name, text in content.items() if name != "bundle.Dockerfile"}
    return oci.write_data_image(target, kept, labels=annotations)


def labels(content: Mapping[str, str]) -> dict[str, str]:
    """The labels of the image: the annotations of the bundle."""
    return load_yaml(content["metadata/annotations.yaml"])["annotations"]


def _objects(sources: Sources, version: Object) -> Iterator[Object]:
    """The other objects of the installation, and the objects that the examples refer to."""
    webhook_ports = {each["targetPort"] for each in version["spec"].get("webhookdefinitions", [])}
    bound = {each["roleRef"]["name"] for each in sources.of_kind("ClusterRoleBinding")}
    for each in (*sources.objects, *(sample for sample in sources.samples if sample["kind"] == "ConfigMap")):
        if each["kind"] in _NOT_IN_BUNDLES or (each["kind"] == "ClusterRole" and each["metadata"]["name"] in bound):
            continue
        if each["kind"] == "Service" and {port["targetPort"] for port in each["spec"]["ports"]} & webhook_ports:
            continue
        metadata = {key: value for key, value in each["metadata"].items() if key != "namespace"}
        yield {**each, "metadata": metadata}


def _file_name(each: Object) -> str:
    if each["kind"] == "CustomResourceDefinition":
        spec = each["spec"]
        return f"{spec['group']}_{spec['names']['plural']}.yaml"
    group = each["apiVersion"].rpartition("/")[0]
    version = each["apiVersion"].rpartition("/")[2]
    return f"{each['metadata']['name']}_{group}_{version}_{each['kind'].lower()}.yaml".replace("__", "_")


def _annotations(product: Product, options: Options) -> dict[str, str]:
    channels = options.channels or product.channels
    prefix = "operators.operatorframework.io"
    return {
        f"{prefix}.bundle.mediatype.v1": MEDIA_TYPE,
        f"{prefix}.bundle.manifests.v1": "manifests/",
        f"{prefix}.bundle.metadata.v1": "metadata/",
        f"{prefix}.bundle.package.v1": product.package,
        f"{prefix}.bundle.channels.v1": ",".join(channels),
        f"{prefix}.bundle.channel.default.v1": options.default_channel or channels[0],
        f"{prefix}.test.mediatype.v1": "scorecard+v1",
        f"{prefix}.test.config.v1": "tests/scorecard/",
    }


def _scorecard() -> Object:
    tests = [
        {
            "entrypoint": ["scorecard-test", name],
            "image": _SCORECARD_IMAGE,
            "labels": {"suite": suite, "test": f"{name}-test"},
        }
        for suite, name in _SCORECARD
    ]
    return {
        "apiVersion": "scorecard.operatorframework.io/v1alpha3",
        "kind": "Configuration",
        "metadata": {"name": "config"},
        "stages": [{"parallel": True, "tests": tests}],
    }


def _recipe(annotations: Mapping[str, str]) -> str:
    return "\n".join(
        [
            "FROM scratch",
            *(f"LABEL {name}={value}" for name, value in annotations.items()),
            *(f"COPY {each} /{each}/" for each in ("manifests", "metadata", "tests/scorecard")),
            "",
        ]
    )


def read(directory: Path) -> dict[str, str]:
    """The files of a bundle in a directory."""
    return {
        str(file.relative_to(directory)): file.read_text() for file in sorted(directory.rglob("*")) if file.is_file()
    }


def parts(content: Mapping[str, str]) -> Sequence[str]:
    """The manifests of a bundle, the ClusterServiceVersion first."""
    names = [name for name in content if name.startswith("manifests/")]
    return sorted(names, key=lambda name: (not name.endswith(".clusterserviceversion.yaml"), name))
