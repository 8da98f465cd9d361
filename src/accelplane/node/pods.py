"""The pods of this node, for plugins that allocate devices as the pod says: implements `plugins.base.NodePods`.

The kubelet's `/pods` is fast and lists a pod before it is admitted. After its first failure the API server is used
until the end of the process. Readings are serialized, so that only one list of pods is in memory.

Facts: the kubelet's API (port 10250, `/pods` needs the right to get `nodes/pods`, before Kubernetes 1.33
`nodes/proxy`); a kubelet without a certificate from the cluster's authority writes its own to `pki/kubelet.crt`.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from accelplane.apiserver import SERVICE_ACCOUNT, ApiError, ApiServer, NoCredentials
from accelplane.apiserver.client import ObjectList
from accelplane.apiserver.config import read_source
from accelplane.apiserver.credentials import trust_context
from accelplane.apiserver.discovery import in_cluster as api_server_of_pod
from accelplane.http.client import HttpClient, HttpClientError
from accelplane.kubelet import podresources
from accelplane.logs import v
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.plugins.base import PodsError

log = logging.getLogger(__name__)

PORT = 10250
TIMEOUT = 5.0
ATTEMPTS = 5
# A node has about 200 pods, each of some kilobytes. The manifest's memory limit allows this and a copy of it.
MAX_LIST = 16 * 1024 * 1024
# The API server's pages contain so few pods that pods of the maximum size fit.
PAGE = 10
# Seconds for which the connection to the API server is kept for the next page.
_IDLE = 1.0

T = TypeVar("T")


class KubeletError(Exception):
    """The kubelet did not return a list of pods; the message has the reason."""


class KubeletTimeoutError(KubeletError):
    """The kubelet did not answer in time, or the network did."""


class Kubelet:
    """The kubelet's API at `host`. `trust` and `token` are files, which are read for each request."""

    def __init__(
        self, host: str, node: str, *, trust: str, token: str, port: int = PORT, timeout: float = TIMEOUT
    ) -> None:
        """`node` is the name in the kubelet's certificate."""
        self._trust = trust
        self._token = token
        self._timeout = timeout
        self._http = HttpClient(host, port, context=self._context, server_name=node, idle_timeout=0)
        self.name = f"https://{self._http.authority}/pods"

    async def pods(self) -> Sequence[msgspec.Raw]:
        """The JSON of each pod. Raises `KubeletError`."""
        try:
            async with asyncio.timeout(self._timeout):
                content = await self._get()
        except TimeoutError:
            raise KubeletTimeoutError(f"{self.name}: no complete response within {self._timeout:g} s") from None
        try:
            return msgspec.json.decode(content, type=ObjectList).items or ()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise KubeletError(f"{self.name}: expected a list of pods in JSON: {error}") from None

    async def _get(self) -> bytes:
        try:
            token = read_source(self._token).decode("ascii", "replace").strip()
            fields = (("Accept", "application/json"), ("Authorization", f"Bearer {token}"))
            async with self._http.request("GET", "/pods", fields) as response:
                if response.status != 200:
                    raise KubeletError(f"{self.name}: found status {response.status} {response.phrase}, expected 200")
                return await response.read(MAX_LIST)
        except NoCredentials as error:
            raise KubeletError(str(error)) from None
        except HttpClientError as error:
            kind = KubeletTimeoutError if isinstance(error.__cause__, TimeoutError) else KubeletError
            raise kind(f"{self.name}: {error}") from None

    def _context(self) -> ssl.SSLContext:
        context = trust_context(self._trust)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # The file may contain the certificate itself instead of its authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


class PodReader:
    """The pods of the node `node` from the kubelet and, after its first failure, from the API server."""

    def __init__(self, kubelet: Kubelet | None, api: ApiServer, node: str, pod_resources_socket: str) -> None:
        self._kubelet = kubelet
        self._api = api
        self._node = node
        self._socket = pod_resources_socket
        self._lock = asyncio.Lock()

    @property
    def uses_kubelet(self) -> bool:
        """Whether the kubelet has not failed yet."""
        return self._kubelet is not None

    async def pods(self, project: Callable[[memoryview], T | None]) -> list[T]:
        async with self._lock:
            if self._kubelet is not None:
                try:
                    return _project(await _with_retries(self._kubelet), project)
                except KubeletError as error:
                    log.warning("%s; the pods are read from the API server from now on", error)
                    self._kubelet = None
            return await self._from_api_server(project)

    async def holders(self, resources: Collection[str]) -> Mapping[tuple[str, str], int]:
        try:
            return await podresources.PodResources(self._socket).holder_counts(resources)
        except podresources.PodResourcesError as error:
            raise PodsError(str(error)) from error

    async def _from_api_server(self, project: Callable[[memoryview], T | None]) -> list[T]:
        found: list[T] = []
        query = {"fieldSelector": f"spec.nodeName={self._node}"}
        try:
            await self._api.list(
                "/api/v1/pods",
                lambda items: found.extend(_project(items, project)),
                query=query,
                page=PAGE,
                limit=MAX_LIST,
            )
        except ApiError as error:
            raise PodsError(str(error)) from error
        return found


def in_cluster(settings: Settings, environment: Mapping[str, str], *, account: str = SERVICE_ACCOUNT) -> PodReader:
    """The pods of the node that this pod runs on. Raises `ConfigurationError` outside of a cluster."""
    node, host = environment.get("NODE_NAME", ""), environment.get("HOST_IP", "")
    if not node:
        raise ConfigurationError("NODE_NAME is not set, expected the name of this pod's node (spec.nodeName)")
    try:
        api = ApiServer(api_server_of_pod(environment, account), idle_timeout=_IDLE)
        api.check()
    except NoCredentials as error:
        raise ConfigurationError(str(error)) from error
    kubelet = None
    if host:
        trust = f"{settings.kubelet_dir}/pki/kubelet.crt"
        kubelet = Kubelet(host, node, trust=trust, token=f"{account}/token")
    else:
        log.warning("HOST_IP is not set, the pods are read from the API server; expected status.hostIP of this pod")
    return PodReader(kubelet, api.without_rate_limit(), node, settings.pod_resources_socket)


async def _with_retries(kubelet: Kubelet) -> Sequence[msgspec.Raw]:
    """Raises `KubeletError`."""
    for attempt in range(1, ATTEMPTS):
        try:
            return await kubelet.pods()
        except KubeletTimeoutError as error:
            log.log(v(2), "%s (attempt %d of %d)", error, attempt, ATTEMPTS)
    return await kubelet.pods()


def _project(items: Sequence[msgspec.Raw], project: Callable[[memoryview], T | None]) -> list[T]:
    found: list[T] = []
    for item in items:
        try:
            one = project(memoryview(item))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.log(v(2), "pod skipped: %s", error)
            continue
        if one is not None:
            found.append(one)
    return found
