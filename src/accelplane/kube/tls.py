"""The TLS of our own servers: which versions and suites, and a certificate that may change while they serve.

A certificate is looked at when somebody shakes hands: no timer runs, none is served that has been replaced, and
connections that are open stay. It is replaced with its whole context, once certificate and key have proven to be a
pair: in a mounted Secret the two do not change in one moment.
"""

import contextlib
import logging
import os
import ssl
import time
from collections.abc import Generator

from msgspec import Struct

log = logging.getLogger(__name__)

SUITES = ("ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES256-GCM-SHA384")

_Stamp = tuple[tuple[int, int, int], ...]


class CertificateError(Exception):
    """A certificate or its key cannot be used; the text names the files."""


class TlsSettings(Struct, frozen=True):
    """TLS 1.2 with two suites and nothing else, unless newer versions are allowed too."""

    newer: bool = False
    suites: tuple[str, ...] = SUITES

    def context(self) -> ssl.SSLContext:
        """One without a certificate yet."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_3 if self.newer else ssl.TLSVersion.TLSv1_2
        context.set_ciphers(":".join(self.suites))
        context.set_alpn_protocols(["http/1.1"])
        # A session that is resumed by ticket would go on under a certificate that has been replaced.
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        return context


class ServingTls:
    """What a server hands to asyncio as its `context`; each handshake gets the certificate of the moment."""

    def __init__(self, settings: TlsSettings | None = None) -> None:
        self._settings = settings or TlsSettings()
        self._current: ssl.SSLContext | None = None
        self._files: _Files | None = None
        self.context = self._settings.context()
        self.context.sni_callback = self._shaking_hands

    @property
    def ready(self) -> bool:
        """Whether there is a certificate at all."""
        return self._current is not None

    def use(self, certificate: bytes, key: bytes) -> None:
        """Serves this pair (PEM) from the next handshake on. Raises `CertificateError`."""
        # OpenSSL reads files only; these are none that a disk or another process ever sees.
        with _memory(certificate) as first, _memory(key) as second:
            self._current = _with_pair(self._settings, first, second, "the certificate in memory")

    def follow(self, directory: str, *, look_again: float = 1.0) -> None:
        """Serves `tls.crt` and `tls.key` of `directory`, and their successors. Raises `CertificateError`.

        In a storm of handshakes the files are looked at every `look_again` seconds.
        """
        paths = os.path.join(directory, "tls.crt"), os.path.join(directory, "tls.key")
        files = _Files(self._settings, *paths, look_again)
        self._current = files.load()
        self._files = files

    def _shaking_hands(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> int | None:
        if self._files is not None:
            self._current = self._files.changed() or self._current
        if self._current is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._current
        return None


class _Files:
    """A pair of files and when they were last looked at."""

    def __init__(self, settings: TlsSettings, certificate: str, key: str, look_again: float) -> None:
        self._settings = settings
        self._certificate = certificate
        self._key = key
        self._loaded: _Stamp = ()
        self._look_again = look_again
        self._looked = 0.0
        self._problem = ""

    def load(self) -> ssl.SSLContext:
        """Raises `CertificateError`."""
        stamp = self._stamp()
        context = _with_pair(self._settings, self._certificate, self._key, f"{self._certificate}, {self._key}")
        self._loaded = stamp
        return context

    def changed(self) -> ssl.SSLContext | None:
        """A context for what is new. What cannot be loaded is said once, and the former pair goes on."""
        now = time.monotonic()
        if now - self._looked < self._look_again:
            return None
        self._looked = now
        try:
            if self._stamp() == self._loaded:
                return None
            context = self.load()
        except CertificateError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("%s; serving with the former certificate", error)
            return None
        self._problem = ""
        log.info("%s: loaded anew", self._certificate)
        return context

    def _stamp(self) -> _Stamp:
        try:
            found = [os.stat(path) for path in (self._certificate, self._key)]
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}; expected a PEM file") from error
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


def _with_pair(settings: TlsSettings, certificate: str, key: str, name: str) -> ssl.SSLContext:
    """Raises `CertificateError`."""
    context = settings.context()
    try:
        # Without the callable, a key with a passphrase would be asked for at a terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise CertificateError(f"{name}: {error}; expected a certificate and its key, PEM") from error
    return context


@contextlib.contextmanager
def _memory(content: bytes) -> Generator[str]:
    """The path of a file with this content, while entered."""
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
