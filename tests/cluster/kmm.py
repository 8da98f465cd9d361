"""Kernel Module Management (KMM) in a cluster of the tests: its API, and a test double of its controllers.

    with installed(cluster, 1) as kmm:
        kmm.set_knobs(fail_load="node-2")       # the module cannot be loaded on this node

The double runs on the control machine. It follows real nodes, where its pods run `modprobe` of their images, and nodes
of kwok, where it sets the status of its pods itself.
"""

from __future__ import annotations

import http
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from .cluster import Cluster
from .kmm_controller import KNOBS
from .kmm_decisions import NAME_LABEL, Generation, ModuleKey
from .kmm_definitions import (
    GROUP,
    MODULES,
    NODE_CONFIGS,
    POLICY,
    REJECT_ALL,
    VERSION,
    definitions,
    rejecting_webhook,
    webhook,
)
from .kmm_kinds import Knobs
from .machine import REPOSITORY, Daemon, wait_until
from .objects import Object

_POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


class Kmm:
    """One installation."""

    def __init__(self, cluster: Cluster, generation: Generation) -> None:
        self.cluster = cluster
        self.generation: Generation = generation
        name = f"kmm-{generation}"
        daemons = cluster.control.daemons
        command = [sys.executable, "-m", "tests.cluster.kmm_controller", str(generation)]
        environment = {"KUBECONFIG": "/etc/kubernetes/admin.conf", "PYTHONPATH": str(REPOSITORY)}
        self.daemon: Daemon = daemons.get(name) or cluster.control.add_daemon(name, command, environment=environment)

    def install(self) -> None:
        """Adds the API and starts the double."""
        manifests = definitions(self.generation)
        self.cluster.apply(*manifests)
        for each in manifests:
            crd = f"crd/{each['metadata']['name']}"
            self.cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", crd)
        self.daemon.start()

    def uninstall(self) -> None:
        """Stops the double, and removes the API with all objects."""
        if self.daemon.running:
            self.daemon.stop()
        self.set_knobs()
        self.remove_webhooks()
        for module in self.modules():
            self._release(module)
        for each in definitions(self.generation):
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{each['metadata']['name']}"
            self.cluster.request("DELETE", path)
            wait_until(lambda path=path: self.cluster.get(path) is None, f"{path}: deleted")

    # Knobs

    def set_knobs(self, **knobs: Any) -> None:
        """Sets the fields of `Knobs`; others get their defaults."""
        data = {"knobs": msgspec.json.encode(Knobs(**knobs)).decode()}
        metadata = {"name": KNOBS.name, "namespace": KNOBS.namespace}
        self.cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    def enable_webhook(self) -> None:
        """Enables the validation of KMM's webhook."""
        self.cluster.apply(*webhook(self.generation))
        self._wait_rejected(module("webhook-test", mappings=[{"containerImage": "i:1"}]))

    def reject_all(self) -> None:
        """Rejects every creation and change of a Module, from the return on."""
        self.cluster.apply(*rejecting_webhook())
        self._wait_rejected(module("webhook-test"))

    def remove_webhooks(self) -> None:
        """Disables the validation of KMM's webhook."""
        for name in (POLICY, REJECT_ALL):
            for path in (f"{_POLICIES}/{name}", f"{_POLICIES.replace('policies', 'policybindings')}/{name}"):
                self.cluster.request("DELETE", path)
        wait_until(lambda: self._dry_run(module("webhook-test")) == http.HTTPStatus.CREATED, "Modules: accepted")

    # State

    def modules(self) -> list[Object]:
        return self._items(MODULES)

    def node_config(self, node: str) -> Object | None:
        return self.cluster.get(f"{NODE_CONFIGS}/{node}")

    def pods(self, key: ModuleKey) -> list[Object]:
        """The loader or worker pods of a module."""
        return self._items(f"/api/v1/namespaces/{key.namespace}/pods?labelSelector={NAME_LABEL}%3D{key.name}")

    def labels(self, node: str) -> dict[str, str]:
        found = self.cluster.get(f"/api/v1/nodes/{node}")
        assert found
        return found["metadata"].get("labels", {})

    def loaded(self, key: ModuleKey) -> set[str]:
        """The nodes that are labelled as having the module."""
        return {each["metadata"]["name"] for each in self._items(f"/api/v1/nodes?labelSelector={key.ready}")}

    def _items(self, path: str) -> list[Object]:
        return (self.cluster.get(path) or {"items": []})["items"]

    def _release(self, module: Object) -> None:
        namespace, name = module["metadata"]["namespace"], module["metadata"]["name"]
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/modules/{name}"
        self.cluster.request("PATCH", path, {"metadata": {"finalizers": None}}, content="application/merge-patch+json")

    def _wait_rejected(self, wrong: Object) -> None:
        # The API server evaluates a new policy after a moment.
        wait_until(lambda: self._dry_run(wrong) == http.HTTPStatus.UNPROCESSABLE_ENTITY, "Modules: rejected")

    def _dry_run(self, manifest: Object) -> int:
        path = f"/apis/{GROUP}/{VERSION}/namespaces/default/modules?dryRun=All"
        return self.cluster.request("POST", path, manifest)[0]


def module(
    name: str,
    *,
    namespace: str = "default",
    version: str = "1",
    selector: dict[str, str] | None = None,
    mappings: list[Object] | None = None,
    **container: Any,
) -> Object:
    """A Module for the kernel module `onload`."""
    default = [{"regexp": ".*", "containerImage": "example.com/onload:${KERNEL_FULL_VERSION}"}]
    loader: Object = {"kernelMappings": default if mappings is None else mappings, **container}
    loader = {"modprobe": {"moduleName": "onload"}, **loader, **({"version": version} if version else {})}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Module",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": selector or {}, "moduleLoader": {"container": loader}},
    }


@contextmanager
def installed(cluster: Cluster, generation: Generation) -> Iterator[Kmm]:
    """KMM for as long as the block lasts."""
    instance = Kmm(cluster, generation)
    instance.install()
    try:
        yield instance
    finally:
        instance.uninstall()
