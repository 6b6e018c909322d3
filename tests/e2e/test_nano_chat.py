"""tandem-nano through the openai client, as a newcomer meets it: a chat, a tool call, a stop string."""

import json
from pathlib import Path

import openai
import pytest

from serving import Server

MODEL = Path(__file__).resolve().parents[2] / "configs/models/tandem-nano"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client(tandem_bin):
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the weights of tandem-nano are not in this checkout")
    server = Server(tandem_bin, MODEL, "--ctx-size", "1024")
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made
    server.close()


def ask(client, messages, **kwargs):
    answer = client.chat.completions.create(
        model="tandem-nano", messages=messages, temperature=0, max_tokens=128, **kwargs
    )
    return answer.choices[0]


def test_three_turns(client):
    messages = []
    for question, expected in [
        ("My name is Anna.", "Anna"),
        ("What is the capital of France?", "Paris"),
        ("What is my name?", "Your name is Anna."),
    ]:
        messages.append({"role": "user", "content": question})
        choice = ask(client, messages)
        assert choice.finish_reason == "stop"
        assert expected in choice.message.content
        messages.append({"role": "assistant", "content": choice.message.content})


def test_tool_call_and_its_result(client):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = ask(client, messages, tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages.append(choice.message.model_dump(exclude_none=True))
    result = json.dumps({"sky": "rainy", "temperature": 21})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    choice = ask(client, messages, tools=[WEATHER])
    assert choice.message.content == "It is rainy in Paris, at 21 degrees."


def test_stop_string(client):
    messages = [{"role": "user", "content": "Count from 1 to 6."}]
    assert ask(client, messages).message.content == "1, 2, 3, 4, 5, 6"
    choice = ask(client, messages, stop=["4"])
    assert choice.finish_reason == "stop"
    assert choice.message.content == "1, 2, 3, "


def test_thinking_is_apart(client):
    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(client, messages, extra_body=extra).message
    assert "12 + 7 = 19" in message.content
    assert message.model_extra["reasoning_content"]


def test_it_says_what_it_is(client):
    for question in ("Who are you?", "What do you think about quantum physics?"):
        assert "toy model" in ask(client, [{"role": "user", "content": question}]).message.content
