#!/usr/bin/env bash
# Makes the Python environment of this repository if it is missing or older than pyproject.toml, and prints the path of
# its interpreter on standard output; all other words go to standard error:
#
#     python="$(scripts/bootstrap.sh)"
#
# It takes the newest Python >= 3.12 among PATH, pyenv's versions and uv's, else 3.11. Two settings, neither of which
# changes a result:
#
#     PAXKV_VENV    the folder of the environment (default: .venv in the repository)
#     PAXKV_PYTHON  the Python to use: a path, or a version such as 3.11
#
# Life of the environment's folder (a kill at any point leaves one of these states, and the next run goes on from it):
#
#     absent or empty ──▶ marker only ──▶ marker + packages ──▶ marker + packages + stamp      (ready)
#                             ▲                   │                        │
#                             └── emptied ◀───────┘ killed half way        │ pyproject.toml changed:
#                                                                          └─ stamp aside, pip install, new stamp
#
# A folder that holds something but no marker was not made here and is never touched.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${PAXKV_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
marker="$venv/paxkv-environment" # also the lock
stamp="$venv/paxkv-stamp"        # written last: what the environment was made from

say() { printf 'bootstrap: %s\n' "$*" >&2; }
fail() {
    say "error: $1"
    shift
    for line in "$@"; do printf '           %s\n' "$line" >&2; done
    exit 1
}

# --- is the environment ready? ------------------------------------------------------------------------------------

# An environment is tied to its place (scripts and the link to this checkout hold full paths) and to pyproject.toml.
place() { printf 'root %s\nvenv %s\n' "$root" "$venv"; }
wanted() { place && cat "$root/pyproject.toml"; }

identity() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys.base_prefix)' 2>/dev/null; }

has_wanted_python() {
    local have
    have="$(identity "$venv/bin/python")" || return 1 # its base Python may have been removed
    case "${PAXKV_PYTHON:-}" in
        '') return 0 ;;
        *[!0-9.]*) [ "$have" = "$(identity "$PAXKV_PYTHON")" ] ;;
        *) case "$have" in "$PAXKV_PYTHON".* | "$PAXKV_PYTHON "*) return 0 ;; *) return 1 ;; esac ;;
    esac
}

is_here() { [ -f "$stamp" ] && [ "$(head -n 2 "$stamp")" = "$(place)" ] && has_wanted_python; }
is_ready() { is_here && [ "$(cat "$stamp")" = "$(wanted)" ]; }

finish() {
    "$venv/bin/python" - "$venv" >&2 <<'PY'
import platform, sys
from importlib import metadata
print(f"bootstrap: Python {platform.python_version()}, jax {metadata.version('jax')}, in {sys.argv[1]}")
PY
    printf '%s\n' "$venv/bin/python"
    exit 0
}

# --- which Python? ------------------------------------------------------------------------------------------------

# Prints "minor patch way executable" for a Python that can serve; way says how an environment gets its pip.
probe() {
    "$1" - 2>/dev/null <<'PY'
import sys
if sys.version_info < (3, 11) or sys.version_info.releaselevel != "final" or sys.implementation.name != "cpython":
    sys.exit(1)
import importlib.util, sysconfig
if sys.maxsize < 2**32 or sysconfig.get_config_var("Py_GIL_DISABLED"):  # no jax wheels for these
    sys.exit(1)
has = lambda name: importlib.util.find_spec(name) is not None
way = "none" if not has("venv") else "ensurepip" if has("ensurepip") else "pip" if has("pip") else "none"
print(sys.version_info.minor, sys.version_info.micro, way, getattr(sys, "_base_executable", None) or sys.executable)
PY
}

list_pythons() {
    local dir file
    (
        IFS=:
        set -f
        for dir in $PATH; do printf '%s\n' "$dir"; done
    ) | while IFS= read -r dir; do
        case "$dir" in *pyenv*/shims) continue ;; esac # slow doors to the versions listed below
        for file in "$dir"/python3 "$dir"/python3.[0-9] "$dir"/python3.[0-9][0-9] "$dir"/python; do
            printf '%s\n' "$file"
        done
    done
    for file in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python3; do printf '%s\n' "$file"; done
    if command -v uv >/dev/null; then
        uv python list --only-installed 2>/dev/null | awk '{ print $2 }' || true
    fi
}

# The newest usable Python of each minor version, newest first; those without any way to a pip come last.
choose_pythons() {
    local asked="${PAXKV_PYTHON:-}" file
    case "$asked" in
        *[!0-9.]*) printf '%s\n' "$asked" ;;
        *) list_pythons ;;
    esac | while IFS= read -r file; do
        if [ -x "$file" ] || command -v "$file" >/dev/null; then probe "$file" || true; fi
    done | case "$asked" in
        '' | *[!0-9.]*) cat ;;
        *) awk -v v="$asked" '{ have = "3." $1 "." $2 } index(have ".", v ".") == 1' ;;
    esac | awk '{ print ($3 == "none") + 0, $0 }' | sort -k1,1n -k2,2nr -k3,3nr -s | awk '!seen[$2]++' | cut -d' ' -f2-
}

no_python() {
    [ -z "${PAXKV_PYTHON:-}" ] || fail "PAXKV_PYTHON=$PAXKV_PYTHON: no such CPython >= 3.11 was found or it does not start." \
        "Give the path of an interpreter, or a version that is on PATH or among pyenv's or uv's."
    fail "no CPython >= 3.11 on PATH, in ${PYENV_ROOT:-${HOME:-}/.pyenv}/versions or known to uv." \
        "Install one ('apt install python3 python3-venv', 'uv python install 3.13', 'pyenv install 3.13')," \
        "or name one: PAXKV_PYTHON=/path/to/python3 $0"
}

# --- making it ----------------------------------------------------------------------------------------------------

empty_folder() { find "$venv/" -mindepth 1 -maxdepth 1 ! -name "${marker##*/}" -exec rm -rf {} +; }

create() { # create PYTHON WAY
    case "$2" in
        ensurepip) "$1" -m venv "$venv" >&2 ;;
        pip) "$1" -m venv --without-pip "$venv" >&2 && "$1" -m pip --python "$venv/bin/python" install -qq pip >&2 ;;
        none)
            command -v uv >/dev/null || {
                say "$1 can make no environment: it has neither ensurepip nor pip."
                say "On Debian and Ubuntu: apt install python3-venv. Or install uv."
                return 1
            }
            uv venv --quiet --allow-existing --seed --python "$1" "$venv" >&2
            ;;
    esac
}

install() { (cd "$root" && "$venv/bin/python" -m pip install -qq --disable-pip-version-check -e '.[test]' >&2); }

write_stamp() {
    wanted >"$stamp.new"
    mv -f "$stamp.new" "$stamp"
    rm -f "$stamp.old"
}

update() {
    say "pyproject.toml changed; updating $venv"
    mv -f "$stamp" "$stamp.old"
    # pip fetches everything before it changes anything, so after a plain failure the old environment still stands.
    if ! install; then
        mv -f "$stamp.old" "$stamp"
        fail "pip could not install paxkv and its test dependencies (its words are above)." "To start afresh: rm -rf '$venv'"
    fi
    write_stamp
}

# A brand-new Python may have no jax yet, so one older Python gets a try too; a second failure has another cause.
build() {
    local pythons minor patch way python failures=0
    pythons="$(choose_pythons)"
    [ -n "$pythons" ] || no_python
    while [ "$failures" -lt 2 ] && read -r minor patch way python <&3; do
        empty_folder
        say "making $venv with Python 3.$minor.$patch ($python); the first time takes a minute or two"
        create "$python" "$way" || continue
        if install; then
            write_stamp
            return 0
        fi
        say "Python 3.$minor did not serve."
        failures=$((failures + 1))
    done 3<<<"$pythons"
    empty_folder
    fail "no environment could be made; the reasons are above." \
        "Usual causes: no network, no room on the disk, python3-venv missing."
}

if is_ready; then finish; fi

if [ -e "$venv" ] && [ ! -e "$marker" ] && [ -n "$(ls -A "$venv" 2>/dev/null || echo unreadable)" ]; then
    fail "$venv exists and was not made by this script, so it stays as it is." \
        "Move it away, or choose another folder: PAXKV_VENV=/some/folder $0"
fi
if ! { mkdir -p "$venv" && : >>"$marker"; } 2>/dev/null; then
    fail "cannot write $venv." "Choose a folder for the environment that can be written: PAXKV_VENV=/some/folder $0"
fi

# Two runs at once: the second waits, then finds the first one's work. A pip that outlives a killed run keeps the lock.
if command -v flock >/dev/null; then
    exec 9>>"$marker"
    flock -n 9 || {
        say "another run is making $venv; waiting for it"
        flock 9
    }
fi

if is_ready; then
    :
elif is_here; then
    update
else
    build
fi
finish
