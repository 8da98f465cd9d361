"""Pages for clients that the cluster's roles authorize."""

import asyncio
import json
import ssl
from typing import Any

import pytest
from cluster.pki import Authority
from kubeapi import Fault, KubeApi
from waiting import until

from accelplane.authorized import Authorized
from accelplane.http.messages import HttpError, Request, Response
from accelplane.http.servingtls import ServingTls
from accelplane.kube.client import Client
from accelplane.kube.manager import OFF, Manager

AUTHORITY = Authority("tests")
READER = {"username": "system:serviceaccount:m:p", "uid": "u", "groups": ["g"], "extra": {"k": ["v"]}}
AUTHENTICATION = "POST /apis/authentication.k8s.io/v1/tokenreviews"
AUTHORIZATION = "POST /apis/authorization.k8s.io/v1/subjectaccessreviews"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answer_review(api: KubeApi, group: str, status: dict[str, Any]) -> Fault:
    """Sets the API server's response to reviews."""
    body = json.dumps({"metadata": {"creationTimestamp": None}, "spec": {}, "status": status}).encode()
    return api.fault(group, 201, body=body, times=1_000_000)


def accept_token(api: KubeApi) -> Fault:
    return answer_review(api, AUTHENTICATION, {"authenticated": True, "user": READER})


def request_with(whose: str = "t") -> Request:
    return Request("GET", "/metrics", "", b"", f"Bearer {whose}")


def gate(client: Client, clock: Clock | None = None, timeout: float = 5.0) -> Authorized:
    return Authorized(client.server, lambda _request: Response(200, b"42"), clock=clock or Clock(), timeout=timeout)


async def status_of(page: Authorized, request: Request) -> int:
    try:
        return (await page(request)).status
    except HttpError as error:
        return error.status


@pytest.mark.parametrize("field", ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "t"])
async def test_without_a_token_access_is_denied_without_a_review(api: KubeApi, client: Client, field: str) -> None:
    assert await status_of(gate(client), Request("GET", "/metrics", "", b"", field)) == 401
    assert api.requests == []


async def test_clients_authorized_by_the_cluster_can_read(api: KubeApi, client: Client) -> None:
    accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": True})
    assert (await gate(client)(request_with())).body == b"42"
    token_review, may = [request.body for request in api.requests]
    assert (token_review["kind"], token_review["spec"]) == ("TokenReview", {"token": "t"})
    assert may["spec"] == {
        "user": READER["username"],
        "uid": "u",
        "groups": ["g"],
        "extra": {"k": ["v"]},
        "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
    }
    assert "metadata" not in may, "the API server rejects a review with metadata"


async def test_clients_are_authenticated_and_then_authorized(api: KubeApi, client: Client) -> None:
    stranger = answer_review(api, AUTHENTICATION, {"authenticated": False, "error": "invalid bearer token"})
    assert await status_of(gate(client), request_with()) == 401
    assert api.count(AUTHORIZATION) == 0
    stranger.times = 0
    accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": False, "reason": "no"})
    with pytest.raises(HttpError, match="system:serviceaccount:m:p may not get /metrics") as refused:
        await gate(client)(request_with())
    assert refused.value.status == 403


async def test_reviews_are_cached_for_a_limited_time(api: KubeApi, client: Client) -> None:
    clock = Clock()
    page = gate(client, clock)
    accept_token(api)
    answer = answer_review(api, AUTHORIZATION, {"allowed": True})
    for _ in range(3):
        assert await status_of(page, request_with()) == 200
    assert api.count(AUTHENTICATION) == 1
    answer.times = 0
    answer = answer_review(api, AUTHORIZATION, {"allowed": False})
    clock.now += 59
    assert await status_of(page, request_with()) == 200
    clock.now += 2
    assert [await status_of(page, request_with()) for _ in range(3)] == [403] * 3
    assert api.count(AUTHENTICATION) == 2
    answer.times = 0
    answer_review(api, AUTHORIZATION, {"allowed": True})
    clock.now += 11
    assert await status_of(page, request_with()) == 200


async def test_cached_reviews_apply_to_their_token_only(api: KubeApi, client: Client) -> None:
    page = gate(client)
    accept_token(api)
    allowed = answer_review(api, AUTHORIZATION, {"allowed": True})
    assert await status_of(page, request_with("one")) == 200
    allowed.times = 0
    answer_review(api, AUTHORIZATION, {"allowed": False})
    assert await status_of(page, request_with("two")) == 403
    assert await status_of(page, Request("GET", "/other", "", b"", "Bearer one")) == 403
    assert await status_of(page, request_with("one")) == 200


async def test_the_number_of_cached_answers_is_limited(api: KubeApi, client: Client) -> None:
    page = gate(client.without_rate_limit())
    answer_review(api, AUTHENTICATION, {"authenticated": False})
    for number in range(257):
        assert await status_of(page, request_with(f"t{number}")) == 401
    assert await status_of(page, request_with("t256")) == 401
    assert api.count(AUTHENTICATION) == 257
    assert await status_of(page, request_with("t0")) == 401
    assert api.count(AUTHENTICATION) == 258


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        ({"status": 403}, 500),
        ({"status": 404}, 500),
        ({"status": 429}, 503),
        ({"status": 500}, 503),
        ({"hang": True}, 503),
        ({}, 503),
        ({"status": 200, "body": b"{"}, 503),
    ],
)
@pytest.mark.parametrize("group", [AUTHENTICATION, AUTHORIZATION])
async def test_without_a_review_access_is_denied(  # noqa: PLR0917 - fixtures and cases
    api: KubeApi, client: Client, caplog: pytest.LogCaptureFixture, failure: dict[str, Any], status: int, group: str
) -> None:
    page = gate(client, timeout=0.3 if "hang" in failure else 10)
    fault = api.fault(group, times=1_000_000, **failure)
    accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": True})
    for _ in range(2):
        assert await status_of(page, request_with()) == status
    assert caplog.text.count("/metrics: cannot be authorized") == 1
    fault.times = 0

    async def is_shown() -> bool:
        return await status_of(page, request_with()) == 200

    await until(is_shown)


async def test_a_flood_of_tokens_leaves_a_place_among_the_concurrent_reviews_to_allowed_clients(
    api: KubeApi, client: Client
) -> None:
    clock = Clock()
    page = gate(client, clock)
    accepted = accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": True})
    assert await status_of(page, request_with("valid")) == 200
    accepted.times = 0
    api.fault(AUTHENTICATION, hang=True, times=1_000_000)
    flood = [asyncio.create_task(page(request_with(f"t{number}"))) for number in range(50)]
    await until(lambda: api.count(AUTHENTICATION) == 1 + 3)
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert api.count(AUTHENTICATION) == 1 + 3
    clock.now += 61
    flood += [asyncio.create_task(page(request_with("valid"))) for _ in range(3)]
    await until(lambda: api.count(AUTHENTICATION) == 1 + 4)
    for one in flood:
        one.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_flood_of_tokens_displaces_no_allowed_client(api: KubeApi, client: Client) -> None:
    page = gate(client.without_rate_limit())
    accepted = accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": True})
    assert await status_of(page, request_with("valid")) == 200
    accepted.times = 0
    answer_review(api, AUTHENTICATION, {"authenticated": False})
    for number in range(300):
        assert await status_of(page, request_with(f"t{number}")) == 401
    assert await status_of(page, request_with("valid")) == 200


async def test_requests_of_one_client_at_the_same_time_share_a_review(api: KubeApi, client: Client) -> None:
    page = gate(client)
    accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": True})
    assert await asyncio.gather(*(status_of(page, request_with()) for _ in range(20))) == [200] * 20
    assert (api.count(AUTHENTICATION), api.count(AUTHORIZATION)) == (1, 1)


async def test_a_request_continues_if_the_one_that_it_waits_for_is_cancelled(api: KubeApi, client: Client) -> None:
    page = gate(client)
    hanging = api.fault(AUTHENTICATION, hang=True, times=1)
    first = asyncio.create_task(status_of(page, request_with()))
    await until(lambda: hanging.times == 0)
    accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": True})
    second = asyncio.create_task(status_of(page, request_with()))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 200


async def test_metrics_are_served_over_tls_to_authorized_clients_only(api: KubeApi, client: Client) -> None:
    tls = ServingTls()
    pair = AUTHORITY.server("localhost", "localhost")
    tls.use(pair.certificate, pair.key)
    manager = Manager(
        client,
        health_address=OFF,
        metrics_address="127.0.0.1:0",
        metrics_tls=tls.connection_context,
        metrics_authorized=True,
    )
    accept_token(api)
    answer_review(api, AUTHORIZATION, {"allowed": True})
    context = ssl.create_default_context(cadata=AUTHORITY.credentials.certificate.decode())

    async def page(field: str) -> str:
        port = manager.ports["metrics"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{field}\r\n".encode())
        async with asyncio.timeout(10):
            answer = (await reader.read()).decode()
        writer.close()
        return answer

    running = asyncio.create_task(manager.run())
    await until(lambda: "metrics" in manager.ports)
    rejected = await page("")
    assert rejected.startswith("HTTP/1.1 401 ")
    assert "\r\nWWW-Authenticate: Bearer\r\n" in rejected
    output = await page("Authorization: Bearer t\r\n")
    assert output.startswith("HTTP/1.1 200 ")
    assert "process_resident_memory_bytes" in output
    manager.stop()
    await running
