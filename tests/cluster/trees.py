"""Applies the objects of trees to a cluster for the time of a test."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .cluster import Cluster
from .objects import Object
from .pki import Credentials


@contextmanager
def applied(cluster: Cluster, objects: Sequence[Object]) -> Iterator[None]:
    """Applies objects as `kubectl apply --kustomize` does, and deletes them afterwards."""
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    cluster.kubectl("apply", "--filename=-", text=document)
    try:
        yield
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "--wait", "--filename=-", text=document)


def tls_secret(namespace: str, name: str, pair: Credentials) -> Object:
    """A Secret as cert-manager fills it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/tls",
        "data": {"tls.crt": encoded(pair.certificate), "tls.key": encoded(pair.key)},
    }


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
