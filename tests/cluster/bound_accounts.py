"""Service accounts with tokens that are bound to pods, as the kubelets' tokens are."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from accelplane.apiserver import ApiServer, ClientConfig

from . import settings
from .cluster import Cluster

Object = dict[str, Any]
SPACE = "kube-system"


class Account:
    """Requests with a token."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        self._address = (cluster.addresses.control, settings.API_PORT)
        self._tls = ssl.create_default_context(cadata=cluster.authority.decode())
        self._token = token

    def request(
        self, method: str, path: str, body: Object | None = None, content: str = "application/json"
    ) -> tuple[int, Any]:
        connection = http.client.HTTPSConnection(*self._address, context=self._tls, timeout=10)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content}
        # The API server compares `data` of other drivers as text, which has no spaces.
        text = None if body is None else json.dumps(body, separators=(",", ":"))
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        try:
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def create(cluster: Cluster, path: str, document: Object) -> Object:
    status, answer = cluster.request("POST", path, document)
    assert status == 201, answer
    return answer


def bound_token(cluster: Cluster, account: str, pod: str, node: str) -> str:
    """The token of a pod of the account on a node."""
    spec = {"serviceAccountName": account, "nodeName": node, "containers": [{"name": "a", "image": "a"}]}
    created = create(cluster, f"/api/v1/namespaces/{SPACE}/pods", {"metadata": {"name": pod}, "spec": spec})
    reference = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": created["metadata"]["uid"]}
    path = f"/api/v1/namespaces/{SPACE}/serviceaccounts/{account}/token"
    return str(create(cluster, path, {"spec": {"audiences": [], "boundObjectRef": reference}})["status"]["token"])


def api_of(cluster: Cluster, token: str, directory: Path) -> ApiServer:
    """The API server with a token; files for it are in the directory."""
    authority, file = directory / "ca.crt", directory / "token"
    authority.write_bytes(cluster.authority)
    file.write_text(token)
    server = f"https://{cluster.addresses.control}:{settings.API_PORT}"
    return ApiServer(ClientConfig(server=server, authority=str(authority), token=str(file)))
