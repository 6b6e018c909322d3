"""What the Python tests share: where the build and the test data are."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
# Files that take long, the longest first: those that start last shall be short.
LONG_FILES = [
    "test_worker",
    "test_cuda_serve",
    "test_openai",
    "test_families",
    "test_golden_cuda",
    "test_preemption",
    "test_bench",
    "test_faults",
    "test_prefix_cache",
    "test_tokenizer",
    "test_structured",
    "test_gpu_bundle",
    "test_http_raw",
    "test_page",
    "test_golden",
]


MARKS = {
    "slow": "left out by scripts/test.sh quick",
    "no_asan": "not under AddressSanitizer: release compares the same, or no code of ours runs",
    "tsan": "also under ThreadSanitizer: several threads, or processes over shared memory",
}


def pytest_configure(config):
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_report_header():
    return f"tandem build: {build_path()}, shared data: {shared_path()}"


def pytest_collection_modifyitems(items):
    """The order in which xdist gives files to its processes, with --no-loadscope-reorder."""
    place = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def build_path():
    return ROOT / os.environ.get("TANDEM_BUILD", "build")


def shared_path():
    return Path(os.environ.get("TANDEM_SHARED", ROOT.parent / "shared"))


def built(name):
    """A program of the build; a test that needs a missing one fails, it does not skip."""
    path = build_path() / "bin" / name
    if not path.exists():
        pytest.fail(f"{path} does not exist: build the project, or set TANDEM_BUILD")
    return path


@pytest.fixture(scope="session")
def build_dir():
    return build_path()


@pytest.fixture(scope="session")
def tandem_bin():
    """The program, wherever TANDEM_BIN says."""
    named = os.environ.get("TANDEM_BIN")
    return Path(named) if named else built("tandem")


@pytest.fixture(scope="session")
def tok_driver():
    return built("tok_driver")


@pytest.fixture(scope="session")
def grammar_driver():
    return built("grammar_driver")


@pytest.fixture(scope="session")
def template_driver():
    return built("template_driver")


@pytest.fixture(scope="session")
def shared_dir():
    """The folder of test data outside the project; tests that need it are skipped without it."""
    path = shared_path()
    if not path.is_dir():
        pytest.skip(f"no shared test data at {path} (set TANDEM_SHARED)")
    return path
