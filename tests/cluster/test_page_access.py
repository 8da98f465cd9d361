"""Access to the agent's pages by tokens of a real API server, with the rights of the shipped manifests.

The agent is a process of this machine on simulated hardware. Its namespace for mounts has the account's files at the
place where a pod has them.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fleetpages import Caller, head_of
from manifests import DEPLOY, render
from waiting import until

from accelplane.simulate.tree import SimulatedNode

from .cluster import Cluster
from .conftest import running_cluster
from .machine import wait_until
from .pki import Authority
from .settings import API_PORT
from .test_fleet_page import free_port

pytestmark = pytest.mark.cluster

SPACE = "kube-system"
SERVER = Authority("servers")
PATHS = ("/metrics", "/status", "/api/v1/inventory", "/api/v1/readings")
ROLES = ("accelplane-metrics-reader", "accelplane-inventory-reader")
# A pod has its account's files in a volume.
_MOUNT = """
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io
cp -r "$0" /run/secrets/kubernetes.io/serviceaccount
exec "$@"
"""


class Agent:
    """The pages of an agent at a port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._context = ssl.create_default_context(cadata=SERVER.credentials.certificate.decode())

    async def status(self, token: str, path: str = "/metrics") -> int:
        """The status code of a request with a token, or without one if it is empty."""
        fields = {"authorization": f"Bearer {token}"} if token else {}
        return (await Caller(self.port, self._context, **fields).get(path)).status

    async def repeated_statuses(self, token: str, path: str, count: int) -> list[int]:
        """The status codes of `count` requests of one connection."""
        caller = Caller(self.port, self._context, authorization=f"Bearer {token}")
        reader, writer = await caller.open("GET", path)
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode()
        found: list[int] = []
        while len(found) < count:
            status, fields = await head_of(reader)
            await reader.readexactly(int(fields["content-length"]))
            found.append(status)
            writer.write(request)
        writer.transport.abort()
        return found

    async def statuses(self, token: str) -> list[int]:
        """The status codes of all pages that need a token."""
        return [await self.status(token, path) for path in PATHS]


@contextmanager
def running_agent(cluster: Cluster, directory: Path, *options: str) -> Iterator[Agent]:
    """An agent with the account and the arguments of the overlay `pages`."""
    tree, account, tls = directory / "tree", directory / "account", directory / "tls"
    SimulatedNode(tree).plug_gpu()
    for each in (account, tls, directory / "kubelet"):
        each.mkdir()
    (account / "ca.crt").write_bytes(cluster.authority)
    (account / "token").write_text(
        cluster.kubectl("create", "token", "accelplane-node", f"--namespace={SPACE}").strip()
    )
    credentials = SERVER.server("127.0.0.1", "127.0.0.1")
    (tls / "tls.crt").write_bytes(credentials.certificate)
    (tls / "tls.key").write_bytes(credentials.key)
    agent = Agent(free_port())
    words = [
        "-plugins=gpu", f"-root={tree}", f"-kubelet-dir={directory / 'kubelet'}", f"-cdi-dir={directory / 'cdi'}",
        f"-http-address=127.0.0.1:{agent.port}", f"-http-tls-dir={tls}", "-http-authorized", *options,
    ]  # fmt: skip
    command = ["unshare", "--mount", "--propagation=private", "sh", "-ec", _MOUNT, account]
    variables = {"KUBERNETES_SERVICE_HOST": cluster.addresses.control, "KUBERNETES_SERVICE_PORT": str(API_PORT)}
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "accelplane", "node", *words], stderr=output, env=os.environ | variables
        )
    try:
        wait_until(lambda: process.poll() is not None or "pages at https" in log.read_text(), "pages")
        assert process.poll() is None, log.read_text()
        yield agent
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None) -> Iterator[Cluster]:
    """A control plane with the roles of the manifests. The account `prometheus` has both roles, `stranger` none."""
    with running_cluster() as running:
        objects = render(DEPLOY / "accelplane_node/overlays/pages")
        running.apply(*(each for each in objects if each["kind"] != "DaemonSet"))
        for account in ("prometheus", "stranger", "former"):
            running.kubectl("create", "serviceaccount", account)
        for account in ("prometheus", "former"):
            for role in ROLES:
                running.kubectl(
                    "create", "clusterrolebinding", f"{account}-{role}", f"--clusterrole={role}",
                    f"--serviceaccount=default:{account}",
                )  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def agent(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running_agent(cluster, tmp_path_factory.mktemp("agent")) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def former(cluster: Cluster, agent: Agent) -> str:
    """A reviewed token of an account whose role is removed. The review is valid for a minute, while other tests run."""
    token = token_of(cluster, "former")
    assert asyncio.run(agent.status(token)) == 200
    for role in ROLES:
        cluster.kubectl("delete", "clusterrolebinding", f"former-{role}")
    assert asyncio.run(agent.status(token)) == 200
    return token


def token_of(cluster: Cluster, account: str, *options: str) -> str:
    """A token of the API server's TokenRequest."""
    return cluster.kubectl("create", "token", account, *options).strip()


def reviews(cluster: Cluster) -> int:
    """The reviews of tokens and rights that the API server has answered."""
    page = cluster.kubectl("get", "--raw=/metrics")
    samples = (line.rpartition(" ") for line in page.splitlines() if line.startswith("apiserver_request_total{"))
    return sum(int(value) for name, _, value in samples if re.search(r'resource="(token|subjectaccess)reviews"', name))


async def test_pages_need_a_token_of_an_account_with_the_role_and_probes_need_none(
    cluster: Cluster, agent: Agent
) -> None:
    assert await agent.statuses("") == [401] * 4
    assert await agent.statuses("unknown") == [401] * 4
    valid = token_of(cluster, "prometheus")
    header, _, signature = valid.rpartition(".")
    assert await agent.statuses(f"{header}.{signature[::-1]}") == [401] * 4
    assert await agent.statuses(token_of(cluster, "stranger")) == [403] * 4
    assert await agent.statuses(valid) == [200] * 4
    assert [await agent.status("", path) for path in ("/healthz", "/readyz")] == [200, 503]


async def test_a_role_permits_its_pages_only(cluster: Cluster, agent: Agent) -> None:
    cluster.kubectl("create", "serviceaccount", "scraper")
    cluster.kubectl(
        "create", "clusterrolebinding", "scraper", f"--clusterrole={ROLES[0]}", "--serviceaccount=default:scraper"
    )
    assert await agent.statuses(token_of(cluster, "scraper")) == [200, 403, 403, 403]


async def test_tokens_must_be_valid_for_the_audience(
    cluster: Cluster, agent: Agent, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, other, right = (
        token_of(cluster, "prometheus", *options)
        for options in ([], ["--audience=others"], ["--audience=others", "--audience=agents"])
    )
    # Without the option, tokens are valid for the API server's own audience.
    assert [await agent.status(token) for token in (plain, other, right)] == [200, 401, 401]
    directory = tmp_path_factory.mktemp("strict")  # `tmp_path` is too long for the path of a socket
    with running_agent(cluster, directory, "-http-audience=agents") as strict:
        assert [await strict.status(token) for token in (plain, other, right)] == [401, 401, 200]


async def test_without_the_api_server_new_tokens_get_503_and_reviewed_ones_continue(
    cluster: Cluster, agent: Agent
) -> None:
    first, second = token_of(cluster, "prometheus"), token_of(cluster, "prometheus")
    assert await agent.status(first) == 200
    cluster.apiserver.stop()
    assert await agent.status(second) == 503
    assert await agent.status(first) == 200
    cluster.apiserver.start()
    assert await agent.status(second) == 200


async def test_a_thousand_requests_with_a_token_make_two_reviews(cluster: Cluster, agent: Agent) -> None:
    token, before = token_of(cluster, "prometheus"), reviews(cluster)
    assert await agent.repeated_statuses(token, "/status", 1000) == [200] * 1000
    assert 2 <= reviews(cluster) - before <= 4, "two a minute, and the requests take less than two minutes"


async def test_a_removed_role_ends_access_when_the_review_expires(agent: Agent, former: str) -> None:
    async def is_forbidden() -> bool:
        return await agent.status(former) == 403

    await until(is_forbidden, 120)
