"""The plugins that are registered at the kubelet under a driver's name, by the sockets in `plugins_registry`.

The name of a socket is arbitrary, so GetInfo is asked. Instances of this program also answer `IDENTIFY`. This is how an
instance distinguishes the driver of another vendor from another instance during an update.
"""

import asyncio
import os
import stat
from collections.abc import Iterator

from msgspec import Struct

from accelplane import rpc
from accelplane.kubelet import pluginregistration_v1_pb2 as pb
from accelplane.kubelet import sockets

PLUGIN_TYPE = "DRAPlugin"
GET_INFO = "/pluginregistration.Registration/GetInfo"
IDENTIFY = "/accelplane.dra.Driver/Identify"
_DEADLINE = 1.0
_MAX_SOCKETS = 1000
_MAX_CALLS = 16  # at once
_MAX_ENDPOINT, _MAX_MESSAGE = 256, 64 * 1024
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0


class OtherPlugin(Struct, frozen=True):
    """A plugin at the registration socket `path` with the driver's name. `ours`: it is an instance of this program."""

    path: str
    endpoint: str
    ours: bool


class OtherRegistrations:
    """The other plugins of one driver. Each socket is asked once."""

    def __init__(self, registry: str, driver: str) -> None:
        self._registry = registry
        self._driver = driver
        self._known: dict[str, tuple[sockets.Identity, OtherPlugin | None]] = {}
        self._unanswered: frozenset[str] = frozenset()
        self._retry = _FIRST_RETRY
        # Whether a change may cause no event of the directory: a process ends, or a socket is in a subdirectory.
        self.need_polling = False

    @property
    def retry(self) -> float | None:
        """The seconds until `update` should ask sockets again that have not answered, None if all have.

        Files of plugins that have ended may never be removed, so the delay doubles while they are the same.
        """
        return self._retry if self._unanswered else None

    async def update(self, own: str) -> tuple[OtherPlugin, ...]:
        """The live plugins of this driver, except the one at the path `own`."""
        present = {path: sockets.identity(path) for path in _sockets_below(self._registry) if path != own}
        calls = asyncio.Semaphore(_MAX_CALLS)
        asked = [(path, identity) for path, identity in present.items() if identity is not None]
        found = await asyncio.gather(*(self._find(path, identity, calls) for path, identity in asked))
        self._known = {known[0]: known[1:] for known in found if known is not None}
        unanswered = frozenset(path for path, _ in asked).difference(self._known)
        self._retry = min(2 * self._retry, _LAST_RETRY) if unanswered == self._unanswered else _FIRST_RETRY
        self._unanswered = unanswered
        others = [plugin for _, plugin in self._known.values() if plugin is not None]
        self.need_polling = bool(others) or _has_subdirectory(self._registry)
        return tuple(plugin for plugin in others if sockets.listener(plugin.path) is not None)

    async def _find(
        self, path: str, identity: sockets.Identity, calls: asyncio.Semaphore
    ) -> tuple[str, sockets.Identity, OtherPlugin | None] | None:
        """The plugin at the path, None if it does not answer. Plugins that do not answer do not delay each other."""
        known = self._known.get(path)
        if known is not None and known[0] == identity:
            return path, *known
        try:
            async with calls:
                return path, identity, await self._ask(path)
        except (rpc.RpcError, sockets.SocketPathError):
            return None

    async def _ask(self, path: str) -> OtherPlugin | None:
        async with rpc.Channel(sockets.checked_path(path), max_message=_MAX_MESSAGE) as channel:
            info = await channel.call(GET_INFO, pb.InfoRequest(), pb.PluginInfo, deadline=_DEADLINE)
            if info.type != PLUGIN_TYPE or info.name != self._driver:
                return None
            try:
                request = pb.InfoRequest()
                await channel.call(IDENTIFY, request, pb.RegistrationStatusResponse, deadline=_DEADLINE)
            except rpc.RpcError as error:
                if error.code != "UNIMPLEMENTED":
                    raise
                return OtherPlugin(path, info.endpoint[:_MAX_ENDPOINT], ours=False)
            return OtherPlugin(path, info.endpoint, ours=True)


def _has_subdirectory(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return any(entry.is_dir() for entry in entries)
    except OSError:
        return False


def _sockets_below(directory: str) -> Iterator[str]:
    """The sockets that the kubelet finds: also in subdirectories, without those whose names start with a dot."""
    count = 0
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(parent, name)
            try:
                is_socket = not name.startswith(".") and stat.S_ISSOCK(os.lstat(path).st_mode)
            except OSError:
                continue
            if is_socket:
                yield path
                count += 1
                if count >= _MAX_SOCKETS:
                    return
