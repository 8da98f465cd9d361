"""Signal handling before the event loop runs.

The kernel does not deliver unhandled signals to the first process of a container. Ctrl-C during an import prints a
traceback, or crashes in C modules that do not handle the exception.
"""

import os
import signal

ENDING = (signal.SIGTERM, signal.SIGINT)
NODE_ENDING = (*ENDING, signal.SIGHUP, signal.SIGQUIT)  # as the plugins written in Go


def end_at_once() -> None:
    """Makes the signals of `NODE_ENDING` exit with 0 immediately. Use it while there is nothing to clean up."""
    for number in NODE_ENDING:
        signal.signal(number, lambda _number, _frame: os._exit(0))


def end_as_usual() -> None:
    """Restores the default handlers: the signals kill the process, so a caller notices missing output."""
    for number in NODE_ENDING:
        signal.signal(number, signal.SIG_DFL)
