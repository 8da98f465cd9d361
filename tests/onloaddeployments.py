"""What the tests of Onload's deployment files share."""

import os
from pathlib import Path

from manifests import DEPLOY, Object

TREE = DEPLOY / "onload"
CONFIG, SAMPLES = TREE / "config", TREE / "config" / "samples"
PART_OF = {"app.kubernetes.io/part-of": "onload"}
REGISTRY = "image-registry.openshift-image-registry.svc:5000/onload-clusterlocal"


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def labelled(document: Object, **more: str) -> Object:
    return document | {"metadata": document["metadata"] | {"labels": PART_OF | more}}


def environment(programs: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
