"""Requests of the tests to the API server of a cluster, as its administrator."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .pki import Credentials

Object = dict[str, Any]


class ApiClient:
    """A client whose GET requests reuse connections."""

    def __init__(self, host: str, port: int, authority: bytes) -> None:
        """`authority` is the certificate, PEM, that signs the server's."""
        self._host = host
        self._port = port
        self._tls = ssl.create_default_context(cadata=authority.decode())
        self._idle: list[http.client.HTTPSConnection] = []

    def authenticate(self, user: Credentials, directory: Path) -> None:
        """Use a client certificate for the requests that follow. A file in `directory` has it meanwhile."""
        certificate = directory / "administrator.pem"
        certificate.write_bytes(user.certificate + user.key)
        self._tls.load_cert_chain(certificate)
        certificate.unlink()

    def request(
        self, method: str, path: str, body: Object | None = None, *, content: str = "application/json"
    ) -> tuple[int, Any]:
        """One request: status and decoded answer.

        GET requests, which tests repeat 20 times a second, reuse connections. Other requests do not: if the server has
        closed a connection, it is unknown whether it has received the request, so it must not be repeated.
        """
        if method == "GET":
            return self._get(path)
        with self.connection() as request:
            return request(method, path, body, content=content)

    @contextmanager
    def connection(self, timeout: float = 10) -> Iterator[Callable[..., tuple[int, Any]]]:
        """A function like ``request`` whose calls share a connection."""
        connection = self._connect(timeout)

        def request(
            method: str, path: str, body: Object | None = None, *, content: str = "application/json"
        ) -> tuple[int, Any]:
            return _exchange(connection, method, path, body, content)

        try:
            yield request
        finally:
            connection.close()

    def get(self, path: str) -> Object | None:
        """An object or list at an API path; None without one, or without an API server."""
        try:
            status, answer = self.request("GET", path)
        except OSError:
            return None
        return answer if status == http.HTTPStatus.OK else None

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _get(self, path: str) -> tuple[int, Any]:
        while True:
            try:
                connection, reused = self._idle.pop(), True
            except IndexError:
                connection, reused = self._connect(), False
            try:
                answer = _exchange(connection, "GET", path)
            except BaseException as error:
                connection.close()
                if reused and isinstance(error, (ConnectionError, ssl.SSLError)):
                    continue
                raise
            self._idle.append(connection)
            return answer

    def _connect(self, timeout: float = 10) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls, timeout=timeout)


def _exchange(
    connection: http.client.HTTPSConnection,
    method: str,
    path: str,
    body: Object | None = None,
    content: str = "application/json",
) -> tuple[int, Any]:
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": content})
    answer = connection.getresponse()
    text = answer.read().decode()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text
