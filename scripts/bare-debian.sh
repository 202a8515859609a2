#!/bin/sh
# Runs a command on a clone of this checkout in a bare Debian: nothing of this machine's own Python,
# compilers or servers is there. Shows what a stranger's first minutes are like.
#
#   scripts/bare-debian.sh [--suite bookworm] [--with PACKAGES] [--user] [--root DIR] COMMAND…
#
#   scripts/bare-debian.sh make crawl                                        as root
#   scripts/bare-debian.sh --user --with python3-venv make crawl             as a plain user
#   scripts/bare-debian.sh --suite forky --with python3-venv make test       a newer Python
#
# A root holds python3, make, git and ca-certificates, and what --with adds (a,b,c). It is made once, in
# DIR (/var/tmp/shoal-SUITE), and used again; the clone is new every time. Needs root and mmdebstrap.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
suite=bookworm
more=''
user=root
root=''

while [ $# -gt 0 ]; do
    case $1 in
        --suite) suite=$2 && shift 2 ;;
        --with) more=",$2" && shift 2 ;;
        --root) root=$2 && shift 2 ;;
        --user) user=stranger && shift ;;
        -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || { echo "error: no command (--help shows how)" >&2 && exit 2; }
root=${root:-/var/tmp/shoal-$suite}

# The archive that this machine uses, in another suite. Archives that are kept for good are past their date.
sources() { sed -E "s/^Suites: .*/Suites: $suite/" /etc/apt/sources.list.d/debian.sources | awk -v RS= 'NR == 1'; }

if ! [ -x "$root/usr/bin/python3" ]; then
    sources | mmdebstrap --quiet --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' \
        --include="python3,make,git,ca-certificates$more" "$suite" "$root" -
    chroot "$root" useradd --create-home --shell /bin/sh stranger
    # Whoever vouches for the registries here must be believed there too.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
fi
cp /etc/resolv.conf /etc/hosts "$root/etc/" 2>/dev/null || true
clone=$root/home/stranger/shoal
rm -rf "$clone"
git clone --quiet "$here" "$clone"
chroot "$root" chown -R "$user:" /home/stranger/shoal

# Mounts and processes of their own: whatever the command leaves behind ends with it.
export root user
# shellcheck disable=SC2016 # expanded inside
exec unshare --mount --pid --fork --kill-child sh -euc '
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/tmp"
    exec chroot "$root" env -i HOME="/home/stranger" LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        setpriv --reuid "$user" --regid "$user" --init-groups \
        sh -c "cd /home/stranger/shoal && exec \"\$@\"" sh "$@"' sh "$@"
