"""The product's images as users build them, without a registry: ``python -m tests.cluster.product_image``.

The recipe in deploy/images creates the file systems, for this machine's architecture; the Containerfile is read for
names, entry points and labels. The archive is beside the Kubernetes programs, named after a hash of all its
inputs, which are in the cache of ``make images``.

If the Debian mirror no longer has a locked package, the images have its current packages, with a warning.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import accelplane
from accelplane.operator.settings import PLACEHOLDER

from .build import ClusterError, cache_directory
from .images import ImageConfig, images_from_directory
from .machine import REPOSITORY

RECIPES = REPOSITORY / "deploy/images"
# The registry of the manifests, and one for charts, which do not accept the placeholder.
ORGANISATION = PLACEHOLDER
HUB = "registry.example.com/accelplane"
TAG = accelplane.__version__
_SOURCES = ("LICENSE", "README.md", "constraints.txt", "pyproject.toml", "src", "deploy/images")
_CACHED_IMAGES = 4
_EXIT_PACKAGE_GONE = 3  # of the scripts in deploy/images
# File systems of the archive: base and product are one, the others go over it.
_LAYERS = {"base": 0, "product": 0, "operator": 1, "fpga": 2, "shell": 3, "levelzero": 4}


def product_image() -> Path:
    """An archive with every image, built if missing."""
    directory = cache_directory() / "images"
    directory.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(directory):
        archive = directory / f"accelplane-{_digest(*_SOURCES)}.tar"
        if not archive.exists():
            _make(archive)
        archive.touch()
        _forget_old(directory)
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
    """The final stages of the Containerfile by image: entry point, labels and layers."""
    images = recipe("containerfile").read_images(TAG)
    return {
        f"{ORGANISATION}/{name}:{TAG}": ImageConfig(
            user=image.user,
            entrypoint=list(image.entrypoint),
            working_directory=image.working_directory,
            labels=image.labels,
            layers=sorted({_LAYERS[part] for part in image.parts}),
        )
        for name, image in images.items()
    }


@functools.cache
def recipe(module: str) -> SimpleNamespace:
    """A module of deploy/images, which are scripts and no package."""
    before = list(sys.path)
    sys.path.insert(0, str(RECIPES))
    try:
        return SimpleNamespace(**runpy.run_path(str(RECIPES / f"{module}.py")))
    finally:
        sys.path[:] = before


def debian_package(package: str) -> Path:
    """The file of a locked Debian package: release/architecture/name."""
    with tempfile.TemporaryDirectory() as scratch:
        return Path(_run_locked(Path(scratch), RECIPES / "debian.py", "fetch", package).strip())


def _make(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".making-", dir=archive.parent) as scratch:
        parts = _parts(Path(scratch))
        root = Path(scratch) / "root"
        for name in ("base", "product"):
            shutil.copytree(parts[name], root, symlinks=True, dirs_exist_ok=True)
        layers = (root, *(parts[name] for name in ("operator", "fpga", "shell", "levelzero")))
        configs = image_configs()
        configs |= {name.replace(ORGANISATION, HUB): config for name, config in configs.items()}
        images_from_directory(Path(scratch) / "image.tar", configs, *layers).rename(archive)


def _parts(scratch: Path) -> dict[str, Path]:
    """The directories that the images consist of."""
    text = _run_locked(scratch, RECIPES / "parts.py", *_LAYERS)
    return {name: Path(path) for name, path in json.loads(text).items()}


def _run_locked(scratch: Path, *command: str | Path) -> str:
    """The output of a script of deploy/images. Repeated with current packages if locked ones are unavailable."""
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if result.returncode == _EXIT_PACKAGE_GONE:
        print(f"{result.stderr.strip()}; the tests use the present packages", file=sys.stderr)
        lock = scratch / "packages.lock"
        _run_locked(scratch, RECIPES / "debian.py", "update", "--lock", lock)
        result = subprocess.run([sys.executable, *command, "--lock", lock], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ClusterError(f"{Path(command[0]).name}: {result.stderr or result.stdout}")
    return result.stdout


def _digest(*names: str) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    own = [Path(__file__), Path(__file__).with_name("images.py")]
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


def _forget_old(directory: Path) -> None:
    archives = sorted(directory.glob("accelplane-*.tar"), key=lambda archive: archive.stat().st_mtime)
    for archive in archives[:-_CACHED_IMAGES]:
        archive.unlink()


@contextmanager
def _exclusive_lock(directory: Path) -> Iterator[None]:
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
