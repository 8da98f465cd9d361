"""Webhooks in a manager: their server, its certificate, readiness, metrics and shutdown.

serve(manager, hooks, Certificate(directory="/certs"), port=9443)
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from accelplane.http.malloc import release_freed_memory
from accelplane.http.servingtls import ServingTls
from accelplane.kube.admission import AdmissionServer, Hook
from accelplane.kube.manager import Manager
from accelplane.kube.metrics import CertificateCollector, Metrics
from accelplane.kube.objects import Metadata
from accelplane.kube.trust import TargetKind, Trust, TrustSettings
from accelplane.kube.truststore import ClusterTrustStore, SecretMetadata

log = logging.getLogger(__name__)


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The source of the certificate: files in `directory`, or a self-signed one if `secret` is set.

    A self-signed certificate is for `service` and is kept in that Secret of the program's namespace. Its CA bundle is
    written into `configurations`: names by kind (`MutatingWebhookConfiguration`, `ValidatingWebhookConfiguration`).
    """

    directory: str = ""
    secret: str = ""
    service: str = ""
    configurations: Mapping[TargetKind, Sequence[str]] = {}


def serve(manager: Manager, hooks: Iterable[Hook], certificate: Certificate, tls: ServingTls, *, port: int) -> None:
    """Serves these webhooks with the manager, which is ready when they can be reached. Raises `CertificateError`."""
    release_freed_memory()
    _certify(manager, certificate, tls)
    metrics = manager.client.metrics
    metrics.registry.register(CertificateCollector(tls.validity))
    server = AdmissionServer(hooks, observe=_observed(metrics))
    for path in server.webhooks:
        metrics.webhook_in_flight.labels(path).set_function(partial(server.in_flight, path))
    manager.add_readyz_check("the webhooks' certificate", lambda: tls.ready)
    manager.add_readyz_check("the webhooks' port", server.accepts)
    manager.add_context(_serving(server, port, tls), drain=server.drain)


def _certify(manager: Manager, certificate: Certificate, tls: ServingTls) -> None:
    if not certificate.secret:
        tls.follow(certificate.directory)
        return
    namespace = manager.client.namespace
    store = ClusterTrustStore(manager.client, namespace, certificate.secret, certificate.configurations)
    settings = TrustSettings(service=certificate.service, namespace=namespace)
    secret = SecretMetadata(Metadata(name=certificate.secret, namespace=namespace))

    def record(problem: str) -> None:
        manager.events.record(secret, "Warning", "CertificateFailed", problem, action="IssueCertificate")

    manager.add_runnable(Trust(store, tls, settings, on_problem=record).run)


def _observed(metrics: Metrics) -> Callable[[str, str, int, float], None]:
    def observe(path: str, outcome: str, code: int, seconds: float) -> None:
        metrics.webhook_reviews.labels(path, outcome).inc()
        metrics.webhook_requests.labels(path, str(code)).inc()
        metrics.webhook_seconds.labels(path).observe(seconds)

    return observe


@contextlib.asynccontextmanager
async def _serving(server: AdmissionServer, port: int, tls: ServingTls) -> AsyncGenerator[None]:
    log.info("webhooks at port %d", await server.start(None, port, tls.connection_context))
    try:
        yield
    finally:
        await server.stop()
