"""The credentials of requests: TLS trust, client certificates, tokens, passwords, exec plugins.

Tokens are read for each request, certificates again when their files were replaced.
"""

import base64
import os
import ssl
from typing import TYPE_CHECKING

from accelplane.apiserver.config import ClientConfig, Source, read_source, source_name
from accelplane.apiserver.errors import NoCredentials

if TYPE_CHECKING:
    from accelplane.apiserver.execplugin import ExecCredentials


class Credentials:
    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._context: ssl.SSLContext | None = None
        self._stamp: object = None
        self._exec: ExecCredentials | None = None
        if config.exec_plugin is not None:
            from accelplane.apiserver import execplugin  # noqa: PLC0415 - rarely needed

            self._exec = execplugin.ExecCredentials(config.exec_plugin)

    async def authorization(self) -> str:
        """The header, empty without one. Raises `NoCredentials`."""
        if self._exec is not None:
            await self._exec.refresh()
            if self._exec.token:
                return f"Bearer {self._exec.token}"
        if self._config.token is not None:
            return f"Bearer {_token(self._config.token)}"
        if self._config.password is not None:
            return f"Basic {base64.b64encode(':'.join(self._config.password).encode()).decode()}"
        return ""

    def check(self, *, secure: bool) -> None:
        """Raises `NoCredentials` if a file cannot be used; `secure` includes the certificates."""
        if self._config.token is not None:
            _token(self._config.token)
        if secure:
            self.context()

    def reject(self) -> bool:
        """Called after a 401. Returns whether new credentials can be obtained immediately."""
        return self._exec is not None and self._exec.expire()

    def context(self) -> ssl.SSLContext:
        """The TLS context, the same until a file is replaced. Raises `NoCredentials`."""
        config = self._config
        certificate = (self._exec.certificate if self._exec is not None else None) or config.certificate
        stamp = [_stamp(each) for each in (config.authority, *(certificate or ()))]
        if self._context is None or stamp != self._stamp:
            context = trust_context(config.authority, insecure=config.insecure)
            if certificate is not None:
                _load_certificate(context, *certificate)
            self._context, self._stamp = context, stamp
        return self._context


def trust_context(authority: Source | None, *, insecure: bool = False) -> ssl.SSLContext:
    """A client's TLS that trusts `authority` (PEM) and no other, or the system's authorities without one.

    Raises `NoCredentials`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Many long-lived cluster authorities lack the extensions that Python 3.13 requires by default.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif authority is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(cadata=read_source(authority).decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise NoCredentials(source_name(authority), f"expected certificates in PEM: {error}") from None
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Source, key: Source) -> None:
    """Raises `NoCredentials`."""
    both = b"%s\n%s" % (read_source(certificate), read_source(key))
    # OpenSSL reads files only; this one has no name, so that no other process finds the key.
    with open(os.memfd_create("key"), "w+b") as file:
        file.write(both)
        file.flush()
        try:
            # Without a password, OpenSSL would prompt for that of an encrypted key on the terminal.
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
        except OSError as error:  # also ssl.SSLError
            named = f"{source_name(certificate)} and {source_name(key)}"
            problem = getattr(error, "reason", None) or error
            raise NoCredentials(named, f"expected a certificate and its key in PEM: {problem}") from None


def _token(source: Source) -> str:
    token = read_source(source).strip()
    text = token.decode("ascii", "replace")
    if not text or " " in text or not text.isascii() or not text.isprintable():
        raise NoCredentials(source_name(source), f"found {len(token)} bytes that are not a token")
    return text


def _stamp(source: Source | None) -> object:
    if not isinstance(source, str):
        return source
    try:
        found = os.stat(source)
    except OSError as error:
        raise NoCredentials(source, error.strerror or str(error)) from None
    return found.st_ino, found.st_mtime_ns, found.st_size
