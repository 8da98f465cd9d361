"""Kubeconfigs, as far as one plain request can do what they ask for."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import Authority
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import ApiServer, NoCredentials
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
def test_tokens_and_certificates_are_read_inline_and_from_files(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    (tmp_path / "ca.crt").write_bytes(AUTHORITY.credentials.certificate)
    (tmp_path / "client.crt").write_bytes(CLIENT.certificate)
    (tmp_path / "client.key").write_bytes(CLIENT.key)
    assert usable(api_server(kubeconfig(tmp_path, cluster, user))) == "one:6443"


def test_master_replaces_the_server(tmp_path: Path) -> None:
    assert usable(api_server(kubeconfig(tmp_path), "https://[2001:db8::1]")) == "[2001:db8::1]:443"


@pytest.mark.parametrize(
    ("cluster", "user", "text"),
    [
        ({"insecure-skip-tls-verify": True}, None, "unsupported kubeconfig field insecure-skip-tls-verify; expected"),
        ({"proxy-url": "http://x"}, None, "unsupported kubeconfig field proxy-url; expected"),
        ({"tls-server-name": "x"}, None, "unsupported kubeconfig field tls-server-name; expected"),
        ({}, {"exec": {"command": "x"}}, "unsupported kubeconfig field exec; expected"),
        ({}, {"auth-provider": {"name": "x"}}, "unsupported kubeconfig field auth-provider; expected"),
        ({}, {"username": "x", "password": "y"}, "unsupported kubeconfig field username; expected"),
        ({}, {}, "user 'me' has neither a token nor a client certificate and key"),
        ({}, {"client-certificate": "x"}, "user 'me' has neither a token nor a client certificate and key"),
        ({"certificate-authority-data": ""}, None, "cluster 'there' has no certificate-authority"),
        ({"certificate-authority-data": "%"}, None, "invalid base64 data of a certificate or key"),
        ({"server": "http://one"}, None, "server is 'http://one', expected https://host:port"),
        ({"server": "https://one/k8s"}, None, "server is 'https://one/k8s', expected https://host:port"),
        ({"server": "https://one:port"}, None, "expected https://host:port"),
        ({"server": "https://\u00f6ne"}, None, "expected https://host:port"),
        ({"server": 7}, None, "server is '7', expected https://host:port"),
        ({"server": []}, None, "invalid kubeconfig: Expected `str`, got `array`"),
    ],
)
def test_unsupported_and_invalid_fields_are_named(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any] | None, text: str
) -> None:
    with pytest.raises(NoCredentials) as refused:
        api_server(kubeconfig(tmp_path, cluster, user))
    assert str(refused.value).startswith(f"{tmp_path}/kubeconfig: ")
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{}", "found no context '', expected one of: none"),
        ("current-context: x\ncontexts: [{name: y, context: {}}]", "found no context 'x', expected one of: 'y'"),
        ("- x", "invalid kubeconfig"),
        ("{", "invalid kubeconfig"),
        ("\x00", "invalid kubeconfig"),
        ("[" * 1500, "invalid kubeconfig"),
        ("x" * (1 << 20 | 1), "more than 1048576 bytes"),
    ],
    ids=["empty", "context", "list", "junk", "zero", "depth", "size"],
)
def test_errors_of_invalid_kubeconfigs(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(NoCredentials, match=text):
        api_server(str(path))


def test_a_missing_kubeconfig() -> None:
    with pytest.raises(NoCredentials, match="/nowhere: No such file or directory; expected a kubeconfig"):
        api_server("/nowhere")


@pytest.mark.parametrize(
    ("user", "text"),
    [
        ({"client-certificate": "no.crt", "client-key": "no.key"}, "no.crt: No such file"),
        ({**CERTIFICATE, "client-key-data": CERTIFICATE["client-certificate-data"]}, "no certificate with its key"),
        ({**CERTIFICATE, "client-key-data": inline(Authority("x").credentials.key)}, "no certificate with its key"),
    ],
    ids=["missing", "no key", "another key"],
)
def test_a_certificate_without_its_key_fails_when_it_is_used(tmp_path: Path, user: dict[str, Any], text: str) -> None:
    with pytest.raises(NoCredentials, match=text):
        api_server(kubeconfig(tmp_path, user=user)).context()


@given(st.binary(max_size=300))
def test_any_content_raises_no_other_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk-kubeconfig"
    path.write_bytes(data)
    with pytest.raises(NoCredentials):
        api_server(str(path))
