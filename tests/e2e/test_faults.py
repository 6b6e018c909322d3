"""Workers killed at random under load: every answer comes whole and is its own, and nothing is left.

TANDEM_KILLS says how many (default 8, or 4 under ThreadSanitizer)."""

import concurrent.futures
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx

import pytest
from serving import SANITIZED, Server, make_model, metric, wait_until

pytestmark = [pytest.mark.tsan, pytest.mark.no_asan, pytest.mark.slow]

N_KILLS = int(os.environ.get("TANDEM_KILLS", "4" if SANITIZED else "8"))
N_CLIENTS = 6
# A sanitizer would report a segmentation fault as one of the program's own.
SIGNALS = [signal.SIGKILL] if SANITIZED else [signal.SIGKILL, signal.SIGSEGV]


def ask(server, fields):
    """The choices of the answer, or None: one clear error."""
    body = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, **fields}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=300, trust_env=False)
    if reply.status_code == 200:
        return reply.json()["choices"]
    assert reply.status_code == 503 and reply.headers["retry-after"], reply.text
    assert "try again" in reply.json()["error"]["message"]
    return None


def prompts():
    rng = random.Random(7)
    common = rng.choices(range(3, 900), k=200)
    made = []
    for i in range(12):
        own = rng.choices(range(3, 900), k=1 + 37 * i % 300)
        sampled = {"temperature": 0.9, "seed": i, "presence_penalty": 0.5} if i % 3 == 0 else {}
        made.append({"prompt": (common if i % 2 else []) + own, **sampled})
    return made


def health(server):
    return httpx.get(server.url + "/health", timeout=60, trust_env=False).json()


def children(pid):
    """Those that live, and those that are dead but not buried."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def shared_memory(pid):
    """Each piece of it that a process holds or maps, by inode."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    held = {line.split()[4] for line in maps if "memfd:tandem" in line}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:tandem" in os.readlink(fd):
                held.add(str(fd.stat().st_ino))
        except FileNotFoundError:  # closed meanwhile
            continue
    return held


def holdings(server):
    """What may not grow, over all processes: descriptors and threads of the front, children, pieces of
    shared memory, mappings of it."""
    pid = server.process.pid
    family = [pid, *children(pid)]
    return (
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
        len(family) - 1,
        len(set().union(*map(shared_memory, family))),
        Path(f"/proc/{pid}/maps").read_text().count("memfd:tandem"),
    )


def own_mib(server):
    """Memory of the front's own, in MiB."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def is_within(now, before):
    return all(a <= b for a, b in zip(now, before))


def settle(server):
    wait_until(lambda: health(server)["status"] == "ok" and len(server.workers()) == 2, seconds=60)
    wait_until(lambda: health(server)["running"] == health(server)["waiting"] == 0, seconds=60)


def test_random_kills(tandem_bin, tmp_path):
    model = make_model(tmp_path / "tiny")
    server = Server(tandem_bin, model, "--disaggregate", "on", "--max-batch", "4", "--prefill-chunk", "64")
    asked = prompts()
    expected = [ask(server, fields) for fields in asked]
    settle(server)
    before, mib_before = holdings(server), own_mib(server)
    assert before[2] == 2
    is_over = threading.Event()
    n_whole = [0] * N_CLIENTS
    n_refused = [0] * N_CLIENTS

    def client(number):
        rng = random.Random(number)
        while not is_over.is_set():
            i = rng.randrange(len(asked))
            choices = ask(server, asked[i])
            assert choices is None or choices == expected[i]
            n_whole[number] += choices is not None
            n_refused[number] += choices is None

    rng = random.Random(1)
    n_killed = 0
    with concurrent.futures.ThreadPoolExecutor(N_CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(N_CLIENTS)]
        try:
            while n_killed < N_KILLS and not any(c.done() for c in clients):
                time.sleep(rng.uniform(0, 0.3))
                workers = list(server.workers().values())
                if not workers:
                    continue
                try:
                    os.kill(rng.choice(workers), rng.choice(SIGNALS))
                    n_killed += 1
                except ProcessLookupError:
                    continue
                if n_killed % 2 == 0:  # three that die before they are ready are a failure for good
                    wait_until(lambda: health(server)["status"] == "ok", seconds=60)
        finally:
            is_over.set()
        for c in clients:
            c.result()
    assert n_killed == N_KILLS
    assert sum(n_whole) > 0 and sum(n_refused) <= N_KILLS * N_CLIENTS
    settle(server)
    assert [ask(server, fields) for fields in asked] == expected
    assert metric(server, "kv_cache_usage_perc") == 0  # no page is leaked
    wait_until(lambda: is_within(holdings(server), before))
    if not SANITIZED:  # those keep what was freed for a while
        assert own_mib(server) < mib_before + 16
    pids = [server.process.pid, *children(server.process.pid)]
    server.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
