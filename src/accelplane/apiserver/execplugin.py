"""Credentials from a command, as kubeconfig files of cloud providers have them.

Facts: client.authentication.k8s.io/v1 (the ExecCredential object, `KUBERNETES_EXEC_INFO`); client-go runs the command
again after the expiration and after a 401.
"""

import asyncio
import logging
import math
import os
import time
from datetime import UTC, datetime

import msgspec

from accelplane.apiserver.config import ExecPlugin
from accelplane.apiserver.errors import NoCredentials
from accelplane.processes import end_process

log = logging.getLogger(__name__)

_TIMEOUT = 60.0
_MAX_OUTPUT = 1024 * 1024


class _Status(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _Credential(msgspec.Struct, rename="camel"):
    api_version: str
    status: _Status


class ExecCredentials:
    """The credentials that a command printed last. One command runs at a time."""

    def __init__(self, plugin: ExecPlugin) -> None:
        self.token = ""
        self.certificate: tuple[bytes, bytes] | None = None
        self._plugin = plugin
        self._valid_until = 0.0
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Runs the command unless the credentials are valid. Raises `NoCredentials`."""
        async with self._lock:
            if time.time() < self._valid_until:
                return
            status = await self._run()
            self.token = status.token
            pair = status.client_certificate_data.encode(), status.client_key_data.encode()
            self.certificate = pair if all(pair) else None
            expiration = status.expiration_timestamp
            if expiration is not None and expiration.tzinfo is None:
                expiration = expiration.replace(tzinfo=UTC)
            self._valid_until = math.inf if expiration is None else expiration.timestamp()

    def expire(self) -> bool:
        """Makes `refresh` run the command; returns whether there were credentials that it replaces."""
        had, self._valid_until = self._valid_until > 0, 0.0
        return had

    async def _run(self) -> _Status:
        """Raises `NoCredentials`."""
        plugin = self._plugin
        name = f"exec plugin {plugin.command}"
        try:
            async with asyncio.timeout(_TIMEOUT):
                code, output, complaint = await _output(plugin)
        except FileNotFoundError as error:
            hint = f"; {plugin.install_hint}" if plugin.install_hint else ""
            raise NoCredentials(name, f"{error.strerror}{hint}") from None
        except OSError as error:
            problem = f"no output within {_TIMEOUT:g} s" if isinstance(error, TimeoutError) else error.strerror
            raise NoCredentials(name, f"{problem}") from None
        if code:
            raise NoCredentials(name, f"exit code {code}: {complaint[:500].decode(errors='replace').strip()}")
        try:
            credential = msgspec.json.decode(output, type=_Credential)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NoCredentials(name, f"expected an ExecCredential: {error}") from None
        status = credential.status
        if credential.api_version != plugin.api_version:
            raise NoCredentials(name, f"found {credential.api_version[:80]!a}, expected {plugin.api_version}")
        if not status.token.isascii() or not status.token.isprintable():
            raise NoCredentials(name, "found a token with control or non-ASCII characters")
        if not (status.token or (status.client_certificate_data and status.client_key_data)):
            raise NoCredentials(name, "found no token and no certificate with its key in status")
        log.debug("%s: new credentials", name)
        return status


async def _output(plugin: ExecPlugin) -> tuple[int, bytes, bytes]:
    """Exit code, standard output and standard error. Raises `OSError`."""
    spec: dict[str, object] = {"interactive": False}
    if plugin.cluster is not None:
        spec["cluster"] = plugin.cluster
    info = msgspec.json.encode({"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec})
    process = await asyncio.create_subprocess_exec(
        plugin.command,
        *plugin.arguments,
        env=os.environ | plugin.variables | {"KUBERNETES_EXEC_INFO": info.decode()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, complaint = await process.communicate()
    finally:
        await end_process(process)
    return process.returncode or 0, output[:_MAX_OUTPUT], complaint
