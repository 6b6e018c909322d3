import functools
import ssl
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import make_model

# Each client of httpx reads all certificates anew, 40 ms of a CPU, to speak plain HTTP.
ssl.create_default_context = functools.cache(ssl.create_default_context)


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
