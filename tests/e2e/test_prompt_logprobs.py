"""Log-probabilities of prompts, as lm-eval asks for them: echo, prompt_logprobs; and best_of."""

import math

import openai
import pytest

from serving import Server

TEXT = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture(scope="module", params=["on", "off"])
def client(tandem_bin, tiny_model, request):
    running = Server(tandem_bin, tiny_model, "--disaggregate", request.param)
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
    running.close()


def complete(client, prompt=TEXT, **kwargs):
    return client.completions.create(model="", prompt=prompt, temperature=0, **kwargs)


def test_echo(client):
    answer = complete(client, echo=True, max_tokens=4)
    plain = complete(client, max_tokens=4)
    assert answer.choices[0].text == TEXT + plain.choices[0].text
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == plain.usage.completion_tokens
    stream = complete(client, echo=True, max_tokens=4, stream=True)
    assert "".join(c.choices[0].text for c in stream) == answer.choices[0].text


def test_echo_logprobs(client):
    first = complete(client, echo=True, logprobs=3, max_tokens=0)
    choice, n = first.choices[0], first.usage.prompt_tokens
    assert choice.text == TEXT and choice.finish_reason == "length"
    assert first.usage.completion_tokens == 0
    made = choice.logprobs
    assert len(made.tokens) == len(made.token_logprobs) == len(made.top_logprobs) == n
    assert "".join(made.tokens) == TEXT and n > 130  # several steps of prefill
    assert made.token_logprobs[0] is None and made.top_logprobs[0] is None
    for value, top in zip(made.token_logprobs[1:], made.top_logprobs[1:]):
        assert len(top) == 3 and value <= max(top.values()) <= 0
    # A prompt in the prefix cache is computed again, with the same bits.
    again = complete(client, echo=True, logprobs=3, max_tokens=0)
    assert again.choices[0].logprobs == made
    # What follows the prompt is the same as without scores.
    more = complete(client, echo=True, logprobs=3, max_tokens=6).choices[0]
    plain = complete(client, logprobs=3, max_tokens=6).choices[0]
    assert more.text == TEXT + plain.text
    assert more.logprobs.token_logprobs[:n] == made.token_logprobs
    assert more.logprobs.token_logprobs[n:] == plain.logprobs.token_logprobs


def test_generated_and_scored_agree(client):
    """A text costs as a prompt what it cost to generate, but for the kernels' rounding."""
    answer = complete(client, logprobs=0, max_tokens=8, extra_body={"ignore_eos": True})
    made, n = answer.choices[0], answer.usage.prompt_tokens
    both = complete(client, prompt=TEXT + made.text, echo=True, logprobs=0, max_tokens=0).choices[0]
    if both.logprobs.tokens[n:] == made.logprobs.tokens:  # it may be cut into other tokens
        for a, b in zip(both.logprobs.token_logprobs[n:], made.logprobs.token_logprobs):
            assert math.isclose(a, b, abs_tol=0.05)


def test_token_ids_and_many_prompts(client):
    answer = complete(client, prompt=[[5, 6, 7], [8, 9]], echo=True, logprobs=1, max_tokens=1)
    assert [len(c.logprobs.tokens) for c in answer.choices] == [4, 3]
    alone = complete(client, prompt=[8, 9], echo=True, logprobs=1, max_tokens=1)
    assert answer.choices[1].logprobs == alone.choices[0].logprobs


def test_prompt_logprobs(client):
    answer = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 2})
    scores = answer.choices[0].prompt_logprobs
    echo = complete(client, echo=True, logprobs=2, max_tokens=0).choices[0].logprobs
    assert scores[0] is None and len(scores) == len(echo.tokens)
    for entry, value in zip(scores[1:], echo.token_logprobs[1:]):
        assert any(e["logprob"] == value for e in entry.values()) and 2 <= len(entry) <= 3
        assert {e["rank"] for e in entry.values()} >= {1, 2}
    chat = client.chat.completions.create(
        model="", messages=[{"role": "user", "content": "Hi"}], max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )
    assert len(chat.choices[0].prompt_logprobs) == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError):
        complete(client, stream=True, extra_body={"prompt_logprobs": 1})


def test_best_of(client):
    """The likeliest of the choices that n alone would return, in their order."""
    request = {"prompt": "It is", "max_tokens": 6, "logprobs": 0, "extra_body": {"ignore_eos": True}}

    def run(**kwargs):
        return client.completions.create(model="", temperature=1, seed=5, **request, **kwargs)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    every = run(n=5)
    best = sorted(every.choices, key=mean, reverse=True)[:2]
    found = run(n=2, best_of=5)
    assert [c.index for c in found.choices] == [0, 1]
    assert {c.text for c in found.choices} == {c.text for c in best}
    assert found.usage.completion_tokens == every.usage.completion_tokens
