"""The programs of Prometheus, compiled by `make tools TOOLS=prometheus`."""

import os
import subprocess
from pathlib import Path

import pytest
from cluster.build import tool


def program(name: str) -> Path:
    """`prometheus` or `promtool`. Skips the test if it is not built; fails it where it was promised."""
    path = tool("prometheus", name)
    if not path.exists():
        message = f"no {name}: run make tools TOOLS=prometheus"
        if os.environ.get("ACCELPLANE_PROMETHEUS") == "required":
            pytest.fail(message)
        pytest.skip(message)
    return path


def promtool(*words: str | Path, text: str = "") -> str:
    """The output of promtool, which must succeed."""
    command = [program("promtool"), *words]
    # With less garbage collection, an evaluation takes a fifth less processor time.
    environment = {"GOGC": "400", **os.environ}
    result = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False)
    output = f"{result.stdout}{result.stderr}"
    assert result.returncode == 0, output
    return output
