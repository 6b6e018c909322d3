"""The kernel and layer benches run, and their JSON is what bench/README.md says. No time limits."""

import http.server
import json
import os
import re
import socket
import subprocess
import threading
import time

import httpx
import pytest

from serving import Server, make_model

pytestmark = pytest.mark.no_asan

FIELDS = {
    "kernel", "variant", "format", "rows", "cols", "batch", "threads", "ms", "gbps", "gflops",
    "read_gbps", "share_of_read_bandwidth", "share_of_peak",
}  # fmt: skip


def bench(tandem_bin, *args):
    done = subprocess.run([tandem_bin, "bench", *args], capture_output=True, text=True)
    return done


def records(tandem_bin, *args):
    done = bench(tandem_bin, *args, "--repeat", "1", "--json")
    assert done.returncode == 0, done.stderr
    machine, *found = map(json.loads, done.stdout.splitlines())
    limits = machine["machine"]["limits"]
    assert limits and all(limit["read_gbps"] > 0 for limit in limits)
    threads = {limit["threads"] for limit in limits}
    for record in found:
        assert set(record) == FIELDS
        assert record["ms"] > 0 and record["gbps"] > 0 and record["gflops"] > 0
        assert record["threads"] in threads
        share = record["gbps"] / record["read_gbps"]  # as measured beside it
        assert record["share_of_read_bandwidth"] == pytest.approx(share)
    return found


@pytest.mark.slow
def test_kernels(tandem_bin):
    found = records(
        tandem_bin, "kernels", "--format", "mxfp4", "--batch", "1,2", "--n-weights", "2",
        "--threads", "1", "--repeat", "1",
    )  # fmt: skip
    assert {r["format"] for r in found} == {"mxfp4"}
    assert {(r["rows"], r["cols"]) for r in found} == {(2048, 7168), (7168, 2048)}
    assert {r["batch"] for r in found} == {1, 2}
    assert "scalar" in {r["variant"] for r in found}
    first = found[0]
    flops = 2 * first["rows"] * first["cols"] * first["batch"]
    assert first["gflops"] == pytest.approx(flops / first["ms"] * 1e-6)


def doctor(tandem_bin, *args, **env):
    done = subprocess.run([tandem_bin, "doctor", *args], capture_output=True, text=True, env=os.environ | env)
    *lines, sums = done.stdout.splitlines()
    found = [(line[:6].strip(), line[7:21].strip(), line[22:]) for line in lines]
    for name in ("fine", "slow", "WRONG"):
        assert f"{sum(word == name for word, _, _ in found)} {name.lower()}" in sums
    return done.returncode, {what: (word, text) for word, what, text in found}


def test_doctor(tandem_bin, tmp_path):
    make_model(tmp_path / "m")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found = doctor(tandem_bin, "--model", tmp_path / "m", "--port", str(port), "-t", "2")
    assert code == 0
    assert found["port"] == ("-", f"{port}: Address already in use: tandem serve --port takes another")
    assert found["CPU's results"][0] == "fine" and "known answers" in found["CPU's results"][1]
    assert {"CPU", "memory", "memory rate", "arithmetic", "huge pages", "drive"} <= set(found)


def test_doctor_of_a_gpu(tandem_bin, build_dir):
    library = build_dir / "bin" / "libtandem_cuda_emu.so"
    if not library.exists():
        pytest.skip(f"no {library}: the emulator needs a C++ compiler")
    code, found = doctor(tandem_bin, TANDEM_CUDA_LIB=str(library))
    assert code == 0
    assert found["GPU"][0] == found["GPU's results"][0] == "fine"


def test_comm(tandem_bin):
    done = bench(
        tandem_bin, "comm", "--ranks", "1,3", "--bytes", "4096,1000000", "--repeat", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    collectives = ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    assert [(r["ranks"], r["bytes"], r["collective"]) for r in found] == [
        (n, size, name) for n in (1, 3) for size in (4096, 1000000) for name in collectives
    ]
    assert all(r["backend"] == "host" and r["device"].startswith("cpu") for r in found)
    assert all(r["ms"] > 0 and (r["gbps"] > 0) == (r["ranks"] > 1) for r in found)
    done = bench(tandem_bin, "comm", "--comm", "nccl")
    assert done.returncode == 1 and "is not a GPU" in done.stderr


def test_layer(tandem_bin):
    found = records(
        tandem_bin, "layer", "--format", "fp8-b128", "--batch", "1,3", "--n-weights", "2",
        "--threads", "1,2",
    )  # fmt: skip
    assert [(r["batch"], r["threads"]) for r in found] == [(1, 1), (3, 1), (1, 2), (3, 2)]
    assert {(r["kernel"], r["rows"], r["cols"]) for r in found} == {("moe_layer", 2048, 7168)}
    # Both of two experts, whatever the routing: bytes can be counted.
    weights = 2 * 3 * 2048 * 7168
    for r in found:
        assert r["gbps"] * r["ms"] * 1e6 == pytest.approx(weights, rel=0.001)


def test_layer_on_two_nodes(tandem_bin, monkeypatch):
    """One node that passes for two: alone and together they read the same, and nothing is counted twice."""
    options = ["layer", "--format", "int4-g128", "--batch", "2", "--n-weights", "1", "--nodes", "-r", "1"]
    monkeypatch.setenv("TANDEM_FAKE_NODES", "2")
    done = bench(tandem_bin, *options, "--threads", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert [(r["batch"], r["threads"], len(r["nodes"])) for r in found] == [(2, 1, 1), (2, 2, 2)]
    for r in found:
        assert set(r) == FIELDS | {"nodes"} | ({"over_one_node"} if len(r["nodes"]) > 1 else set())
        read = sum(node["local_bytes"] + node["remote_bytes"] for node in r["nodes"])
        assert read == 3 * 2048 * 7168 / 2  # of the one expert, without scales
    assert found[0]["nodes"][0]["remote_bytes"] == 0


def plan(tandem_bin, *args):
    done = subprocess.run([tandem_bin, "plan", *args], capture_output=True, text=True)
    return done


def test_plan(tandem_bin, tiny_model):
    options = ["--model", tiny_model, "-p", "64,512", "-b", "1,4", "--depth", "100"]
    mine = json.loads(plan(tandem_bin, *options, "--json").stdout)  # on this machine, measured
    assert mine["gflops"] > 0 and mine["read_gbps"] > 0 and mine["gpus"] == 0 and "gpu" not in mine
    assert [p["tokens"] for p in mine["prompts"]] == [64, 512] and [d["batch"] for d in mine["decode"]] == [1, 4]
    for p in mine["prompts"]:
        assert p["tokens_per_s"] == pytest.approx(p["tokens"] / p["seconds"])
        assert p["seconds"] >= max(p["busy_s"].values()) * 0.999
    for d in mine["decode"]:
        seconds = [draft["seconds"] for draft in d["drafts"]]
        assert d["seconds"] < seconds[0] < seconds[1] < seconds[2]
    known = json.loads(plan(tandem_bin, *options, "--json", "--machine", "h100").stdout)
    assert known["gpu"]["kv_tokens"] > 0 and known["prompts"][0]["plan"].startswith("layers 0")
    assert not known["assumed"]
    text = plan(tandem_bin, *options, "--machine", "epyc-9355x2+rtx-5090+rtx-5090").stdout
    assert "machine       2x EPYC 9355" in text and "prompt        512 tokens: " in text
    assert re.search(r"on the GPU    \d+\.\d\d [MK]iB of weights", text) and " 0.00 " not in text.split("prompt ")[0], text
    assert "6400, 2 x RTX 5090: reads 980.0 GB/s, computes 6400 GFLOP/s (assumed)" in text
    assert "GPU           RTX 5090, 32 GiB: 55 GB/s to it" in text
    assert re.search(r"\n  limit       [\w ']+, busy for \d+ % of the time\n  faster      [\d.]+ times with ", text)
    assert "decode        4 requests behind 100 tokens: " in text
    assert re.search(r"\n  drafts      of which 70 % are right: 1 a step: [\d.]+ tokens/s, (never pays|pays from)", text)
    missing = plan(tandem_bin, *options, "--machine", "no-such")
    assert missing.returncode == 2 and "no-such is neither a file nor a known machine" in missing.stderr
    for cards, says in (("rtx-1", "rtx-1 is no known card: rtx-3060, "), ("rtx-3060+rtx-3090", "all alike")):
        wrong = plan(tandem_bin, *options, "--machine", "desktop-64gb+" + cards)
        assert wrong.returncode == 2 and says in wrong.stderr


def test_plan_of_a_context(tandem_bin):
    """Keys and values are for the requests that are planned; longer contexts leave less for experts."""
    on_card = ["-m", "Qwen3-30B-A3B", "--machine", "epyc-9355x2+rtx-5090", "--json"]

    def gpu(*options):
        return json.loads(plan(tandem_bin, *on_card, *options).stdout)["gpu"]

    assert gpu()["kv_tokens"] == 32768 and gpu("-b", "1,2")["kv_tokens"] == 65536
    short, long = gpu("-c", "4096"), gpu("-c", "40960")
    assert (short["kv_tokens"], long["kv_tokens"]) == (4096, 40960)
    assert long["kv_bytes"] == 10 * short["kv_bytes"]
    assert long["resident_bytes"] < short["resident_bytes"]
    asked = gpu("-p", "2048", "-b", "1,2")  # nobody asks for more keys than of the prompt and its answer
    assert asked["kv_tokens"] == 2 * 3072 and asked["resident_bytes"] > gpu()["resident_bytes"]
    assert gpu("-p", "2048", "-d", "30000")["kv_tokens"] == 31040
    alone = ["-m", "Qwen3-30B-A3B", "--machine", "desktop-64gb"]
    assert json.loads(plan(tandem_bin, *alone, "-c", "1024", "--json").stdout)["kv_bytes"] == 48 * 2 * 512 * 4 * 1024
    assert "192.00 MiB for keys and values of 1024 tokens (with --ctx-size 1024)" in plan(tandem_bin, *alone, "-c", "1024").stdout
    too_long = plan(tandem_bin, *alone, "-c", "1000000")
    assert too_long.returncode == 2 and "longest context is 40960 tokens" in too_long.stderr


def test_plan_of_names_that_are_nearly_right(tandem_bin):
    for model, machine, meant in (
        ("qwen3-30b", "desktop-64gb", "Qwen3-30B-A3B"),
        ("Qwen3-30B-A3B", "desktop-64g", "desktop-64gb"),
        ("Qwen3-30B-A3B", "desktop-64gb+rtx-4080", "rtx-4090"),
    ):
        wrong = plan(tandem_bin, "-m", model, "--machine", machine)
        assert wrong.returncode == 2 and f"did you mean {meant}?" in wrong.stderr


def test_plan_of_drafts_as_the_server_makes_them(tandem_bin):
    on_card = ["--machine", "desktop-64gb+rtx-4090", "--json"]

    def drafts(*options):
        found = json.loads(plan(tandem_bin, *options).stdout)["decode"]
        return [[draft["n"] for draft in d["drafts"]] for d in found]

    assert drafts("--model", "gpt-oss-20b", *on_card) == [[]]
    text = plan(tandem_bin, "--model", "gpt-oss-20b", "--machine", "desktop-64gb").stdout
    assert "  drafts      none: keys that have left a window do not come back\n" in text
    moonlight = ["--model", "Moonlight-16B-A3B", "-b", "1,4,6,8,16,32,64"]
    # At most 16 tokens a step on a GPU, at most 32 drafts on the CPU.
    assert drafts(*moonlight, *on_card) == [[1, 2, 3], [1, 2, 3], [1], [1], [], [], []]
    assert drafts(*moonlight, "--machine", "desktop-64gb", "--json") == 4 * [[1, 2, 3]] + [[1, 2], [1], []]
    cached = ["--model", "Qwen3-235B-A22B", "--machine", "epyc-9355x2+rtx-5090", "--expert-cache", "4"]
    text = plan(tandem_bin, *cached).stdout
    assert "  drafts      none: a cache of experts is for steps of one token a request\n" in text
    states = ["--model", "Qwen3-Next-80B-A3B", "--machine", "epyc-9355x2", "--json", "-b", "2,3,4,9"]
    assert drafts(*states) == [[1, 2, 3], [1, 2], [1, 2], []]


def test_plan_of_a_drive(tandem_bin, tmp_path):
    """Where memory is too small: bytes that are not there over the drive's rate; and what more memory would bring."""
    machine = {"memory_gib": 62, "cores": 16, "read_gbps": 72, "gflops": 1300, "layer_us": 15, "drive_gbps": 5}

    def planned(**changed):
        (tmp_path / "m.json").write_text(json.dumps(machine | changed))
        options = ["--model", "gpt-oss-120b", "--machine", f"{tmp_path}/m.json+rtx-5090", "-p", "8192", "--json"]
        return json.loads(plan(tandem_bin, *options).stdout)

    found = planned()
    missing = found["expert_bytes"] * (1 - found["experts_in_memory"])
    assert found["prompts"][0]["seconds"] == pytest.approx(missing / 5e9, rel=0.02)
    assert found["prompts"][0]["binds"] == found["decode"][0]["binds"] == "the drive"
    assert 0.3 < found["experts_in_memory"] < found["found_in_memory"] < 1
    assert any("GiB more memory" in lift["by"] for lift in found["decode"][0]["lifts"])
    twice = planned(drive_gbps=10)
    assert twice["decode"][0]["seconds"] < 0.6 * found["decode"][0]["seconds"]
    whole = planned(memory_gib=256)
    assert "drive_gbps" not in whole and whole["decode"][0]["seconds"] < 0.4 * found["decode"][0]["seconds"]
    text = plan(tandem_bin, "--model", "gpt-oss-120b", "--machine", "desktop-64gb").stdout
    assert "others come from the drive at 6.5 GB/s" in text


def test_plan_what_if(tandem_bin):
    """What a change brings is what the plan of a machine that has it says; fastest first."""
    options = ["--model", "Qwen3-235B-A22B", "--format", "int4-g128", "-p", "512,8192", "--json"]

    def planned(machine, *more):
        return json.loads(plan(tandem_bin, *options, "--machine", machine, *more).stdout)

    found = planned("desktop-64gb", "--what-if")
    first, *changed = found["what_if"]
    assert first["with"] == "as it is" and "what_if" not in planned("desktop-64gb")
    assert first["tokens_per_s"] == pytest.approx(found["decode"][0]["tokens_per_s"])
    assert first["prompt_seconds"] == pytest.approx(found["prompts"][1]["seconds"])
    with_card = planned("desktop-64gb+rtx-5090")
    card = next(c for c in changed if c["with"] == "an RTX 5090")
    assert card["tokens_per_s"] == pytest.approx(with_card["decode"][0]["tokens_per_s"])
    assert card["prompt_seconds"] == pytest.approx(with_card["prompts"][1]["seconds"])
    speeds = [c["tokens_per_s"] for c in changed]
    assert all(fast >= 0.99 * slow for fast, slow in zip(speeds, speeds[1:]))
    assert {"64 GiB more memory", "a drive twice as fast (or two as one)"} <= {c["with"] for c in changed}
    text = plan(tandem_bin, *options[:-1], "--machine", "desktop-64gb", "--what-if").stdout
    assert text.count("x)\n") == len(found["what_if"])


def test_plan_of_a_drive_with_drafts(tandem_bin, tmp_path):
    """The more tokens a step has, the fewer of its experts are in memory: those that are not are all read in the end."""
    machine = {"memory_gib": 20, "cores": 16, "read_gbps": 72, "gflops": 9000, "layer_us": 1, "drive_gbps": 0.1}
    (tmp_path / "m.json").write_text(json.dumps(machine))
    options = ["--machine", f"{tmp_path}/m.json", "-p", "64", "-b", "1,256", "--json"]
    found = json.loads(plan(tandem_bin, "--model", "Qwen3-30B-A3B", *options).stdout)
    one, many = found["decode"]
    absent = 1 - found["experts_in_memory"]
    read = 8 / 128 * (1 - found["found_in_memory"]) / absent  # of those, by a token
    for draft in one["drafts"]:
        share = 1 - (1 - read) ** (1 + draft["n"])
        assert draft["seconds"] / one["seconds"] == pytest.approx(share / read, rel=0.02)
    assert many["seconds"] == pytest.approx(found["expert_bytes"] * absent / 0.1e9, rel=0.02)
    with_layer = ["--model", "DeepSeek-V3", "--format", "fp8-b128", *options]
    (tmp_path / "m.json").write_text(json.dumps(machine | {"memory_gib": 200}))
    drafts = json.loads(plan(tandem_bin, *with_layer).stdout)["decode"][0]["drafts"]
    (tmp_path / "m.json").write_text(json.dumps(machine | {"memory_gib": 200, "drive_gbps": 0.2}))
    twice = json.loads(plan(tandem_bin, *with_layer).stdout)["decode"][0]["drafts"]
    for slow, fast in zip(drafts, twice):  # also the layer that drafts waits for the drive
        assert slow["seconds"] == pytest.approx(2 * fast["seconds"], rel=0.02)


def test_plan_of_two_nodes(tandem_bin, tmp_path, monkeypatch, tiny_model):
    machine = {"memory_gib": 1128, "cores": 64, "read_gbps": 980, "gflops": 6400, "layer_us": 20}
    machine |= {"nodes": 2, "remote_gbps": 380}
    options = ["-m", "DeepSeek-V3", "-p", "2048"]

    def planned(remote_gbps):
        (tmp_path / "m.json").write_text(json.dumps(machine | {"remote_gbps": remote_gbps}))
        found = json.loads(plan(tandem_bin, *options, "--machine", tmp_path / "m.json", "--json").stdout)
        assert found["nodes"] == 2 and found["remote_gbps"] == remote_gbps
        return found["decode"][0]

    usual, slow = planned(380), planned(4)
    node = usual["node"]
    assert 1.8 < node["seconds_alone"] / usual["seconds"] < 2.01 and usual["binds"] == "CPU memory"
    assert 0 < node["remote_bytes"] < 0.1 * node["local_bytes"]
    assert slow["binds"] == "the link between NUMA nodes" and slow["seconds"] > usual["seconds"]
    assert slow["lifts"][0]["by"] == "a link between nodes twice as fast"
    text = plan(tandem_bin, *options, "--machine", "epyc-9355x2").stdout
    assert "2 NUMA nodes, which read 380.0 GB/s of each other's memory (assumed)" in text
    assert text.count("\n  nodes       each of 2 reads ") == 2
    del machine["remote_gbps"]
    (tmp_path / "m.json").write_text(json.dumps(machine))
    wrong = plan(tandem_bin, *options, "--machine", tmp_path / "m.json")
    assert wrong.returncode == 2 and "remote_gbps must be a number above 0" in wrong.stderr
    monkeypatch.setenv("TANDEM_FAKE_NODES", "2")
    mine = json.loads(plan(tandem_bin, "-m", tiny_model, "-p", "64", "--json").stdout)
    assert mine["nodes"] == (2 if os.cpu_count() > 1 else 1) and mine.get("remote_gbps", 1) > 0


def test_plan_of_cards(tandem_bin):
    """Each card by name: what is too small for a model says so, and a larger one is no slower."""
    seconds = []
    for card in "rtx-3060", "rtx-4060-ti", "rtx-4090", "rtx-5090", "rtx-pro-6000":
        found = plan(tandem_bin, "-m", "DeepSeek-V3", "--machine", "epyc-9355x2+" + card, "-p", "32768", "--json")
        one = json.loads(found.stdout)
        assert one["assumed"] and ("gpu" in one) == (card not in ("rtx-3060", "rtx-4060-ti"))
        if card in ("rtx-4090", "rtx-5090"):  # with the memory of dense weights
            assert one["gpu"]["long_prefill_chunk"] == 32768 > one["gpu"]["prefill_chunk"]
            assert "dense weights" in one["prompts"][0]["plan"] and one["prompts"][0]["steps"] == 1
        seconds.append(one["prompts"][0]["seconds"])
    assert seconds[0] == seconds[1] > seconds[2] > seconds[3] > seconds[4]  # the first two: the CPU alone
    text = plan(tandem_bin, "-m", "DeepSeek-V3", "--machine", "epyc-9355x2+rtx-4060-ti").stdout
    assert "the GPU's 16 GiB do not hold the 17.77 GiB beside the experts; without it:" in text


def test_plan_with_fp8_activations(tandem_bin):
    """Arithmetic is faster, copies are not; decode and what is not in FP8 are as they were."""

    def of(machine, *options):
        return plan(tandem_bin, "-m", "DeepSeek-V3", "--machine", machine, "-p", "32768", *options)

    fp8 = ("--activations", "fp8")
    machine = "epyc-9355x2+rtx-5090"
    usual, faster = (json.loads(of(machine, "--json", *more).stdout) for more in ((), fp8))
    assert faster["fp8_activations"] and not usual["fp8_activations"]
    one, other = usual["prompts"][0], faster["prompts"][0]
    assert 0.7 * one["busy_s"]["GPU_OPS"] < other["busy_s"]["GPU_OPS"] < 0.9 * one["busy_s"]["GPU_OPS"]
    assert other["seconds"] < one["seconds"]
    assert faster["decode"] == usual["decode"]
    assert "147 TFLOP/s in prompts, 210 in F16, 293 in FP8, " in of(machine, *fp8).stdout
    for format, is_same in ("bf16", True), ("fp8-b128", False):
        times = [json.loads(of(machine, "--json", "-f", format, *more).stdout)["prompts"] for more in ((), fp8)]
        assert (times[0] == times[1]) == is_same
    on_h100 = json.loads(of("h100", "--json", *fp8).stdout)  # measured but for that rate
    assert on_h100["assumed"] and "420 TFLOP/s in prompts, 840 in FP8 (assumed), " in of("h100", *fp8).stdout
    missing = of("epyc-9355x2+rtx-3090", *fp8)
    assert missing.returncode == 2 and "RTX 3090 has no GPU with an FP8 rate" in missing.stderr


def test_plan_with_int8_activations(tandem_bin):
    """Only of INT8 weights; on a machine without a GPU the option is the CPU's."""

    def of(machine, format, *options):
        options = ("-m", "DeepSeek-V3", "--machine", machine, "-f", format, "-p", "32768", *options)
        return plan(tandem_bin, *options)

    int8 = ("--activations", "int8")
    machine = "epyc-9355x2+rtx-5090"
    for format, is_same in ("int8-channel", False), ("fp8-b128", True):
        one, other = (json.loads(of(machine, format, "--json", *more).stdout) for more in ((), int8))
        assert other["int8_activations"] and not other["fp8_activations"] and not one["int8_activations"]
        assert (one["prompts"] == other["prompts"]) == is_same
        assert is_same or other["prompts"][0]["busy_s"]["GPU_OPS"] < 0.8 * one["prompts"][0]["busy_s"]["GPU_OPS"]
        assert one["decode"] == other["decode"]
    assert "147 TFLOP/s in prompts, 210 in F16, 419 in INT8, " in of(machine, "int8-channel", *int8).stdout
    assert "142 in INT8, " in of("epyc-9355x2+rtx-3090", "int8-channel", *int8).stdout
    assert of("epyc-9355x2", "int4-g128", *int8).returncode == 0



def test_prediction_beside_measurement(tandem_bin, tiny_model):
    done = bench(tandem_bin, "-m", tiny_model, "--device", "cpu", "--plan", "-p", "64", "-n", "4", "-r", "1", "--json")
    head, *cases = map(json.loads, done.stdout.splitlines())
    assert head["machine"] and [case["kind"] for case in cases] == ["prefill", "decode"]
    for case in cases:
        ratio = case["planned_tokens_per_s"] / case["tokens_per_s"]["median"]
        assert case["planned_over_measured"] == pytest.approx(ratio) and ratio > 0


def test_table_and_bad_format(tandem_bin):
    done = bench(tandem_bin, "kernels", "-f", "fp8-b128", "-b", "1", "-t", "1", "-r", "1",
                 "--n-weights", "1")  # fmt: skip
    assert done.returncode == 0 and "linear_f8e4m3" in done.stdout
    done = bench(tandem_bin, "layer", "--format", "fp9")
    assert done.returncode == 2 and "fp9" in done.stderr


def test_a_cut_spares_the_results_before(tandem_bin):
    """A line comes as soon as its case is measured, and a full disk is a failure."""
    args = [tandem_bin, "bench", "kernels", "-f", "fp8-b128", "-b", "1,2,4,8", "-t", "1", "-r", "1",
            "--matrices", "1", "--json"]  # fmt: skip
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        head, first = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
        process.kill()
        process.stdout.read()
    assert process.returncode < 0  # it had not ended
    assert head["machine"] and set(first) == FIELDS
    with open("/dev/full", "w") as full:
        args[args.index("1,2,4,8")] = "1"
        done = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "cannot be written" in done.stderr


def cached_tokens(server):
    text = httpx.get(server.url + "/metrics", trust_env=False).text
    (line,) = [line for line in text.splitlines() if line.startswith("tandem_prefix_cache_hits_total{")]
    return float(line.rsplit(" ", 1)[1])


def test_interference(tandem_bin, tmp_path):
    server = Server(tandem_bin, make_model(tmp_path / "tiny"))
    try:
        args = ["--server", server.url, "--load", "interference", "--json"]
        done = bench(tandem_bin, *args, "-p", "200", "-n", "1200", "--requests", "4")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["requests"] == 4 and found["failed"] == 0
        for name in ("itl_alone_ms", "itl_ms"):
            assert 0 < found[name]["p50"] <= found[name]["p99"] <= found[name]["max"]
        assert cached_tokens(server) == 0
        again = [*args, "-p", "200", "-n", "600", "--requests", "2"]
        assert bench(tandem_bin, *again).returncode == 0
        assert cached_tokens(server) == 0  # another run has other prompts
        for _ in range(2):
            assert bench(tandem_bin, *again, "--seed", "3").returncode == 0
        assert cached_tokens(server) > 0
        done = bench(tandem_bin, *args, "-p", "200", "-n", "8", "--requests", "40")
        assert done.returncode == 2 and "--gen-tokens" in done.stderr
    finally:
        server.close()


class HalfMute(http.server.BaseHTTPRequestHandler):
    """A server whose every second token has no text, as half a character has none."""

    counts = False  # what has come so far, in every event

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_json({"data": [{"id": "stub"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream_options"]["continuous_usage_stats"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for n in range(1, asked["max_tokens"] + 1):
            time.sleep(0.02)
            usage = {"usage": {"prompt_tokens": 3, "completion_tokens": n}} if self.counts else {}
            self.send_event([{"index": 0, "delta": {"content": "" if n % 2 else "é"}}], **usage)
        self.send_event([], usage={"prompt_tokens": 3, "completion_tokens": n})
        self.wfile.write(b"data: [DONE]\n\n")

    def send_event(self, choices, **more):
        event = {"object": "chat.completion.chunk", "choices": choices, **more}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def send_json(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class HalfMuteCounting(HalfMute):
    counts = True


@pytest.mark.parametrize("handler, tokens_a_gap", [(HalfMuteCounting, 1), (HalfMute, 2)])
def test_gaps_are_those_of_tokens(tandem_bin, handler, tokens_a_gap):
    """By the server's own count, and between texts where it does not count."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{stub.server_port}"
        done = bench(tandem_bin, "--server", url, "--requests", "1", "-n", "101", "--json")
        stub.shutdown()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failed"] == 0 and report["output_tokens"] == 101
    gap = report["itl_ms"]["mean"] / report["tpot_ms"]["mean"]
    assert abs(gap - tokens_a_gap) < 0.3


class Keeping(HalfMute):
    asked = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(json.loads(body))
        self.send_json({})


def test_members_of_every_request(tandem_bin):
    extra = {"response_format": {"type": "json_object"}, "user": "}{"}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Keeping) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        args = ["--server", f"http://127.0.0.1:{stub.server_port}", "--requests", "1", "-n", "2"]
        for given in extra, {}:
            bench(tandem_bin, *args, "--extra-body", json.dumps(given))
        wrong = bench(tandem_bin, *args, "--extra-body", "[1]")
        stub.shutdown()
    first, second = Keeping.asked
    assert first["max_tokens"] == 2 and first | extra == first and "user" not in second
    assert wrong.returncode == 2 and "--extra-body: give a JSON object" in wrong.stderr
