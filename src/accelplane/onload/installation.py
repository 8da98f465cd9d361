"""The script of the init container, which installs the Onload files on a node.

Layout below the directory of the node:

    versions/<version>-<hash of the image>/     one installation
    current -> versions/...                     the installation for new pods
    usr, bin, sbin, ... -> current/...          for readers of the flat layout of the Go operator

Applications keep their files: a file of an older installation is removed only if no process has it mounted, which the
script reads from the processes of the host. The former installation stays in any case, because the kubelet may be
starting a container with it. The flat layout of the Go operator becomes an installation named `flat`.

No value of a resource is part of the script: it gets the name of the installation as an argument.
"""

import hashlib

SCRIPT = r"""
set -e
name=$1
host=/host/onload
mkdir -p "$host/versions"
cd "$host"

# The control plane server runs in the worker's container.
mkdir -p /mnt/onload/sbin/
cp /opt/onload/sbin/onload_cp_server /mnt/onload/sbin/

former=
if [ -L current ]; then
  former=$(readlink current)
elif [ -e usr/lib64/libonload.so ] || [ -d versions/flat ]; then
  mkdir -p versions/flat
  for entry in /opt/onload/*; do
    entry=${entry##*/}
    [ -L "$entry" ] || [ ! -e "$entry" ] || mv "$entry" versions/flat/
  done
  former=versions/flat
fi

# The same name may stand for other content, since tags of images can move.
content=$(ls -lRn /opt/onload)
if [ ! -d "versions/$name" ] || [ "$content" != "$(cat "versions/.$name" 2>/dev/null)" ]; then
  rm -rf versions/.new versions/.new-content
  cp -TRv /opt/onload versions/.new
  chcon -Rt container_file_t versions/.new 2>/dev/null || echo "SELinux labels of $host are not set"
  if [ -d "versions/$name" ]; then
    mv -T "versions/$name" "versions/$name.replaced-$$-$(date +%s)"
  fi
  mv -T versions/.new "versions/$name"
  printf '%s\n' "$content" > versions/.new-content
  mv -T versions/.new-content "versions/.$name"
fi

ln -sfn "versions/$name" .current-new
mv -T .current-new current

for entry in current/*; do
  entry=${entry##*/}
  if [ -e "$entry" ] && [ ! -L "$entry" ]; then
    echo "$host/$entry exists and is not a file of Onload; set hostOnloadPath to another directory" >&2
    exit 1
  fi
  ln -sfn "current/$entry" ".$entry-new"
  mv -T ".$entry-new" "$entry"
done
for entry in *; do
  if [ -L "$entry" ] && [ ! -e "$entry" ]; then
    case $(readlink "$entry") in current/*) rm -f "$entry" ;; esac
  fi
done

# Without a view of the processes of the host, every installation counts as in use.
[ -s /proc/1/mountinfo ] || exit 0
for old in versions/*; do
  if [ "$old" = "versions/$name" ] || [ "$old" = "$former" ]; then
    continue
  fi
  used=0
  cat /proc/[0-9]*/mountinfo 2>/dev/null | grep -qF "/$old/" || used=$?
  if [ "$used" = 1 ]; then
    rm -rf "$old" "versions/.${old#versions/}"
  fi
done
"""


def installation_name(version: str, image: str) -> str:
    """The name of the directory of one installation."""
    return f"{version}-{hashlib.sha256(image.encode()).hexdigest()[:10]}"
