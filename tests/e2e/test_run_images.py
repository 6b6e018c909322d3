"""`tandem run` shows images to a model that it opens itself, as a server would."""

import json
import subprocess

import pytest

from serving import ROOT, Server, make_model
from terminal import Terminal

IMAGES = ROOT / "tests/fuzz/corpus/fuzz_image"
ONE, OTHER = IMAGES / "png_rgb", IMAGES / "webp_alpha"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "seeing", "tiny-qwen3-vl")


def run(tandem_bin, *words, status=0):
    done = subprocess.run([tandem_bin, "run", "--temperature", "0", "-n", "16", "--ignore-eos", *words],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


def said(*args):
    answer = json.loads(run(*args, "--json").stdout)
    return answer["text"], answer["n_prompt"], answer["n_output"]


def test_it_says_what_a_server_says(tandem_bin, model):
    here = ("-m", model, "--device", "cpu", "--ctx-size", "1024")
    server = Server(tandem_bin, model, "--ctx-size", "1024")
    answers = []
    try:
        for images in ([], ["--image", ONE], ["--image", OTHER], ["--image", ONE, OTHER]):
            prompt = ("-p", "What is this?", *images)
            answers.append(said(tandem_bin, *here, *prompt))
            assert answers[-1] == said(tandem_bin, "--server", server.url, *prompt)
    finally:
        server.close()
    assert len({text for text, *_ in answers}) == 4
    assert answers[0][1] < answers[1][1] == answers[2][1] < answers[3][1]


def test_a_chat_goes_on(tandem_bin, model, tmp_path):
    """The images of earlier messages stay, and what is said of them is what a new chat says."""
    once = Terminal(tandem_bin, "run", "-m", model, "--temperature", "0", "-n", "8", "--ignore-eos")
    once.wait_for(b"tokens of context")
    for image in (ONE, OTHER):
        once.send(f"/image {image}\r".encode())
        once.wait_for(b"has 1 image.")
        once.send(b"And this?\r")
        once.wait_for(b"| context ")
        once.wait_for(b"\r\n")
    once.send(b"/retry\r")
    once.wait_for(b"| context ")
    once.send(f"/save {tmp_path}/a.json\r".encode())
    once.wait_for(b"4 messages saved")
    again = Terminal(tandem_bin, "run", "-m", model, "--temperature", "0", "-n", "8", "--ignore-eos")
    again.wait_for(b"tokens of context")
    again.send(f"/load {tmp_path}/a.json\r/retry\r/save {tmp_path}/b.json\r".encode())
    again.wait_for(b"4 messages saved")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    for terminal in (once, again):
        terminal.send(b"\x04")
        assert terminal.end() == 0


def test_errors(tandem_bin, model, tmp_path):
    nano = ("-m", ROOT / "configs/models/tandem-nano", "--device", "cpu", "-p", "x", "--image", ONE)
    assert "tandem-nano does not see images" in run(tandem_bin, *nano, status=1).stderr
    (tmp_path / "cut.png").write_bytes(ONE.read_bytes()[:300])
    here = ("-m", model, "--device", "cpu", "-p", "x", "--image")
    assert "cut.png: the image is damaged or cut off" in run(tandem_bin, *here, tmp_path / "cut.png", status=1).stderr
    refused = run(tandem_bin, *here, ONE, "--receipt", tmp_path / "r.json", status=2)
    assert "--receipt is of text alone" in refused.stderr
