"""`qat-init.sh`, `idxd-init.sh` and `dlb-init.sh`: the originals' names, variables and directories, without arguments.

They print the outcomes to the container's log. The exit code is 0, or 1 if the configuration is invalid or a device
failed. A device that is skipped because it is in use is no failure, so that the plugin starts. `-root` and
`-config-dir` are for tests on other trees than this machine's.
"""
# ruff: noqa: PLC0415 - each program imports its implementation when it is called

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
    """`dlb-init.sh`. Like the original, it provisions the first device only, unless `DLB_PFS` is `all`."""
    sys.exit(_run("dlb-init.sh", "dlb", "/dlb-init/conf"))


def _run(program: str, family: str, config_dir: str, arguments: Sequence[str] | None = None) -> int:
    from accelplane.cli import provisioning
    from accelplane.cli.goflags import Flag, parse_or_exit

    flags = (
        Flag("root", "/", "directory that contains sysfs and devfs"),
        Flag("config-dir", config_dir, "directory of the configuration files"),
    )
    given = parse_or_exit(program, flags, arguments)
    root = os.path.abspath(str(given.get("root", "/")))
    if not os.path.isdir(root):
        print(f"{program}: -root: {root}: not a directory", file=sys.stderr)
        return 2
    variables = {**os.environ, "DEVICE_TYPE": os.environ.get("DEVICE_TYPE") or "dsa"}
    config_dir = str(given.get("config-dir", config_dir))
    desired, problems = provisioning.parts([family], config_dir, variables, dlb_pfs="first")
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)
    if problems:
        print(f"{program}: nothing was written", file=sys.stderr)
        return provisioning.FAILED
    return provisioning.run("apply", desired, root, "table")
