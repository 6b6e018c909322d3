#!/bin/bash
# Installs client libraries, pinned, into build/clients and drives a server with each; prints a table.
# usage: [TANDEM_BIN=build/bin/tandem] scripts/clients.sh [CLIENT]...    default: all
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/clients
export TANDEM_BIN=${TANDEM_BIN:-build/bin/tandem}
if [ ! -x "$TANDEM_BIN" ]; then
  echo "scripts/clients.sh: $TANDEM_BIN is missing: build it, or name another with TANDEM_BIN" >&2
  exit 2
fi
[ -x $venv/bin/python ] || python3 -m venv $venv
$venv/bin/python -m pip install --quiet uv # resolves in seconds what takes pip minutes
$venv/bin/uv pip install --quiet --python $venv/bin/python -r tests/clients/requirements.txt
export LITELLM_LOCAL_MODEL_COST_MAP=True ANTHROPIC_LOG=error
exec $venv/bin/python tests/clients/try_clients.py "$@"
