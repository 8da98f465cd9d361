"""The fleet page with the rights of its manifests: a real API server and scheduler, a process of the command."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from fleetagents import I915, AgentDouble, unit
from fleetpages import Answer, Caller
from manifests import DEPLOY, render
from waiting import until

from accelplane.operator.models import KINDS

from .cluster import Cluster
from .machine import wait_until
from .pki import Authority
from .settings import PKI
from .test_fleet import gpu_pod, place_agent

pytestmark = pytest.mark.cluster

SPACE = "accelplane-fleet"
SERVER = Authority("servers")
_DISCONNECTED = 300.0  # seconds for which the last state must be shown
# The rights of every authenticated account: reviews of itself, and since 1.37 the certificates of public authorities.
OF_EVERYONE = {"selfsubjectreviews.authentication.k8s.io", "selfsubjectaccessreviews.authorization.k8s.io",
               "selfsubjectrulesreviews.authorization.k8s.io", "clustertrustbundles.certificates.k8s.io"}  # fmt: skip


class Page(NamedTuple):
    """The cluster and the page at its two addresses."""

    cluster: Cluster
    plain: Caller
    secure: int

    def caller(self, token: str) -> Caller:
        context = ssl.create_default_context(cadata=SERVER.credentials.certificate.decode())
        return Caller(self.secure, context, authorization=f"Bearer {token}")

    def token(self, account: str, *options: str) -> str:
        return self.cluster.kubectl("create", "token", account, f"--namespace={SPACE}", *options).strip()


@pytest.fixture(scope="module")
def page(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    directory = tmp_path_factory.mktemp("fleet")
    with Cluster.running([]) as cluster:
        cluster.add_kwok_nodes(2, resources={I915: "1"})
        objects = render(DEPLOY / "fleet/overlays/secure")
        cluster.apply(*(each for each in objects if each["kind"] == "Namespace"))
        cluster.apply(*(each for each in objects if each["kind"] not in ("Namespace", "Deployment", "Service")))
        viewer = f"--serviceaccount={SPACE}:reader"
        cluster.kubectl("create", "serviceaccount", "reader", f"--namespace={SPACE}")
        cluster.kubectl("create", "clusterrolebinding", "reader", "--clusterrole=accelplane-fleet-viewer", viewer)
        cluster.kubectl("create", "rolebinding", "reader", "--clusterrole=view", viewer, "--namespace=default")
        scraper = f"--serviceaccount={SPACE}:scraper"
        cluster.kubectl("create", "serviceaccount", "scraper", f"--namespace={SPACE}")
        cluster.kubectl(
            "create", "clusterrolebinding", "scraper", "--clusterrole=accelplane-fleet-metrics-reader", scraper
        )
        with _process(cluster, directory) as (plain, secure):
            yield Page(cluster, Caller(plain), secure)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class _process:  # noqa: N801 - a context manager
    """The command with the token of its account and the arguments of the manifest."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        credentials = SERVER.server("127.0.0.1", "127.0.0.1")
        (directory / "tls.crt").write_bytes(credentials.certificate)
        (directory / "tls.key").write_bytes(credentials.key)
        (directory / "ca.crt").write_bytes(cluster.authority)
        token = cluster.kubectl("create", "token", "accelplane-fleet", f"--namespace={SPACE}").strip()
        where = {"server": cluster.server, "certificate-authority": str(directory / "ca.crt")}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": where}], "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        (directory / "kubeconfig").write_text(json.dumps(config))
        self._plain, self._secure, health = free_port(), free_port(), free_port()
        words = [
            f"-kubeconfig={directory / 'kubeconfig'}", f"-address=127.0.0.1:{self._plain}",
            f"-secure-address=127.0.0.1:{self._secure}", f"-tls-dir={directory}",
            f"-health-probe-bind-address=127.0.0.1:{health}",
        ]  # fmt: skip
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "accelplane", "fleet", *words], stderr=self._log, env=os.environ
        )
        self._health = Caller(health)

    def __enter__(self) -> tuple[int, int]:
        wait_until(lambda: asyncio.run(self._ready()), "the fleet: ready")
        return self._plain, self._secure

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            assert self._process.wait(60) == 0
        finally:
            self._process.kill()
            self._log.close()

    async def _ready(self) -> bool:
        try:
            return (await self._health.get("/readyz")).status == 200
        except OSError:
            return False


async def test_a_device_that_becomes_unhealthy_changes_the_open_page(page: Page) -> None:
    async with AgentDouble("kwok-0", page.cluster.addresses.host).serving() as agent:
        agent.units = [unit("card0", "healthy", ("default/job",))]
        place_agent(page.cluster, agent.pod("agent"))

        async def is_shown() -> bool:
            return "card0" in (await page.plain.get("/nodes")).text

        await until(is_shown, 60)
        text = (await page.plain.get("/nodes?sort=name")).text
        assert "no agent; numbers from the API server: 1 gpu.intel.com/i915" in text
        generation = re.findall(r'data-generation="(\d+)"', text)[0]
        async with page.plain.events(f"screen=nodes&sort=name&generation={generation}") as events:
            agent.units = [unit("card0", "unhealthy", ("default/job",), reason="temperature")]
            agent.change()
            await events.of_kind("changed")
            assert "card0 is unhealthy (temperature)" in (await page.plain.get("/nodes?sort=name")).text
            assert "kwok-0,unhealthy" in (await page.plain.get("/devices.csv?state=unhealthy")).text
            device = (await page.plain.get("/device?node=kwok-0&plugin=gpu&unit=card0")).text
            assert "default/job" in device
            assert "temperature" in device
            assert "card0 is unhealthy (temperature), held by 1 container" in (await page.plain.get("/")).text
            agent.units = [unit("card0", "healthy", ("default/job",))]
            agent.change()
            await events.of_kind("changed")
            assert "gpu card0: healthy" in (await page.plain.get("/nodes?sort=name")).text
        page.cluster.kubectl("delete", "pod", "agent", "--namespace=kube-system", "--force", "--grace-period=0")


async def test_an_unreachable_api_server_leaves_the_last_state_with_its_age(page: Page) -> None:
    """Changes of agents are shown all the time, and afterwards those of the API server."""
    cluster = page.cluster
    async with AgentDouble("kwok-0", page.cluster.addresses.host).serving() as agent:
        agent.units = [unit("card0"), unit("card1")]
        place_agent(cluster, agent.pod("agent"))

        async def nodes() -> str:
            return (await page.plain.get("/nodes?sort=name")).text

        async def page_has(*words: str, without: str = "\0") -> bool:
            text = await nodes()
            return all(word in text for word in words) and without not in text

        await until(lambda: page_has("card0", "card1", "kwok-1"), 60)
        cluster.apiserver.stop()
        since = (
            r"The data may be old or incomplete: requests to the API server have failed since "
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        )

        async def warned() -> bool:
            return re.search(since, await nodes()) is not None

        await until(warned, 60)
        agent.units = [unit("card0", "unhealthy", reason="temperature"), unit("card1")]
        agent.change()
        await until(lambda: page_has("card0 is unhealthy (temperature)"), 60)
        deadline, times = time.monotonic() + _DISCONNECTED, set[str]()
        while time.monotonic() < deadline:
            text = await nodes()
            assert all(word in text for word in ("card0 is unhealthy", "card1", "kwok-0", "kwok-1"))
            found = re.search(since, text)
            assert found, text
            times.add(found[0])
            await asyncio.sleep(1)
        assert len(times) == 1, "the time of the last state does not change"
        cluster.apiserver.start()
        cluster.kubectl("cordon", "kwok-1")
        await until(lambda: page_has("cordoned", "card0", "card1", without="The data may be old"), 120)
        cluster.kubectl("uncordon", "kwok-1")
        cluster.kubectl("delete", "pod", "agent", "--namespace=kube-system", "--force", "--grace-period=0")


async def test_a_pending_pod_is_explained_and_its_name_is_shown_to_authorized_viewers(page: Page) -> None:
    page.cluster.apply(gpu_pod("large", 2))

    async def is_explained() -> bool:
        return "Insufficient gpu.intel.com/i915" in (await page.plain.get("/waiting")).text

    # The scheduler retries slowly after the API server was away in the test before this one.
    await until(is_explained, 180)
    text = (await page.plain.get("/waiting")).text
    assert "default/large" in text
    assert "Requests 2 of gpu.intel.com/i915." in text
    other_user = page.token("accelplane-fleet-viewer", "--audience=accelplane-fleet")
    hidden = await page.caller(other_user).get("/waiting")
    assert hidden.status == 200
    assert ">hidden<" in hidden.text
    assert "large" not in hidden.text
    assert "Requests 2 of gpu.intel.com/i915." in hidden.text
    reader = page.token("reader", "--audience=accelplane-fleet")
    assert "default/large" in (await page.caller(reader).get("/waiting")).text
    page.cluster.kubectl("delete", "pod", "large", "--wait=false")


async def test_only_tokens_of_viewers_for_this_audience_open_the_page(page: Page) -> None:
    assert (await page.caller("junk").get("/")).status == 401
    assert (await page.caller(page.token("reader")).get("/")).status == 401
    other_user = page.token("default", "--audience=accelplane-fleet")
    assert (await page.caller(other_user).get("/")).status == 403
    reader = page.caller(page.token("reader", "--audience=accelplane-fleet"))
    assert (await reader.get("/")).status == 200
    assert (await reader.get("/metrics")).status == 403


def signed_again(cluster: Cluster, token: str, **claims: int) -> str:
    """A token with changed claims, signed with the key of the API server for tokens of service accounts."""
    header, payload, _ = token.split(".")
    found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    content = f"{header}.{encoded(json.dumps(found | claims).encode())}"
    key = load_pem_private_key(cluster.control.path(f"{PKI}/service-account.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    numbers = decode_dss_signature(key.sign(content.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{content}.{encoded(b''.join(number.to_bytes(32, 'big') for number in numbers))}"


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


async def sign_in(page: Page, token: str, **fields: str) -> Answer:
    """The response to the form with a token."""
    caller = page.caller("")
    origin = {"origin": f"https://127.0.0.1:{page.secure}"} | fields
    form = urlencode({"token": token, "next": "waiting"}).encode()
    return await caller.send("POST", "/login", form, authorization="", **origin)


async def with_cookie(page: Page, cookie: str, path: str = "/") -> Answer:
    return await page.caller("").get(path, authorization="", cookie=cookie)


async def test_the_form_accepts_valid_tokens_of_this_site_only(page: Page) -> None:
    now = int(time.time())
    valid = page.token("reader", "--audience=accelplane-fleet")
    same = signed_again(page.cluster, valid, exp=now + 60)
    expired = signed_again(page.cluster, valid, iat=now - 7200, nbf=now - 7200, exp=now - 3600)
    foreign = [await sign_in(page, valid, origin=origin) for origin in ("https://example.com", "null")]
    assert [each.status for each in foreign] == [403, 403]
    other_user = page.token("default", "--audience=accelplane-fleet")
    answers = [await sign_in(page, token) for token in ("wrong", expired, page.token("reader"), other_user)]
    assert [each.status for each in answers] == [401, 401, 401, 403]
    assert not any("set-cookie" in each.fields for each in (*foreign, *answers))
    accepted = await sign_in(page, same)
    assert accepted.status == 303
    age = int(re.search(r"Max-Age=(\d+)", accepted.fields["set-cookie"])[1])  # type: ignore[index]
    assert age <= 60, "the session ends with the token"


async def test_a_session_has_the_rights_of_its_own_token(page: Page) -> None:
    page.cluster.apply(gpu_pod("large", 2))
    accounts = ("reader", "accelplane-fleet-viewer")
    answers = [await sign_in(page, page.token(account, "--audience=accelplane-fleet")) for account in accounts]
    reader, viewer = (each.fields["set-cookie"].partition(";")[0] for each in answers)

    async def waits() -> bool:
        return "default/large" in (await with_cookie(page, reader, "/waiting")).text

    await until(waits, 60)
    hidden = await with_cookie(page, viewer, "/waiting")
    assert (hidden.status, "default/large" in hidden.text, ">hidden<" in hidden.text) == (200, False, True)
    page.cluster.kubectl("delete", "pod", "large", "--wait=false")
    invented = f"{reader.partition('=')[0]}={'a' * 43}"
    assert (await with_cookie(page, invented)).status == 401
    origin = {"origin": f"https://127.0.0.1:{page.secure}"}
    await page.caller("").send("POST", "/logout", authorization="", cookie=viewer, **origin)
    assert [(await with_cookie(page, cookie)).status for cookie in (viewer, reader)] == [401, 200]


async def test_a_scraper_reads_the_metrics_with_the_token_of_its_account(page: Page) -> None:
    scraper = page.caller(page.token("scraper"))
    assert "accelplane_fleet_nodes" in (await scraper.get("/metrics")).text
    assert (await scraper.get("/")).status == 401
    assert (await page.caller(page.token("reader")).get("/metrics")).status == 403


def test_the_account_has_no_other_rights(page: Page) -> None:
    account = f"system:serviceaccount:{SPACE}:accelplane-fleet"
    lines = page.cluster.kubectl("auth", "can-i", "--list", f"--as={account}", "--as-group=system:serviceaccounts",
                                 "--as-group=system:authenticated").splitlines()[1:]  # fmt: skip
    rights = {
        line.split()[0]: line.rpartition("[")[2].rstrip("]").split()
        for line in lines
        if not line.startswith(" ") and line.split()[0] not in OF_EVERYONE
    }
    assert rights == {
        "nodes": ["list", "watch"],
        "pods": ["list", "watch"],
        "deviceclasses.resource.k8s.io": ["list", "watch"],
        "resourceclaims.resource.k8s.io": ["list", "watch"],
        **{f"{family}deviceplugins.deviceplugin.intel.com": ["list", "watch"] for family in KINDS},
        "tokenreviews.authentication.k8s.io": ["create"],
        "subjectaccessreviews.authorization.k8s.io": ["create"],
    }
