"""Reads names, entry points, users, labels and layers of the images from the Containerfile, their only definition."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("Containerfile")
# A layer of an image is what root.py makes: `COPY --from=… /image/<part>/ /`.
_COPIED = re.compile(r"^COPY --from=[a-z-]+ /image/(\w+)/ /$", re.MULTILINE)


class Image(NamedTuple):
    """One final stage of the Containerfile."""

    name: str
    entrypoint: tuple[str, ...]
    labels: dict[str, str]
    parts: tuple[str, ...]
    user: str = ""
    working_directory: str = "/"

    @property
    def aliases(self) -> list[str]:
        """Names of other projects' images that this one replaces."""
        return self.labels.get("replaces", "").split()


def read_images(tag: str, file: Path = FILE) -> dict[str, Image]:
    """The images by name, with the tag in their labels."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE)).replace("${TAG}", tag)
    found: dict[str, Image] = {}
    for stage in re.split(r"^(?=FROM )", text, flags=re.MULTILINE):
        named = re.match(r"FROM (\S+) AS (\S+)", stage)
        entry = re.search(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)
        if not named or not entry:
            continue
        parent = found.get(named[1])
        words = " ".join(re.findall(r"^LABEL (.*)$", stage, re.MULTILINE))
        directory = re.search(r"^WORKDIR (\S+)$", stage, re.MULTILINE)
        user = re.search(r"^USER (\S+)$", stage, re.MULTILINE)
        found[named[2]] = Image(
            name=named[2],
            entrypoint=tuple(json.loads(entry[1])),
            labels={**(parent.labels if parent else {}), **dict(re.findall(r'(\S+)="([^"]*)"', words))},
            parts=(*(parent.parts if parent else ()), *_COPIED.findall(stage)),
            user=user[1] if user else parent.user if parent else "",
            working_directory=directory[1] if directory else parent.working_directory if parent else "/",
        )
    return found
