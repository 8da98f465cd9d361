"""Writes the Go module of a Kubernetes version: ``python tests/cluster/kube/generate.py 1.37.2``.

``k8s.io/kubernetes`` replaces its staging modules by directories. A module that requires it must replace each of them
by the published module of the same version. Where the proxy does not serve that one, the newest earlier patch release
replaces it: within a minor version these modules hardly change.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KUBE = Path(__file__).parent


def main() -> None:
    for version in sys.argv[1:]:
        generate(version)


def generate(version: str) -> None:
    minor = ".".join(version.split(".")[:2])
    target = KUBE / f"kubernetes-{minor}"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as outside_any_module:
        answer = _go("mod", "download", "-json", f"k8s.io/kubernetes@v{version}", cwd=Path(outside_any_module))
    source = Path(json.loads(answer)["GoMod"]).read_text()
    (target / "go.mod").write_text(_module(version, source))
    (target / "go.sum").unlink(missing_ok=True)
    _go("mod", "tidy", f"-modfile={target / 'go.mod'}", cwd=KUBE / "kubernetes")
    print(target)


def _module(version: str, source: str) -> str:
    go = re.search(r"^go (\S+)$", source, re.MULTILINE)
    cobra = re.search(r"github.com/spf13/cobra (\S+)", source)
    if not go or not cobra:
        raise SystemExit(f"k8s.io/kubernetes {version}: go.mod has no go line or does not require cobra")
    staging = f"v0.{version.split('.', 1)[1]}"
    godebug = re.findall(r"^\s*(?:godebug )?(default=go\S+)$", source, re.MULTILINE)
    modules = sorted(set(re.findall(r"^\s*(k8s\.io/\S+) => \./staging/", source, re.MULTILINE)))
    return "\n".join(
        [
            "module accelplane.test/kubernetes\n",
            f"go {go[1]}\n",
            *(f"godebug {each}\n" for each in godebug),
            "require (",
            f"\tgithub.com/spf13/cobra {cobra[1]}",
            *(f"\tk8s.io/{name} {staging}" for name in ("component-base", "kubectl")),
            f"\tk8s.io/kubernetes v{version}",
            ")\n",
            "replace (",
            *(f"\t{name} => {name} {_available(name, staging)}" for name in modules),
            ")\n",
        ]
    )


def _available(module: str, version: str) -> str:
    """This version, or the newest earlier patch release that can be downloaded."""
    minor, patch = version.rsplit(".", 1)
    versions = [f"{minor}.{number}" for number in range(int(patch), -1, -1)] if "-" not in version else [version]
    with tempfile.TemporaryDirectory() as outside_any_module:
        for each in versions:
            command = ["go", "mod", "download", f"{module}@{each}"]
            if subprocess.run(command, cwd=outside_any_module, capture_output=True, check=False).returncode == 0:
                return each
    raise SystemExit(f"{module}: the proxy serves no version from {versions[-1]} to {version}")


def _go(*arguments: str, cwd: Path) -> str:
    environment = os.environ | {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod"}
    result = subprocess.run(["go", *arguments], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout


if __name__ == "__main__":
    main()
