"""The proxy of a server, from the environment variables `HTTPS_PROXY` and `NO_PROXY` as Go programs read them.

Facts: golang.org/x/net/http/httpproxy (precedence, patterns of NO_PROXY, loopback addresses have no proxy).
"""

import base64
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from accelplane.http.client import Proxy


def proxy_from_environment(host: str, port: int, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy for https to a server. Raises `ValueError` for a proxy that is not supported."""
    url = environment.get("HTTPS_PROXY") or environment.get("https_proxy") or ""
    excluded = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    if not url or _is_excluded(host.lower().rstrip("."), port, excluded):
        return None
    return parse_proxy(url)


def parse_proxy(url: str) -> Proxy:
    """Raises `ValueError` for a URL that is not `http://[user:password@]host[:port]`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        # Without the URL, which may contain a password.
        raise ValueError(f"proxy of scheme {parts.scheme[:20]!a}, expected http://host:port")
    authorization = ""
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(credentials.encode()).decode()}"
    return Proxy(parts.hostname, port, authorization)


def _is_excluded(host: str, port: int, patterns: str) -> bool:
    from ipaddress import ip_address  # noqa: PLC0415 - needed where a proxy is set only

    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(_matches(host, port, pattern.strip().lower()) for pattern in patterns.split(","))


def _matches(host: str, port: int, pattern: str) -> bool:
    """Whether a pattern of NO_PROXY (`*`, address, CIDR, domain; all but CIDR with a port) matches."""
    from ipaddress import ip_address, ip_network  # noqa: PLC0415

    if pattern in ("", "*"):
        return pattern == "*"
    try:
        return ip_address(host) in ip_network(pattern.removeprefix("[").removesuffix("]"), strict=False)
    except ValueError:
        pass  # one of them is a name, or the pattern has a port
    name, colon, number = pattern.rpartition(":")
    if colon and number.isdecimal() and (":" not in name or name.startswith("[")):
        if int(number) != port:
            return False
        pattern = name.removeprefix("[").removesuffix("]")
    domain = pattern.removeprefix("*")
    # `.a.b` matches subdomains only, `a.b` also itself.
    return host == domain or host.endswith(domain if domain.startswith(".") else f".{domain}")
