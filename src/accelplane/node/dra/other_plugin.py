"""Detects another device plugin that serves resources of a family: DRA must not hand the same devices out.

The kubelet reports healthy IDs of a resource that this agent does not serve: one of the namespace, or, if other plugins
may have resources of it, one that the plugin has itself. The kubelet applies changes of this agent's lists with a
delay, so a short report is ignored.
"""

import time
from collections.abc import Callable

from accelplane.dra.events import Reason
from accelplane.kubelet import sockets
from accelplane.kubelet.podresources import PodResources, PodResourcesError
from accelplane.kubelet.server import Stage
from accelplane.logs import v
from accelplane.node.runner import PluginRunner, log
from accelplane.node.settings import Settings

_CONFIRM_TIME = 3.0
_REGISTRATION_TIME = 10.0  # in which a plugin registers after it has created its socket
_INTERVAL, _RECHECK = 2.0, 5.0  # while a plugin may register, and after a report of one


class OtherPlugin:
    """`problem` says which plugin there is, empty if there is none. `suspected` is true from its first report on."""

    def __init__(self, settings: Settings, on_event: Callable[[Reason, str], None]) -> None:
        self.problem = ""
        self.suspected = False
        self._on_event = on_event
        self._socket = settings.pod_resources_socket
        self._since = 0.0
        self._checked = 0.0
        self._check_until = time.monotonic() + _REGISTRATION_TIME

    def directory_changed(self) -> None:
        """Another plugin may have created or removed its socket."""
        self._check_until = time.monotonic() + _REGISTRATION_TIME

    @property
    def delay(self) -> float | None:
        """The seconds until the next check, None if none is needed."""
        now = time.monotonic()
        if now >= self._check_until and not self.suspected:
            return None
        return max(0.0, self._checked + (_INTERVAL if now < self._check_until else _RECHECK) - now)

    async def check(self, runner: PluginRunner | None) -> None:
        """Asks the kubelet. If it does not answer, nothing changes; without a kubelet there is no other plugin."""
        now = self._checked = time.monotonic()
        if runner is None:
            return
        resources: list[str] = []
        if sockets.identity(self._socket) is not None:
            try:
                allocatable = await PodResources(self._socket).allocatable()
            except PodResourcesError as error:
                log.log(v(2), "other device plugins: %s", error)
                return
            plugin = runner.context.plugin
            served = {name for name, one in runner.publisher.served.items() if one.server.stage is not Stage.WAITING}
            own = runner.context.devices.found.resources
            for name, ids in allocatable.items():
                namespace, _, resource = name.partition("/")
                is_ours = namespace == plugin.namespace and (plugin.exclusive_namespace or resource in own)
                if ids and is_ours and resource not in served:
                    resources.append(name)
        if not resources:
            if self.problem:
                log.info("%s: the other device plugin has ended", runner.context.name)
            self.problem, self.suspected = "", False
            return
        if not self.suspected:
            self.suspected, self._since = True, now
        if now - self._since >= _CONFIRM_TIME:
            problem = (
                f"another device plugin serves {', '.join(resources)}; nothing is offered by DRA until it has ended, "
                "remove its DaemonSet"
            )
            if problem != self.problem:
                log.error("%s: %s", runner.context.name, problem)
                self._on_event("OtherDevicePlugin", problem)
            self.problem = problem
