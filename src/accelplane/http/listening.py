"""Addresses and listening sockets of HTTP servers."""

import contextlib
import ipaddress
import os
import socket


def split_address(address: str) -> tuple[str | None, int]:
    """Host and port of `host:port` as in Go; an empty host means every address. Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"found {address!a}, expected host:port, for example :8080")
    return host.removeprefix("[").removesuffix("]") or None, int(port)


def is_own_host(field: str) -> bool:
    """Whether the value of a Host field is `localhost` or a loopback address.

    A listener on the loopback interface has to check this. Otherwise a page of another site can read its answers in a
    browser, under a name of its own that leads to 127.0.0.1.
    """
    name = field.rpartition(":")[0] if not field.endswith("]") and ":" in field else field
    name = name.removeprefix("[").removesuffix("]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def bind(host: str | None, port: int, backlog: int) -> list[socket.socket]:
    """Listening sockets for each address of `host`; one for IPv4 and IPv6 without a host. Raises `OSError`."""
    try:
        return _bind(host, port, backlog) if host else [_bind_any(port, backlog)]
    except socket.gaierror:
        raise
    except OSError as error:
        # `create_server` adds the address to the text, which callers have already.
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None


def _bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    problem: OSError | None = None
    for family, address in dict.fromkeys((each[0], str(each[4][0])) for each in found):
        try:
            bound.append(socket.create_server((address, port), family=family, backlog=backlog))
        except OSError as error:
            problem = problem or error
        else:
            port = port or bound[0].getsockname()[1]
    if problem is not None and not bound:
        raise problem
    return bound


def _bind_any(port: int, backlog: int) -> socket.socket:
    """A listening socket for all addresses. Raises `OSError`."""
    if socket.has_dualstack_ipv6():
        # The kernel may support IPv6 while it is disabled for all interfaces.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)
