"""More answers than the KV pool holds, or one key's in every place: some make room and go on later,
and no client sees more of it than a pause."""

import concurrent.futures
import random
import threading

import httpx
import pytest
from serving import SANITIZED, Server, metric, wait_until

pytestmark = pytest.mark.slow

N_STREAMS, N_TOKENS = (4, 130) if SANITIZED else (8, 160)


def ask(server, number):
    prompt = random.Random(number % 3).choices(range(3, 900), k=130) + [3 + number]
    fields = {"temperature": 0.9, "seed": number, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    body = {"prompt": prompt, "max_tokens": N_TOKENS, "ignore_eos": True, "logprobs": 2, **fields}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=400, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def start(tandem_bin, model, workers):
    options = ["--disaggregate", workers, "--max-batch", str(N_STREAMS), "--prefill-chunk", "64"]
    return Server(tandem_bin, model, *options, "--ctx-size", "320", "--kv-cache-tokens", "512")


@pytest.mark.tsan
@pytest.mark.no_asan
def test_streams_in_a_pool_for_two(tandem_bin, tiny_model):
    server = start(tandem_bin, tiny_model, "off")
    alone = [ask(server, number) for number in range(N_STREAMS)]
    assert metric(server, "num_preemptions_total") == 0
    server.close()
    server = start(tandem_bin, tiny_model, "on")
    for _ in range(5):  # until they have met at the wrong moment
        with concurrent.futures.ThreadPoolExecutor(N_STREAMS) as pool:
            together = list(pool.map(lambda number: ask(server, number), range(N_STREAMS)))
        for one, other in zip(alone, together):
            assert one["choices"] == other["choices"]  # to the last bit
            assert other["usage"]["completion_tokens"] == N_TOKENS
            assert other["usage"]["prompt_tokens_details"]["cached_tokens"] <= 128
        if metric(server, "num_preemptions_total") > 0:
            break
    assert metric(server, "num_preemptions_total") > 0
    assert metric(server, "kv_cache_usage_perc") == 0
    server.close()


def keep_asking(url, body, stop):
    while not stop.is_set():
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as reply:
            assert reply.status_code == 200
            for _ in reply.iter_raw():
                if stop.is_set():
                    break


def test_one_address_does_not_keep_every_place(tandem_bin, tiny_model):
    server = Server(tandem_bin, tiny_model, "--max-batch", "2", "--ctx-size", "4096")
    url = server.url + "/v1/completions"
    endless = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    is_full = lambda: metric(server, "num_requests_running") == 2 and metric(server, "num_requests_waiting") == 1
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(keep_asking, url, endless, stop) for _ in range(3)]
        try:
            body = {"prompt": [6, 7, 8], "max_tokens": 5, "temperature": 0}
            another = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=60)
            for _ in range(20):  # until no answer ends just then and leaves its place
                wait_until(is_full)
                reply = another.post(url, json=body)
                assert reply.status_code == 200
                if metric(server, "num_preemptions_total") > 0:
                    break
            assert metric(server, "num_preemptions_total") == 1
            wait_until(is_full)
        finally:
            stop.set()
        for one in asking:
            one.result()
    wait_until(lambda: metric(server, "num_requests_running") == 0)
    server.close()
