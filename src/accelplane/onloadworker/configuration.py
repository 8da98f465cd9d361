"""The validated configuration of the worker from its environment.

The kernel splits the arguments of the control plane server at white space and knows no quotes, so no word may contain
any. Values that could be read as an option of crictl, or as another container, are rejected.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_CONTAINER_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,127}")
_MAX_PARAMETERS = 1024  # of a text parameter of a kernel module (kernel/params.c)


class WorkerError(Exception):
    """Ends the worker with status 1; the container then restarts."""


class Configuration(Struct, frozen=True, kw_only=True):
    """The environment of the worker's container. `server_parameters` are separated by white space."""

    pod: str
    namespace: str
    container: str
    server_path: str
    server_parameters: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Configuration":
        """From the variables of the DaemonSet. Raises `WorkerError`."""
        return cls(
            pod=_name(environment, "POD_NAME"),
            namespace=_name(environment, "POD_NAMESPACE"),
            container=_name(environment, "CONTAINER_NAME"),
            server_path=absolute_path("ONLOAD_CP_SERVER_PATH", environment.get("ONLOAD_CP_SERVER_PATH", "")),
            server_parameters=_ascii_text("ONLOAD_CP_SERVER_PARAMS", environment.get("ONLOAD_CP_SERVER_PARAMS", "")),
        )

    def arguments(self, container_id: str) -> str:
        """The value of `cplane_server_params`. Raises `WorkerError` if it is too long."""
        text = f"exec {container_id} {self.server_path}"
        if self.server_parameters:
            text += f" {self.server_parameters}"
        if len(text) > _MAX_PARAMETERS:
            raise WorkerError(
                f"cplane_server_params: found {len(text)} characters, expected {_MAX_PARAMETERS} or less; "
                "shorten ONLOAD_CP_SERVER_PARAMS"
            )
        return text


def split_container_id(text: str) -> tuple[str, str]:
    """Returns runtime and ID of `runtime://id`. Raises `WorkerError`."""
    parts = text.split("://")
    if len(parts) != 2 or not _CONTAINER_ID.fullmatch(parts[1]):
        raise WorkerError(f"unexpected format of containerID {text[:200]!a}, expected runtime://id")
    return parts[0], parts[1]


def absolute_path(name: str, text: str) -> str:
    """Returns the path. Raises `WorkerError` that names its option if the kernel cannot run it."""
    if not text.startswith("/") or len(text.split()) != 1 or text != text.strip() or not _plain(text):
        raise WorkerError(f"{name}: found {text[:80]!a}, expected an absolute path without white space")
    return text


def _name(environment: Mapping[str, str], variable: str) -> str:
    text = environment.get(variable, "")
    if not _NAME.fullmatch(text):
        raise WorkerError(f"{variable}: found {text[:80]!a}, expected a name of Kubernetes; see the DaemonSet's env")
    return text


def _ascii_text(name: str, text: str) -> str:
    if not _plain(text):
        raise WorkerError(f"{name}: found {text[:80]!a}, expected printable ASCII characters")
    return text.strip()


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable()
