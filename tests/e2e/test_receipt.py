"""Receipts: what `tandem run --receipt` writes, `tandem verify` computes again to the bit, and what was changed in one
or in the weights is found."""

import json
import shutil
import subprocess

import pytest

from serving import make_model


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
