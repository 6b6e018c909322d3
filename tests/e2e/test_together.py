"""A request's text and log-probabilities are the same, to the last bit, alone in one worker and with seven
others: in chunks, on pages of others, preempted in a pool that is too small, and after a restart on pages
from disk. For every kind of attention, state and router."""

import concurrent.futures
import copy
import random
import sys
from pathlib import Path

import httpx
import pytest

from serving import Server, cached, make_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import golden_families  # noqa: E402
import golden_weights  # noqa: E402
import architectures  # noqa: E402

SHAPES = ["tiny", "tiny-qwen3", "tiny-gpt-oss", "tiny-gemma4", "tiny-qwen3-next", "tiny-deepseek-v4"]
# The longest prompt and the pool where pages have 512 tokens; published in other formats than FP8.
LONG_PAGES = {"tiny-gpt-oss": (700, 2560), "tiny-gemma4": (700, 2560), "tiny-deepseek-v4": (1400, 5120)}
FAMILIES = ["kimi_k25_int4", "glm4_moe_norms", "minimax_m2", "qwen3_5_moe", "kimi_linear", "glm5_next", "qwen4_exp_text"]
N = 8
VOCAB = range(2, 64)


def make(case, out):
    if case in SHAPES:
        return make_model(out, case, dtype="bf16" if case in LONG_PAGES else "fp8")
    config, dtype = copy.deepcopy(golden_families.CASES[case])
    text = architectures.text_config(config)
    dtype = "fp8" if dtype == "bf16" else dtype
    # Rows that the kernels with rounded activations take, too.
    text["hidden_size"] = 128
    for name in ("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size"):
        if name in text:
            text[name] = 64
    config = architectures.quantize_config(config, dtype)
    stored, _ = golden_weights.weights(config, dtype, 1)
    golden_weights.write_checkpoint(out, config, stored)
    (out / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return out


def bodies_of(rng, longest):
    """Prompts that share beginnings, of greedy requests and others."""
    stems = [rng.choices(VOCAB, k=k) for k in (70, 130, longest)]
    for number in range(N):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + rng.choices(VOCAB, k=rng.randrange(50))
        body = {"prompt": prompt, "max_tokens": rng.choice([1, 40, 120]), "ignore_eos": True, "logprobs": 3}
        kinds = [{"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.2}]
        kinds += [{"temperature": 0.8, "seed": number}, {"temperature": 0.8, "seed": number, "n": 2}]
        yield body | kinds[number % len(kinds)]


def ask(server, body):
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.no_asan
@pytest.mark.parametrize("case", SHAPES + FAMILIES)
def test_together_as_alone(tandem_bin, tmp_path, case):
    rng = random.Random(case)
    model = make(case, tmp_path / "model")
    longest, pool = LONG_PAGES.get(case, (250, 512))
    bodies = list(bodies_of(rng, longest))
    server = Server(tandem_bin, model, "--disaggregate", "off", "--max-batch", "2")
    alone = [ask(server, body)["choices"] for body in bodies]
    server.close()
    chunk = rng.choice([37, 64, 100])
    options = ["--ctx-size", str(longest + 262), "--kv-cache-tokens", str(pool), "--max-batch", str(N)]
    options += ["--prefill-chunk", str(chunk), "--kv-dir", tmp_path / "kv"]
    n_cached = 0
    for workers in rng.sample(["on", "off"], 2):
        server = Server(tandem_bin, model, *options, "--disaggregate", workers)
        order = rng.sample(range(N), N)
        with concurrent.futures.ThreadPoolExecutor(N) as threads:
            together = list(threads.map(lambda i: ask(server, bodies[i]), order))
        for i, answer in zip(order, together):
            assert answer["choices"] == alone[i], (i, chunk, workers)
            n_cached += cached(answer)
        server.close()
    assert n_cached > 0  # pages of other requests were used
