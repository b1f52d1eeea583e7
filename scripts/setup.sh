# Sourced by train.sh, test.sh and test_gpu.sh. Sets `python` to an interpreter that imports the modules named in `needs`
# in versions that pyproject.toml allows: the one on the PATH if it does, else that of .venv, made or repaired here with
# the versions of constraints.txt. TITAN=0.2.2 wants that torchtitan: in .venv-0.2.2, by constraints-0.2.2.txt.

case ${1:-} in # the caller's arguments; its text is the comment at its top
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

export TITAN="${TITAN:-0.3}"
case $TITAN in
    0.3) venv=.venv constraints=scripts/constraints.txt ;;
    0.2.2) venv=.venv-0.2.2 constraints=scripts/constraints-0.2.2.txt ;;
    *) echo "TITAN is $TITAN; use 0.3 or 0.2.2" >&2 && exit 1 ;;
esac

suits() { # interpreter: whether it does; `reason` is the version that does not fit, if it is for one
    local code=0
    reason=$("$1" scripts/check_python.py $needs 2>/dev/null) || code=$?
    if ((code == 3)); then
        echo "PYTHONPATH brings $reason; take that folder off PYTHONPATH" >&2
        exit 1
    fi
    return $code
}

python=python3
if ! suits "$python"; then
    if [[ $reason ]]; then echo "$python has $reason; using $venv" >&2; fi
    python="$PWD/$venv/bin/python"
    if ! suits "$python"; then
        python3 -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
        echo "Setting up $venv (once) ...${reason:+ It has $reason.}" >&2
        "$python" -m pip --version >/dev/null 2>&1 || python3 -m venv "$venv"
        # torch first and pinned: an unpinned dependency of another package would choose a newer one.
        "$python" -m pip install --quiet "$(grep '^torch==' "$constraints")"
        extras=dev
        "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || extras=dev,compile
        "$python" -m pip install --quiet --constraint "$constraints" --editable ".[$extras]"
        if ! suits "$python"; then
            echo "Set-up failed${reason:+: $venv has $reason}; delete $venv and try again" >&2
            exit 1
        fi
    fi
fi
