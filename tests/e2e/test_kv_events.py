"""KV events as a router reads them: with them it knows what the server's prefix cache holds."""

import concurrent.futures
import os
import random
import subprocess
from pathlib import Path

import httpx
import msgpack
import pytest
import zmq

from images import N_TOKENS, part, user
from serving import SANITIZED, Server, cached, make_model, wait_until

PAGE = 64
TOPIC = b"kv@pod@tiny"
END = (1 << 64) - 1
LIBRARY = next((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*.so*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(tandem_bin, model, tmp_path, monkeypatch):
    """Starts servers that publish at tmp_path / "pub", and again at tmp_path / "replay"."""
    monkeypatch.setenv("TANDEM_ZMQ_LIB", str(LIBRARY))
    servers = []

    def begin(*options):
        pub, replay = (f"ipc://{tmp_path}/{name}" for name in ("pub", "replay"))
        server = Server(tandem_bin, model, "--kv-events", pub, "--kv-events-replay", replay, *options)
        servers.append(server)
        return server

    yield begin
    for server in servers:
        server.close()


@pytest.fixture
def sockets(tmp_path):
    """Makes a subscriber, and a socket that asks for replay."""
    context = zmq.Context()

    def connect(kind, name, hwm=0):
        socket = context.socket(kind)
        socket.set_hwm(hwm)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(f"ipc://{tmp_path}/{name}")
        return socket

    yield connect
    context.destroy(linger=0)


def replay(socket, first):
    """The batches from number first on, as pairs of number and payload."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        delimiter, number, payload = socket.recv_multipart()
        assert delimiter == b""
        if number == END.to_bytes(8, "big"):
            assert payload == b""
            return batches
        batches.append((int.from_bytes(number, "big"), payload))


class Index:
    """What a router knows of a server."""

    def __init__(self, socket):
        self.socket, self.next = socket, 0
        self.pages = {}  # by hash: the salt, and all tokens up to its end
        self.batches, self.n_removed = [], 0

    def update(self):
        for number, payload in replay(self.socket, self.next):
            assert number == self.next
            self.next += 1
            self.batches.append((number, payload))
            ts, events, rank = msgpack.unpackb(payload)
            assert ts > 1e9 and events and rank == 0
            for event in events:
                getattr(self, event.pop("type"))(**event)

    def BlockStored(self, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
                    extra_keys=None):
        hashes, parent, tokens = block_hashes, parent_block_hash, token_ids
        assert (block_size, lora_id, medium, lora_name) == (PAGE, None, "GPU", None)
        assert len(tokens) == len(hashes) * PAGE
        salt, before = self.pages[parent] if parent is not None else (None, ())
        if extra_keys is not None:
            assert parent is None and len(extra_keys) == len(hashes) and not any(extra_keys[1:])
            (salt,) = extra_keys[0]
        for i, page in enumerate(hashes):
            before += tuple(tokens[i * PAGE : (i + 1) * PAGE])
            assert page not in self.pages
            self.pages[page] = salt, before

    def BlockRemoved(self, block_hashes, medium):
        assert medium == "GPU"
        self.n_removed += len(block_hashes)
        for page in block_hashes:
            del self.pages[page]

    def AllBlocksCleared(self):
        self.pages.clear()

    def n_cached(self, prompt, salt):
        known, n = set(self.pages.values()), 0
        while n + PAGE < len(prompt) and (salt, tuple(prompt[: n + PAGE])) in known:
            n += PAGE
        return n


def complete(server, prompt, salt, **headers):
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    if salt:
        body["cache_salt"] = salt
    reply = httpx.post(server.url + "/v1/completions", json=body, headers=headers, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def prompts(rng, n):
    """Prompts that often begin as others do, with a salt each."""
    stems = [rng.choices(range(3, 900), k=400) for _ in range(24)]
    for _ in range(n):
        stem = rng.choice(stems)
        tail = rng.choices(range(3, 900), k=rng.randrange(80))
        yield stem[: rng.randrange(400)] + tail + [5], rng.choice([None, None, "one", "another"])


@pytest.mark.parametrize("n, options", [(400, ()), (100, ("--cache-output", "--disaggregate", "off"))])
def test_the_index_is_the_cache(start, sockets, n, options):
    at_once, n = (4, 40) if SANITIZED else (8, n)
    server = start("--max-batch", str(at_once), "--ctx-size", "512", "--kv-cache-tokens", str(768 * at_once),
                   "--kv-events-topic", TOPIC.decode(), *options)  # fmt: skip
    subscriber, index = sockets(zmq.SUB, "pub"), Index(sockets(zmq.DEALER, "replay"))
    idle = sockets(zmq.SUB, "pub", hwm=1)  # never reads: nobody waits for it
    rng = random.Random(len(options))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for part in range(4):
            list(pool.map(lambda p: complete(server, *p), prompts(rng, n // 4)))
            index.update()
            for prompt, salt in prompts(rng, 5 if SANITIZED else 15):
                expected = index.n_cached(prompt, salt)
                assert cached(complete(server, prompt, salt)) == expected
                assert cached(complete(server, prompt, salt)) == (len(prompt) - 1) // PAGE * PAGE
                index.update()
    assert index.n_removed > n // 4
    assert {salt for salt, _ in index.pages.values()} == {None, "one", "another"}
    # The subscriber was there from the start, and was sent the same.
    received = []
    while not received or received[-1][0] + 1 < index.next:
        topic, number, payload = subscriber.recv_multipart()
        assert topic == TOPIC
        received.append((int.from_bytes(number, "big"), payload))
    assert received == index.batches[received[0][0] :]
    assert idle.closed is False
    assert replay(index.socket, index.next - 3) == index.batches[-3:]
    assert replay(index.socket, index.next) == replay(index.socket, END) == []
    index.socket.send_multipart([b"", b"short"])  # no request: it is not answered
    index.socket.send_multipart([b"", b"", b"", b"1" * 300])
    assert replay(index.socket, index.next - 1) == index.batches[-1:]


def test_callers_apart(start, sockets, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    server = start("--cache-per-key", "--api-keys", str(keys), "--ctx-size", "2048")
    index = Index(sockets(zmq.DEALER, "replay"))
    prompt = list(range(3, 3 + 3 * PAGE + 1))
    for key in ["first", "second"]:
        assert cached(complete(server, prompt, None, Authorization=f"Bearer {key}")) == 0
    complete(server, prompt, "given", Authorization="Bearer first")
    index.update()
    salts = {salt for salt, _ in index.pages.values()}
    assert len(index.pages) == 9 and len(salts) == 3  # a hash each
    assert all(len(salt) == 16 and int(salt, 16) for salt in salts)  # a key's salt is not told


def test_what_is_lost(start, sockets):
    """When the model is unloaded, so is its cache."""
    server = start("--sleep-after", "0.2", "--ctx-size", "2048")
    index = Index(sockets(zmq.DEALER, "replay"))
    prompt = list(range(3, 3 + 3 * PAGE + 1))
    for _ in range(2):
        assert cached(complete(server, prompt, None)) == 0
        index.update()
        wait_until(lambda: server.log().count("unloaded") > len(index.batches) // 2 - 1)
        wait_until(lambda: index.update() or not index.pages)
    tags = [event["type"] for _, payload in index.batches for event in msgpack.unpackb(payload)[1]]
    assert tags == ["BlockStored", "AllBlocksCleared"] * 2


def test_errors(tandem_bin, model, tmp_path):
    def refused(*options, library=LIBRARY):
        run = subprocess.run(
            [tandem_bin, "serve", "--model", model, "--port", "0", "--device", "cpu", *options],
            env={**os.environ, "TANDEM_ZMQ_LIB": str(library)},
            capture_output=True,
            text=True,
        )
        assert run.returncode != 0
        return run.stderr

    assert "install libzmq5" in refused("--kv-events", "tcp://*:5557", library=tmp_path / "none")
    assert "--kv-events nowhere: " in refused("--kv-events", "nowhere")
    pub = f"ipc://{tmp_path}/pub"
    assert "--kv-events-replay ipc:///nowhere/at/all: " in refused(
        "--kv-events", pub, "--kv-events-replay", "ipc:///nowhere/at/all"
    )
    assert "--kv-events-replay needs --kv-events" in refused("--kv-events-replay", pub)
    assert "--kv-events-topic needs --kv-events" in refused("--kv-events-topic", "x")


def test_images_are_told_apart(tandem_bin, sockets, tmp_path, tmp_path_factory, monkeypatch):
    """Blocks say which images they have a part of, as vLLM's do: hash, and where it begins."""
    monkeypatch.setenv("TANDEM_ZMQ_LIB", str(LIBRARY))
    model = make_model(tmp_path_factory.mktemp("models") / "seeing", "tiny-qwen3-vl")
    pub, again = (f"ipc://{tmp_path}/{name}" for name in ("pub", "replay"))
    server = Server(tandem_bin, model, "--kv-events", pub, "--kv-events-replay", again, "--ctx-size", "2048")
    events = []
    try:
        images = [part(1), part(2), part(1)]
        for salt in None, "apart":
            body = {"messages": [user("a " * 40, *images, "b " * 40)], "max_tokens": 1, "cache_salt": salt}
            reply = httpx.post(server.url + "/v1/chat/completions", json=body).json()
        ids = httpx.post(server.url + "/tokenize", json=body).json()["tokens"]
        batches = replay(sockets(zmq.DEALER, "replay"), 0)
        events = [event for _, payload in batches for event in msgpack.unpackb(payload)[1]]
    finally:
        server.close()
    places = [i for i, token in enumerate(ids) if token == ids[60] and ids[i - 1] != token]
    assert len(places) == len(images) and reply["usage"]["prompt_tokens"] == len(ids)
    for salt in None, "apart":
        blocks = []
        while len(blocks) < len(ids) // PAGE:
            event = events.pop(0)
            blocks += zip(event["extra_keys"] or [], [event["token_ids"][i:] for i in range(0, 9999, PAGE)])
        hashes = {}
        for i, (extra, tokens) in enumerate(blocks):
            assert tokens[:PAGE] == ids[i * PAGE : (i + 1) * PAGE]
            ends = [at + N_TOKENS > i * PAGE and at < (i + 1) * PAGE for at in places]
            wanted = [(n, at - i * PAGE) for n, at in enumerate(places) if ends[n]]
            keys = extra or []
            if i == 0 and salt:
                assert keys.pop() == salt
            assert [offset for _, offset in keys] == [offset for _, offset in wanted]
            for (n, _), (name, _) in zip(wanted, keys):
                assert hashes.setdefault(n, name) == name and len(name) == 64
        assert hashes[0] == hashes[2] != hashes[1]
