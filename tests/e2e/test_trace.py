"""--trace: what all processes did, in one file on one clock."""

import json
import os
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import httpx
import pytest

from serving import Server, wait_until

pytestmark = [pytest.mark.tsan, pytest.mark.no_asan]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


def children(server):
    pid = server.process.pid
    return {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_whole(file):
    """Between any two writes it is; a reader may see half of one."""
    try:
        return bool(json.loads(file.read_text()))
    except json.JSONDecodeError:
        return False


def is_ready(server):
    return httpx.get(server.url + "/health", trust_env=False).status_code == 200


def ask(server):
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text


def check(trace):
    """Every event is well-formed, and the spans of a thread nest."""
    spans = defaultdict(list)
    asyncs = defaultdict(list)
    for event in trace:
        assert event["ph"] in "XbeiM" and event["name"] and event["pid"] > 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            # In whole nanoseconds: sums of fractions of microseconds are rounded.
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            spans[event["pid"], event["tid"]].append((begin, begin + length))
        elif event["ph"] in "be":
            asyncs[event["cat"], event["id"]].append((event["ph"], event["ts"]))
    for thread in spans.values():
        open_ends = []
        for begin, end in sorted(thread, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    for (begin, begin_ts), (end, end_ts) in asyncs.values():
        assert (begin, end) == ("b", "e") and begin_ts <= end_ts


def names_of(trace, pids):
    return {e["name"] for e in trace if e["pid"] in pids}


def test_server(tandem_bin, model, tmp_path):
    file = tmp_path / "trace.json"
    server = Server(tandem_bin, model, "--trace", file)
    front = {server.process.pid}
    try:
        ask(server)
        first = children(server)
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_ready(server) and not first & children(server))
        ask(server)
        second = children(server)
        wait_until(lambda: is_whole(file))
    finally:
        server.close()
    trace = json.loads(file.read_text())
    check(trace)
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert processes[server.process.pid] == "front"
    assert first | second | front == set(processes)
    assert {"request", "prepare prompt", "send submit", "receive token"} <= names_of(trace, front)
    for life in first, second:
        names = names_of(trace, life)
        assert {"open model", "step", "sample", "moe", "attn_mla", "receive submit"} <= names
        assert {"send ready", "send token", "send done"} <= names
    assert len([e for e in trace if e["name"] == "request" and e["ph"] == "b"]) == 2
    assert trace[-1]["name"] == "end of trace" and trace[-1]["args"]["dropped"] == 0


def test_run(tandem_bin, model, tmp_path):
    file = tmp_path / "trace.json"
    command = [tandem_bin, "run", "--model", model, "--token-ids", "1,2,3", "-n", "4"]
    subprocess.run([*command, "--ignore-eos", "--trace", file], check=True, capture_output=True)
    trace = json.loads(file.read_text())
    check(trace)
    steps = [e for e in trace if e["name"] == "step"]
    assert [e["args"]["tokens"] for e in steps] == [3, 1, 1, 1]


def test_a_file_that_cannot_be_written(tandem_bin, model):
    answer = subprocess.run(
        [tandem_bin, "serve", "--model", model, "--port", "0", "--trace", "/nonexistent/trace"],
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert "--trace /nonexistent/trace: cannot create" in answer.stderr
