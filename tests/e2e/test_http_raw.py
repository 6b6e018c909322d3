"""The wire rules of the HTTP API, on raw sockets."""

import concurrent.futures
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from serving import SANITIZED, Server, Wire, events, make_model, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, "max_tokens": 12}
STREAM = {**HELLO, "stream": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", shape="tiny-qwen3")


@pytest.fixture(scope="module")
def server(tandem_bin, model):
    running = Server(tandem_bin, model)
    yield running
    running.close()


def post(server, body, path=CHAT, *headers):
    with Wire(server) as wire:
        wire.post(path, body, *headers)
        return wire.response()


def error_of(server, body, path=CHAT, *headers):
    """The error of a request that must be refused with 400 and nothing else."""
    status, response_headers, text = post(server, body, path, *headers)
    assert status == 400, (body, text)
    assert response_headers["content-type"] == "application/json"
    error = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    return error


def test_shape_of_a_stream(server):
    status, headers, body = post(server, {**STREAM, "stream_options": {"include_usage": True}})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    *data, done = events(body)
    assert done == "[DONE]"
    chunks = [json.loads(d) for d in data]
    assert len({c["id"] for c in chunks}) == 1
    assert len({c["created"] for c in chunks}) == 1
    assert all(isinstance(c["created"], int) for c in chunks)
    assert all(c["object"] == "chat.completion.chunk" and c["model"] == "tiny" for c in chunks)
    *rest, usage = chunks
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    assert all("usage" not in c for c in rest)
    choices = [choice for c in rest for choice in c["choices"]]
    assert all(choice["index"] == 0 for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert all(choice["delta"].get("content", "x") != "" for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length" and choices[-1]["delta"] == {}


def test_shape_of_a_completion_stream(server):
    body = {"prompt": "Hello", "max_tokens": 6, "stream": True, "ignore_eos": True}
    *data, done = events(post(server, body, "/v1/completions")[2])
    assert done == "[DONE]"
    choices = [json.loads(d)["choices"][0] for d in data]
    assert all(json.loads(d)["object"] == "text_completion" for d in data)
    assert all(isinstance(choice["text"], str) for choice in choices)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]


def test_connection_is_kept_over_streams(server):
    with Wire(server) as wire:
        for body in (STREAM, HELLO, STREAM):
            wire.post(CHAT, body)
            assert wire.response()[0] == 200


def test_pipelined_requests_are_answered_in_order(server):
    with Wire(server) as wire:
        wire.post(CHAT, {**HELLO, "max_tokens": 40, "temperature": 0})
        wire.post(CHAT, STREAM)
        wire.send(f"GET /health HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n")
        assert json.loads(wire.response()[2])["usage"]["completion_tokens"] == 40
        assert wire.response()[2].endswith(b"data: [DONE]\n\n")
        assert json.loads(wire.response()[2])["status"] == "ok"


def test_http_1_0_streams_without_chunks(server):
    with Wire(server) as wire:
        wire.post(CHAT, STREAM, version="1.0")
        status, headers = wire.head()
        assert status == 200 and "transfer-encoding" not in headers
        assert headers["connection"] == "close"
        assert events(wire.rest())[-1] == "[DONE]"


def test_expect_100_continue(server):
    body = json.dumps(HELLO).encode()
    with Wire(server) as wire:
        wire.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
        )
        assert wire.head()[0] == 100
        wire.send(body)
        assert wire.response()[0] == 200


def test_chunked_body(server):
    body = json.dumps(HELLO).encode()
    with Wire(server) as wire:
        wire.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        )
        for i in range(0, len(body), 7):
            piece = body[i : i + 7]
            wire.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        wire.send("0\r\n\r\n")
        assert wire.response()[0] == 200


BAD_BODIES = {
    "empty": b"",
    "no JSON": b"hello",
    "trailing garbage": json.dumps(HELLO).encode() + b" x",
    "two values": json.dumps(HELLO).encode() * 2,
    "no object": b"[]",
    "messages null": {"messages": None},
    "messages a string": {"messages": "hi"},
    "messages of numbers": {"messages": [123]},
    "messages of nothing": {"messages": [{}]},
    "role a number": {"messages": [{"role": 1, "content": "x"}]},
    "content a number": {"messages": [{"role": "user", "content": 1}]},
    "unknown format": {**HELLO, "response_format": {"type": "yaml"}},
    "schema no object": {
        **HELLO,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}},
    },
    "top_logprobs alone": {**HELLO, "top_logprobs": 2},
    "top_logprobs above 20": {**HELLO, "logprobs": True, "top_logprobs": 21},
    "stream_options alone": {**HELLO, "stream_options": {"include_usage": True}},
    "seed beyond int64": {**HELLO, "seed": 2**63},
    "tool_choice alone": {**HELLO, "tool_choice": "auto"},
    "tool_choice absent tool": {
        **HELLO,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "n zero": {**HELLO, "n": 0},
    "temperature negative": {**HELLO, "temperature": -0.5},
    "stop too many": {**HELLO, "stop": [str(i) for i in range(33)]},
    "invalid UTF-8": b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
    "raw NUL": b'{"messages":[{"role":"user","content":"\x00"}]}',
    "deep nesting": b'{"a":' + b"[" * 100 + b"]" * 100 + b"}",
    "number too large": b'{"temperature":1e999}',
}


BAD_STREAMS = {
    f"{name}, streamed": {**body, "stream": True}
    for name, body in BAD_BODIES.items()
    if isinstance(body, dict) and name != "stream_options alone"
}


@pytest.mark.parametrize("body", [pytest.param(b, id=n) for n, b in (BAD_BODIES | BAD_STREAMS).items()])
def test_bad_bodies_get_a_clean_400(server, body):
    error_of(server, body)
    assert post(server, HELLO)[0] == 200  # and nothing is broken after it


def test_what_names_no_character_becomes_u_fffd(server):
    def prompt(content):
        body = b'{"messages":[{"role":"user","content":"%s"}]}' % content
        with Wire(server) as wire:
            wire.post("/apply-template", body)
            status, _, answer = wire.response()
            assert status == 200
            return json.loads(answer)["prompt"]

    want = prompt("a\ufffdb".encode())
    for content in b"a\\u0000b", b"a\\ud83db", b"a\\ude00b":
        assert prompt(content) == want
    assert "\U0001f600" in prompt(b"\\ud83d\\ude00")


def test_of_duplicate_keys_the_first_wins(server):
    body = json.dumps(HELLO)[:-1] + ', "max_tokens": 3, "max_tokens": 4}'
    usage = json.loads(post(server, body.encode())[2])["usage"]
    assert usage["completion_tokens"] == 12


def test_content_types(server):
    def status(*headers):
        with Wire(server) as wire:
            body = json.dumps(HELLO)
            wire.send(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                + "".join(h + "\r\n" for h in headers)
                + "\r\n"
                + body
            )
            return wire.response()[0]

    assert status("Content-Type: application/json; charset=utf-8") == 200
    assert status("content-type: Application/JSON") == 200
    assert status() == 200
    assert status("Content-Type: text/plain") == 200
    assert status("Content-Type: text/plain", "Origin: http://localhost") == 200  # its own page
    assert status("Content-Type: application/x-www-form-urlencoded") == 200  # curl without -H
    assert status("Content-Type: multipart/form-data; boundary=x") == 400
    # A page of another site that hides its type.
    for foreign in "http://evil.example", "http://localhost.evil.example", "http://localhost:1", "null":
        assert status(f"Origin: {foreign}") == 400
        for hidden in "text/plain", "application/x-www-form-urlencoded":
            assert status(f"Content-Type: {hidden}", f"Origin: {foreign}") == 400
    assert status("Content-Type: application/json", "Content-Encoding: gzip") == 415


def test_routes(server):
    def get(line, host="localhost"):
        with Wire(server) as wire:
            wire.send(f"{line} HTTP/1.1\r\nHost: {host}\r\n\r\n")
            status, headers, body = wire.response()
            return status, headers, json.loads(body)

    assert get("GET /health")[0] == 200
    assert get("GET /v1/models")[2]["data"][0]["id"] == "tiny"
    assert get("GET /v1/models/tiny")[0] == 200
    status, headers, body = get("GET /v1/chat/completions")
    assert status == 405 and headers["allow"] == "POST"
    assert body["error"]["code"] == "method_not_allowed" and headers["x-request-id"]
    status, headers, body = get("DELETE /v1/models")
    assert status == 405 and headers["allow"] == "GET, HEAD"
    assert body["error"]["message"] == "DELETE is not allowed for /v1/models: use GET, HEAD"
    status, headers, body = get("GET /v2")
    assert status == 404 and body["error"]["message"] == "there is no endpoint /v2"
    assert headers["x-request-id"]
    assert get("GET /v1/models/")[2]["data"][0]["id"] == "tiny"
    for path in ("/status/", "/v1/models/tiny/", "/v1/models//"):
        assert get(f"GET {path}")[0] == 404
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/v1/chat/completions/"):
        status, headers, body = get(f"POST {path}")
        assert status == 404 and headers["x-request-id"]
        assert body["error"]["message"] == f"there is no endpoint {path}: did you mean {CHAT}?"
    assert "\ufffd" in get("GET /%ff" + "x" * 500)[2]["error"]["message"]
    assert get("GET /v1/models/other")[0] == 404
    status, headers, body = get("GET /v1/models", host="evil.example")
    assert status == 403 and body["error"]["type"] == "permission_error"
    assert "access-control-allow-origin" not in get("GET /health")[1]


def test_the_page_is_of_files_and_lets_nothing_else_run(server):
    def get(path):
        with Wire(server) as wire:
            wire.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return wire.response()

    _, _, html = get("/")
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', html.decode())
    assert {name.rsplit(".", 1)[1] for name in files} == {"css", "js"}
    for path, kind in [("", "text/html"), *((f, "css" if f.endswith("css") else "javascript") for f in files)]:
        status, headers, body = get("/" + path)
        policy = headers["content-security-policy"]
        assert status == 200 and kind in headers["content-type"] and body
        assert "default-src 'none'" in policy and "unsafe" not in policy and "trusted-types 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert b"<script>" not in html and b" on" not in re.sub(rb">[^<]*<", b"><", html)
    assert get("/page/other.js")[0] == 404
    assert get("/page/..%2finfo.c")[0] == 404


def test_malformed_requests_get_json(server):
    for request, status in [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\nHost: a\n\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03", 400),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 60000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n", 413),
    ]:
        with Wire(server) as wire:
            wire.send(request)
            got, headers, body = wire.response()
            assert got == status, request[:60]
            assert headers["connection"] == "close"
            assert json.loads(body)["error"]["message"]
            assert wire.rest() == b""


def test_headers_come_before_the_first_token_and_comments_keep_the_stream_alive(server):
    """One stream per slot keeps the worker busy, so that the last one has to wait."""
    busy = [Wire(server) for _ in range(16)]
    for wire in busy:
        wire.post(CHAT, {**STREAM, "max_tokens": 6000})
    for wire in busy:
        assert wire.head()[0] == 200
    with Wire(server) as wire:
        begun = time.monotonic()
        wire.post(CHAT, STREAM)
        assert wire.head()[0] == 200
        wire.until(b":\n\n")
        assert time.monotonic() - begun > 1.5
        for other in busy:
            other.socket.close()
        wire.until(b"data: [DONE]\n\n")


def test_slow_reader_holds_nobody_up(server):
    """A client that never reads its long stream; others go on as if it were not there."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    body = json.dumps({**STREAM, "max_tokens": 8000, "logprobs": True, "top_logprobs": 20})
    slow.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    for _ in range(5):
        assert post(server, STREAM)[0] == 200
    slow.close()
    wait_until(lambda: json.loads(health(server))["running"] == 0)


def health(server):
    with Wire(server) as wire:
        wire.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return wire.response()[2]


def test_disconnects_in_every_phase(server):
    full = json.dumps({**STREAM, "max_tokens": 5000})
    for cut in ("head", "body", "prefill", "stream"):
        with Wire(server) as wire:
            if cut == "head":
                wire.send("POST /v1/chat")
            elif cut == "body":
                wire.send(
                    f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(full)}\r\n\r\n{{"
                )
            else:
                wire.post(CHAT, full.encode())
                if cut == "stream":
                    wire.until(b"data: ")
        wait_until(lambda: json.loads(health(server))["running"] == 0)
    assert post(server, HELLO)[0] == 200


def test_chat_page(server):
    with Wire(server) as wire:
        wire.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, headers, body = wire.response()
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert body.startswith(b"<!doctype html>") and body.endswith(b"</html>\n")


def test_more_connections_than_descriptors(tandem_bin, model):
    """Beyond the limit clients are turned away, without spinning; afterwards all is well."""
    running = Server(tandem_bin, model, descriptors=96)
    try:
        held = []
        for _ in range(120):
            try:
                held.append(socket.create_connection(("127.0.0.1", running.port), timeout=5))
            except OSError:
                pass
        time.sleep(0.3)
        before = running.cpu_seconds()
        time.sleep(1)
        assert running.cpu_seconds() - before < 0.5
        for client in held:
            client.close()
        wait_until(lambda: post_quietly(running, HELLO) == 200)
    finally:
        running.close()


def memory_mib(server, field):
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", text).group(1)) / 1024


def test_hostile_bodies_cost_little_memory(tandem_bin, model):
    """Large bodies that stand still, one of many tiny values, and a text of a thousand contexts."""
    less = 8 if SANITIZED else 1  # whose memory is another, so that sizes tell nothing
    server = Server(tandem_bin, model)
    start = memory_mib(server, "VmRSS")
    peak = lambda: 0 if SANITIZED else memory_mib(server, "VmHWM") - start
    wires = [Wire(server) for _ in range(24)]
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {32 << 20}"
    for wire in wires:
        with contextlib.suppress(OSError):  # some are refused at once
            wire.send(head.replace("Host: x", f"Host: 127.0.0.1:{server.port}") + "\r\n\r\n")
            wire.send(b'{"prompt": "' + b"x" * ((31 << 20) // less))
    assert peak() < 320  # of 744 MiB
    for wire in wires:
        wire.socket.close()
    wait_until(lambda: SANITIZED or memory_mib(server, "VmRSS") - start < 32)
    status, _, body = post(server, b'{"prompt": [' + b"1," * (12_000_000 // less) + b"1]}", COMPLETIONS)
    assert status == 400 and "JSON values" in json.loads(body)["error"]["message"]
    status, _, body = post(server, {"prompt": "some words " * (1_000_000 // less)}, COMPLETIONS)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["n_prompt_tokens"] == 5_000_000 // less + 1  # all are counted, few are kept
    assert peak() < 320
    wait_until(lambda: SANITIZED or memory_mib(server, "VmRSS") - start < 32)
    server.close()


@pytest.mark.no_asan
def test_a_large_prompt_costs_little_more_than_its_bytes(tandem_bin, model):
    """Words, one word without end, control tokens, and several at once, which take turns."""
    server = Server(tandem_bin, model)
    start = memory_mib(server, "VmRSS")
    bodies = [{"prompt": text * ((24 << 20) // len(text))} for text in ("some words ", "x", "<|im_end|>")]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for status, _, body in pool.map(lambda b: post(server, b, COMPLETIONS), bodies * 2):
            assert status == 400
            error = json.loads(body)["error"]
            assert (error["code"], error["n_prompt_tokens"] > 1 << 20) == ("context_length_exceeded", True)
    # Six bodies of 24 MiB, and for one of them what tokenizing takes.
    assert SANITIZED or memory_mib(server, "VmHWM") - start < 6 * 24 + 3 * 24
    server.close()


def test_idle_connections_keep_nobody_out(tandem_bin, model):
    """As many as there may be, each used and kept: new ones are served, and so is who watches."""
    server = Server(tandem_bin, model, descriptors=200)  # 136 connections
    request = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    wires = []
    for _ in range(200):
        wires.append(Wire(server))
        wires[-1].send(request)
        assert wires[-1].response()[0] == 200
    for path in ("/health", "/metrics", "/v1/models"):
        assert httpx.get(server.url + path, trust_env=False).status_code == 200
    assert post(server, {"prompt": "x", "max_tokens": 1}, COMPLETIONS)[0] == 200
    server.close()


def post_quietly(server, body):
    """The status, or 0 when the connection was dropped."""
    try:
        return post(server, body)[0]
    except (OSError, AssertionError):
        return 0


@pytest.mark.slow
def test_a_stream_outlives_its_worker(tandem_bin, model):
    running = Server(tandem_bin, model)
    try:
        with Wire(running) as wire:
            wire.post(CHAT, {**STREAM, "max_tokens": 2000, "ignore_eos": True})
            wire.until(b"content")
            wire.until(b"data: ")
            running.kill_worker()
            rest = wire.until(b"0\r\n\r\n")
            assert b'"error"' not in rest
            assert b"[DONE]" in rest
        wait_until(lambda: post_quietly(running, HELLO) == 200)
    finally:
        running.close()


def test_port_in_use(tandem_bin, model, server):
    other = subprocess.run(
        [tandem_bin, "serve", "--model", model, "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert other.returncode == 1
    assert "in use" in other.stderr and str(server.port) in other.stderr


# -- requests that wait to be prepared ------------------------------------------------------------

COSTLY = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 25000}


@contextlib.contextmanager
def flood(server, n, address="127.0.0.1"):
    """n connections from an address, each with a request that takes long to be refused."""
    with contextlib.ExitStack() as stack:
        wires = []
        for _ in range(n):
            wires.append(stack.enter_context(Wire(server, source=address)))
            wires[-1].post(CHAT, COSTLY)
        yield wires


def n_answered(wires):
    """How many have their answer already."""
    for wire in wires:
        wire.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            wire._more()
    return sum(bool(wire.buffer) for wire in wires)


def test_a_flood_costs_others_one_body(tandem_bin, model):
    n = 12
    running = Server(tandem_bin, model)
    try:
        with flood(running, n) as wires, Wire(running, source="127.0.0.2") as polite:
            wires[0].head()  # the others wait
            polite.post(CHAT, COSTLY)
            assert polite.head()[0] == 400
            assert n_answered(wires[1:]) < n / 2
        # Those that waited cost nothing any more.
        before = running.cpu_seconds()
        assert post(running, COSTLY)[0] == 400
        alone = running.cpu_seconds() - before
        with flood(running, n) as wires:
            wires[0].head()
        before = running.cpu_seconds()
        assert post(running, COSTLY)[0] == 400
        assert running.cpu_seconds() - before < alone * n / 3
    finally:
        running.close()


def test_the_end_of_a_drain_drops_bodies(tandem_bin, model):
    running = Server(tandem_bin, model, "--drain-timeout", "1")
    with flood(running, 24) as wires:
        wires[0].head()
        running.signal()
        statuses = [wire.head()[0] for wire in wires[1:]]
        assert set(statuses) <= {400, 503} and statuses[-1] == 503
        assert running.wait() == 0


def test_too_few_descriptors(tandem_bin, model):
    for n in (7, 9, 12, 16, 18, 20):
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))
        command = [tandem_bin, "serve", "--model", model, "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
        assert done.returncode == 1 and "oo many open files" in done.stderr, (n, done.stderr)


def test_few_descriptors_refuse_connections(tandem_bin, model):
    """None is reset: each gets an answer, and /health one."""
    for n in (64, 128):
        running = Server(tandem_bin, model, descriptors=n)
        try:
            with contextlib.ExitStack() as stack:
                wires = []
                for _ in range(2 * n):
                    wires.append(stack.enter_context(Wire(running)))
                    wires[-1].post(CHAT, {**STREAM, "max_tokens": 4000})
                answers = [wire.head() for wire in wires]
                refused = [headers for status, headers in answers if status == 503]
                assert {status for status, _ in answers} == {200, 503}
                assert len(refused) < 2 * n - n / 4 and all("retry-after" in headers for headers in refused)
                assert httpx.get(running.url + "/health", trust_env=False).status_code == 200
        finally:
            running.close()


def test_what_is_no_socket_is_left_alone(tandem_bin, model, tmp_path):
    def error_of(path):
        command = [tandem_bin, "serve", "--model", model, "--host", f"unix:{path}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode in (1, 2)
        return done.stderr

    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(file)
    for path in (file, link, tmp_path):
        assert f"{path} exists and is not a socket" in error_of(path)
    assert link.is_symlink() and file.read_text() == "mine"
    assert "its folder is absent" in error_of(tmp_path / "absent" / "s")
    assert "give unix:PATH" in error_of("")


def test_unix_socket(tandem_bin, model, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:  # as by a server that was killed
        killed.bind(str(path))
    running = Server(tandem_bin, model, "--host", f"unix:{path}")
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        command = [tandem_bin, "serve", "--model", model, "--host", f"unix:{path}"]
        assert "in use" in subprocess.run(command, capture_output=True, text=True).stderr
        assert path.is_socket()
    finally:
        running.close()
    assert not path.exists()


def test_ipv6(tandem_bin, model):
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    running = Server(tandem_bin, model, "--host", "::1")
    try:
        assert running.url.startswith("http://[::1]:")
        with socket.create_connection(("::1", running.port)) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    finally:
        running.close()
