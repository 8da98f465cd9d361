"""What is wrong with the results of a plugin's hooks, for the log and for readers of the agent's status."""

import logging
from collections.abc import Callable, Iterable, Sequence

log = logging.getLogger(__name__)

_MAX_PROBLEMS, _MAX_LENGTH = 8, 500


class HookProblems:
    """The present problems of the plugin `name`, by hook. Call it in the event loop only."""

    def __init__(self, name: str, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when the problems change."""
        self._name = name
        self._changed = changed
        self._by_hook: dict[str, Sequence[str]] = {}

    @property
    def texts(self) -> Sequence[str]:
        return [f"{hook}: {problem}" for hook, problems in self._by_hook.items() for problem in problems]

    def update(self, hook: str, problems: Iterable[str]) -> None:
        """Replaces the problems of a hook. New ones are logged."""
        found = [problem[:_MAX_LENGTH] for problem in problems]
        shown = [
            *found[:_MAX_PROBLEMS],
            *([f"{len(found) - _MAX_PROBLEMS} more"] if len(found) > _MAX_PROBLEMS else []),
        ]
        known = self._by_hook.get(hook, ())
        for problem in shown:
            if problem not in known:
                log.warning("%s: %s: %s", self._name, hook, problem)
        if shown == list(known):
            return
        if shown:
            self._by_hook[hook] = shown
        else:
            del self._by_hook[hook]
        self._changed()

    def clear(self) -> None:
        """Forgets all problems: the plugin has new options."""
        self._by_hook.clear()


# The problems of the plugin of a name.
ProblemsOf = Callable[[str], HookProblems]


def problems_by_plugin() -> ProblemsOf:
    """Problems that are logged only, for readers without an agent."""
    known: dict[str, HookProblems] = {}
    return lambda name: known.setdefault(name, HookProblems(name))
