#!/usr/bin/env bash
# A day on a GPU that is there for a quarter of an hour, on a machine with a driver and PyTorch:
#
#     benchmarks/gpu/day.sh prepare   before, where Rust is: wheels/ and kernel-cache/ to carry along
#     benchmarks/gpu/day.sh day [--device cuda|emulated|cpu] [--out FOLDER] [--only PARTS] …
#     benchmarks/gpu/day.sh tests
#
# Without this checkout's virtual environment, wheels/*.whl is unpacked beside the machine's own PyTorch,
# into a folder that is removed at the end. benchmarks/README.md has the rest.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"

if [[ ${1:-} == prepare ]]; then
    make setup
    rm -rf wheels kernel-cache
    .venv/bin/python -m maturin build --release --locked --strip --out wheels
    mkdir -m 700 kernel-cache
    DDL_CACHE_DIR=$PWD/kernel-cache .venv/bin/python -m gpu prepare --device cpu --out build
    mib=$(du -scm wheels kernel-cache | tail -n 1 | cut -f 1)
    ((mib <= 64)) || { echo "wheels/ and kernel-cache/ have $mib MiB, at most 64 may travel" >&2; exit 1; }
    exit
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python=${PYTHON:-python3}
if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
elif compgen -G 'wheels/*.whl' >/dev/null; then
    for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
    PYTHONPATH="$site:$PYTHONPATH"
fi
if [[ -d kernel-cache && -z ${DDL_CACHE_DIR:-} ]]; then
    cp -r kernel-cache "$site/kernels" # private, as the cache has to be
    chmod -R go-rwx "$site/kernels"
    export DDL_CACHE_DIR="$site/kernels"
fi
"$python" -m gpu "$@"
