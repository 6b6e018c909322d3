"""The cases of tests/clients whose libraries the tests have anyway; scripts/clients.sh runs all."""

import os
import subprocess
import sys

import pytest

from serving import ROOT

pytestmark = [pytest.mark.no_asan, pytest.mark.slow]


def test_clients(tandem_bin):
    if not (ROOT / "configs/models/tandem-nano/model.safetensors").exists():
        pytest.skip("the weights of tandem-nano are not in this checkout")
    words = [sys.executable, ROOT / "tests/clients/try_clients.py", "openai", "anthropic", "ollama"]
    environment = {**os.environ, "TANDEM_BIN": str(tandem_bin)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 8 and all("| passed |" in row for row in rows), done.stdout
