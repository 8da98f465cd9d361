"""The CDI hook: links in a container's root file system, with any files of the image."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

LINK = "../card0::/dev/dri/by-path/pci-0000:03:00.0-card"
PATH = "dev/dri/by-path/pci-0000:03:00.0-card"
PROGRAM = "from accelplane.cli.cdihook import main; raise SystemExit(main())"


class Bundle:
    """An OCI bundle beside a file that no hook may change."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "bundle"
        self.rootfs = self.directory / "rootfs"
        self.rootfs.mkdir(parents=True)
        self.outside = directory / "outside"
        self.outside.mkdir()
        self.state = json.dumps({"ociVersion": "1.0.2", "id": "c", "bundle": str(self.directory)})
        self.configure({"root": {"path": "rootfs"}})

    def configure(self, config: object) -> None:
        (self.directory / "config.json").write_text(json.dumps(config))

    def hook(
        self, *arguments: str, state: str | bytes | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        text = self.state if state is None else state
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            input=text.encode() if isinstance(text, str) else text,
            capture_output=True,
            cwd=cwd or self.outside,
            check=False,
            timeout=60,
        )
        return subprocess.CompletedProcess(
            result.args, result.returncode, result.stdout.decode(), result.stderr.decode()
        )

    def links(self, *links: str) -> subprocess.CompletedProcess[str]:
        return self.hook("create-symlinks", *(word for link in links for word in ("--link", link)))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


def in_the_tree(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_links_are_made_with_the_directories_that_lead_there(bundle: Bundle) -> None:
    result = bundle.links(LINK, "../renderD128::/dev/dri/by-path/pci-0000:03:00.0-render")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert os.readlink(bundle.rootfs / PATH) == "../card0"
    assert os.readlink(bundle.rootfs / "dev/dri/by-path/pci-0000:03:00.0-render") == "../renderD128"
    assert (bundle.rootfs / "dev/dri").stat().st_mode & 0o777 == 0o755


def test_a_second_run_changes_nothing(bundle: Bundle) -> None:
    bundle.links(LINK)
    before = (bundle.rootfs / PATH).lstat()
    assert bundle.links(LINK, LINK).returncode == 0
    assert (bundle.rootfs / PATH).lstat().st_ino == before.st_ino


@pytest.mark.parametrize("existing", ["file", "directory", "link"])
def test_existing_files_are_kept_and_reported(bundle: Bundle, existing: str) -> None:
    path = bundle.rootfs / PATH
    path.parent.mkdir(parents=True)
    if existing == "file":
        path.write_text("mine")
    elif existing == "directory":
        path.mkdir()
    else:
        path.symlink_to("/etc/passwd")
    before = path.lstat()
    result = bundle.links(LINK, "../renderD128::/dev/dri/by-path/other")
    assert result.returncode == 1
    assert f"accelplane-cdi-hook: /{PATH}: found" in result.stderr
    assert path.lstat().st_ino == before.st_ino
    assert (bundle.rootfs / "dev/dri/by-path/other").is_symlink()


@pytest.mark.parametrize(
    ("link", "text"),
    [
        ("dev", "/outside"),
        ("dev", "../../outside"),
        ("dev", "../../../../../../../../../../outside"),
        ("dev/dri", "/../../outside"),
        ("dev/dri/by-path", "../../../../outside"),
    ],
)
def test_links_of_the_image_are_resolved_in_its_root(bundle: Bundle, link: str, text: str) -> None:
    (bundle.rootfs / link).parent.mkdir(parents=True, exist_ok=True)
    (bundle.rootfs / link).symlink_to(text)
    result = bundle.links(LINK)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(bundle.outside.iterdir()) == []
    rest = PATH.removeprefix(f"{link}/")
    assert os.readlink(bundle.rootfs / "outside" / rest) == "../card0"


def test_an_absolute_link_to_the_root_is_resolved_inside_it(bundle: Bundle) -> None:
    (bundle.rootfs / "dev").symlink_to(bundle.outside)
    assert bundle.links(LINK).returncode == 0
    assert list(bundle.outside.iterdir()) == []
    assert (bundle.rootfs / str(bundle.outside).lstrip("/") / "dri").is_dir()


def test_parent_references_end_at_the_root(bundle: Bundle) -> None:
    assert bundle.links("x::/a/../../../../outside/link").returncode == 0
    assert os.readlink(bundle.rootfs / "outside/link") == "x"
    assert list(bundle.outside.iterdir()) == []


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"dev": "dev"}, "possibly a loop"),
        ({"dev": "a", "a": "dev"}, "possibly a loop"),
        ({"dev": "x" * 200 + "/" + "y" * 300}, "File name too long"),
    ],
)
def test_dangling_links_are_reported(bundle: Bundle, links: dict[str, str], message: str) -> None:
    for name, target in links.items():
        (bundle.rootfs / name).symlink_to(target)
    result = bundle.links(LINK)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_in_place_of_a_directory_is_reported(bundle: Bundle) -> None:
    (bundle.rootfs / "dev").write_text("")
    result = bundle.links(LINK)
    assert (result.returncode, result.stderr) == (1, f"accelplane-cdi-hook: /{PATH}: Not a directory\n")


def test_the_root_comes_from_the_configuration(bundle: Bundle) -> None:
    elsewhere = bundle.directory.parent / "elsewhere"
    elsewhere.mkdir()
    bundle.configure({"root": {"path": str(elsewhere)}})
    assert bundle.links(LINK).returncode == 0
    assert (elsewhere / PATH).is_symlink()
    assert in_the_tree(bundle.rootfs) == set()


def test_default_paths_apply_without_bundle_or_configuration(bundle: Bundle) -> None:
    (bundle.directory / "config.json").unlink()
    arguments = ("create-symlinks", "--link=" + LINK)
    assert bundle.hook(*arguments, state="{}", cwd=bundle.directory).returncode == 0
    assert (bundle.rootfs / PATH).is_symlink()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("", "the container's state: not JSON"),
        ("[]", "the container's state: not a JSON object"),
        ('{"bundle": 3}', "bundle is '3', expected a string"),
        ('{"bundle": "/nowhere"}', "root file system /nowhere/rootfs: No such file"),
        ('{"bundle": "/dev/null"}', "/dev/null/config.json: Not a directory"),
        ('{"bundle": "a\\u0000b"}', "embedded null"),
        (b"\xff\xfe\x80", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b" " * (1024 * 1024 + 1), "more than 1048576 bytes"),
    ],
)
def test_an_invalid_state_is_reported(bundle: Bundle, state: str | bytes, message: str) -> None:
    result = bundle.hook("create-symlinks", "--link", LINK, state=state)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no object root"),
        ({"root": "rootfs"}, "no object root"),
        ({"root": {"path": ["rootfs"]}}, "expected a string"),
        ({"root": {"path": "absent"}}, "root file system"),
        ({"root": {"path": "config.json"}}, "Not a directory"),
    ],
)
def test_an_invalid_configuration_is_reported(bundle: Bundle, config: object, message: str) -> None:
    bundle.configure(config)
    result = bundle.links(LINK)
    assert result.returncode == 1
    assert message in result.stderr
    assert in_the_tree(bundle.rootfs) == set()


def test_a_fifo_or_endless_configuration_does_not_block(bundle: Bundle) -> None:
    config = bundle.directory / "config.json"
    config.unlink()
    os.mkfifo(config)
    assert "not a regular file" in bundle.links(LINK).stderr
    config.unlink()
    config.symlink_to("/dev/zero")
    assert "not a regular file" in bundle.links(LINK).stderr
    config.unlink()
    with config.open("wb") as file:
        file.truncate(16 * 1024 * 1024 + 1)
    assert "more than 16777216 bytes" in bundle.links(LINK).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "found the command '', expected create-symlinks"),
        (["remove"], "found the command 'remove', expected create-symlinks"),
        (["create-symlinks", "--link"], "expected --link TARGET::LINKPATH"),
        (["create-symlinks", "--force"], "found '--force'"),
        (["create-symlinks", "--link", "x"], "--link: found 'x', expected TARGET::/LINKPATH"),
        (["create-symlinks", "--link", "::/x"], "expected TARGET::/LINKPATH"),
        (["create-symlinks", "--link", "x::y"], "expected TARGET::/LINKPATH"),
        (["create-symlinks", "--link", "x::/y/"], "expected a path that ends in the name of the link"),
        (["create-symlinks", "--link", "x::/y/.."], "expected a path that ends in the name of the link"),
    ],
)
def test_an_invalid_command_line_exits_with_2(bundle: Bundle, arguments: Sequence[str], message: str) -> None:
    result = bundle.hook(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Usage: accelplane-cdi-hook create-symlinks" in result.stderr


def test_help_is_printed_to_standard_output(bundle: Bundle) -> None:
    result = bundle.hook("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: accelplane-cdi-hook create-symlinks --link TARGET::LINKPATH")


def test_only_the_standard_library_is_imported() -> None:
    program = "import sys, accelplane.cli.cdihook; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(result.stdout.split()) & {"msgspec", "grpc", "yaml", "argparse", "click", "asyncio"} == set()


parts = st.sampled_from(["a", "b", "c", "..", ".", ""])
paths = st.lists(parts, min_size=1, max_size=4).map("/".join)


@pytest.mark.memory
@settings(max_examples=examples(150), deadline=None)
@given(
    directories=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), max_size=3),
    links=st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), paths, st.booleans()), max_size=4
    ),
    path=paths,
)
def test_links_of_images_never_escape_the_root(
    tmp_path: Path,
    directories: list[list[str]],
    links: list[tuple[list[str], str, bool]],
    path: str,
) -> None:
    from accelplane.cli.cdihook import HookError, make_link

    outside = Path(tempfile.mkdtemp(dir=tmp_path))
    root = outside / "root"
    root.mkdir()
    for name in "abc":
        (outside / name).mkdir()
    for directory in directories:
        (root / "/".join(directory)).mkdir(parents=True, exist_ok=True)
    for place, target, absolute in links:
        link = root / "/".join(place)
        try:
            link.symlink_to(("/" if absolute else "") + (target or "."))
        except OSError:
            continue
    descriptor = os.open(root, os.O_PATH | os.O_DIRECTORY)
    before = {entry for entry in outside.rglob("*") if not entry.is_relative_to(root)}
    try:
        make_link(descriptor, "target", f"/{path}/link")
    except (HookError, OSError):
        is_created = False
    else:
        is_created = True
    finally:
        os.close(descriptor)
    assert {entry for entry in outside.rglob("*") if not entry.is_relative_to(root)} == before
    found = [entry for entry in root.rglob("*") if entry.name == "link" and os.readlink(entry) == "target"]
    assert len(found) == is_created
