"""Fixtures of several files of tests."""

from pathlib import Path

import pytest
from trees import PathInHost

from accelplane.host import Host


@pytest.fixture(params=["under a root", "at the machine's own"])
def path_in_host(request: pytest.FixtureRequest, tmp_path: Path) -> PathInHost:
    """A host, and a function that returns its paths of files in `tmp_path`."""
    if request.param == "under a root":
        return Host(tmp_path), lambda path: f"/{path}"
    return Host(), lambda path: f"{tmp_path}/{path}"
