#!/usr/bin/env bash
# One call of a day on a GPU machine that is bare and lent for under 30 minutes:
#
#     benchmarks/gpu/day.sh 1|2|3 [--device cuda|emulated|cpu] [--out FOLDER] [--only PARTS] …
#     benchmarks/gpu/day.sh prepare   before, where Rust is: wheels/ and kernel-cache/ to carry along
#
# Each call is at most 7 minutes and needs none of the others. Where this checkout has its virtual
# environment that is used; else wheels/*.whl is unpacked beside the machine's own PyTorch, into a folder
# that is removed at the end. benchmarks/README.md describes the calls.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ ${1:-} == prepare ]]; then
    make setup
    rm -rf wheels kernel-cache
    .venv/bin/python -m maturin build --release --locked --out wheels
    mkdir -m 700 kernel-cache
    export DDL_CACHE_DIR=$PWD/kernel-cache
    exec .venv/bin/python benchmarks/gpu prepare --device cpu --minutes 20 --out wheels
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python=${PYTHON:-python3}
if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
elif compgen -G 'wheels/*.whl' >/dev/null; then
    for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
if [[ -d kernel-cache && -z ${DDL_CACHE_DIR:-} ]]; then
    cp -r kernel-cache "$site/kernels" # private, as the cache has to be
    chmod -R go-rwx "$site/kernels"
    export DDL_CACHE_DIR="$site/kernels"
fi
"$python" benchmarks/gpu "$@"
