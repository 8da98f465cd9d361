"""The TLS settings of servers, and a serving certificate that changes while they run.

The certificate is checked at each handshake: no timer runs, a replaced certificate is never served, and open
connections continue. Certificate and key are replaced together, after OpenSSL has verified that they match: the files
of a mounted Secret do not change atomically. A certificate that expires soon or is not valid is logged and still
served: some clients do not check it, and the clock of this machine may be wrong.

A context of OpenSSL stores the sessions of up to 20,480 handshakes, 1 KiB each, and ssl cannot switch that off. So a
context serves a limited number of connections, and another one replaces it.
"""

import contextlib
import logging
import os
import ssl
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from accelplane.http.validity import Validity, validity

log = logging.getLogger(__name__)

SUITES = ("ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES256-GCM-SHA384")

_MAX_CONNECTIONS = 256  # of one context

_Stamp = tuple[tuple[int, int, int], ...]


class CertificateError(Exception):
    """A certificate or its key is unusable. The message names the files."""


class TlsSettings(Struct, frozen=True):
    """TLS 1.2 with two cipher suites. `allow_tls13` adds TLS 1.3.

    With `client_authority`, the path of a PEM file, clients need a certificate of this authority; with
    `client_optional` too, clients without any certificate are accepted.
    """

    allow_tls13: bool = False
    suites: tuple[str, ...] = SUITES
    client_authority: str = ""
    client_optional: bool = False

    def context(self) -> ssl.SSLContext:
        """A context without a certificate. Raises `CertificateError` for an unusable `client_authority`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_3 if self.allow_tls13 else ssl.TLSVersion.TLSv1_2
        context.set_ciphers(":".join(self.suites))
        context.set_alpn_protocols(["http/1.1"])
        # A session resumed by a ticket would keep using a replaced certificate.
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0  # of TLS 1.3
        if self.client_authority:
            try:
                context.load_verify_locations(self.client_authority)
            except (OSError, ValueError) as error:
                raise CertificateError(f"{self.client_authority}: {error}; expected PEM certificates") from error
            context.verify_mode = ssl.CERT_OPTIONAL if self.client_optional else ssl.CERT_REQUIRED
        return context


class ServingTls:
    """The TLS contexts of a server (`connection_context`). Each handshake uses the current certificate."""

    def __init__(self, settings: TlsSettings | None = None, *, clock: Callable[[], float] = time.time) -> None:
        """Raises `CertificateError` for an unusable `client_authority`."""
        self._settings = settings or TlsSettings()
        self._current: ssl.SSLContext | None = None
        self._files: _CertificateFiles | None = None
        self._clock = clock
        self._validity: Validity | None = None
        self._name = ""
        self._reported = ""
        self._connections = 0
        self._context = self._settings.context()
        self._context.sni_callback = self._on_client_hello

    def connection_context(self) -> ssl.SSLContext:
        """The context of a new connection."""
        if self._connections >= _MAX_CONNECTIONS:
            # The file of the authority may be unusable now. The context of the certificate, which has read it, has its
            # content, and the handshake uses that one.
            context = msgspec.structs.replace(self._settings, client_authority="").context()
            context.verify_mode = self._context.verify_mode
            context.sni_callback = self._on_client_hello
            self._context, self._connections = context, 0
        self._connections += 1
        return self._context

    @property
    def ready(self) -> bool:
        """Whether there is a certificate."""
        self._update()
        return self._current is not None

    def validity(self) -> Validity | None:
        """The validity of the current certificate, None if it is unknown."""
        self._update()
        return self._validity

    def use(self, certificate: bytes, key: bytes) -> None:
        """Serves this certificate and key (PEM) from the next handshake on. Raises `CertificateError`."""
        # OpenSSL reads files only. A memfd never reaches a disk and is invisible to other processes.
        with _memory_file(certificate) as first, _memory_file(key) as second:
            self._current = _context_with(self._settings, first, second, "the certificate in memory")
        self._set_validity("the certificate in memory", certificate)

    def follow(self, directory: str, *, check_interval: float = 1.0) -> None:
        """Serves `tls.crt` and `tls.key` of `directory`, and reloads them if they change. Raises `CertificateError`.

        A change of the file `client_authority` is a change, too. The files are checked at most once in `check_interval`
        seconds.
        """
        paths = os.path.join(directory, "tls.crt"), os.path.join(directory, "tls.key")
        files = _CertificateFiles(self._settings, *paths, check_interval)
        self._current = files.load()
        self._files = files
        self._set_validity(*files.content())

    def _update(self) -> None:
        """Reloads changed files, and logs the state of the certificate if it has changed."""
        if self._files is not None and (context := self._files.reload_if_changed()) is not None:
            self._current = context
            self._set_validity(*self._files.content())
        self._log_validity()

    def _set_validity(self, name: str, certificate: bytes) -> None:
        self._name, self._reported, self._validity = name, "", None
        try:
            self._validity = validity(certificate)
        except ValueError as error:
            log.warning("%s: its validity is unknown: %s", name, error)
        self._log_validity()

    def _log_validity(self) -> None:
        """No timer runs: this is called for each handshake, readiness probe and page of metrics."""
        found, now = self._validity, self._clock()
        if found is None:
            return
        level, problem = logging.ERROR, ""
        if now < found.not_before:
            problem = f"not valid before {_utc(found.not_before)}; clients reject it; check the clock of this node"
        elif now >= found.not_after:
            problem = f"expired at {_utc(found.not_after)}; clients reject it; renew it"
        elif found.expires_soon(now):
            level, problem = logging.WARNING, f"expires at {_utc(found.not_after)}; renew it"
        if problem and problem != self._reported:
            log.log(level, "%s: %s", self._name, problem)
        self._reported = problem

    def _on_client_hello(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> int | None:
        self._update()
        if self._current is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._current
        return None


class _CertificateFiles:
    """The files of a certificate and its key, with the time of the last check."""

    def __init__(self, settings: TlsSettings, certificate: str, key: str, check_interval: float) -> None:
        self._settings = settings
        self._certificate = certificate
        self._key = key
        self._loaded: _Stamp = ()
        self._check_interval = check_interval
        self._checked = 0.0
        self._problem = ""

    def load(self) -> ssl.SSLContext:
        """Raises `CertificateError`."""
        stamp = self._stamp()
        context = _context_with(self._settings, self._certificate, self._key, f"{self._certificate}, {self._key}")
        self._loaded = stamp
        return context

    def content(self) -> tuple[str, bytes]:
        """The path and the content of the certificate. The content is empty if the file was removed meanwhile."""
        with contextlib.suppress(OSError), open(self._certificate, "rb") as file:
            return self._certificate, file.read()
        return self._certificate, b""

    def reload_if_changed(self) -> ssl.SSLContext | None:
        """The context of a new pair, None if nothing changed. A pair that cannot be loaded is logged once."""
        now = time.monotonic()
        if now - self._checked < self._check_interval:
            return None
        self._checked = now
        try:
            if self._stamp() == self._loaded:
                return None
            context = self.load()
        except CertificateError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("%s; the previous files stay in use", error)
            return None
        self._problem = ""
        log.info("%s: reloaded", self._certificate)
        return context

    def _stamp(self) -> _Stamp:
        try:
            paths = (self._certificate, self._key, self._settings.client_authority)
            found = [os.stat(path) for path in paths if path]
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}; expected a PEM file") from error
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _context_with(settings: TlsSettings, certificate: str, key: str, name: str) -> ssl.SSLContext:
    """Raises `CertificateError`."""
    context = settings.context()
    try:
        # Without the callable, OpenSSL would prompt for a passphrase on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise CertificateError(f"{name}: {error}; expected a PEM certificate and its key") from error
    return context


@contextlib.contextmanager
def _memory_file(content: bytes) -> Generator[str]:
    """Yields the path of a memory file with this content."""
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
