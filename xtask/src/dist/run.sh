#!/bin/sh
# Runs Tessera's benchmark with the PyTorch of this machine.
#
#   ./run probe                 what this machine offers: one line of JSON
#   ./run list                  the experiments
#   ./run run --full …          any command of tessera-bench
#
# PyTorch @VERSION@ is looked for in $LIBTORCH (a folder with lib/), else in the Python $PYTHON (python3).
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
wanted=@VERSION@
fail() {
    echo "error: $1" >&2
    exit 1
}

# We leave this folder below, so what is relative to it is made absolute.
absolute() {
    case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s\n' "$PWD/$1" ;;
    esac
}

if [ -n "${LIBTORCH:-}" ]; then
    home=$(absolute "$LIBTORCH")
    where="LIBTORCH ($home)"
    version=
    if [ -f "$home/lib/../version.py" ]; then
        version=$(sed -n "s/^__version__ = ['\"]\([^'\"]*\)['\"].*/\1/p" "$home/lib/../version.py")
    elif [ -f "$home/build-version" ]; then
        version=$(cat "$home/build-version")
    fi
    [ -n "$version" ] || fail "$where holds no PyTorch: neither version.py nor build-version is there"
else
    python=${PYTHON:-python3}
    found=$("$python" -c '
import importlib.metadata, importlib.util, os
print(importlib.metadata.version("torch"))
print(os.path.dirname(importlib.util.find_spec("torch").origin))' 2>/dev/null) ||
        fail "$python has no PyTorch. Activate the environment that has PyTorch $wanted, or set PYTHON or LIBTORCH"
    version=$(printf '%s\n' "$found" | sed -n 1p)
    home=$(printf '%s\n' "$found" | sed -n 2p)
    where="$python ($home)"
fi
[ "${version%%+*}" = "$wanted" ] ||
    fail "$where is PyTorch $version, and this benchmark was built for PyTorch $wanted. Install torch==$wanted, or set LIBTORCH to such a folder"
[ -e "$home/lib/libtorch_cpu.so" ] || fail "$home/lib holds no libtorch_cpu.so"

path=$home/lib
for folder in "$home"/lib/../../nvidia/*/lib; do
    [ -d "$folder" ] && path=$path:$folder
done
path=$path:$here/lib
mine=${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# Our C++ runtime only where this machine's is too old for us.
said=$(LD_LIBRARY_PATH=$path$mine "$here/bin/tessera-bench" --version 2>&1 >/dev/null) || true
case $said in
*GLIBCXX_* | *CXXABI_* | *libstdc++.so.6:* | *libgcc_s.so.1:*) path=$path:$here/lib/cxx ;;
*GLIBC_*) fail "this machine's C library is too old for this benchmark ($said). Build it on a machine as old as this one" ;;
esac

LD_LIBRARY_PATH=$path$mine
TESSERA_CACHE=$(absolute "${TESSERA_CACHE:-$here}")
export LD_LIBRARY_PATH TESSERA_CACHE
# Results lie beside this script.
cd "$here"
if [ "${1:-}" = probe ]; then
    exec "$here/bin/probe"
fi
exec "$here/bin/tessera-bench" "$@"
