"""The certificate authority of webhooks: renewal decisions, and the patches that inject it."""

import base64
import datetime
import json
import ssl
from typing import Any

import msgspec
import pytest
from certificates import accepts
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from accelplane.http.servingtls import ServingTls
from accelplane.kube.authority import plan, renew
from accelplane.kube.certificates import (
    CertificatePolicy,
    CertificateSet,
    RenewalError,
    RenewalPlan,
    RenewalRequest,
    plan_renewal,
    service_names,
)
from accelplane.kube.testing import apply_json_patch
from accelplane.kube.trust import (
    ServiceReference,
    Target,
    injection_patch,
)

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NAMES = service_names("hooks", "system")
POLICY = CertificatePolicy()
SERVICE = ServiceReference("hooks", "system")
DAY = datetime.timedelta(days=1)
HOUR = datetime.timedelta(hours=1)


def trusts(bundle: bytes, certificate: bytes, now: datetime.datetime) -> bool:
    return accepts(bundle, certificate, NAMES[0], now)


def count(bundle: bytes) -> int:
    return len(x509.load_pem_x509_certificates(bundle))


def test_first_certificate_is_valid_for_all_names_of_the_service() -> None:
    first = renew(None, NAMES, START, POLICY)
    assert trusts(first.authorities, first.certificate, START)
    leaf = x509.load_pem_x509_certificate(first.certificate)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hooks.system.svc", "hooks.system.svc.cluster.local"]
    assert first.authority_key.startswith(b"-----BEGIN PRIVATE KEY")


def test_nothing_is_renewed_before_it_is_due() -> None:
    first = renew(None, NAMES, START, POLICY)
    for days in (0, 1, 59):
        assert renew(first, NAMES, START + days * DAY, POLICY) is first


def test_serving_certificate_is_renewed_in_the_last_third_of_its_lifetime() -> None:
    first = renew(None, NAMES, START, POLICY)
    later = START + 61 * DAY
    second = renew(first, NAMES, later, POLICY)
    assert second.certificate != first.certificate
    assert second.authorities == first.authorities
    assert trusts(first.authorities, second.certificate, later)
    assert renew(second, NAMES, later, POLICY) is second


def test_nothing_is_renewed_before_the_planned_time() -> None:
    policy = CertificatePolicy(authority=300 * DAY, serving=30 * DAY, overlap=12 * HOUR)
    now, current, changes, second = START, None, 0, datetime.timedelta(seconds=1)
    while now < START + 600 * DAY:
        planned = plan(RenewalRequest(current, NAMES, now, policy))
        changes += planned.certificates is not None
        current = planned.certificates or current
        assert renew(current, NAMES, max(now, planned.until - second), policy) is current
        now = planned.until + second
    assert changes > 20


async def test_child_process_issues_certificates() -> None:
    first = await plan_renewal(RenewalRequest(None, NAMES, START, POLICY))
    assert first.certificates is not None
    assert trusts(first.certificates.authorities, first.certificates.certificate, START)
    assert await plan_renewal(RenewalRequest(first.certificates, NAMES, START, POLICY)) == RenewalPlan(
        None, first.until
    )


async def test_failure_of_the_child_process_is_reported_with_its_cause() -> None:
    with pytest.raises(RenewalError, match=r"accelplane\.kube\.authority: exit status 1: IndexError"):
        await plan_renewal(RenewalRequest(None, [], START, POLICY))


def test_certificate_with_new_names_is_issued_immediately() -> None:
    first = renew(None, ["other.system.svc"], START, POLICY)
    second = renew(first, NAMES, START, POLICY)
    assert trusts(first.authorities, second.certificate, START)


def test_every_certificate_is_trusted_before_and_while_it_is_served() -> None:
    policy = CertificatePolicy(authority=300 * DAY, serving=30 * DAY, overlap=12 * HOUR)
    now, current = START, renew(None, NAMES, START, policy)
    authorities = {current.authorities}
    for _ in range(3 * 365):
        now += DAY
        following = renew(current, NAMES, now, policy)
        assert trusts(current.authorities, following.certificate, now)
        assert trusts(following.authorities, current.certificate, now)
        assert trusts(following.authorities, following.certificate, now)
        assert count(following.authorities) <= 2
        authorities.add(following.authorities)
        current = following
    assert len(authorities) >= 6


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_damaged_secret_is_repaired(name: str, content: bytes) -> None:
    data = {**renew(None, NAMES, START, POLICY).secret_data(), name: content}
    second = renew(CertificateSet.from_secret(data), NAMES, START, POLICY)
    assert trusts(second.authorities, second.certificate, START)
    tls = ServingTls()
    tls.use(second.certificate, second.key)


def test_removed_certificate_is_issued_again_by_the_trusted_authority() -> None:
    first = renew(None, NAMES, START, POLICY)
    second = renew(
        CertificateSet.from_secret({**first.secret_data(), "tls.crt": b"", "tls.key": b""}), NAMES, START, POLICY
    )
    assert second.authorities == first.authorities
    assert second.certificate != first.certificate
    assert trusts(first.authorities, second.certificate, START)


def test_an_authority_without_a_key_is_replaced_and_the_served_certificate_is_kept() -> None:
    first = renew(None, NAMES, START, POLICY)
    second = renew(CertificateSet.from_secret({**first.secret_data(), "ca.key": b""}), NAMES, START, POLICY)
    assert count(second.authorities) == 2
    assert (second.certificate, second.key) == (first.certificate, first.key)


@pytest.mark.parametrize("ahead", [HOUR, 30 * DAY, 3650 * DAY])
def test_certificates_that_were_issued_while_the_clock_was_ahead_are_replaced(ahead: datetime.timedelta) -> None:
    early = renew(None, NAMES, START + ahead, POLICY)
    assert not trusts(early.authorities, early.certificate, START)
    second = renew(early, NAMES, START, POLICY)
    assert trusts(second.authorities, second.certificate, START)
    assert count(second.authorities) == 1
    assert renew(second, NAMES, START, POLICY) is second


def test_a_certificate_that_was_issued_while_the_clock_was_ahead_is_replaced_by_the_same_authority() -> None:
    first = renew(None, NAMES, START - DAY, POLICY)
    early = renew(CertificateSet(first.authorities, first.authority_key, b"", b""), NAMES, START + DAY, POLICY)
    second = renew(early, NAMES, START, POLICY)
    assert second.authorities == first.authorities
    assert trusts(first.authorities, second.certificate, START)


def test_small_differences_of_clocks_replace_nothing() -> None:
    first = renew(None, NAMES, START, POLICY)
    assert renew(first, NAMES, START - datetime.timedelta(minutes=9), POLICY) is first


def test_a_mismatched_key_is_replaced() -> None:
    first, other = (renew(None, NAMES, START, POLICY) for _ in range(2))
    for mixed in (
        msgspec.structs.replace(first, key=other.key),
        msgspec.structs.replace(first, authority_key=other.authority_key),
        msgspec.structs.replace(first, certificate=other.certificate, key=other.key),
    ):
        second = renew(mixed, NAMES, START, POLICY)
        assert second is not mixed
        assert trusts(second.authorities, second.certificate, START)
        ServingTls().use(second.certificate, second.key)


@given(st.builds(CertificateSet, st.binary(), st.binary(), st.binary(), st.binary()))
@settings(deadline=None, max_examples=examples(20))
def test_any_content_of_the_secret_is_repaired(current: CertificateSet) -> None:
    second = renew(current, NAMES, START, POLICY)
    assert trusts(second.authorities, second.certificate, START)


def entry(name: str, service: str = "hooks", **config: Any) -> dict[str, Any]:
    return {"name": name, "clientConfig": {"service": {"name": service, "namespace": "system", "path": "/x"}, **config}}


def target(**content: Any) -> dict[str, Any]:
    return {"metadata": {"name": "one"}, **content}


def injected(document: dict[str, Any]) -> dict[str, Any]:
    found = msgspec.json.decode(json.dumps(document), type=Target)
    return apply_json_patch(document, json.loads(msgspec.json.encode(injection_patch(found, b"PEM", SERVICE))))


BUNDLE = base64.b64encode(b"PEM").decode()


def test_bundle_is_injected_only_where_a_configuration_refers_to_the_service() -> None:
    elsewhere = [entry("c", "others", caBundle="b2xk"), {"name": "d", "clientConfig": {"url": "https://x"}}]
    after = injected(target(webhooks=[entry("a"), entry("b", caBundle="b2xk"), *elsewhere]))
    assert [one["clientConfig"].get("caBundle") for one in after["webhooks"][:2]] == [BUNDLE, BUNDLE]
    assert after["webhooks"][2:] == elsewhere
    assert injected(after) == after


def test_bundle_is_injected_into_the_conversion_of_a_definition() -> None:
    conversion = {
        "strategy": "Webhook",
        "webhook": {"clientConfig": {"service": {"name": "hooks", "namespace": "system"}}},
    }
    after = injected(target(spec={"group": "x", "conversion": conversion}))
    assert after["spec"]["conversion"]["webhook"]["clientConfig"]["caBundle"] == BUNDLE
    plain = target(spec={"group": "x", "conversion": {"strategy": "None"}})
    assert injected(plain) == plain


def test_a_context_without_a_certificate_is_not_ready() -> None:
    tls = ServingTls()
    assert not tls.ready
    assert tls.connection_context().maximum_version == ssl.TLSVersion.TLSv1_2
