"""Watches directories by inotify and the kernel's uevents, and calls subscribers when something changes.

One inotify instance and one netlink socket serve the whole process. If a directory does not exist, its nearest existing
ancestor is watched for the one name that leads to it. If the machine provides no inotify instance, no netlink socket or
no further watch, that is logged once, and the subscribers' timers find the changes later.
"""

import asyncio
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from accelplane.host.inotify import COME_OR_GONE, WRITTEN, Inotify, InotifyEvent
from accelplane.host.uevent import Uevent, UeventSocket
from accelplane.logs import v

log = logging.getLogger(__name__)


class _Watch(Struct):
    """A watched directory. `interests` maps subscribers to the names of interest in it, None for all."""

    number: int
    written: bool
    interests: dict[str, set[str] | None]


class Watcher:
    """Subscriptions by subscriber name: `directories` and `uevents` replace earlier ones of the same subscriber."""

    def __init__(self, on_uevent: Callable[[Uevent], None] = lambda _event: None) -> None:
        """`on_uevent` is called for every uevent, before the subscribers."""
        self._on_uevent = on_uevent
        self._inotify: Inotify | None = None
        self._uevents: UeventSocket | None = None
        self._directories: dict[str, _Watch] = {}
        # Several paths may lead to one directory, which has one number.
        self._by_number: dict[int, set[str]] = {}
        self._subscriptions: dict[str, tuple[frozenset[str], bool, str, Callable[[], None]]] = {}
        self._listeners: dict[str, tuple[Collection[str] | None, Callable[[], None]]] = {}
        self._unwatchable: set[tuple[str, str]] = set()  # subscribers and paths
        self._logged: set[str] = set()
        # Uevents by subsystem, of those that a subscriber named, and lost ones under the name "".
        self.uevent_counts: Counter[str] = Counter()

    @property
    def complete(self) -> bool:
        """Whether every subscribed change causes an event."""
        return self._inotify is not None and self._uevents is not None and not self._unwatchable

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._inotify = Inotify()
            loop.add_reader(self._inotify.fileno(), self._read_inotify, self._inotify)
        except OSError as error:
            log.warning("inotify is not available, changes in directories are found by the timer only: %s", error)
        try:
            self._uevents = UeventSocket()
            loop.add_reader(self._uevents.fileno(), self._read_uevents, self._uevents)
        except OSError as error:
            log.warning("uevents are not available, hot-plug is found by the timer only: %s", error)

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
        """Calls `changed` when an entry of one of `directories` is created, removed or (`written`) rewritten.

        With `root`, also when a directory between that and one of `directories` is renamed or replaced. A directory
        that does not exist counts as changed when it is created.
        """
        desired = frozenset(directories)
        if self._subscriptions.get(subscriber, ())[:3] != (desired, written, root):
            self._subscriptions[subscriber] = (desired, written, root, changed)
            self._arm(subscriber)

    def uevents(self, subscriber: str, subsystems: Collection[str] | None, changed: Callable[[], None]) -> None:
        """Calls `changed` for every uevent of one of `subsystems`, of any if None."""
        self._listeners[subscriber] = (subsystems, changed)

    def forget(self, subscriber: str) -> None:
        """Ends all of a subscriber's subscriptions."""
        self._listeners.pop(subscriber, None)
        if self._subscriptions.pop(subscriber, None) is not None:
            self._set_interests(subscriber, {})
            self._unwatchable = {failed for failed in self._unwatchable if failed[0] != subscriber}

    def _arm(self, subscriber: str) -> None:
        if self._inotify is None:
            return
        desired, written, root, _changed = self._subscriptions[subscriber]
        interests: dict[str, set[str] | None] = {}
        self._unwatchable = {failed for failed in self._unwatchable if failed[0] != subscriber}
        for directory in desired:
            self._add(subscriber, directory, interests, written=written)
            if root:
                self._add_ancestors(subscriber, root, directory, interests, written=written)
        self._set_interests(subscriber, interests)

    def _add(self, subscriber: str, directory: str, interests: dict[str, set[str] | None], *, written: bool) -> None:
        """Watches `directory`, or the nearest existing ancestor for the name that leads to it."""
        awaited: str | None = None
        path = directory
        while True:
            if self._watch(subscriber, path, awaited, interests, written=written):
                if awaited is None or not os.path.isdir(f"{path.rstrip('/')}/{awaited}"):
                    return
                # It was created meanwhile: start again.
                path, awaited = directory, None
                continue
            if path in ("/", ""):
                return
            awaited = os.path.basename(path)
            path = os.path.dirname(path)

    def _add_ancestors(
        self, subscriber: str, root: str, directory: str, interests: dict[str, set[str] | None], *, written: bool
    ) -> None:
        """Watches the directories from `root` to `directory`: a watch gets no event if a directory above is renamed."""
        path = directory
        while path.startswith(f"{root}/"):
            path, _, name = path.rpartition("/")
            self._watch(subscriber, path, name, interests, written=written)

    def _watch(
        self, subscriber: str, path: str, name: str | None, interests: dict[str, set[str] | None], *, written: bool
    ) -> bool:
        """Watches a directory for a name, None for all names. Returns False if it does not exist."""
        known = self._directories.get(path)
        if known is None or (written and not known.written):
            number = self._add_watch(subscriber, path, COME_OR_GONE | (WRITTEN if written else 0))
            if number is not None:
                if known is not None:
                    self._by_number[known.number].discard(path)
                self._directories[path] = _Watch(number, written, known.interests if known is not None else {})
                self._by_number.setdefault(number, set()).add(path)
            elif (subscriber, path) not in self._unwatchable:  # otherwise watching its ancestors would not help
                return False
        names = interests.setdefault(path, set())
        if name is None:
            interests[path] = None
        elif names is not None:
            names.add(name)
        return True

    def _add_watch(self, subscriber: str, path: str, mask: int) -> int | None:
        """The number of the watch, None if there is none. Unless the directory does not exist, that is logged."""
        if self._inotify is None:
            return None
        error = OSError()
        for _attempt in range(2):
            try:
                return self._inotify.add(path, mask)
            except OSError as failed:
                error = failed
                if error.errno in (errno.ENOENT, errno.ENOTDIR) and not os.path.isdir(path):
                    return None
            # A directory that was created after the attempt can be watched now.
        self._unwatchable.add((subscriber, path))
        reason = error.strerror or str(error)
        if reason not in self._logged:  # one exhausted limit concerns many directories
            self._logged.add(reason)
            log.warning("cannot watch %s, changes there are found by the timer only: %s", path, reason)
        return None

    def _set_interests(self, subscriber: str, interests: Mapping[str, set[str] | None]) -> None:
        """Replaces the subscriber's interests by directory, and ends watches without interests."""
        for path, watched in list(self._directories.items()):
            watched.interests.pop(subscriber, None)
            if path in interests:
                watched.interests[subscriber] = interests[path]
            elif not watched.interests:
                self._unwatch(path)

    def _unwatch(self, path: str) -> None:
        """Forgets the path, and ends the watch of its directory if no other path leads to it."""
        number = self._directories.pop(path).number
        paths = self._by_number[number]
        paths.discard(path)
        if not paths:
            del self._by_number[number]
            if self._inotify is not None:
                self._inotify.remove(number)

    def _read_inotify(self, inotify: Inotify) -> None:
        touched: set[str] = set()
        for event in inotify.read():
            if event.watch == -1:
                # Lost events may be of a watched directory that was replaced: all watches are created again.
                touched.update(self._subscriptions)
                for path in list(self._directories):
                    self._unwatch(path)
                continue
            for path in tuple(self._by_number.get(event.watch, ())):
                touched.update(self._concerned(event, self._directories[path].interests))
                if event.removed or not event.name:
                    # The directory itself was removed or renamed: its path leads to another one, or does not exist.
                    self._unwatch(path)
        for subscriber in touched:
            if subscriber in self._subscriptions:
                # Directories may have been created or replaced.
                self._arm(subscriber)
                self._subscriptions[subscriber][3]()

    def _concerned(self, event: InotifyEvent, interests: Mapping[str, set[str] | None]) -> Iterator[str]:
        """The subscribers to which the event matters."""
        for subscriber, names in interests.items():
            if event.written and not self._subscriptions[subscriber][1]:
                continue
            if names is None or not event.name or event.name in names:
                yield subscriber

    def _read_uevents(self, uevents: UeventSocket) -> None:
        for event in uevents.read():
            log.log(v(5), "uevent %s %s (%s)", event.action, event.devpath, event.subsystem)
            self._dispatch(event)

    def _dispatch(self, event: Uevent) -> None:
        self._on_uevent(event)
        overflow = event.action == "overflow"
        if overflow or any(event.subsystem in (subsystems or ()) for subsystems, _changed in self._listeners.values()):
            self.uevent_counts[event.subsystem] += 1
        for subsystems, changed in list(self._listeners.values()):
            if subsystems is None or event.subsystem in subsystems or overflow:
                changed()
