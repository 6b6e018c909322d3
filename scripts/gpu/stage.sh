#!/bin/sh
# Runs a stage of what needs a GPU from the archive that pack.sh made: see stage.py.
# usage: [LIMIT=SECONDS] [OUT=FOLDER] [TANDEM_PYTHON=PYTHON] scripts/gpu/stage.sh first|second|tests|measure|sanitize
exec "${TANDEM_PYTHON:-python3}" "${0%/*}/stage.py" "$@"
