#!/bin/sh
# Runs nlb3, which must succeed, and nlb0, which must find another function. The exit status is 0 only if both are so.
set -u
nlb3 || exit
nlb0
status=$?
[ "$status" -eq 3 ] || {
    echo "nlb0: found exit status $status, expected 3 (another function), because the port has NLB3" >&2
    exit 1
}
echo "NLB3 works, and the port has no NLB0"
