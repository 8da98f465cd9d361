"""An image with kernel modules for nodes with the emulated kernel. Its `modprobe` sends commands to that kernel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .cluster import Cluster
from .images import ImageConfig, images_from_directory

# The directory of the emulated kernel on the node, which pods of KMM need.
CONTROL_DIRECTORY = "/run/emulated-kernel"
_MODPROBE = f"""#!/bin/sh
# modprobe [-v] [-r] [-d DIRECTORY] MODULE [PARAMETER...]
remove= first=false module=
while [ $# -gt 0 ]; do
    case $1 in
    -d) shift ;;
    --first-time) first=true ;;
    -*r*) remove=yes ;;
    -*) ;;
    *) module=${{module:-$1}} ;;
    esac
    shift
done
command='{{"do": "load", "module": "'$module'", "first_time": '$first'}}'
if [ "$remove" ]; then
    # As in modprobe(8), a module that is not loaded is no error.
    [ -d "/sys/module/$module" ] || exit 0
    command='{{"do": "unload", "module": "'$module'"}}'
fi
printf %s "$command" > {CONTROL_DIRECTORY}/control || {{ cat {CONTROL_DIRECTORY}/control >&2; exit 1; }}
"""
_PLUGIN = "from accelplane.cli.dropin import onload; onload()"
_WAIT = "trap exit TERM; sleep infinity & wait"
_USERLAND = ("opt/onload/usr/lib64/libonload.so", "opt/onload/usr/bin/onload", "opt/onload/sbin/onload_cp_server")


def import_images(cluster: Cluster, names: Sequence[str], *, plugin: str = "") -> None:
    """Imports the same image under these names on all nodes. It has kernel modules and a userland.

    Under the name `plugin` it runs the device plugin in the mount namespace of the node, with the Python of the tests.
    Its worker only waits for its end.
    """
    busybox = cluster.assets.program("busybox")
    with tempfile.TemporaryDirectory() as scratch:
        root, archive = Path(scratch) / "root", Path(scratch) / "image.tar"
        programs = root / "bin"
        programs.mkdir(parents=True)
        shutil.copy(busybox, programs / "busybox")
        for tool in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
            if tool not in {"busybox", "modprobe", "sh"}:
                (programs / tool).symlink_to("busybox")
        _copy_shell(root)
        (programs / "modprobe").write_text(_MODPROBE)
        (programs / "modprobe").chmod(0o755)
        (programs / "onload-worker").write_text(f"#!/bin/sh\n{_WAIT}\n")
        (programs / "onload-worker").chmod(0o755)
        for file in _USERLAND:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text("")
        config = ImageConfig(entrypoint=["/bin/sh", "-c", _WAIT])
        configs = dict.fromkeys(names, config)
        if plugin:
            configs[plugin] = ImageConfig(entrypoint=["nsenter", "-t", "1", "-m", sys.executable, "-c", _PLUGIN])
        images_from_directory(archive, configs, root)
        cluster.import_image(archive)


def _copy_shell(root: Path) -> None:
    """The shell of this computer with its libraries. That of busybox prefers its own modprobe to that of the image."""
    shell = Path("/bin/sh").resolve()
    listed = subprocess.run(["ldd", shell], capture_output=True, text=True, check=True).stdout
    for file in re.findall(r"(/\S+) \(0x", listed):
        target = root / file[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copy(shell, root / "bin/sh")
