"""Reads the API server of a kubeconfig.

Supported are an https server, its certificate authority, and a token or a client certificate with its key, inline or as
files. Other fields (exec, authentication providers, passwords, proxies, insecure-skip-tls-verify, tls-server-name)
raise an error that names the field. Facts: the clientcmd API of Kubernetes, v1 Config.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import yaml

from accelplane.apiserver import ApiServer, NoCredentials, Source
from accelplane.fpga import shown

_MAX_SIZE = 1024 * 1024


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""
    tls_server_name: str = ""


class _User(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    exec: Any = None
    auth_provider: Any = None


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster


class _NamedUser(msgspec.Struct):
    name: str
    user: _User


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context


class _Config(msgspec.Struct):
    current: str = msgspec.field(default="", name="current-context")
    clusters: Sequence[_NamedCluster] = ()
    users: Sequence[_NamedUser] = ()
    contexts: Sequence[_NamedContext] = ()


class _Texts(yaml.BaseLoader):
    """Loads all scalars as text, so tags have no effect. Null values are omitted."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        node.value = [(key, value) for key, value in node.value if not _is_null(value)]
        return super().construct_mapping(node, deep)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null", "Null", "NULL")


T = TypeVar("T")


def api_server(path: str, master: str = "") -> ApiServer:
    """Returns the server of the current context; `master` replaces its URL. Raises `NoCredentials`."""
    config = _load(path)
    context = _entry(path, "context", config.current, {each.name: each.context for each in config.contexts})
    cluster = _entry(path, "cluster", context.cluster, {each.name: each.cluster for each in config.clusters})
    user = _entry(path, "user", context.user, {each.name: each.user for each in config.users})
    unsupported = {
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "proxy-url": cluster.proxy_url,
        "tls-server-name": cluster.tls_server_name,
        "username": user.username,
        "exec": user.exec,
        "auth-provider": user.auth_provider,
    }
    for name, value in unsupported.items():
        if value:
            expected = "a certificate authority and a token or client certificate"
            raise NoCredentials(path, f"unsupported kubeconfig field {name}; expected {expected}")
    host, port = _address(path, master or cluster.server)
    authority = _source(path, cluster.certificate_authority, cluster.certificate_authority_data)
    if authority is None:
        raise NoCredentials(path, f"cluster {shown(context.cluster)} has no certificate-authority")
    token: Source | None = user.token.encode() if user.token else None
    if token is None and user.token_file:
        token = _absolute(path, user.token_file)
    certificate = _source(path, user.client_certificate, user.client_certificate_data)
    key = _source(path, user.client_key, user.client_key_data)
    if token is None and (certificate is None or key is None):
        raise NoCredentials(path, f"user {shown(context.user)} has neither a token nor a client certificate and key")
    pair = (certificate, key) if certificate is not None and key is not None else None
    return ApiServer(host, port, authority=authority, token_file=token, certificate=pair)


def _load(path: str) -> _Config:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_SIZE + 1)
        if len(data) > _MAX_SIZE:
            raise NoCredentials(path, f"found more than {_MAX_SIZE} bytes, expected a kubeconfig")
        return msgspec.convert(yaml.load(data, _Texts), _Config, strict=False)  # noqa: S506
    except OSError as error:
        raise NoCredentials(path, f"{error.strerror}; expected a kubeconfig") from None
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise NoCredentials(path, f"invalid kubeconfig: {' '.join(str(error).split())}") from None


def _entry(path: str, kind: str, name: str, entries: Mapping[str, T]) -> T:
    if name not in entries:
        known = ", ".join(map(shown, entries)) or "none"
        raise NoCredentials(path, f"found no {kind} {shown(name)}, expected one of: {known}")
    return entries[name]


def _address(path: str, url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        plain = not (parts.path.strip("/") or parts.query or parts.username)
        if parts.scheme == "https" and host and host.isascii() and " " not in host and plain:
            return host, port or 443
    raise NoCredentials(path, f"server is {shown(url)}, expected https://host:port")


def _source(path: str, file: str, data: str) -> Source | None:
    """Returns the inline data, which takes precedence, or the path of the file."""
    if data:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise NoCredentials(path, "invalid base64 data of a certificate or key") from None
    return _absolute(path, file) if file else None


def _absolute(path: str, file: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(path)), file)
