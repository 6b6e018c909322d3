import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A small checkpoint that tests only read."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def client(server):
    """A client of the server that the module's fixture of that name has started."""
    import openai  # which not every machine that runs some of these tests has

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
