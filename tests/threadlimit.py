"""The limit of threads of a process."""

import _thread
from typing import Any

import pytest


class ThreadLimit:
    """No thread can be started until `failures` attempts have failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.failures = failures
        self._start = _thread.start_new_thread
        monkeypatch.setattr(_thread, "start_new_thread", self._limited)

    def _limited(self, *arguments: Any) -> int:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("can't start new thread")
        return self._start(*arguments)
