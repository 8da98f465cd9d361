"""Kubeconfigs, as far as one plain request can do what they ask for."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import Authority
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import ApiServer, NoApiServer
from accelplane.plugins.fpga.kubeconfig import api_server

AUTHORITY = Authority("test authority")
CLIENT = AUTHORITY.client("me")


def inline(data: bytes) -> str:
    return base64.b64encode(data).decode()


CA = inline(AUTHORITY.credentials.certificate)
CERTIFICATE = {"client-certificate-data": inline(CLIENT.certificate), "client-key-data": inline(CLIENT.key)}


def kubeconfig(directory: Path, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None) -> str:
    """Written as JSON, which YAML is too."""
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


def usable(api: ApiServer) -> str:
    """Its address, when what it has of certificates is good."""
    assert api.context()
    return api.address


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({}, {"token": "t"}),
        ({"insecure-skip-tls-verify": False}, {"tokenFile": "token"}),
        ({"certificate-authority-data": "", "certificate-authority": "ca.crt"}, CERTIFICATE),
        ({}, {"client-certificate": "client.crt", "client-key": "client.key"}),
        ({"server": "https://one:6443/"}, {**CERTIFICATE, "token": "t"}),
        ({"proxy-url": None, "insecure-skip-tls-verify": None}, {**CERTIFICATE, "token": None, "exec": None}),
    ],
)
def test_tokens_and_certificates_are_taken_inline_and_from_files_beside_it(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    (tmp_path / "ca.crt").write_bytes(AUTHORITY.credentials.certificate)
    (tmp_path / "client.crt").write_bytes(CLIENT.certificate)
    (tmp_path / "client.key").write_bytes(CLIENT.key)
    assert usable(api_server(kubeconfig(tmp_path, cluster, user))) == "one:6443"


def test_another_server_may_be_given(tmp_path: Path) -> None:
    assert usable(api_server(kubeconfig(tmp_path), "https://[2001:db8::1]")) == "[2001:db8::1]:443"


@pytest.mark.parametrize(
    ("cluster", "user", "told"),
    [
        ({"insecure-skip-tls-verify": True}, None, "insecure-skip-tls-verify cannot be done here"),
        ({"proxy-url": "http://x"}, None, "proxy-url cannot be done"),
        ({"tls-server-name": "x"}, None, "tls-server-name cannot be done"),
        ({}, {"exec": {"command": "x"}}, "exec cannot be done"),
        ({}, {"auth-provider": {"name": "x"}}, "auth-provider cannot be done"),
        ({}, {"username": "x", "password": "y"}, "username cannot be done"),
        ({}, {}, "user 'me' has no token, nor a client certificate with its key"),
        ({}, {"client-certificate": "x"}, "user 'me' has no token, nor a client certificate with its key"),
        ({"certificate-authority-data": ""}, None, "cluster 'there' has no certificate-authority"),
        ({"certificate-authority-data": "%"}, None, "a certificate or key that is not base64"),
        ({"server": "http://one"}, None, "server 'http://one', expected https://host:port"),
        ({"server": "https://one/k8s"}, None, "server 'https://one/k8s', expected https://host:port"),
        ({"server": "https://one:port"}, None, "expected https://host:port"),
        ({"server": "https://\u00f6ne"}, None, "expected https://host:port"),
        ({"server": 7}, None, "server '7', expected https://host:port"),
        ({"server": []}, None, "no kubeconfig: Expected `str`, got `array`"),
    ],
)
def test_what_cannot_be_done_is_named(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any] | None, told: str
) -> None:
    with pytest.raises(NoApiServer) as refused:
        api_server(kubeconfig(tmp_path, cluster, user))
    assert str(refused.value).startswith(f"{tmp_path}/kubeconfig: ")
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "no context ''; there are: none"),
        ("current-context: x\ncontexts: [{name: y, context: {}}]", "no context 'x'; there are: 'y'"),
        ("- x", "no kubeconfig"),
        ("{", "no kubeconfig"),
        ("\x00", "no kubeconfig"),
        ("[" * 1500, "no kubeconfig"),
        ("x" * (1 << 20 | 1), "more than 1048576 bytes"),
    ],
    ids=["empty", "context", "list", "junk", "zero", "depth", "size"],
)
def test_what_is_no_kubeconfig_is_told_apart(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(NoApiServer, match=told):
        api_server(str(path))


def test_one_that_is_not_there_is_named() -> None:
    with pytest.raises(NoApiServer, match="/nowhere: No such file or directory; expected a kubeconfig"):
        api_server("/nowhere")


@pytest.mark.parametrize(
    ("user", "told"),
    [
        ({"client-certificate": "no.crt", "client-key": "no.key"}, "no.crt: No such file"),
        ({**CERTIFICATE, "client-key-data": CERTIFICATE["client-certificate-data"]}, "no certificate with its key"),
        ({**CERTIFICATE, "client-key-data": inline(Authority("x").credentials.key)}, "no certificate with its key"),
    ],
    ids=["missing", "no key", "another key"],
)
def test_a_certificate_without_its_key_is_told_of_when_it_is_used(
    tmp_path: Path, user: dict[str, Any], told: str
) -> None:
    with pytest.raises(NoApiServer, match=told):
        api_server(kubeconfig(tmp_path, user=user)).context()


@given(st.binary(max_size=300))
def test_whatever_is_in_the_file_nothing_but_that_error_comes_of_it(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "junk-kubeconfig"
    path.write_bytes(data)
    with pytest.raises(NoApiServer):
        api_server(str(path))
