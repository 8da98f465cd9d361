"""A release with a real registry, verified by cosign and Helm, and installed on a cluster without any registry."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from customresources import resource
from manifests import kubectl
from releases import VERSION, write_images

from release import artefacts, build, images, oci, signing, verify
from release.errors import ReleaseError
from release.registry import Registry

from .build import tool
from .cluster import Cluster
from .machine import REPOSITORY, wait_until
from .node import Node
from .settings import REGISTRIES

pytestmark = pytest.mark.cluster

REQUIRED = os.environ.get("ACCELPLANE_RELEASE") == "required"
NAME = f"accelplane-{VERSION}"
# No node can reach it: its images must be those of the archive.
OFFLINE_REGISTRY = "registry.invalid/accelplane"
RESOURCE = "gpu.intel.com/i915"
SYSTEM = "inteldeviceplugins-system"
# Images that are started.
REAL = ("accelplane", "intel-gpu-plugin", "intel-deviceplugin-operator")


def program(name: str) -> Path:
    """A program of `make tools`. Skips the test if it is not built, or fails it with ACCELPLANE_RELEASE=required."""
    if (found := tool(name)).exists():
        return found
    message = f"{name} is not built: make tools TOOLS={name}"
    if REQUIRED:
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a registry with a free port."""
    directory = tmp_path_factory.mktemp("registry")
    log = directory / "log"
    configuration = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
        # Nodes of the cluster have another loopback interface.
        "http": {"addr": "0.0.0.0:0"},
        "log": {"formatter": "json"},
    }
    (directory / "config.yml").write_text(json.dumps(configuration))
    with (
        log.open("w") as output,
        subprocess.Popen(
            [program("registry"), "serve", directory / "config.yml"], stdout=output, stderr=output
        ) as process,
    ):
        try:
            yield _address(log)
        finally:
            process.terminate()


def _address(log: Path) -> str:
    def find() -> str:
        for line in log.read_text().splitlines():
            message = str(json.loads(line).get("msg")) if line.startswith("{") else ""
            if message.startswith("listening on "):
                return f"127.0.0.1:{message.rpartition(':')[2]}"
        return ""

    wait_until(find, "the registry")
    with urlopen(f"http://{find()}/v2/", timeout=60) as answer:
        assert answer.status == 200
    return find()


@pytest.fixture(scope="module")
def released(registry: str, tmp_path_factory: pytest.TempPathFactory) -> build.Plan:
    """A release with small images, in a directory and in the registry."""
    root = tmp_path_factory.mktemp("release")
    return make(root, f"{registry}/accelplane", push=True)


def make(root: Path, address: str, *, push: bool = False, trees: tuple[str, ...] = ("gpu_plugin",)) -> build.Plan:
    os.environ.setdefault("KUBECTL", kubectl())
    if not (root / "images").exists():
        write_images(root / "images")
    signing.generate(root / "key")
    plan = build.Plan(
        root=REPOSITORY, out=root / "out", version=VERSION, key=root / "key", registry=address, push=push,
        prebuilt=root / "images", draft=True, trees=trees,
    )  # fmt: skip
    build.make(plan, lambda _: None)
    return plan


def key_of(plan: build.Plan) -> Path:
    return plan.key.with_name("key.pub")


def test_all_checks_pass_with_a_real_registry(released: build.Plan) -> None:
    release = verify.Release(
        out=released.out, key=key_of(released), version=VERSION, draft=True, registry=released.registry
    )
    found = list(verify.verify(release))
    assert [(each.name, each.problem) for each in found if each.problem] == []
    assert [each.name for each in found] == list(verify.CHECKS)


def cosign(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("cosign"), *map(str, words)], capture_output=True, text=True, check=False)


def test_cosign_accepts_the_signatures(released: build.Plan, tmp_path: Path) -> None:
    out, offline = released.out, ("--insecure-ignore-tlog", "--key")
    signing.generate(tmp_path / "other")
    for key, accepted in ((key_of(released), True), (tmp_path / "other.pub", False)):
        file = cosign("verify-blob", *offline, key, "--signature", out / "SHA256SUMS.sig", out / "SHA256SUMS")
        assert (file.returncode == 0) == accepted, file.stderr
        for name in ("accelplane", "charts/accelplane", "onload-operator-bundle"):
            reference = f"{released.registry}/{name}:{VERSION}"
            image = cosign("verify", "--allow-http-registry", *offline, key, reference)
            assert (image.returncode == 0) == accepted, image.stderr
        statement = ("--type", "slsaprovenance1", "--signature", out / "provenance.dsse.json")
        wheel = cosign("verify-blob-attestation", *offline, key, *statement, out / f"{NAME}-py3-none-any.whl")
        assert (wheel.returncode == 0) == accepted, wheel.stderr
    other = cosign("verify-blob-attestation", *offline, key_of(released), *statement, out / "CHANGELOG.md")
    assert other.returncode != 0


def test_cosign_accepts_the_signatures_that_the_installer_pushes(released: build.Plan, tmp_path: Path) -> None:
    with tarfile.open(released.out / f"{NAME}-offline.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    mirror = f"{released.registry.partition('/')[0]}/mirror"
    installer = [sys.executable, "-I", tmp_path / f"{NAME}-offline/install.py", "push", mirror]
    subprocess.run(installer, check=True, capture_output=True)
    words = ("verify", "--allow-http-registry", "--insecure-ignore-tlog", "--key", key_of(released))
    listed = images.load(released.out / "images.json")
    for name in ("accelplane", "intel-gpu-plugin", "charts/accelplane"):
        found = cosign(*words, f"{mirror}/{name}:{VERSION}")
        assert found.returncode == 0, found.stderr
    other = json.loads(oci.blob(released.out / "images", listed.digests["accelplane"]).read_bytes())
    descriptor = {"digest": listed.digests["accelplane"], "mediaType": other["mediaType"]}
    Registry(mirror).push("intel-gpu-plugin", released.out / "images", descriptor, [VERSION])
    assert cosign(*words, f"{mirror}/intel-gpu-plugin:{VERSION}").returncode != 0


def test_helm_pulls_the_charts(released: build.Plan, tmp_path: Path) -> None:
    chart = f"oci://{released.registry}/charts/accelplane"
    command = [program("helm"), "pull", "--plain-http", chart, "--version", VERSION, "--destination", tmp_path]
    homes = {f"HELM_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}
    subprocess.run(command, env={**os.environ, **homes}, check=True, capture_output=True)
    pulled = tmp_path / f"accelplane-{VERSION}.tgz"
    assert pulled.read_bytes() == (released.out / f"charts/accelplane-{VERSION}.tgz").read_bytes()


@pytest.fixture(scope="module")
def tampered(registry: str, tmp_path_factory: pytest.TempPathFactory) -> build.Plan:
    """A release whose registry has another image of it under the tag of the GPU plugin."""
    plan = make(tmp_path_factory.mktemp("tampered"), f"{registry}/tampered", push=True)
    other = images.load(plan.out / "images.json").digests["accelplane"]
    content = json.loads(oci.blob(plan.out / "images", other).read_bytes())
    descriptor = {"digest": other, "mediaType": content["mediaType"]}
    Registry(plan.registry).push("intel-gpu-plugin", plan.out / "images", descriptor, [VERSION])
    return plan


def test_another_image_under_the_tag_is_detected(tampered: build.Plan) -> None:
    release = verify.Release(
        out=tampered.out, key=key_of(tampered), version=VERSION, draft=True, registry=tampered.registry
    )
    other = images.load(tampered.out / "images.json").digests["accelplane"]
    with pytest.raises(ReleaseError, match=f"intel-gpu-plugin:{VERSION}: found {other}, expected"):
        verify.registry_digests(release)


def test_cosign_rejects_another_image_under_the_tag(tampered: build.Plan) -> None:
    # The signature belongs to the digest, not to the tag.
    words = ("verify", "--allow-http-registry", "--insecure-ignore-tlog", "--key", key_of(tampered))
    assert cosign(*words, f"{tampered.registry}/intel-gpu-plugin:{VERSION}").returncode != 0


# Installation.


@pytest.fixture(scope="module")
def real_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, of which those of the agent and of the GPU plugin are real."""
    root = tmp_path_factory.mktemp("real")
    target = root / "real"
    words = [f"OUT={target}", "PLATFORMS=linux/amd64", f"IMAGES={','.join(REAL)}"]
    result = subprocess.run(["make", "images", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if result.returncode:
        if REQUIRED:
            pytest.fail(result.stderr)
        pytest.skip(f"make images: {result.stderr.strip().splitlines()[-1]}")
    listed = write_images(root / "images")
    for name in REAL:
        shutil.rmtree(root / "images" / name)
        shutil.move(target / name, root / "images" / name)
    others = tuple(each for each in listed.images if each.name not in REAL)
    written = artefacts.images_json(images.Images(VERSION, (*images.load(target / "images.json").images, *others)))
    artefacts.write_json(root / "images/images.json", written)
    return root / "images"


@pytest.fixture
def offline(real_images: Path, tmp_path: Path) -> Path:
    """The unpacked archive of a release with real images."""
    (tmp_path / "images").symlink_to(real_images)
    plan = make(tmp_path, OFFLINE_REGISTRY, trees=("gpu_plugin", "operator/default"))
    with tarfile.open(plan.out / f"{NAME}-offline.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / f"{NAME}-offline"


@pytest.fixture
def install(offline: Path, cluster: Cluster, node: Node, namespace: str) -> Iterator[Callable[..., str]]:
    """Runs the installer, with ctr of the node and kubectl of the cluster."""

    def run(*words: str | Path) -> str:
        command = [sys.executable, "-I", offline / "install.py", *words]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=node.environment())
        assert result.returncode == 0, result.stderr
        return result.stdout

    yield run
    cluster.kubectl("delete", "daemonset", "--all", "-n", namespace, "--wait")
    wait_until(lambda: not node.allocatable(RESOURCE), "the end of the cards")


def test_the_archive_installs_without_registry(
    install: Callable[..., str], offline: Path, cluster: Cluster, node: Node, namespace: str
) -> None:
    assert "are unchanged" in install("verify", "--key", offline.parent / "key.pub")
    ctr = node.enter([cluster.assets.program("ctr")])
    install("load", "--ctr", shlex.join(map(str, ctr)))
    program = [cluster.assets.program("kubectl"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={namespace}"]
    install("apply", "--kubectl", shlex.join(map(str, program)), "gpu_plugin")
    wait_until(lambda: node.allocatable(RESOURCE) == 2, "both cards", 60)
    pods = cluster.get(f"/api/v1/namespaces/{namespace}/pods")
    assert pods
    (pod,) = pods["items"]
    digest = images.load(offline / "images.json").digests["intel-gpu-plugin"]
    assert pod["spec"]["containers"][0]["image"] == f"{OFFLINE_REGISTRY}/intel-gpu-plugin:{VERSION}@{digest}"


def test_the_operator_of_a_release_fills_in_a_tag_and_runs_its_digest(
    install: Callable[..., str], offline: Path, cluster: Cluster, node: Node, namespace: str
) -> None:
    ctr = node.enter([cluster.assets.program("ctr")])
    install("load", "--ctr", shlex.join(map(str, ctr)))
    kubectl_of_cluster = shlex.join(map(str, [cluster.assets.program("kubectl"), f"--kubeconfig={cluster.kubeconfig}"]))
    install("apply", "--kubectl", kubectl_of_cluster, "operator/default")
    path = "/apis/deviceplugin.intel.com/v1/gpudeviceplugins"
    try:
        # Until the webhooks are ready, the API server refuses the resource.
        wait_until(lambda: cluster.request("POST", path, resource("gpu", "mine"))[0] == 201, "the resource", 120)
        wait_until(lambda: node.allocatable(RESOURCE) == 2, "both cards", 120)
        created = cluster.get(f"{path}/mine")
        daemonset = cluster.get(f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/intel-gpu-plugin-mine")
        assert created
        assert daemonset
        tag = f"{OFFLINE_REGISTRY}/intel-gpu-plugin:{VERSION}"
        digest = images.load(offline / "images.json").digests["intel-gpu-plugin"]
        assert created["spec"]["image"] == tag
        (container,) = daemonset["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"{tag}@{digest}"
    finally:
        cluster.kubectl("delete", "gpudeviceplugin", "mine", "--ignore-not-found")
        wait_until(lambda: not node.allocatable(RESOURCE), "the end of the cards", 60)
        manifest = offline / "manifests/operator/default.yaml"
        cluster.kubectl("delete", "--ignore-not-found", "--wait", f"--filename={manifest}")


def test_helm_installs_the_chart_of_the_registry_and_the_node_pulls_its_images_by_digest(
    registry: str, real_images: Path, cluster: Cluster, node: Node, *, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "images").symlink_to(real_images)
    plan = make(tmp_path, f"{registry}/real", push=True)
    # The registry has the address that the release names, for the node as well.
    server = f"http://{cluster.addresses.host}:{registry.rpartition(':')[2]}"
    hosts = node.path(f"{REGISTRIES}/{registry}/hosts.toml")
    hosts.parent.mkdir(parents=True, exist_ok=True)
    hosts.write_text(f'server = "{server}"\n')
    homes = {f"HELM_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}

    def helm(*words: str) -> None:
        command = [program("helm"), f"--namespace={namespace}", f"--kubeconfig={cluster.kubeconfig}", *words]
        result = subprocess.run(command, env={**os.environ, **homes}, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr

    helm("install", "x", f"oci://{plan.registry}/charts/accelplane", "--plain-http", "--version", VERSION)
    wait_until(lambda: node.allocatable(RESOURCE) == 2, "both cards", 120)
    pods = cluster.get(f"/api/v1/namespaces/{namespace}/pods")
    assert pods
    (pod,) = pods["items"]
    digest = images.load(plan.out / "images.json").digests["accelplane"]
    assert pod["spec"]["containers"][0]["image"] == f"{plan.registry}/accelplane:{VERSION}@{digest}"
    assert pod["status"]["containerStatuses"][0]["imageID"] == f"{plan.registry}/accelplane@{digest}"
    helm("uninstall", "x", "--wait")
    wait_until(lambda: not node.allocatable(RESOURCE), "the end of the cards")
