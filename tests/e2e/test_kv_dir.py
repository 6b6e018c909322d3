"""--kv-dir: prompts outlive the server on disk, and nothing that is wrong with a file shows in a text."""

import random
import resource
import shutil
import signal
import struct

import httpx
import pytest

from serving import Server, cached, make_model, metric, wait_until

PAGE = 64
PROMPT = random.Random(1).choices(range(3, 900), k=1000)
OPTIONS = ("--max-batch", "2", "--ctx-size", "2048")


@pytest.fixture(scope="module")
def kept(tandem_bin, tiny_model, tmp_path_factory):
    """A directory that a server has left behind, and what it answered."""
    folder = tmp_path_factory.mktemp("kv") / "made"  # the server makes it
    server = start(tandem_bin, tiny_model, folder)
    answer = complete(server, PROMPT)
    assert cached(answer) == 0
    server.close()
    assert len(records(folder)) == 1000 // PAGE
    return folder, answer


@pytest.fixture
def folder(kept, tmp_path):
    """A copy of it, to spoil."""
    return shutil.copytree(kept[0], tmp_path / "kv")


def start(binary, model, folder, *options):
    return Server(binary, model, "--kv-dir", folder, *OPTIONS, *options)


def records(folder):
    return sorted(folder.glob("*.kv"))


def complete(server, prompt, max_tokens=24, **fields):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.9, "seed": 7, **fields}
    reply = httpx.post(
        server.url + "/v1/completions",
        json={**body, "ignore_eos": True, "logprobs": 2},
        timeout=120,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("workers", ["on", "off"])
def test_a_restart(tandem_bin, tiny_model, kept, folder, workers):
    server = start(tandem_bin, tiny_model, folder, "--disaggregate", workers)
    again = complete(server, PROMPT)
    assert again["choices"] == kept[1]["choices"]  # to the last bit
    assert cached(again) == 1000 // PAGE * PAGE
    assert again["timings"]["cache_n"] == cached(again) and again["timings"]["prompt_n"] == 1000 % PAGE
    assert metric(server, "kv_disk_hits_total") == cached(again)
    assert metric(server, "kv_disk_read_bytes_total") == metric(server, "kv_disk_bytes") > 0
    # Only what begins alike, by whole pages: token ids decide.
    other = list(PROMPT)
    other[500] += 1
    assert cached(complete(server, other)) == 500 // PAGE * PAGE
    server.close()


def test_damage(tandem_bin, tiny_model, kept, folder):
    """Records flipped, cut short, grown, empty, of another version or model, swapped, not to be read:
    never served, gone afterwards."""
    # The prompt's first page, which is asked for first, must not be the empty one.
    ids = struct.pack("<32i", *PROMPT[8:40])
    files = sorted(records(folder), key=lambda file: ids not in file.read_bytes())
    assert ids in files[0].read_bytes()
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        spoil = {
            0: lambda: data.__setitem__(-1, data[-1] ^ 1),
            1: lambda: data.__setitem__(4, data[4] + 1),  # version
            2: lambda: data.__setitem__(40, data[40] ^ 128),  # model
            3: lambda: data.__setitem__(130, data[130] ^ 4),  # a token
            4: lambda: data.__delitem__(slice(-100, None)),
            5: lambda: data.clear(),
            6: lambda: data.extend(b"more"),
            7: lambda: data.__setitem__(slice(None), bytearray(files[8].read_bytes())),
            9: lambda: data.__setitem__(slice(None), bytearray(len(data))),
        }.get(number, lambda: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 16))
        spoil()
        file.write_bytes(data)
    server = start(tandem_bin, tiny_model, folder)
    again = complete(server, PROMPT)
    assert again["choices"] == kept[1]["choices"] and cached(again) == 0
    wait_until(lambda: "is dropped" in server.log())
    # The empty one was removed at the start.
    assert metric(server, "kv_disk_dropped_total") == 1 and len(records(folder)) == len(files) - 2
    assert len([line for line in server.lines if "is dropped" in line]) == 1
    server.close()


def test_empty_files_cost_one_start(tandem_bin, tiny_model, kept, folder):
    """As a crash leaves them: they go with a line in the log, and the pages are kept anew."""
    for file in records(folder):
        file.write_bytes(b"")
    server = start(tandem_bin, tiny_model, folder)
    server.await_line(f"{1000 // PAGE} files too short for a KV page are removed")
    assert cached(complete(server, PROMPT)) == 0
    server.close()
    server = start(tandem_bin, tiny_model, folder)
    assert cached(complete(server, PROMPT)) == 960
    server.close()


def test_a_page_that_cannot_be_written(tandem_bin, tiny_model, kept, folder):
    """A directory stands where one page's file should: the others are written all the same."""
    by_age = sorted(records(folder), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in by_age[7:]:
        file.unlink()
    (by_age[7] / "something").mkdir(parents=True)
    server = start(tandem_bin, tiny_model, folder)
    assert cached(complete(server, PROMPT)) == 7 * PAGE
    server.close()
    assert len([file for file in records(folder) if file.is_file()]) == 1000 // PAGE - 1
    server = start(tandem_bin, tiny_model, folder)
    assert cached(complete(server, PROMPT)) == 7 * PAGE
    server.close()


def test_one_flipped_byte_in_the_middle(tandem_bin, tiny_model, kept, folder):
    """What comes before is served, the page itself and what follows is computed, then kept anew."""
    server = start(tandem_bin, tiny_model, folder)
    assert cached(complete(server, PROMPT)) == 960
    server.close()
    by_age = sorted(records(folder), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    data = bytearray(by_age[5].read_bytes())  # a prefix ages from its end on
    data[1000] ^= 1
    by_age[5].write_bytes(data)
    server = start(tandem_bin, tiny_model, folder)
    again = complete(server, PROMPT)
    assert cached(again) == 5 * PAGE and again["choices"] == kept[1]["choices"]
    server.close()
    assert by_age[5].name in server.log()
    server = start(tandem_bin, tiny_model, folder)
    assert cached(complete(server, PROMPT)) == 960
    server.close()


def test_another_model(tandem_bin, folder, tmp_path):
    model = make_model(tmp_path / "other", seed=2)
    server = start(tandem_bin, model, folder)
    assert cached(complete(server, PROMPT)) == 0
    server.close()
    assert len(records(folder)) == 2 * (1000 // PAGE)  # one's own beside the other's


def test_another_kv_dtype(tandem_bin, tiny_model, folder):
    server = start(tandem_bin, tiny_model, folder, "--kv-dtype", "f16")
    assert cached(complete(server, PROMPT)) == 0
    server.close()


@pytest.mark.parametrize("workers", ["on", "off"])
def test_fp8_pages(tandem_bin, tiny_model, folder, workers):
    """They are handed over, reused and kept as others are, beside records in F32, which they leave alone."""
    options = ("--kv-dtype", "fp8", "--disaggregate", workers)
    server = start(tandem_bin, tiny_model, folder, *options)
    answer = complete(server, PROMPT)
    assert cached(answer) == 0
    reused = complete(server, PROMPT)
    assert cached(reused) == 1000 // PAGE * PAGE and reused["choices"] == answer["choices"]
    server.close()
    assert len(records(folder)) == 2 * (1000 // PAGE)
    server = start(tandem_bin, tiny_model, folder, *options)
    again = complete(server, PROMPT)
    assert cached(again) == 1000 // PAGE * PAGE and again["choices"] == answer["choices"]
    server.close()


def test_other_kernels(tandem_bin, tiny_model, folder, monkeypatch):
    """They round otherwise: what they read would not be what they would have written."""
    monkeypatch.setenv("TANDEM_FORCE_ISA", "scalar")
    server = start(tandem_bin, tiny_model, folder)
    assert cached(complete(server, PROMPT)) == 0
    server.close()


def test_memory_under_pressure(tandem_bin, tiny_model, tmp_path):
    """More prompts than memory holds: what it had to let go is found on disk."""
    server = start(tandem_bin, tiny_model, tmp_path / "kv", "--ctx-size", "512")
    rng = random.Random(3)
    prompts = [rng.choices(range(3, 900), k=400) for _ in range(8)]
    first = []
    for prompt in prompts:  # of 16 pages that there are, each fills 6 and takes one more
        first.append(complete(server, prompt, 4))
        wait_until(lambda: len(records(tmp_path / "kv")) >= 6 * len(first) - 7)
    again = [complete(server, prompt, 4) for prompt in prompts]
    assert [a["choices"] for a in again] == [a["choices"] for a in first]
    assert metric(server, "kv_disk_hits_total") > 0
    server.close()
    assert len(records(tmp_path / "kv")) == 8 * 6


def test_a_limit(tandem_bin, tiny_model, kept, tmp_path):
    limit = 5 * records(kept[0])[0].stat().st_size
    for seed in (1, 2):
        prompt = random.Random(seed).choices(range(3, 900), k=1000)
        server = start(tandem_bin, tiny_model, tmp_path / "kv", "--kv-dir-size", str(limit / 2**30 + 1e-6))
        complete(server, prompt)
        server.close()
        assert sum(file.stat().st_size for file in records(tmp_path / "kv")) == limit
    server = start(tandem_bin, tiny_model, tmp_path / "kv")
    assert cached(complete(server, prompt)) == 5 * PAGE  # the last prompt's beginning
    server.close()


def test_a_full_disk(tandem_bin, tiny_model, kept, tmp_path):
    server = start(tandem_bin, tiny_model, tmp_path / "kv")
    first = complete(server, PROMPT)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    server.close()
    assert len([line for line in server.lines if "no more pages are written" in line]) == 1
    assert records(tmp_path / "kv") == [] == list((tmp_path / "kv").glob("*.tmp"))
    assert first["choices"] == kept[1]["choices"]


def test_two_servers(tandem_bin, tiny_model, kept, folder):
    """The second serves without the directory, until the first is gone; a killed one keeps nobody out."""
    first = start(tandem_bin, tiny_model, folder)
    second = start(tandem_bin, tiny_model, folder)
    second.await_line("in use by another process")
    assert cached(complete(second, PROMPT)) == 0
    assert cached(complete(first, PROMPT)) == 960
    second.close()
    first.signal(signal.SIGKILL)
    first.wait()
    third = start(tandem_bin, tiny_model, folder)
    assert cached(complete(third, PROMPT)) == 960
    third.close()


def test_a_directory_that_cannot_be(tandem_bin, tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    server = start(tandem_bin, tiny_model, tmp_path / "file", "--port", "0")
    assert server.wait() == 1 and str(tmp_path / "file") in server.log()
