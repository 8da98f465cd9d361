"""The real cert-manager on a cluster: its programs as pods, with the chart and the definitions of its module.

`make tools TOOLS=cert-manager` compiles the programs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .build import tool
from .cluster import Cluster
from .images import ImageConfig, images_from_directory
from .machine import wait_until
from .objects import Object
from .releases import runner, succeed

NAMESPACE = "cert-manager"
PROGRAMS = ("controller", "webhook", "cainjector")
_REPOSITORY = "localhost/accelplane-test/cert-manager"
_USER = 65532
_API = "/apis/cert-manager.io/v1"


def programs() -> Path:
    """The directory of the programs. Skips the test if they are not built; fails it if they are required."""
    directory = tool("cert-manager").parent
    if not directory.is_dir():
        message = "no cert-manager: run make tools TOOLS=cert-manager"
        if os.environ.get("ACCELPLANE_CERTMANAGER") == "required":
            pytest.fail(message)
        pytest.skip(message)
    return directory


@contextmanager
def cert_manager(cluster: Cluster, directory: Path) -> Iterator[None]:
    """Installs cert-manager as its users do, and removes it."""
    built = programs()
    cluster.import_image(_images(built, directory / "root", directory / "images.tar"))
    chart = _chart(built, directory / "chart")
    run = runner(cluster, NAMESPACE, directory / "helm")
    with cluster.namespace(NAMESPACE):
        succeed(run("install", "cert-manager", chart, *_values(), "--wait", "--timeout=3m"))
        _wait_for_admission(cluster)
        try:
            yield
        finally:
            succeed(run("uninstall", "cert-manager", "--wait"))


def _images(built: Path, root: Path, archive: Path) -> Path:
    """One image for each program, which are all in one layer."""
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text(f"nonroot:x:{_USER}:{_USER}::/:/bin/sh\n")
    for name in PROGRAMS:
        shutil.copyfile(built / name, root / "bin" / name)
        (root / "bin" / name).chmod(0o755)
    images = {f"{_REPOSITORY}-{name}:test": ImageConfig(entrypoint=[f"/bin/{name}"]) for name in PROGRAMS}
    return images_from_directory(archive, images, root)


def _chart(built: Path, chart: Path) -> Path:
    """The chart as it is released: with the definitions among its templates."""
    shutil.copytree(built / "deploy/charts/cert-manager", chart)
    (chart / "Chart.template.yaml").rename(chart / "Chart.yaml")
    for file in (built / "deploy/crds").glob("crd-*.yaml"):
        shutil.copyfile(file, chart / "templates" / file.name)
    return chart


def _values() -> list[str]:
    pairs = {"startupapicheck.enabled": "false", "prometheus.enabled": "false"}
    for program, prefix in (("controller", ""), ("webhook", "webhook."), ("cainjector", "cainjector.")):
        pairs |= {
            f"{prefix}image.repository": f"{_REPOSITORY}-{program}",
            f"{prefix}image.tag": "test",
            f"{prefix}securityContext.runAsUser": str(_USER),
        }
    return ["--set", ",".join(f"{name}={value}" for name, value in pairs.items())]


def _wait_for_admission(cluster: Cluster) -> None:
    """Waits until the webhook of cert-manager admits its objects."""
    issuer = {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Issuer",
        "metadata": {"name": "asked", "namespace": NAMESPACE},
        "spec": {"selfSigned": {}},
    }
    path = f"{_API}/namespaces/{NAMESPACE}/issuers?dryRun=All"
    wait_until(lambda: cluster.request("POST", path, issuer)[0] == 201, "the webhook of cert-manager: ready", 120)


def renew(cluster: Cluster, namespace: str, name: str) -> None:
    """Requests a new certificate, as `cmctl renew` does."""
    path = f"{_API}/namespaces/{namespace}/certificates/{name}"

    def requested() -> bool:
        found: Any = cluster.get(path)
        conditions = [each for each in found["status"]["conditions"] if each["type"] != "Issuing"]
        conditions.append({"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "renewed"})
        body: Object = {**found, "status": {**found["status"], "conditions": conditions}}
        status, _ = cluster.request("PUT", f"{path}/status", body)
        return status == 200

    wait_until(requested, f"certificate {name}: renewal requested", 30)
