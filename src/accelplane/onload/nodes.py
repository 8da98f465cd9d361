"""Reads and changes nodes and their pods: the side effects of the steps.

A cache lags behind the server. A node that was written is therefore read as it was written until the cache has a newer
version, and each write depends on the version that the decision was made from.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from accelplane.apiserver import AlreadyExists, ApiError, Conflict, NotFound, StatusError, TooManyRequests
from accelplane.apiserver.clock import loop_time
from accelplane.kube.client import Client, Selection
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Metadata, OwnerReference, Request
from accelplane.onload import models
from accelplane.onload.modules import names_of
from accelplane.onload.names import NAME_LABEL, RESOURCE, VERIFY_LABEL, Names
from accelplane.onload.observed import BlockedEviction, NodeView, PodView, format_progress, view
from accelplane.onload.plan import Action, Role
from accelplane.onload.resources import Eviction, Node, Pod, ProbePod, concerns_onload, node_only, pod_only

log = logging.getLogger(__name__)

_NODE = "node"
_MAX_MESSAGE = 200  # characters of the API server's message about an eviction


class InUse(ApiError):
    """A module must not be unloaded, because pods use it."""


class Nodes:
    """The nodes of the cluster with the pods that concern Onload."""

    def __init__(
        self,
        manager: Manager,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = loop_time,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._client = manager.client
        self.nodes = manager.cache(Node, transform=node_only)
        self.pods = manager.cache(Pod, transform=pod_only)
        self.pods.add_index(_NODE, lambda pod: [pod.spec.nodeName] if concerns_onload(pod) else [])
        self._written: dict[str, tuple[frozenset[str | None], Node]] = {}
        self.nodes.subscribe(self._forget)
        self._since: dict[str, float] = {}
        self.pods.subscribe(self._record_since)

    def __iter__(self) -> Iterator[Node]:
        for node in self.nodes:
            yield self._current(node)

    def views(
        self, names: Names, selector: Mapping[str, str] | None, resources: Collection[Names] = ()
    ) -> list[NodeView]:
        """The nodes that the selector matches, and those that have anything of the resource."""
        return [
            view(
                node,
                names,
                selector,
                self.pods.by_index(_NODE, node.metadata.name or ""),
                since=self._since,
                resources=resources,
            )
            for node in self
            if _concerns(node, names, selector)
        ]

    async def patch(self, names: Names, action: Action, version: str) -> None:
        """Writes labels and progress to the version of a node from which the action was decided.

        Raises `InUse`, `Conflict` and other errors of the API.
        """
        if action.unloads:
            await self._check_unused(names, action.node)
        roles: dict[Role, str] = {"module": names.module_label, "sfc": names.sfc_label, "gate": names.gate_label}
        metadata: dict[str, object] = {"resourceVersion": version}
        if action.labels:
            metadata["labels"] = {roles[role]: value for role, value in action.labels.items()}
        if action.progress is not None or action.removes_progress:
            metadata["annotations"] = {names.progress_annotation: self._progress_text(action)}
        older = self._older_versions(action.node) | {version}
        try:
            written = await self._client.patch(Node, action.node, {"metadata": metadata})
        except NotFound:
            return
        node_only(written)
        self._written[action.node] = (older, written)

    async def evict(self, pods: Iterable[PodView]) -> list[BlockedEviction]:
        """Requests the eviction of pods. Returns those whose eviction is rejected. Raises the first other error."""
        results = await asyncio.gather(*(_evict(self._client, pod) for pod in pods), return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return [each for each in results if isinstance(each, BlockedEviction)]

    async def delete(self, pods: Iterable[PodView]) -> None:
        """Deletes pods, unless others have their names by now."""
        for pod in pods:
            try:
                await self._client.delete(Pod, pod.key.name, pod.key.namespace, uid=pod.uid or None)
            except Conflict:
                continue

    async def create_probe(self, onload: models.Onload, owner: OwnerReference, node: str) -> None:
        """Creates the pod that verifies a node."""
        verify = onload.spec.upgrade.verify if onload.spec.upgrade is not None else None
        if verify is None or verify.probe is None:
            return
        try:
            await self._client.create(probe_pod(onload, verify.probe, owner, node))
        except AlreadyExists:
            log.debug("the probe pod of node %s exists", node)

    async def delete_probe(self, names: Names, node: str) -> None:
        await self._client.delete(Pod, probe_name(names, node), names.namespace)

    def _current(self, node: Node) -> Node:
        name = node.metadata.name or ""
        older, written = self._written.get(name, (frozenset[str | None](), node))
        if node.metadata.resourceVersion in older:
            return written
        self._written.pop(name, None)
        return node

    def _forget(self, old: Node | None, new: Node | None) -> None:
        if old is not None and new is None:
            self._written.pop(old.metadata.name or "", None)

    def _progress_text(self, action: Action) -> str | None:
        progress = action.progress
        if progress is not None and not progress.started:
            progress = msgspec.structs.replace(progress, started=int(self._clock()))
        return format_progress(progress) if progress is not None else None

    def _record_since(self, old: Pod | None, new: Pod | None) -> None:
        """Records since when plugin pods are ready, and probe pods failed.

        The times are those of the monotonic clock of the operator: the status of a pod has the time of its node.
        """
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            self._since.pop(old.metadata.uid or "", None)
        if new is None:
            return
        is_ready_plugin = NAME_LABEL in new.labels and new.is_ready
        is_failed_probe = VERIFY_LABEL in new.labels and new.status.phase == "Failed"
        if is_ready_plugin or is_failed_probe:
            self._since.setdefault(new.metadata.uid or "", self._monotonic())
        else:
            self._since.pop(new.metadata.uid or "", None)

    def _older_versions(self, name: str) -> frozenset[str | None]:
        """Versions of a node that precede the next write. They are known before it: afterwards, the cache may have
        the written version or one of another client already."""
        older, _ = self._written.get(name, (frozenset[str | None](), None))
        cached = self.nodes.get(Request(name))
        return older | {cached.metadata.resourceVersion} if cached else older

    async def _check_unused(self, names: Names, node: str) -> None:
        """Reads the pods of a node from the server, because the cache may be behind. Raises `InUse`."""
        listing = await self._client.list(Pod, Selection(fields=f"spec.nodeName={node}"))
        if listing.unreadable:
            raise InUse(f"node {node}", f"a pod cannot be decoded: {listing.unreadable[0][1]}")
        for pod in listing.items:
            pod_only(pod)
            is_plugin = pod.labels.get(NAME_LABEL) == names.daemonset and pod.metadata.namespace == names.namespace
            if (pod.uses_onload or is_plugin) and not pod.is_finished:
                raise InUse(f"node {node}", f"pod {pod.metadata.namespace}/{pod.metadata.name} uses Onload")


def probe_name(names: Names, node: str) -> str:
    """The name of the pod that verifies a node."""
    return f"{names.name}-verify-{hashlib.sha256(node.encode()).hexdigest()[:10]}"


def probe_pod(onload: models.Onload, probe: models.ProbePod, owner: OwnerReference, node: str) -> ProbePod:
    """The pod that verifies a node: it gets one `amd.com/onload` there, and has to succeed."""
    names = names_of(onload)
    container: dict[str, object] = {
        "name": "verify",
        "image": probe.image,
        "resources": {"limits": {RESOURCE: 1}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if probe.command:
        container["command"] = [*probe.command]
    if probe.args:
        container["args"] = [*probe.args]
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchFields": [field]}]}}}  # fmt: skip
    spec: dict[str, object] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "affinity": affinity,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
    }
    if onload.spec.image_pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": onload.spec.image_pull_secret.name}]
    labels = {**names.base_labels("verification"), VERIFY_LABEL: names.daemonset}
    metadata = Metadata(name=probe_name(names, node), namespace=names.namespace, labels=labels, ownerReferences=[owner])
    return ProbePod(metadata=metadata, spec=spec)


def _concerns(node: Node, names: Names, selector: Mapping[str, str] | None) -> bool:
    labels = node.labels
    return (
        (selector is not None and selector.items() <= labels.items())
        or any(label in labels for label in names.labels)
        or names.progress_annotation in node.annotations
    )


async def _evict(client: Client, pod: PodView) -> BlockedEviction | None:
    """Returns the pod if its eviction is rejected. Raises `Conflict` if another pod has its name, perhaps elsewhere."""
    key = pod.key
    options: dict[str, object] | None = {"preconditions": {"uid": pod.uid}} if pod.uid else None
    try:
        await client.create(Eviction(metadata=Metadata(name=key.name, namespace=key.namespace), deleteOptions=options))
    except NotFound:
        return None
    except TooManyRequests as error:
        # The API server names the budget in a cause.
        budget = next((each.message for each in error.causes if each.reason == "DisruptionBudget"), "")
        return BlockedEviction(str(key), budget[:_MAX_MESSAGE])
    except Conflict:
        raise
    except StatusError as error:
        return BlockedEviction(str(key), (error.message or str(error))[:_MAX_MESSAGE], by_budget=False)
    return None
