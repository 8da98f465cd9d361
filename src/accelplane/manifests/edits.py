"""Which values of a manifest change, and how.

An image is selected by its registry and path, by default `accelplane` with any host before it. Edited are:

- references: the fields `image` and `…Image` of pods and custom resources, and `value` of variables and JSON patches
- `images` of kustomizations
- `hub`, `tag` and `pullPolicy` in the values of Helm charts, and the versions in `Chart.yaml`
- `imagePullPolicy` of containers and custom resources with these images. `Never` stays
- `-image-vendor` of the operator, so that the images that it fills in are of the same registry
- references in comments

YAML in literal blocks, such as the patches of a kustomization, is edited in the same way.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
import yaml

from accelplane.manifests.spans import (
    MAX_BLOCKS,
    EditError,
    Replacement,
    apply,
    child,
    documents,
    inserted_line,
    items,
    line_of,
    nodes,
    pairs,
    removed_line,
    replacement_of,
    string,
)
from accelplane.operator.images import Reference, parse

PullPolicy = Literal["Always", "IfNotPresent", "Never"]

OPERATOR = "intel-deviceplugin-operator"
_VENDOR_FLAG = re.compile(r"--?image-vendor=")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_REGISTRY = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]{1,5})?(?:/[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The new values; empty ones change nothing. `selected` is the registry and path of the images to edit.

    With `digests` every selected image gets its digest. A digest that does not fit to a new version is removed.
    """

    version: str = ""
    registry: str = ""
    pull_policy: PullPolicy | Literal[""] = ""
    digests: Mapping[str, str] = {}
    selected: str = "accelplane"

    def __post_init__(self) -> None:
        """Raises `EditError` for values that are not valid in a reference."""
        if self.version and not _TAG.fullmatch(self.version):
            raise EditError(f"version: found {self.version!a}, expected a tag such as 1.2.0")
        for field, value in (("registry", self.registry), ("selected", self.selected)):
            if (value or field == "selected") and not _REGISTRY.fullmatch(value):
                raise EditError(f"{field}: found {value!a}, expected a registry and path such as mirror.example/tools")
        for name, digest in self.digests.items():
            if not _DIGEST.fullmatch(digest):
                raise EditError(f"digest of {name}: found {digest!a}, expected sha256: and 64 digits")

    def selects(self, repository: str) -> bool:
        """Whether images of that registry and path are edited."""
        return repository == self.selected or (self.selected == "accelplane" and repository.endswith("/accelplane"))


class Change(msgspec.Struct, frozen=True):
    """A changed value: its line in the file before the edit, the field, and its value before and after."""

    line: int
    field: str
    found: str
    used: str


class EditResult(msgspec.Struct, frozen=True):
    """The text after the edit and its changes."""

    text: str
    changes: tuple[Change, ...]


class _Found(msgspec.Struct, frozen=True):
    replacement: Replacement
    change: Change


def edit(text: str, settings: Settings, *, chart: bool = False, blocks: int = 0) -> EditResult:
    """The text of a manifest with the new values. `chart` is True for the file `Chart.yaml` of a chart.

    `blocks` is the number of literal blocks that contain the text.

    Raises `EditError` if the text is not YAML, if a value cannot be replaced, or if an image has no digest.
    """
    found: list[_Found] = []
    roots = documents(text)
    if chart:
        found += [each for root in roots for each in _chart(root, settings)]
        roots = ()
    for root in roots:
        for key, node, parent in nodes(root):
            if isinstance(node, yaml.ScalarNode) and _is_block(key, node, settings):
                found += _block(text, key, node, settings, blocks)
            else:
                found += _of_node(text, key, node, parent, settings)
    found += _comments(text, settings)
    found = _first_of_each_place(found)
    edited = apply(text, [each.replacement for each in found])
    return EditResult(edited, tuple(each.change for each in sorted(found, key=lambda each: each.replacement)))


def selected_images(text: str, settings: Settings) -> list[tuple[int, str]]:
    """The lines and references of the selected images in a manifest, after the kustomization's `images`."""
    references: set[tuple[int, str]] = set()
    for root in documents(text):
        for key, node, parent in nodes(root):
            if isinstance(node, yaml.ScalarNode) and _is_reference(key) and _ours(string(node), settings):
                references.add((line_of(node), string(node)))
            elif isinstance(node, yaml.MappingNode) and parent is not None and key == "images":
                reference = string(child(node, "newName")) or string(child(node, "name"))
                if _ours(f"{reference}:x", settings):
                    references.add((line_of(node), _of_kustomization(node, reference)))
    return sorted(references)


def references_in(text: str, settings: Settings) -> Iterator[re.Match[str]]:
    """All references of selected images with a tag or digest in a text that need not be YAML."""
    host = r"(?:[a-z0-9.-]+(?::[0-9]+)?/)?" if settings.selected == "accelplane" else ""
    version = r":[A-Za-z0-9_.-]*[A-Za-z0-9_](?:@sha256:[0-9a-f]{64})?"
    return re.finditer(rf"(?<![\w./:@-]){host}{re.escape(settings.selected)}/[a-z0-9._-]+{version}", text)


def new_reference(reference: str, settings: Settings) -> str:
    """The reference with the new registry, version and digest. Raises `EditError` if the image has no digest."""
    parsed = parse(reference)
    return _join(_updated(parsed, settings))


def _of_node(
    text: str, key: str, node: yaml.Node, parent: yaml.MappingNode | None, settings: Settings
) -> Iterator[_Found]:
    if isinstance(node, yaml.ScalarNode):
        value = string(node)
        if _is_reference(key) and _ours(value, settings):
            yield from _replace(node, key, new_reference(value, settings))
    elif isinstance(node, yaml.MappingNode):
        if key == "images" and parent is not None and (child(node, "name") or child(node, "newName")):
            yield from _kustomization(text, node, settings)
        if settings.selects(string(child(node, "hub"))):
            yield from _chart_values(node, settings)
        if settings.pull_policy:
            yield from _pull_policy(text, key, node, settings)
        if settings.registry and parse(string(child(node, "image"))).image == OPERATOR:
            yield from _vendor(text, node, settings)


def _is_reference(key: str) -> bool:
    return key in {"image", "value"} or key.endswith("Image")


def _ours(value: str, settings: Settings) -> bool:
    parsed = parse(value)
    complete = bool(parsed.tag or parsed.digest) and bool(_NAME.fullmatch(parsed.image))
    return complete and settings.selects(parsed.repository)


def _updated(parsed: Reference, settings: Settings) -> Reference:
    name = f"{settings.registry or parsed.repository}/{parsed.image}"
    digest = _digest(parsed.image, settings)
    kept = "" if settings.version and settings.version != parsed.tag else parsed.digest
    return Reference(name, settings.version or parsed.tag, digest or kept)


def _join(reference: Reference) -> str:
    return (
        reference.name
        + (f":{reference.tag}" if reference.tag else "")
        + (f"@{reference.digest}" if reference.digest else "")
    )


def _digest(image: str, settings: Settings) -> str:
    if not settings.digests:
        return ""
    if image not in settings.digests:
        raise EditError(f"image {image}: found no digest; expected one of each image: {', '.join(settings.digests)}")
    return settings.digests[image]


def _replace(node: yaml.Node | None, field: str, value: str) -> Iterator[_Found]:
    if isinstance(node, yaml.ScalarNode) and string(node) != value:
        yield _Found(replacement_of(node, value), Change(line_of(node), field, string(node), value))


def _is_block(key: str, node: yaml.ScalarNode, settings: Settings) -> bool:
    """Whether a scalar is a literal block with a reference, and not the reference itself."""
    value = string(node)
    return (
        node.style == "|" and f"{settings.selected}/" in value and not (_is_reference(key) and _ours(value, settings))
    )


def _block(text: str, key: str, node: yaml.ScalarNode, settings: Settings, blocks: int) -> Iterator[_Found]:
    """YAML in a literal block. Its lines are edited and indented again."""
    if blocks == MAX_BLOCKS:
        raise EditError(f"line {line_of(node)}: found more than {MAX_BLOCKS} nested blocks")
    try:
        documents(string(node))
    except EditError:
        return
    edited = edit(string(node), settings, blocks=blocks + 1)
    if not edited.changes:
        return
    start = text.index("\n", node.start_mark.index) + 1
    original = text[start : node.end_mark.index]
    # The content can be indented itself, if the block has an indentation indicator.
    indent = " " * (_indent(original) - _indent(string(node)))
    newline = "\r\n" if "\r\n" in original else "\n"
    body = newline.join(indent + line if line else "" for line in edited.text.rstrip().split("\n"))
    end = start + len(original.rstrip())
    for each in edited.changes:
        change = Change(line_of(node) + each.line, f"{key}.{each.field}", each.found, each.used)
        yield _Found(Replacement(start, end, body), change)


def _indent(text: str) -> int:
    """The smallest indentation of lines with content."""
    return min(len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip())


def _of_kustomization(node: yaml.MappingNode, name: str) -> str:
    tag, digest = string(child(node, "newTag")), string(child(node, "digest"))
    return _join(Reference(name, tag, digest))


def _kustomization(text: str, node: yaml.MappingNode, settings: Settings) -> Iterator[_Found]:
    """An entry of `images`. Its name selects references in resources, which have the new registry after the edit."""
    name, new_name = child(node, "name"), child(node, "newName")
    if settings.registry and _ours(f"{string(name)}:x", settings):
        yield from _replace(name, "images.name", f"{settings.registry}/{parse(string(name)).image}")
    used = new_name or name
    if used is None or not _ours(f"{string(used)}:x", settings):
        return
    tag, digest = child(node, "newTag"), child(node, "digest")
    new = _updated(Reference(string(used), string(tag), string(digest)), settings)
    if new_name is not None:
        yield from _replace(new_name, "images.newName", new.name)
    last = tag or used
    if tag is not None or settings.version:
        yield from _set(text, node, last, key="newTag", value=new.tag)
    if digest is not None and not new.digest:
        yield _Found(removed_line(text, digest), Change(line_of(digest), "images.digest", string(digest), ""))
    elif new.digest:
        yield from _set(text, node, last, key="digest", value=new.digest)


def _set(text: str, mapping: yaml.MappingNode, after: yaml.Node, /, *, key: str, value: str) -> Iterator[_Found]:
    """Replaces the value of a key, or adds the key below `after`."""
    if node := child(mapping, key):
        yield from _replace(node, key, value)
        return
    if mapping.flow_style:
        raise EditError(f"line {line_of(mapping)}: found a mapping on one line without {key}; add {key} there first")
    column = pairs(mapping)[0][0].start_mark.column
    line = inserted_line(text, after, column, f"{key}: {value}")
    yield _Found(line, Change(line_of(after), key, "", value))


def _chart_values(node: yaml.MappingNode, settings: Settings) -> Iterator[_Found]:
    if settings.registry:
        yield from _replace(child(node, "hub"), "hub", settings.registry)
    if settings.version and string(child(node, "tag")):
        yield from _replace(child(node, "tag"), "tag", settings.version)
        if string(child(node, "digest")):
            yield from _replace(child(node, "digest"), "digest", "")
    policy = child(node, "pullPolicy")
    if settings.pull_policy and string(policy) not in {"", "Never"}:
        yield from _replace(policy, "pullPolicy", settings.pull_policy)


def _chart(root: yaml.Node, settings: Settings) -> Iterator[_Found]:
    """`Chart.yaml`: its versions, and those of charts in neighbouring directories that it depends on."""
    if not settings.version:
        return
    for key in ("version", "appVersion"):
        yield from _replace(child(root, key), key, settings.version)
    for each in items(child(root, "dependencies")):
        if string(child(each, "repository")).startswith("file://"):
            yield from _replace(child(each, "version"), "dependencies.version", settings.version)


def _pull_policy(text: str, key: str, node: yaml.MappingNode, settings: Settings) -> Iterator[_Found]:
    image, policy = child(node, "image"), child(node, "imagePullPolicy")
    if string(policy) == "Never":
        return
    selected = image is not None and _ours(string(image), settings)
    if selected and image is not None and child(node, "name") is not None:
        yield from _set(text, node, image, key="imagePullPolicy", value=settings.pull_policy)
    # The DaemonSet of an Onload resource has images of its operator.
    elif selected or (image is None and key == "devicePlugin"):
        yield from _replace(policy, "imagePullPolicy", settings.pull_policy)


def _vendor(text: str, container: yaml.MappingNode, settings: Settings) -> Iterator[_Found]:
    if not _ours(string(child(container, "image")), settings):
        return
    arguments = child(container, "args")
    value = f"--image-vendor={settings.registry}"
    for each in items(arguments):
        if _VENDOR_FLAG.match(string(each)):
            yield from _replace(each, "args", value)
            return
    if arguments is None or not items(arguments):
        raise EditError(f"line {line_of(container)}: the operator has no args; add args: [{value}]")
    last = items(arguments)[-1]
    change = Change(line_of(last), "args", "", value)
    if isinstance(arguments, yaml.SequenceNode) and arguments.flow_style:
        yield _Found(Replacement(last.end_mark.index, last.end_mark.index, f', "{value}"'), change)
    else:
        yield _Found(inserted_line(text, last, arguments.start_mark.column, f"- {value}"), change)


def _comments(text: str, settings: Settings) -> Iterator[_Found]:
    position = 0
    for number, line in enumerate(text.split("\n"), 1):
        comment = re.search(r"(?:^|\s)#", line)
        for found in references_in(line, settings) if comment else ():
            used = new_reference(found[0], settings)
            if comment and found.start() >= comment.end() and used != found[0]:
                place = Replacement(position + found.start(), position + found.end(), used)
                yield _Found(place, Change(number, "comment", found[0], used))
        position += len(line) + 1


def _first_of_each_place(found: list[_Found]) -> list[_Found]:
    """Removes edits inside of a block that another edit replaces."""
    blocks = [
        each.replacement
        for each in found
        if "\n" in each.replacement.text and each.replacement.end > each.replacement.start
    ]
    return [
        each
        for each in dict.fromkeys(found)
        if not any(
            block != each.replacement and block.start <= each.replacement.start and each.replacement.end <= block.end
            for block in blocks
        )
    ]
