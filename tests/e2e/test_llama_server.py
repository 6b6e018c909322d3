"""llama-server's API as its clients use it: llama.vim, llama.vscode, Continue."""

import json

import httpx
import pytest

from scripted_model import write_model
from serving import Server

LINES = "filled in\n  one more\n  and more\n  the last"
SCRIPTS = {"fim_middle": LINES, "short": "A short answer.", "lines": "\n".join(f"line number {n}" for n in range(300))}
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>")
TIMINGS = ["prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"]
TIMINGS += ["predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"]


@pytest.fixture(scope="module")
def server(tandem_bin, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "fim"
    write_model(out, SCRIPTS, MARKS)
    running = Server(tandem_bin, out, "--max-batch", "3")
    yield running
    running.close()


def post(server, path, body):
    return httpx.post(server.url + path, json=body, trust_env=False, timeout=60)


def get(server, path):
    return httpx.get(server.url + path, trust_env=False, timeout=60)


def complete(server, **body):
    reply = post(server, "/completion", {"temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(server, path, body):
    reply = post(server, path, {"temperature": 0, **body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.rstrip("\n").split("\n\n")
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[len("data: ") :]) for block in blocks]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_completion(server, path):
    whole = post(server, path, {"prompt": "<|short|>", "temperature": 0}).json()
    assert whole["content"] == "A short answer." and whole["stop"] is True and whole["stop_type"] == "eos"
    assert whole["model"] == "fim" and whole["prompt"] == "<|short|>" and whole["tokens"] == []
    assert whole["tokens_evaluated"] == 1 and whole["truncated"] is False and not whole["has_new_line"]
    assert whole["tokens_cached"] == 1 + whole["tokens_predicted"]
    assert set(TIMINGS) <= set(whole["timings"])
    parts = stream(server, path, {"prompt": "<|short|>"})
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["stop_type"] == "eos" and parts[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_how_a_completion_ends(server):
    cut = complete(server, prompt="<|short|>", n_predict=2)
    assert cut["stop_type"] == "limit" and cut["tokens_predicted"] == 2
    word = complete(server, prompt="<|short|>", stop=["", " answer"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("A short", "word", " answer")
    nothing = complete(server, prompt="<|short|>", n_predict=0)  # fills the cache only
    assert nothing["content"] == "" and nothing["stop"] is True
    # The time is over with the first token, but a whole line is waited for.
    late = complete(server, prompt="<|lines|>", t_max_predict_ms=1, n_predict=-1)
    assert late["stop_type"] == "limit" and late["content"].startswith("line number 0\n")
    assert late["tokens_predicted"] < 2000


def test_tokens_and_probabilities(server):
    ids = post(server, "/tokenize", {"content": "<|short|>"}).json()["tokens"]
    for prompt in (ids, [ids], ["<|short|>"], {"prompt_string": "<|short|>"}):
        assert complete(server, prompt=prompt)["content"] == "A short answer."
    whole = complete(server, prompt=ids, return_tokens=True, n_probs=3)
    text = post(server, "/detokenize", {"tokens": whole["tokens"]}).json()
    assert text["content"].startswith("A short answer.")
    chosen = whole["completion_probabilities"]
    assert [c["id"] for c in chosen] == whole["tokens"] and all(len(c["top_logprobs"]) == 3 for c in chosen)
    assert all(c["top_logprobs"][0]["id"] == c["id"] for c in chosen)
    parts = stream(server, "/completion", {"prompt": ids, "return_tokens": True, "n_probs": 1})
    assert [id for part in parts for id in part["tokens"]] == whole["tokens"]


def test_what_shapes_a_completion(server):
    schema = complete(server, prompt="<|short|>", json_schema={"const": 12}, n_predict=20)
    assert schema["content"] == "12"
    assert complete(server, prompt="<|short|>", grammar='root ::= "yes"')["content"] == "yes"
    assert complete(server, prompt="<|short|>", grammar="", json_schema={})["content"] == "A short answer."
    first = post(server, "/tokenize", {"content": "z"}).json()["tokens"][0]
    assert complete(server, prompt="<|short|>", logit_bias=[[first, 100]], n_predict=1)["content"] == "z"
    for wrong in ({}, {"prompt": 1}, {"prompt": ["a", "b"]}, {"prompt": "a", "logit_bias": [["z", "1"]]}):
        refused = post(server, "/completion", wrong)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["code"] == 400 and error["type"] == "invalid_request_error"
    long = post(server, "/completion", {"prompt": "x" * 5000}).json()["error"]
    assert long["type"] == "exceed_context_size_error" and (long["n_prompt_tokens"], long["n_ctx"]) == (5000, 4096)


def test_infill(server):
    """As llama.vim sends it, with what it asks back for."""
    fields = ["content", *(f"timings/{name}" for name in TIMINGS), "truncated", "tokens_cached", "nothing/there"]
    body = {
        "id_slot": 0,
        "input_prefix": "def a():\n",
        "input_suffix": "\nb()\n",
        "input_extra": [],
        "prompt": "  retu",
        "n_predict": 128,
        "stop": [],
        "n_indent": 2,
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 100000,
        "response_fields": fields,
    }
    answer = post(server, "/infill", body).json()
    assert set(answer) == set(fields[:-1]) and answer["content"] == LINES
    around = len(body["input_prefix"] + body["prompt"] + body["input_suffix"]) + 3
    whole = post(server, "/infill", {**body, "response_fields": []}).json()
    assert whole["tokens_evaluated"] == around
    extra = [{"text": "first\n", "filename": "a.py", "time": 1}, {"text": "second\n", "filename": "b.py"}]
    asked = {**body, "input_extra": extra, "response_fields": []}
    beside = len("project\n" + "a.py\nfirst\n" + "b.py\nsecond\n" + "filename\n") + 4
    assert post(server, "/infill", asked).json()["tokens_evaluated"] == around + beside
    # What a file holds is text, whatever it looks like.
    marked = post(server, "/infill", {**asked, "input_prefix": "<|fim_suffix|>", "input_extra": []}).json()
    assert marked["tokens_evaluated"] == len("<|fim_suffix|>  retu\nb()\n") + 3
    # Of files that do not fit the first are left out.
    asked["input_extra"] = [{"text": "x" * 3900, "filename": "big"}, *extra]
    assert post(server, "/infill", asked).json()["tokens_evaluated"] == around + beside
    parts = stream(server, "/infill", asked)
    assert "".join(part["content"] for part in parts) == LINES and parts[-1]["stop"] is True
    warm = post(server, "/infill", {"input_extra": extra, "input_prefix": "", "input_suffix": "", "n_predict": 0})
    assert warm.status_code == 200 and warm.json()["content"] == ""
    for wrong in ({"input_prefix": 1}, {"input_extra": {}}, {"input_extra": [{"filename": "a"}]}):
        assert post(server, "/infill", wrong).status_code == 400
    long = post(server, "/infill", {"input_prefix": "x" * 5000}).json()["error"]
    assert long["type"] == "exceed_context_size_error" and long["n_prompt_tokens"] == 5003


@pytest.mark.parametrize(
    "marks",
    [
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        (),
    ],
)
def test_infill_of_other_families(tandem_bin, tmp_path, marks):
    write_model(tmp_path, {"short": ["x"]}, marks)
    other = Server(tandem_bin, tmp_path)
    try:
        body = {"input_prefix": "ab", "input_suffix": "c", "n_predict": 1}
        answer = post(other, "/infill", body)
        insert = post(other, "/api/generate", {"prompt": "ab", "suffix": "c", "stream": False})
        shown = post(other, "/api/show", {"model": tmp_path.name}).json()
    finally:
        other.close()
    assert ("insert" in shown["capabilities"]) == (".Suffix" in shown["template"]) == bool(marks)
    if marks:
        assert answer.json()["tokens_evaluated"] == insert.json()["prompt_eval_count"] == 6
        return
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 501 and error["type"] == "not_supported_error"
    assert "no tokens for filling in" in error["message"]
    assert insert.status_code == 400 and "does not support insert" in insert.json()["error"]


def test_what_the_server_is(server):
    props = get(server, "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["total_slots"] == 3
    assert "messages[-1]" in props["chat_template"] and props["eos_token"] == "<|im_end|>"
    assert props["modalities"] == {"vision": False, "audio": False} and props["model_alias"] == "fim"
    model = get(server, "/health").json()["models"][0]
    assert props["choices"] == model["choices"] and props["system_fingerprint"] == model["system_fingerprint"]
    (told,) = get(server, "/api/tags").json()["models"]
    large = post(server, "/api/show", {"model": "fim", "padding": "x" * (1 << 17)})
    assert large.status_code == 413 and "a model's name" in large.json()["error"]
    shown = post(server, "/api/show", {"model": "fim"}).json()
    details = shown["details"]
    assert told["details"] == details == get(server, "/api/ps").json()["models"][0]["details"]
    assert details["quantization_level"] == "BF16"
    assert details["parameter_size"] == f"{shown['model_info']['general.parameter_count'] / 1e6:.1f}M" != "0.0M"
    slots = get(server, "/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2] and not any(slot["is_processing"] for slot in slots)
    assert get(server, "/slots?fail_on_no_slot=1").status_code == 200
    assert get(server, "/props?model=other").status_code == 404


@pytest.mark.parametrize(
    "method, path",
    [("POST", "/embedding"), ("POST", "/v1/embeddings"), ("POST", "/rerank"), ("POST", "/api/embed")]
    + [("POST", f"/api/{what}") for what in ("embeddings", "pull", "push", "create", "copy")]
    + [("DELETE", "/api/delete"), ("POST", "/api/blobs/sha256:0")],
)
def test_what_is_not_offered(server, method, path):
    refused = httpx.request(method, server.url + path, json={"model": "fim"}, trust_env=False)
    error = refused.json()["error"]
    message = error if path.startswith("/api") else error["message"]
    assert refused.status_code == 400 and "embeddings" in message or "models" in message, refused.text
