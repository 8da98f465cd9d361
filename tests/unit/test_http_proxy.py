"""Proxies of the environment, with the rules of Go programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.http.client import Proxy
from accelplane.http.proxy import parse_proxy, proxy_from_environment

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("host", "port", "excluded"),
    [
        ("localhost", 443, ""),
        ("127.8.9.1", 443, ""),
        ("::1", 443, ""),
        ("any.example", 443, "*"),
        ("any.example", 443, "other, *"),
        ("10.96.0.1", 443, "10.96.0.1"),
        ("10.96.0.1", 443, "10.96.0.1:443"),
        ("10.96.0.1", 443, "10.96.0.0/12"),
        ("10.96.0.1", 443, "10.96.0.7/12"),
        ("fd00::1", 443, "fd00::1"),
        ("fd00::1", 443, "fd00::/8"),
        ("fd00::1", 443, "[fd00::1]:443"),
        ("a.b.example", 443, "b.example"),
        ("b.example", 443, "b.example"),
        ("a.b.example", 443, ".b.example"),
        ("a.b.example", 443, "*.b.example"),
        ("A.B.Example.", 443, "b.eXample"),
        ("b.example", 6443, "b.example:6443"),
    ],
)
def test_excluded_servers_have_no_proxy(host: str, port: int, excluded: str) -> None:
    assert proxy_from_environment(host, port, {"HTTPS_PROXY": PROXY, "NO_PROXY": excluded}) is None
    assert proxy_from_environment(host, port, {"https_proxy": PROXY, "no_proxy": excluded}) is None


@pytest.mark.parametrize(
    ("host", "excluded"),
    [
        ("any.example", ""),
        ("any.example", "other"),
        ("any.example", ",  ,"),
        ("bb.example", "b.example"),
        ("b.example", ".b.example"),
        ("b.example", "*.b.example"),
        ("b.example", "b.example:6443"),
        ("b.example", "10.0.0.0/8"),
        ("11.0.0.1", "10.0.0.0/8"),
        ("10.96.0.1", "10.96.0.1:6443"),
        ("10.96.0.1", "fd00::/8"),
        ("fd00::1", "fd00::2"),
        ("fd00::1", "[fd00::1]:6443"),
    ],
)
def test_other_servers_have_the_proxy(host: str, excluded: str) -> None:
    found = proxy_from_environment(host, 443, {"HTTPS_PROXY": PROXY, "NO_PROXY": excluded})
    assert found == Proxy("proxy.example", 3128)


def test_only_https_proxy_names_the_proxy_of_https_servers() -> None:
    assert proxy_from_environment("a", 443, {"HTTP_PROXY": PROXY, "ALL_PROXY": PROXY, "HTTPS_PROXY": ""}) is None


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("proxy:3128", Proxy("proxy", 3128)),
        ("http://proxy", Proxy("proxy", 80)),
        ("http://[fd00::1]:3128/", Proxy("fd00::1", 3128)),
        ("http://user:p%40ss@proxy:1", Proxy("proxy", 1, "Basic dXNlcjpwQHNz")),
        ("http://user@proxy:1", Proxy("proxy", 1, "Basic dXNlcjo=")),
    ],
)
def test_a_proxy_has_address_and_credentials(url: str, proxy: Proxy) -> None:
    assert parse_proxy(url) == proxy


@pytest.mark.parametrize(
    "url", ["https://proxy", "socks5://proxy:1", "http://", "http://proxy:x", "http://proxy:99999"]
)
def test_an_unsupported_proxy_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port"):
        parse_proxy(url)


@given(st.text(), st.text())
def test_any_environment_is_a_proxy_none_or_a_value_error(url: str, excluded: str) -> None:
    try:
        found = proxy_from_environment("a.example", 443, {"HTTPS_PROXY": url, "NO_PROXY": excluded})
    except ValueError:
        return
    assert found is None or found.port > 0
