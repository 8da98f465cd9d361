"""The product's images as users build them, made here without a registry: ``python -m tests.cluster.product_image``.

The same recipe (deploy/images/root.py) assembles the file system, and the Containerfile is read for names, entry
points and labels. The archive lies beside the Kubernetes programs, named after a hash of everything that goes into it
but the state of Debian's packages; remove it to have it made anew with those of today.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import accelplane

from .build import ClusterError, cache_directory
from .images import ImageConfig, images_from_directory
from .machine import REPOSITORY

RECIPES = REPOSITORY / "deploy/images"
ORGANISATION = "accelplane"
TAG = accelplane.__version__
_SOURCES = ("LICENSE", "README.md", "constraints.txt", "pyproject.toml", "src", "deploy/images")
_KEPT = 4
# What the Containerfile says of what is in an image, and which layer that is here.
_COPIED = re.compile(r"^COPY --from=build /image/(\w+)/ /$", re.MULTILINE)
_LAYERS = {"base": 0, "product": 0, "operator": 1, "fpga": 2, "shell": 3, "levelzero": 4}


def product_image() -> Path:
    """An archive with every image, made unless it is there."""
    directory = cache_directory() / "images"
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        base, levelzero = _of_debian(directory)
        archive = directory / f"accelplane-{_digest(*_SOURCES)}.tar"
        if not archive.exists():
            _make(archive, base, levelzero)
        archive.touch()
        _forget_old(directory, base, levelzero)
    return archive


def unpack_image(name: str, target: Path) -> Path:
    """The file system of an image, in a new directory."""
    target.mkdir()
    with tarfile.open(product_image()) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        layers = next(image["Layers"] for image in manifest if image["RepoTags"] == [f"{ORGANISATION}/{name}:{TAG}"])
        for layer in layers:
            # Later layers replace files and links of earlier ones, which tarfile cannot.
            command = ["tar", "-x", "--keep-directory-symlink", "-C", target]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as tar:
                shutil.copyfileobj(archive.extractfile(layer), tar.stdin)  # type: ignore[arg-type,type-var]
            if tar.returncode:
                raise ClusterError(f"{name}: layer {layer} cannot be unpacked")
    return target


def image_configs() -> dict[str, ImageConfig]:
    """What the final stages of the Containerfile say: by image, where and what it starts, labels and layers."""
    text = re.sub(r"\\\n", " ", (RECIPES / "Containerfile").read_text()).replace("${TAG}", TAG)
    found: dict[str, ImageConfig] = {}
    for stage in re.split(r"^(?=FROM )", text, flags=re.MULTILINE):
        named = re.match(r"FROM (\S+) AS (\S+)", stage)
        entry = re.search(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)
        if not named or not entry:
            continue
        parent = found.get(f"{ORGANISATION}/{named[1]}:{TAG}")
        words = " ".join(re.findall(r"^LABEL (.*)$", stage, re.MULTILINE))
        labels = dict(re.findall(r'(\S+)="([^"]*)"', words))
        directory = re.search(r"^WORKDIR (\S+)$", stage, re.MULTILINE)
        user = re.search(r"^USER (\S+)$", stage, re.MULTILINE)
        found[f"{ORGANISATION}/{named[2]}:{TAG}"] = ImageConfig(
            user=user[1] if user else "",
            entrypoint=json.loads(entry[1]),
            working_directory=directory[1] if directory else "/",
            labels={**(parent.labels if parent else {}), **labels},
            layers=sorted({*(parent.layers if parent else ()), *(_LAYERS[part] for part in _COPIED.findall(stage))}),
        )
    return found


def _of_debian(directory: Path) -> tuple[Path, Path]:
    """Where the parts are that do not depend on the product: the base and the Level-Zero libraries."""
    digest = _digest("deploy/images/root.py")
    return directory / f"base-{digest}", directory / f"levelzero-{digest}"


def _make_of_debian(base: Path, levelzero: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".making-", dir=base.parent) as scratch:
        if not (base.exists() and levelzero.exists()):
            _run("apt-get", "-q", "update")
        if not base.exists():
            _recipe("base", made := Path(scratch) / "base")
            made.rename(base)
        if not levelzero.exists():
            _recipe("levelzero", made := Path(scratch) / "levelzero", "--base", base)
            made.rename(levelzero)


def _make(archive: Path, base: Path, levelzero: Path) -> None:
    _make_of_debian(base, levelzero)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=archive.parent) as scratch:
        root = Path(scratch) / "root"
        _recipe("product", product := Path(scratch) / "product", "--base", base)
        for part in (base, product):
            shutil.copytree(part, root, symlinks=True, dirs_exist_ok=True)
        _recipe("operator", operator := Path(scratch) / "operator", "--base", base, "--product", product)
        _run(sys.executable, RECIPES / "fpga_host.py", (fpga := Path(scratch) / "fpga") / "usr/local/fpga-sw")
        _recipe("shell", shell := Path(scratch) / "shell")
        layers = (root, operator, fpga, shell, levelzero)
        images_from_directory(Path(scratch) / "image.tar", image_configs(), *layers).rename(archive)


def _recipe(*arguments: str | Path) -> None:
    _run(sys.executable, RECIPES / "root.py", *arguments)


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except FileNotFoundError:
        raise ClusterError(f"the image cannot be made: {command[0]} not found; it takes Debian 12") from None
    if done.returncode:
        raise ClusterError(f"the image cannot be made: {done.stdout}")


def _digest(*names: str) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    own = [Path(__file__), Path(__file__).with_name("images.py")] if len(names) > 1 else []
    for file in [*own, *(file for name in names for file in _files(REPOSITORY / name))]:
        digest.update(f"\0{file.relative_to(REPOSITORY)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part == "__pycache__" or part.endswith(".egg-info") for part in file.parts):
            yield file


def _forget_old(directory: Path, *current: Path) -> None:
    archives = sorted(directory.glob("accelplane-*.tar"), key=lambda archive: archive.stat().st_mtime)
    for archive in archives[:-_KEPT]:
        archive.unlink()
    for part in current:
        for other in directory.glob(f"{part.name.partition('-')[0]}-*"):
            if other != part:
                shutil.rmtree(other)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    try:
        archive = product_image()
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    for name, config in image_configs().items():
        print(f"{name}: {' '.join(config.entrypoint)}", file=sys.stderr)
    print(f"{archive.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    print(archive)
    return 0


if __name__ == "__main__":
    sys.exit(main())
