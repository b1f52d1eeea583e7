# Sourced by train.sh, test.sh and test_gpu.sh. Sets `python` to an interpreter that imports the modules named in `needs`:
# the one on the PATH if it has them, else that of .venv, made here on first use, with the versions of constraints.txt.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

imports_all() { "$1" -c "import importlib; [importlib.import_module(name) for name in '$needs'.split()]" 2>/dev/null; }

python=python3
if ! imports_all "$python"; then
    python="$PWD/.venv/bin/python"
    if ! imports_all "$python"; then
        python3 -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
        echo "Setting up .venv (once) ..." >&2
        python3 -m venv .venv
        # torch first and pinned: an unpinned dependency of another package would choose a newer one.
        "$python" -m pip install --quiet "$(grep '^torch==' scripts/constraints.txt)"
        extras=dev
        "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || extras=dev,compile
        "$python" -m pip install --quiet --constraint scripts/constraints.txt --editable ".[$extras]"
    fi
fi
