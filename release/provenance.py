"""Provenance of a release: an in-toto statement with a SLSA predicate. It names sources, parameters and results."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from release import git, oci

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:accelplane:make-release:1"
# Files that pin what a build downloads.
LOCKS = ("constraints.txt", "deploy/images/packages.lock")


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters and times of a build. `builder` identifies the machine or service.

    `prebuilt` says that the images were not built by this run: nothing shows that they are those of the commit.
    """

    version: str
    registry: str
    platforms: tuple[str, ...]
    prebuilt: bool
    builder: str
    started: str
    finished: str


def statement(root: Path, subjects: Mapping[str, str], build: Build) -> bytes:
    """The statement about results with their digests."""
    commit = git.commit(root)
    source = git.origin(root) or "urn:accelplane:source"
    locks = [root / name for name in LOCKS if (root / name).is_file()]
    materials = [
        {"uri": f"git+{source}@{commit}", "digest": {"gitCommit": commit}},
        *(
            {
                "uri": f"file:{file.relative_to(root)}",
                "digest": {"sha256": oci.file_digest(file).removeprefix("sha256:")},
            }
            for file in locks
        ),
    ]
    parameters = {
        "version": build.version,
        "registry": build.registry,
        "platforms": list(build.platforms),
        "prebuiltImages": build.prebuilt,
    }
    return oci.encoded(
        {
            "_type": STATEMENT,
            "subject": [
                {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}
                for name, digest in sorted(subjects.items())
            ],
            "predicateType": PREDICATE,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": parameters,
                    "resolvedDependencies": materials,
                },
                "runDetails": {
                    "builder": {"id": build.builder},
                    "metadata": {
                        "invocationId": f"{commit}-{build.version}",
                        "startedOn": build.started,
                        "finishedOn": build.finished,
                    },
                },
            },
        }
    )
