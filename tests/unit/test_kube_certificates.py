"""A webhook server's own authority: what is issued when, and who is made to trust it."""

import base64
import datetime
import json
import ssl
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonpatching import applied

from accelplane.kube.authority import judged_here, judgement, renewed
from accelplane.kube.certificates import (
    CertificatePolicy,
    CertificateTrouble,
    Issued,
    Judgement,
    Question,
    issued,
    judged,
    service_names,
)
from accelplane.kube.jsonpatch import Operation
from accelplane.kube.tls import ServingTls
from accelplane.kube.trust import (
    Held,
    ServiceReference,
    Target,
    TargetKind,
    Trust,
    TrustError,
    TrustSettings,
    injection,
)

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NAMES = service_names("hooks", "system")
POLICY = CertificatePolicy()
SERVICE = ServiceReference("hooks", "system")
DAY = datetime.timedelta(days=1)
HOUR = datetime.timedelta(hours=1)


def trusts(bundle: bytes, certificate: bytes, now: datetime.datetime) -> bool:
    """Whether a caller who trusts `bundle` takes this certificate for the service at this moment."""
    leaf = x509.load_pem_x509_certificate(certificate)
    roots = x509.load_pem_x509_certificates(bundle)
    verifier = x509.verification.PolicyBuilder().store(x509.verification.Store(roots)).time(now)
    try:
        verifier.build_server_verifier(x509.DNSName(NAMES[0])).verify(leaf, [])
    except x509.verification.VerificationError:
        return False
    return True


def count(bundle: bytes) -> int:
    return len(x509.load_pem_x509_certificates(bundle))


def test_what_is_issued_first_is_trusted_for_every_name_of_the_service() -> None:
    first = renewed(None, NAMES, START, POLICY)
    assert trusts(first.authorities, first.certificate, START)
    leaf = x509.load_pem_x509_certificate(first.certificate)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hooks.system.svc", "hooks.system.svc.cluster.local"]
    assert first.authority_key.startswith(b"-----BEGIN PRIVATE KEY")


def test_nothing_is_renewed_before_it_is_due() -> None:
    first = renewed(None, NAMES, START, POLICY)
    for days in (0, 1, 59):
        assert renewed(first, NAMES, START + days * DAY, POLICY) is first


def test_the_serving_certificate_is_renewed_in_the_last_third_of_its_life() -> None:
    first = renewed(None, NAMES, START, POLICY)
    later = START + 61 * DAY
    second = renewed(first, NAMES, later, POLICY)
    assert second.certificate != first.certificate
    assert second.authorities == first.authorities
    assert trusts(first.authorities, second.certificate, later)
    assert renewed(second, NAMES, later, POLICY) is second


def test_nothing_is_due_before_the_moment_that_is_told_and_something_soon_is() -> None:
    policy = CertificatePolicy(authority=300 * DAY, serving=30 * DAY, overlap=12 * HOUR)
    now, current, changes, second = START, None, 0, datetime.timedelta(seconds=1)
    while now < START + 600 * DAY:
        said = judgement(Question(current, NAMES, now, policy))
        changes += said.issued is not None
        current = said.issued or current
        assert renewed(current, NAMES, max(now, said.until - second), policy) is current
        now = said.until + second
    assert changes > 20


async def test_certificates_are_issued_by_a_process_that_ends() -> None:
    first = await judged(Question(None, NAMES, START, POLICY))
    assert first.issued is not None
    assert trusts(first.issued.authorities, first.issued.certificate, START)
    assert await judged(Question(first.issued, NAMES, START, POLICY)) == Judgement(None, first.until)


async def test_what_that_process_died_of_is_told() -> None:
    with pytest.raises(CertificateTrouble, match=r"accelplane\.kube\.authority: status 1: IndexError"):
        await judged(Question(None, [], START, POLICY))


def test_names_that_are_new_are_served_at_once() -> None:
    first = renewed(None, ["other.system.svc"], START, POLICY)
    second = renewed(first, NAMES, START, POLICY)
    assert trusts(first.authorities, second.certificate, START)


def test_over_the_years_every_certificate_is_trusted_before_it_serves_and_while_it_does() -> None:
    policy = CertificatePolicy(authority=300 * DAY, serving=30 * DAY, overlap=12 * HOUR)
    now, current = START, renewed(None, NAMES, START, policy)
    authorities = {current.authorities}
    for _ in range(3 * 365):
        now += DAY
        following = renewed(current, NAMES, now, policy)
        assert trusts(current.authorities, following.certificate, now)
        assert trusts(following.authorities, current.certificate, now)
        assert trusts(following.authorities, following.certificate, now)
        assert count(following.authorities) <= 2
        authorities.add(following.authorities)
        current = following
    assert len(authorities) >= 6


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_secret_that_is_damaged_is_replaced_by_a_whole_one(name: str, content: bytes) -> None:
    data = {**renewed(None, NAMES, START, POLICY).data(), name: content}
    second = renewed(issued(data), NAMES, START, POLICY)
    assert trusts(second.authorities, second.certificate, START)
    tls = ServingTls()
    tls.use(second.certificate, second.key)


def test_a_certificate_that_is_taken_out_of_the_secret_is_made_anew_by_the_authority_that_callers_trust() -> None:
    first = renewed(None, NAMES, START, POLICY)
    second = renewed(issued({**first.data(), "tls.crt": b"", "tls.key": b""}), NAMES, START, POLICY)
    assert second.authorities == first.authorities
    assert second.certificate != first.certificate
    assert trusts(first.authorities, second.certificate, START)


def test_without_the_authoritys_key_there_is_a_new_one_and_what_is_served_is_served_on() -> None:
    first = renewed(None, NAMES, START, POLICY)
    second = renewed(issued({**first.data(), "ca.key": b""}), NAMES, START, POLICY)
    assert count(second.authorities) == 2
    assert (second.certificate, second.key) == (first.certificate, first.key)


def test_a_key_of_another_pair_is_noticed() -> None:
    first, other = (renewed(None, NAMES, START, POLICY) for _ in range(2))
    for mixed in (
        msgspec.structs.replace(first, key=other.key),
        msgspec.structs.replace(first, authority_key=other.authority_key),
        msgspec.structs.replace(first, certificate=other.certificate, key=other.key),
    ):
        second = renewed(mixed, NAMES, START, POLICY)
        assert second is not mixed
        assert trusts(second.authorities, second.certificate, START)
        ServingTls().use(second.certificate, second.key)


@given(st.builds(Issued, st.binary(), st.binary(), st.binary(), st.binary()))
@settings(deadline=None, max_examples=20)
def test_any_content_of_the_secret_leads_to_a_whole_one(current: Issued) -> None:
    second = renewed(current, NAMES, START, POLICY)
    assert trusts(second.authorities, second.certificate, START)


def entry(name: str, service: str = "hooks", **config: Any) -> dict[str, Any]:
    return {"name": name, "clientConfig": {"service": {"name": service, "namespace": "system", "path": "/x"}, **config}}


def target(**content: Any) -> dict[str, Any]:
    return {"metadata": {"name": "one"}, **content}


def injected(document: dict[str, Any]) -> dict[str, Any]:
    found = msgspec.json.decode(json.dumps(document), type=Target)
    return applied(document, json.loads(msgspec.json.encode(injection(found, b"PEM", SERVICE))))


BUNDLE = base64.b64encode(b"PEM").decode()


def test_the_bundle_goes_where_a_configuration_leads_to_us_and_nowhere_else() -> None:
    elsewhere = [entry("c", "others", caBundle="b2xk"), {"name": "d", "clientConfig": {"url": "https://x"}}]
    after = injected(target(webhooks=[entry("a"), entry("b", caBundle="b2xk"), *elsewhere]))
    assert [one["clientConfig"].get("caBundle") for one in after["webhooks"][:2]] == [BUNDLE, BUNDLE]
    assert after["webhooks"][2:] == elsewhere
    assert injected(after) == after


def test_the_conversion_of_a_definition_gets_it_too() -> None:
    conversion = {
        "strategy": "Webhook",
        "webhook": {"clientConfig": {"service": {"name": "hooks", "namespace": "system"}}},
    }
    after = injected(target(spec={"group": "x", "conversion": conversion}))
    assert after["spec"]["conversion"]["webhook"]["clientConfig"]["caBundle"] == BUNDLE
    plain = target(spec={"group": "x", "conversion": {"strategy": "None"}})
    assert injected(plain) == plain


class Store:
    """An API that holds one Secret and some configurations, and says no when asked to."""

    def __init__(self) -> None:
        self.held: Held | None = None
        self.version = 0
        self.documents = {"one": target(webhooks=[entry("a")]), "two": {"metadata": {"name": "two"}, "webhooks": []}}
        self.faster: list[Held] = []
        self.broken: set[str] = set()
        self.patches = 0

    async def read(self) -> Held | None:
        return self.held

    async def write(self, data: dict[str, bytes], version: str | None) -> bool:
        if self.faster:
            self.held = self.faster.pop()
        if version != (self.held.version if self.held else None):
            return False
        self.version += 1
        self.held = Held(data, str(self.version))
        return True

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        documents = json.dumps(list(self.documents.values()))
        return [("MutatingWebhookConfiguration", one) for one in msgspec.json.decode(documents, type=list[Target])]

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        if name in self.broken:
            raise TrustError(f"{kind} {name}: no")
        self.patches += 1
        self.documents[name] = applied(self.documents[name], json.loads(msgspec.json.encode(operations)))

    def bundle(self, name: str) -> bytes:
        return base64.b64decode(self.documents[name]["webhooks"][0]["clientConfig"].get("caBundle", ""))


def trust(store: Store, tls: ServingTls, moments: list[datetime.datetime]) -> Trust:
    settings = TrustSettings(service="hooks", namespace="system")
    return Trust(store, tls, settings, clock=lambda: moments[-1], judge=judged_here)


async def test_the_first_settling_issues_injects_and_serves_and_the_second_does_nothing() -> None:
    store, tls = Store(), ServingTls()
    one = trust(store, tls, [START])
    await one.settle()
    assert store.held is not None
    assert tls.ready
    assert trusts(store.bundle("one"), store.held.data["tls.crt"], START)
    written, patched = store.version, store.patches
    await one.settle()
    assert (store.version, store.patches) == (written, patched)


async def test_who_comes_second_serves_what_the_first_one_issued() -> None:
    store = Store()
    other = renewed(None, NAMES, START, POLICY)
    store.faster.append(Held(other.data(), "other"))
    await trust(store, ServingTls(), [START]).settle()
    assert store.held is not None
    assert store.held.data == other.data()
    assert store.bundle("one") == other.authorities


async def test_what_else_is_in_the_secret_stays() -> None:
    store = Store()
    store.held = Held({"note": b"mine"}, "7")
    await trust(store, ServingTls(), [START]).settle()
    assert store.held.data["note"] == b"mine"


async def test_a_configuration_that_cannot_be_patched_does_not_keep_the_server_from_serving() -> None:
    store, tls = Store(), ServingTls()
    store.documents = {"broken": {**target(webhooks=[entry("a")]), "metadata": {"name": "broken"}}, **store.documents}
    store.broken = {"broken"}
    with pytest.raises(TrustError, match="broken: no"):
        await trust(store, tls, [START]).settle()
    assert tls.ready
    assert store.bundle("one")


async def test_a_bundle_that_somebody_removes_is_put_back() -> None:
    store = Store()
    one = trust(store, ServingTls(), [START])
    await one.settle()
    store.documents["one"] = target(webhooks=[entry("a")])
    await one.settle()
    assert store.bundle("one")


def test_a_context_without_a_certificate_is_not_ready() -> None:
    tls = ServingTls()
    assert not tls.ready
    assert tls.context.maximum_version == ssl.TLSVersion.TLSv1_2
