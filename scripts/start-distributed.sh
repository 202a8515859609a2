#!/bin/sh
# Celery workers, Flower, and a Redis if there is none:
#
#   scripts/start-distributed.sh [N]     start N workers (2) that are not running yet
#   scripts/start-distributed.sh --stop  end everything that this started
#   scripts/start-distributed.sh --help  say this
#
# Set as for Celery: CELERY_BROKER_URL (redis://localhost:6379/0), CELERY_WORKER_CONCURRENCY, …
# More: QUEUES (scraping,business,rag), FLOWER_PORT (5555), SHOAL_RUN (.shoal/run: logs and process
# ids). Needs no root. Everything listens on loopback only.
set -eu

run=${SHOAL_RUN:-.shoal/run}
broker=${CELERY_BROKER_URL:-redis://localhost:6379/0}
flower_port=${FLOWER_PORT:-5555}
queues=${QUEUES:-scraping,business,rag}
patience=60

# The comment at the top of this file is the help.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $1"
    [ $# -lt 2 ] || say " hint: $2"
    exit 1
}

# Asking how it works needs nothing installed.
case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
esac

beside=$(dirname "$0")/../.venv/bin/celery
if [ -x "$beside" ]; then
    celery=$(cd "$(dirname "$beside")" && pwd)/celery
else
    celery=$(command -v celery) || fail "no celery command" "pip install 'shoal[celery]', or run make setup"
fi
python=$(dirname "$celery")/python
[ -x "$python" ] || python=python3

# A process id may belong to somebody else by now: its command line tells. All of it (-ww): the
# program may be installed deep down, and the edge of the terminal cuts it before what tells.
alive() {
    [ -s "$run/$1.pid" ] && ps -ww -p "$(cat "$run/$1.pid")" -o args= 2>/dev/null | grep -q -E -e "$2"
}

# What was just started may not be the program yet: only whether it is over can be told.
over() {
    case $(ps -p "$(cat "$run/$1.pid")" -o stat= 2>/dev/null) in '' | Z*) return 0 ;; esac
    return 1
}

# start NAME COMMAND…: in the background, with a log and a process id.
start() {
    name=$1
    shift
    nohup "$@" >>"$run/$name.log" 2>&1 </dev/null &
    echo $! >"$run/$name.pid"
    started="$name $started"
}

# wait_for NAME WHAT CONDITION…: until the condition holds, or the process is over.
wait_for() {
    name=$1 what=$2
    shift 2
    waited=0
    until "$@"; do
        ! over "$name" || { tail -n 20 "$run/$name.log" >&2; fail "$what ended" "its log is $run/$name.log"; }
        [ "$waited" -lt $((patience * 5)) ] || fail "$what is not ready after $patience s" "its log is $run/$name.log"
        waited=$((waited + 1))
        sleep 0.2
    done
}

# stop NAME PATTERN: gently, and wait. Tasks that run are finished first.
stop() {
    [ -e "$run/$1.pid" ] || return 0
    if alive "$1" "$2"; then
        say "stopping $1"
        kill "$(cat "$run/$1.pid")"
        waited=0
        while alive "$1" "$2"; do
            [ "$waited" -lt $((patience * 5)) ] || fail "$1 does not end" "its process is $(cat "$run/$1.pid")"
            waited=$((waited + 1))
            sleep 0.2
        done
    fi
    rm -f "$run/$1.pid"
}

# A start that fails, or is interrupted, ends what it began, the latest first. What ran before stays.
started=
undo() {
    code=$?
    trap - EXIT
    if [ "$code" -ne 0 ] && [ -n "$started" ]; then
        say "ending what was started; the logs stay in $run"
        for each in $started; do
            stop "$each" 'shoal\.celery|redis-server'
        done
    fi
    exit "$code"
}

stop_all() {
    for file in "$run"/worker-*.pid; do
        [ -e "$file" ] && stop "$(basename "$file" .pid)" 'shoal\.celery'
    done
    stop flower 'shoal\.celery'
    stop redis 'redis-server'
}

# The broker's address without scheme, password, database and options.
place=${broker#*://}
place=${place%%/*}
place=${place%%\?*}
place=${place##*@}
host=${place%%:*}
port=6379
case $place in *:*) port=${place##*:} ;; esac

answers() {
    "$python" -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()' \
        "$1" "$2" 2>/dev/null
}

redis_answers() { answers "$host" "$port"; }

start_redis() {
    case $broker in
        redis://*) ;;
        *) return 0 ;;
    esac
    if redis_answers; then
        say "Redis is up at $host:$port"
        return 0
    fi
    case $host in
        localhost | 127.0.0.1) ;;
        *) fail "no Redis at $host:$port" "start it there, or set CELERY_BROKER_URL" ;;
    esac
    command -v redis-server >/dev/null || fail "redis-server is not installed" "install Redis 7, or set CELERY_BROKER_URL"
    mkdir -p "$run/redis"
    # It holds the frontier: it writes everything down, and never drops anything to save memory.
    start redis redis-server --port "$port" --bind 127.0.0.1 --dir "$run/redis" \
        --appendonly yes --save '' --maxmemory-policy noeviction
    wait_for redis Redis redis_answers
    say "started Redis at $host:$port, data in $run/redis"
}

worker_is_ready() { grep -q ' ready\.$' "$run/$1.log" 2>/dev/null; }

flower_answers() { answers 127.0.0.1 "$flower_port"; }

case ${1:-2} in
    --stop)
        stop_all
        exit 0
        ;;
    *[!0-9]* | 0) fail "a number of workers, or --stop; not '$1'" "$0 --help says more" ;;
esac
count=${1:-2}
alive flower 'shoal\.celery' || ! flower_answers || fail "port $flower_port is taken" "set FLOWER_PORT"
mkdir -p "$run"
trap undo EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start_redis

number=1
while [ "$number" -le "$count" ]; do
    if alive "worker-$number" 'shoal\.celery'; then
        say "worker-$number is running"
    else
        rm -f "$run/worker-$number.log"
        start "worker-$number" "$celery" -A shoal.celery worker -n "worker-$number@%h" -Q "$queues" -l info
    fi
    number=$((number + 1))
done
number=1
while [ "$number" -le "$count" ]; do
    wait_for "worker-$number" "worker-$number" worker_is_ready "worker-$number"
    number=$((number + 1))
done

if ! alive flower 'shoal\.celery'; then
    start flower "$celery" -A shoal.celery flower --address=127.0.0.1 --port="$flower_port" --max_tasks=10000
fi
wait_for flower Flower flower_answers

# Those of an earlier, larger start count too.
running=0
for file in "$run"/worker-*.pid; do
    ! alive "$(basename "$file" .pid)" 'shoal\.celery' || running=$((running + 1))
done
case $running in
    1) say "1 worker is running; Flower: http://127.0.0.1:$flower_port" ;;
    *) say "$running workers are running; Flower: http://127.0.0.1:$flower_port" ;;
esac
[ "$running" -le "$count" ] || say "more than the $count asked for: an earlier start left them; $0 --stop ends all"
case $broker in
    *@*) say "work for them: with the same CELERY_BROKER_URL, shoal enqueue JOB URL…" ;;
    *) say "work for them: CELERY_BROKER_URL=$broker shoal enqueue JOB URL…" ;;
esac
say "logs: $run; the end: $0 --stop"
