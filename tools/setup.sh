#!/bin/sh
# Makes .venv with the pinned versions of constraints.txt. Installs Debian's python3-venv where it is missing and may.
set -eu
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "error: $python is older than 3.11; set PYTHON to a newer one" >&2; exit 4; }
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: $python cannot make virtual environments; install it with: apt-get install python3-venv" >&2
    exit 4
  fi
  apt-get update -qq && apt-get install -y -qq python3-venv
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,ray]'
