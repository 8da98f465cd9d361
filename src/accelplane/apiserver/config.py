"""Where the API server is and how requests are authenticated, as client-go's `rest.Config`."""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from accelplane.apiserver.errors import NoCredentials
from accelplane.descriptors import read_limited

_ACCOUNT = "/kubernetes.io/serviceaccount/"  # part of the path where the kubelet mounts it
_MAX_SIZE = 1024 * 1024

# A file's path, or its content.
Source: TypeAlias = str | bytes


class ExecPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """A command that prints credentials (client.authentication.k8s.io)."""

    command: str
    api_version: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    cluster: Mapping[str, object] | None = None  # the cluster in KUBERNETES_EXEC_INFO
    install_hint: str = ""


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A server and the credentials for it. `server` is `https://host[:port][/prefix]`, or `http://`.

    Without an `authority` the system's certificate authorities are trusted. Files are read again when they change.
    """

    server: str
    namespace: str = "default"
    authority: Source | None = None
    insecure: bool = False  # accepts every certificate
    server_name: str = ""  # the name in the server's certificate, if it is not the URL's host
    proxy: str = ""  # the environment names it if empty
    token: Source | None = None
    certificate: tuple[Source, Source] | None = None  # with its key
    password: tuple[str, str] | None = None  # with its user
    exec_plugin: ExecPlugin | None = None


def read_source(source: Source) -> bytes:
    """The content. Raises `NoCredentials`."""
    if isinstance(source, bytes):
        return source
    try:
        return read_limited(source, _MAX_SIZE)
    except FileNotFoundError:
        hint = "; set automountServiceAccountToken: true in the pod" if _ACCOUNT in source else ""
        raise NoCredentials(source, f"found no file, expected the credentials of the API server{hint}") from None
    except OSError as error:
        raise NoCredentials(source, error.strerror or str(error)) from None


def source_name(source: Source) -> str:
    """The source in messages."""
    return source if isinstance(source, str) else "(inline data)"
