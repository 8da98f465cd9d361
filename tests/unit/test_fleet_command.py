"""The flags of `accelplane fleet`, and its demo."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from accelplane.cli.fleet import FLAGS, fleet_options, main, page_options
from accelplane.cli.goflags import Value, parse, with_defaults
from accelplane.fleet.options import FleetOptions, PageOptions


def values(*words: str) -> dict[str, Value]:
    options, rest = parse(FLAGS, words)
    assert rest == []
    return dict(with_defaults(FLAGS, options, {}))


def test_the_defaults_are_the_documented_ones() -> None:
    assert fleet_options(values()) == FleetOptions()
    assert page_options(values()) == PageOptions()


def test_flags_become_options() -> None:
    options = values(
        "-pods=all", "-quotas=false", "-device-plugins=false", "-events", "-agent-namespaces=a, b", "-agent-accounts=",
        "-agent-ca=ca", "-agent-server-name=s",
        "-agent-token=t", "-resource-prefixes=example.com/", "-address=0", "-secure-address=:8443", "-tls-dir=d",
        "-audience=x,y", "-requestheader-client-ca=p", "-requestheader-allowed-names=front",
        "-health-probe-bind-address=0", "-grafana-url=https://g/{node}", "-use-interval=0",
    )  # fmt: skip
    assert fleet_options(options) == FleetOptions(
        pods="all", quotas=False, device_plugins=False, events=True, agent_namespaces=("a", "b"), agent_accounts=(),
        agent_ca="ca", agent_server_name="s", agent_token="t", resource_prefixes=("example.com/",), use_interval=0,  # noqa: S106 - a file
    )  # fmt: skip
    assert page_options(options) == PageOptions(
        address="", secure_address=":8443", health_address="", tls_directory="d", audiences=("x", "y"),
        proxy_ca="p", proxy_names=("front",), grafana_url="https://g/{node}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-pods=some"], "-pods: found 'some', expected waiting or all"),
        (["-agent-token=t"], "-agent-token: found without -agent-ca, expected both"),
        (["-resource-prefixes=example.com"], "-resource-prefixes: found 'example.com', expected a domain and /"),
        (["-secure-address=:8443"], "-secure-address and -tls-dir: found one of them"),
        (["-tls-dir=d"], "-secure-address and -tls-dir: found one of them"),
        (["-address=0"], "-address: found 0 and no -secure-address"),
        (["-address=8080"], "-address: found '8080', expected host:port"),
        (["-address=:8080"], "-address: found :8080, expected a loopback address such as 127.0.0.1:8080"),
        (["-address=10.0.0.1:8080"], "use -secure-address, or -allow-unauthenticated if everyone may see all names"),
        (["-grafana-url=javascript:x"], "-grafana-url: found 'javascript:x', expected https://"),
        (["-requestheader-client-ca=f"], "-requestheader-client-ca: found without -secure-address"),
    ],
)
def test_wrong_values_name_their_flag(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _ = fleet_options(values(*words)), page_options(values(*words))


@pytest.mark.parametrize("address", ["localhost:8080", "[::1]:8080", "127.9.9.9:1"])
def test_loopback_addresses_need_no_permission(address: str) -> None:
    assert page_options(values(f"-address={address}")).address == address


def test_an_address_of_the_network_without_authentication_has_to_be_permitted() -> None:
    found = page_options(values("-address=:8080", "-allow-unauthenticated"))
    assert (found.address, found.any_host) == (":8080", True)


@pytest.mark.parametrize("flag", ["agent-ca", "agent-token"])
def test_a_missing_file_ends_the_command(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "present").touch()
    files = dict.fromkeys(("agent-ca", "agent-token"), f"{tmp_path}/present") | {flag: f"{tmp_path}/missing"}
    assert main([f"-{name}={path}" for name, path in files.items()]) == 1
    assert f"accelplane fleet: -{flag}: found no file {tmp_path}/missing" in capsys.readouterr().err


def test_the_demo_rejects_numbers_of_nodes_that_it_cannot_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "-nodes=0"]) == 2
    assert "-nodes: found 0, expected a number from 1 to 10000" in capsys.readouterr().err
    assert main(["demo", "-nodes=3", "-address=nowhere"]) == 1


def test_the_demo_names_an_address_that_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["demo", "-nodes=1", f"-address={address}"]) == 1
    assert f"-address {address}: Address already in use; choose another one" in capsys.readouterr().err


def test_the_demo_serves_the_page_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "accelplane", "fleet", "demo", "-nodes=20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address, line
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address[0], timeout=60) as page:
            assert b"<b>20</b> nodes" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
