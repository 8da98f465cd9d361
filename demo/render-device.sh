#!/bin/sh
# Finds the Intel GPU render devices that a container may write to. Needs sh, seq, cat, sed, id and ls.
#
#     render-device.sh              lists them
#     render-device.sh N            prints the path of the Nth one, from 1
#     render-device.sh [N] COMMAND OPTION...
#                                   runs the command with that path (default: of the first one) after its last word
#
# The last word is usually an option that takes a path: render-device.sh 2 vainfo --display drm --device

sysfs=/sys/class/drm
devfs=/dev/dri
intel=0x8086

fail() {
    sed -n '2,/^$/ s/^# \{0,1\}//p' "$0"
    echo
    echo "$1"
    exit 1
}

listed=0
writable=0
devices=
for number in $(seq 128 255); do
    file=$sysfs/renderD$number/device/vendor
    [ -r "$file" ] && [ "$(cat "$file")" = "$intel" ] || continue
    listed=$((listed + 1))
    [ -w "$devfs/renderD$number" ] || continue
    writable=$((writable + 1))
    devices="$devices $devfs/renderD$number"
done

if [ $# -eq 0 ]; then
    echo "$listed Intel GPU render device(s) listed in sysfs, $writable writable one(s) in devfs:"
    ls -l "$devfs/"
    echo "User: $(id)"
    exit 0
fi

index=1
case $1 in
*[!0-9]*) ;;
?*)
    index=$1
    shift
    [ ${#index} -le 3 ] && [ "$index" -ge 1 ] && [ "$index" -le 127 ] ||
        fail "number of the device: found $index, expected 1 to 127"
    numbered=yes
    ;;
esac
[ $# -ne 1 ] && { [ $# -gt 0 ] || [ -n "$numbered" ]; } ||
    fail "command: found '$*', expected a command and the option that takes the device"
[ "$index" -le "$writable" ] || fail "writable Intel GPU render devices: found $writable, expected at least $index"

seen=0
for device in $devices; do
    seen=$((seen + 1))
    [ "$seen" -lt "$index" ] || break
done
if [ $# -eq 0 ]; then
    echo "$device"
    exit 0
fi
echo "Running: $* $device"
exec "$@" "$device"
