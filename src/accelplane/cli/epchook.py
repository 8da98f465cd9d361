"""`sgx_epchook` and `intel-sgx-epchook`: makes the size of a node's enclave page cache (EPC) known; `sgx-init.sh`.

The size becomes an extended resource in three ways: the capacity of the Node is written (`-register`); a hook of
node-feature-discovery (NFD) prints the size; or it is in a feature file or NodeFeature object, as newer releases of NFD
expect. It does not change while a node runs. docs/decisions/0011-epc-hook.md explains what `sgx-init.sh` installs.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from msgspec import Raw

from accelplane import apiserver
from accelplane.apiserver import APPLY_PATCH, JSON_PATCH, ApiError, ApiServer, NotFound, StatusError, object_path
from accelplane.cli import logflags, signals, staticprint
from accelplane.cli.goflags import Flag, Value, parse_or_exit
from accelplane.cli.untilsignal import until_signal
from accelplane.host import Host
from accelplane.host.epc import Epc, read_epc
from accelplane.node.publishers.labels import LabelFile
from accelplane.nodelabels import node_reconciler
from accelplane.nodelabels.node_reconciler import Node

log = logging.getLogger(__name__)

RESOURCE = "sgx.intel.com/epc"
LABEL = "sgx.intel.com/capable"
FIELD_MANAGER = "intel-sgx-epchook"
FEATURE_FILE = "intel-sgx-epc.txt"
HOOK = "intel-sgx-epchook"
NFD_DIRECTORY = "/etc/kubernetes/node-feature-discovery"
OUTPUTS = ("hook", "feature-file", "node-feature")
FATAL = 255

FLAGS = (
    Flag("register", False, "register the EPC size as an extended resource of the node"),
    Flag("affirm", False, "fail if the EPC size is 0"),
    Flag("node-label", False, "label the node when the EPC size is greater than 0"),
    Flag("daemon", False, "keep the written values until SIGTERM or SIGINT"),
    Flag("cleanup", False, "remove what the other flags write, the node's resource and label if they name none of it: "
         "at once, or with -daemon at the end"),
    Flag("output", "hook", "how node-feature-discovery gets the size: hook (on standard output, not with -register), "
         "feature-file or node-feature"),
    Flag("features-dir", f"{NFD_DIRECTORY}/features.d", "directory of -output=feature-file"),
    Flag("namespace", "", "namespace of -output=node-feature, the pod's own when empty"),
    Flag("root", "/", "read sysfs and procfs under this directory"),
    *logflags.FLAGS,
)  # fmt: skip

INSTALL_FLAGS = (
    Flag("source-dir", f"{NFD_DIRECTORY}/source.d", "directory for the hook"),
    Flag("features-dir", f"{NFD_DIRECTORY}/features.d", "directory for the feature file"),
    Flag("root", "/", "read sysfs and procfs under this directory"),
    *logflags.FLAGS,
)

_INTERVAL = 60.0
_CLEANUP_DEADLINE = 20.0
_CLEANUP_TRIES = 3
_RETRY = 10.0
_NODE_FEATURES = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/{}/nodefeatures"


class Fatal(Exception):
    """An error that ends the command with status 255."""


class Hook:
    """The size that one run publishes, and where."""

    def __init__(self, given: Mapping[str, Value], epc: int, environment: Mapping[str, str]) -> None:
        values = {flag.name: flag.default for flag in FLAGS} | dict(given)
        self.epc = epc
        self.output = str(values["output"])
        self.cleanup = bool(values["cleanup"])
        # With another output than hook, NFD sets the label.
        by_nfd = self.output != "hook"
        everything = self.cleanup and not (values["register"] or values["node-label"] or values["daemon"] or by_nfd)
        self.register = bool(values["register"]) or everything
        self.label = (bool(values["node-label"]) and not by_nfd) or everything
        self.features = {RESOURCE: str(epc)}
        if values["node-label"] and epc > 0:
            self.features[LABEL] = "true"
        self._file = LabelFile(os.path.join(str(values["features-dir"]), FEATURE_FILE))
        self._namespace = str(values["namespace"])
        self._environment = environment
        self._node_patched = False
        self.api: ApiServer | None = None
        if self.operations() or self.output == "node-feature" or (self.cleanup and self._cleans_node):
            self.node_name = environment.get("NODE_NAME", "")
            if not self.node_name:
                raise Fatal("NODE_NAME is not set, expected the name of this pod's node (spec.nodeName)")
            self.api = ApiServer.in_cluster(environment)

    @property
    def _cleans_node(self) -> bool:
        return self.register or self.label

    def operations(self) -> list[dict[str, object]]:
        """The JSON patch of the Node, empty where there is nothing to be written."""
        operations: list[dict[str, object]] = []
        if self.register:
            operations.append({"op": "add", "path": _pointer("status", "capacity", RESOURCE), "value": self.epc})
        if self.label and self.epc > 0:
            operations.append({"op": "add", "path": _pointer("metadata", "labels", LABEL), "value": "true"})
        return operations

    async def reconcile(self, node: Node) -> bool:
        """Writes the Node and prints the size the first time, later when it is not as written. Raises `ApiError`."""
        as_wanted = (not self.register or node_reconciler.amount(node.capacity.get(RESOURCE)) == self.epc) and (
            not self.label or self.epc == 0 or node.labels.get(LABEL) == "true"
        )
        if as_wanted and self._node_patched:
            return False
        if self._node_patched:
            log.warning("node %s: capacity or label differs, applying again", node.metadata.name)
        operations = self.operations()
        # A patch cannot add a member to a missing object, as in a Node that has just been created.
        if self.register and node.status.capacity is None:
            operations.insert(0, {"op": "add", "path": "/status/capacity", "value": {}})
        if self.label and node.metadata.labels is None:
            operations.insert(0, {"op": "add", "path": "/metadata/labels", "value": {}})
        await self._patch(operations)
        if not self._node_patched:
            self.print_size()
        self._node_patched = True
        log.info("node %s: patched: %s", node.metadata.name, ", ".join(str(each["path"]) for each in operations))
        return True

    def print_size(self) -> None:
        if self.output == "hook" and not self.register:
            # Without an end of the line, as NFD's hooks of this name have always done.
            sys.stdout.write(f"{RESOURCE}={self.epc}")
            sys.stdout.flush()

    async def publish(self) -> None:
        """Writes or removes the feature file of NFD. Raises `ApiError`, or `OSError`."""
        if self.output == "feature-file":
            if self._file.write(self.features):
                log.info("%s: written", self._file.path)
        elif self.output == "node-feature":
            await self._apply_node_feature()

    async def clean(self) -> None:
        """Removes the values written by `reconcile` and `publish`. Raises `ApiError`, or `OSError`."""
        if self._cleans_node and self.api is not None:
            await self._clean_node(self.api)
        if self.output == "feature-file" and self._file.remove():
            log.info("%s: removed", self._file.path)
        if self.output == "node-feature" and self.api is not None:
            with contextlib.suppress(NotFound):
                await self.api.delete(self._node_feature)

    async def _clean_node(self, api: ApiServer) -> None:
        for tries in range(1, _CLEANUP_TRIES + 1):
            node = await node_reconciler.read(api, self.node_name)
            operations: list[dict[str, object]] = []
            if self.register and RESOURCE in node.capacity:
                operations.append({"op": "remove", "path": _pointer("status", "capacity", RESOURCE)})
            if self.label and LABEL in node.labels:
                operations.append({"op": "remove", "path": _pointer("metadata", "labels", LABEL)})
            if not operations:
                return
            try:
                await self._patch(operations)
            except StatusError as error:
                # Another client has removed a part of it.
                if error.code not in (409, 422) or tries == _CLEANUP_TRIES:
                    raise
                continue
            log.info("node %s: removed: %s", self.node_name, ", ".join(str(each["path"]) for each in operations))
            return

    async def _patch(self, operations: Sequence[Mapping[str, object]]) -> None:
        if self.api is not None:
            path = f"{object_path(node_reconciler.NODES, self.node_name)}/status"
            await self.api.patch(path, operations, JSON_PATCH, Node)

    @property
    def _node_feature(self) -> str:
        namespace = self._namespace or _own_namespace()
        return object_path(_NODE_FEATURES.format(namespace), f"{self.node_name}-sgx-epc")

    async def _apply_node_feature(self) -> None:
        """The NodeFeature that NFD's worker would create from the hook, with labels and features. Owned by the Node."""
        if self.api is None:
            return
        node = await node_reconciler.read(self.api, self.node_name)
        owner = {"apiVersion": "v1", "kind": "Node", "name": self.node_name, "uid": node.metadata.uid}
        elements = {"elements": self.features}
        body = {
            "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
            "kind": "NodeFeature",
            "metadata": {
                "name": f"{self.node_name}-sgx-epc",
                "labels": {"nfd.node.kubernetes.io/node-name": self.node_name},
                "ownerReferences": [owner],
            },
            "spec": {
                "features": {
                    "attributes": {"local.label": elements, "local.feature": elements},
                    "flags": {},
                    "instances": {},
                },
                "labels": self.features,
            },
        }
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        await self.api.patch(self._node_feature, body, APPLY_PATCH, Raw, query=query)


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. The exit code is 255 for fatal errors, 2 for invalid flags."""
    given = parse_or_exit(HOOK, FLAGS, arguments, lenient=True)
    if given.get("daemon"):
        signals.end_at_once()
    else:
        signals.end_as_usual()
    try:
        logflags.start(given, HOOK)
        if given.get("output", "hook") not in OUTPUTS:
            raise Fatal(f"-output: found {given['output']!a}, expected one of {', '.join(OUTPUTS)}")
        log.info("starting")
        epc = _epc(str(given.get("root", "/")))
        if epc == 0 and given.get("affirm"):
            raise Fatal("SGX EPC is not available")
        hook = Hook(given, epc, os.environ)
        asyncio.run(_daemon(hook) if given.get("daemon") else once(hook))
    except (Fatal, ApiError, ValueError, OSError) as error:
        log.critical("%s", logflags.message_of(error))
        return FATAL
    return 0


def install(arguments: Sequence[str] | None = None) -> int:
    """`sgx-init.sh`: installs a hook for NFD that prints the size, and a feature file, wherever there is a place."""
    given = parse_or_exit("sgx-init.sh", INSTALL_FLAGS, arguments, lenient=True)
    signals.end_as_usual()
    values = {flag.name: flag.default for flag in INSTALL_FLAGS} | given
    sources, features = str(values["source-dir"]), str(values["features-dir"])
    try:
        logflags.start(given, "sgx-init.sh")
        epc = _epc(str(values["root"]))
        places = [place for place in (sources, features) if os.path.isdir(place)]
        if not places:
            raise Fatal(f"neither {sources} nor {features} is a directory; mount one of them")
        if sources in places:
            staticprint.install(os.path.join(sources, HOOK), f"{RESOURCE}={epc}")
        if features in places:
            file = LabelFile(os.path.join(features, FEATURE_FILE))
            log.info("%s: %s", file.path, "written" if file.write({RESOURCE: str(epc)}) else "unchanged")
    except (Fatal, ValueError, OSError) as error:
        log.critical("%s", logflags.message_of(error))
        return 1
    return 0


def _epc(root: str) -> int:
    """Raises `Fatal`."""
    if not os.path.isdir(root):
        raise Fatal(f"-root: {root!a}: not a directory, expected one with sys/ and proc/ in it")
    found: Epc = read_epc(Host(root))
    for disagreement in found.disagreements:
        log.warning("%s", disagreement)
    log.info("EPC: %d bytes (source: %s)", found.total, found.source)
    return found.total


async def once(hook: Hook) -> None:
    """Writes the Node, publishes and prints once, or cleans up. Raises `ApiError`, or `OSError`."""
    if hook.cleanup:
        await hook.clean()
        return
    if hook.api is not None and hook.operations():
        await hook.reconcile(await node_reconciler.read(hook.api, hook.node_name))
    else:
        hook.print_size()
    await hook.publish()


async def _daemon(hook: Hook) -> None:
    if hook.api is not None and hook.operations():
        reconciler = node_reconciler.run(hook.api, hook.node_name, hook.reconcile, interval=_INTERVAL)
        await until_signal(_keep_published(hook), reconciler)
    else:
        hook.print_size()
        await until_signal(_keep_published(hook))
    if hook.cleanup:
        try:
            async with asyncio.timeout(_CLEANUP_DEADLINE):
                await hook.clean()
        except TimeoutError:
            raise Fatal(f"could not remove everything within {_CLEANUP_DEADLINE:g} s") from None


async def _keep_published(hook: Hook) -> None:
    """Publishes repeatedly, because the file or object may be removed."""
    problem = ""
    while True:
        try:
            await hook.publish()
            problem = ""
            await asyncio.sleep(_INTERVAL)
        except (ApiError, OSError) as error:
            if str(error) != problem:
                problem = str(error)
                log.error("%s; retrying every %g s", problem, _RETRY)
            await asyncio.sleep(_RETRY)


def _pointer(*words: str) -> str:
    return "".join("/" + word.replace("~", "~0").replace("/", "~1") for word in words)


def _own_namespace() -> str:
    try:
        with open(f"{apiserver.SERVICE_ACCOUNT}/namespace", encoding="ascii") as file:
            return file.read(254).strip()
    except (OSError, ValueError) as error:
        raise Fatal(f"-namespace: found nothing, and the namespace of the pod is not known: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
