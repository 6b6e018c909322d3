"""GET /metrics as Prometheus reads it, and the timings that responses carry."""

import json
import re

import httpx
import openai
import pytest

from serving import Server, make_model, wait_until

OF_THE_SERVER = ("tandem_memory_", "tandem_build_", "tandem_start_")
SAMPLE = re.compile(r'([a-z_0-9:]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (\S+)')


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(tandem_bin, model):
    running = Server(tandem_bin, model, "--max-batch", "2", "--ctx-size", "4096")
    yield running
    running.close()


def read(server, **headers):
    """Samples by name and labels. Every line must be of the format, and every family be declared."""
    reply = httpx.get(server.url + "/metrics", trust_env=False, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples, kinds = {}, {}
    for line in reply.text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        found = dict(re.findall(r'([a-z_]+)="([^"]*)"', labels or ""))
        assert found.pop("model_name", None) == (None if name.startswith(OF_THE_SERVER) else "tiny")
        family = re.sub("_(bucket|sum|count)$", "", name) if name not in kinds else name
        assert name.startswith(("tandem_", "vllm:")) and family in kinds
        assert (kinds[family] == "histogram") == ("le" in found or name != family)
        key = (name, *found.values())
        assert key not in samples
        samples[key] = float(value)
    for family, kind in kinds.items():
        if kind != "histogram":
            continue
        counts = [v for k, v in samples.items() if k[0] == family + "_bucket"]
        assert counts == sorted(counts) and len(counts) > 10
        assert counts[-1] == samples[family + "_bucket", "+Inf"] == samples[(family + "_count",)]
    return samples


def post(server, stream=False, **fields):
    body = {"prompt": list(range(3, 203)), "max_tokens": 10, "ignore_eos": True, "stream": stream}
    url = server.url + "/v1/completions"
    if stream:
        return httpx.stream("POST", url, json={**body, **fields}, trust_env=False, timeout=60)
    reply = httpx.post(url, json={**body, **fields}, trust_env=False, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_counts(server):
    before = read(server)
    counted = {"tandem_worker_up", "tandem_http_requests_total"}  # /health and this were asked for
    counted |= {"tandem_model_state", "tandem_model_loads_total"}
    counted |= {"tandem_build_info", "tandem_start_time_seconds"}
    counted |= {f"{prefix}cache_config_info" for prefix in ("tandem_", "vllm:")}
    counted |= {"tandem_memory_bytes", "tandem_memory_available_bytes"}
    assert all(value == 0 for key, value in before.items() if key[0] not in counted)
    assert before["tandem_http_requests_total", "GET", "/metrics"] == 1
    assert 0 < before[("tandem_memory_available_bytes",)] < before[("tandem_memory_bytes",)]
    post(server)
    post(server)
    post(server, n=2)
    now = read(server)
    assert now["tandem_requests_total", "length"] == 4
    assert now["tandem_http_requests_total", "POST", "/v1/completions"] == 3
    assert now[("tandem_prompt_tokens_total",)] == 800
    assert now[("tandem_prefix_cache_queries_total",)] == 800
    assert now[("tandem_prefix_cache_hits_total",)] == 3 * 192
    assert now[("tandem_generation_tokens_total",)] == 40
    assert now[("tandem_time_to_first_token_seconds_count",)] == 4
    assert now[("tandem_inter_token_latency_seconds_count",)] == 36
    assert now[("tandem_e2e_request_latency_seconds_count",)] == 4
    first, later, whole = (
        now[(f"tandem_{name}_seconds_sum",)]
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    )
    assert 0 < first < whole and 0 < later < whole
    as_vllm = {key: value for key, value in now.items() if key[0].startswith("vllm:")}
    assert len(as_vllm) > 70
    for key, value in as_vllm.items():
        assert value == now[(key[0].replace("vllm:", "tandem_"), *key[1:])]
    assert now[("tandem_num_requests_running",)] == now[("tandem_kv_cache_usage_perc",)] == 0
    post(server, logit_bias={"996": 100}, ignore_eos=False)
    assert read(server)["tandem_requests_total", "stop"] == 1


def test_running_waiting_and_aborted(server):
    streams = [post(server, stream=True, max_tokens=3800) for _ in range(3)]
    opened = [stream.__enter__() for stream in streams]
    running, waiting = ("tandem_num_requests_running",), ("tandem_num_requests_waiting",)
    wait_until(lambda: read(server)[running] == 2 and read(server)[waiting] == 1)
    assert read(server)[("tandem_kv_cache_usage_perc",)] > 0
    for stream in streams:
        stream.__exit__(None, None, None)
    wait_until(lambda: read(server)[running] == 0)
    now = read(server)
    assert now["tandem_requests_total", "abort"] == 3 and len(opened) == 3
    assert now["tandem_requests_total", "stop"] == now["tandem_requests_total", "length"] == 0
    assert now[("tandem_kv_cache_usage_perc",)] == 0


def test_what_routers_ask(server):
    def get(path):
        reply = httpx.get(server.url + path, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()

    model = get("/v1/models")["data"][0]
    info, rank = get("/server_info"), get("/v1/loads")["loads"][0]
    assert get("/model_info")["served_model_name"] == info["served_model_name"] == model["id"]
    assert info["context_length"] == model["max_model_len"] and info["max_running_requests"] == 2
    assert rank["max_total_num_tokens"] == info["max_total_num_tokens"] > 0
    assert rank["num_total_reqs"] == rank["num_used_tokens"] == rank["token_usage"] == 0
    streams = [post(server, stream=True, max_tokens=3800) for _ in range(3)]
    for stream in streams:
        stream.__enter__()
    wait_until(lambda: get("/loads")["loads"][0]["num_running_reqs"] == 2)
    rank, short = get("/v1/loads")["loads"][0], get("/get_load")[0]
    assert rank["num_waiting_reqs"] == short["num_waiting_reqs"] == 1 and short["num_reqs"] == 3
    assert 0 < rank["num_used_tokens"] <= rank["max_total_num_tokens"] and short["num_tokens"] > 0
    assert rank["utilization"] == 1 and 0 < rank["token_usage"] <= 1
    for stream in streams:
        stream.__exit__(None, None, None)
    wait_until(lambda: get("/get_load")[0]["num_reqs"] == 0)
    assert httpx.get(server.url + "/get_load?model=none", trust_env=False).status_code == 404


def test_a_worker_killed(server):
    with post(server, stream=True, max_tokens=800) as stream:
        chunks = stream.iter_lines()
        next(chunks)
        server.kill_worker()
        for _ in chunks:
            pass
    now = read(server)
    assert now["tandem_requests_total", "error"] == 0
    assert now["tandem_requests_total", "length"] == 1
    assert now["tandem_worker_restarts_total", "decode"] == 1
    assert now["tandem_worker_restarts_total", "prefill"] == 0
    assert now["tandem_worker_up", "decode"] == now["tandem_worker_up", "prefill"] == 1


def test_the_key_covers_metrics(tandem_bin, model):
    server = Server(tandem_bin, model, "--api-key", "secret")
    assert httpx.get(server.url + "/metrics", trust_env=False).status_code == 401
    assert read(server, Authorization="Bearer secret")
    server.close()


def check_timings(timings, read_n, cache_n, predicted_n, n_choices=1):
    assert timings["prompt_n"] == read_n and timings["cache_n"] == cache_n
    assert timings["predicted_n"] == predicted_n
    assert 0 < timings["prompt_ms"] < 60e3 and 0 < timings["predicted_ms"] < 60e3
    assert timings["prompt_per_second"] == pytest.approx(read_n / timings["prompt_ms"] * 1e3)
    rate = (predicted_n - n_choices) / timings["predicted_ms"] * 1e3
    assert timings["predicted_per_second"] == pytest.approx(rate)


def test_timings(server):
    check_timings(post(server)["timings"], 200, 0, 10)
    check_timings(post(server)["timings"], 8, 192, 10)
    check_timings(post(server, n=2)["timings"], 16, 384, 20, n_choices=2)


def test_timings_in_streams(server):
    with post(server, stream=True, stream_options={"include_usage": True}) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines[:-1]]
    timed = [chunk for chunk in chunks if "timings" in chunk]
    assert timed == [chunks[-2]] and timed[0]["choices"][0]["finish_reason"] == "length"
    check_timings(timed[0]["timings"], 200, 0, 10)


def test_the_openai_client_does_not_mind(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        answer = client.chat.completions.create(**asked)
        assert answer.model_extra["timings"]["predicted_n"] == answer.usage.completion_tokens
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert chunks[-1].choices[0].finish_reason and chunks[-1].model_extra["timings"]
