#!/bin/sh
# Sends directed and load-balanced traffic through the DLB device of the container. The exit status is that of the first
# example that fails, and 1 without a device.
set -eu
device=$(find-dlb)
dir_traffic -n 8 -d "$device" -w epoll
ldb_traffic -n 8 -d "$device" -w epoll
