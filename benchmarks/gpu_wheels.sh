#!/usr/bin/env bash
# Downloads, as wheels, what benchmarks.gpu imports and a machine with jax, flax, optax, orbax and
# transformers may lack, and prints the line to run on that machine, which needs no network there.
#   benchmarks/gpu_wheels.sh DIR [PYTHON_VERSION]      such as wheels 3.12
set -euo pipefail
dir=${1:?folder for the wheels} version=${2:-3.12}
packages=(annotated-types cloudpickle farama-notifications filelock gguf gymnasium gymnax Jinja2
  MarkupSafe ml_collections pandas pydantic pydantic_core python-dateutil rich sentencepiece six
  tensorboardX typing-inspection)
pins=$(dirname "$0")/../requirements.txt
mkdir -p "$dir"
for package in "${packages[@]}"; do
  pin=$(grep -hiE "^${package//[-_]/[-_]}==" "$pins" | head -1 | cut -d';' -f1 | cut -d' ' -f1 || true)
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" \
    -d "$dir" "${pin:-$package}"
done
du -sh "$dir" >&2
echo "python3 -m pip install -q --no-deps --no-index --find-links=$dir ${packages[*]} &&" \
  "python3 -m benchmarks.gpu --minutes=9 --out=figures"
