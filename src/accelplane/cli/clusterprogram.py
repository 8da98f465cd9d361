"""The frame of commands that work with the API server: flags, log, and how they end.

1 is for what is fatal, told in one line; 2 is for flags. What such a command needs more than a node does is imported
once it is known to run: the text of its flags must not cost what its work does.
"""

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence

from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, parse_or_exit

log = logging.getLogger(__name__)

Values = Mapping[str, Value]


def run_in_cluster(
    program: str,
    flags: Sequence[Flag],
    words: Sequence[str],
    work: Callable[[Values], Coroutine[None, None, None]],
    *,
    lenient: bool,
) -> int:
    """Runs `work` with the value of every flag; returns the exit status.

    Words that are no flags are passed over when `lenient`. `work`, and what makes it, may raise `ValueError` naming the
    flag that is wrong, `OSError`, `ConfigError` of a kubeconfig and `CertificateError`.
    """
    signals.end_at_once()
    given = parse_or_exit(program, flags, words, lenient=lenient)
    if importlib.util.find_spec("lightkube") is None:
        sys.stderr.write(f"{program}: this needs more than a node does: pip install 'accelplane[operator]'\n")
        return 1
    from lightkube.core.exceptions import ConfigError  # noqa: PLC0415

    from accelplane.kube.tls import CertificateError  # noqa: PLC0415

    try:
        logflags.start(given, program.replace(" ", "-"))
        asyncio.run(work({flag.name: flag.default for flag in flags} | given))
    except ValueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 1
    except (ConfigError, CertificateError) as error:
        log.critical("%s", error)
        return 1
    except OSError as error:
        log.critical("%s%s", f"{error.filename}: " if error.filename else "", error.strerror or error)
        return 1
    return 0
