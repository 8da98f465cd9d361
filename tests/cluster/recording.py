"""A recording of the events of nodes and pods, in the order of the API server.

    with recording(cluster) as events:
        ...
    for event in events(): ...

The resource versions of all objects are one sequence, so that the events of two watches can be merged.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from .cluster import Cluster
from .machine import wait_until
from .objects import Object

_WATCHED = {"Node": "/api/v1/nodes", "Pod": "/api/v1/pods"}


class Event(NamedTuple):
    version: int
    kind: str
    deleted: bool
    thing: Object

    @property
    def name(self) -> str:
        return self.thing["metadata"]["name"]

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.kind, self.thing["metadata"].get("namespace", ""), self.name)


@contextmanager
def recording(cluster: Cluster) -> Iterator[Callable[[], list[Event]]]:
    """Records until the block ends. The function returns the events up to its call, beginning with what exists."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        existing: list[Event] = []
        for kind, path in _WATCHED.items():
            listed = cluster.get(path)
            assert listed
            existing += [Event(0, kind, False, thing) for thing in listed["items"]]
            version = listed["metadata"]["resourceVersion"]
            watched = f"{path}?watch=true&resourceVersion={version}"
            output = stack.enter_context((directory / kind).open("wb"))
            process = subprocess.Popen(
                [cluster.assets.program("kubectl"), "get", "--raw", watched],
                stdout=output,
                env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)

        def recorded(kind: str) -> list[Event]:
            first = [event for event in existing if event.kind == kind]
            return [*first, *_events(kind, (directory / kind).read_bytes())]

        def events() -> list[Event]:
            for kind, path in _WATCHED.items():
                listed = cluster.get(path)
                assert listed
                wait_until(
                    lambda kind=kind, listed=listed: _includes(recorded(kind), listed), f"events until now: {kind}"
                )
            return sorted((event for kind in _WATCHED for event in recorded(kind)), key=lambda event: event.version)

        yield events


def states(events: Sequence[Event]) -> Iterator[tuple[Event, Object | None, dict[tuple[str, str, str], Object]]]:
    """Replays events: each with the object before it, and all objects after it by kind, namespace and name."""
    objects: dict[tuple[str, str, str], Object] = {}
    for event in events:
        before = objects.pop(event.key, None)
        if not event.deleted:
            objects[event.key] = event.thing
        yield event, before, objects


def _includes(events: Sequence[Event], listed: Object) -> bool:
    """Whether the events lead at least to the objects of a list."""
    objects = {event.key: event for event in events}
    until = int(listed["metadata"]["resourceVersion"])
    existing = {(each["metadata"].get("namespace", ""), each["metadata"]["name"]): each for each in listed["items"]}
    recorded_events = {
        event.key[1:]: event for event in objects.values() if not event.deleted and event.version <= until
    }
    newer = {event.key[1:] for event in objects.values() if event.version > until}
    versions = {key: event.thing["metadata"]["resourceVersion"] for key, event in recorded_events.items()}
    expected = {key: each["metadata"]["resourceVersion"] for key, each in existing.items()}
    return all(versions.get(key) == version for key, version in expected.items() if key not in newer) and (
        recorded_events.keys() <= existing.keys()
    )


def _events(kind: str, text: bytes) -> Iterator[Event]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the line is being written
        thing = event["object"]
        yield Event(int(thing["metadata"]["resourceVersion"]), kind, event["type"] == "DELETED", thing)
