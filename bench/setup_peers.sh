#!/bin/sh
# Makes bench/.work/peers-venv with the peers in the versions that RESULTS.md names.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3.11}
venv=.work/peers-venv
if [ -x "$venv/bin/python" ] && cmp -s peers/requirements.txt "$venv/installed.txt"; then
    exit 0
fi
mkdir -p .work
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r peers/requirements.txt
cp peers/requirements.txt "$venv/installed.txt"
