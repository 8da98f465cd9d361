#!/bin/sh
# Prints Onload profiles as ConfigMaps. The program is part of the Python package accelplane.
command -v accelplane >/dev/null || {
    echo "$0: accelplane: command not found; pip install accelplane" >&2
    exit 1
}
exec accelplane onload profile "$@"
