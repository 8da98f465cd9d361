"""The admission server over real sockets and TLS, with valid, slow and hostile callers."""

import asyncio
import base64
import contextlib
import json
import os
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.pki import Authority, Credentials
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from virtualtime import in_virtual_time
from waiting import until

from accelplane.admission.sgx import PATH, SgxOptions, mutator
from accelplane.http import progress as http_progress
from accelplane.http import server as http_server
from accelplane.http.messages import HttpError, HttpLimits, Request, Response
from accelplane.http.servingtls import CertificateError, ServingTls, TlsSettings
from accelplane.kube.admission import AdmissionServer, Decision, Hook, Mutator, Review, Validator, deny, denying
from accelplane.kube.jsonpatch import Operation
from accelplane.kube.testing import apply_json_patch

AUTHORITY = Authority("tests")
SERVER = AUTHORITY.server("localhost", "localhost")

POD = {
    "metadata": {"generateName": "p-", "namespace": "default"},
    "spec": {
        "containers": [
            {
                "name": "a",
                "resources": {"limits": {"sgx.intel.com/epc": "1Mi"}, "requests": {"sgx.intel.com/epc": "1Mi"}},
                "ofTomorrow": True,
            }
        ]
    },
}


def review(of: Any = POD, operation: str = "CREATE", **more: Any) -> bytes:
    request = {"uid": "u-1", "operation": operation, "namespace": "default", "object": of, "oldObject": None, **more}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def post(body: bytes, path: str = PATH, *fields: str, content_type: str = "application/json") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *fields,
    ]
    return "\r\n".join((*lines, "", "")).encode() + body


class Reply:
    """A response with status, fields and body."""

    def __init__(self, head: str, body: bytes) -> None:
        first, *lines = head.split("\r\n")
        self.status = int(first.split(" ")[1])
        self.fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        self.body = body

    @property
    def response(self) -> dict[str, Any]:
        answered = json.loads(self.body)
        assert (answered["apiVersion"], answered["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        return answered["response"]

    @property
    def patch(self) -> Any:
        return json.loads(base64.b64decode(self.response["patch"]))


class Caller:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def reply(self) -> Reply:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
            return Reply(head, await self.reader.readexactly(length))

    async def ask(self, message: bytes) -> Reply:
        self.writer.write(message)
        return await self.reply()

    async def ended(self) -> bool:
        """Waits for the end of the connection; whether nothing came before it."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read() == b""
            except OSError:
                return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def client_context(authority: Authority, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.credentials.certificate.decode())
    context.maximum_version = newest
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


class Setup:
    """A server, and callers of it."""

    def __init__(self, server: AdmissionServer, port: int, *, secure: bool) -> None:
        self.server, self.port, self._secure = server, port, secure
        self.callers: list[Caller] = []

    async def caller(self, context: ssl.SSLContext | None = None) -> Caller:
        trusted = (context or client_context(AUTHORITY)) if self._secure else None
        name = "localhost" if self._secure else None
        caller = Caller(*await asyncio.open_connection("127.0.0.1", self.port, ssl=trusted, server_hostname=name))
        self.callers.append(caller)
        return caller

    async def ask(self, message: bytes) -> Reply:
        return await (await self.caller()).ask(message)


@contextlib.asynccontextmanager
async def setup(
    *hooks: Hook, limits: HttpLimits | None = None, tls: ServingTls | None = None, secure: bool = True
) -> AsyncGenerator[Setup]:
    server = AdmissionServer(hooks or [mutator(SgxOptions())], {"/healthz": lambda: (200, "ok\n")}, limits)
    if tls is None:
        tls = ServingTls()
        tls.use(SERVER.certificate, SERVER.key)
    port = await server.start("127.0.0.1", 0, tls.context if secure else None)
    instance = Setup(server, port, secure=secure)
    try:
        yield instance
    finally:
        for caller in instance.callers:
            await caller.close()
        await server.stop(1)


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


async def test_a_body_over_the_limit_is_rejected_before_it_is_complete() -> None:
    async with setup() as one:
        caller = await one.caller()
        caller.writer.write(f"POST {PATH} HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n".encode() + b"x" * 1_000_000)
        reply = await caller.reply()
        assert reply.status == 413
        assert reply.fields["connection"] == "close"
        assert await caller.ended()


async def test_an_object_of_the_maximum_size_is_reviewed() -> None:
    big = {**POD, "metadata": {"annotations": {"x": "y" * 2_900_000}}}
    async with setup() as one:
        assert (await one.ask(post(review(big)))).response["allowed"]


async def test_requests_on_one_connection_are_answered_in_their_order() -> None:
    async with setup() as one:
        caller = await one.caller()
        many = [review(uid=f"u-{number}") for number in range(20)]
        caller.writer.write(b"".join(post(body) for body in many))
        assert [(await caller.reply()).response["uid"] for _ in many] == [f"u-{number}" for number in range(20)]


async def test_a_request_may_arrive_byte_by_byte() -> None:
    async with setup(secure=False) as one:
        caller = await one.caller()
        for byte in post(review({"metadata": {}, "spec": {}})):
            caller.writer.write(bytes([byte]))
            await caller.writer.drain()
            await asyncio.sleep(0)
        assert (await caller.reply()).response["allowed"]


async def test_expect_100_continue_gets_a_continue_response() -> None:
    message = post(review(), PATH, "Expect: 100-continue")
    head, _, body = message.partition(b"\r\n\r\n")
    async with setup() as one:
        caller = await one.caller()
        caller.writer.write(head + b"\r\n\r\n")
        assert await caller.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await caller.ask(body)).response["allowed"]


@pytest.mark.parametrize("fields", [("Connection: close",), ("Connection: keep-alive, Close",)])
async def test_a_caller_can_close_its_connection(fields: Sequence[str]) -> None:
    async with setup() as one:
        caller = await one.caller()
        assert (await caller.ask(post(review(), PATH, *fields))).fields["connection"] == "close"
        assert await caller.ended()


QUICK = HttpLimits(request=0.2, idle=0.2, handshake=0.2, linger=0.1)


@pytest.mark.parametrize("head", [b"POST", post(review())[:-1], post(review()).partition(b"\r\n\r\n")[0]])
@in_virtual_time(http_server, http_progress)
async def test_an_incomplete_request_times_out_with_408(head: bytes) -> None:
    async with setup(limits=QUICK) as one:
        caller = await one.caller()
        assert (await caller.ask(head)).status == 408
        assert await caller.ended()


@in_virtual_time(http_server, http_progress)
async def test_single_bytes_do_not_extend_the_timeout() -> None:
    async with setup(limits=QUICK, secure=False) as one:
        caller = await one.caller()

        async def send_bytes() -> None:
            with contextlib.suppress(OSError):
                for byte in post(review()) * 10:
                    caller.writer.write(bytes([byte]))
                    await caller.writer.drain()
                    await asyncio.sleep(0.02)

        task = asyncio.create_task(send_bytes())
        assert (await caller.reply()).status == 408
        task.cancel()


@in_virtual_time(http_server, http_progress)
async def test_an_idle_connection_is_closed_without_a_response() -> None:
    async with setup(limits=QUICK) as one:
        fresh, used = await one.caller(), await one.caller()
        assert (await used.ask(post(review()))).status == 200
        assert await fresh.ended()
        assert await used.ended()


async def test_a_connection_without_handshake_is_closed() -> None:
    async with setup(limits=QUICK) as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_idle_connections_and_unfinished_handshakes_at_the_limit_do_not_block_reviews() -> None:
    async with setup(limits=HttpLimits(connections=2, stall=0.1)) as one:
        idle = await one.caller()
        assert (await idle.ask(post(review()))).status == 200
        silent = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(2)]
        assert (await one.ask(post(review()))).status == 200
        assert one.server.connections <= 2
        for _reader, writer in silent:
            writer.close()


async def test_a_close_notify_alert_is_answered() -> None:
    async with setup() as one:
        caller = await one.caller()
        assert (await caller.ask(post(review()))).status == 200
        await caller.close()  # asyncio waits for the close_notify of the server
        await until(lambda: not one.server.connections)


@in_virtual_time(http_server, http_progress)
async def test_a_client_that_reads_no_responses_is_disconnected() -> None:
    async with setup(limits=QUICK, secure=False) as one:
        caller = await one.caller()
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        message = post(review()) * 200

        async def flood() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller.writer.write(message)
                    await caller.writer.drain()

        async with asyncio.timeout(10):
            await flood()
        other = await one.caller()
        assert (await other.ask(post(review()))).status == 200


async def test_shutdown_completes_running_requests_and_closes_idle_connections() -> None:
    async with setup() as one:
        head, idle = await one.caller(), await one.caller()
        assert (await head.ask(post(review()))).status == 200
        assert (await idle.ask(post(review()))).status == 200
        message = post(review(uid="last"))
        head.writer.write(message[:100])
        await head.writer.drain()
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(one.server.stop(5))
        assert await idle.ended()
        reply = await head.ask(message[100:])
        assert (reply.response["uid"], reply.fields["connection"]) == ("last", "close")
        await stopping
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel likes
            await one.caller()


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
    page = (Path(__file__).parents[2] / "docs" / "kube.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code = next(block for block in blocks if "Mutator(" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "kube.md", "exec"), names)  # noqa: S102 our own page
    answers = [
        names["server"].handle(Request("POST", "/teams", "application/json", review({"metadata": {"labels": labels}})))
        for labels in ({"team": "a"}, {"x": "y"}, {"team": "nobody"})
    ]
    kept, changed, denied = (Reply("HTTP/1.1 200 OK", answer.body) for answer in answers)
    assert "patch" not in kept.response
    assert changed.patch == [{"op": "add", "path": "/metadata/labels/team", "value": "everyone"}]
    assert not denied.response["allowed"]


async def test_draining_closes_each_connection_after_its_next_review() -> None:
    async with setup(secure=False) as instance:
        caller = await instance.caller()
        assert (await caller.ask(post(review()))).status == 200
        instance.server.drain()
        assert (await caller.ask(post(review()))).status == 200
        assert await caller.ended()
        assert (await instance.ask(post(review()))).status == 200


def test_two_webhooks_do_not_share_a_path() -> None:
    with pytest.raises(ValueError, match="/off"):
        AdmissionServer([denying("/off", "a"), denying("/off", "b")])


# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_tls_version_with_two_cipher_suites_and_no_http_2_is_accepted() -> None:
    async with setup() as one:
        socket = (await one.caller()).writer.get_extra_info("ssl_object")
        assert (socket.version(), socket.cipher()[0]) == ("TLSv1.2", "ECDHE-ECDSA-AES256-GCM-SHA384")
        assert socket.selected_alpn_protocol() == "http/1.1"
        other = client_context(AUTHORITY)
        other.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        newer = client_context(AUTHORITY, ssl.TLSVersion.TLSv1_3)
        newer.minimum_version = ssl.TLSVersion.TLSv1_3
        for context in (other, newer):
            with pytest.raises(OSError):  # noqa: PT011 - an alert or a reset: who is first
                await one.caller(context)


async def test_tls_1_3_is_accepted_with_the_option() -> None:
    tls = ServingTls(TlsSettings(allow_tls13=True))
    tls.use(SERVER.certificate, SERVER.key)
    async with setup(tls=tls) as one:
        newest = await one.caller(client_context(AUTHORITY, ssl.TLSVersion.TLSv1_3))
        assert newest.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert (await newest.ask(post(review()))).status == 200
        assert (await one.ask(post(review()))).status == 200


async def test_without_a_certificate_handshakes_fail_and_nothing_else() -> None:
    tls = ServingTls()
    async with setup(tls=tls) as one:
        with pytest.raises(OSError):  # noqa: PT011 - an alert or a reset: who is first
            await one.caller()
        tls.use(SERVER.certificate, SERVER.key)
        assert (await one.ask(post(review()))).status == 200


class MountedSecret:
    """A directory as the kubelet mounts a Secret: one link switches all files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        for name in ("tls.crt", "tls.key"):
            os.symlink(f"..data/{name}", path / name)

    def put(self, certificate: bytes, key: bytes) -> None:
        self._number += 1
        fresh = self.path / f"..{self._number}"
        fresh.mkdir()
        (fresh / "tls.crt").write_bytes(certificate)
        (fresh / "tls.key").write_bytes(key)
        os.symlink(fresh.name, self.path / "..tmp")
        os.replace(self.path / "..tmp", self.path / "..data")

    def issue(self) -> Credentials:
        instance = AUTHORITY.server("localhost", "localhost")
        self.put(instance.certificate, instance.key)
        return instance


def certificate_of(caller: Caller) -> bytes:
    return caller.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


async def test_certificates_are_replaced_under_load_without_one_failed_review(tmp_path: Path) -> None:
    mounted = MountedSecret(tmp_path)
    mounted.issue()
    tls = ServingTls()
    tls.follow(str(tmp_path), check_interval=0)
    serials: set[bytes] = set()
    reviews = 0
    async with setup(tls=tls) as one:
        staying = await one.caller()
        first = certificate_of(staying)

        async def load(caller: Caller | None) -> None:
            nonlocal reviews
            while len(serials) < 3:
                asking = caller or await one.caller()
                serials.add(certificate_of(asking))
                assert (await asking.ask(post(review()))).response["allowed"]
                reviews += 1
                if caller is None:
                    await asking.close()

        async def rotate() -> None:
            while len(serials) < 3:
                known = len(serials)
                mounted.issue()
                await until(lambda known=known: len(serials) > known)

        async with asyncio.timeout(30):
            await asyncio.gather(load(staying), load(await one.caller()), load(None), load(None), rotate())
        assert certificate_of(staying) == first
        assert (await staying.ask(post(review()))).response["allowed"]
    assert reviews > 20
    assert one.server.stats[PATH].outcomes["mutated"] == reviews + 1


async def test_an_invalid_key_pair_never_replaces_a_valid_one(tmp_path: Path) -> None:
    mounted = MountedSecret(tmp_path)
    good = mounted.issue()
    tls = ServingTls()
    tls.follow(str(tmp_path), check_interval=0)
    async with setup(tls=tls) as one:
        before = certificate_of(await one.caller())
        for certificate, key in ((good.certificate, AUTHORITY.server("x").key), (b"", b""), (b"junk", good.key)):
            mounted.put(certificate, key)
            await asyncio.sleep(0)
            assert certificate_of(await one.caller()) == before
        os.unlink(tmp_path / "..data")
        assert certificate_of(await one.caller()) == before


@pytest.mark.parametrize(("certificate", "key"), [(b"", b""), (SERVER.certificate, b"x"), (b"x", SERVER.key)])
def test_a_server_does_not_start_with_an_invalid_key_pair(tmp_path: Path, certificate: bytes, key: bytes) -> None:
    MountedSecret(tmp_path).put(certificate, key)
    with pytest.raises(CertificateError, match=r"tls\.crt"):
        ServingTls().follow(str(tmp_path))


def test_a_missing_certificate_is_reported_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"tls\.crt: No such file"):
        ServingTls().follow(str(tmp_path))


# ── Hostile input ───────────────────────────────────────────────────────────────────────────────────────────────────

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
RESOURCES = st.dictionaries(
    st.sampled_from(["sgx.intel.com/epc", "sgx.intel.com/enclave", "cpu"]), VALUES | st.just("1")
)
CONTAINERS = st.lists(
    VALUES
    | st.fixed_dictionaries(
        {},
        optional={
            "name": VALUES,
            "env": VALUES,
            "resources": VALUES | st.fixed_dictionaries({"limits": RESOURCES, "requests": RESOURCES}),
        },
    ),
    max_size=3,
)
PODS = VALUES | st.fixed_dictionaries(
    {"metadata": VALUES | st.just({}), "spec": VALUES | st.fixed_dictionaries({"containers": CONTAINERS})}
)


@given(PODS)
@settings(deadline=None)
def test_any_object_is_allowed_or_denied(found: Any) -> None:
    server = AdmissionServer([mutator(SgxOptions())])
    body = msgspec.json.encode(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u", "object": found}}
    )
    response = server.handle(Request("POST", PATH, "application/json", body))
    assert isinstance(response, Response)
    answered = json.loads(response.body)["response"]
    assert answered["allowed"] or answered["status"]["code"] in (400, 403)


@given(st.binary() | st.text().map(str.encode) | VALUES.map(msgspec.json.encode))
def test_any_body_is_rejected_or_reviewed(body: bytes) -> None:
    server = AdmissionServer([mutator(SgxOptions())])
    with contextlib.suppress(HttpError):
        server.handle(Request("POST", PATH, "application/json", body))


PIECES = st.lists(
    st.binary(max_size=20)
    | st.sampled_from([post(review()), b"GET /healthz HTTP/1.1\r\n\r\n", b"\r\n", b"\r\n\r\n",
                       b"POST / HTTP/1.1\r\n",
                       b"Content-Length: 5\r\n", b"Host: x\r\n", b"Expect: 100-continue\r\n",
                       b"Connection: close\r\n"]),
    max_size=8,
)  # fmt: skip


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=examples(30))
def test_bytes_that_are_not_tls_end_the_connection(data: bytes) -> None:
    async def send_requests() -> None:
        async with setup(limits=HttpLimits(handshake=0.05)) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(data)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
            writer.close()
            assert (await one.ask(post(review()))).status == 200

    asyncio.run(send_requests())


@given(PIECES)
@settings(deadline=None, max_examples=examples(60))
def test_any_bytes_get_http_responses_and_a_closed_connection(pieces: Sequence[bytes]) -> None:
    async def send_requests() -> bytes:
        async with setup(secure=False, limits=HttpLimits(linger=0.01)) as one:
            caller = await one.caller()
            caller.writer.write(b"".join(pieces))
            caller.writer.write_eof()
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    return await caller.reader.read()
            return b""

    answers = asyncio.run(send_requests())
    assert not answers or answers.startswith(b"HTTP/1.1 ")
