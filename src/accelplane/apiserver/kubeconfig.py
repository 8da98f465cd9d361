"""Reads kubeconfig files. Facts: the clientcmd API of Kubernetes (v1 Config), its rules for several files.

Supported are certificate authorities, tokens, client certificates, passwords, exec plugins, `proxy-url`,
`insecure-skip-tls-verify` and `tls-server-name`. `auth-provider`, which client-go has removed, raises an error.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec.structs import replace

from accelplane.apiserver.config import ClientConfig, ExecPlugin, Source, read_source
from accelplane.apiserver.errors import NoCredentials

_MAX_SIZE = 1024 * 1024
_EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


class _Cluster(msgspec.Struct, rename="kebab", omit_defaults=True):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""
    tls_server_name: str = ""


class _Variable(msgspec.Struct):
    name: str
    value: str = ""


class _Exec(msgspec.Struct, rename="camel"):
    command: str = ""
    args: list[str] = []
    env: list[_Variable] = []
    api_version: str = ""
    install_hint: str = ""
    interactive_mode: str = ""
    provide_cluster_info: bool = False


class _User(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    password: str = ""
    exec: _Exec | None = None
    auth_provider: Any = None


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


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


def read_kubeconfig(*paths: str, server: str = "", context: str = "") -> ClientConfig:
    """The current context, or the one named `context`; `server` replaces its URL. Raises `NoCredentials`.

    Of several files, the first that defines a context, cluster, user or the current context wins, and files that do
    not exist are skipped.
    """
    existing = [path for path in paths if os.path.exists(path)] or paths[:1]
    configs = [(path, _load(path)) for path in existing]
    named = ":".join(existing)
    current = context or next((config.current for _, config in configs if config.current), "")
    contexts = {each.name: each.context for _, config in reversed(configs) for each in config.contexts}
    clusters = {each.name: (path, each.cluster) for path, config in reversed(configs) for each in config.clusters}
    users = {each.name: (path, each.user) for path, config in reversed(configs) for each in config.users}
    if not current:
        raise NoCredentials(named, "found no current-context, expected the name of a context; set current-context")
    chosen = _entry(named, "context", current, contexts)
    cluster_path, cluster = _entry(named, "cluster", chosen.cluster, clusters)
    user_path, user = _entry(named, "user", chosen.user, users) if chosen.user else (named, _User())
    if user.auth_provider:
        raise NoCredentials(user_path, "unsupported kubeconfig field auth-provider; use exec, a token or a certificate")
    return ClientConfig(
        server=server or cluster.server,
        namespace=chosen.namespace or "default",
        authority=_source(cluster_path, cluster.certificate_authority, cluster.certificate_authority_data),
        insecure=cluster.insecure_skip_tls_verify,
        server_name=cluster.tls_server_name,
        proxy=cluster.proxy_url,
        # A file takes precedence, as in client-go.
        token=_absolute(user_path, user.token_file) if user.token_file else user.token.encode() or None,
        certificate=_certificate(user_path, user, chosen.user),
        password=(user.username, user.password) if user.username else None,
        exec_plugin=_exec_plugin(user_path, user.exec, cluster) if user.exec else None,
    )


def _load(path: str) -> _Config:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_SIZE + 1)
        if len(data) > _MAX_SIZE:
            raise NoCredentials(path, f"found more than {_MAX_SIZE} bytes, expected a kubeconfig")
        return msgspec.convert(yaml.load(data, _Texts) or {}, _Config, strict=False)  # noqa: S506 - texts only
    except OSError as error:
        raise NoCredentials(path, f"{error.strerror}; expected a kubeconfig; set --kubeconfig or KUBECONFIG") from None
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise NoCredentials(path, f"invalid kubeconfig: {' '.join(str(error).split())}") from None


def _entry(path: str, kind: str, name: str, entries: Mapping[str, T]) -> T:
    if name not in entries:
        known = ", ".join(f"{each[:80]!a}" for each in entries) or "none"
        raise NoCredentials(path, f"found no {kind} {name[:80]!a}, expected one of: {known}")
    return entries[name]


def _certificate(path: str, user: _User, name: str) -> tuple[Source, Source] | None:
    certificate = _source(path, user.client_certificate, user.client_certificate_data)
    key = _source(path, user.client_key, user.client_key_data)
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise NoCredentials(path, f"user {name[:80]!a}: expected client-certificate and client-key, found one of them")
    return certificate, key


def _exec_plugin(path: str, plugin: _Exec, cluster: _Cluster) -> ExecPlugin:
    if plugin.api_version not in _EXEC_VERSIONS:
        expected = " or ".join(_EXEC_VERSIONS)
        raise NoCredentials(path, f"exec plugin of apiVersion {plugin.api_version[:80]!a}, expected {expected}")
    if plugin.interactive_mode == "Always":
        raise NoCredentials(path, "exec plugin with interactiveMode Always, expected IfAvailable or Never")
    authority = _source(path, cluster.certificate_authority, cluster.certificate_authority_data)
    data = base64.b64encode(read_source(authority)).decode() if authority else ""
    described = replace(cluster, certificate_authority="", certificate_authority_data=data)
    return ExecPlugin(
        # A command without a directory is found in PATH.
        command=_absolute(path, plugin.command) if "/" in plugin.command else plugin.command,
        api_version=plugin.api_version,
        arguments=tuple(plugin.args),
        variables={each.name: each.value for each in plugin.env},
        cluster=msgspec.to_builtins(described) if plugin.provide_cluster_info else None,
        install_hint=plugin.install_hint,
    )


def _source(path: str, file: str, data: str) -> Source | None:
    """The inline data, which takes precedence, or the path of the file."""
    if data:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise NoCredentials(path, "invalid base64 data of a certificate or key") from None
    return _absolute(path, file) if file else None


def _absolute(path: str, file: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(path)), file)
