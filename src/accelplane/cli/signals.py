"""Signals that come before there is an agent to hear them.

The first container process ignores those that nobody handles, and a Ctrl-C in the middle of an import is a traceback,
or worse: not all modules in C bear an exception there.
"""

import os
import signal

ENDING = (signal.SIGTERM, signal.SIGINT)


def end_at_once() -> None:
    """From now on SIGTERM and SIGINT end the process with 0: nothing is there yet that would have to be put away."""
    for number in ENDING:
        signal.signal(number, lambda _number, _frame: os._exit(0))


def end_as_usual() -> None:
    """SIGTERM and SIGINT kill the process, which is how who waits for its output learns that there is none."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
