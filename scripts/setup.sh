#!/bin/sh
# Makes the virtual environment. Called by make, which knows when it is due:
#
#   scripts/setup.sh run    what `shoal` needs to run
#   scripts/setup.sh dev    that, and what tests and linters need
#
# VENV (.venv) and PYTHON (python3) can be set. Needs root only where Debian's python3 cannot make
# a virtual environment and there is no uv either.
set -eu
cd "$(dirname "$0")/.."
what=${1:-dev}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

has_pip() { "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

# Debian splits ensurepip off: then `-m venv` fails half-way and leaves a folder without pip.
has_ensurepip() { "$python" -c 'import ensurepip' 2>/dev/null; }
make_venv() { is_new_enough "$python" && has_ensurepip && "$python" -m venv "$venv" && has_pip; }

make_venv_with_uv() {
    command -v uv >/dev/null 2>&1 && uv venv --quiet --clear --seed --python '>=3.11' "$venv" && has_pip
}

install_debian_venv() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    say "installing Debian's python3-venv"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq python3-venv >/dev/null 2>&1 || {
        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
    }
}

# Tests start servers of their own, on free ports. Without root they are left out, and say so.
install_servers() {
    command -v redis-server >/dev/null 2>&1 || install_server redis-server "the Redis frontier"
    [ -n "$(ls /usr/lib/*/faketime/libfaketime.so.1 2>/dev/null)" ] || install_server libfaketime "clocks that jump"
    [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || install_server rabbitmq-server "dispatch by RabbitMQ"
    [ -n "$(ls -d /usr/lib/postgresql/*/bin/postgres 2>/dev/null)" ] && return
    # Debian's package makes a database of its own and starts it; nobody asked for that.
    [ "$(id -u)" = 0 ] && mkdir -p /etc/postgresql-common && [ ! -e /etc/postgresql-common/createcluster.conf ] &&
        echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
    install_server postgresql "the PostgreSQL frontier"
}

install_server() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        say "$1 is not installed: the tests of $2 are skipped"
        return
    fi
    say "installing Debian's $1 for the tests"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "$1" >/dev/null 2>&1 || {
        apt-get update -qq && apt-get install -y -qq --no-install-recommends "$1" >/dev/null
    } || say "$1 could not be installed: the tests of $2 are skipped"
}

if ! [ -x "$venv/bin/python" ] || ! has_pip; then
    if ! make_venv && ! make_venv_with_uv && ! { install_debian_venv && make_venv; }; then
        say "error: cannot make a virtual environment in $venv with $python"
        if ! is_new_enough "$python"; then
            say " hint: shoal needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"
        elif ! has_ensurepip; then
            say " hint: as root: apt-get update && apt-get install -y python3-venv; then run make again"
        else
            say " hint: the lines above say why; make crawl VENV=/another/place puts it elsewhere"
        fi
        exit 1
    fi
fi

pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check "$@"; }

say "installing into $venv what pyproject.toml asks for, as constraints.txt pins it"
# --group came with pip 25.1; Debian 12 brings 23.0.
pip install --constraint constraints.txt --upgrade pip
case $what in
    run) pip install --constraint constraints.txt --editable . ;;
    dev)
        pip install --constraint constraints.txt --editable . --group dev
        install_servers
        ;;
    *) say "error: setup.sh takes run or dev, not $what" && exit 2 ;;
esac

touch "$venv/.shoal-run"
[ "$what" = run ] || touch "$venv/.shoal-dev"
