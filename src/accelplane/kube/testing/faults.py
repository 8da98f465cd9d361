"""Recorded requests, and faults that a test injects into them."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RecordedRequest:
    """A request as the server received it. Its text is `METHOD PATH`, with the method `WATCH` for a watch."""

    method: str
    path: str
    parameters: dict[str, str]
    content_type: str
    body: Any
    accept: str = ""

    @property
    def watch(self) -> bool:
        return self.parameters.get("watch") in {"1", "true"}

    @property
    def dry_run(self) -> bool:
        return self.parameters.get("dryRun") == "All"

    def __str__(self) -> str:
        return f"{'WATCH' if self.watch else self.method} {self.path}"


@dataclass
class Fault:
    """A fault of the next `times` requests whose text matches `pattern`, after `skip` matching ones.

    The server answers with `status`, `headers` and `body`. Without a status it aborts the connection, or never answers
    (`hang`). With `after`, it executes the request first, so only the answer is lost. `then` is called each time.
    """

    pattern: str
    status: int = 0
    times: int = 1
    hang: bool = False
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None
    skip: int = 0
    then: Callable[[], object] = lambda: None

    def hits(self, request: RecordedRequest) -> bool:
        """Whether the fault applies to this request. Counts it."""
        if not self.times or not re.search(self.pattern, str(request)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True
