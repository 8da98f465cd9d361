"""Bundles and catalogs for OLM: made from the kustomizations, and checked field by field."""

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cluster.build import tool
from manifests import DEPLOY, REPOSITORY, kubectl, own_image, render
from releases import VERSION, digest_of, image_list

from accelplane.operator.images import named_images, upgrade_reference
from accelplane.operator.models import GpuSpec
from accelplane.operator.settings import ImagePolicy, overrides
from release import changelog, oci
from release.errors import ReleaseError
from release.images import Image, Images, References, load
from release.kustomize import load_yaml, write_yaml
from release.olm import bundle, catalog, checks
from release.olm.products import DEVICE_PLUGINS, ONLOAD, PRODUCTS, Product, Sources

Object = dict[str, Any]
REGISTRY = "registry.example:5000/accelplane"
BOTH = pytest.mark.parametrize("product", PRODUCTS.values(), ids=list(PRODUCTS))


@cache
def sources(package: str) -> Sources:
    product = PRODUCTS[package]
    return Sources(tuple(render(DEPLOY / product.tree)), tuple(render(DEPLOY / product.samples)))


@cache
def _content(package: str) -> tuple[tuple[str, str], ...]:
    kubectl()
    options = bundle.Options(
        references=References(REGISTRY, VERSION, image_list().digests),
        created="2030-01-02T03:04:05Z",
        repository="https://git.example/accelplane",
    )
    return tuple(bundle.files(PRODUCTS[package], sources(package), options).items())


def content(product: Product) -> dict[str, str]:
    return dict(_content(product.package))


def version_of(product: Product) -> Object:
    return load_yaml(content(product)[f"manifests/{product.package}.clusterserviceversion.yaml"])


def pinned(name: str) -> str:
    return f"{REGISTRY}/{name}@{digest_of(name)}"


@BOTH
def test_bundles_have_no_problems(product: Product) -> None:
    assert checks.bundle_problems(content(product)) == []


@BOTH
def test_the_installation_is_that_of_the_kustomization(product: Product) -> None:
    version, rendered = version_of(product), sources(product.package)
    install = version["spec"]["install"]["spec"]
    (deployment,) = install["deployments"]
    original = rendered.one("Deployment")
    assert deployment["name"] == original["metadata"]["name"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    expected = original["spec"]["template"]["spec"]["containers"][0]
    for field in ("args", "command", "resources", "securityContext", "livenessProbe", "readinessProbe", "ports"):
        assert container.get(field) == expected.get(field)
    assert container["image"] == version["metadata"]["annotations"]["containerImage"] == pinned(product.image)
    account = original["spec"]["template"]["spec"]["serviceAccountName"]
    (cluster,) = install["clusterPermissions"]
    roles = {each["metadata"]["name"]: each["rules"] for each in rendered.of_kind("ClusterRole")}
    bound = [each["roleRef"]["name"] for each in rendered.of_kind("ClusterRoleBinding")]
    assert cluster == {"serviceAccountName": account, "rules": [rule for name in bound for rule in roles[name]]}
    assert len(bound) > 0


@BOTH
def test_no_environment_variable_is_lost_except_names_of_webhook_objects(product: Product) -> None:
    container = version_of(product)["spec"]["install"]["spec"]["deployments"][0]["spec"]["template"]["spec"][
        "containers"
    ][0]
    original = sources(product.package).one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    lost = {each["name"] for each in original["env"]} - {each["name"] for each in container["env"]}
    # The variables <IMAGE>_SHA have the digests of the plugin images.
    related = {f"RELATED_IMAGE_{name.removesuffix('_SHA')}" for name in product.operands}
    assert lost <= {"WEBHOOK_SERVICE", "MUTATING_WEBHOOK_CONFIGURATION", "VALIDATING_WEBHOOK_CONFIGURATION"} | related
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert {name: values[name] for name in product.operands} == {
        name: pinned(image) for name, image in product.operands.items()
    }


def test_the_operator_runs_the_images_of_the_bundle() -> None:
    container = version_of(DEVICE_PLUGINS)["spec"]["install"]["spec"]["deployments"][0]["spec"]["template"]["spec"][
        "containers"
    ][0]
    policy = ImagePolicy(overrides=overrides({each["name"]: each.get("value", "") for each in container["env"]}))
    for name in DEVICE_PLUGINS.operands.values():
        assert policy.reference(name) == pinned(name)
    spec = GpuSpec(image=own_image("intel-gpu-plugin"))
    used = {field: upgrade_reference(reference, policy) for field, reference in named_images(spec).items()}
    assert used == {"image": pinned("intel-gpu-plugin")}


def test_olm_mounts_the_certificates_and_names_the_webhooks() -> None:
    version = version_of(DEVICE_PLUGINS)
    pod = version["spec"]["install"]["spec"]["deployments"][0]["spec"]["template"]["spec"]
    assert "volumes" not in pod
    assert "volumeMounts" not in pod["containers"][0]
    rendered = sources(DEVICE_PLUGINS.package)
    expected = [
        each for configuration in rendered.objects if "webhooks" in configuration for each in configuration["webhooks"]
    ]
    found = version["spec"]["webhookdefinitions"]
    assert [each["generateName"] for each in found] == [each["name"] for each in expected]
    for each, original in zip(found, expected, strict=True):
        assert each["webhookPath"] == original["clientConfig"]["service"]["path"]
        assert (each["rules"], each["failurePolicy"]) == (original["rules"], original["failurePolicy"])
        assert (each["targetPort"], each["deploymentName"]) == (9443, "inteldeviceplugins-controller-manager")


def test_roles_that_other_objects_refer_to_are_in_the_bundle() -> None:
    kinds = {(each["kind"], each["metadata"]["name"]) for each in map(load_yaml, _manifests(DEVICE_PLUGINS))}
    assert {
        ("ClusterRole", "inteldeviceplugins-gpu-manager-role"),
        ("ClusterRole", "inteldeviceplugins-metrics-reader"),
        ("Service", "inteldeviceplugins-controller-manager-metrics-service"),
    } <= kinds
    assert not {kind for kind, _ in kinds} & {"Namespace", "Secret", "Issuer", "Certificate", "Deployment"}
    accounts = {
        each["serviceAccountName"] for each in version_of(DEVICE_PLUGINS)["spec"]["install"]["spec"]["permissions"]
    }
    assert accounts == {"inteldeviceplugins-controller-manager", "inteldeviceplugins-plugins"}


def _manifests(product: Product) -> list[str]:
    found = content(product)
    return [found[name] for name in bundle.parts(found)]


def test_onload_has_its_account_recipe_and_dependency() -> None:
    version = version_of(ONLOAD)
    accounts = {each["serviceAccountName"] for each in version["spec"]["install"]["spec"]["permissions"]}
    assert accounts == {"onload-operator-controller-manager", "onload-operator-sa"}
    (config_map,) = [each for each in map(load_yaml, _manifests(ONLOAD)) if each["kind"] == "ConfigMap"]
    (example,) = json.loads(version["metadata"]["annotations"]["alm-examples"])
    build = example["spec"]["onload"]["kernelMappings"][0]["build"]
    assert build["dockerfileConfigMap"]["name"] == config_map["metadata"]["name"]
    required = load_yaml(content(ONLOAD)["metadata/dependencies.yaml"])["dependencies"]
    assert required == [
        {"type": "olm.package", "value": {"packageName": "kernel-module-management", "version": ">=1.1.0 <3.0.0"}}
    ]


@BOTH
def test_a_package_has_its_channels_and_install_modes(product: Product) -> None:
    labels = bundle.labels(content(product))
    channels = {"intel-device-plugins-operator": "stable,alpha", "onload-operator": "alpha"}[product.package]
    assert labels["operators.operatorframework.io.bundle.channels.v1"] == channels
    spec = version_of(product)["spec"]
    assert [each["type"] for each in spec["installModes"] if each["supported"]] == ["AllNamespaces"]
    assert spec["links"] == [{"name": "Source code", "url": "https://git.example/accelplane"}]


def test_older_versions_are_replaced() -> None:
    options = bundle.Options(
        references=References(REGISTRY, "1.2.0"), created="2030-01-02T03:04:05Z", replaces="1.1.0", channels=("fast",)
    )
    found = bundle.files(DEVICE_PLUGINS, sources(DEVICE_PLUGINS.package), options)
    assert checks.bundle_problems(found, pinned=False) == []
    version = load_yaml(found[bundle.parts(found)[0]])
    assert version["spec"]["replaces"] == "intel-device-plugins-operator.v1.1.0"
    assert version["metadata"]["annotations"]["olm.skipRange"] == ">=0.31.0 <1.2.0"
    env = version["spec"]["install"]["spec"]["deployments"][0]["spec"]["template"]["spec"]["containers"][0]["env"]
    # Without digests the images of custom resources are used as they are.
    assert [each["name"] for each in env if each["name"].endswith("_SHA")] == []


def test_an_image_without_digest_is_an_error() -> None:
    references = References(REGISTRY, VERSION, {"intel-deviceplugin-operator": digest_of("x")})
    options = bundle.Options(references=references, created="2030-01-02T03:04:05Z")
    with pytest.raises(ReleaseError, match="found no digest; build it with make images"):
        bundle.files(DEVICE_PLUGINS, sources(DEVICE_PLUGINS.package), options)


def _csv(change: Callable[[Object], None]) -> Callable[[dict[str, str]], None]:
    def apply(files: dict[str, str]) -> None:
        name = bundle.parts(files)[0]
        version = load_yaml(files[name])
        change(version)
        files[name] = write_yaml(version)

    return apply


def _spec(version: Object) -> Object:
    return version["spec"]


def _container(version: Object) -> Object:
    return _pod(version)["containers"][0]


def _annotations(version: Object) -> Object:
    return version["metadata"]["annotations"]


def _pod(version: Object) -> Object:
    return version["spec"]["install"]["spec"]["deployments"][0]["spec"]["template"]["spec"]


def _example(version: Object, change: Callable[[Object], Any]) -> None:
    examples = json.loads(version["metadata"]["annotations"]["alm-examples"])
    change(examples[0])
    version["metadata"]["annotations"]["alm-examples"] = json.dumps(examples)


BROKEN: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "name": (_csv(lambda v: v["metadata"].update(name="x.v1")), "metadata.name: found 'x.v1', expected"),
    "version": (_csv(lambda v: _spec(v).update(version="1.0")), "spec.version: found '1.0', expected a semantic"),
    "field": (_csv(lambda v: _spec(v).pop("displayName")), "spec.displayName: not found"),
    "capability": (_csv(lambda v: _annotations(v).update(capabilities="All")), "capabilities: found 'All'"),
    "category": (_csv(lambda v: _annotations(v).update(categories="Toys")), "categories: found ['Toys']"),
    "time": (_csv(lambda v: _annotations(v).update(createdAt="today")), "createdAt: found 'today'"),
    "modes": (_csv(lambda v: _spec(v)["installModes"].pop()), "spec.installModes: found"),
    "replaces": (_csv(lambda v: _spec(v).update(replaces="other.v1")), "found the older version 'other.v1'"),
    "skip range": (_csv(lambda v: _annotations(v).update({"olm.skipRange": "<9.0.0"})), "skipRange: found"),
    "image": (
        _csv(lambda v: _container(v).update(image="docker.io/x/y:1")),
        "docker.io/x/y:1: not in spec.relatedImages",
    ),
    "tag": (_csv(lambda v: _spec(v)["relatedImages"][0].update(image="a.example/x:1")), "a registry and a digest"),
    "account": (
        _csv(lambda v: _pod(v).update(serviceAccountName="x")),
        "the account x has no permissions",
    ),
    "mount": (_csv(lambda v: _container(v).update(volumeMounts=[{"name": "x", "mountPath": "/x"}])), "no volume x"),
    "rule": (_csv(lambda v: _spec(v)["install"]["spec"]["permissions"][0]["rules"].append({})), "a rule without verbs"),
    "deployment": (_csv(lambda v: _spec(v)["webhookdefinitions"][0].update(deploymentName="x")), "the deployment 'x'"),
    "port": (_csv(lambda v: _spec(v)["webhookdefinitions"][0].update(targetPort=1)), "no container has the port 1"),
    "webhook twice": (
        _csv(lambda v: _spec(v)["webhookdefinitions"].append(_spec(v)["webhookdefinitions"][0])),
        "2 times",
    ),
    "all groups": (
        _csv(lambda v: _spec(v)["webhookdefinitions"][0]["rules"][0].update(apiGroups=["*"])),
        "OLM does not accept",
    ),
    "owned": (_csv(lambda v: _spec(v)["customresourcedefinitions"]["owned"].pop()), "owned definitions only"),
    "example kind": (_csv(lambda v: _example(v, lambda e: e.update(kind="Other"))), "found no DlbDevicePlugin"),
    "example field": (
        _csv(lambda v: _example(v, lambda e: e["spec"].update(imagee=1))),
        "imagee is not in the definition",
    ),
    "example value": (_csv(lambda v: _example(v, lambda e: e["spec"].update(logLevel="x"))), "logLevel"),
    "kind": (lambda f: f.update({"manifests/x.yaml": "kind: Namespace\nmetadata: {name: x}\n"}), "OLM does not create"),
    "namespace": (
        lambda f: f.update({"manifests/x.yaml": "kind: ConfigMap\nmetadata: {name: x, namespace: y}\n"}),
        "found a namespace",
    ),
    "size": (
        lambda f: f.update(
            {"manifests/x.yaml": "kind: ConfigMap\nmetadata: {name: x}\ndata: " + os.urandom(900_000).hex() + "\n"}
        ),
        "compressed bytes, expected at most",
    ),
    "channel": (
        lambda f: f.update({"metadata/annotations.yaml": f["metadata/annotations.yaml"].replace("stable,", "")}),
        "channel.default.v1: found 'stable'",
    ),
    "channel name": (
        lambda f: f.update({"metadata/annotations.yaml": f["metadata/annotations.yaml"].replace("stable,", "a b,")}),
        "channels.v1: found 'a b'",
    ),
    "dependency": (
        lambda f: f.update({"metadata/dependencies.yaml": "dependencies: [{type: x}]"}),
        "expected a package",
    ),
    "no version": (lambda f: f.pop(bundle.parts(f)[0]), "found no file *.clusterserviceversion.yaml"),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=list(BROKEN))
def test_the_checks_find_wrong_fields(broken: Callable[[dict[str, str]], Any], message: str) -> None:
    files = copy.deepcopy(content(DEVICE_PLUGINS))
    broken(files)
    problems = checks.bundle_problems(files)
    assert [each for each in problems if message in each], problems


# Counterpart: the validators of OLM.


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=list(PRODUCTS))
def test_the_validators_of_olm_accept_bundles(product: Product, tmp_path: Path) -> None:
    program = tool("operator-verify")
    if not program.exists():
        pytest.skip("the validators of OLM are not built: make tools TOOLS=operator-verify")
    bundle.write(tmp_path, content(product))
    result = subprocess.run([program, "manifests", tmp_path / "manifests"], capture_output=True, text=True, check=False)
    assert (result.returncode, [line for line in result.stderr.splitlines() if "level=error" in line]) == (0, [])
    for file in tmp_path.glob("manifests/*.yaml"):
        if "kind: CustomResourceDefinition" in file.read_text():
            file.unlink()
    result = subprocess.run([program, "manifests", tmp_path / "manifests"], capture_output=True, text=True, check=False)
    assert "level=error" in result.stderr


# Images of bundles and catalogs.


def test_the_image_of_a_bundle_has_its_files_and_labels(tmp_path: Path) -> None:
    files = content(ONLOAD)
    digest = bundle.layout(files, bundle.labels(files), tmp_path / "one")
    assert bundle.layout(files, bundle.labels(files), tmp_path / "two") == digest
    assert oci.root(tmp_path / "one").digest == digest
    found = {
        descriptor.media_type: (descriptor, text)
        for descriptor, text in oci.walk(tmp_path / "one", oci.root(tmp_path / "one"))
    }
    layer = oci.blob(tmp_path / "one", found[oci.LAYER][0].digest)
    listed = subprocess.run(["tar", "-tzf", layer], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in listed if not name.endswith("/")} == {
        name for name in files if name != "bundle.Dockerfile"
    }
    config = json.loads(oci.blob(tmp_path / "one", found[oci.CONFIG][0].digest).read_bytes())
    assert config["config"]["Labels"] == bundle.labels(files)
    assert oci.verify(tmp_path / "one") == {descriptor.digest for descriptor, _ in found.values()}


def entry(product: Product, version: str, replaces: str = "") -> catalog.Entry:
    options = bundle.Options(
        references=References(REGISTRY, version), created="2030-01-02T03:04:05Z", replaces=replaces, channels=("alpha",)
    )
    files = bundle.files(product, sources(product.package), options)
    return catalog.Entry(files, f"{REGISTRY}/{product.package}-bundle:{version}")


def test_a_catalog_grows_with_every_version(tmp_path: Path) -> None:
    packages = [catalog.blobs(entry(product, "1.0.0")) for product in PRODUCTS.values()]
    catalog.write(tmp_path, packages)
    older = catalog.read(tmp_path)
    assert older == [blob for package in packages for blob in package]
    assert checks.catalog_problems(older) == []
    newer = catalog.blobs(entry(ONLOAD, "1.1.0", "1.0.0"), older)
    assert checks.catalog_problems(newer) == []
    (channel,) = [each for each in newer if each["schema"] == "olm.channel"]
    assert [each["name"] for each in channel["entries"]] == ["onload-operator.v1.0.0", "onload-operator.v1.1.0"]
    assert [each["name"] for each in newer if each["schema"] == "olm.bundle"] == [
        each["name"] for each in channel["entries"]
    ]
    with pytest.raises(ReleaseError, match="has this bundle already"):
        catalog.blobs(entry(ONLOAD, "1.0.0"), older)


def test_a_catalog_describes_kinds_and_images() -> None:
    (found,) = [each for each in catalog.blobs(entry(ONLOAD, "1.0.0")) if each["schema"] == "olm.bundle"]
    values = {each["type"]: each["value"] for each in found["properties"]}
    assert values["olm.package"] == {"packageName": "onload-operator", "version": "1.0.0"}
    assert values["olm.gvk"] == {"group": "onload.amd.com", "kind": "Onload", "version": "v1alpha1"}
    assert values["olm.package.required"]["packageName"] == "kernel-module-management"
    assert {each["image"] for each in found["relatedImages"]} == {
        f"{REGISTRY}/{name}:1.0.0" for name in ("onload-operator", "onload-device-plugin", "onload-operator-bundle")
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blobs: blobs.pop(), "found the entry onload-operator.v1.1.0 without a bundle"),
        (lambda blobs: blobs[1]["entries"][1].pop("replaces"), "found the heads"),
        (lambda blobs: blobs[1]["entries"][0].update(replaces="onload-operator.v1.1.0"), "found the heads []"),
        (lambda blobs: blobs[0].update(defaultChannel="x"), "the default channel 'x' does not exist"),
        (lambda blobs: blobs[1]["entries"].pop(), "in no channel"),
        (lambda blobs: blobs.append(blobs[0]), "package onload-operator: found 2 times"),
        (lambda blobs: blobs[-1]["properties"].clear(), "expected one property olm.package"),
    ],
)
def test_the_checks_find_wrong_catalogs(change: Callable[[list[Object]], Any], message: str) -> None:
    blobs = catalog.blobs(entry(ONLOAD, "1.1.0", "1.0.0"), catalog.blobs(entry(ONLOAD, "1.0.0")))
    assert checks.catalog_problems(blobs) == []
    change(blobs)
    assert [each for each in checks.catalog_problems(blobs) if message in each]


# Make targets.


def test_the_commands_write_bundles_images_and_a_catalog(tmp_path: Path) -> None:
    listed = {
        "version": VERSION,
        "images": [{"name": each.name, "digest": each.digest} for each in image_list().images],
    }
    (tmp_path / "images.json").write_text(json.dumps(listed))
    environment = {**os.environ, "KUBECTL": kubectl(), "SOURCE_DATE_EPOCH": "1893553445"}

    def run(*words: str | Path) -> str:
        command = ["make", "-o", ".venv/.ready", *map(str, words), f"OUT={tmp_path}", f"REGISTRY={REGISTRY}"]
        return subprocess.run(
            command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True
        ).stdout

    run("bundle", f"IMAGES={tmp_path}/images.json", "CHANNELS=fast,stable", "DEFAULT_CHANNEL=stable")
    for product in PRODUCTS.values():
        labels = bundle.labels(bundle.read(tmp_path / product.package))
        assert labels["operators.operatorframework.io.bundle.channel.default.v1"] == "stable"
        assert checks.bundle_problems(bundle.read(tmp_path / product.package)) == []
    run("catalog")
    blobs = catalog.read(tmp_path / "catalog")
    digest = oci.root(tmp_path / "onload-operator-bundle").digest
    assert f"{REGISTRY}/onload-operator-bundle@{digest}" in [each.get("image") for each in blobs]
    assert oci.verify(tmp_path / "catalog-image")
    shutil.rmtree(tmp_path / "catalog")


def test_lists_of_images_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "images.json"
    for text, message in (
        ("", "run make images"),
        ('{"version": "1.0.0", "images": []}', "found no images"),
        ('{"version": "1.0.0", "images": [{"name": "x", "digest": "1"}]}', "found digest '1'"),
        ('{"version": "1.0.0", "images": [{"name": "../x", "digest": "1"}]}', "found the image name '../x'"),
    ):
        file.write_text(text)
        with pytest.raises(ReleaseError, match=message):
            load(file)
    found = Images("1.0.0", (Image("x", digest_of("x"), aliases=("intel/x",)),))
    assert found.digests == {"x": digest_of("x")}


def test_sections_and_versions_of_the_changelog() -> None:
    text = "## [Unreleased]\n\n## [1.1.0] - unreleased\n\n### Added\n\n- b\n\n## [1.0.0] - 2030-01-02\n\n- a\n"
    assert changelog.section(text, "1.1.0") == "### Added\n\n- b\n"
    assert changelog.section(text, "1.0.0") == "- a\n"
    assert changelog.previous(text, "1.1.0") == "1.0.0"
    assert changelog.previous(text, "1.0.0") == ""
    with pytest.raises(ReleaseError, match=r"found no text below ## \[2.0.0\]"):
        changelog.section(text, "2.0.0")
