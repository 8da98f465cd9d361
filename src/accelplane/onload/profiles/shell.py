"""The settings of profiles that bash runs, for profiles that `evaluation` does not support.

The profile is executed with the rights of the user. Its output goes to stderr. `onload_set` sets no variable and cuts a
value at a second `=`, as in the script that this replaces.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping

from accelplane.onload.profiles.configmap import key_error
from accelplane.onload.profiles.errors import ProfileError, ProfileNotFound
from accelplane.onload.profiles.files import Search

_TIMEOUT = 60
_MAX_OUTPUT = 4 << 20
_NOT_FOUND = 3

# Arguments: the descriptor for the settings, the first profile, whether it may be a fragment, the directories.
_PROGRAM = r"""
_settings=$1 _first=$2 _fragments=$3
shift 3
_directories=("$HOME/.openonload/profiles" "$@")
set --
err() { echo "$*" >&2; }
log() { err "$*"; }
vlog() { :; }
fail() { err "$*"; exit 1; }
rawecho() { printf '%s\n' "$*" >&2; }
prefix() { :; }
onload_set() {
  if [ -n "$2" ]; then
    printf '%s\0%s\0' "$1" "$2" >&"$_settings"
  else
    local _pair=${1#*=}
    printf '%s\0%s\0' "${1%%=*}" "${_pair%%=*}" >&"$_settings"
  fi
}
onload_import() {
  local _name=$1 _directory _suffix _suffixes=(.opf)
  shift
  [ "$_fragments" = 0 ] || _suffixes+=(.opf-fragment)
  _fragments=1
  for _directory in "${_directories[@]}"; do
    for _suffix in "${_suffixes[@]}"; do
      if [ -f "$_directory/$_name$_suffix" ]; then
        . "$_directory/$_name$_suffix" "$@"
        return 0
      fi
    done
  done
  if [ -f "$_name" ]; then
    case $_name in
      */*) . "$_name" "$@" ;;
      *) . "./$_name" "$@" ;;
    esac
    return 0
  fi
  err "profile $_name: not found; looked in ${_directories[*]} and as a path"
  exit 3
}
onload_import "$_first"
exit 0
"""


def run(search: Search, name: str, *, fragments: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of a profile and its imports. Raises `ProfileError`."""
    with tempfile.TemporaryFile() as settings:
        descriptor = settings.fileno()
        words = [str(descriptor), name, str(int(fragments)), *search.directories]
        try:
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-c", _PROGRAM, "profile", *words],
                env={**environment, "HOME": search.home},
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(descriptor,),
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProfileError(f"profile {name!a}: bash did not end within {_TIMEOUT} s") from None
        except OSError as error:
            raise ProfileError(f"bash: {error.strerror}; install bash, or omit --exec") from None
        size = os.fstat(descriptor).st_size
        if done.returncode == _NOT_FOUND:
            raise ProfileNotFound(f"profile {name!a}: a profile was not found")
        if done.returncode:
            raise ProfileError(f"profile {name!a}: bash ended with status {done.returncode}, expected 0")
        if size > _MAX_OUTPUT:
            raise ProfileError(f"profile {name!a}: found {size} bytes of settings, expected at most {_MAX_OUTPUT}")
        settings.seek(0)
        return _settings(name, settings.read())


def _settings(name: str, content: bytes) -> dict[str, str]:
    """The pairs of keys and values, the last value of each key."""
    try:
        fields = content.decode().split("\0")[:-1]
    except UnicodeDecodeError:
        raise ProfileError(f"profile {name!a}: a setting is not UTF-8, expected a text") from None
    found: dict[str, str] = {}
    for key, value in zip(fields[::2], fields[1::2], strict=True):
        if error := key_error(key):
            raise ProfileError(f"profile {name!a}: {error}")
        found[key] = value
    return found
