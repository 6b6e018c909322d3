"""Routers in front of two servers, as src/front/ROUTERS.md has them: what must hold for each.

The files and commands are those of that page, but for addresses."""

import re
import shlex
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx

from serving import ROOT, Server, wait_until

NANO = ROOT / "configs/models/tandem-nano"
EXAMPLES = ROOT / "configs/examples"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def haproxy(program, urls, port, folder):
    text = (EXAMPLES / "haproxy.cfg").read_text().replace("bind 0.0.0.0:8080", f"bind 127.0.0.1:{port}")
    text = text.replace("/run/haproxy/tandem.sock", str(folder / "sock"))
    text = re.sub(r"^  server three .*\n", "", text, flags=re.M)
    for i, url in enumerate(urls, 1):
        text = text.replace(f"10.0.0.{i}:8080", url.removeprefix("http://"))
    (folder / "haproxy.cfg").write_text(text)
    return [program, "-db", "-q", "-f", folder / "haproxy.cfg"]


def litellm(program, urls, port, folder):
    text = (EXAMPLES / "litellm.yml").read_text().replace("MODEL", NANO.name)
    for i, url in enumerate(urls, 1):
        text = text.replace(f"http://10.0.0.{i}:8080", url)
    (folder / "litellm.yml").write_text(text)
    return [program, "--config", folder / "litellm.yml", "--host", "127.0.0.1", "--port", str(port)]


def of_page(program, urls, port, _):
    """A command line of the page."""
    page = (ROOT / "src/front/ROUTERS.md").read_text()
    (command,) = re.findall(rf"^```sh\n({Path(program).name} .*?)```", page, re.M | re.S)
    command = command.replace("0.0.0.0", "127.0.0.1").replace("30000", str(port))
    for i, url in enumerate(urls, 1):
        command = command.replace(f"http://10.0.0.{i}:8080", url)
    return [program, *shlex.split(command.replace("\\\n", ""))[1:], "--prometheus-port", str(free_port())]


COMMANDS = {"haproxy": haproxy, "litellm": litellm, "smg": of_page, "vllm-router": of_page}


class Fleet:
    def __init__(self, tandem_bin, program, folder, environment):
        self.tandem_bin = tandem_bin
        self.servers = [self.start(), self.start()]
        self.port = free_port()
        command = COMMANDS[Path(program).name](program, [s.url for s in self.servers], self.port, folder)
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment, cwd=folder)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=None, trust_env=False,
                                   headers={"Authorization": "Bearer sk-none"})
        self.numbers = count()

    def start(self, port=0):
        return Server(self.tandem_bin, NANO, "--ctx-size", "1024", *(["--port", str(port)] if port else []))

    def restart(self, i):
        self.servers[i] = self.start(self.servers[i].port)

    def is_ready(self):
        assert self.process.poll() is None, Path(self.log.name).read_text()[-2000:]
        try:
            models = self.client.get("/v1/models")
        except httpx.TransportError:
            return False
        return models.status_code == 200 and NANO.name in [model["id"] for model in models.json()["data"]]

    def count(self, i, name):
        """What the server counts under the name; 0 if it is gone."""
        try:
            text = httpx.get(self.servers[i].url + "/metrics", trust_env=False).text
        except httpx.TransportError:
            return 0
        return sum(int(n) for n in re.findall(rf"^tandem_{name}{{.*}} (\d+)", text, re.M))

    def talks(self, n):
        return [Talk(self, next(self.numbers)) for _ in range(n)]

    def turn(self, talks):
        with ThreadPoolExecutor(len(talks)) as pool:
            return list(pool.map(Talk.turn, talks))

    def is_used(self, i):
        """Whether new conversations, all at once, come to the server."""
        before = self.count(i, "requests_total")
        self.turn(self.talks(6))
        return self.count(i, "requests_total") > before

    def close(self):
        self.client.close()
        self.process.terminate()
        self.process.wait()
        self.log.close()
        for server in self.servers:
            if server.process.poll() is None:
                server.close()


class Talk:
    def __init__(self, fleet, number):
        self.fleet, self.n_prompt = fleet, 0
        self.headers = {"x-session-id": f"session-{number}"}
        self.messages = [{"role": "system", "content": f"{number} is your number. " * 8},
                         {"role": "user", "content": f"What is {number}?"}]

    def body(self, **fields):
        return {"model": NANO.name, "messages": self.messages, "max_tokens": 6, **fields}

    def turn(self):
        """Another turn; returns the share of the last prompt that was cached."""
        reply = self.fleet.client.post("/v1/chat/completions", json=self.body(), headers=self.headers)
        assert reply.status_code == 200, reply.text
        answer, before = reply.json(), self.n_prompt
        self.n_prompt = answer["usage"]["prompt_tokens"]
        self.messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""},
                          {"role": "user", "content": "And then?"}]
        return before and answer["usage"]["prompt_tokens_details"]["cached_tokens"] / before


def try_router(tandem_bin, program, folder, environment=None):
    fleet = Fleet(tandem_bin, program, folder, environment)
    try:
        wait_until(fleet.is_ready)
        for i in range(2):
            wait_until(lambda: fleet.is_used(i))
        talks = fleet.talks(6)
        for talk in talks:  # one after the other, so that nobody is sent elsewhere for want of room
            talk.turn()
        for _ in range(2):
            assert all(talk.turn() > 0.5 for talk in talks)
        # One machine is told to end while it answers: the answer ends, what is new goes elsewhere.
        long = talks[0].body(stream=True, max_tokens=500, ignore_eos=True)
        with fleet.client.stream("POST", "/v1/chat/completions", json=long, headers=talks[0].headers) as stream:
            lines = stream.iter_lines()
            next(lines)
            (leaves,) = [i for i in range(2) if fleet.count(i, "num_requests_running")]
            fleet.servers[leaves].signal()
            for talk in talks:
                talk.turn()
            rest = [line for line in lines if line]
            assert len(rest) > 20 and '"length"' in "".join(rest[-3:]) and rest[-1] == "data: [DONE]"
        assert fleet.servers[leaves].wait() == 0
        fleet.restart(leaves)
        wait_until(lambda: fleet.is_used(leaves))
        # The other one dies.
        dies = fleet.servers[1 - leaves]
        dies.signal(signal.SIGKILL)
        dies.process.wait()
        for talk in talks:
            talk.turn()
        assert all(talk.turn() > 0.5 for talk in talks)
        fleet.restart(1 - leaves)
        wait_until(lambda: fleet.is_used(1 - leaves))
    finally:
        fleet.close()
