"""`accelplane-fpga-init`: puts the FPGA hook and tool on the host, where container runtimes and people find them.

Each file is written under another name and renamed: whoever starts one meanwhile has the old one or the new one. What
is there beside them is left alone. With CDI, which is how a container's FPGAs bring the hook with them today, the link
by which CRI-O was made to run it in 2020 is removed, or CRI-O would run it twice; `-enable=hooks.d` makes it, for nodes
whose runtime has no CDI. Facts: oci-hooks(5) of podman and CRI-O, whose old format without a version this is.
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
from accelplane.fpga import FpgaError
from accelplane.fpga.ids import REGION_MODE
from accelplane.fpga.store import alone

PROGRAM = "accelplane-fpga-init"
HOME = "/opt/intel/fpga-sw"
HOOK = f"{HOME}/intel-fpga-crihook"
DEFINITION = "intel-fpga-crihook.json"
WAYS = ("cdi", "hooks.d")

FLAGS = (
    Flag("enable", "cdi", "who has the hook run: cdi, or hooks.d (CRI-O without CDI)"),
    Flag("source", "/usr/local/fpga-sw", "directory of the programs"),
    Flag("target", HOME, "directory of the host where they belong"),
    Flag("hooks-dir", "/etc/containers/oci/hooks.d", "directory of the host where CRI-O looks for hooks"),
)

# What CRI-O is told: containers with this value of an annotation, before the program starts.
_TOLD = {"hook": HOOK, "stage": ["prestart"], "annotation": [REGION_MODE]}
_DEFINITION_LIMIT = 64 * 1024


class _Definition(msgspec.Struct):
    """A hook's definition, as far as it tells ours from others'."""

    hook: str = ""


class InitError(FpgaError):
    """Something could not be installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    given = parse_or_exit(PROGRAM, FLAGS, sys.argv[1:] if arguments is None else arguments)
    signals.end_as_usual()
    try:
        _run({flag.name: flag.default for flag in FLAGS} | given)
    except (InitError, OSError) as error:
        if isinstance(error, OSError):
            error = f"{error.filename2 or error.filename or 'standard output'}: {error.strerror}"
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


def _run(given: Mapping[str, Value]) -> None:
    source, target, hooks = (str(given[name]) for name in ("source", "target", "hooks-dir"))
    if given["enable"] not in WAYS:
        raise InitError(f"-enable {given['enable']}: expected one of {', '.join(WAYS)}")
    for directory, flag in ((source, "source"), (target, "target")):
        if not os.path.isdir(directory):
            raise InitError(f"-{flag} {directory}: no such directory; is it mounted?")
    if given["enable"] == "hooks.d" and not os.path.isdir(hooks):
        raise InitError(f"-hooks-dir {hooks}: no such directory; is it mounted?")
    with alone(target):
        _install(source, target)
        if given["enable"] == "hooks.d":
            _write(os.path.join(target, DEFINITION), f"{json.dumps(_TOLD, indent=4)}\n".encode())
            _link(f"{HOME}/{DEFINITION}", os.path.join(hooks, DEFINITION))
        else:
            _forget(os.path.join(hooks, DEFINITION))
            _forget(os.path.join(target, DEFINITION))
        _settle(target)


def _install(source: str, target: str) -> None:
    """Files that are one in the source, by hard links, become one."""
    installed: dict[tuple[int, int], str] = {}
    for name in sorted(os.listdir(source)):
        origin, path = os.path.join(source, name), os.path.join(target, name)
        status = os.stat(origin)
        first = installed.setdefault((status.st_dev, status.st_ino), path)
        if _same(origin, path):
            continue
        with _replacing(path) as new:
            if first != path:
                os.link(first, new)
            else:
                shutil.copyfile(origin, new)
                os.chmod(new, 0o755)  # noqa: S103 - all may look at cards, as with any program
                _settle(new)
        print(f"{path}: installed", flush=True)


def _same(origin: str, path: str) -> bool:
    """Whether the file has the content already, and may be executed."""
    try:
        usable = not os.path.islink(path) and os.stat(path).st_mode & 0o777 == 0o755
        return usable and filecmp.cmp(origin, path, shallow=False)
    except FileNotFoundError:
        return False


def _write(path: str, data: bytes) -> None:
    with _replacing(path) as new:
        with open(new, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        _settle(new)
    print(f"{path}: written", flush=True)


def _link(to: str, path: str) -> None:
    with _replacing(path) as new:
        os.symlink(to, new)
    print(f"{path}: leads to {to}", flush=True)


def _forget(path: str) -> None:
    """Removes a definition of the hook, or a link to it, and nothing that somebody else may have put there."""
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
        print(f"{path}: removed, the hook is run by CDI", flush=True)
    else:
        print(f"{path}: left alone, it is not ours", flush=True)


def _runs_the_hook(path: str) -> bool:
    with open(path, "rb") as file:
        text = file.read(_DEFINITION_LIMIT)
    try:
        return msgspec.json.decode(text, type=_Definition).hook == HOOK
    except (msgspec.DecodeError, RecursionError):
        return False


@contextlib.contextmanager
def _replacing(path: str) -> Generator[str]:
    """A name for a new file until it is renamed. One that an earlier start left behind is removed."""
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
        raise error if error.filename else InitError(f"{new}: {error.strerror}") from None


def _settle(path: str) -> None:
    """On the disk before anything is said to be installed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise InitError(f"{path}: {error.strerror}") from None
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
