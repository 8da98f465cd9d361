"""Applies a JSON Patch (RFC 6902) as the API server would: the tests' own reading of it."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any


def applied(document: Any, patch: Sequence[Mapping[str, Any]]) -> Any:
    """A copy of the document with the patch in it. Raises `AssertionError` where the API server would refuse."""
    result = copy.deepcopy(document)
    for step in patch:
        words = [word.replace("~1", "/").replace("~0", "~") for word in step["path"].split("/")[1:]]
        parent = result
        for word in words[:-1]:
            parent = parent[int(word)] if isinstance(parent, list) else parent[word]
        last = words[-1]
        value = copy.deepcopy(step.get("value"))
        if isinstance(parent, list):
            at = len(parent) if last == "-" else int(last)
            assert 0 <= at <= len(parent), step
            match step["op"]:
                case "add":
                    parent.insert(at, value)
                case "replace":
                    parent[at] = value
                case "test":
                    assert parent[at] == value, step
                case _:
                    raise AssertionError(step)
        else:
            assert isinstance(parent, dict), step
            assert step["op"] == "add" or last in parent, step
            if step["op"] == "test":
                assert parent[last] == value, step
            elif step["op"] == "remove":
                del parent[last]
            else:
                parent[last] = value
    assert json.dumps(result)
    return result
