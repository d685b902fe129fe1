#!/bin/busybox sh
# The first process of a guest: finds its disks, lays our own files over its root, and hands over to its init.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /new
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do
  $bb insmod "$module" || echo "hosts: $module cannot be loaded"
done
tries=0
until [ -b /dev/vda ] || [ $tries -gt 600 ]; do
  tries=$((tries + 1))
  $bb sleep 1
done
disk() { # serial number
  for one in /sys/block/vd*; do
    [ "$($bb cat "$one/serial")" = "$1" ] && echo "/dev/${one##*/}"
  done
}
init=/sbin/init
for word in $($bb cat /proc/cmdline); do
  case $word in
    hosts.init=*) init=${word#hosts.init=} ;;
  esac
done
$bb mount -t ext4 -o rw "$(disk root)" /new || exec $bb sh
if [ -n "$(disk modules)" ]; then
  $bb mkdir -p /new/usr/lib/modules
  $bb mount -t ext4 -o ro "$(disk modules)" /new/usr/lib/modules
fi
if [ -n "$(disk python)" ]; then
  $bb mkdir -p /new/opt/ringfence
  $bb mount -t ext4 -o ro "$(disk python)" /new/opt/ringfence
fi
[ -d /overlay ] && $bb cp -a /overlay/. /new/
echo "hosts: starting $init"
$bb umount /proc
$bb umount /sys
$bb mount -o move /dev /new/dev
exec $bb switch_root /new "$init"
