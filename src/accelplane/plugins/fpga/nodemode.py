"""The current mode: the option, unless the node has an annotation with another mode.

The annotation `fpga.intel.com/device-plugin-mode` is read before the first scan of a node with FPGAs and then watched.
An invalid value is logged and does not change the mode. While the API server is unavailable the mode does not change
either, and the watch retries. Without FPGAs there is no request. The Node object also has the version of the container
runtime, by which runtimes without CDI are recognized.
"""

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from accelplane.fpga import quote
from accelplane.fpga.ids import NAMESPACE
from accelplane.plugins.fpga.config import MODES, FpgaConfig, Mode, as_mode

if TYPE_CHECKING:
    from accelplane.apiserver import ApiServer
    from accelplane.nodelabels.node_reconciler import Node

log = logging.getLogger(__name__)

ANNOTATION = f"{NAMESPACE}/device-plugin-mode"

_DEADLINE = 3.0  # the first scan waits for the response
_WATCH = 300.0

# CDI exists since containerd 1.7. There it is off by default, which the Node object does not show.
_NO_CDI = re.compile(r"containerd://(0|1\.[0-6])\..*")
_OBSTACLE = (
    "the container runtime {} has no CDI, so no hook would program the region; expected containerd 1.7 or newer, mode "
    "af or regiondevel, or -cdi=off if the runtime runs the hook by other means"
)


class NodeMode:
    """The `mode` with its `source`, which `ask` and `follow` update.

    `obstacle` is the reason why the container runtime of the node runs no CDI hooks, or empty.
    """

    def __init__(self, config: FpgaConfig, api: "Callable[[], ApiServer | None] | None" = None) -> None:
        """`api` replaces the API server of the configuration. If it returns None, the node is not read."""
        self.mode: Mode = config.own_mode
        self.source = "-mode"
        self.obstacle = ""
        self._config = config
        self._find_api = api or (lambda: _api(config))
        self._invalid: str | None = None

    async def ask(self) -> None:
        """Reads the annotation once. Errors are logged."""
        name = self._config.node_name
        if not name:
            log.warning(
                "neither -node-name nor NODE_NAME is set: the node's annotation %s is not read, the mode is %s",
                ANNOTATION, self.mode,
            )  # fmt: skip
            return
        # Imported here to save memory on nodes without FPGAs.
        from accelplane.apiserver import ApiError, object_path  # noqa: PLC0415
        from accelplane.nodelabels.node_reconciler import NODES, Node  # noqa: PLC0415

        try:
            api = self._find_api()
            if api is None:
                log.info(
                    "the pod has no service account: node %s's annotation %s is not read, the mode is %s",
                    name, ANNOTATION, self.mode,
                )  # fmt: skip
                return
            node = await api.get(object_path(NODES, name), Node, deadline=_DEADLINE)
        except ApiError as error:
            log.warning("node %s not read, the mode is %s: %s", name, self.mode, error)
        else:
            self._take(node)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Watches the annotation until cancelled and calls `changed` after a change. Returns without an API server."""
        if not self._config.node_name:
            return
        from accelplane.apiserver import ApiError  # noqa: PLC0415
        from accelplane.nodelabels import node_reconciler  # noqa: PLC0415

        async def reconcile(node: "Node") -> bool:
            if self._take(node):
                changed()
            return False

        try:
            api = self._find_api()
        except ApiError:
            return  # logged by `ask`
        if api is None:
            return
        await node_reconciler.run(api, self._config.node_name, reconcile, interval=_WATCH)

    def _take(self, node: "Node") -> bool:
        """Updates the mode and the obstacle. Returns whether one of them changed."""
        before = self.mode, self.obstacle
        runtime = node.status.node_info.container_runtime_version
        self.obstacle = _OBSTACLE.format(quote(runtime)) if _NO_CDI.fullmatch(runtime) else ""
        text = (node.metadata.annotations or {}).get(ANNOTATION)
        mode = self._config.own_mode if text is None else as_mode(text)
        if mode is None:
            if text != self._invalid:
                log.error(
                    "node %s: annotation %s is %s, expected one of %s; the mode stays %s",
                    self._config.node_name, ANNOTATION, quote(text or ""), ", ".join(MODES), self.mode,
                )  # fmt: skip
            self._invalid = text
        else:
            self._invalid = None
            self.source = "-mode" if text is None else f"node {self._config.node_name}'s annotation"
            if mode != self.mode:
                log.info("mode changed from %s to %s by %s", self.mode, mode, self.source)
            self.mode = mode
        return (self.mode, self.obstacle) != before


def _api(config: FpgaConfig) -> "ApiServer | None":
    """Raises `NoCredentials`."""
    from accelplane.apiserver import ApiServer, has_no_account  # noqa: PLC0415

    if not config.kubeconfig:
        # The manifests of the agent mount a service account by option only.
        return None if has_no_account() else ApiServer.in_cluster()
    from accelplane.apiserver.kubeconfig import read_kubeconfig  # noqa: PLC0415 - it imports yaml

    return ApiServer(read_kubeconfig(config.kubeconfig, server=config.master))
