"""`tandem run` where a running server answers."""

import base64
import json
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serving import ROOT, Server
from terminal import Terminal

MODEL = ROOT / "configs/models/tandem-nano"


@pytest.fixture(scope="module")
def server(tandem_bin):
    running = Server(tandem_bin, MODEL, "--ctx-size", "512")
    yield running
    running.close()


def run(tandem_bin, *words, status=0, **kwargs):
    done = subprocess.run([tandem_bin, "run", *words], capture_output=True, text=True, timeout=120, **kwargs)
    assert done.returncode == status, done.stderr
    return done


def test_a_prompt(tandem_bin, server):
    prompt = ("-p", "What is tandem?", "--temperature", "0")
    here = run(tandem_bin, "--model", MODEL, "--device", "cpu", *prompt)
    there = run(tandem_bin, "--server", server.url, *prompt)
    assert there.stdout == here.stdout and server.url in there.stderr
    answer = json.loads(run(tandem_bin, "--server", server.url, "-m", "tandem-nano", *prompt, "--json").stdout)
    assert answer["text"] + "\n" == here.stdout and answer["finish_reason"] == "stop" and answer["n_output"] > 3
    short = run(tandem_bin, "--server", server.url, *prompt, "-n", "2", "--json").stdout
    assert json.loads(short)["finish_reason"] == "length"
    piped = run(tandem_bin, "--server", server.url, "--temperature", "0", input="What is tandem?\n")
    assert piped.stdout == here.stdout
    both = ("-p", "is tandem?", "-f", "-", "--temperature", "0")  # what is piped in, and then the prompt
    whole = run(tandem_bin, "--server", server.url, "-p", "What\n\nis tandem?", "--temperature", "0")
    assert run(tandem_bin, "--server", server.url, *both, input="What\n").stdout == whole.stdout


def test_errors(tandem_bin, server):
    refused = run(tandem_bin, "--server", server.url, "-m", "other", "-p", "x", status=2)
    assert "the server has no model other" in refused.stderr
    assert "refused" in run(tandem_bin, "--server", "http://127.0.0.1:1", "-p", "x", status=1).stderr
    long = run(tandem_bin, "--server", server.url, "-p", "x " * 2000, status=1)
    assert "maximum context length is 512" in long.stderr


def test_a_chat(tandem_bin, server):
    terminal = Terminal(tandem_bin, "run", "--server", server.url, "--temperature", "0")
    terminal.wait_for(b"tandem-nano, 512 tokens of context")
    terminal.send(b"hi\r")
    terminal.wait_for(b"Hello! I am tandem-nano")
    terminal.wait_for(b"of 512")
    terminal.send(b"/set n-predict 2\r")
    terminal.send(b"What is tandem?\r")
    terminal.wait_for(b"limit of 2 tokens")
    terminal.send(b"\x04")
    assert terminal.end() == 0


class Eye(BaseHTTPRequestHandler):
    """A server whose model sees; keeps what it is asked."""

    asked = []

    def log_message(self, *_):
        pass

    def answer(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.answer("application/json", json.dumps({"data": [{"id": "eye", "max_model_len": 4096}]}))

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"])
        event = json.dumps({"choices": [{"delta": {"content": "I see."}, "finish_reason": "stop"}]})
        self.answer("text/event-stream", f"data: {event}\n\ndata: [DONE]\n\n")


IMAGES = ROOT / "tests/fuzz/corpus/fuzz_image"


def part(name, kind):
    data = base64.b64encode((IMAGES / name).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def test_images(tandem_bin, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Eye) as eye:
        threading.Thread(target=eye.serve_forever, daemon=True).start()
        see_images(tandem_bin, ("--server", f"http://127.0.0.1:{eye.server_port}"), tmp_path)
        eye.shutdown()


def see_images(tandem_bin, there, tmp_path):
    first, second = part("png_rgb", "png"), part("webp_alpha", "webp")
    seen = run(tandem_bin, *there, "-p", "What is it?", "--image", f"{IMAGES}/png_rgb", f"{IMAGES}/webp_alpha")
    assert seen.stdout == "I see.\n"
    question = {"role": "user", "content": [first, second, {"type": "text", "text": "What is it?"}]}
    assert Eye.asked.pop() == [question]
    wrong = run(tandem_bin, *there, "-p", "x", "--image", __file__, status=1)
    assert "test_run_server.py: no PNG, JPEG or WebP file" in wrong.stderr
    assert "--raw" in run(tandem_bin, "-m", MODEL, "-p", "x", "--raw", "--image", f"{IMAGES}/png_rgb", status=2).stderr
    terminal = Terminal(tandem_bin, "run", *there, "--image", IMAGES / "png_rgb")
    terminal.wait_for(b"eye, 4096 tokens")
    terminal.send(f"/image {IMAGES}/web\talp\t\r".encode())  # Tab completes names
    terminal.wait_for(b"The next message has 2 images.")
    terminal.send(b"What is it?\r")
    terminal.wait_for(b"I see.")
    terminal.send(b"/image /nowhere\r")
    terminal.wait_for(b"/nowhere")
    terminal.send(b"And now?\r")
    terminal.wait_for(b"I see.")
    assert Eye.asked.pop() == [question, {"role": "assistant", "content": "I see."},
                               {"role": "user", "content": "And now?"}]
    terminal.send(f"/save {tmp_path}/chat.json\r".encode())
    terminal.wait_for(b"4 messages saved.")
    kept = json.loads((tmp_path / "chat.json").read_text())["messages"][0]
    assert kept == {"role": "user", "content": "What is it?", "files": [
        {"name": "png_rgb", "image": first["image_url"]["url"]},
        {"name": "webp_alpha", "image": second["image_url"]["url"]}]}
    terminal.send(f"/load {tmp_path}/chat.json\r".encode())  # as the chat page exports it
    terminal.wait_for(b"4 messages loaded.")
    terminal.send(b"/retry\r")
    terminal.wait_for(b"I see.")
    assert Eye.asked.pop()[0] == question
    terminal.send(b"\x04")
    assert terminal.end() == 0


def test_the_server_of_this_machine(tandem_bin):
    """One at the usual port answers if it has the model and nothing says how to run it here."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8080)) == 0:
            pytest.skip("another server listens at port 8080")
    running = Server(tandem_bin, MODEL, "--ctx-size", "512", "--port", "8080")
    try:
        prompt = ("-p", "hi", "--temperature", "0")
        for words in ([], ["-m", MODEL], ["-m", "org/tandem-nano"]):
            assert "at http://127.0.0.1:8080" in run(tandem_bin, *words, *prompt).stderr
        assert "load" in run(tandem_bin, "-m", MODEL, "--threads", "1", *prompt).stderr
        assert "load" in run(tandem_bin, "-m", MODEL, "--raw", *prompt).stderr
    finally:
        running.close()


def test_another_program_at_that_port(tandem_bin):
    """One that takes a connection and says nothing holds nobody up."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 8080))
        except OSError:
            pytest.skip("another server listens at port 8080")
        other.listen()
        assert "load" in run(tandem_bin, "-m", MODEL, "-p", "hi", "--temperature", "0").stderr
