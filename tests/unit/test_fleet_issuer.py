"""The signatures of service account tokens."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from waiting import until
from webtokens import TokenIssuer, text_of

from accelplane.apiserver import ClientConfig
from accelplane.apiserver.client import ApiServer
from accelplane.fleet.web.issuer import (
    PATH,
    IssuerKeys,
    JsonWebKey,
    KeySet,
    has_signature,
    parse_token,
    public_keys,
)
from accelplane.http.handler import PendingResponse
from accelplane.http.messages import HttpError, Request, Response
from accelplane.http.server import HttpServer

ISSUERS = [
    TokenIssuer.rsa(),
    TokenIssuer.rsa("RS512"),
    TokenIssuer.elliptic(),
    TokenIssuer.elliptic(ec.SECP384R1(), "ES384"),
    TokenIssuer.elliptic(ec.SECP521R1(), "ES512"),
]
RSA, OTHER_RSA, ELLIPTIC = ISSUERS[:3]
FLEET = ("accelplane-fleet",)


class KeyServer:
    """An API server that publishes keys."""

    def __init__(self, document: Any) -> None:
        self.document = document
        self.status = 200
        self.requests = 0
        self.now = 1000.0
        self.released = asyncio.Event()
        self.released.set()

    def __call__(self, request: Request) -> PendingResponse:
        assert request.path == PATH
        self.requests += 1
        if request.fields["accept"] != "application/jwk-set+json":
            raise HttpError(406, "Not Acceptable")
        return self._answer()

    async def _answer(self) -> Response:
        await self.released.wait()
        return Response(self.status, msgspec.json.encode(self.document), "application/jwk-set+json")

    @asynccontextmanager
    async def keys(self) -> AsyncIterator[IssuerKeys]:
        server = HttpServer(self, fields=("accept",))
        port = await server.start("127.0.0.1", 0)
        client = ApiServer(ClientConfig(server=f"http://127.0.0.1:{port}"))
        try:
            yield IssuerKeys(client, clock=lambda: self.now)
        finally:
            client.close()
            await server.stop(0.1)


@pytest.mark.parametrize("issuer", ISSUERS)
async def test_a_token_of_the_issuer_is_signed_and_a_changed_one_is_not(issuer: TokenIssuer) -> None:
    token = issuer.token("ann")
    head, claims, signature = token.split(".")
    other_claims = text_of(msgspec.json.encode({"sub": "eve", "aud": FLEET, "exp": 2**40}))
    changed = ("B" if signature[0] == "A" else "A") + signature[1:]
    none = text_of(b'{"alg":"none","kid":"rsa"}')
    async with KeyServer(issuer.document).keys() as keys:
        assert await keys.is_signed(token, FLEET)
        assert await keys.is_signed(token, ("other", *FLEET))
        assert await keys.is_signed(token)
        assert not await keys.is_signed(token, ("other",))
        for forged in (f"{head}.{other_claims}.{signature}", f"{head}.{claims}.{changed}", f"{head}.{claims}.",
                       f"{none}.{claims}.", f"{none}.{claims}.{signature}", f"{token}A", f"{token}=", f"{token}!",
                       f"{head}.{claims}.{signature[:-4]}", f"{head}.{claims}", "random", ""):  # fmt: skip
            assert not await keys.is_signed(forged, FLEET), forged


async def test_an_expired_token_and_one_without_audience_are_not_signed_for_the_fleet() -> None:
    async with KeyServer(ELLIPTIC.document).keys() as keys:
        assert not await keys.is_signed(ELLIPTIC.token("ann", expires=time.time() - 1), FLEET)
        assert not await keys.is_signed(ELLIPTIC.token("ann", ()), FLEET)
        assert await keys.is_signed(ELLIPTIC.token("ann", "accelplane-fleet"), FLEET)


async def test_the_keys_are_read_once_and_again_for_an_unknown_key_after_a_minute() -> None:
    server = KeyServer(RSA.document)
    rotated = TokenIssuer.rsa(name="rotated")
    async with server.keys() as keys:
        assert server.requests == 0
        assert all(await asyncio.gather(*(keys.is_signed(RSA.token(f"user-{each}"), FLEET) for each in range(8))))
        server.document = {"keys": [*RSA.document["keys"], *rotated.document["keys"]]}
        assert not await keys.is_signed(rotated.token("ann"), FLEET)
        assert server.requests == 1
        server.now += 61
        assert await keys.is_signed(RSA.token("ann"), FLEET)
        assert server.requests == 1, "known keys need no request"
        assert await keys.is_signed(rotated.token("ann"), FLEET)
        assert server.requests == 2
        server.document = rotated.document
        server.now += 3601
        assert not await keys.is_signed(RSA.token("ann"), FLEET)


async def test_without_the_right_no_token_is_signed_and_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = KeyServer(RSA.document)
    server.status = 403
    async with server.keys() as keys:
        for _ in range(3):
            assert not await keys.is_signed(RSA.token("ann"), FLEET)
            server.now += 61
        found = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert ["system:service-account-issuer-discovery" in each.message for each in found] == [True]
        server.status = 200
        assert await keys.is_signed(RSA.token("ann"), FLEET)


async def test_a_client_that_disconnects_does_not_prevent_the_next_attempt() -> None:
    server = KeyServer(RSA.document)
    async with server.keys() as keys:
        server.released.clear()
        first = asyncio.create_task(keys.is_signed(RSA.token("eve"), FLEET))
        await until(lambda: server.requests == 1)
        first.cancel()
        await asyncio.wait([first])
        server.released.set()
        assert await keys.is_signed(RSA.token("ann"), FLEET)


@pytest.mark.parametrize(
    "key",
    [
        JsonWebKey("RSA", "k", "", "AQAB"),
        JsonWebKey("RSA", "k", "!!", "AQAB"),
        JsonWebKey("RSA", "k", text_of(b"\xff" * 1025), "AQAB"),
        JsonWebKey("RSA", "k", text_of(b"\xff" * 256), ""),
        JsonWebKey("EC", "k", crv="P-256", x="AQ", y="AQ"),
        JsonWebKey("EC", "k", crv="secp256k1", x="AQ", y="AQ"),
        JsonWebKey("oct", "k"),
    ],
)
def test_a_key_that_cannot_be_used_is_skipped_with_a_line_in_the_log(
    key: JsonWebKey, caplog: pytest.LogCaptureFixture
) -> None:
    usable = msgspec.convert(ELLIPTIC.document, KeySet).keys
    assert list(public_keys(KeySet([key, *usable]))) == ["elliptic"]
    assert "key 'k' cannot be used" in caplog.text


def test_a_document_with_too_many_keys_is_read_in_part() -> None:
    usable = msgspec.convert(ELLIPTIC.document, KeySet).keys[0]
    many = [msgspec.structs.replace(usable, kid=str(number)) for number in range(40)]
    assert len(public_keys(KeySet(many))) == 32


def test_a_signature_of_another_kind_of_key_is_none() -> None:
    keys = {**public_keys(msgspec.convert(RSA.document, KeySet)),
            **public_keys(msgspec.convert(ELLIPTIC.document, KeySet))}  # fmt: skip
    tokens = {"rsa": parse_token(RSA.token("ann")), "elliptic": parse_token(ELLIPTIC.token("ann"))}
    found = {(one, other): token is not None and has_signature(token, keys[other])
             for one, token in tokens.items() for other in keys}  # fmt: skip
    assert found == {(one, other): one == other for one in keys for other in keys}


_PARTS = st.one_of(
    st.text(max_size=40),
    st.binary(max_size=40).map(text_of),
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda each: st.lists(each, max_size=3)).map(
        lambda value: text_of(msgspec.json.encode({"alg": "ES256", "kid": value, "exp": value, "aud": value}))
    ),
)


@pytest.mark.untraced
@given(st.lists(_PARTS, max_size=4).map(".".join), st.binary(max_size=140))
def test_any_text_is_parsed_without_an_exception_and_is_not_signed(text: str, signature: bytes) -> None:
    key = public_keys(msgspec.convert(ELLIPTIC.document, KeySet))["elliptic"]
    for each in (text, f"{text}.{text_of(signature)}", f"{ELLIPTIC.token('ann').rpartition('.')[0]}.{text}"):
        found = parse_token(each)
        assert found is None or not has_signature(found, key)
