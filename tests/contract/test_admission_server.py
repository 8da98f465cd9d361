"""The admission server over real sockets and TLS, with valid, slow and hostile callers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from admissionservers import POD, Reply, post, review, setup

from accelplane.admission.sgx import PATH
from accelplane.http.messages import Request
from accelplane.kube.admission import AdmissionServer, Decision, Hook, Mutator, Review, Validator, deny, denying
from accelplane.kube.jsonpatch import Operation
from accelplane.kube.testing import apply_json_patch


def hook(
    decide: Callable[[Review, dict[str, Any]], Decision], kind: type[Mutator[Any] | Validator[Any]] = Mutator
) -> Hook:
    return kind("/hook", dict[str, Any], decide)


async def test_a_pod_that_requests_epc_gets_devices_and_keeps_unknown_fields() -> None:
    async with setup() as one:
        reply = await one.ask(post(review(), f"{PATH}?timeout=10s"))
    assert reply.status == 200
    assert reply.fields["content-type"] == "application/json"
    assert {name: reply.response[name] for name in ("uid", "allowed", "patchType", "status")} == {
        "uid": "u-1", "allowed": True, "patchType": "JSONPatch", "status": {"code": 200},
    }  # fmt: skip
    after = apply_json_patch(POD, reply.patch)["spec"]["containers"][0]
    assert after["ofTomorrow"]
    assert after["resources"]["limits"] == {"sgx.intel.com/epc": "1Mi", "sgx.intel.com/enclave": "1"}


async def test_reviews_of_the_older_version_are_answered_in_it() -> None:
    async with setup() as one:
        older = await one.ask(post(review().replace(b"k8s.io/v1", b"k8s.io/v1beta1")))
        newer = await one.ask(post(review()))
    assert json.loads(older.body) == {**json.loads(newer.body), "apiVersion": "admission.k8s.io/v1beta1"}


async def test_objects_without_changes_are_allowed_without_a_patch() -> None:
    async with setup() as one:
        plain = await one.ask(post(review({"metadata": {}, "spec": {"containers": []}})))
        deleted = await one.ask(post(review(None, "DELETE")))
    for reply in (plain, deleted):
        assert reply.response == {"uid": "u-1", "allowed": True, "status": {"code": 200}}


async def test_a_denial_and_an_invalid_object_are_responses_and_not_failures() -> None:
    broken = json.loads(json.dumps(POD))
    broken["spec"]["containers"][0]["resources"]["requests"] = {}
    async with setup() as one:
        denied = await one.ask(post(review(broken)))
        unreadable = await one.ask(post(review({"metadata": {}, "spec": {"containers": 7}})))
    assert (denied.status, denied.response["allowed"]) == (200, False)
    assert (denied.response["status"]["code"], denied.response["status"]["reason"]) == (403, "Forbidden")
    assert '"sgx.intel.com/epc"' in denied.response["status"]["message"]
    assert (unreadable.status, unreadable.response["status"]["code"]) == (200, 400)


async def test_warnings_are_returned_to_the_user_with_a_limited_length() -> None:
    many = Decision(warnings=["w" * 1000] * 100)
    async with setup(hook(lambda _review, _object: many)) as one:
        response = (await one.ask(post(review(), "/hook"))).response
    assert response["allowed"]
    assert len(response["warnings"]) == 16
    assert all(len(text) <= 200 for text in response["warnings"])


async def test_denial_messages_have_a_length_limit() -> None:
    async with setup(hook(lambda _review, _object: deny("d" * 1_000_000))) as one:
        response = (await one.ask(post(review(), "/hook"))).response
    assert not response["allowed"]
    assert len(response["status"]["message"]) <= 2048


@pytest.mark.parametrize("kind", [Mutator, Validator])
async def test_an_invalid_resource_in_deletion_may_lose_its_finalizers(
    kind: type[Mutator[Any] | Validator[Any]],
) -> None:
    going = {"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["orphan"]}}
    deleted = {"metadata": {**going["metadata"], "finalizers": []}}
    stays = {"metadata": {"name": "a", "finalizers": ["orphan"]}}
    async with setup(hook(lambda _review, _object: deny("no"), kind)) as one:
        freed = await one.ask(post(review(deleted, "UPDATE", oldObject=going), "/hook"))
        edited = await one.ask(post(review(deleted, "UPDATE", oldObject=stays), "/hook"))
    assert freed.response["allowed"]
    assert not edited.response["allowed"]


async def test_a_disabled_kind_is_rejected_with_the_reason() -> None:
    async with setup(denying("/off", "GPU is not enabled, see --devices")) as one:
        response = (await one.ask(post(review(), "/off"))).response
    assert (response["allowed"], response["status"]["message"]) == (False, "GPU is not enabled, see --devices")


async def test_validators_allow_or_deny_and_never_patch() -> None:
    def decide(_review: Review, found: dict[str, Any]) -> Decision:
        return Decision(patch=[Operation("add", "/x", 1)]) if "spec" in found else deny("no spec")

    async with setup(hook(decide, Validator)) as one:
        assert (await one.ask(post(review({}), "/hook"))).response["status"]["message"] == "no spec"
        assert (await one.ask(post(review(), "/hook"))).status == 500


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (post(review(), "/elsewhere"), 404),
        (b"GET /elsewhere HTTP/1.1\r\n\r\n", 404),
        (f"GET {PATH} HTTP/1.1\r\n\r\n".encode(), 405),
        (f"PUT {PATH} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode(), 405),
        (post(review(), content_type="text/plain"), 415),
        (post(b"{"), 400),
        (post(b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v2", "request": {"uid": "x"}}'), 400),
        (post(b'{"request": {"uid": "x"}}'), 400),
        (post(b"[" * 100_000), 400),
        (f"POST {PATH} HTTP/1.1\r\n\r\n".encode(), 411),
        (f"POST {PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(), 411),
        (f"POST {PATH} HTTP/1.1\r\nContent-Length: 7340033\r\n\r\n".encode(), 413),
        (f"POST {PATH} HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n".encode(), 400),
        (f"POST {PATH} HTTP/1.1\r\nContent-Length: -1\r\n\r\n".encode(), 400),
        (f"POST {PATH} HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n".encode(), 400),
        (f"POST {PATH} HTTP/1.1\r\nContent-Length : 1\r\n\r\n".encode(), 400),
        (b"POST " + b"/x" * 9000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 65 + b"\r\n", 431),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"nothing of HTTP\r\n\r\n", 400),
        (b"\x00\xff\r\n\r\n", 400),
    ],
)  # fmt: skip
async def test_a_body_that_is_not_a_review_gets_its_own_status(message: bytes, status: int) -> None:
    async with setup() as one:
        assert (await one.ask(message)).status == status
        assert (await one.ask(post(review()))).response["allowed"]


async def test_pages_are_served_beside_the_webhooks() -> None:
    async with setup() as one:
        reply = await one.ask(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (reply.status, reply.body, reply.fields["content-type"]) == (200, b"ok\n", "text/plain; charset=utf-8")


async def test_reviews_are_counted_by_outcome() -> None:
    async with setup() as one:
        for body in (review(), review(), review({"metadata": {}, "spec": {}}), review({}), b"junk"):
            await one.ask(post(body))
        await one.ask(post(review(), content_type="text/plain"))
        tally = one.server.stats[PATH]
    assert tally.outcomes == {"mutated": 2, "allowed": 1, "denied 400": 1, "error": 2}
    assert tally.codes == {200: 4, 400: 1, 415: 1}
    assert tally.seconds > 0


async def test_the_webhook_that_the_page_shows_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kube-parts.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code = next(block for block in blocks if "Mutator(" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "kube-parts.md", "exec"), names)  # noqa: S102 our own page
    answers = [
        names["server"].handle(Request("POST", "/teams", "application/json", review({"metadata": {"labels": labels}})))
        for labels in ({"team": "a"}, {"x": "y"}, {"team": "nobody"})
    ]
    kept, changed, denied = (Reply("HTTP/1.1 200 OK", answer.body) for answer in answers)
    assert "patch" not in kept.response
    assert changed.patch == [{"op": "add", "path": "/metadata/labels/team", "value": "everyone"}]
    assert not denied.response["allowed"]


def test_two_webhooks_do_not_share_a_path() -> None:
    with pytest.raises(ValueError, match="/off"):
        AdmissionServer([denying("/off", "a"), denying("/off", "b")])
