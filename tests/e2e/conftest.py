import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A small checkpoint that tests only read."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")
