"""Since when containers hold device IDs and units are in their state, as far as a single command can know it.

The kubelet makes the directories of a pod (`pods/UID` below its own) right after it has admitted the pod, and devices
are allocated at the admission. The directory `plugins` of these changes only while the volumes of the pod are mounted,
before its containers start. The checkpoint of the device manager has the UID of the pod that holds an ID.

States have a history only in a running agent: its page `/status` has the times.
"""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from accelplane.cli.tables import UsageError
from accelplane.http.client import HttpClient, HttpClientError
from accelplane.http.listening import split_address
from accelplane.kubelet import checkpoint

_UID = re.compile(r"[0-9A-Za-z-]{1,64}", re.ASCII)
_MAX_PAGE = 16 * 1024 * 1024
_TIMEOUT = 5.0

Key = tuple[str, str]  # resource and ID
UnitKey = tuple[str, str]  # plugin and unit


class AgentError(Exception):
    """The page of an agent cannot be read."""


class _Change(Struct, frozen=True):
    time: float = 0.0


class _Health(Struct, frozen=True):
    changes: Sequence[_Change] = ()


class _Plugin(Struct, frozen=True):
    health: Mapping[str, _Health] = {}


class _Status(Struct, frozen=True):
    plugins: Mapping[str, _Plugin] = {}


def held_since(kubelet_dir: str, holdings: Sequence[checkpoint.Holding]) -> dict[Key, float]:
    """The Unix time since which a pod holds each resource and ID; IDs of pods without directories are not in it."""
    admitted = {uid: _admission(kubelet_dir, uid) for uid in {holding.pod_uid for holding in holdings}}
    return {
        (holding.resource, id_): admitted[holding.pod_uid]
        for holding in holdings
        if admitted[holding.pod_uid]
        for id_ in holding.ids
    }


async def state_since(address: str) -> dict[UnitKey, float]:
    """The Unix time of the last change of state by plugin and unit, from the pages of the agent at `host:port`.

    Raises `AgentError`, and `UsageError` for another text.
    """
    try:
        host, port = split_address(address)
    except ValueError:
        raise UsageError(f"--agent: found {address[:80]!a}, expected HOST:PORT") from None
    client = HttpClient(host or "localhost", port, idle_timeout=0)
    try:
        async with asyncio.timeout(_TIMEOUT), client.request("GET", "/status") as response:
            if response.status != 200:
                raise AgentError(f"agent at {address}: /status: found status {response.status}, expected 200")
            content = await response.read(_MAX_PAGE)
        status = msgspec.json.decode(content, type=_Status)
    except (HttpClientError, TimeoutError) as error:
        raise AgentError(f"agent at {address}: /status: {error or f'no answer in {_TIMEOUT:g} s'}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AgentError(f"agent at {address}: /status: expected the status of an agent: {error}") from None
    finally:
        client.close()
    return {
        (name, unit): health.changes[-1].time
        for name, plugin in status.plugins.items()
        for unit, health in plugin.health.items()
        if health.changes
    }


def _admission(kubelet_dir: str, uid: str) -> float:
    """The Unix time, 0 if it is unknown."""
    if not _UID.fullmatch(uid):
        return 0.0
    try:
        return os.stat(f"{kubelet_dir}/pods/{uid}/plugins").st_mtime
    except OSError:
        return 0.0
