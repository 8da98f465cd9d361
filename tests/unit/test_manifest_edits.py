"""Edits of manifests: only the named values change."""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from accelplane.cli.commands import accelplane
from accelplane.manifests.edits import Settings, edit, selected_images
from accelplane.manifests.spans import EditError
from accelplane.operator.settings import PLACEHOLDER
from release import version
from release.errors import ReleaseError

pytestmark = pytest.mark.memory

ROOT = Path(__file__).parents[2]
DIGEST, OTHER = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"

POD = """\
# A pod; accelplane/example:1.0.0 in a comment.
apiVersion: v1
kind: Pod
spec:
  containers:
  - name: intel-gpu-plugin   # the plugin
    image: "accelplane/intel-gpu-plugin:1.0.0"   # from the registry
    imagePullPolicy:   IfNotPresent
  - {name: other, image: busybox:1.36, imagePullPolicy: IfNotPresent}
  - name: last
    env: [{name: IMAGE, value: 'docker.io/accelplane/accelplane:1.0.0'}]
    image: accelplane/intel-npu-plugin:1.0.0
"""


def new(text: str, **settings: object) -> str:
    return edit(text, Settings(**settings)).text  # pyright: ignore[reportArgumentType]


def test_a_new_version_changes_only_the_selected_images() -> None:
    assert new(POD, version="1.2.0") == POD.replace(":1.0.0", ":1.2.0")


def test_a_new_registry_replaces_host_and_path() -> None:
    expected = POD.replace("docker.io/accelplane/", "accelplane/").replace("accelplane/", "mirror.example:5000/tools/")
    assert new(POD, registry="mirror.example:5000/tools") == expected


def test_images_of_another_registry_can_be_selected() -> None:
    text = "image: mirror.example/tools/intel-gpu-plugin:1.0.0\n"
    assert new(text, version="1.2.0") == text
    assert new(text, version="1.2.0", selected="mirror.example/tools") == text.replace("1.0.0", "1.2.0")


def test_a_pull_policy_is_replaced_or_added_below_the_image() -> None:
    lines = new(POD, pull_policy="Always").splitlines()
    assert lines[7] == "    imagePullPolicy:   Always"
    assert lines[8] == POD.splitlines()[8]
    assert lines[-2:] == ["    image: accelplane/intel-npu-plugin:1.0.0", "    imagePullPolicy: Always"]


def test_the_pull_policy_never_stays() -> None:
    text = "containers:\n- name: x\n  image: accelplane/x:1.0.0\n  imagePullPolicy: Never\n"
    assert new(text, pull_policy="Always") == text


def test_the_pull_policy_of_custom_resources_changes() -> None:
    onload = "kind: Onload\nspec:\n  onload:\n    imagePullPolicy: {}\n  devicePlugin:\n    imagePullPolicy: {}\n"
    text = onload.format("IfNotPresent", "IfNotPresent")
    assert new(text, pull_policy="Always") == onload.format("IfNotPresent", "Always")


def test_digests_are_added_and_removed_by_a_version_without_digests() -> None:
    text = "image: accelplane/x:1.0.0\n"
    pinned = new(text, digests={"x": DIGEST})
    assert pinned == f"image: accelplane/x:1.0.0@{DIGEST}\n"
    assert new(pinned, digests={"x": OTHER}) == f"image: accelplane/x:1.0.0@{OTHER}\n"
    assert new(pinned, registry="a/b") == f"image: a/b/x:1.0.0@{DIGEST}\n"
    assert new(pinned, version="1.2.0") == "image: accelplane/x:1.2.0\n"


def test_an_image_without_digest_is_an_error() -> None:
    with pytest.raises(EditError, match="image x: found no digest; expected one of each image: y"):
        new("image: accelplane/x:1.0.0\n", digests={"y": DIGEST})


KUSTOMIZATION = """\
kind: Kustomization
images:
# for the mirror
- name: controller
  newName: accelplane/onload-operator
  newTag: 1.0.0   # the release
- name: accelplane/intel-gpu-plugin
  newTag: 1.0.0
- name: busybox
  newTag: "1.36"
"""


def test_kustomizations_get_the_version() -> None:
    assert new(KUSTOMIZATION, version="1.2.0") == KUSTOMIZATION.replace("1.0.0", "1.2.0")


def test_kustomizations_get_the_registry_in_selecting_names_too() -> None:
    assert new(KUSTOMIZATION, registry="mirror.example/x") == KUSTOMIZATION.replace("accelplane/", "mirror.example/x/")


def test_kustomizations_get_and_lose_digests() -> None:
    pinned = new(KUSTOMIZATION, digests={"onload-operator": DIGEST, "intel-gpu-plugin": OTHER})
    assert [each.get("digest") for each in yaml.safe_load(pinned)["images"]] == [DIGEST, OTHER, None]
    assert "newTag: 1.0.0   # the release\n  digest:" in pinned
    assert new(pinned, version="1.0.1") == KUSTOMIZATION.replace("1.0.0", "1.0.1")


def test_patches_in_literal_blocks_are_edited() -> None:
    text = """\
patches:
- target: {kind: Deployment}
  patch: |-
    # the image
    - op: replace
      path: /spec/template/spec/containers/0/image

      value: accelplane/x:1.0.0
- path: other.yaml
"""
    assert new(text, version="1.2.0", registry="a/b") == text.replace("accelplane/x:1.0.0", "a/b/x:1.2.0")


@pytest.mark.parametrize(
    "text",
    [
        "patch: |2\n    image: accelplane/x:1.0.0\n    b: 1\nz: 1\n",
        "patch: |\r\n  image: accelplane/x:1.0.0\r\n  b: 1\r\nz: 1\r\n",
        "patch: |\n  b: 1\n  image: accelplane/x:1.0.0  \n\n\nz: 1\n",
        "patch: |+\n  b: 1\n  image: accelplane/x:1.0.0\n   \n\n",
        "a: |\n  b: |-\n    image: accelplane/x:1.0.0\n",
    ],
    ids=["indented content", "windows line ends", "trailing spaces", "kept line ends", "block in a block"],
)
def test_literal_blocks_keep_indentation_and_line_ends(text: str) -> None:
    assert new(text, version="1.2.0") == text.replace("1.0.0", "1.2.0")


def nested_blocks(count: int) -> str:
    text = "image: accelplane/x:1.0.0\n"
    for _ in range(count):
        text = "a: |\n" + "".join(f" {line}\n" for line in text.splitlines())
    return text


def test_blocks_in_blocks_have_a_limit() -> None:
    assert "1.2.0" in new(nested_blocks(10), version="1.2.0")
    with pytest.raises(EditError, match="found more than 10 nested blocks"):
        new(nested_blocks(11), version="1.2.0")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("args:\n  - --leader-elect   # one\n", "args:\n  - --leader-elect   # one\n  - --image-vendor=a/b\n"),
        ("args: [--leader-elect]\n", 'args: [--leader-elect, "--image-vendor=a/b"]\n'),
        ("args:\n  - -image-vendor=old\n", "args:\n  - --image-vendor=a/b\n"),
    ],
)
def test_the_operator_fills_in_images_of_the_new_registry(found: str, expected: str) -> None:
    container = "- image: {}/intel-deviceplugin-operator:1.0.0\n  name: manager\n  {}"
    assert new(container.format("accelplane", found), registry="a/b") == container.format("a/b", expected)


def test_charts_get_versions_and_registries() -> None:
    chart = 'name: x\nversion: 1.0.0\nappVersion: "1.0.0"\ndependencies:\n- {version: 1.0.0, repository: file://../y}\n'
    chart += "- {version: 1.0.0, repository: https://charts.example}\n"
    expected = chart.replace("1.0.0", "1.2.0", 3)
    assert edit(chart, Settings(version="1.2.0"), chart=True).text == expected
    values = 'image:\n  hub: accelplane\n  tag: ""\n  pullPolicy: IfNotPresent\n'
    assert new(values, version="1.2.0", registry="a/b", pull_policy="Always") == (
        'image:\n  hub: a/b\n  tag: ""\n  pullPolicy: Always\n'
    )


def test_changes_name_line_field_and_values() -> None:
    (change,) = edit("a: 1\nimage: accelplane/x:1.0.0\n", Settings(version="1.2.0")).changes
    assert (change.line, change.field, change.found, change.used) == (
        2, "image", "accelplane/x:1.0.0", "accelplane/x:1.2.0",
    )  # fmt: skip


def test_windows_line_ends_stay() -> None:
    text = "- name: x\r\n  image: accelplane/x:1.0.0\r\n  stdin: true\r\n"
    expected = text.replace("1.0.0\r\n", "1.2.0\r\n  imagePullPolicy: Always\r\n")
    assert new(text, version="1.2.0", pull_policy="Always") == expected


def test_a_version_that_yaml_reads_as_a_number_is_quoted() -> None:
    assert new("images:\n- name: accelplane/x\n  newTag: a\n", version="1.10").endswith('newTag: "1.10"\n')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "1.0.0 x"}, "version: found '1.0.0 x', expected a tag such as 1.2.0"),
        ({"registry": "https://a"}, "registry: found 'https://a', expected a registry and path such as"),
        ({"digests": {"x": "sha256:1"}}, "digest of x: found 'sha256:1', expected sha256: and 64 digits"),
    ],
)
def test_invalid_values_are_errors(settings: dict[str, object], message: str) -> None:
    with pytest.raises(EditError, match=re.escape(message)):
        new("", **settings)


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "\ufeffa: 1",
        "image: |\n  accelplane/x:1.0.0\n",
        "a: " + "[" * 500 + "]" * 500,
        "- " * 200_000,
        "[" * 200_000,
    ],
    ids=["unclosed", "byte order mark", "block", "nested", "deeply nested items", "deeply nested lists"],
)
def test_texts_that_cannot_be_edited_are_errors(text: str) -> None:
    with pytest.raises(EditError, match="found"):
        new(text, version="1.2.0")


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=20)
VALUES = st.recursive(
    WORDS | st.integers() | st.none() | st.sampled_from(["accelplane/x:1.0.0", "reg/accelplane/y:1.0.0", "z:1.0.0"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(WORDS | st.sampled_from(["image", "initImage", "name", "value"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def substitute_values(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        return {name: substitute_values(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [substitute_values(each, key) for each in value]
    selected = value in {"accelplane/x:1.0.0", "reg/accelplane/y:1.0.0"}
    return str(value).replace("1.0.0", "2.0.0") if selected and (key in {"image", "value", "initImage"}) else value


@given(document=VALUES, flow=st.sampled_from([True, False, None]), style=st.sampled_from([None, "'", '"']))
def test_documents_keep_all_other_values(document: object, flow: bool | None, style: str | None) -> None:
    text = yaml.safe_dump(document, default_flow_style=flow, default_style=style, allow_unicode=True, width=10_000)
    # PyYAML itself loses line separators in some styles.
    assert yaml.safe_load(new(text, version="2.0.0")) == substitute_values(yaml.safe_load(text))


@given(text=st.text(max_size=200) | st.text("ab:-#|>'\"{}[],&*! \n", max_size=60))
def test_any_text_is_edited_or_an_error(text: str) -> None:
    settings = Settings(version="2.0.0", registry="a/b", pull_policy="Always", digests={"x": DIGEST})
    try:
        assert edit(text, settings).text == text
    except EditError:
        return


# The command.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", symlinks=True)
    return tmp_path / "deploy"


def command(*words: object) -> Result:
    return CliRunner().invoke(accelplane, ["manifests", *map(str, words)])


def comments(path: Path) -> list[str]:
    return [
        line for file in sorted(path.rglob("*.yaml")) for line in re.findall("^ *#.*", file.read_text(), re.MULTILINE)
    ]


def test_changes_of_the_trees_are_applied_and_reverted(tree: Path) -> None:
    before = {file: file.read_bytes() for file in tree.rglob("*") if file.is_file()}
    existing = command("set", "--version", "9.8.7", "--registry", "mirror.example/tools", tree)
    assert existing.exit_code == 0, existing.output
    listed = command("list", "--selected", "mirror.example/tools", tree).output.splitlines()
    assert len(listed) > 30
    assert [line for line in listed if not line.endswith(":9.8.7")] == []
    assert command("list", tree).output == ""
    assert comments(tree) == comments(ROOT / "deploy")
    back = ["--version", version.current(ROOT), "--registry", PLACEHOLDER, "--selected", "mirror.example/tools"]
    assert command("set", *back, tree).exit_code == 0
    different = {file.name for file, content in before.items() if file.read_bytes() != content}
    # The argument -image-vendor of the operator stays.
    assert different == {"manager.yaml"}


def test_check_changes_nothing_and_fails_if_something_would_change(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(POD)
    result = command("set", "--check", "--version", "1.2.0", file)
    assert (result.exit_code, file.read_text()) == (1, POD)
    assert f"{file}:7: image: accelplane/intel-gpu-plugin:1.0.0 -> accelplane/intel-gpu-plugin:1.2.0" in result.output
    assert command("set", "--check", "--version", "1.0.0", file).exit_code == 0


def test_nothing_is_written_if_a_reference_would_remain(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POD)
    (tmp_path / "b.yaml").write_text("command: [run, 'accelplane/x:1.0.0']\n")
    result = command("set", "--version", "1.2.0", tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path}/b.yaml:1: accelplane/x:1.0.0: expected accelplane/x:1.2.0; edit it by hand" in result.output
    assert (tmp_path / "a.yaml").read_text() == POD


def test_digests_come_from_the_list_of_images(tmp_path: Path) -> None:
    images, pod = tmp_path / "images.json", tmp_path / "pod.yaml"
    images.write_text(f'{{"version": "1.2.0", "images": [{{"name": "x", "digest": "{DIGEST}"}}]}}')
    pod.write_text("image: accelplane/x:1.0.0\n")
    assert "expected 1.3.0" in command("set", "--version", "1.3.0", "--digests", images, pod).output
    assert command("set", "--version", "1.2.0", "--digests", images, pod).exit_code == 0
    assert pod.read_text() == f"image: accelplane/x:1.2.0@{DIGEST}\n"
    images.write_text("[]")
    assert "expected the images.json of a release" in command("set", "--digests", images, pod).output


def test_files_keep_their_mode_and_links(tmp_path: Path) -> None:
    target, link = tmp_path / "target.yaml", tmp_path / "link.yaml"
    target.write_text(POD)
    target.chmod(0o640)
    link.symlink_to(target)
    assert command("set", "--version", "1.2.0", link).exit_code == 0
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert "1.2.0" in target.read_text()


def test_writing_a_cdi_directory_changes_no_file_outside(tmp_path: Path) -> None:
    (tmp_path / "target.yaml").write_text(POD)
    (tmp_path / "tree").mkdir()
    (link := tmp_path / "tree/link.yaml").symlink_to("../target.yaml")
    result = command("set", "--version", "1.2.0", tmp_path / "tree")
    assert (result.exit_code, (tmp_path / "target.yaml").read_text()) == (1, POD)
    assert f"{link}: found a link to {tmp_path}/target.yaml, which is not below {tmp_path}/tree" in result.output
    link.unlink()
    os.mkfifo(link)
    assert "link.yaml: found no regular file" in command("list", tmp_path / "tree").output


def test_wrong_paths_and_options_are_errors(tmp_path: Path) -> None:
    assert f"{tmp_path}/x: not found" in command("list", tmp_path / "x").output
    assert command("set", tmp_path).exit_code == 2
    (tmp_path / "broken.yaml").write_bytes(b"\xff")
    assert "found bytes that are not UTF-8 at position 0" in command("list", tmp_path).output


# make version


def test_the_version_changes_everywhere(tmp_path: Path) -> None:
    for name in ("deploy", "demo", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    (tmp_path / "src/accelplane").mkdir(parents=True)
    shutil.copy(ROOT / "src/accelplane/__init__.py", tmp_path / "src/accelplane/__init__.py")
    old = version.current(ROOT)
    assert list(version.change(tmp_path, old)) == []
    changed = {str(path.relative_to(tmp_path)) for path in version.change(tmp_path, "7.8.9")}
    assert version.current(tmp_path) == "7.8.9"
    assert {"docs/images.md", "deploy/charts/accelplane/Chart.yaml", "demo/dsa-copy-pod.yaml"} <= changed
    found = [
        f"{file.relative_to(tmp_path)}: {match[0]}"
        for file in tmp_path.rglob("*")
        if file.is_file() and file.suffix in {".yaml", ".md"}
        for match in re.finditer(
            rf"accelplane/[\w-]+:{re.escape(old)}|newTag: {re.escape(old)}$", file.read_text(), re.MULTILINE
        )
    ]
    assert found == []


@pytest.mark.parametrize("wrong", ["v1.0.0", "1.0", "01.0.0", "1.0.0-", ""])
def test_a_version_that_is_not_semantic_is_an_error(wrong: str) -> None:
    with pytest.raises(ReleaseError, match="expected a semantic version"):
        list(version.change(ROOT, wrong))


def test_a_version_must_be_one_of_python_too() -> None:
    version.check("1.2.0-rc.1")
    with pytest.raises(ReleaseError, match=r"found '1\.2\.0-nightly', expected a release such as 1\.2\.0"):
        version.check("1.2.0-nightly")


def test_images_of_kustomizations_are_listed() -> None:
    assert selected_images(KUSTOMIZATION, Settings()) == [
        (4, "accelplane/onload-operator:1.0.0"),
        (7, "accelplane/intel-gpu-plugin:1.0.0"),
    ]
