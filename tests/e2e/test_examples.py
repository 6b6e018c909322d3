"""configs/examples: they are what the programs they are for can read, and do what they say.

HAProxy runs as haproxy.cfg has it, but for addresses."""

import json
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from routers import NANO, free_port, try_router
from serving import Server, make_model, wait_until

pytestmark = pytest.mark.no_asan

EXAMPLES = Path(__file__).resolve().parents[2] / "configs/examples"
HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/sbin")


# ---- what others read ----------------------------------------------------------------------------


def leaves(value, path=()):
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def test_the_dashboard_is_grafanas_and_asks_for_what_there_is(tandem_bin, tiny_model, tmp_path):
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard
    promql = pytest.importorskip("promql_parser")
    board = json.loads((EXAMPLES / "grafana.json").read_text())
    # Grafana's own model of a dashboard keeps what it knows: nothing of ours may get lost.
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    kept = dict(leaves(known))
    missing = [path for path, value in leaves(board) if path not in kept or kept[path] != value]
    assert not missing
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    server = Server(tandem_bin, tiny_model, "--kv-dir", tmp_path)
    text = httpx.get(server.url + "/metrics", trust_env=False).text
    server.close()
    names = set(re.findall(r"^(\w+)[{ ]", text, re.M))
    names |= {f"tandem_expert_cache_{name}" for name in ("hits_total", "misses_total")}  # with a GPU
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"\btandem_\w+", target["expr"]))
            promql.parse(target["expr"].replace("$__rate_interval", "1m"))
    for variable in board["templating"]["list"][1:]:
        asked |= set(re.findall(r"\btandem_\w+", variable["query"]))
    assert asked <= names, asked - names
    unseen = {re.sub("_(bucket|sum|count)$", "", name) for name in names - asked} - \
        {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert unseen <= {f"tandem_{name}" for name in ("worker_requests_running", "kv_disk_rewritten_bytes_total",
                                                    "kv_disk_write_amplification", "kv_disk_dropped_total",
                                                    "cache_config_info", "build_info", "start_time_seconds")}


def test_kubernetes_takes_the_manifests():
    kubernetes = pytest.importorskip("kubernetes_validate")
    parts = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yml").read_text()))
    for part in parts:
        kubernetes.validate(part, "1.31", strict=True)
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate({**parts[0], "spec": {**parts[0]["spec"], "replicas": 3}}, "1.31", strict=True)
    pods = [part["spec"]["template"] for part in parts if "template" in part["spec"]]
    for part in parts:
        if part["kind"] == "Service":
            (own,) = [pod for pod in pods if pod["metadata"]["labels"] == part["spec"]["selector"]]
            ports = [port["name"] for port in own["spec"]["containers"][0]["ports"]]
            assert all(port["targetPort"] in ports for port in part["spec"]["ports"])
    for pod in pods:
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == volumes
    server = pods[0]["spec"]
    drain = int(server["containers"][0]["args"][-1])
    wait = int(server["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert server["terminationGracePeriodSeconds"] > drain + wait


def test_compose_takes_the_file(tandem_bin, tiny_model):
    compose = pytest.importorskip("compose_spec")
    text = (EXAMPLES / "compose.yml").read_text()
    compose.PyCompose.from_yaml(text)
    services = yaml.safe_load(text)["services"]
    for service in services.values():
        for source in (volume.split(":")[0] for volume in service["volumes"]):
            assert not source.startswith("./") or (EXAMPLES / source).exists(), source
    _, *check = services["tandem"]["healthcheck"]["test"]
    server = Server(tandem_bin, tiny_model)
    assert subprocess.run([part.replace("/8080", f"/{server.port}") for part in check]).returncode == 0
    server.close()
    assert subprocess.run([part.replace("/8080", "/1") for part in check], stderr=subprocess.DEVNULL).returncode


# ---- several machines ----------------------------------------------------------------------------

ROUTER = "sglang_router.launch_router"  # of src/front/ROUTERS.md


class Machines:
    """Three servers of one model and one of another behind HAProxy."""

    def __init__(self, tandem_bin, tmp_path):
        small, other = (make_model(tmp_path / name) for name in ("small", "other"))
        self.servers = {name: Server(tandem_bin, model, "--ctx-size", "4096")
                        for name, model in (("one", small), ("two", small), ("three", small), ("four", other))}
        text = (EXAMPLES / "haproxy.cfg").read_text()
        head, machines = re.split("^(?=backend machines)", text, flags=re.M)
        machines = re.sub(r"^  server .*\n", "", machines, flags=re.M)
        line = {name: f"  server {name} 127.0.0.1:{server.port}\n" for name, server in self.servers.items()}
        others = machines.replace("backend machines", "backend others") + line.pop("four")
        port = free_port()
        text = head + machines + "".join(line.values()) + others
        text = text.replace("bind 0.0.0.0:8080", f"bind 127.0.0.1:{port}")
        text = text.replace("/run/haproxy/tandem.sock", str(tmp_path / "sock"))
        text = text.replace("# use_backend", "use_backend").replace("OTHER-MODEL", "other")
        (tmp_path / "haproxy.cfg").write_text(text)
        subprocess.run([HAPROXY, "-c", "-q", "-f", tmp_path / "haproxy.cfg"], check=True)
        self.process = subprocess.Popen([HAPROXY, "-db", "-q", "-f", tmp_path / "haproxy.cfg"])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False,
                                   transport=httpx.HTTPTransport(retries=5))  # until it listens

    def post(self, body):
        return self.client.post("/v1/chat/completions", json=body)

    def close(self):
        self.client.close()
        self.process.kill()
        self.process.wait()
        for server in self.servers.values():
            server.close()


@pytest.fixture
def machines(tandem_bin, tmp_path):
    if not HAPROXY:
        pytest.skip("no haproxy: scripts/setup.sh --test installs it")
    running = Machines(tandem_bin, tmp_path)
    yield running
    running.close()


class Conversation:
    def __init__(self, machines, number):
        self.machines, self.n_prompt = machines, 0
        about = " ".join(f"Number {number} says {word}." for word in "abcdefghijklmnopqrstuvwxyz")
        texts = {"system": about, "user": f"Question {number}?"}
        self.messages = [{"role": role, "content": [{"type": "text", "text": text}] if number % 2 else text}
                         for role, text in texts.items()]  # in parts, or as a text

    def body(self, **fields):
        return {"model": "small", "messages": self.messages, "max_tokens": 4, **fields}

    def turn(self):
        """Another turn; returns who served it, and the share of the last prompt that was cached."""
        reply = self.machines.post(self.body())
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        before, self.n_prompt = self.n_prompt, answer["usage"]["prompt_tokens"]
        self.messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""},
                          {"role": "user", "content": "And then?"}]
        return reply.headers.get("x-served-by"), \
            before and answer["usage"]["prompt_tokens_details"]["cached_tokens"] / before


def test_conversations_keep_their_machine(machines):
    talks = [Conversation(machines, i) for i in range(9)]
    home = [talk.turn()[0] for talk in talks]
    assert set(home) == {"one", "two", "three"} and len(set(home[1::2])) > 1
    for _ in range(2):
        for talk, name in zip(talks, home):
            who, cached = talk.turn()
            assert who == name and cached > 0.7
    # A model of another machine, and one that none has.
    other = Conversation(machines, 0)
    for body, status, who in ((other.body(model="other"), 200, "four"), (other.body(model="none"), 404, home[0])):
        reply = machines.client.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.headers["x-served-by"]) == (status, who)
    # One machine is told to end while it answers: the answer ends, what is new goes elsewhere.
    leaves, dies = home[0], next(name for name in home if name != home[0])
    long = talks[0].body(stream=True, max_tokens=2000, ignore_eos=True)
    with machines.client.stream("POST", "/v1/chat/completions", json=long) as stream:
        assert stream.headers["x-served-by"] == leaves
        lines = stream.iter_lines()
        next(lines)
        machines.servers[leaves].signal()
        for talk, name in zip(talks, home):
            who, cached = talk.turn()
            assert who != leaves and (name == leaves or (who == name and cached > 0.7))
        last = [line for line in lines if line][-2:]
        assert '"finish_reason":"length"' in last[0] and last[1] == "data: [DONE]"
    assert machines.servers[leaves].wait() == 0
    # Another one dies.
    machines.servers[dies].signal(signal.SIGKILL)
    (left,) = {"one", "two", "three"} - {leaves, dies}
    assert {talk.turn()[0] for talk in talks} == {left}
    machines.servers.pop(dies).process.wait()


@pytest.mark.skipif(not HAPROXY, reason="no haproxy: scripts/setup.sh --test installs it")
@pytest.mark.skipif(not (NANO / "model.safetensors").exists(), reason="tandem-nano's weights are missing")
def test_a_server_behind_haproxy_comes_back(tandem_bin, tmp_path):
    try_router(tandem_bin, HAPROXY, tmp_path)


class Routed:
    """Three servers of one model behind sglang-router."""

    def __init__(self, tandem_bin, tmp_path):
        model, port = make_model(tmp_path / "small"), free_port()
        self.servers = [Server(tandem_bin, model, "--ctx-size", "4096") for _ in range(3)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", ROUTER, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
             "--balance-abs-threshold", "1", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
             "--log-level", "error", "--worker-urls", *(server.url for server in self.servers)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
        wait_until(self.is_ready)

    def is_ready(self):
        try:
            return self.client.get("/readiness").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, body):
        return self.client.post("/v1/chat/completions", json=body)

    def close(self):
        self.client.close()
        self.process.terminate()
        self.process.wait()
        for server in self.servers:
            server.close()


def served(server):
    """How many requests it has ended."""
    text = httpx.get(server.url + "/metrics", trust_env=False).text
    return sum(int(n) for n in re.findall(r"^tandem_requests_total{.*} (\S+)", text, re.M))


def test_conversations_keep_their_prefix_behind_a_router(tandem_bin, tmp_path):
    pytest.importorskip("sglang_router")
    routed = Routed(tandem_bin, tmp_path)
    try:
        talks = [Conversation(routed, i) for i in range(6)]
        with ThreadPoolExecutor(len(talks)) as pool:  # at once: the router spreads what is new by load
            list(pool.map(Conversation.turn, talks))
        for _ in range(2):
            assert all(talk.turn()[1] > 0.7 for talk in talks)
        assert sum(served(server) > 0 for server in routed.servers) > 1
        dies = routed.servers.pop()
        dies.signal(signal.SIGKILL)
        dies.process.wait()
        wait_until(lambda: all(routed.post(talk.body()).status_code == 200 for talk in talks))
    finally:
        routed.close()
