"""`qat-init.sh`, `idxd-init.sh` and `dlb-init.sh`: the originals' names, variables and directories, without arguments.

They print the outcomes to the container's log. The exit code is 0, or 1 if the configuration is invalid or a device
failed. A device that is skipped because it is in use is no failure, so that the plugin starts. `-root` and
`-config-dir` are for tests on other trees than this machine's.
"""
# ruff: noqa: PLC0415 - each program imports its implementation when it is called

import os
import sys
from functools import partial


def _run(program: str, family: str, config_dir: str) -> int:
    from accelplane.cli import provisioning
    from accelplane.cli.goflags import Flag, parse_or_exit
    from accelplane.cli.tables import print_problems

    flags = (
        Flag("root", "/", "directory that contains sysfs and devfs"),
        Flag("config-dir", config_dir, "directory of the configuration files"),
    )
    given = parse_or_exit(program, flags, None)
    root = os.path.abspath(str(given.get("root", "/")))
    if not os.path.isdir(root):
        print(f"{program}: -root: {root}: not a directory", file=sys.stderr)
        return 2
    variables = {**os.environ, "DEVICE_TYPE": os.environ.get("DEVICE_TYPE") or "dsa"}
    config_dir = str(given.get("config-dir", config_dir))
    # Like the original, `dlb-init.sh` provisions the first device only, unless `DLB_PFS` is `all`.
    desired, problems = provisioning.parts([family], config_dir, variables, dlb_pfs="first")
    if problems:
        return print_problems(program, [*problems, "nothing was written"])
    return provisioning.run("apply", desired, root, "table")


qat_init = partial(_run, "qat-init.sh", "qat", "/qat-init/conf")
idxd_init = partial(_run, "idxd-init.sh", "idxd", "/idxd-init/conf")
dlb_init = partial(_run, "dlb-init.sh", "dlb", "/dlb-init/conf")
