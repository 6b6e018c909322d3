"""Receipts: what `tandem run --receipt` writes, `tandem verify` computes again to the bit, and what was changed in one
or in the weights is found."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from serving import SANITIZED, Server, make_model, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("receipt") / "m"
    make_model(path)
    return path


def run(tandem_bin, model, receipt, *args):
    command = [tandem_bin, "run", "-m", model, "--receipt", receipt, "-n", "24", "--device", "cpu", *args]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return json.loads(receipt.read_text())


def verify(tandem_bin, model, receipt, *args):
    return subprocess.run([tandem_bin, "verify", receipt, "-m", model, *args], capture_output=True, text=True)


@pytest.mark.parametrize(
    "args",
    [
        ("-p", "hello there", "--temperature", "0"),
        ("-p", "hello there", "--seed", "-9007199254740991", "--temperature", "1.1", "--top-p", "0.8"),
        ("--token-ids", "5,6,7,8", "--ignore-eos", "--temperature", "1", "--top-k", "9", "--repetition-penalty", "1.2"),
        ("-p", "hello there", "--activations", "f32", "--kv-dtype", "f16", "--temperature", "0.7"),
    ],
)
def test_equal(tandem_bin, model, tmp_path, args):
    found = run(tandem_bin, model, tmp_path / "r.json", *args)
    assert len(found["answer"]) == len(found["logprobs"]) > 0 and all(p <= 0 for p in found["logprobs"])
    for threads in "1", "2":
        done = verify(tandem_bin, model, tmp_path / "r.json", "--threads", threads)
        assert done.returncode == 0 and done.stdout == f"equal: {len(found['answer'])} tokens and their " \
            "log-probabilities, to the bit\n", done  # fmt: skip
        assert "warning" not in done.stderr


def test_what_was_changed_is_found(tandem_bin, model, tmp_path):
    path = tmp_path / "r.json"
    found = run(tandem_bin, model, path, "--token-ids", "5,6,7,8", "--ignore-eos", "--temperature", "0")
    assert len(found["answer"]) == 24

    def changed(**members):
        path.write_text(json.dumps(found | members))
        return verify(tandem_bin, model, path)

    assert changed().returncode == 0
    other = found["answer"][:9] + [found["answer"][9] ^ 1] + found["answer"][10:]
    done = changed(answer=other)
    assert done.returncode == 1 and done.stdout.startswith(f"differs: token 9 is {found['answer'][9]} here, with ")
    nearly = found["logprobs"][:20] + [found["logprobs"][20] * (1 + 2e-7)] + found["logprobs"][21:]
    done = changed(logprobs=nearly)  # by one bit or two
    assert done.returncode == 1 and done.stdout.startswith("differs: token 20 is ")
    done = changed(prompt=[5, 6, 7, 9])
    assert done.returncode == 1 and done.stdout.startswith("differs: token ")
    done = changed(computed_by="tandem 0.0.1, CPU, kernels abacus")
    assert done.returncode == 0 and "the receipt is of tandem 0.0.1, CPU, kernels abacus, this is" in done.stderr
    assert "24 tokens" not in changed(logprobs=nearly[1:]).stdout
    assert "it has 23 log-probabilities for 24 tokens" in changed(logprobs=nearly[1:]).stderr


def test_values_out_of_range(tandem_bin, model, tmp_path):
    path = tmp_path / "r.json"
    found = run(tandem_bin, model, path, "--token-ids", "5,6,7", "--temperature", "0")
    for key, value, error in (
        ("prompt", [2**31 - 1, 1], "outside the vocabulary"),
        ("prompt", [], "the prompt is empty"),
        ("prompt", [-1], "a token id is no whole number"),
        ("sampling", found["sampling"] | {"temperature": -5}, "out of range"),
        ("sampling", found["sampling"] | {"top_p": 1e39}, "out of range"),
        ("sampling", found["sampling"] | {"seed": "x"}, "its seed is no number"),
        ("options", {"devices": "x"}, "--devices x"),
    ):
        path.write_text(json.dumps(found | {key: value}))
        done = verify(tandem_bin, model, path)
        assert done.returncode in (1, 2) and error in done.stderr and not done.stdout, (key, value, done)


def test_weights_and_files_that_are_not_it(tandem_bin, model, tmp_path):
    path = tmp_path / "r.json"
    run(tandem_bin, model, path, "--token-ids", "5,6,7")
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.tandem-sha256"))
    assert verify(tandem_bin, copy, path).returncode == 0  # another copy of the same files
    assert list(copy.glob("*.tandem-sha256")), "the digest is kept"
    shard = sorted(copy.glob("*.safetensors"))[-1]
    with open(shard, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    done = verify(tandem_bin, copy, path)
    assert done.returncode == 2 and "not the weights of the receipt" in done.stderr
    (tmp_path / "other.json").write_text("{}")
    done = verify(tandem_bin, model, tmp_path / "other.json")
    assert done.returncode == 1 and "other.json: it is no receipt" in done.stderr
    done = subprocess.run([tandem_bin, "verify", "-m", model], capture_output=True, text=True)
    assert done.returncode == 2 and "needs a receipt" in done.stderr
    command = [tandem_bin, "run", "-p", "x", "-m", model, "--server", "http://127.0.0.1:9", "--receipt", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "leave out --server" in done.stderr


def post(server, path, body):
    return httpx.post(server.url + path, json=body, timeout=120)


def ask(server, i):
    """Of many kinds; those of a kind share a prefix."""
    body = {"receipt": True, "max_tokens": 20 + i % 9, "temperature": [0, 0.7, 1.3][i % 3], "ignore_eos": i % 2 == 0}
    body |= [{}, {"seed": 5 + i}, {"top_p": 0.8, "presence_penalty": 0.5}, {"xtc_probability": 0.5, "top_k": 40}][i % 4]
    text = "the same beginning " * (1 + i % 5 * 9) + str(i)
    if i % 5 == 2:
        answer = post(server, "/v1/completions", body | {"prompt": text, "n": 2, "stream": True})
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        ends = [c for event in events for c in event["choices"] if c["finish_reason"]]
        assert len(ends) == 2 and sum("receipt" in c for event in events for c in event["choices"]) == 2
        return [choice["receipt"] for choice in ends]
    if i % 5 < 2:
        answer = post(server, "/v1/completions", body | {"prompt": text, "n": 1 + i % 2})
    else:
        answer = post(server, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]})
    assert answer.status_code == 200, answer.text
    return [choice["receipt"] for choice in answer.json()["choices"]]


def test_of_a_server(tandem_bin, model, tmp_path):
    """Beside others, from the prefix cache, drafted, and where a worker is killed meanwhile."""
    n = 10 if SANITIZED else 30
    options = ["--receipts", "--max-batch", "4", "--draft", "2", "--ctx-size", "2048"]
    with closing(Server(tandem_bin, model, *options)) as server, ThreadPoolExecutor(8) as pool:
        found = [pool.submit(ask, server, i) for i in range(n)]
        wait_until(lambda: sum(f.done() for f in found) >= 3)
        server.kill_worker()
        receipts = [receipt for one in found for receipt in one.result()]
    assert len(receipts) > n
    for receipt in receipts:
        path = tmp_path / "r.json"
        path.write_text(json.dumps(receipt))
        done = verify(tandem_bin, model, path)
        assert done.returncode == 0 and f"equal: {len(receipt['answer'])} tokens" in done.stdout, (done, receipt)


def test_of_an_answer_that_ends(tandem_bin, model, tmp_path):
    body = {"receipt": True, "prompt": "a", "max_tokens": 200, "temperature": 2, "top_p": 1, "n": 16}
    with closing(Server(tandem_bin, model, "--receipts", "--ctx-size", "512")) as server:
        answers = [post(server, "/v1/completions", body | {"seed": seed}).json() for seed in range(4)]
    ended = [c["receipt"] for answer in answers for c in answer["choices"] if c["finish_reason"] == "stop"]
    assert ended and all(receipt["ended"] for receipt in ended)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(ended[0]))
    done = verify(tandem_bin, model, path)
    assert done.returncode == 0 and f"equal: {len(ended[0]['answer'])} tokens" in done.stdout, done


def test_of_an_answer_that_the_request_ends(tandem_bin, model, tmp_path):
    body = {"receipt": True, "prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with closing(Server(tandem_bin, model, "--receipts")) as server:
        whole = post(server, "/v1/completions", body).json()["choices"][0]
        tokens = whole["receipt"]["answer"]
        found = [post(server, "/v1/completions", body | {"stop_token_ids": [tokens[5]]}).json()["choices"][0]]
        found.append(post(server, "/v1/completions", body | {"stop": whole["text"][20:25]}).json()["choices"][0])
    for choice in found:
        assert choice["finish_reason"] == "stop" and not choice["receipt"]["ended"], choice
        (tmp_path / "r.json").write_text(json.dumps(choice["receipt"]))
        done = verify(tandem_bin, model, tmp_path / "r.json")
        assert done.returncode == 0 and f"equal: {len(choice['receipt']['answer'])} tokens" in done.stdout, done
    assert found[0]["receipt"]["answer"] == tokens[: tokens.index(tokens[5])]


def test_what_a_server_refuses(tandem_bin, model):
    with closing(Server(tandem_bin, model, "--receipts")) as server:
        for path, prompt in ("/v1/completions", {"prompt": "a"}), (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
        ):
            for other, word in (
                ({"logit_bias": {"5": 1}}, "logit_bias"),
                ({"response_format": {"type": "json_object"}}, "constrains"),
                ({"min_tokens": 2}, "min_tokens"),
                ({"receipt": "yes"}, "receipt"),
            ):
                answer = post(server, path, {"receipt": True, "max_tokens": 4} | prompt | other)
                assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text
        assert "receipt" not in post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2}).json()["choices"][0]
    with closing(Server(tandem_bin, model)) as server:
        answer = post(server, "/v1/completions", {"prompt": "a", "receipt": True})
        assert answer.status_code == 400 and "--receipts" in answer.json()["error"]["message"]
