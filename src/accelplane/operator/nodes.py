"""The labels of nodes, by which the overlaps of custom resources are found."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial

from accelplane.apiserver import StatusError
from accelplane.kube.informer import Informer
from accelplane.kube.kinds import NodeLabels
from accelplane.kube.manager import Manager
from accelplane.operator.resources import labels_only

log = logging.getLogger(__name__)

_FORBIDDEN_RETRY = 300.0


class Nodes:
    """The labels of all nodes, if the account may list nodes. Everything but the detection of overlaps works without.

    So they are no cache of the manager, which starts no controller before all its caches are synced. If other
    controllers of the manager need nodes anyway (`required`), all share one watch.
    """

    def __init__(self, manager: Manager, *, timeout: float, required: bool = False) -> None:
        self._timeout = timeout
        self._informer: Informer | None = None
        if required:
            self.cache = manager.cache(NodeLabels, transform=labels_only)
        else:
            self._informer = Informer(manager.client, watch_timeouts=manager.watch_timeouts)
            self.cache = self._informer.cache(NodeLabels, transform=labels_only)
            manager.add_runnable(partial(self._run, self._informer))

    async def wait(self) -> None:
        """Waits until the nodes are listed or may not be listed. Only the first caller waits for the timeout."""
        if self._informer is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await self._informer.initialized.wait()
        self._timeout = 0.0

    def labels(self) -> Mapping[str, Mapping[str, str]]:
        """The labels of each node, by the node's name."""
        return {each.metadata.name or "": each.metadata.labels or {} for each in self.cache}

    async def _run(self, informer: Informer) -> None:
        await informer.run_when_permitted(self._log_forbidden, retry=_FORBIDDEN_RETRY)

    def _log_forbidden(self, _error: StatusError) -> None:
        log.info("nodes may not be listed, so the condition NodeOverlap is not maintained")
