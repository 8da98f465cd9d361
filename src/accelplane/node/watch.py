"""What makes the agent look again: entries that come and go in directories, and the kernel's uevents.

One inotify instance and one netlink socket serve the whole process. A directory that does not exist is awaited at its
nearest existing ancestor, there for the one name that leads to it only. Where the machine grants no inotify instance or
no netlink socket, that is logged once, and the safety timers of those who subscribed find the changes later.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from accelplane.host import Inotify, InotifyEvent, Uevent, UeventSocket
from accelplane.host.inotify import COME_OR_GONE, WRITTEN
from accelplane.logs import v

log = logging.getLogger(__name__)


class _Watched(Struct):
    """A directory under watch: for every name (None), or for the names that are awaited in it."""

    number: int
    written: bool
    interests: dict[str, set[str] | None]


class Watcher:
    """Subscriptions by name: `directories` replaces what a subscriber watches, `uevents` what it hears of.

    `sees_all` while everything asked for could be had from the machine.
    """

    def __init__(self) -> None:
        self.sees_all = False
        self._inotify: Inotify | None = None
        self._uevents: UeventSocket | None = None
        self._directories: dict[str, _Watched] = {}
        # Several paths may lead to one directory, which has one number.
        self._by_number: dict[int, set[str]] = {}
        self._wanted: dict[str, tuple[frozenset[str], bool, Callable[[], None]]] = {}
        self._roots: dict[str, str] = {}
        self._hearers: dict[str, tuple[Collection[str] | None, Callable[[], None]]] = {}

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._inotify = Inotify()
            loop.add_reader(self._inotify.fileno(), self._read_inotify)
        except OSError as error:
            log.warning("directories cannot be watched, changes are found by the slow timer only: %s", error)
        try:
            self._uevents = UeventSocket()
            loop.add_reader(self._uevents.fileno(), self._read_uevents)
        except OSError as error:
            log.warning("no uevents from the kernel, hot-plug is found by the slow timer only: %s", error)
        self.sees_all = self._inotify is not None and self._uevents is not None

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for source in (self._inotify, self._uevents):
            if source is not None:
                loop.remove_reader(source.fileno())
                source.close()
        self._inotify = self._uevents = None

    def directories(
        self,
        subscriber: str,
        directories: Iterable[str],
        changed: Callable[[], None],
        *,
        written: bool = False,
        root: str = "",
    ) -> None:
        """Calls `changed` when an entry of one of `directories` comes, goes or (`written`) is rewritten.

        With `root`, also when a directory between that and one of `directories` is renamed or replaced.
        Replaces what the subscriber watched before. Missing directories are awaited.
        """
        wanted = frozenset(directories)
        if self._wanted.get(subscriber, (None, None))[:2] != (wanted, written):
            self._wanted[subscriber] = (wanted, written, changed)
            self._roots[subscriber] = root
            self._arm(subscriber)

    def uevents(self, subscriber: str, subsystems: Collection[str] | None, heard: Callable[[], None]) -> None:
        """Calls `heard` for every uevent of one of `subsystems`, of any when None."""
        self._hearers[subscriber] = (subsystems, heard)

    def forget(self, subscriber: str) -> None:
        """Ends all of a subscriber's subscriptions."""
        self._hearers.pop(subscriber, None)
        self._roots.pop(subscriber, None)
        if self._wanted.pop(subscriber, None) is not None:
            self._drop(subscriber, keep={})

    def _arm(self, subscriber: str) -> None:
        if self._inotify is None:
            return
        wanted, written, _changed = self._wanted[subscriber]
        root = self._roots.get(subscriber, "")
        interests: dict[str, set[str] | None] = {}
        for directory in wanted:
            self._add(subscriber, directory, interests, written=written)
            if root:
                self._add_way(subscriber, root, directory, interests, written=written)
        self._drop(subscriber, keep=interests)

    def _add(self, subscriber: str, directory: str, interests: dict[str, set[str] | None], *, written: bool) -> None:
        """Watches `directory`, or the nearest ancestor that exists for the name that leads there."""
        awaited: str | None = None
        path = directory
        while True:
            if self._watch(subscriber, path, awaited, written=written):
                _note(interests, path, awaited)
                if awaited is None or not os.path.lexists(f"{path.rstrip('/')}/{awaited}"):
                    return
                if not os.path.isdir(f"{path.rstrip('/')}/{awaited}"):
                    return
                # It appeared between the two looks: try again from the bottom.
                path, awaited = directory, None
                continue
            if path in ("/", ""):
                return
            awaited = os.path.basename(path)
            path = os.path.dirname(path)

    def _add_way(
        self, subscriber: str, root: str, directory: str, interests: dict[str, set[str] | None], *, written: bool
    ) -> None:
        """Watches the directories from `root` down to `directory`, each for the name that leads on.

        inotify tells nothing to the watch of a directory when one above it is renamed.
        """
        path = directory
        while path.startswith(f"{root}/"):
            path, _, name = path.rpartition("/")
            if self._watch(subscriber, path, name, written=written):
                _note(interests, path, name)

    def _watch(self, subscriber: str, path: str, awaited: str | None, *, written: bool) -> bool:
        if self._inotify is None:
            return False
        known = self._directories.get(path)
        if known is None or (written and not known.written):
            try:
                number = self._inotify.add(path, COME_OR_GONE | (WRITTEN if written else 0))
            except OSError as error:
                if error.errno is not None and os.path.isdir(path):
                    log.warning("cannot watch %s: %s", path, error.strerror)
                    self.sees_all = False
                    return True  # awaiting its ancestors instead would not help
                return False
            interests: dict[str, set[str] | None] = {}
            if known is not None:
                interests = known.interests
                self._by_number[known.number].discard(path)
            known = self._directories[path] = _Watched(number, written, interests)
            self._by_number.setdefault(number, set()).add(path)
        names = known.interests.get(subscriber, set[str]())
        if awaited is None or names is None:
            known.interests[subscriber] = None
        else:
            known.interests[subscriber] = names | {awaited}
        return True

    def _drop(self, subscriber: str, keep: dict[str, set[str] | None]) -> None:
        """Ends the subscriber's interest in directories that are not in `keep`, and watches nobody needs."""
        for path, watched in list(self._directories.items()):
            if subscriber not in watched.interests:
                continue
            if path in keep:
                watched.interests[subscriber] = keep[path]
                continue
            del watched.interests[subscriber]
            if not watched.interests:
                self._unwatch(path)

    def _unwatch(self, path: str) -> None:
        """Forgets the path, and ends the watch of its directory when no other path leads there."""
        number = self._directories.pop(path).number
        paths = self._by_number[number]
        paths.discard(path)
        if not paths:
            del self._by_number[number]
            if self._inotify is not None:
                self._inotify.remove(number)

    def _read_inotify(self) -> None:
        if self._inotify is None:
            return
        touched: set[str] = set()
        for event in self._inotify.read():
            if event.watch == -1:
                # What was lost may tell that a watched directory is another one now: all are watched anew.
                touched.update(self._wanted)
                for path in list(self._directories):
                    self._unwatch(path)
                continue
            for path in tuple(self._by_number.get(event.watch, ())):
                touched.update(self._concerned(event, self._directories[path].interests))
                if event.gone or not event.name:
                    # The directory itself was removed or renamed: its path now leads to another one, or nowhere.
                    self._unwatch(path)
        for subscriber in touched:
            if subscriber in self._wanted:
                # Awaited directories may exist now, watched ones may be others of the same name.
                self._arm(subscriber)
                self._wanted[subscriber][2]()

    def _concerned(self, event: InotifyEvent, interests: Mapping[str, set[str] | None]) -> Iterator[str]:
        """Those of the subscribers who want to hear of the event."""
        for subscriber, names in interests.items():
            if event.written and not self._wanted[subscriber][1]:
                continue
            if names is None or not event.name or event.name in names:
                yield subscriber

    def _read_uevents(self) -> None:
        if self._uevents is None:
            return
        for event in self._uevents.read():
            log.log(v(5), "uevent %s %s (%s)", event.action, event.devpath, event.subsystem)
            self._hear(event)

    def _hear(self, event: Uevent) -> None:
        for subsystems, heard in list(self._hearers.values()):
            if subsystems is None or event.subsystem in subsystems or event.action == "overflow":
                heard()


def _note(interests: dict[str, set[str] | None], path: str, name: str | None) -> None:
    """Adds to what is wanted of `path`: one more name, or (None) all of them."""
    names = interests.setdefault(path, set())
    if name is None:
        interests[path] = None
    elif names is not None:
        names.add(name)
