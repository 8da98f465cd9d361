"""Kubeconfig files, the order in which they are found, and the configuration of a pod."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import Authority
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import ApiServer, ClientConfig, NoCredentials, has_no_account, load_config
from accelplane.apiserver.config import ExecPlugin
from accelplane.apiserver.discovery import in_cluster
from accelplane.apiserver.kubeconfig import read_kubeconfig

AUTHORITY = Authority("test authority")
CLIENT = AUTHORITY.client("me")


def inline(data: bytes) -> str:
    return base64.b64encode(data).decode()


CA = inline(AUTHORITY.credentials.certificate)
CERTIFICATE = {"client-certificate-data": inline(CLIENT.certificate), "client-key-data": inline(CLIENT.key)}
EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "login", "interactiveMode": "Never"}


def kubeconfig(directory: Path, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None) -> str:
    """Written as JSON, which is YAML."""
    cluster = {"server": "https://one:6443", "certificate-authority-data": CA, **(cluster or {})}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "me@there",
        "contexts": [{"name": "me@there", "context": {"cluster": "there", "user": "me", "namespace": "x"}}],
        "clusters": [{"name": "there", "cluster": cluster}],
        "users": [{"name": "me", "user": {"token": "t"} if user is None else user}],
    }
    path = directory / "kubeconfig"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({}, {"token": "t"}),
        ({"insecure-skip-tls-verify": False}, {"tokenFile": "token"}),
        ({"certificate-authority-data": "", "certificate-authority": "ca.crt"}, CERTIFICATE),
        ({}, {"client-certificate": "client.crt", "client-key": "client.key"}),
        ({"server": "https://one:6443/"}, {**CERTIFICATE, "token": "t"}),
        ({"proxy-url": None, "insecure-skip-tls-verify": None}, {**CERTIFICATE, "token": None, "exec": None}),
        ({"insecure-skip-tls-verify": True, "certificate-authority-data": ""}, {}),
        ({"server": "https://one:6443/k8s/clusters/c-1", "proxy-url": "http://u:p@proxy:3128"}, {}),
    ],
)
def test_tokens_and_certificates_are_read_inline_and_from_files(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    (tmp_path / "ca.crt").write_bytes(AUTHORITY.credentials.certificate)
    (tmp_path / "client.crt").write_bytes(CLIENT.certificate)
    (tmp_path / "client.key").write_bytes(CLIENT.key)
    (tmp_path / "token").write_text("t")
    api = ApiServer(read_kubeconfig(kubeconfig(tmp_path, cluster, user)))
    api.check()
    assert api.address == "one:6443"


def test_every_supported_field_is_in_the_configuration(tmp_path: Path) -> None:
    cluster = {"insecure-skip-tls-verify": True, "tls-server-name": "name", "proxy-url": "http://proxy:1"}
    user = {**CERTIFICATE, "tokenFile": "dir/token", "token": "not used", "username": "u", "password": "p"}
    assert read_kubeconfig(kubeconfig(tmp_path, cluster, user)) == ClientConfig(
        server="https://one:6443",
        namespace="x",
        authority=AUTHORITY.credentials.certificate,
        insecure=True,
        server_name="name",
        proxy="http://proxy:1",
        token=f"{tmp_path}/dir/token",
        certificate=(CLIENT.certificate, CLIENT.key),
        password=("u", "p"),
    )


def test_an_exec_plugin_has_arguments_variables_and_the_cluster(tmp_path: Path) -> None:
    plugin = {
        **EXEC,
        "command": "bin/login",
        "args": ["--get", "token"],
        "env": [{"name": "PROFILE", "value": "a"}, {"name": "EMPTY", "value": ""}],
        "provideClusterInfo": True,
        "installHint": "install it",
    }
    assert read_kubeconfig(kubeconfig(tmp_path, user={"exec": plugin})).exec_plugin == ExecPlugin(
        command=f"{tmp_path}/bin/login",
        api_version="client.authentication.k8s.io/v1",
        arguments=("--get", "token"),
        variables={"PROFILE": "a", "EMPTY": ""},
        cluster={"server": "https://one:6443", "certificate-authority-data": CA},
        install_hint="install it",
    )
    found = read_kubeconfig(kubeconfig(tmp_path, user={"exec": {**EXEC, "env": None, "args": None}})).exec_plugin
    assert found == ExecPlugin(command="login", api_version="client.authentication.k8s.io/v1")


def test_the_server_can_be_replaced(tmp_path: Path) -> None:
    config = read_kubeconfig(kubeconfig(tmp_path), server="https://[2001:db8::1]")
    assert ApiServer(config).address == "[2001:db8::1]:443"


@pytest.mark.parametrize(
    ("cluster", "user", "text"),
    [
        ({}, {"auth-provider": {"name": "x"}}, "unsupported kubeconfig field auth-provider; use exec"),
        ({}, {"client-certificate": "x"}, "user 'me': expected client-certificate and client-key, found one of them"),
        ({}, {"client-key": "x"}, "user 'me': expected client-certificate and client-key, found one of them"),
        ({"certificate-authority-data": "%"}, None, "invalid base64 data of a certificate or key"),
        ({}, {"exec": {**EXEC, "apiVersion": "v1"}}, "exec plugin of apiVersion 'v1', expected client.authentication"),
        ({}, {"exec": {**EXEC, "interactiveMode": "Always"}}, "expected IfAvailable or Never"),
        ({"server": []}, None, "invalid kubeconfig: Expected `str`, got `array`"),
        ({"insecure-skip-tls-verify": "maybe"}, None, "invalid kubeconfig: Expected `bool`, got `str`"),
    ],
)
def test_unsupported_and_invalid_fields_are_reported(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any] | None, text: str
) -> None:
    with pytest.raises(NoCredentials) as raised:
        read_kubeconfig(kubeconfig(tmp_path, cluster, user))
    assert str(raised.value).startswith(f"{tmp_path}/kubeconfig: ")
    assert text in str(raised.value)


@pytest.mark.parametrize(
    "server",
    ["", "7", "one", "ftp://one", "https://", "https://one:port", "https://one:99999", "https://\u00f6ne",
     "https://o ne", "https://u:p@one", "https://one?x", "https://one#x", "http://[::1"],
)  # fmt: skip
def test_an_invalid_address_is_reported(server: str) -> None:
    with pytest.raises(NoCredentials, match=r"found '.*', expected https://host:port"):
        ApiServer(ClientConfig(server=server))


@pytest.mark.parametrize("proxy", ["https://proxy", "socks5://u:secret@proxy", "http://", "http://proxy:port"])
def test_an_unsupported_proxy_is_reported_without_its_password(tmp_path: Path, proxy: str) -> None:
    with pytest.raises(NoCredentials, match=r"proxy-url: .*expected http://host:port") as raised:
        ApiServer(read_kubeconfig(kubeconfig(tmp_path, {"proxy-url": proxy})))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{}", "found no current-context, expected the name of a context"),
        ("", "found no current-context"),
        ("current-context: x", "found no context 'x', expected one of: none"),
        ("current-context: x\ncontexts: [{name: y, context: {}}]", "found no context 'x', expected one of: 'y'"),
        ("current-context: y\ncontexts: [{name: y, context: {}}]", "found no cluster ''"),
        ("- x", "invalid kubeconfig"),
        ("current-context: x\nclusters: 7", "invalid kubeconfig"),
        ("{", "invalid kubeconfig"),
        ("\x00", "invalid kubeconfig"),
        ("[" * 1500, "invalid kubeconfig"),
        ("x" * (1 << 20 | 1), "more than 1048576 bytes"),
    ],
    ids=["object", "empty", "contexts", "context", "cluster", "list", "number", "junk", "zero", "depth", "size"],
)
def test_invalid_kubeconfigs_are_reported(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(NoCredentials, match=f"{path}: .*{text}"):
        read_kubeconfig(str(path))


def test_a_missing_kubeconfig_is_reported() -> None:
    with pytest.raises(NoCredentials, match="/nowhere: No such file or directory; expected a kubeconfig"):
        read_kubeconfig("/nowhere")


@pytest.mark.parametrize(
    ("user", "text"),
    [
        ({"client-certificate": "no.crt", "client-key": "no.key"}, "no.crt: No such file"),
        (
            {**CERTIFICATE, "client-key-data": CERTIFICATE["client-certificate-data"]},
            "a certificate and its key in PEM",
        ),
        (
            {**CERTIFICATE, "client-key-data": inline(Authority("x").credentials.key)},
            "a certificate and its key in PEM",
        ),
    ],
    ids=["missing", "no key", "another key"],
)
def test_a_certificate_without_its_key_fails_when_it_is_used(tmp_path: Path, user: dict[str, Any], text: str) -> None:
    api = ApiServer(read_kubeconfig(kubeconfig(tmp_path, user=user)))
    with pytest.raises(NoCredentials, match=text):
        api.check()


@given(st.binary(max_size=300))
def test_any_content_raises_no_other_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk-kubeconfig"
    path.write_bytes(data)
    with pytest.raises(NoCredentials):
        read_kubeconfig(str(path))


FILE = """
clusters: [{name: %(name)s, cluster: {server: "http://%(name)s", certificate-authority: ca.crt}}]
contexts:
- {name: %(name)s, context: {cluster: %(name)s, namespace: %(name)s}}
- {name: both, context: {cluster: %(name)s}}
"""


def test_the_first_of_several_files_has_priority_and_paths_are_relative_to_their_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config").write_text(FILE % {"name": name} + ("current-context: b" if name == "b" else ""))
    paths = [str(tmp_path / name / "config") for name in ("none", "a", "b")]
    found = read_kubeconfig(*paths)
    assert (found.server, found.namespace, found.authority) == ("http://b", "b", f"{tmp_path}/b/ca.crt")
    (tmp_path / "a" / "config").write_text(FILE % {"name": "a"} + "current-context: both")
    assert read_kubeconfig(*paths).server == "http://a"


def write(path: Path, namespace: str) -> Path:
    path.write_text(FILE % {"name": namespace} + f"current-context: {namespace}")
    return path


def test_flag_environment_account_and_home_are_tried_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".kube").mkdir()
    write(tmp_path / ".kube" / "config", "home")
    flag, environment = write(tmp_path / "flag", "flag"), write(tmp_path / "environment", "environment")
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config().namespace == "home"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert load_config().server == "https://10.96.0.1:443"
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{environment}")
    assert load_config().namespace == "environment"
    assert load_config(str(flag)).namespace == "flag"
    with pytest.raises(NoCredentials, match="none: No such file"):
        load_config(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("host", "port", "server"),
    [
        ("10.96.0.1", "443", "https://10.96.0.1:443"),
        ("fd00::1", "6443", "https://[fd00::1]:6443"),
        ("api.example", "1", "https://api.example:1"),
    ],
)
def test_a_pod_has_server_account_and_namespace(tmp_path: Path, host: str, port: str, server: str) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    (tmp_path / "namespace").write_text("mine\n")
    expected = ClientConfig(server=server, namespace="mine", authority=f"{tmp_path}/ca.crt", token=f"{tmp_path}/token")
    assert in_cluster(environment, str(tmp_path)) == expected
    assert ApiServer(expected).address == server.removeprefix("https://")
    assert in_cluster(environment, str(tmp_path / "none")).namespace == "default"


@pytest.mark.parametrize(
    ("host", "port"),
    [("", ""), ("", "443"), ("10.0.0.1", ""), ("10.0.0.1", "https"), ("10.0.0.1", "0"), ("10.0.0.1", "99999999"),
     ("10.0.0.1", "-1"), ("a b", "1"), ("a/b", "1"), ("a\r\nX: y", "1"), ("[fd00::1]", "1"), ("\u00e4", "1")],
)  # fmt: skip
def test_outside_of_a_pod_there_is_no_configuration(host: str, port: str) -> None:
    with pytest.raises(NoCredentials):
        in_cluster({"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port})


def test_the_service_account_of_a_pod_is_optional(tmp_path: Path) -> None:
    in_pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert has_no_account(in_pod, str(tmp_path / "none"))
    assert not has_no_account(in_pod, str(tmp_path))
    assert not has_no_account({}, str(tmp_path / "none"))
