"""Drives a server with the client libraries that people use, each by its own documented way of
structured output and tools, and prints a table. The model is tandem-nano, a toy: it calls the weather
tool as it was trained to, and where a library describes the tool in other words a call is required.

usage: try_clients.py [NAME]...    default: all that are installed (scripts/clients.sh installs them)
TANDEM_BIN is the program. Exits with 1 if a case failed.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

MODEL = "tandem-nano"
QUESTION = "What is the weather in Paris?"
ANSWER = "It is rainy in Paris, at 21 degrees."
WEATHER = {"sky": "rainy", "temperature": 21}
URL = ""  # of the server, set by main
CASES = []


def case(package, name):
    def enter(function):
        CASES.append((package, name, function))
        return function

    return enter


CALLED = []  # cities that the tool was asked about


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    CALLED.append(city)
    return json.dumps(WEATHER)


TOOL = {
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


def sky_model():
    from pydantic import BaseModel, ConfigDict, Field

    class Sky(BaseModel):
        model_config = ConfigDict(extra="forbid")
        sky: Literal["rainy", "sunny"]
        temperature: int = Field(ge=-50, le=50)

    return Sky


def check(found):
    assert found.sky in ("rainy", "sunny") and -50 <= found.temperature <= 50, found


# ---- openai


def openai_client():
    import openai

    return openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=300)


@case("openai", "chat.completions.parse")
def _():
    messages = [{"role": "user", "content": QUESTION}]
    reply = openai_client().chat.completions.parse(
        model=MODEL, messages=messages, response_format=sky_model(), temperature=0
    )
    check(reply.choices[0].message.parsed)


@case("openai", "chat.completions.stream with tools")
def _():
    import openai
    from pydantic import BaseModel

    class get_weather(BaseModel):
        """Get the weather of a city"""

        city: str

    with openai_client().chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[openai.pydantic_function_tool(get_weather)],
        tool_choice="required",
        temperature=0,
    ) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert call.function.parsed_arguments.city


@case("openai", "responses.parse")
def _():
    reply = openai_client().responses.parse(model=MODEL, input=QUESTION, text_format=sky_model(), temperature=0)
    check(reply.output_parsed)


@case("openai", "responses.stream, tool, previous_response_id")
def _():
    client = openai_client()
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    with client.responses.stream(model=MODEL, input=QUESTION, tools=[tool], temperature=0) as stream:
        for _event in stream:
            pass
        first = stream.get_final_response()
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": get_weather(**json.loads(call.arguments)),
    }
    second = client.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, tools=[tool], temperature=0
    )
    assert second.output_text == ANSWER, second.output_text


# ---- anthropic


def anthropic_client():
    import anthropic

    return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300)


@case("anthropic", "messages.stream")
def _():
    with anthropic_client().messages.stream(
        model=MODEL, max_tokens=64, messages=[{"role": "user", "content": "What is the capital of France?"}]
    ) as stream:
        text = "".join(stream.text_stream)
    assert "Paris" in text, text


@case("anthropic", "tool runner")
def _():
    from anthropic import beta_tool

    runner = anthropic_client().beta.messages.tool_runner(
        model=MODEL,
        max_tokens=128,
        tools=[beta_tool(get_weather)],
        messages=[{"role": "user", "content": QUESTION}],
        tool_choice={"type": "any"},
        max_iterations=2,
        extra_body={"temperature": 0},
    )
    first, second = runner
    assert first.stop_reason == "tool_use" and second.content and CALLED


@case("anthropic", "messages.parse (output_format)")
def _():
    messages = anthropic_client().messages
    parse = getattr(messages, "parse", None) or anthropic_client().beta.messages.parse
    reply = parse(
        model=MODEL,
        max_tokens=128,
        messages=[{"role": "user", "content": QUESTION}],
        output_format=sky_model(),
    )
    check(reply.parsed_output)


# ---- openai-agents


def run_agent(model, **kwargs):
    from agents import Agent, ModelSettings, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    settings = ModelSettings(temperature=0, tool_choice="required" if "tools" in kwargs else None)
    agent = Agent(name="a", model=model, model_settings=settings, **kwargs)
    return Runner.run_sync(agent, QUESTION).final_output


def agents_model(kind):
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=300)
    return getattr(agents, kind)(model=MODEL, openai_client=client)


for kind in ("OpenAIResponsesModel", "OpenAIChatCompletionsModel"):

    @case("openai-agents", f"function tool ({kind})")
    def _(kind=kind):
        from agents import function_tool

        found = run_agent(agents_model(kind), tools=[function_tool(get_weather)])
        assert found and CALLED

    @case("openai-agents", f"output_type ({kind})")
    def _(kind=kind):
        check(run_agent(agents_model(kind), output_type=sky_model()))


# ---- litellm


@case("litellm", "completion, response_format, stream, tools")
def _():
    import litellm

    ask = lambda **kwargs: litellm.completion(
        model="hosted_vllm/" + MODEL,
        api_base=URL + "/v1",
        api_key="none",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        **kwargs,
    )
    sky = sky_model()
    check(sky.model_validate_json(ask(response_format=sky).choices[0].message.content))
    [call] = ask(tools=[TOOL]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    chunks = list(ask(tools=[TOOL], stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    [call] = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@case("litellm", "anthropic messages to tandem")
def _():
    import asyncio

    import litellm

    reply = asyncio.run(
        litellm.anthropic.messages.acreate(
            model="anthropic/" + MODEL,
            api_base=URL,
            api_key="none",
            max_tokens=64,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
        )
    )
    assert "Paris" in json.dumps(reply if isinstance(reply, dict) else reply.model_dump())


@case("litellm", "proxy")
def _():
    import httpx
    import litellm.proxy.proxy_cli  # noqa: F401  needs litellm[proxy]

    from routers import free_port

    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        model = {"model": "openai/" + MODEL, "api_base": URL + "/v1", "api_key": "none"}
        config = Path(folder) / "proxy.yaml"
        config.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": model}]}))
        words = [Path(sys.executable).with_name("litellm"), "--config", config, "--port", str(port)]
        log = Path(folder) / "log"
        with log.open("w") as output:
            environment = {**os.environ, "LITELLM_MASTER_KEY": "sk-none"}
            process = subprocess.Popen(words, stdout=output, stderr=output, cwd=folder, env=environment)
        try:
            base = f"http://127.0.0.1:{port}"
            while True:
                assert process.poll() is None, log.read_text()[-500:]
                try:
                    if httpx.get(base + "/health/liveliness", trust_env=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            body = {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL]}
            key = {"Authorization": "Bearer sk-none"}
            url = base + "/v1/chat/completions"
            reply = httpx.post(url, json=body, headers=key, timeout=300, trust_env=False)
            assert reply.status_code == 200, reply.text
            [call] = reply.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        finally:
            process.terminate()
            process.wait()


# ---- routers in front of two servers


def try_router(name):
    from routers import try_router

    environment = {**os.environ, "LITELLM_MASTER_KEY": "sk-none"}
    with tempfile.TemporaryDirectory() as folder:
        try_router(os.environ["TANDEM_BIN"], str(Path(sys.executable).with_name(name)), Path(folder), environment)


for name in ("smg", "vllm-router", "litellm"):

    @case(name, "two servers: stickiness, streaming, drained, killed, restarted")
    def _(name=name):
        try_router(name)


@case("smg", "model and load of a server")
def _():
    import httpx

    from routers import free_port
    from serving import wait_until

    base = f"http://127.0.0.1:{(port := free_port())}"
    words = [Path(sys.executable).with_name("smg"), "launch", "--port", str(port), "--worker-urls", URL]
    words += ["--load-monitor-interval", "1", "--prometheus-port", str(free_port())]
    router = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def loaded():
        try:
            workers = httpx.get(base + "/workers", trust_env=False).json()["workers"]
        except httpx.HTTPError:
            return []
        return [worker for worker in workers if "engine_load" in worker]

    try:
        wait_until(loaded)
        [worker] = loaded()
        assert worker["models"][0]["context_length"] == 1024 and worker["model_id"] == MODEL
        [load] = worker["engine_load"]["loads"]
        assert load["num_total_reqs"] == 0 and load["max_total_num_tokens"] > 0
    finally:
        router.terminate()
        router.wait()


# ---- langchain-openai


def langchain_model(**kwargs):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=URL + "/v1", api_key="none", temperature=0, max_retries=0, **kwargs)


for method in ("json_schema", "function_calling", "json_mode"):

    @case("langchain-openai", f"with_structured_output({method})")
    def _(method=method):
        model = langchain_model(max_tokens=128)
        if method == "json_mode":
            reply = model.with_structured_output(None, method=method).invoke("Answer in JSON: the weather?")
            assert isinstance(reply, dict), reply
        else:
            check(model.with_structured_output(sky_model(), method=method).invoke(QUESTION))


@case("langchain-openai", "bind_tools, streamed and whole, Responses too")
def _():
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    weather = tool(get_weather)
    for kwargs in ({}, {"use_responses_api": True}):
        model = langchain_model(**kwargs).bind_tools([weather])
        messages = [HumanMessage(QUESTION)]
        whole = None
        for chunk in model.stream(messages):
            whole = chunk if whole is None else whole + chunk
        [call] = whole.tool_calls
        messages += [whole, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
        assert model.invoke(messages).text == ANSWER


# ---- llama-index


def llama_index_model():
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL,
        api_base=URL + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=1024,
        temperature=0,
    )


@case("llama-index-llms-openai-like", "as_structured_llm")
def _():
    check(llama_index_model().as_structured_llm(sky_model()).complete(QUESTION).raw)


@case("llama-index-llms-openai-like", "predict_and_call")
def _():
    from llama_index.core.tools import FunctionTool

    reply = llama_index_model().predict_and_call(
        [FunctionTool.from_defaults(get_weather)], QUESTION, tool_required=True
    )
    assert "rainy" in str(reply)


# ---- pydantic-ai


def pydantic_agent(kind="OpenAIChatModel", **kwargs):
    import pydantic_ai.models.openai as models
    from pydantic_ai import Agent
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=URL + "/v1", api_key="none")
    model = getattr(models, kind)(MODEL, provider=provider)
    return Agent(model, model_settings={"temperature": 0}, **kwargs)


for kind in ("OpenAIChatModel", "OpenAIResponsesModel"):

    @case("pydantic-ai-slim", f"NativeOutput, ToolOutput ({kind})")
    def _(kind=kind):
        from pydantic_ai import NativeOutput, ToolOutput

        # Not PromptedOutput: tandem-nano does not do as it is asked in words.
        for way in (NativeOutput, ToolOutput):
            check(pydantic_agent(kind, output_type=way(sky_model())).run_sync(QUESTION).output)

    @case("pydantic-ai-slim", f"tools ({kind})")
    def _(kind=kind):
        agent = pydantic_agent(kind)
        agent.tool_plain(get_weather)
        found = agent.run_sync(QUESTION).output
        assert found == ANSWER and CALLED, found


# ---- instructor


@case("instructor", "TOOLS, TOOLS_STRICT, JSON_SCHEMA")
def _():
    import instructor
    from instructor import Mode

    # Not JSON, whose schema is words of the prompt.
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(), mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        check(
            client.chat.completions.create(
                model=MODEL, messages=messages, response_model=sky_model(), temperature=0, max_retries=0
            )
        )


# ---- smolagents


@case("smolagents", "ToolCallingAgent's model, response_format")
def _():
    from smolagents import OpenAIServerModel, tool

    model = OpenAIServerModel(model_id=MODEL, api_base=URL + "/v1", api_key="none", temperature=0)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]

    @tool
    def get_weather(city: str) -> str:
        """Get the weather of a city

        Args:
            city: the city
        """

    message = model.generate(messages, tools_to_call_from=[get_weather])
    [call] = message.tool_calls
    assert call.function.name == "get_weather"
    sky = sky_model()
    schema = {"type": "json_schema", "json_schema": {"name": "sky", "strict": True, "schema": sky.model_json_schema()}}
    check(sky.model_validate_json(model.generate(messages, response_format=schema).content))


# ---- outlines


@case("outlines", "from_openai, from_vllm: types, choices, regex")
def _():
    import outlines
    from outlines.types import Regex

    sky = sky_model()
    model = outlines.from_openai(openai_client(), MODEL)
    check(sky.model_validate_json(model(QUESTION, sky, temperature=0)))
    model = outlines.from_vllm(openai_client(), MODEL)
    check(sky.model_validate_json(model(QUESTION, sky, temperature=0)))
    assert model(QUESTION, Literal["yes", "no"], temperature=0) in ("yes", "no")
    import re

    assert re.fullmatch("[0-9]{3}", model(QUESTION, Regex("[0-9]{3}"), temperature=0))


# ---- lm-eval


@case("lm-eval", "a local task, loglikelihood and generate_until")
def _():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        rows = [{"q": f"What is {a} + 7? Answer:", "a": [str(a + 7), "no"]} for a in range(3)]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        common = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{q}}",
        }
        tasks = {
            "sums": {
                "output_type": "multiple_choice",
                "doc_to_choice": "{{a}}",
                "doc_to_target": 0,
                "metric_list": [{"metric": "acc"}],
            },
            "says": {
                "output_type": "generate_until",
                "doc_to_target": "{{a[0]}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
                "metric_list": [{"metric": "exact_match"}],
            },
        }
        for name, task in tasks.items():
            (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
        args = f"model={MODEL},base_url={URL}/v1/completions,tokenizer={ROOT / 'configs/models/tandem-nano'}"
        args += ",tokenized_requests=False,num_concurrent=1,max_length=1024"
        words = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", args]
        words += ["--include_path", folder, "--tasks", ",".join(tasks)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-1500:]
        assert "acc" in done.stdout and "exact_match" in done.stdout


# ---- ollama


@case("ollama", "chat with tools, format, stream, list, show")
def _():
    import ollama

    client = ollama.Client(host=URL, timeout=300)
    assert client.list().models[0].model == MODEL
    assert "tools" in client.show(MODEL).capabilities
    messages = [{"role": "user", "content": QUESTION}]
    options = {"temperature": 0}
    reply = client.chat(MODEL, messages=messages, tools=[get_weather], options=options)
    [call] = reply.message.tool_calls
    result = get_weather(**call.function.arguments)
    messages += [reply.message, {"role": "tool", "tool_name": "get_weather", "content": result}]
    reply = client.chat(MODEL, messages=messages, tools=[get_weather], options=options)
    assert reply.message.content == ANSWER, reply.message.content
    sky = sky_model()
    reply = client.chat(MODEL, messages=messages[:1], format=sky.model_json_schema(), options=options)
    check(sky.model_validate_json(reply.message.content))
    parts = client.chat(MODEL, messages=messages[:1], stream=True, options=options)
    assert "".join(part.message.content for part in parts)


# ---- agents


@case("claude-agent-sdk", "Claude Code: tools, images, MCP, interrupt, compaction, resume")
def _():
    import agents

    agents.claude_code()


@case("openai-codex-cli-bin", "Codex: tools, images, patches, MCP, resume")
def _():
    import agents

    agents.codex()


def try_one(function):
    started = time.monotonic()
    CALLED.clear()
    try:
        function()
        result = "passed"
    except ImportError as error:
        result = f"skipped: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        result = f"FAILED: {type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    return result, time.monotonic() - started


def main(names):
    global URL
    from serving import Server

    server = Server(os.environ["TANDEM_BIN"], ROOT / "configs/models/tandem-nano", "--ctx-size", "1024")
    URL = server.url
    rows = []
    try:
        for package, name, function in CASES:
            if names and package not in names:
                continue
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                rows.append((package, "", name, "not installed", 0))
                continue
            rows.append((package, version, name, *try_one(function)))
    finally:
        server.close()
    print("| client | version | what | result | s |\n| --- | --- | --- | --- | --- |")
    for package, version, name, result, seconds in rows:
        print(f"| {package} | {version} | {name} | {result} | {seconds:.1f} |")
    return any("FAILED" in row[3] for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
