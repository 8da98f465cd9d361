"""`qat-init.sh`, `idxd-init.sh` and `dlb-init.sh`: the originals' names, variables and directories, without arguments.

They print what they did for whoever reads the container's log, and end with 0, or with 1 when something failed: the
configuration, or a device. What is in use and left alone is no failure, for the plugin is to start all the same.
`-root` and `-config-dir` are for tries on something else than this machine.
"""
# ruff: noqa: PLC0415 - each program imports what it does when it is called

import os
import sys
from collections.abc import Sequence


def qat_init() -> None:
    """`qat-init.sh`."""
    sys.exit(_run("qat-init.sh", "qat", "/qat-init/conf"))


def idxd_init() -> None:
    """`idxd-init.sh`."""
    sys.exit(_run("idxd-init.sh", "idxd", "/idxd-init/conf"))


def dlb_init() -> None:
    """`dlb-init.sh`. As the original, it looks after the first device only, unless it is told otherwise."""
    sys.exit(_run("dlb-init.sh", "dlb", "/dlb-init/conf"))


def _run(program: str, family: str, config_dir: str, arguments: Sequence[str] | None = None) -> int:
    from accelplane.cli import provisioning
    from accelplane.cli.goflags import Flag, parse_or_exit

    flags = (
        Flag("root", "/", "find sysfs and devfs under this directory"),
        Flag("config-dir", config_dir, "directory of the configuration files"),
    )
    given = parse_or_exit(program, flags, sys.argv[1:] if arguments is None else arguments)
    root = os.path.abspath(str(given.get("root", "/")))
    if not os.path.isdir(root):
        print(f"{program}: -root {root}: not a directory", file=sys.stderr)
        return 2
    variables = {**os.environ, "DEVICE_TYPE": os.environ.get("DEVICE_TYPE") or "dsa"}
    config_dir = str(given.get("config-dir", config_dir))
    wanted, problems = provisioning.parts([family], config_dir, variables, dlb_pfs="first")
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)
    if problems:
        print(f"{program}: nothing was written", file=sys.stderr)
        return provisioning.FAILED
    return provisioning.run("apply", wanted, root, "table")
