#!/usr/bin/env python3
"""Keeps a server under mixed load for as long as told, and says each minute what it costs.

All APIs are asked for greedy answers, which must equal those of the quiet server at the start, bit for bit,
while workers are killed, models take turns and sleep, clients leave, and the disk of --kv-dir is full now and
then. A line a minute: requests, wrong answers, errors, MiB and descriptors of the front and its workers. Exits
with 1 on a wrong answer, an error that a client should not see, or a trend of memory or descriptors.

    scripts/soak.py --binary build/bin/tandem --hours 24
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from serving import Server  # noqa: E402

NAMES = ["alpha", "beta", "gamma"]
GROWTH, SLACK_MIB, SLACK_DESCRIPTORS = 1.1, 8, 16  # that are no trend
BUSY = {429, 503}  # an answer that says to come again
ASKED = ["What is tandem?", "What is 12 + 30?", "Which models can it run?", "Tell me of experts. " * 40,
         "What is a KV page? " * 12, "Say hello."]


class Load:
    """What the clients have seen."""

    def __init__(self, server):
        self.server, self.lock = server, threading.Lock()
        self.expected, self.n, self.wrong, self.failed, self.busy = {}, 0, 0, [], 0
        self.is_over = threading.Event()

    def send(self, path, body, leave_after=None, timeout=300):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.server.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.read(leave_after) if leave_after else reply.read().decode()

    def check(self, key, text):
        with self.lock:
            self.n += 1
            if self.expected.setdefault(key, text) != text:
                self.wrong += 1
                print(f"WRONG {key}: {text!r} instead of {self.expected[key]!r}", flush=True)

    def ask(self, kind, model, asked):
        path, body, read = KINDS[kind]
        try:
            text = read(self.send(path, {**body(asked), "model": model}))
        except urllib.error.HTTPError as error:
            with self.lock:
                if error.code in BUSY:
                    self.busy += 1
                else:
                    self.failed.append(f"{kind}: {error.code} {error.read()[:200]}")
            time.sleep(0.2)
        except Exception as error:  # a connection that broke, an answer that ended early
            with self.lock:
                self.failed.append(f"{kind}: {error!r}")
        else:
            self.check((kind, asked[:30], len(asked)), text)

    def client(self, seed):
        rng = random.Random(seed)
        while not self.is_over.is_set():
            model = NAMES[int(time.monotonic() / 20) % len(NAMES)] if rng.random() < 0.9 else rng.choice(NAMES)
            if rng.random() < 0.05:  # leaves amid the answer
                body = {"model": model, "prompt": "tandem", "max_tokens": 400, "stream": True}
                try:
                    self.send("/v1/completions", body, leave_after=200)
                except OSError:
                    pass
                continue
            self.ask(rng.choice(list(KINDS)), model, rng.choice(ASKED))


def streamed(read):
    def whole(text):
        lines = (line.removeprefix("data: ") for line in text.split("\n"))
        return "".join(read(json.loads(line)) for line in lines if line.startswith("{"))

    return whole


def chat(**more):
    return lambda asked: {"messages": [{"role": "user", "content": asked}], "max_tokens": 24, "temperature": 0, **more}


def of(*keys):
    def read(text):
        value = json.loads(text)
        for key in keys:
            value = value[key]
        return value if isinstance(value, str) else json.dumps(value)

    return read


def plain(asked):
    return {"prompt": asked, "max_tokens": 24, "temperature": 0}


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LIMITS = {"num_predict": 24, "temperature": 0}
KINDS = {
    "chat": ("/v1/chat/completions", chat(), of("choices", 0, "message", "content")),
    "stream": ("/v1/chat/completions", chat(stream=True),
               streamed(lambda e: (e["choices"][0]["delta"].get("content") or "") if e.get("choices") else "")),
    "json": ("/v1/chat/completions",
             chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}),
             of("choices", 0, "message", "content")),
    "completion": ("/v1/completions", plain, of("choices", 0, "text")),
    "responses": ("/v1/responses", lambda asked: {"input": asked, "max_output_tokens": 24, "temperature": 0},
                  lambda text: json.dumps([item.get("content") for item in json.loads(text)["output"]])),
    "messages": ("/v1/messages", chat(), of("content")),
    "ollama": ("/api/chat", lambda asked: {**chat()(asked), "stream": False, "options": LIMITS},
               of("message", "content")),
    "generate": ("/api/generate", lambda asked: {"prompt": asked, "stream": False, "options": LIMITS}, of("response")),
    "tokenize": ("/tokenize", lambda asked: {"content": asked}, of("tokens")),
}


# ---- what goes wrong on purpose ------------------------------------------------------------------


def disturb(load, disk, seed):
    """A worker dies, or the disk of --kv-dir is full for a while."""
    rng, filler = random.Random(seed), disk / "filler" if disk else None
    while not load.is_over.wait(rng.uniform(5, 15)):
        if filler and rng.random() < 0.4:
            with filler.open("wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                        file.flush()
                except OSError:
                    pass
            load.is_over.wait(5)
            filler.unlink()
        else:
            victims = list(load.server.workers().values())
            if victims:
                try:
                    os.kill(rng.choice(victims), signal.SIGKILL)
                except ProcessLookupError:
                    pass


def small_disk(folder):
    """A disk of 24 MiB, if this user may mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    if mounted.returncode == 0:
        return folder
    print("no small disk can be mounted here: its being full is left out", flush=True)
    return None


# ---- what it costs -------------------------------------------------------------------------------


def cost_of(pid):
    """Private and shared MiB in memory, and open descriptors; None once the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        return kib / 1024, len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, StopIteration):
        return None


def find_trends(history):
    """Of each process: the last third of the run against the one before."""
    trends = []
    for role in sorted({role for minute in history for role in minute}):
        found = [minute[role] for minute in history if role in minute]
        third = len(found) // 3
        if third < 2:
            continue
        for i, what, slack in (0, "MiB", SLACK_MIB), (1, "descriptors", SLACK_DESCRIPTORS):
            before = statistics.median(costs[i] for costs in found[third : 2 * third])
            after = statistics.median(costs[i] for costs in found[2 * third :])
            if after > before * GROWTH + slack:
                trends.append(f"{role}: from {before:.1f} to {after:.1f} {what}")
    return trends


def run(load, seconds, n_clients, disk):
    threads = [threading.Thread(target=load.client, args=(i,)) for i in range(n_clients)]
    threads.append(threading.Thread(target=disturb, args=(load, disk, 1)))
    for thread in threads:
        thread.start()
    history, begin, period = [], time.monotonic(), min(60, seconds / 10)
    while (now := time.monotonic() - begin) < seconds and load.server.process.poll() is None:
        time.sleep(min(period, seconds - now))
        pids = {"front": load.server.process.pid, **load.server.workers()}
        minute = {role: cost for role, pid in pids.items() if (cost := cost_of(pid))}
        history.append(minute)
        with load.lock:
            said = "  ".join(f"{role} {mib:.0f} MiB {n} fd" for role, (mib, n) in minute.items())
            print(f"{(time.monotonic() - begin) / 60:6.1f} min  {load.n} answers, {load.wrong} wrong, "
                  f"{len(load.failed)} failed, {load.busy} busy  {said}", flush=True)
    load.is_over.set()
    for thread in threads:
        thread.join(300)
    return history


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=Path, default=ROOT / "build/bin/tandem")
    parser.add_argument("--model", type=Path, default=ROOT / "configs/models/tandem-nano")
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        (scratch / "models").mkdir()
        for name in NAMES:
            (scratch / "models" / name).symlink_to(args.model.resolve())
        disk = small_disk(scratch / "disk")
        kv_dir = (disk or scratch) / "kv"
        server = Server(args.binary, None, "--models", scratch / "models", "--max-models", "2", "--sleep-after", "30",
                        "--kv-cache-tokens", "8192", "--ctx-size", "2048", "--kv-dir", kv_dir, "--kv-dir-size", "0.05")
        load = Load(server)
        try:
            for kind in KINDS:
                for asked in ASKED:
                    load.ask(kind, NAMES[0], asked)
            print(f"{load.n} answers to compare with", flush=True)
            history = run(load, args.hours * 3600, args.clients, disk)
            trends = find_trends(history)
            is_alive = server.process.poll() is None
            server.close()
        finally:
            if server.process.poll() is None:
                server.process.kill()
            if disk:
                subprocess.run(["umount", "-l", disk], check=False)
    for line in [*load.failed[:20], *trends, *([] if is_alive else ["the server ended"])]:
        print(line)
    is_good = is_alive and not (load.wrong or load.failed or trends)
    print("good" if is_good else "BAD")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
