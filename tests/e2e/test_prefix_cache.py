"""The cache of prefixes as a client sees it: less to read, the same text, nobody else's text."""

import concurrent.futures
import os
import random
import signal

import httpx
import pytest

from serving import Server, cached, make_model, wait_until

PAGE = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tandem_bin, model):
    running = Server(tandem_bin, model, "--max-batch", "8", "--ctx-size", "2048")
    yield running
    running.close()


def tokens(seed, n):
    return random.Random(seed).choices(range(3, 900), k=n)


def complete(server, prompt, max_tokens=24, **fields):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.9, "seed": 7}
    reply = httpx.post(
        server.url + "/v1/completions",
        json={**body, "ignore_eos": True, **fields},
        timeout=400,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def text(answer):
    return answer["choices"][0]["text"]


def test_the_same_prompt_again(server):
    prompt = tokens(1, 1100)
    first, second = (complete(server, prompt, logprobs=3) for _ in range(2))
    assert cached(first) == 0
    assert cached(second) == 1100 // PAGE * PAGE
    assert text(first) and first["choices"] == second["choices"]  # to the last bit
    assert second["usage"]["prompt_tokens"] == 1100
    # A prompt that ends with a page still reads that page: its last token's logits are wanted.
    assert cached(complete(server, prompt[: 8 * PAGE])) == 7 * PAGE
    assert cached(complete(server, prompt[: 8 * PAGE + 1])) == 8 * PAGE


def test_salts_keep_apart(server):
    """cache_salt: what one asked shows to none without it, in any form of request."""
    prompt = tokens(5, 500)
    for salt in {"cache_salt": "a"}, {"cache_salt": "b"}, {}:
        assert cached(complete(server, prompt, **salt)) == 0
        assert cached(complete(server, prompt, **salt)) == 500 // PAGE * PAGE
    said = [{"role": "user", "content": "word " * 300}]
    for salt, is_known in ("a", False), ("b", False), ("a", True):
        reply = httpx.post(
            server.url + "/v1/chat/completions",
            json={"messages": said, "max_tokens": 2, "cache_salt": salt},
            timeout=400,
            trust_env=False,
        )
        assert (cached(reply.json()) > 0) == is_known
    for wrong in "", 7:
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "cache_salt": wrong})
        assert reply.status_code == 400 and "cache_salt" in reply.text


def test_keys_kept_apart(tandem_bin, model, tmp_path):
    """--cache-per-key: in memory, and on disk after a restart."""
    (tmp_path / "keys").write_text("one\ntwo\n")
    prompt, salt = tokens(6, 500), {}

    def ask(server, key):
        reply = httpx.post(
            server.url + "/v1/completions",
            json={"prompt": prompt, "max_tokens": 2, **salt},
            headers={"Authorization": f"Bearer {key}"},
            timeout=400,
            trust_env=False,
        )
        return cached(reply.json())

    options = "--cache-per-key", "--api-keys", tmp_path / "keys", "--kv-dir", tmp_path / "kv", "--ctx-size", "2048"
    server = Server(tandem_bin, model, *options)
    assert [ask(server, key) for key in ("one", "two", "one")] == [0, 0, 448]
    server.close()
    server = Server(tandem_bin, model, *options)
    assert [ask(server, key) for key in ("two", "one")] == [448, 448]
    salt["cache_salt"] = "more"
    assert [ask(server, key) for key in ("two", "one")] == [0, 0]
    server.close()


def test_a_prefix_with_other_ends(tandem_bin, model, server):
    prefix = tokens(2, 1024)
    prompts = [prefix + tokens(100 + i, 5 + 40 * i) for i in range(4)]
    answers = [complete(server, prompt) for prompt in prompts]
    assert [cached(a) for a in answers] == [0, 1024, 1024, 1024]
    fresh = Server(tandem_bin, model, "--max-batch", "8", "--ctx-size", "2048")
    first = complete(fresh, prompts[2])
    assert cached(first) == 0 and text(first) == text(answers[2])
    fresh.close()
    assert len({text(a) for a in answers}) == 4


def test_one_token_changed_early(server):
    prompt = tokens(3, 1000)
    complete(server, prompt)
    for place in (0, 63, 64, 500):
        other = list(prompt)
        other[place] += 1
        assert cached(complete(server, other)) == place // PAGE * PAGE


def test_the_next_turn(tandem_bin, model, server):
    """A prompt that begins with an earlier prompt and its answer: the prompt's pages are found, and to
    the last bit the result is that of a server that has seen neither."""
    prompt = tokens(4, 300)
    complete(server, prompt, max_tokens=100, logit_bias={"500": 100})
    turn = prompt + [500] * 100 + tokens(5, 40)
    again = complete(server, turn, logprobs=3)
    assert cached(again) == 300 // PAGE * PAGE
    fresh = Server(tandem_bin, model, "--max-batch", "8", "--ctx-size", "2048")
    assert complete(fresh, turn, logprobs=3)["choices"] == again["choices"]
    fresh.close()


def test_together(server):
    """Eight at once with one new prefix: together as alone, and most of it is read once."""
    prefix = tokens(6, 1000)
    prompts = [prefix + tokens(200 + i, 30) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt), prompts))
    alone = [complete(server, prompt) for prompt in prompts]
    assert [text(a) for a in together] == [text(a) for a in alone]
    assert len({text(a) for a in alone}) == 8
    assert sum(cached(a) > 0 for a in together) >= 5
    assert all(cached(a) >= 960 for a in alone)


def test_choices_of_one_prompt(server):
    prompt = tokens(7, 500)
    answer = complete(server, prompt, n=3)
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["prompt_tokens"] == 500 and cached(answer) == 0
    assert cached(complete(server, prompt, n=3)) == 448


@pytest.mark.no_asan
def test_a_small_pool_under_pressure(tandem_bin, model):
    """Far more prefixes than the pool holds, in random order, several at a time: all as at first."""
    server = Server(tandem_bin, model, "--max-batch", "2", "--ctx-size", "512")
    prompts = [tokens(i % 6, 100 + 20 * (i % 6)) + tokens(50 + i, 60) for i in range(18)]
    first = [text(complete(server, prompt, 12)) for prompt in prompts]
    order = prompts * 3
    random.Random(0).shuffle(order)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for prompt, answer in zip(order, pool.map(lambda p: complete(server, p, 12), order)):
            assert text(answer) == first[prompts.index(prompt)]
    server.close()


def test_the_cache_outlives_a_worker(tandem_bin, model):
    server = Server(tandem_bin, model)
    prompt = tokens(8, 400)
    first = complete(server, prompt)
    for pid in server.workers().values():
        os.kill(pid, signal.SIGKILL)
    second = complete(server, prompt)
    assert cached(second) == 384 and text(first) == text(second)
    server.close()
