"""The settings of a profile: bash runs it and reports the variables that it exports.

    evaluate(profile, fragments=…, directories=…, environment=…)    its settings, output and notes

The settings are the variables set with `onload_set`, and all exported `EF_*` variables, with the values that they have
at the end of the profile. Bash has no variables of the user but `HOME` and `PATH`, so the result does not depend on who
converts the profile.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from accelplane.onload.profiles.configmap import key_error
from accelplane.onload.profiles.errors import ProfileError, ProfileNotFound

TIMEOUT = 60
# Of the output and of the settings of a profile, and of each file that it writes.
MAX_OUTPUT = 4 << 20

# Arguments: the descriptor for the records, KiB of output, whether the profile may be a fragment, its name, and the
# directories that are searched for profiles. A record is a kind, a name and a value, each with a NUL at its end.
# Names that begin with _onload_ are not those of a profile's variables. No feature needs a bash newer than 3.2.
_PROGRAM = r"""
_onload_records=$1 _onload_fragments=$3 _onload_profile=$4 _onload_depth=0
ulimit -f "$2"
shift 4
_onload_directories=("$HOME/.openonload/profiles" "$@")
set --

err() { printf '%s\n' "$*" >&2; }
log() { err "$*"; }
vlog() { :; }
rawecho() { err "$*"; }
prefix() { :; }
fail() { _onload_fail 1 "the profile fails: $*"; }

onload_set() {
  local _onload_key=${1-} _onload_value=${2-}
  if [[ -z $_onload_value && $_onload_key == *=* ]]; then
    _onload_value=${_onload_key#*=} _onload_key=${_onload_key%%=*}
  elif [ $# -lt 2 ]; then
    _onload_fail 1 "onload_set: no value, expected KEY VALUE or KEY=VALUE"
  fi
  [[ $_onload_key =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
    _onload_fail 1 "onload_set: found the key '$_onload_key', expected the name of a variable"
  export "$_onload_key=$_onload_value" || _onload_fail 1 "onload_set: $_onload_key cannot be set"
  _onload_record set "$_onload_key" ''
}

onload_import() {
  [ $# -gt 0 ] || _onload_fail 1 "onload_import: no name, expected the name of a profile"
  _onload_find "$1"
  shift
  [ $((_onload_depth += 1)) -le 16 ] ||
    _onload_fail 1 "onload_import: more than 16 nested imports; check whether a profile imports itself"
  . "$_onload_path" "$@"
  _onload_depth=$((_onload_depth - 1))
}

_onload_record() { printf '%s\0' "$@" >&"$_onload_records"; }

# Ends bash with a message that has the line of the profile which called the function that calls this one.
_onload_fail() {
  printf '%s: line %s: %s\n' "${BASH_SOURCE[2]}" "${BASH_LINENO[1]}" "$2" >&2
  exit 1
}

# Sets _onload_path to the first file with the name of a profile.
_onload_find() {
  local _onload_directory _onload_suffix _onload_text _onload_suffixes=(.opf)
  [ "$_onload_fragments" = 0 ] || _onload_suffixes+=(.opf-fragment)
  _onload_fragments=1
  for _onload_directory in "${_onload_directories[@]}"; do
    for _onload_suffix in "${_onload_suffixes[@]}"; do
      _onload_path=$_onload_directory/$1$_onload_suffix
      [ ! -f "$_onload_path" ] || break 2
    done
  done
  if [ ! -f "$_onload_path" ]; then
    # Bash searches PATH for a name without a slash.
    case $1 in */*) _onload_path=$1 ;; *) _onload_path=./$1 ;; esac
  fi
  if [ ! -f "$_onload_path" ]; then
    _onload_record missing "$1" ''
    exit 1
  fi
  # Bash continues after a syntax error in a file that it sources.
  "$BASH" -O extglob -n "$_onload_path" || exit 1
  IFS= read -r -d '' _onload_text <"$_onload_path" || :
  [[ $_onload_text != *$'\r\n'* ]] || _onload_record crlf "$_onload_path" ''
}

_onload_variables() {
  local _onload_name
  while IFS= read -r _onload_name; do
    # Bash does not pass arrays to programs.
    [[ $(declare -p "$_onload_name") =~ ^declare\ -[^\ ]*[aA] ]] ||
      _onload_record "$1" "$_onload_name" "${!_onload_name}"
  done < <(compgen -e)
}

_onload_variables initial
_onload_find "$_onload_profile"
. "$_onload_path"
_onload_variables exported
while IFS= read -r _onload_profile; do
  _onload_record variable "$_onload_profile" ''
done < <(compgen -v EF_)
_onload_record end '' ''
exit 0
"""


class Evaluated(NamedTuple):
    """`output` is what the profile printed. `notes` are settings that the author of the profile may miss."""

    settings: dict[str, str]
    output: str
    notes: tuple[str, ...]


class _Records(NamedTuple):
    """What bash reports, by the kind of record: names with values."""

    initial: dict[str, str]
    set: dict[str, str]
    exported: dict[str, str]
    variable: dict[str, str]
    crlf: dict[str, str]
    missing: dict[str, str]
    end: dict[str, str]


def evaluate(profile: str, *, fragments: bool, directories: Sequence[str], environment: Mapping[str, str]) -> Evaluated:
    """The settings of a profile and its imports. Raises `ProfileError`."""
    home = environment.get("HOME", "")
    clean = {"HOME": home, "PATH": environment.get("PATH", os.defpath)}
    with tempfile.TemporaryFile() as records, tempfile.TemporaryFile() as output:
        arguments = (str(records.fileno()), str(MAX_OUTPUT >> 10), str(int(fragments)), profile, *directories)
        status = _run(profile, arguments, clean, records, output)
        found = _decoded(records)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if found.missing:
        places = ", ".join((f"{home}/.openonload/profiles", *directories))
        raise ProfileNotFound(f"{printed}profile {next(iter(found.missing))!a}: not found in {places} and as a path")
    if status == -signal.SIGXFSZ:
        raise ProfileError(f"profile {profile!a}: found more than {MAX_OUTPUT >> 10} KiB of output or settings")
    if not found.end:
        raise ProfileError(
            f"{printed}profile {profile!a}: bash ended with status {status} before the end of the profile"
        )
    settings = dict(_settings(found))
    for key, value in settings.items():
        if error := key_error(key) or _text_error(value):
            raise ProfileError(f"profile {profile!a}: {key}: {error}")
    return Evaluated(settings, printed, tuple(_notes(profile, found, settings)))


def _run(
    profile: str, arguments: Sequence[str], environment: dict[str, str], records: IO[bytes], output: IO[bytes]
) -> int:
    """The exit status of bash. What it started is killed when the time is over."""
    try:
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", _PROGRAM, "profile", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(records.fileno(),),
            process_group=0,
        )
    except OSError as error:
        raise ProfileError(f"bash: {error.strerror}; profiles are bash scripts: install bash") from None
    try:
        return process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ProfileError(f"profile {profile!a}: bash did not end within {TIMEOUT} s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _decoded(records: IO[bytes]) -> _Records:
    records.seek(0)
    # A record that bash could not write completely is ignored. Bytes that are not UTF-8 become lone surrogates.
    fields = records.read().decode(errors="surrogateescape").split("\0")[:-1]
    found = _Records({}, {}, {}, {}, {}, {}, {})._asdict()
    for kind, name, value in zip(fields[::3], fields[1::3], fields[2::3], strict=False):
        found[kind][name] = value
    return _Records(**found)


def _settings(found: _Records) -> Iterator[tuple[str, str]]:
    """Those of `onload_set` in their order, then those of `export`."""
    for key in found.set:
        if key in found.exported:
            yield key, found.exported[key]
    for key, value in found.exported.items():
        if key.startswith("EF_") and key not in found.set:
            yield key, value


def _notes(profile: str, found: _Records, settings: Mapping[str, str]) -> Iterator[str]:
    for path in found.crlf:
        yield f"{path}: found lines that end with CR LF, expected LF; bash adds the CR to the values"
    for name in (*found.set, *(name for name in found.variable if name not in found.set)):
        if name in found.exported:
            continue
        reason = "is not exported" if name in found.variable else "was set in a subshell or removed later"
        yield f"profile {profile!a}: {name} {reason}, so it is no setting; use onload_set or export"
    for name in found.exported:
        if name not in found.initial and name not in settings:
            yield f"profile {profile!a}: {name} is exported but no setting, expected EF_*; use onload_set to include it"
    if not settings:
        yield f"profile {profile!a}: found no settings, expected onload_set or exported EF_* variables"


def _text_error(value: str) -> str:
    """Empty if the value is a text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return "the value is not UTF-8, expected a text"
    return ""
