"""Credentials of exec plugins of a kubeconfig."""

import json
import sys
from pathlib import Path

import pytest
from apiservers import NODE, Thing, sequence
from msgspec import structs
from tls_peer import Peer, document, serving

from accelplane.apiserver import ApiServer, ClientConfig, NoCredentials, StatusError
from accelplane.apiserver.config import ExecPlugin

PLUGIN = """
import json, os, sys
count = int(open(sys.argv[1]).read() or 0) + 1
open(sys.argv[1], "w").write(str(count))
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert info["kind"] == "ExecCredential" and info["spec"]["interactive"] is False
status = json.loads(os.environ["STATUS"].replace("COUNT", str(count)))
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}))
"""


def exec_config(peer: Peer, status: object, *, program: str = PLUGIN) -> ClientConfig:
    (peer.directory / "count").write_text("")
    plugin = ExecPlugin(
        command=sys.executable,
        api_version="client.authentication.k8s.io/v1",
        arguments=("-c", program, str(peer.directory / "count")),
        variables={"STATUS": json.dumps(status)},
        install_hint="install it",
    )
    return structs.replace(peer.config, token=None, exec_plugin=plugin)


async def test_an_exec_plugin_runs_once_until_its_credentials_expire_or_are_rejected(tmp_path: Path) -> None:
    answers = sequence(*[document({"name": "one"})] * 2, document({}, "401 Unauthorized"), document({"name": "one"}))
    async with serving(tmp_path, answers) as peer:
        api = ApiServer(exec_config(peer, {"token": "t-COUNT", "expirationTimestamp": "2999-01-01T00:00:00Z"}))
        for _ in range(3):
            await api.get(NODE, Thing)
        tokens = [each.headers["authorization"].removeprefix("Bearer ") for each in peer.requests]
        assert tokens == ["t-1", "t-1", "t-1", "t-2"]
        expired = ApiServer(exec_config(peer, {"token": "t-COUNT", "expirationTimestamp": "2020-01-01T00:00:00Z"}))
        for _ in range(2):
            await expired.get(NODE, Thing)
        assert [each.headers["authorization"] for each in peer.requests[-2:]] == ["Bearer t-1", "Bearer t-2"]


async def test_credentials_that_stay_rejected_are_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"reason": "Unauthorized"}, "401 Unauthorized")) as peer:
        with pytest.raises(StatusError, match="401 Unauthorized"):
            await ApiServer(exec_config(peer, {"token": "t"})).get(NODE, Thing)
        assert len(peer.requests) == 2
        with pytest.raises(StatusError, match="401 Unauthorized"):
            await peer.api.get(NODE, Thing)
        assert len(peer.requests) == 3


@pytest.mark.parametrize(
    ("program", "status", "problem"),
    [
        ("import sys; sys.exit('no login')", {}, "exit code 1: no login"),
        ("print('no JSON')", {}, "expected an ExecCredential"),
        (PLUGIN.replace('info["apiVersion"]', "'v0'", 1), {"token": "t"}, "found 'v0', expected client.authentication"),
        (PLUGIN, {}, "found no token and no certificate with its key"),
        (PLUGIN, {"clientCertificateData": "x"}, "found no token and no certificate with its key"),
        (PLUGIN, {"token": "two\nlines"}, "found a token with control or non-ASCII characters"),
        (PLUGIN, {"clientCertificateData": "x", "clientKeyData": "y"}, "expected a certificate and its key in PEM"),
    ],
)
async def test_an_exec_plugin_without_credentials_is_reported(
    tmp_path: Path, program: str, status: object, problem: str
) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        with pytest.raises(NoCredentials, match=problem):
            await ApiServer(exec_config(peer, status, program=program)).get(NODE, Thing)
        assert peer.requests == []


async def test_a_missing_exec_plugin_is_reported_with_its_hint(tmp_path: Path) -> None:
    async with serving(tmp_path, document({"name": "one"})) as peer:
        config = exec_config(peer, {})
        assert config.exec_plugin
        missing = structs.replace(config.exec_plugin, command="/no/plugin")
        with pytest.raises(NoCredentials, match="exec plugin /no/plugin: No such file or directory; install it"):
            await ApiServer(structs.replace(config, exec_plugin=missing)).get(NODE, Thing)
