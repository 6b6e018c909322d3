"""The command line as its users meet it: run, bench, eval, inspect; answers, errors, exit codes."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess

import numpy as np
import pytest
from serving import ROOT, Server, make_model
from terminal import Terminal


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("cli") / "tiny", dtype="fp8")


@pytest.fixture
def tandem(tandem_bin):
    def call(*args, stdin=b"", ok=True):
        done = subprocess.run([tandem_bin, *map(str, args)], input=stdin, capture_output=True,
                              timeout=300)
        if ok:
            assert done.returncode == 0, done.stderr.decode()
        return done

    return call


def as_json(done):
    return json.loads(done.stdout)


# ---- run -------------------------------------------------------------------------------------


def test_only_the_answer_is_on_stdout(tandem, model):
    done = tandem("run", "--model", model, "-p", "Hello", "-n", 8, "--seed", 1)
    said = as_json(tandem("run", "--model", model, "-p", "Hello", "-n", 8, "--seed", 1, "--json"))
    assert done.stdout.decode() == said["text"] + "\n"
    assert said["n_output"] == len(said["token_ids"]) == 8
    assert said["finish_reason"] == "length"
    log = done.stderr.decode()
    assert "prefill" in log and "decode" in log and "GB/s" in log


def test_prompt_file_and_stdin_are_one(tandem, model, tmp_path):
    (tmp_path / "p.txt").write_text("Tell me a story")
    args = ["run", "--model", model, "-n", 6, "--temperature", 0]
    answers = {
        tandem(*args, "-p", "Tell me a story").stdout,
        tandem(*args, "-f", tmp_path / "p.txt").stdout,
        tandem(*args, "-f", "-", stdin=b"Tell me a story").stdout,
        tandem(*args, stdin=b"Tell me a story").stdout,
        tandem(*args, stdin=b"Tell me a story\n").stdout,  # echo's line break is not part of it
        tandem(*args, stdin=b"Tell me a story\r\n").stdout,
    }
    assert len(answers) == 1
    assert tandem(*args, stdin=b"Tell me a story\n\n").stdout not in answers


def test_control_tokens_of_a_raw_prompt_are_parsed(tandem, model):
    text = "a<｜end▁of▁sentence｜>b"
    ids = as_json(tandem("inspect", "tokens", "--model", model, stdin=text.encode()))
    said = as_json(tandem("run", "--model", model, "--raw", "-p", text, "-n", 1, "--json"))
    chat = as_json(tandem("run", "--model", model, "-p", text, "-n", 1, "--json"))
    assert 996 in ids and said["n_prompt"] == 1 + len(ids)  # bos
    assert chat["n_prompt"] > 15  # the letters, and the template's own


def test_the_seed_decides(tandem, model):
    def draw(*args):
        return as_json(tandem("run", "--model", model, "-p", "x", "-n", 12, "--json", *args))["token_ids"]

    assert draw("--seed", 5) == draw("--seed", 5) != draw("--seed", 6)
    assert draw("--temperature", 0) == draw("--top-k", 1) == draw("--top-p", 0)
    assert draw() != draw()  # without a seed, afresh


def test_chunks_change_nothing(tandem, model):
    ids = ",".join(str(7 + i % 90) for i in range(150))
    args = ["run", "--model", model, "--raw", "--token-ids", ids, "-n", 16, "--json", "--seed", 3]
    answers = [as_json(tandem(*args, "--prefill-chunk", c))["token_ids"] for c in (1, 7, 64, 149, 512)]
    assert all(answer == answers[0] for answer in answers)


def test_f16_cache_runs(tandem, model):
    said = as_json(tandem("run", "--model", model, "-p", "x", "-n", 4, "--json", "--kv-dtype", "f16"))
    assert said["n_output"] == 4


def test_int8_activations(tandem, model, tmp_path):
    """They change the logits of a 4-bit model, a little, and of no other."""
    small = tmp_path / "int4"
    tandem("quantize", "--model", model, "--to", "int4-g32", "--out", small)

    def logits(folder, activations):
        out = tmp_path / "logits.npy"
        ids = ",".join(str(i * 7 % 900) for i in range(24))
        tandem("eval", "logits", "--model", folder, "--token-ids", ids, "--out", out, "--activations", activations)
        return np.load(out)

    exact, rounded = logits(small, "f32"), logits(small, "int8")
    assert 0 < np.abs(exact - rounded).mean() < 0.03 * exact.std()
    assert np.array_equal(logits(model, "auto"), logits(model, "int8"))


@pytest.mark.parametrize(
    "args, status, words",
    [
        (["run", "-p", "x"], 2, "--model"),
        (["run", "--model", "/nonexistent", "-p", "x"], 1, "/nonexistent/config.json"),
        (["serve", "--config", "/nonexistent"], 2, "there is no such file: write options to it"),
        (["run", "--model", "MODEL", "-p", "x", "--top-p", "2"], 2, "top-p"),
        (["run", "--model", "MODEL", "-p", "x", "--kv-dtype", "q4"], 2, "kv-dtype"),
        (["run", "--model", "MODEL", "-p", "x", "--activations", "int4"], 2, "give f32, auto, int8 or fp8"),
        (["run", "--model", "MODEL", "--token-ids", "999999"], 2, "vocabulary"),
        (["run", "--model", "MODEL", "-p", "x", "--effort", "banana"], 2, "give none, minimal, low"),
        (["run", "--model", "MODEL", "-p", "x", "--ctx-size", "100000000"], 2, "ctx-size"),
        (["run", "--model", "MODEL", "-f", "/nonexistent"], 1, "/nonexistent"),
        (["run", "--model", "MODEL", "-p", "long " * 500, "--ctx-size", "64"], 2, "64"),
        (["eval", "logits", "--model", "MODEL", "--token-ids", "1"], 2, "--out"),
        (["eval", "logits", "--model", "MODEL", "--token-ids", "1", "--out", "/nonexistent/x"], 1, "/nonexistent/x"),
        (["eval", "perplexity", "--model", "MODEL"], 2, "--file"),
        (["eval", "chat", "--model", "MODEL", "--suite", "/nonexistent"], 1, "/nonexistent"),
        (["inspect", "template", "--model", "MODEL"], 2, "--input"),
        (["bench", "--server", "ftp://x"], 2, "http://"),
        (["bench", "--server", "http://127.0.0.1:9", "--load", "square"], 2, "poisson"),
        (["bench", "--server", "http://127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["dance"], 2, "dance"),
    ],
)
def test_errors_name_the_thing(tandem, model, args, status, words):
    done = tandem(*[str(model) if a == "MODEL" else a for a in args], ok=False)
    assert done.returncode == status, done.stderr.decode()
    assert words in done.stderr.decode()
    assert done.stdout == b""


def test_no_file_of_an_option_blocks(tandem, model, tmp_path):
    """A FIFO without a writer is refused, whichever option names it; so is NaN where a number is meant."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    serve = ["serve", "--model", model, "--port", 0]
    for args in (
        [*serve, "--api-keys", fifo],
        [*serve, "--api-key-file", fifo],
        [*serve, "--config", fifo],
        [*serve, "--trace", fifo],
        ["run", "--model", model, "-f", fifo],
        ["run", "--model", model, "--token-ids", f"@{fifo}"],
        ["eval", "perplexity", "--model", model, "-f", fifo],
        ["eval", "chat", "--model", model, "--suite", fifo],
        ["inspect", "template", "--model", model, "--input", fifo],
    ):
        done = tandem(*args, ok=False)
        assert done.returncode in (1, 2) and str(fifo) in done.stderr.decode(), (args, done.stderr)
    for args in ["--sleep-after", "nan"], ["--kv-dir-size", "nan"], ["--expert-cache", "nan"], ["--sleep-after", "inf"]:
        done = tandem(*serve, *args, ok=False)
        assert done.returncode == 2 and args[0] in done.stderr.decode(), (args, done.stderr)


def test_more_threads_than_cpus_are_warned_of(tandem, model):
    done = tandem("run", "--model", model, "-p", "x", "-n", 1, "--threads", 1000)
    assert "--threads 1000" in done.stderr.decode()


@pytest.mark.parametrize("where", ["full", "closed"])
@pytest.mark.parametrize(
    "args",
    [
        ["run", "--model", "MODEL", "-p", "x", "-n", "4"],
        ["run", "--model", "MODEL", "-p", "x", "-n", "4", "--json"],
        ["inspect", "--model", "MODEL"],
        ["inspect", "tokens", "--model", "MODEL"],
        ["eval", "perplexity", "--model", "MODEL", "-f", "TEXT", "--json"],
        ["bench", "--model", "MODEL", "-p", "4", "-n", "2", "-r", "1"],
        ["--version"],
        ["help", "--markdown"],
        ["run", "--help"],
    ],
)
def test_output_that_is_lost_is_an_error(tandem_bin, model, tmp_path, args, where):
    (tmp_path / "t.txt").write_text("some words " * 8)
    known = {"MODEL": model, "TEXT": tmp_path / "t.txt"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [tandem_bin, *[known.get(a, a) for a in args]], input=b"x", stderr=subprocess.PIPE, timeout=300,
            stdout=full, preexec_fn=(lambda: os.close(1)) if where == "closed" else None)
    assert done.returncode == 1
    assert b"standard output" in done.stderr


@pytest.mark.parametrize("kib", [256, 64])
def test_a_small_stack_is_enough(tandem, tandem_bin, model, kib):
    """The soft limit is raised; where the hard one forbids it, that is said."""
    args = ["run", "--model", model, "-p", "word " * 100, "-n", "4", "--temperature", "0"]
    whole = tandem(*args).stdout
    small = subprocess.run(["sh", "-c", f'ulimit -Ss {kib}; exec "$0" "$@"', tandem_bin, *args],
                           capture_output=True, timeout=300)
    assert (small.returncode, small.stdout) == (0, whole)
    if os.getuid():
        hard = subprocess.run(["sh", "-c", f'ulimit -s {kib}; exec "$0" "$@"', tandem_bin, *args],
                              capture_output=True, timeout=300)
        assert hard.returncode == 1 and b"ulimit -Hs" in hard.stderr


def test_a_file_beyond_its_limit_is_an_error(tandem_bin, model, tmp_path):
    """Not a signal that ends the program without a word."""
    with open(tmp_path / "out", "wb") as out:
        done = subprocess.run([tandem_bin, "inspect", "--model", model], stdout=out, stderr=subprocess.PIPE, timeout=300,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16)))
    assert done.returncode == 1 and b"standard output" in done.stderr


# ---- a terminal ------------------------------------------------------------------------------


def test_ctrl_c_stops_the_answer_not_the_program(tandem_bin, model):
    terminal = Terminal(tandem_bin, "run", "--model", model, "-n", "1000000", "--ignore-eos")
    terminal.wait_for(b"> ")
    for _ in range(2):
        terminal.send(b"hello\n")
        terminal.wait_for(b"hello\r\n")
        terminal.wait_for_bytes(8)  # of the answer; before it, Ctrl-C would take the line away
        terminal.send(b"\x03")
        terminal.wait_for(b"tokens/s")
        terminal.wait_for(b"> ")
    terminal.send(b"\x03")  # at the prompt: the line is cleared
    terminal.wait_for(b"> ")
    terminal.send(b"\x04")
    assert terminal.end() == 0


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def hostile_copy(model, out):
    """The checkpoint again, whose template, tokens and configuration hold escape sequences."""
    shutil.copytree(model, out)
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {t["id"] for t in tokenizer["added_tokens"]}
    tokenizer["model"]["merges"] = []
    for name, number in list(vocab.items()):  # nearly every token the model may draw says one
        if number not in taken and len(name) > 1:
            added = {"id": number, "content": f"{ESCAPES}{number}", "special": False, "single_word": False}
            tokenizer["added_tokens"].append(added | {"lstrip": False, "rstrip": False, "normalized": False})
            del vocab[name]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    return out


@pytest.mark.parametrize("args", [["run", "-p", "x", "-n", "24", "--seed", "1", "--ignore-eos"], ["inspect", "template"], ["bad"]])
def test_escapes_never_reach_a_terminal(tandem_bin, model, tmp_path, args):
    (tmp_path / "t.jinja").write_text("{{ '\\x1b]0;owned\\x07' }}" + ESCAPES + "\u20ac")
    (tmp_path / "in.json").write_text('{"messages": []}')
    if args[0] == "inspect":
        args = [*args, "--template", tmp_path / "t.jinja", "--input", tmp_path / "in.json"]
    elif args[0] == "bad":
        args = ["run", "--model", f"/nonexistent/{ESCAPES}", "-p", "x"]
    else:
        args = [*args, "--model", hostile_copy(model, tmp_path / "hostile")]
    terminal = Terminal(tandem_bin, *args)
    status = terminal.end()
    assert status == ("/nonexistent" in str(args[2])), terminal.seen
    text = terminal.seen.decode("utf-8")
    assert not set(text) & (set(map(chr, range(32))) - set("\t\r\n") | set(map(chr, range(127, 160))))
    assert "\\x1b]0;owned\\x07" in text and ("\u20ac" in text or args[0] == "run")


def test_nul_does_not_end_a_conversation(tandem, model, tmp_path):
    for name, text in ("nul", b"a\0b"), ("replaced", "a\ufffdb".encode()):
        (tmp_path / name).write_bytes(text)
    args = ("run", "--model", model, "-n", "8", "--temperature", "0")
    answers = [tandem(*args, "-f", tmp_path / name).stdout for name in ("nul", "replaced")]
    assert answers[0] == answers[1] and answers[0]


def test_interrupting_one_answer_says_so(tandem_bin, model):
    child = subprocess.Popen(
        [tandem_bin, "run", "--model", model, "-p", "x", "-n", "1000000", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, log = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"decode" in log


# ---- eval and inspect ------------------------------------------------------------------------


def test_logits_are_written_whole_or_not_at_all(tandem, model, tmp_path):
    out = tmp_path / "logits.npy"
    tandem("eval", "logits", "--model", model, "--token-ids", "1,2,3", "--out", out)
    logits = np.load(out)
    assert logits.dtype == np.float32 and logits.shape[0] == 3 and np.isfinite(logits).all()
    tandem("eval", "logits", "--model", model, "--token-ids", "1,99999999", "--out", tmp_path / "no.npy", ok=False)
    assert [p.name for p in tmp_path.iterdir()] == ["logits.npy"]


def plain_ids(tandem, model, text):
    """The tokens of a plain prompt: with bos in front, where the model wants one."""
    config = json.loads((model / "tokenizer_config.json").read_text())
    bos = config["bos_token"] if config.get("add_bos_token") else ""
    bos = bos["content"] if isinstance(bos, dict) else bos
    return json.loads(tandem("inspect", "tokens", "--model", model, stdin=(bos + text).encode()).stdout)


def test_perplexity_agrees_with_the_logits(tandem, model, tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 3
    (tmp_path / "t.txt").write_text(text)
    said = as_json(tandem("eval", "perplexity", "--model", model, "-f", tmp_path / "t.txt", "--json"))
    ids = plain_ids(tandem, model, text)
    tandem("eval", "logits", "--model", model, "--token-ids", ",".join(map(str, ids)), "--out", tmp_path / "l.npy")
    rows = np.load(tmp_path / "l.npy").astype(np.float64)
    log_p = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    nll = -np.mean([log_p[i, ids[i + 1]] for i in range(len(ids) - 1)])
    assert said["n_tokens"] == len(ids) - 1
    assert said["nll"] == pytest.approx(nll, rel=1e-6)


def test_suite_counts_right_and_wrong(tandem, model, tmp_path):
    ask = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [
        ask | {"kind": "any", "match": "contains", "expect": ["nothing like this", ""]},
        ask | {"kind": "none", "expect": "an answer that random weights never give"},
    ]
    suite = tmp_path / "suite.jsonl"
    suite.write_text("\n".join(map(json.dumps, lines)) + "\n")
    said = as_json(tandem("eval", "chat", "--model", model, "--suite", suite, "-n", 8, "--json"))
    assert (said["right"], said["questions"]) == (1, 2)
    suite.write_text(json.dumps(ask) + "\n")
    done = tandem("eval", "chat", "--model", model, "--suite", suite, ok=False)
    assert done.returncode == 1 and b"line 1" in done.stderr and b"expect" in done.stderr


def test_tokens_there_and_back(tandem, model):
    text = "Größe 12 → naïve\n  code();"
    ids = tandem("inspect", "tokens", "--model", model, stdin=text.encode()).stdout
    assert tandem("inspect", "tokens", "--model", model, "--decode", stdin=ids).stdout.decode() == text
    assert tandem("inspect", "tokens", "--model", model, "--decode", stdin=b"[1, 2", ok=False).returncode == 1


def test_routing_counts_every_choice(tandem, model, tmp_path):
    (tmp_path / "t.txt").write_text("some words to route " * 40)
    said = as_json(tandem("inspect", "routing", "--model", model, "-f", tmp_path / "t.txt", "--json"))
    ids = plain_ids(tandem, model, "some words to route " * 40)
    top_k = json.loads((model / "config.json").read_text())["num_experts_per_tok"]
    assert said["layers"]
    for layer in said["layers"]:
        assert sum(layer["counts"]) == len(ids) * top_k
    for found in said["found_in_memory"]:
        assert 0 <= max(found["aged"], found["lru"], found["lfu"]) <= found["optimum"] < 1
    assert [found["experts_in_memory"] for found in said["found_in_memory"]] == [0.1, 0.25, 0.5, 0.75, 0.9]


# ---- bench -----------------------------------------------------------------------------------


@pytest.mark.no_asan
def test_bench_reports_speed_and_machine(tandem, model):
    done = tandem("bench", "--model", model, "-p", "8", "-n", 4, "-d", "0,70", "-b", "1,3", "-r", 2, "--json")
    head, *results = map(json.loads, done.stdout.splitlines())
    assert head["machine"]["read_gbps"] > 0 and head["machine"]["threads"] >= 1
    kinds = [(r["kind"], r["depth"], r["batch"]) for r in results]
    assert kinds == [("prefill", 0, 1), ("decode", 0, 1), ("decode", 0, 3),
                     ("prefill", 70, 1), ("decode", 70, 1), ("decode", 70, 3)]
    assert all(r["tokens_per_s"]["median"] > 0 and r["gbps"] > 0 for r in results)
    assert b"tok/s" in tandem("bench", "--model", model, "-p", "4", "-n", 2, "-r", 1).stdout


@pytest.mark.no_asan
@pytest.mark.parametrize("load", ["concurrency", "poisson", "gamma", "constant"])
def test_bench_drives_a_server(tandem, tandem_bin, model, load):
    server = Server(tandem_bin, model)
    try:
        args = ["--requests", 6, "--concurrency", 3, "--rate", 50, "-p", 20, "-n", 5, "--load", load]
        said = as_json(tandem("bench", "--server", server.url, *args, "--json"))
    finally:
        server.signal()
        server.wait()
    assert (said["requests"], said["failed"]) == (6, 0)
    assert said["output_tokens"] == 30
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 < said[name]["p50"] <= said[name]["p90"] <= said[name]["p99"]
    assert said["ttft_ms"]["p50"] < said["e2e_ms"]["p50"]
    assert said["goodput_per_s"] == pytest.approx(said["requests_per_s"])


# ---- as a library ----------------------------------------------------------------------------


def test_embedding_gives_the_same_answer(tandem, model, build_dir):
    messages = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
    driver = build_dir / "bin" / "embed_driver"
    done = subprocess.run([driver, model, "12", messages, "0"], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    answer = tandem("run", "--model", model, "-p", "Hello", "-n", 12, "--temperature", 0).stdout
    said = as_json(tandem("run", "--model", model, "-p", "Hello", "-n", 12, "--temperature", 0, "--json"))
    n = said["n_prompt"]
    stopped = int(said["finish_reason"] == "stop")
    first = answer + f"{n} 0 {said['n_output']} {stopped}\n".encode()
    second = answer + f"{n} {n - 1} {said['n_output']} {stopped}\n".encode()
    assert done.stdout == first + second
    cut = subprocess.run([driver, model, "12", messages, "1"], capture_output=True, timeout=120)
    assert cut.returncode == 0 and len(cut.stdout) < len(done.stdout)


@pytest.mark.parametrize("messages, words", [("{", "JSON"), ('{"messages": 5}', ""), ("[]", "object")])
def test_embedding_reports_errors(model, build_dir, messages, words):
    driver = build_dir / "bin" / "embed_driver"
    done = subprocess.run([driver, model, "4", messages, "0"], capture_output=True, timeout=120)
    assert done.returncode == 1 and done.stderr and words in done.stderr.decode()
    done = subprocess.run([driver, "/nonexistent", "4", messages, "0"], capture_output=True, timeout=120)
    assert done.returncode == 1 and b"/nonexistent" in done.stderr


def completed(tandem_bin, *words, cwd=None):
    """What bash offers for the last of the words."""
    script = (
        'source <("$BIN" help --bash); COMP_WORDS=(tandem "$@"); COMP_CWORD=$#; _tandem; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    env = {**os.environ, "BIN": str(tandem_bin)}
    done = subprocess.run(["bash", "-c", script, "_", *words], env=env, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_completion_of_bash(tandem_bin):
    assert completed(tandem_bin, "r") == ["run", "recommend", "rm"]
    assert completed(tandem_bin, "eval", "") == ["logits", "perplexity", "chat"]
    assert completed(tandem_bin, "serve", "--kv-d") == ["--kv-dtype", "--kv-dir", "--kv-dir-size"]
    assert completed(tandem_bin, "run", "--kv-dtype", "f") == ["f32", "f16", "fp8"]
    assert completed(tandem_bin, "inspect", "routing", "--f") == ["--file"]
    assert "--tensors" in completed(tandem_bin, "inspect", "--") and "kernels" in completed(tandem_bin, "bench", "")
    assert completed(tandem_bin, "run", "--file", "") == []  # files, by bash itself


def test_completion_of_models(tandem_bin, tmp_path):
    for command in ("run", "serve", "pull", "inspect", "rm"):
        assert completed(tandem_bin, command, "gpt") == ["gpt-oss-120b", "gpt-oss-20b"]
        assert completed(tandem_bin, command, "qwen3-30") == ["qwen3-30b-a3b"]
    assert completed(tandem_bin, "bench", "gpt") == [] and completed(tandem_bin, "run", "--port", "gpt") == []
    (tmp_path / "gpt-oss-of-mine").mkdir()
    names = completed(tandem_bin, "bench", "-m", "gpt", cwd=tmp_path)
    assert names == ["gpt-oss-120b", "gpt-oss-20b", "gpt-oss-of-mine"]
    assert "/etc/passwd" in completed(tandem_bin, "run", "--model", "/etc/pass")
    for shell, part in (("zsh", "models:model:("), ("fish", "from run serve pull inspect rm' -a '")):
        text = subprocess.run([tandem_bin, "help", "--" + shell], capture_output=True, text=True, check=True).stdout
        assert part + "kimi-k2-instruct-0905 deepseek-v3.1 " in text


@pytest.mark.parametrize("form", ["zsh", "fish", "man"])
def test_other_forms_of_the_options(tandem_bin, tmp_path, form):
    """Every option is there, and the shell or man reads the text without complaint, where it is installed."""
    text = subprocess.run([tandem_bin, "help", "--" + form], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"`--([a-z0-9-]+)", (ROOT / "configs/README.md").read_text())
    assert len(names) > 80
    for name in names:
        assert {"zsh": "--" + name, "fish": "-l " + name, "man": "\\-\\-" + name.replace("-", "\\-")}[form] in text
    file = tmp_path / "text"
    file.write_text(text)
    if shutil.which(form):
        words = ["man", "--warnings", "-l"] if form == "man" else [form, "-n"]
        done = subprocess.run([*words, file], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
