"""The mode in force: the configuration's, unless an annotation of the node names another.

`fpga.intel.com/device-plugin-mode` is read before the first scan of a node with FPGAs, and watched from then on. What
is no mode is told and changes nothing; nor does an API server that is away, which is asked again. Nodes without FPGAs
ask nobody. The same answer tells the container runtime, and some are known to be too old for CDI.
"""

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from accelplane.fpga import shown
from accelplane.fpga.ids import NAMESPACE
from accelplane.plugins.fpga.config import MODES, FpgaConfig, Mode, as_mode

if TYPE_CHECKING:
    from accelplane.apiserver import ApiServer
    from accelplane.features.node_reconciler import Node

log = logging.getLogger(__name__)

ANNOTATION = f"{NAMESPACE}/device-plugin-mode"

_DEADLINE = 3.0  # the first scan waits for the answer
_WATCH = 300.0

# The first containerd with CDI is 1.7; in which it is off unless told, but of that the node says nothing.
_TOO_OLD = re.compile(r"containerd://(0|1\.[0-6])\..*")


class NodeMode:
    """`mode`, and where it comes from in `source`. `ask` and `follow` change it.

    `obstacle` is why no hook that is named by CDI runs on the node, empty where one may.
    """

    def __init__(self, config: FpgaConfig, api: "Callable[[], ApiServer | None] | None" = None) -> None:
        """`api` is where the node is asked for, unless it is the one that the configuration tells; None asks nobody."""
        self.mode: Mode = config.own_mode
        self.source = "-mode"
        self.obstacle = ""
        self._config = config
        self._find_api = api or (lambda: _api(config))
        self._refused: str | None = None

    async def ask(self) -> None:
        """Reads the annotation once. What keeps it from being read is logged."""
        name = self._config.node_name
        if not name:
            log.warning(
                "-node-name is not given and NODE_NAME not set: the node's annotation %s is not read, the mode is %s",
                ANNOTATION, self.mode,
            )  # fmt: skip
            return
        # Nodes without FPGAs do without its memory.
        from accelplane.apiserver import ApiError, object_path  # noqa: PLC0415
        from accelplane.features.node_reconciler import NODES, Node  # noqa: PLC0415

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
        """Watches the annotation for as long as there is somebody to ask; calls `changed` when the mode did."""
        if not self._config.node_name:
            return
        from accelplane.apiserver import ApiError  # noqa: PLC0415
        from accelplane.features import node_reconciler  # noqa: PLC0415

        async def settle(node: "Node") -> bool:
            if self._take(node):
                changed()
            return False

        try:
            api = self._find_api()
        except ApiError:
            return  # `ask` has told
        if api is None:
            return
        await node_reconciler.run(api, self._config.node_name, settle, interval=_WATCH)

    def _take(self, node: "Node") -> bool:
        """Whether the node has changed what is published."""
        before = self.mode, self.obstacle
        runtime = node.status.node_info.container_runtime_version
        self.obstacle = _obstacle(runtime) if _TOO_OLD.fullmatch(runtime) else ""
        self._take_mode(node)
        return (self.mode, self.obstacle) != before

    def _take_mode(self, node: "Node") -> None:
        text = (node.metadata.annotations or {}).get(ANNOTATION)
        mode = self._config.own_mode if text is None else as_mode(text)
        if mode is None:
            if text != self._refused:
                log.error(
                    "node %s: annotation %s is %s, expected one of %s; the mode stays %s",
                    self._config.node_name, ANNOTATION, shown(text or ""), ", ".join(MODES), self.mode,
                )  # fmt: skip
            self._refused = text
            return
        self._refused = None
        self.source = "-mode" if text is None else f"node {self._config.node_name}'s annotation"
        if mode != self.mode:
            log.info("mode %s instead of %s, by %s", mode, self.mode, self.source)
            self.mode = mode


def _obstacle(runtime: str) -> str:
    return (
        f"the node's runtime, {shown(runtime)}, has no CDI, so nobody would program the region; expected containerd "
        "1.7 or newer, mode af or regiondevel, or -cdi=off where something else runs the hook"
    )


def _api(config: FpgaConfig) -> "ApiServer | None":
    """Raises `NoApiServer`."""
    from accelplane.apiserver import ApiServer, without_account  # noqa: PLC0415

    if not config.kubeconfig:
        # The agent for all families, of which few have FPGAs, is given none unless somebody wants it.
        return None if without_account() else ApiServer.in_cluster()
    from accelplane.plugins.fpga import kubeconfig  # noqa: PLC0415 - it brings YAML along

    return kubeconfig.api_server(config.kubeconfig, config.master)
