"""Paths of the API: names are escaped or rejected."""

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import object_path, resource_path


@pytest.mark.parametrize(
    ("group", "namespace", "name", "subresource", "path"),
    [
        ("", "", "", "", "/api/v1/things"),
        ("", "n", "", "", "/api/v1/namespaces/n/things"),
        ("", "n", "x", "status", "/api/v1/namespaces/n/things/x/status"),
        ("example.com", "", "x", "", "/apis/example.com/v1/things/x"),
        ("example.com", "", "system:node", "", "/apis/example.com/v1/things/system:node"),
        ("", "", "x#y", "", "/api/v1/things/x%23y"),
        ("", "", "x?dryRun=All", "", "/api/v1/things/x%3FdryRun%3DAll"),
        ("", "", "x%2Fy", "", "/api/v1/things/x%252Fy"),
        ("", "", "a b\u00e9", "", "/api/v1/things/a%20b%C3%A9"),
        ("", "n#m", "x", "a?b", "/api/v1/namespaces/n%23m/things/x/a%3Fb"),
    ],
)
def test_every_part_is_escaped(group: str, namespace: str, name: str, subresource: str, path: str) -> None:
    assert resource_path(group, "v1", "things", namespace=namespace, name=name, subresource=subresource) == path


@pytest.mark.parametrize("name", [".", "..", "a/b", "/", "../secrets/x"])
def test_a_name_that_is_not_one_segment_is_rejected(name: str) -> None:
    for part in ("namespace", "name", "subresource"):
        with pytest.raises(ValueError, match="expected a name without /"):
            resource_path("", "v1", "things", **{part: name})
    with pytest.raises(ValueError, match="expected a name without /"):
        object_path("/api/v1/nodes", name)


def test_an_empty_name_is_not_the_collection() -> None:
    with pytest.raises(ValueError, match="found ''"):
        object_path("/api/v1/nodes", "")


@given(st.text())
def test_a_name_is_one_path_segment_or_rejected(name: str) -> None:
    try:
        path = object_path("/api/v1/nodes", name)
    except ValueError:
        assert name in ("", ".", "..") or "/" in name or not name.isprintable()
        return
    segment = path.removeprefix("/api/v1/nodes/")
    assert segment.isascii()
    assert segment.isprintable()
    assert not set(segment) & set("/?# \r\n")
    assert unquote(segment) == name
