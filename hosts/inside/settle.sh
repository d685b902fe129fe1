#!/bin/sh
# Run once in a new root, by the machine that it is for: the second half of its installation, and its users.
set -eu
export DEBIAN_FRONTEND=noninteractive PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if [ $$ = 1 ]; then
  mount -t proc proc /proc
  mount -t sysfs sysfs /sys
  trap 'sync; sleep 1; echo o >/proc/sysrq-trigger; sleep 60' EXIT
fi
if [ -x /debootstrap/debootstrap ]; then
  /debootstrap/debootstrap --second-stage
fi
useradd --create-home --uid 1000 --shell /bin/bash ada
mkdir -p /var/lib/systemd/linger
touch /var/lib/systemd/linger/ada
echo guest >/etc/hostname
printf '127.0.0.1 localhost guest\n::1 localhost\n' >/etc/hosts
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer \
  systemd-networkd-wait-online.service e2scrub_reap.service podman.service podman.socket podman-auto-update.timer \
  podman-auto-update.service podman-restart.service
rm -rf /var/cache/apt/archives/*.deb /var/lib/apt/lists/*
rm -f /etc/machine-id /settle.sh
echo 0123456789abcdef0123456789abcdef >/etc/machine-id
sync
echo "hosts: settled"
