"""The workflow that a host of the repository runs: what it names exists, and no variant of the tests is left out."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.no_asan

ROOT = Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def lines():
    return [line for job in JOBS.values() for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_every_variant_is_a_job():
    (default,) = re.findall(r"\|\| set -- (.*)", (ROOT / "scripts/test.sh").read_text())
    assert JOBS["test"]["strategy"]["matrix"]["variant"] == default.split()
    assert "scripts/test.sh ${{ matrix.variant }}" in lines()


def test_what_it_runs_is_there():
    scripts = [word for line in lines() for word in line.split() if word.startswith("scripts/")]
    assert "scripts/package/make.sh" in scripts
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    for line in lines():
        assert subprocess.run(["bash", "-nc", re.sub(r"\$\{\{.*?\}\}", "x", line)]).returncode == 0, line


def test_a_release_waits_for_tests_and_packages():
    assert JOBS["release"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(JOBS["release"]["needs"]) == JOBS.keys() - {"release"}
    assert JOBS["package"]["strategy"]["matrix"]["debian"] == [12, 13]


def test_every_step_does_one_thing():
    for job in JOBS.values():
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
