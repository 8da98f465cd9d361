"""A proxy on the kubelet's registration socket that delays or loses the answers to Register."""

import asyncio
import contextlib
import os
from typing import Self


class RegistrationProxy:
    """Forwards requests to the kubelet, and its answers when `answers` is set.

    With `cut` a connection is closed when the kubelet has answered, and the answer is lost.
    """

    def __init__(self, directory: str, *, cut: bool = False) -> None:
        self._path = os.path.join(directory, "device-plugins/kubelet.sock")
        self._kubelet = os.path.join(directory, "registration.sock")
        self.cut = cut
        self.answers = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        os.rename(self._path, self._kubelet)
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        os.rename(self._kubelet, self._path)

    async def _serve(self, plugin_reader: asyncio.StreamReader, plugin_writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        kubelet_reader, kubelet_writer = await asyncio.open_unix_connection(self._kubelet)
        requests = asyncio.create_task(_forward(plugin_reader, kubelet_writer))
        try:
            # The frame with which every HTTP/2 server begins is no answer to the request.
            settings = await kubelet_reader.readexactly(9)
            settings += await kubelet_reader.readexactly(int.from_bytes(settings[:3]))
            plugin_writer.write(settings)
            answer = await _answer(kubelet_reader)
            if self.cut:
                return
            await self.answers.wait()
            plugin_writer.write(answer)
            await _forward(kubelet_reader, plugin_writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
            for writer in (plugin_writer, kubelet_writer):
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            self._connections.discard(task)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The kubelet's bytes up to the first header frame, which begins the answer."""
    read = b""
    while True:
        head = await reader.readexactly(9)
        read += head + await reader.readexactly(int.from_bytes(head[:3]))
        if head[3] == 1:
            return read


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
