"""The operator's own certificate and authority change on a real API server during admission: no request is rejected.

Instead of waiting for months, tests write authorities and certificates of past dates to the Secret.
"""

from __future__ import annotations

import base64
import http.client
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Event

import pytest
from cryptography import x509
from customresources import resource

from accelplane.kube.authority import renew
from accelplane.kube.certificates import CertificatePolicy, CertificateSet, service_names

from .installation import KEPT_IN, NAMESPACE, SERVICE, Installation, Operator
from .machine import wait_until

pytestmark = pytest.mark.cluster

NAMES = service_names(SERVICE, NAMESPACE)
PLUGINS = "/apis/deviceplugin.intel.com/v1/npudeviceplugins?dryRun=All"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"


def certificates_of_age(days: float, found: CertificateSet | None = None) -> CertificateSet:
    """Certificates that were issued, or renewed, this number of days ago."""
    return renew(found, NAMES, datetime.now(UTC) - timedelta(days=days), CertificatePolicy())


def store_certificates(installation: Installation, certificates: CertificateSet) -> None:
    """Writes the certificates to the operator's Secret."""
    data = {name: base64.b64encode(content).decode() for name, content in certificates.secret_data().items()}
    # Null removes the key.
    change = {"data": {name: content or None for name, content in data.items()}}
    path = f"{SECRETS}/{KEPT_IN}"
    code, answer = installation.cluster.request("PATCH", path, change, content="application/merge-patch+json")
    if code == http.HTTPStatus.NOT_FOUND:
        code, answer = installation.cluster.request("POST", SECRETS, {"metadata": {"name": KEPT_IN}, "data": data})
    assert code in (http.HTTPStatus.OK, http.HTTPStatus.CREATED), answer


def stored_certificates(installation: Installation) -> CertificateSet:
    """The certificates in the Secret."""
    found = installation.cluster.get(f"{SECRETS}/{KEPT_IN}")
    assert found
    known = CertificateSet.from_secret({name: base64.b64decode(content) for name, content in found["data"].items()})
    assert known
    return known


def served_certificate(installation: Installation, operator: Operator) -> bytes:
    """The served certificate, PEM."""
    return ssl.get_server_certificate((installation.cluster.addresses.host, operator.port), timeout=10).encode()


def count(authorities: bytes) -> int:
    return len(x509.load_pem_x509_certificates(authorities))


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    first = x509.load_pem_x509_certificates(authority)[0]
    return x509.load_pem_x509_certificate(certificate).issuer == first.subject


@contextmanager
def continuous_requests(installation: Installation) -> Iterator[list[object]]:
    """Creates custom resources continuously. Yields the responses of rejected requests."""
    wrong: list[object] = []
    enough = Event()

    def ask() -> int:
        count = 0
        while not enough.is_set():
            code, answer = installation.cluster.request("POST", PLUGINS, resource("npu", "asked"))
            if code != 201 or "image" not in answer["spec"]:
                wrong.append(answer)
            count += 1
        return count

    with ThreadPoolExecutor() as pool:
        requesting_pod = [pool.submit(ask) for _ in range(2)]
        try:
            yield wrong
        finally:
            enough.set()
        assert sum(each.result() for each in requesting_pod) > 50


def test_certificates_and_authorities_change_under_load_and_every_resource_is_admitted(
    installation: Installation,
) -> None:
    # Two trusted authorities: the older one signs, and its certificate is in the last third of its lifetime.
    old, following = certificates_of_age(61), certificates_of_age(1)
    both = old.authorities + following.authorities
    store_certificates(installation, CertificateSet(both, old.authority_key, old.certificate, old.key))
    installation.configure_webhooks()
    with installation.operator() as operator:
        installation.configure_webhooks(operator)
        installation.wait_webhooks()

        def serves_new_certificate(than: bytes) -> bool:
            return served_certificate(installation, operator) != than

        with continuous_requests(installation) as wrong:
            first = served_certificate(installation, operator)
            assert first != old.certificate
            assert is_signed_by(first, old.authorities)

            # The following authority is now due.
            both = following.authorities + old.authorities
            now = stored_certificates(installation)
            store_certificates(installation, CertificateSet(both, following.authority_key, now.certificate, now.key))
            wait_until(lambda: serves_new_certificate(first), "a certificate of the following authority", 60)
            second = served_certificate(installation, operator)
            assert is_signed_by(second, following.authorities)

            # An authority in the last third of its own lifetime: a new one is published, but does not sign yet.
            aging, now = certificates_of_age(1250), stored_certificates(installation)
            store_certificates(
                installation,
                CertificateSet(aging.authorities + both, aging.authority_key, now.certificate, now.key),
            )
            wait_until(lambda: count(stored_certificates(installation).authorities) == 4, "a new authority", 60)
            assert served_certificate(installation, operator) == second

            # The certificate is removed from the Secret.
            now = stored_certificates(installation)
            store_certificates(installation, CertificateSet(now.authorities, now.authority_key, b"", b""))
            wait_until(lambda: serves_new_certificate(second), "another certificate", 60)
        assert wrong == []

        # Newly applied configurations have no bundle.
        installation.remove_webhooks()
        installation.configure_webhooks(operator)
        installation.wait_webhooks()
