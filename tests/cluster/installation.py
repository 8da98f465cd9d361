"""An installation of the operator on a control plane: definitions, webhooks, and operators as host processes.

The webhooks are reached as in a cluster: configurations lead to the service, its endpoints are the processes, and the
certificates are of the operator's own authority, which it writes into the configurations. Only the endpoints are set by
the test instead of the EndpointSlice controller.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from customresources import resource
from daemonsetplans import plan

from accelplane.operator import models
from accelplane.operator.daemonsets import render
from accelplane.operator.settings import Settings

from .cluster import Cluster
from .machine import REPOSITORY, wait_until
from .objects import endpoints

CRD = REPOSITORY / "deploy" / "operator" / "crd"
NAMESPACE = "operated"
MANAGER = "accelplane-operator"
WEBHOOKS = REPOSITORY / "deploy" / "operator" / "webhook" / "manifests.yaml"
PREFIX = "inteldeviceplugins-"
SERVICE = f"{PREFIX}webhook-service"
KEPT_IN = "own-certificate"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/d1c7b6d5.intel.com"
_API = "/apis/deviceplugin.intel.com/v1"
_HOOKS = "/apis/admissionregistration.k8s.io/v1"
_SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
_DAEMONSETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"
_MERGE = "application/merge-patch+json"

Object = dict[str, Any]


class Operator:
    """One operator; it can be started again when it has ended."""

    def __init__(self, installation: Installation, name: str, port: int, *flags: str, **environment: str) -> None:
        cluster, directory = installation.cluster, installation.directory
        self.name = name
        self.port = port
        self.log = directory / f"{name}.log"
        self.log.write_text("")
        self.process: subprocess.Popen[bytes] | None = None
        self._health = port + 1
        self._command = [
            sys.executable, "-m", "accelplane.cli.operator", f"-kubeconfig={installation.kubeconfig}",
            "-metrics-bind-address=0", f"-health-probe-bind-address={cluster.addresses.host}:{self._health}",
            f"-port={port}", f"-certificate-secret={KEPT_IN}", *flags,
        ]  # fmt: skip
        self._host = cluster.addresses.host
        kept = {name: value for name, value in os.environ.items() if not name.endswith("_SHA")}
        self._environment = {**kept, "DEVICEPLUGIN_NAMESPACE": NAMESPACE, **environment}

    def start(self) -> None:
        """Starts it, and waits until it is ready."""
        self.begin()
        wait_until(self.ready, f"operator {self.name}: ready", 60, hint=f"log: {self.log}")

    def begin(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment
            )

    def ready(self) -> bool:
        assert self.running, f"it has exited:\n{self.text()}"
        connection = http.client.HTTPConnection(self._host, self._health, timeout=10)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)

    def ended(self, seconds: float = 60) -> int:
        """Waits until it has exited, and returns its status."""
        assert self.process
        return self.process.wait(seconds)

    def stop(self) -> None:
        """Stops it as Kubernetes does."""
        self.signal(signal.SIGTERM)
        code = self.ended()
        assert code == 0, f"it answered SIGTERM with {code}:\n{self.text()}"

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        return self.log.read_text()


class Installation:
    """The objects of the cluster for users and administrators, and operators."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self._request: Callable[..., tuple[int, Any]] = cluster.request
        self.directory = directory
        self.kubeconfig = directory / "kubeconfig"
        config = json.loads(cluster.kubeconfig.read_text())
        config["contexts"][0]["context"]["namespace"] = NAMESPACE
        self.kubeconfig.write_text(json.dumps(config))

    @contextmanager
    def one_connection(self) -> Iterator[None]:
        """Sends all requests of the block over one connection, for very many requests."""
        before = self._request
        with self.cluster.connection() as self._request:
            yield
        self._request = before

    # Operators

    @contextmanager
    def operator(self, *flags: str, name: str = "operator", place: int = 0, **environment: str) -> Iterator[Operator]:
        """A ready operator; it must still run at the end of the block, and exit with 0."""
        with self.process(*flags, name=name, place=place, **environment) as operator:
            operator.start()
            yield operator
            operator.stop()
            assert "Traceback" not in operator.text()

    @contextmanager
    def process(self, *flags: str, name: str = "operator", place: int = 0, **environment: str) -> Iterator[Operator]:
        """An operator that can be started, and is stopped at the end of the block."""
        # Below the ephemeral ports, and unique per cluster.
        port = 20_000 + 20 * self.cluster.number + 2 * place
        operator = Operator(self, name, port, *flags, **environment)
        try:
            yield operator
        finally:
            operator.kill()

    # Webhooks

    def configure_webhooks(self, *operators: Operator) -> None:
        """Configures the API server to call the webhooks of these operators only."""
        ports = [{"port": 443, "name": "", "protocol": "TCP"}]
        service = {"metadata": {"name": SERVICE, "namespace": NAMESPACE}, "spec": {"ports": ports}}
        self.cluster.apply({"apiVersion": "v1", "kind": "Service", **service})
        self.serve(*operators)
        for document in yaml.safe_load_all(WEBHOOKS.read_text()):
            document["metadata"]["name"] = PREFIX + document["metadata"]["name"]
            for hook in document["webhooks"]:
                hook["clientConfig"]["service"] |= {"name": SERVICE, "namespace": NAMESPACE}
            self.cluster.apply(document)

    def serve(self, *operators: Operator) -> None:
        """Sets the endpoints of the Service to these operators."""
        wanted = endpoints(
            SERVICE, [operator.port for operator in operators], self.cluster.addresses.host, namespace=NAMESPACE
        )
        kept = {each["metadata"]["name"] for each in wanted}
        for found in (self.cluster.get(_SLICES) or {"items": []})["items"]:
            if found["metadata"]["name"] not in kept:
                self._request("DELETE", f"{_SLICES}/{found['metadata']['name']}")
        for each in wanted:
            self.cluster.apply(each)

    def remove_webhooks(self) -> None:
        for kind in ("mutating", "validating"):
            self._request("DELETE", f"{_HOOKS}/{kind}webhookconfigurations/{PREFIX}{kind}-webhook-configuration")

    def wait_webhooks(self) -> None:
        """Waits until both webhooks are called and their certificates trusted; each is loaded independently."""
        wait_until(lambda: self.active_webhooks() == (True, True), "the webhooks: called", 60)

    def active_webhooks(self) -> tuple[bool, bool]:
        """Whether defaults are set, and whether an error that only the webhook detects is denied."""
        path = f"{_API}/npudeviceplugins?dryRun=All"
        code, created = self._request("POST", path, resource("npu", "asked", nodeSelector={"a": "b"}))
        defaulted = code == http.HTTPStatus.CREATED and "image" in created["spec"]
        code, _ = self._request("POST", path, resource("npu", "asked", image="intel/intel-dsa-plugin:0.31.1"))
        return defaulted, code == http.HTTPStatus.FORBIDDEN

    # Custom resources

    def create(self, manifest: Object) -> Object:
        code, created = self._request("POST", self._path(family_of(manifest)), manifest)
        assert code == http.HTTPStatus.CREATED, created
        return created

    def patch(self, family: str, name: str, change: Object) -> tuple[int, Any]:
        """A merge patch of the spec."""
        return self._request("PATCH", self._path(family, name), {"spec": change}, content=_MERGE)

    def edit(self, family: str, name: str, **change: Any) -> Object:
        code, answer = self.patch(family, name, change)
        assert code == http.HTTPStatus.OK, answer
        return answer

    def delete(self, family: str, name: str) -> None:
        code, answer = self._request("DELETE", self._path(family, name))
        assert code == http.HTTPStatus.OK, answer

    def delete_all(self) -> None:
        """All custom resources and their DaemonSets, and the webhooks' configurations."""
        self.remove_webhooks()
        for family in models.KINDS:
            self._request("DELETE", self._path(family))
        self._request("DELETE", _DAEMONSETS)
        wait_until(lambda: not self.daemonsets(), "the DaemonSets: deleted", 60)

    def resource(self, family: str, name: str) -> Object:
        code, found = self._request("GET", self._path(family, name))
        assert code == http.HTTPStatus.OK, found
        return found

    def condition(self, family: str, name: str, condition: str) -> Object:
        """A condition of the current generation; empty without one."""
        found = self.resource(family, name)
        for each in found.get("status", {}).get("conditions", []):
            if each["type"] == condition and each["observedGeneration"] == found["metadata"]["generation"]:
                return each
        return {}

    def wait_condition(self, family: str, name: str, condition: str, *, holds: bool, words: str = "") -> None:
        """Waits until a condition holds, or does not, and has these words in its message."""

        def is_reached() -> bool:
            current = self.condition(family, name, condition)
            return current.get("status") == str(holds) and words in current["message"]

        wait_until(is_reached, f"{family} {name}: {condition} {holds} {words}", 60)

    # DaemonSets

    def daemonsets(self) -> list[Object]:
        code, found = self._request("GET", _DAEMONSETS)
        assert code == http.HTTPStatus.OK, found
        # Items of a list have no kind.
        return [{"apiVersion": "apps/v1", "kind": "DaemonSet", **each} for each in found["items"]]

    def daemonset(self, family: str, name: str) -> Object:
        """The DaemonSet of a resource, empty without one."""
        found = [each for each in self.daemonsets() if owner(each) == (family, name)]
        assert len(found) < 2, [each["metadata"]["name"] for each in found]
        return found[0] if found else {}

    def is_reconciled(self, family: str, name: str) -> bool:
        """Whether the DaemonSet matches the resource, and its status is of the current generation."""
        resource, existing = self.resource(family, name), self.daemonset(family, name)
        if not existing or resource.get("status", {}).get("observedGeneration") != resource["metadata"]["generation"]:
            return False
        return plan(render(models.decode(resource), Settings(namespace=NAMESPACE)), [existing]).apply is None

    def wait_reconciled(self, family: str, name: str) -> Object:
        """Waits until it is reconciled, and returns the DaemonSet."""
        wait_until(lambda: self.is_reconciled(family, name), f"the DaemonSet of {family} {name}: reconciled", 60)
        return self.daemonset(family, name)

    def _path(self, family: str, name: str = "") -> str:
        return f"{_API}/{family}deviceplugins/{name}".rstrip("/")


def family_of(document: Mapping[str, Any]) -> str:
    return models.BY_KIND[document["kind"]].family


def owner(daemonset: Object) -> tuple[str, str]:
    """Family and name of the resource that a DaemonSet belongs to."""
    (reference,) = daemonset["metadata"].get("ownerReferences", [{"kind": "", "name": ""}])
    kind = models.BY_KIND.get(reference["kind"])
    return (kind.family if kind else "", reference["name"])


@contextmanager
def installed(directory: Path) -> Iterator[Installation]:
    """A control plane with the operator's definitions and two kwok nodes."""
    with Cluster.running([]) as cluster, cluster.namespace(NAMESPACE):
        cluster.kubectl("apply", "--server-side", "--kustomize", CRD)
        cluster.add_kwok_nodes(2, labels={"kubernetes.io/arch": "amd64"})
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", CRD / "bases")
        yield Installation(cluster, directory)
