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
    execute: bool


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
        sys.stderr.write(f"{error}\n")
        return error.status
    sys.stdout.write("".join(f"{document}---\n" for document in documents))
    sys.stdout.flush()
    return 0


def _usage(program: str) -> str:
    return (
        f"Usage: {program} -p|--profile PROFILE[,PROFILE...] [--strict] [--exec]\n"
        "\n"
        "Prints a ConfigMap for each Onload profile: a name or the path of an .opf file.\n"
        "\n"
        "  -p LIST, --profile LIST, --profile=LIST  profiles, separated by commas; may be repeated\n"
        "  --strict                                 fail at a line that is not supported; otherwise it is skipped\n"
        "  --exec                                   run the profiles with bash, with the rights of the user\n"
    )


def _parse(words: Sequence[str]) -> _Options:
    """Words that are no options are ignored, as the script that this replaces does. Raises `ValueError`."""
    profiles: list[str] = []
    strict = execute = False
    rest = iter(words)
    for word in rest:
        if word in ("-p", "--profile"):
            profiles += _names(next(rest, ""))
        elif word.startswith("--profile="):
            profiles += _names(word.partition("=")[2])
        elif word == "--strict":
            strict = True
        elif word == "--exec":
            execute = True
        elif word.startswith("-"):
            raise ValueError(f"{word}: unknown option")
    if not profiles:
        raise ValueError("found no profile, expected --profile PROFILE")
    if strict and execute:
        raise ValueError("--strict and --exec: found both, expected one of them")
    return _Options(tuple(profiles), strict, execute)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names):
        raise ValueError(f"--profile: found {text!a}, expected names separated by commas")
    return names


def _convert(options: _Options, environment: Mapping[str, str], program_directory: str) -> list[str]:
    """The documents of all profiles. Raises `ProfileError`."""
    from accelplane.onload.profiles import configmap, files, shell  # noqa: PLC0415 - not needed for the usage
    from accelplane.onload.profiles.errors import ProfileError  # noqa: PLC0415
    from accelplane.onload.profiles.evaluation import Evaluation  # noqa: PLC0415

    home = environment.get("HOME", "")
    search = files.search(options.profiles, home=home, program_directory=program_directory)
    names: dict[str, str] = {}
    found: list[str] = []
    for place, profile in enumerate(options.profiles):
        name = configmap.object_name(profile)
        if names.setdefault(name, profile) != profile:
            raise ProfileError(
                f"profiles {names[name]!a} and {profile!a}: both have the ConfigMap {name}; convert one, or rename it"
            )
        if options.execute:
            settings = shell.run(search, profile, fragments=place > 0, environment=environment)
        else:
            evaluation = Evaluation(search, strict=options.strict)
            try:
                evaluation.run(profile, fragments=place > 0)
            finally:
                for note in evaluation.notes:
                    sys.stderr.write(f"{_printable(note)}\n")
            settings = evaluation.settings
        found.append(configmap.document(name, settings))
    return found


def _printable(text: str) -> str:
    """One line without control characters, which the text of a profile may contain."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
