"""Keeps one resource registered at the kubelet, for as long as the socket at its path is the own one."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

from accelplane import rpc
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet import messages, sockets
from accelplane.kubelet.notifier import Notifier
from accelplane.kubelet.pluginsocket import PluginSocket
from accelplane.kubelet.registration_state import MAX_CHECK_INTERVAL, RegistrationState
from accelplane.logs import v

log = logging.getLogger(__name__)

KUBELET_SOCKET = "kubelet.sock"
_REGISTER_DEADLINE = 20.0  # the kubelet itself waits up to 10 s for our answer
_ANSWER_TIMEOUT = 1.0  # after the kubelet has opened a stream


class Registrant(Protocol):
    """What registers. `wake` is notified of changes in the kubelet's directory and of its streams."""

    resource: str
    wake: Notifier

    @property
    def open_streams(self) -> int: ...
    @property
    def streams_opened(self) -> int:
        """The number of ListAndWatch streams that were ever opened."""
        ...

    async def get_options(self, request: pb.Empty, /) -> pb.DevicePluginOptions: ...

    def report(self, problem: str, level: int = logging.WARNING) -> None:
        """Logs a problem, and shows it until the next registration."""
        ...

    def record_registration(self, error: rpc.RpcError | None) -> None:
        """Called after each answer of the kubelet."""
        ...

    def set_registered(self, *, registered: bool) -> None: ...


class Registration:
    """The registration of one resource at the kubelet whose socket is in the directory."""

    def __init__(self, directory: str, socket: PluginSocket, registrant: Registrant) -> None:
        self._kubelet = os.path.join(directory, KUBELET_SOCKET)
        self._socket = socket
        self._registrant = registrant

    async def keep(self) -> str:
        """Registers whenever needed; returns the reason why a new socket is needed."""
        state, registrant = RegistrationState(), self._registrant
        while True:
            if not self._socket.owned:
                return "the socket was removed or replaced"
            kubelet, now = sockets.identity(self._kubelet), time.monotonic()
            if state.observe(kubelet, open_streams=registrant.open_streams, opened=registrant.streams_opened, now=now):
                registrant.report("the kubelet has opened no ListAndWatch stream; registering again", level=v(1))
            if state.moved:
                return "the kubelet has a new socket"
            if state.should_register(now):
                # A starting kubelet creates its socket before it listens: the first attempt often fails.
                level = logging.WARNING if state.rejections else v(1)
                accepted = await self._register_while_at(kubelet, level)
                state.record_attempt(time.monotonic(), accepted=accepted)
                continue  # notifications during the attempt were not received
            registrant.set_registered(registered=state.registered)
            if kubelet is None and not state.registered:
                registrant.report(f"waiting for {self._kubelet}", level=v(1))
            await self._registrant.wake.wait(state.next_check(time.monotonic()))

    async def _register_while_at(self, kubelet: sockets.Identity | None, level: int) -> bool:
        """Registers while the sockets are the own and this `kubelet`: a stopping kubelet may never answer.

        A stream that opens meanwhile shows that the kubelet has accepted the registration, whatever the answer is.
        """
        registrant = self._registrant
        opened = registrant.streams_opened

        def streaming() -> bool:
            return registrant.streams_opened > opened and registrant.open_streams > 0

        attempt = asyncio.create_task(self._register(level, streaming))
        attempt.add_done_callback(lambda _attempt: self._registrant.wake.notify_all())
        try:
            while not attempt.done() and self._socket.owned and sockets.identity(self._kubelet) == kubelet:
                answer_due = streaming()
                if (
                    not await self._registrant.wake.wait(_ANSWER_TIMEOUT if answer_due else MAX_CHECK_INTERVAL)
                    and answer_due
                ):
                    log.log(v(1), "%s: registered, the kubelet's answer was lost", self._registrant.resource)
                    return streaming()
            return attempt.done() and attempt.result()
        finally:
            attempt.cancel()
            await asyncio.wait((attempt,))

    async def _register(self, level: int, streaming: Callable[[], bool]) -> bool:
        """Whether the kubelet accepted the registration; an error is logged at `level`."""
        options = await self._registrant.get_options(pb.Empty())
        try:
            # A rejected name is never used again, see `pluginsocket`.
            endpoint = self._socket.add_registration_name()
        except OSError as error:
            self._registrant.report(f"cannot link the socket {self._socket.path}: {error.strerror or error}", level)
            return False
        request = pb.RegisterRequest(
            version=messages.VERSION, endpoint=endpoint, resource_name=self._registrant.resource, options=options
        )
        async with rpc.Channel(self._kubelet) as channel:
            try:
                await channel.call(messages.REGISTER, request, pb.Empty, deadline=_REGISTER_DEADLINE)
            except rpc.RpcError as error:
                self._registrant.record_registration(error)
                hint = "; check permission and SELinux label" if "ermission denied" in error.text else ""
                self._registrant.report(f"registration at {self._kubelet} failed: {error}{hint}", level)
                return streaming()
        self._registrant.record_registration(None)
        log.log(v(1), "%s: registered at %s", self._registrant.resource, endpoint)
        return True
