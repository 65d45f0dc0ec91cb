#!/usr/bin/env bash
# Runs the tests in two processes: makes the environment if missing, then pytest from the repository's root.
# Arguments go to pytest; a later -n wins.
#
#     scripts/test.sh                          everything
#     scripts/test.sh -n 0 tests/sched -k beam one process, some tests
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$("$root/scripts/bootstrap.sh")"
cd "$root"
# In a read-only checkout pytest can keep no cache; it would warn, and warnings are errors here.
cache=()
[ -w "$root" ] || cache=(-p no:cacheprovider)
exec "$python" -m pytest -n 2 ${cache[@]+"${cache[@]}"} "$@"
