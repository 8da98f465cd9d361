#!/bin/sh
# Runs DPDK's tests of event devices on the DLB device of the container. The exit status is that of the first test that
# fails, and 1 without a device.
set -eu
device=$(find-dlb)
for test in order_queue perf_queue order_atq perf_atq; do
    dpdk-test-eventdev --no-huge --vdev="dlb2_event,hwdev_id=$device" -- --test=$test
done
