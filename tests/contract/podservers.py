"""A kubelet's `/pods` and an API server's pods, behind real TLS, and readers of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tls_peer import Answer, Peer, Request, response, serving

from accelplane.node.pods import Kubelet, PodReader

NODE = "node-1"
I915 = "gpu.intel.com/i915"
MASK = "ZE_AFFINITY_MASK"  # the variable that limits a container to tiles of its cards

Object = dict[str, Any]
Pods = Callable[[], Sequence[Object]]


def gpu_pod(
    name: str, *containers: int, phase: str = "Pending", uid: str = "", env: Sequence[Object] = (), **annotations: str
) -> Object:
    """A pod whose containers request these numbers of cards. `gas_ts="1"` is the annotation `gas-ts`."""
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or f"uid of {name}",
            "annotations": {key.replace("_", "-"): value for key, value in annotations.items()},
        },
        "spec": {
            "nodeName": NODE,
            "containers": [
                {"name": f"c{number}", "env": list(env), "resources": {"requests": {I915: str(count)}}}
                for number, count in enumerate(containers or (1,))
            ],
        },
        "status": {"phase": phase},
    }


def lists(pods: Pods) -> Answer:
    """Answers as the kubelet's `/pods`, or as the API server, page by page."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(request.path).query).items()}
        found, first = list(pods()), int(query.get("continue", "0"))
        end = first + int(query.get("limit", len(found)))
        metadata = {"continue": str(end)} if end < len(found) else {}
        body = {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": found[first:end] or None}
        writer.write(response("200 OK", json.dumps(body).encode()))
        await writer.drain()

    return answer


async def hangs(_request: Request, _writer: asyncio.StreamWriter) -> None:
    """Never answers: the client closes the connection."""
    await asyncio.Event().wait()


class Servers:
    """Both servers with the requests that they got, and the files of their clients."""

    def __init__(self, kubelet: Peer, api: Peer) -> None:
        self.kubelet = kubelet
        self.api = api
        self.trust = kubelet.directory / "ca.crt"

    def reader(self, pod_resources: str = "", *, node: str = NODE, timeout: float = 5.0) -> PodReader:
        """A reader that trusts both."""
        port = urlsplit(self.kubelet.config.server).port
        assert port is not None
        token = str(self.kubelet.directory / "token")
        kubelet = Kubelet("127.0.0.1", node, trust=str(self.trust), token=token, port=port, timeout=timeout)
        return PodReader(kubelet, self.api.api.without_rate_limit(), NODE, pod_resources)

    @property
    def paths(self) -> tuple[list[str], list[str]]:
        """The requests to the kubelet and the API server."""
        return [each.path for each in self.kubelet.requests], [each.path for each in self.api.requests]


@contextlib.asynccontextmanager
async def pod_servers(directory: Path, kubelet: Answer, api: Answer) -> AsyncGenerator[Servers]:
    for name in ("kubelet", "api"):
        (directory / name).mkdir()
    async with serving(directory / "kubelet", kubelet, name=NODE) as first, serving(directory / "api", api) as second:
        yield Servers(first, second)
