"""Access to the agent's pages: TLS, client certificates, and the cluster's authorization."""

from collections.abc import Callable
from functools import partial

from accelplane.apiserver import ApiServer, NoCredentials
from accelplane.authorized import Authorized
from accelplane.http.servingtls import CertificateError, ServingTls, TlsSettings
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.pages.server import OPEN, Access

# Probes of the kubelet have no token.
PUBLIC = ("/healthz", "/readyz")


def review_path(path: str) -> str:
    """The path whose nonResourceURL a client of a page needs the right for.

    The role system:discovery of Kubernetes permits `get` of `/api/*` to all authenticated users. Pages below this path
    have names of pods, so they need the right for `/status`.
    """
    return "/status" if path == "/api" or path.startswith("/api/") else path


def page_access(settings: Settings, connect: Callable[[], ApiServer] = ApiServer.in_cluster) -> Access:
    """The access that the settings describe. Raises `ConfigurationError` for unusable files or a missing account."""
    context, validity = None, OPEN.validity
    try:
        if settings.http_tls_dir:
            tls = ServingTls(TlsSettings(allow_tls13=True, client_authority=settings.http_client_ca))
            tls.follow(settings.http_tls_dir)
            context, validity = tls.connection_context, tls.validity
        if not settings.http_authorized:
            return Access(context, restricted=bool(settings.http_client_ca), validity=validity)
        server = connect()
        server.check()
    except CertificateError as error:
        raise ConfigurationError(f"-http-tls-dir: {error}") from error
    except NoCredentials as error:
        raise ConfigurationError(f"-http-authorized: {error}") from error
    audiences = tuple(word for each in settings.http_audience.split(",") if (word := each.strip()))
    authorize = partial(Authorized, server, audiences=audiences, public=PUBLIC, review_path=review_path)
    return Access(context, restricted=True, authorize=authorize, validity=validity)
