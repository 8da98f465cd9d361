"""`accelplane onload profile` and the drop-in `profile_to_configmap.sh`: Onload profiles as ConfigMaps.

Prints one YAML document for each profile, or nothing if a profile cannot be converted. Exit status: 0; 1 for a wrong
command line or a profile that cannot be converted; 3 for a profile that is not found.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DROP_IN = "profile_to_configmap.sh"


class _Options(NamedTuple):
    profiles: tuple[str, ...]
    strict: bool


def main(arguments: Sequence[str] | None = None, program: str = DROP_IN) -> int:
    from accelplane.onload.profiles.errors import ProfileError  # noqa: PLC0415 - not needed for the usage

    words = sys.argv[1:] if arguments is None else arguments
    if program != DROP_IN and {"-h", "--help"} & {*words}:
        sys.stdout.write(_usage(program))
        return 0
    try:
        options = _parse(words)
    except ValueError as error:
        sys.stderr.write(f"{error}\n{_usage(program)}")
        return 1
    try:
        documents = _convert(options, os.environ, os.path.dirname(os.path.realpath(sys.argv[0])))
    except ProfileError as error:
        _report(str(error))
        return error.status
    sys.stdout.write("".join(f"{document}---\n" for document in documents))
    sys.stdout.flush()
    return 0


def _usage(program: str) -> str:
    return (
        f"Usage: {program} -p|--profile PROFILE[,PROFILE...] [--strict]\n"
        "\n"
        "Prints a ConfigMap for each Onload profile: a name or the path of an .opf file. Bash runs the profiles\n"
        "with the rights of the user.\n"
        "\n"
        "  -p LIST, --profile LIST, --profile=LIST  profiles, separated by commas; may be repeated\n"
        "  --strict                                 fail if a variable is no setting, if there are no settings, or if\n"
        "                                           lines end with CR LF; otherwise that is only reported\n"
    )


def _parse(words: Sequence[str]) -> _Options:
    """Words that are no options are ignored, as the script that this replaces does. Raises `ValueError`."""
    profiles: list[str] = []
    strict = False
    rest = iter(words)
    for word in rest:
        if word in ("-p", "--profile"):
            profiles += _names(next(rest, ""))
        elif word.startswith("--profile="):
            profiles += _names(word.partition("=")[2])
        elif word == "--strict":
            strict = True
        elif word.startswith("-"):
            raise ValueError(f"{word}: unknown option")
    if not profiles:
        raise ValueError("found no profile, expected --profile PROFILE")
    return _Options(tuple(profiles), strict)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names):
        raise ValueError(f"--profile: found {text!a}, expected names separated by commas")
    return names


def _convert(options: _Options, environment: Mapping[str, str], program_directory: str) -> list[str]:
    """The documents of all profiles. Raises `ProfileError`."""
    from accelplane.onload.profiles import configmap, shell  # noqa: PLC0415 - not needed for the usage
    from accelplane.onload.profiles.errors import ProfileError  # noqa: PLC0415

    directories = _directories(options.profiles, program_directory)
    names: dict[str, str] = {}
    found: list[str] = []
    for place, profile in enumerate(options.profiles):
        name = configmap.object_name(profile)
        if names.setdefault(name, profile) != profile:
            raise ProfileError(
                f"profiles {names[name]!a} and {profile!a}: both have the ConfigMap {name}; convert one, or rename it"
            )
        result = shell.evaluate(profile, fragments=place > 0, directories=directories, environment=environment)
        _report(result.output)
        if options.strict and result.notes:
            raise ProfileError("\n".join(result.notes))
        _report("\n".join(result.notes))
        found.append(configmap.document(name, result.settings))
    return found


def _directories(profiles: Sequence[str], program_directory: str) -> tuple[str, ...]:
    """Where profiles are searched after the user's own.

    Profiles beside the program are those of Onload's source tree, which has an executable `mmaketool` there.
    """
    system = "/usr/libexec/onload/profiles"
    if program_directory and os.access(f"{program_directory}/mmaketool", os.X_OK):
        system = f"{program_directory}/onload_profiles"
    return (system, *(os.path.dirname(profile) or "." for profile in profiles))


def _report(text: str) -> None:
    """Prints lines to stderr without control characters, which the output of a profile may contain."""
    for line in text.splitlines():
        printable = (character if character.isprintable() else ascii(character)[1:-1] for character in line)
        sys.stderr.write(f"{''.join(printable)}\n")
