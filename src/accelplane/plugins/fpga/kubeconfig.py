"""The API server as a kubeconfig tells it, as far as one plain request can do what that asks for.

A server by https, its authority, and a token or a certificate with its key, inline or as files, are taken. What would
need other programs or more than that (exec and other authentication providers, passwords, proxies, no verification,
another server's name) is refused by name. Facts: Kubernetes' clientcmd API, v1 Config.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import yaml

from accelplane.apiserver import ApiServer, NoApiServer, Source
from accelplane.fpga import shown

_MOST = 1024 * 1024


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
    """Everything is text to it, so no tag makes anything, or fails to. What is null is left out."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        node.value = [(key, value) for key, value in node.value if not _is_null(value)]
        return super().construct_mapping(node, deep)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null", "Null", "NULL")


T = TypeVar("T")


def api_server(path: str, master: str = "") -> ApiServer:
    """The server of the kubeconfig's current context, at `master` if given. Raises `NoApiServer`."""
    config = _loaded(path)
    context = _of(path, "context", config.current, {each.name: each.context for each in config.contexts})
    cluster = _of(path, "cluster", context.cluster, {each.name: each.cluster for each in config.clusters})
    user = _of(path, "user", context.user, {each.name: each.user for each in config.users})
    unusable = {
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "proxy-url": cluster.proxy_url,
        "tls-server-name": cluster.tls_server_name,
        "username": user.username,
        "exec": user.exec,
        "auth-provider": user.auth_provider,
    }
    for name, value in unusable.items():
        if value:
            raise NoApiServer(f"{path}: {name} cannot be done here; expected an authority, and a token or certificate")
    host, port = _address(path, master or cluster.server)
    authority = _source(path, cluster.certificate_authority, cluster.certificate_authority_data)
    if authority is None:
        raise NoApiServer(f"{path}: cluster {shown(context.cluster)} has no certificate-authority")
    token: Source | None = user.token.encode() if user.token else None
    if token is None and user.token_file:
        token = _beside(path, user.token_file)
    certificate = _source(path, user.client_certificate, user.client_certificate_data)
    key = _source(path, user.client_key, user.client_key_data)
    if token is None and (certificate is None or key is None):
        raise NoApiServer(f"{path}: user {shown(context.user)} has no token, nor a client certificate with its key")
    pair = (certificate, key) if certificate is not None and key is not None else None
    return ApiServer(host, port, authority=authority, token_file=token, certificate=pair)


def _loaded(path: str) -> _Config:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST + 1)
        if len(data) > _MOST:
            raise NoApiServer(f"{path}: more than {_MOST} bytes")
        return msgspec.convert(yaml.load(data, _Texts), _Config, strict=False)  # noqa: S506
    except OSError as error:
        raise NoApiServer(f"{path}: {error.strerror}; expected a kubeconfig") from None
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise NoApiServer(f"{path}: no kubeconfig: {' '.join(str(error).split())}") from None


def _of(path: str, what: str, name: str, there: Mapping[str, T]) -> T:
    if name not in there:
        known = ", ".join(map(shown, there)) or "none"
        raise NoApiServer(f"{path}: no {what} {shown(name)}; there are: {known}")
    return there[name]


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
    raise NoApiServer(f"{path}: server {shown(url)}, expected https://host:port")


def _source(path: str, file: str, data: str) -> Source | None:
    """What is inline, which counts if both are there, or where it is."""
    if data:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise NoApiServer(f"{path}: a certificate or key that is not base64") from None
    return _beside(path, file) if file else None


def _beside(path: str, file: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(path)), file)
