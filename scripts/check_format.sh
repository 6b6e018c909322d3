#!/bin/bash
# Checks the layout of every tracked C and CUDA file against .clang-format; --fix rewrites them.
# clang-format 14 decides: other versions break lines differently (CLANG_FORMAT names another).
set -euo pipefail
cd "$(dirname "$0")/.."

tool=${CLANG_FORMAT:-}
for candidate in clang-format-14 clang-format; do
  [ -n "$tool" ] || tool=$(command -v "$candidate" || true)
done
if [ -z "$tool" ]; then
  echo "check_format: no clang-format: run scripts/setup.sh --test" >&2
  exit 2
fi
version=$("$tool" --version)
if [[ $version != *"version 14."* ]]; then
  echo "check_format: SKIPPED: layout is judged by clang-format 14, here is $version"
  exit 77
fi

# Unicode tables and the like are data, not code: they carry the suffix .inc.
mapfile -d '' files < <(git ls-files -z -- '*.c' '*.h' '*.cu' '*.cuh')
if [ ${#files[@]} -eq 0 ]; then
  echo "check_format: git lists no C files here" >&2
  exit 2
fi
if [ "${1:-}" = --fix ]; then
  exec "$tool" -i "${files[@]}"
fi
if ! "$tool" --dry-run -Werror "${files[@]}"; then
  echo "check_format: run scripts/check_format.sh --fix" >&2
  exit 1
fi
echo "${#files[@]} files laid out as .clang-format says"
