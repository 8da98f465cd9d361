"""Paths of the API. Facts: Kubernetes API concepts (resource URIs), names of path segments in the API server."""

from urllib.parse import quote


def resource_path(
    group: str, version: str, plural: str, *, namespace: str = "", name: str = "", subresource: str = ""
) -> str:
    """The path of an object or of all objects of a resource, in one namespace or, without one, in all.

    Raises `ValueError` for a part that cannot be one segment of a path.
    """
    segments = [group, version] if group else [version]
    segments += ["namespaces", namespace] if namespace else []
    segments += [plural, *((name,) if name else ()), *((subresource,) if subresource else ())]
    return "/".join(("/apis" if group else "/api", *map(_segment, segments)))


def object_path(collection: str, name: str) -> str:
    """The path of the object `name` of a collection. Raises `ValueError` for a name that cannot be one segment."""
    return f"{collection}/{_segment(name)}"


def _segment(text: str) -> str:
    # The API server rejects names with these, and a client or proxy might resolve them.
    if text in ("", ".", "..") or "/" in text:
        raise ValueError(f"found {text[:80]!a}, expected a name without / that is not empty, . or ..")
    return quote(text, safe=":")
