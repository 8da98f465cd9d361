"""`accelplane-fpga-init`: installs the FPGA hook and tool on the host.

Files are replaced atomically, by a rename; other files are unchanged. By default CDI runs the hook. Then the link in
CRI-O's hooks directory of older releases is removed, because CRI-O would run the hook twice. `-enable=hooks.d` creates
the link, for nodes whose runtime has no CDI. Source: oci-hooks(5) of podman and CRI-O; this is the format without a
version.
"""

import contextlib
import filecmp
import json
import os
import shutil
import stat
import sys
from collections.abc import Generator, Mapping, Sequence

import msgspec

from accelplane.cli import signals
from accelplane.cli.goflags import Flag, Value, parse_or_exit
from accelplane.descriptors import closing
from accelplane.fpga import FpgaError
from accelplane.fpga.allocation import HOOK
from accelplane.fpga.ids import REGION_MODE
from accelplane.fpga.store import lock

PROGRAM = "accelplane-fpga-init"
HOME = os.path.dirname(HOOK)
DEFINITION = "intel-fpga-crihook.json"
WAYS = ("cdi", "hooks.d")

FLAGS = (
    Flag("enable", "cdi", "mechanism that runs the hook: cdi, or hooks.d (CRI-O without CDI)"),
    Flag("source", "/usr/local/fpga-sw", "directory of the programs"),
    Flag("target", HOME, "directory of the host to install them in"),
    Flag("hooks-dir", "/etc/containers/oci/hooks.d", "directory of the host from which CRI-O reads hooks"),
)

# For CRI-O: run the hook for containers with this value of an annotation, before their start.
_HOOK_DEFINITION = {"hook": HOOK, "stage": ["prestart"], "annotation": [REGION_MODE]}
_DEFINITION_LIMIT = 64 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse_or_exit(PROGRAM, FLAGS, arguments)
    signals.end_as_usual()
    try:
        _run({flag.name: flag.default for flag in FLAGS} | given)
    except (FpgaError, OSError) as error:
        if isinstance(error, OSError):
            error = f"{error.filename2 or error.filename or 'standard output'}: {error.strerror}"
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


def _run(given: Mapping[str, Value]) -> None:
    source, target, hooks = (str(given[name]) for name in ("source", "target", "hooks-dir"))
    if given["enable"] not in WAYS:
        raise FpgaError(f"-enable: found {str(given['enable'])!a}, expected one of {', '.join(WAYS)}")
    for directory, flag in ((source, "source"), (target, "target")):
        if not os.path.isdir(directory):
            raise FpgaError(f"-{flag}: {directory}: not a directory; mount it")
    if given["enable"] == "hooks.d" and not os.path.isdir(hooks):
        raise FpgaError(f"-hooks-dir: {hooks}: not a directory; mount it")
    with lock(target):
        _install(source, target)
        if given["enable"] == "hooks.d":
            _write(os.path.join(target, DEFINITION), f"{json.dumps(_HOOK_DEFINITION, indent=4)}\n".encode())
            _link(f"{HOME}/{DEFINITION}", os.path.join(hooks, DEFINITION))
        else:
            _remove_definition(os.path.join(hooks, DEFINITION))
            _remove_definition(os.path.join(target, DEFINITION))
        _sync(target)


def _install(source: str, target: str) -> None:
    """Installs the files. Hard links in the source become hard links in the target."""
    installed: dict[tuple[int, int], str] = {}
    for name in sorted(os.listdir(source)):
        origin, path = os.path.join(source, name), os.path.join(target, name)
        status = os.stat(origin)
        first = installed.setdefault((status.st_dev, status.st_ino), path)
        if _same(origin, path):
            continue
        with _replace(path) as new:
            if first != path:
                os.link(first, new)
            else:
                shutil.copyfile(origin, new)
                os.chmod(new, 0o755)  # noqa: S103 - a program for all users
                _sync(new)
        print(f"{path}: installed", flush=True)


def _same(origin: str, path: str) -> bool:
    """Returns whether the file has the same content and is executable."""
    try:
        usable = not os.path.islink(path) and os.stat(path).st_mode & 0o777 == 0o755
        return usable and filecmp.cmp(origin, path, shallow=False)
    except FileNotFoundError:
        return False


def _write(path: str, data: bytes) -> None:
    with _replace(path) as new:
        with open(new, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        _sync(new)
    print(f"{path}: written", flush=True)


def _link(to: str, path: str) -> None:
    with _replace(path) as new:
        os.symlink(to, new)
    print(f"{path}: link to {to}", flush=True)


def _remove_definition(path: str) -> None:
    """Removes a definition of the hook, or a link to it, and no other file."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            ours = os.readlink(path) == f"{HOME}/{DEFINITION}"
        else:
            ours = stat.S_ISREG(status.st_mode) and _runs_the_hook(path)
    except FileNotFoundError:
        return
    if ours:
        os.unlink(path)
        print(f"{path}: removed, CDI runs the hook", flush=True)
    else:
        print(f"{path}: skipped, it does not run this hook", flush=True)


def _runs_the_hook(path: str) -> bool:
    with open(path, "rb") as file:
        text = file.read(_DEFINITION_LIMIT)
    try:
        return msgspec.json.decode(text, type=dict[str, object]).get("hook") == HOOK
    except (msgspec.DecodeError, RecursionError):
        return False


@contextlib.contextmanager
def _replace(path: str) -> Generator[str]:
    """Yields a temporary name, which is then renamed to `path`. Removes an old temporary file."""
    directory, name = os.path.split(path)
    new = os.path.join(directory, f".{name}.accelplane-new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    try:
        yield new
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise error if error.filename else FpgaError(f"{new}: {error.strerror}") from None


def _sync(path: str) -> None:
    """Writes the file to disk, before its installation is reported."""
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise FpgaError(f"{path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
