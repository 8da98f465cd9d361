"""Image references: how they are read, which are accepted for a plugin, and what they are upgraded to.

    refusal(reference, names, policy)    why an image cannot be the plugin's or the init container's; None when it can
    upgraded(reference, policy)          the reference to run instead, which is often the same
    upgrade(plugin, policy)              a custom resource with all its images upgraded, and what was replaced by what

References are read as registries do: a host with a port is no tag, and a tag may be followed by a digest, which then
is checked by its tag and never replaced by a version. Go's operator takes the first colon for the tag's; what it
accepts is accepted here as well, down to names that only end in the expected one when there is a digest.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from accelplane.operator.models import DevicePlugin, GpuSpec, InitSpec, PluginSpec
from accelplane.operator.settings import ImagePolicy

Plugin = TypeVar("Plugin", bound=DevicePlugin)

_NUMBER = r"(0|[1-9]\d*)"
_IDENTIFIERS = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_VERSION = re.compile(rf"\s*v?{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_IDENTIFIERS}))?(?:\+{_IDENTIFIERS})?\s*", re.ASCII)
_LONGEST_TAG = 256
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Reference(msgspec.Struct, frozen=True):
    """`name` is everything before tag and digest: host, port, path and the image's own name."""

    name: str
    tag: str = ""
    digest: str = ""

    @property
    def image(self) -> str:
        """The image's own name."""
        return self.name.rpartition("/")[2]


class Version(msgspec.Struct, frozen=True, order=True):
    """A semantic version, in its order: one with a pre-release comes before the one without."""

    numbers: tuple[int, int, int]
    released: bool
    pre_release: tuple[tuple[bool, int, str], ...] = ()


class Replacement(msgspec.Struct, frozen=True):
    """An image of a spec that was replaced. `variable` is the one that demanded it; empty for an upgrade."""

    field: str
    found: str
    used: str
    variable: str = ""


def parse(text: str) -> Reference:
    """The parts of a reference. What stands in them is not judged."""
    rest, _, digest = text.partition("@")
    head, slash, last = rest.rpartition("/")
    name, _, tag = last.partition(":")
    return Reference(head + slash + name, tag, digest)


def version(text: str) -> Version | None:
    """The semantic version that a tag says; None when it says none."""
    found = _VERSION.fullmatch(text) if len(text) <= _LONGEST_TAG else None
    if found is None:
        return None
    major, minor, patch, pre_release = found.groups()
    parts = pre_release.split(".") if pre_release else []
    # Numbers come before words and are compared as such.
    identifiers = tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts)
    return Version((int(major), int(minor), int(patch)), not parts, identifiers)


def is_below(tag: str, release: str) -> bool:
    """Whether a tag says a version, and one that is lower than the release."""
    found, wanted = version(tag), version(release)
    return found is not None and wanted is not None and found < wanted


def refusal(reference: str, names: Sequence[str], policy: ImagePolicy) -> str | None:
    """Why the reference is none of these images, in words that follow the field's name; None when it is one."""
    if any(re.search(rf"{re.escape(name)}@sha256:[0-9a-f]{{64}}\Z", reference, re.ASCII) for name in names):
        return None
    expected = " or ".join(f"<vendor>/{name}" for name in names)
    parsed = parse(reference)
    if not parsed.tag and not parsed.digest:
        return f"is incorrect: {reference!a} has neither a tag nor a digest, expected {expected}:<version>"
    if parsed.image not in names:
        return f"has an incorrect image name: {parsed.image!a} in {reference!a}, expected {expected}"
    malformed = parsed.digest and not _DIGEST.fullmatch(parsed.digest)
    if malformed or version(parsed.tag) is None:
        found = parsed.digest if malformed else parsed.tag
        return (
            f"is incorrect: {found!a} in {reference!a}, expected a valid SHA digest (sha256: and 64 lower-case "
            f"hexadecimal digits) or a semver tag (like {policy.minimum})"
        )
    return None


def below_minimum(reference: str, policy: ImagePolicy) -> str | None:
    """What to say of a reference whose tag is a version lower than the minimum; None when it is not."""
    parsed = parse(reference)
    if not is_below(parsed.tag, policy.minimum):
        return None
    return f"has version {parsed.tag} in {reference!a}, which is lower than the minimum {policy.minimum}"


def variable(reference: Reference) -> str:
    """Name of the environment variable that overrides the image."""
    return f"{reference.image.upper().replace('-', '_')}_SHA"


def upgraded(reference: str, policy: ImagePolicy) -> str:
    """The reference to use instead of one that is given: an override, a version that is new enough, or itself."""
    parsed = parse(reference)
    if policy.upgrade == "off" or not parsed.image or not (parsed.tag or parsed.digest):
        return reference
    if override := policy.overrides.get(variable(parsed)):
        return override
    if not parsed.digest and is_below(parsed.tag, policy.minimum):
        return f"{parsed.name}:{policy.version}"
    return reference


def upgrade(plugin: Plugin, policy: ImagePolicy) -> tuple[Plugin, tuple[Replacement, ...]]:
    """The custom resource with the images to run in its spec, and which of them are other ones than it names."""
    replaced: list[Replacement] = []
    for field, reference in named_images(plugin.spec).items():
        used = upgraded(reference, policy)
        if used != reference:
            name = variable(parse(reference))
            replaced.append(Replacement(field, reference, used, name if policy.overrides.get(name) == used else ""))
    if not replaced:
        return plugin, ()
    spec = msgspec.structs.replace(plugin.spec, **{_ATTRIBUTES[each.field]: each.used for each in replaced})
    return msgspec.structs.replace(plugin, spec=spec), tuple(replaced)


def named_images(spec: PluginSpec) -> dict[str, str]:
    """The images that a spec names, by their fields."""
    images = {"image": spec.image}
    if isinstance(spec, InitSpec):
        images["initImage"] = spec.init_image
    if isinstance(spec, GpuSpec):
        images["levelZeroImage"] = spec.level_zero_image
    return {field: reference for field, reference in images.items() if reference}


_ATTRIBUTES = {"image": "image", "initImage": "init_image", "levelZeroImage": "level_zero_image"}
