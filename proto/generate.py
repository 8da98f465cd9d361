"""Generates the message classes of `proto/*.proto` into the packages that speak them (`make proto`).

`--check` writes nothing and says what is out of date. Only messages are generated: the service paths are written out
where they are served or called, which spares every process the generated stubs.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = HERE.parent / "src" / "accelplane"
SPOKEN_BY = {
    "deviceplugin_v1beta1": "kubelet",
    "podresources_v1": "kubelet",
    "pluginregistration_v1": "kubelet",
    "dra_v1": "kubelet",
    "drahealth_v1": "kubelet",
    "levelzero": "gpuservices",
    "xpumd": "gpuservices",
}


def generated(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Generates everything into `directory`: pairs of the file there and the one in the source tree it stands for."""
    unclaimed = {file.stem for file in HERE.glob("*.proto")} ^ SPOKEN_BY.keys()
    if unclaimed:
        raise SystemExit(f"proto/ and SPOKEN_BY in {__file__} differ in {', '.join(sorted(unclaimed))}")
    # protoc starts the plugin that writes the type stubs by its name
    search = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={HERE}"),
            *(f"--python_out={directory}", f"--mypy_out=quiet:{directory}"),
            *sorted(map(str, HERE.glob("*.proto"))),
        ],
        check=True,
        env=os.environ | {"PATH": search},
    )
    for name, package in SPOKEN_BY.items():
        for file in (f"{name}_pb2.py", f"{name}_pb2.pyi"):
            yield directory / file, PACKAGES / package / file


def outdated(directory: Path) -> list[str]:
    """The generated files in the source tree that differ from what the contracts say today."""
    return [
        str(stands.relative_to(HERE.parent))
        for fresh, stands in generated(directory)
        if not stands.exists() or stands.read_bytes() != fresh.read_bytes()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates the message classes of proto/*.proto.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when something is out of date")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        if check:
            if stale := outdated(Path(scratch)):
                raise SystemExit(f"out of date, run `make proto`: {', '.join(stale)}")
            return
        for fresh, stands in generated(Path(scratch)):
            stands.write_bytes(fresh.read_bytes())


if __name__ == "__main__":
    main()
