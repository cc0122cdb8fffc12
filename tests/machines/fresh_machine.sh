#!/bin/bash
# Try PhOS on a fresh machine: tests/machines/fresh_machine.sh [RELEASE] [CLONE]
#
# Makes a disk with a new Debian (RELEASE: trixie or bookworm) and CLONE's last commit (default: this clone), boots it in
# QEMU, and runs tried_inside.sh there. Ends with each step and its seconds; status 0 if all passed. Needs root, 8 GB
# in $TMPDIR, and the packages mmdebstrap and qemu-system-x86; not KVM: the processor is emulated, so that it takes half
# an hour or more, and the seconds say nothing. Debian comes from the mirror of this machine's apt; inside, apt, pip and
# TLS are configured as here.
#
# FRESH_LOG      keeps what the machine wrote (default: a file in $TMPDIR, named at the end)
# FRESH_SECONDS  time for all that runs inside (default 7200)
set -euo pipefail

release=${1:-trixie}
clone=$(readlink -f -- "${2:-$(dirname -- "${BASH_SOURCE[0]}")/../..}")
log=${FRESH_LOG:-$(mktemp --suffix=.log)}
fail() { printf 'fresh_machine.sh: %s\n' "$@" >&2; exit 1; }

[ "$(id -u)" -eq 0 ] || fail "only root can make the disk."
for tool in mmdebstrap qemu-system-x86_64 mke2fs git; do
    command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install mmdebstrap qemu-system-x86 e2fsprogs git"
done
mirror=$(apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian|Debian|//p' | sed -n 1p)
[ -n "$mirror" ] || fail "apt has no mirror of Debian here; run apt-get update."
[ -z "$(git -C "$clone" status --porcelain --untracked-files=no)" ] || echo "What is not committed in $clone is not tried."

work=$(mktemp -d)
machine=
clean_up() {
    [ -z "$machine" ] || kill "$machine" 2>/dev/null || true
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM
root=$work/root

echo "A new Debian ($release), from $mirror"
# What a server has after its installation, and git, with which one gets a clone.
mmdebstrap --quiet --mode=root --variant=important --components=main \
    --include=linux-image-amd64,initramfs-tools,systemd-sysv,libpam-systemd,dbus,ca-certificates,python3,git \
    "$release" "$root" "$mirror"
for file in /etc/pip.conf /etc/apt/apt.conf /usr/local/share/ca-certificates/*.crt; do
    [ ! -r "$file" ] || cp "$file" "$root$file"
done
apt-config dump Acquire::http::Proxy Acquire::https::Proxy >"$root/etc/apt/apt.conf.d/90proxy"
env -u TMPDIR chroot "$root" update-ca-certificates >/dev/null 2>&1
git clone -q --no-hardlinks "$clone" "$root/root/phos"

echo fresh >"$root/etc/hostname"
echo "127.0.0.1 localhost fresh" >"$root/etc/hosts"
echo "/dev/vda / ext4 defaults 0 1" >"$root/etc/fstab"
# QEMU's own network, where these addresses are always the same.
printf '[Match]\nName=en* eth*\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n' >"$root/etc/systemd/network/net.network"
rm -f "$root/etc/resolv.conf"
echo "nameserver 10.0.2.3" >"$root/etc/resolv.conf"
cat >"$root/etc/systemd/system/tried.service" <<'UNIT'
[Unit]
Wants=network-online.target
After=network-online.target systemd-user-sessions.service
[Service]
Type=oneshot
ExecStart=/root/phos/tests/machines/tried_inside.sh
ExecStopPost=/bin/systemctl --no-block poweroff
StandardOutput=file:/dev/ttyS1
StandardError=file:/dev/ttyS1
TimeoutStartSec=infinity
[Install]
WantedBy=multi-user.target
UNIT
env -u TMPDIR SYSTEMD_LOG_LEVEL=err chroot "$root" systemctl --quiet enable systemd-networkd.service tried.service

mv "$root"/boot/vmlinuz-* "$work/vmlinuz"
mv "$root"/boot/initrd.img-* "$work/initrd"
mke2fs -q -t ext4 -d "$root" "$work/disk" 8G >/dev/null
rm -rf "$root"

echo "Booting it; everything it says goes to $log"
# Without cx16: with it, QEMU stops all processors for each 16-byte exchange.
timeout "${FRESH_SECONDS:-7200}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max,-cx16 -smp 2 -m 4096 \
    -kernel "$work/vmlinuz" -initrd "$work/initrd" -append "root=/dev/vda rw console=ttyS0 systemd.show_status=false" \
    -drive file="$work/disk",format=raw,if=virtio,cache=unsafe -nic user,model=virtio-net-pci -device virtio-rng-pci \
    -display none -no-reboot -monitor none -serial file:"$work/console" -serial file:"$log" </dev/null &
machine=$!
status=0
wait "$machine" || status=$?
machine=

if [ "$status" -ne 0 ] || ! grep -q '^ALL PASSED\|FAILED in' "$log"; then
    tail -n 30 "$work/console"
    echo "The machine did not come to the end of its steps (QEMU: status $status)."
fi
tr -d '\r' <"$log" >"$work/said"
echo
head -n 1 "$work/said"
sed -n 's/^STEP \(passed\|failed\) \([0-9]*\) \(.*\)/\1  \2 s  \3/p' "$work/said"
tail -n 1 "$work/said"
echo "All of it: $log"
grep -q '^ALL PASSED' "$work/said"
