"""Whole models through the CUDA device: its host code, on the emulated kernels or on a GPU.

TANDEM_CUDA_LIB names the library, the emulator of the build by default. Activations are BF16 there
and FP32 in the goldens, so logits agree less closely. A rounding to nearest errs by 2^-9 at most
and by 2^-9 / sqrt(3), 0.0011, on average; the models here have some 12 in a row in each of 2 or 3
layers, whose errors add up like sqrt(36) * 0.0011 = 0.7 %, and norms and the softmax amplify that a
little: 3 % for the median position leaves a factor of two over what is measured (1.3 %). Where two
experts are nearly tied the other one may be chosen, which changes a position altogether: one in
twenty may be off by more than 6 %. A wrong kernel puts every position off by about 100 %.
"""

import json
import os
import subprocess

import numpy as np
import pytest
import test_formats
from golden_models import golden, made
from test_golden import F8_KV_CASES, F8_KV_MEDIAN, ids_of, logits_of, relative_errors, tandem  # noqa: F401

pytestmark = [pytest.mark.no_asan, pytest.mark.slow]

MEDIAN, MOST, SHARE = 0.03, 0.06, 0.95
N_TOKENS = 70  # more than a page: the emulator takes long
FORMATS = ["deepseek_awq", "deepseek_mxfp4", "qwen3_gptq", "qwen3_int8", "qwen3_nvfp4"]


@pytest.fixture
def cuda(build_dir):
    """What to add to the environment."""
    library = os.environ.get("TANDEM_CUDA_LIB", build_dir / "bin" / "libtandem_cuda_emu.so")
    if not os.path.exists(library):
        pytest.skip(f"no {library}: the emulator needs a C++ compiler")
    return {"TANDEM_CUDA_LIB": str(library)}


def check_logits(ours, golden, median=MEDIAN, least_share=SHARE):
    errors = relative_errors(ours, golden)
    share = (errors < MOST).mean()
    print(f"relative error: median {np.median(errors):.2e}, {share:.0%} below {MOST}")
    assert np.median(errors) < median  # false for NaN
    assert share >= least_share


# Sanitizers see the kernels in the unit tests; scripts/test.sh picks none of these by name.
@pytest.mark.parametrize(
    ("case", "chunk", "experts"),
    [
        (case, chunk, experts)
        for case in ("deepseek_fp8", "qwen3_moe")
        for chunk in (None, 37)
        for experts in ("gpu", "cpu")
    ]
    + [(case, None, "gpu") for case in FORMATS],
)
def test_logits(tandem, cuda, case, chunk, experts, tmp_path):  # noqa: F811
    options = ("--device", "cuda", "--expert-device", experts)
    ours = logits_of(tandem, case, tmp_path, chunk, *options, n_tokens=N_TOKENS, **cuda)
    check_logits(ours, golden(case)["logits"][:N_TOKENS])


# A product errs by 2.6 % of its norm where activations are rounded to E4M3 (kernels/cuda/README.md), and six in
# a row in each of two layers by sqrt(12) * 2.6 = 9 %. What norms and the softmax make of it is as above, where 0.7
# become 1.3 %: twice as much.
F8_MEDIAN = 0.18


@pytest.mark.parametrize(
    ("case", "chunk", "experts"),
    [
        ("deepseek_fp8", None, "gpu"),
        ("deepseek_fp8", 37, "gpu"),
        ("deepseek_fp8", None, "cpu"),
        ("qwen3_fp8", None, "gpu"),
        ("deepseek_fp8_rows", None, "gpu"),
    ],
)
def test_fp8_activations(tandem, cuda, case, chunk, experts, tmp_path):  # noqa: F811
    options = ("--device", "cuda", "--expert-device", experts)
    environment = {**cuda, "TANDEM_EMU_CAPABILITY": "89"}
    ours = logits_of(tandem, case, tmp_path, chunk, *options, activations="fp8", n_tokens=N_TOKENS, **environment)
    plain = logits_of(tandem, case, tmp_path, chunk, *options, activations="auto", n_tokens=N_TOKENS, **environment)
    wanted = golden(case)["logits"][:N_TOKENS]
    errors, others = relative_errors(ours, wanted), relative_errors(plain, wanted)
    print(f"median {np.median(errors):.2e}, in BF16 {np.median(others):.2e}")
    assert np.median(errors) < F8_MEDIAN
    assert np.median(errors) > 1.5 * np.median(others)  # the option does something


@pytest.mark.parametrize("case", ["deepseek_fp8", "qwen3_fp8"])
def test_sums_in_f16(tandem, cuda, case, tmp_path):  # noqa: F811
    """On GeForce; an environment variable turns them off."""
    environment = {**cuda, "TANDEM_EMU_CAPABILITY": "89", "TANDEM_EMU_NAME": "emulated GeForce"}
    found = [
        logits_of(tandem, case, tmp_path, None, "--device", "cuda", n_tokens=N_TOKENS, TANDEM_CUDA_WITHOUT=out, **environment)
        for out in ("", "f16")
    ]
    wanted = golden(case)["logits"][:N_TOKENS]
    errors, others = (relative_errors(x, wanted) for x in found)
    print(f"median {np.median(errors):.2e}, in BF16 {np.median(others):.2e}")
    assert np.median(errors) < 1.2 * np.median(others) and not np.array_equal(*found)


@pytest.mark.parametrize("case", F8_KV_CASES)
def test_fp8_kv(tandem, cuda, case, tmp_path):  # noqa: F811
    ours = logits_of(tandem, case, tmp_path, 37, "--device", "cuda", "--kv-dtype", "fp8", n_tokens=N_TOKENS, **cuda)
    wanted = golden(case)["logits"][:N_TOKENS]
    of_cpu = logits_of(tandem, case, tmp_path, None, "--kv-dtype", "fp8", n_tokens=N_TOKENS)
    errors, between = relative_errors(ours, wanted), relative_errors(ours, of_cpu)
    print(f"median {np.median(errors):.2e}, between the devices {np.median(between):.2e}")
    assert 0.02 < np.median(errors) < F8_KV_MEDIAN
    assert np.median(between) < F8_KV_MEDIAN / 2  # values beside the middle of two codes become the other one


# Of INT8 a product errs by 0.65 % of its norm: sqrt(12) * 0.65 = 2.3 %, and twice that as above.
INT8_MEDIAN = 0.046


@pytest.mark.parametrize(("capability", "experts"), [("80", "gpu"), ("90", "gpu"), ("80", "cpu")])
def test_int8_activations(cuda, tandem_bin, capability, experts, tmp_path, monkeypatch):
    stored, used = test_formats.make(tmp_path, "int8")
    want, _ = test_formats.logits(tandem_bin, used)
    monkeypatch.setenv("TANDEM_EMU_CAPABILITY", capability)
    for name, value in cuda.items():
        monkeypatch.setenv(name, value)
    options = ("--device", "cuda", "--expert-device", experts, "--activations")
    ours, log = test_formats.logits(tandem_bin, stored, *options, "int8")
    plain, _ = test_formats.logits(tandem_bin, stored, *options, "auto")
    assert "prompts are rounded to INT8 for 32 of the model's 33 matrices" in log
    errors, others = (relative_errors(x.astype(np.float32), want) for x in (ours, plain))
    print(f"median {np.median(errors):.2e}, in BF16 {np.median(others):.2e}")
    assert np.median(errors) < INT8_MEDIAN
    assert np.median(errors) > 1.2 * np.median(others)  # the option does something


@pytest.mark.parametrize(("activations", "kind", "cure"), [("int8", "INT8", ", or --device cpu"), ("fp8", "FP8", "")])
def test_activations_that_no_matrix_takes(cuda, tandem_bin, activations, kind, cure, tmp_path):
    args = ["eval", "logits", "--model", made() / "qwen3_moe", "--token-ids", "2,3", "--out", tmp_path / "l.npy"]
    args += ["--device", "cuda", "--activations", activations]
    environment = os.environ | cuda | {"TANDEM_EMU_CAPABILITY": "89"}
    done = subprocess.run([tandem_bin, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert f"--activations {activations}: the model has no {kind} matrices" in done.stderr
    assert f"give --activations auto{cure}\n" in done.stderr


@pytest.mark.parametrize("experts", ["gpu", "cpu"])
@pytest.mark.parametrize("case", ["deepseek_int4", "qwen3_moe"])
def test_greedy_continuation(tandem, cuda, case, experts):  # noqa: F811
    wanted = golden(case)["continuation"].tolist()[:8]
    prompt = ids_of(golden(case)["prompt"])
    out = tandem(
        *("run", "--model", made() / case, "--raw", "--token-ids", prompt, "-n", len(wanted)),
        *("--temperature", 0, "--ignore-eos", "--json", "--device", "cuda", "--expert-device", experts),
        **cuda,
    )
    assert json.loads(out)["token_ids"] == wanted


def wrong_norm(golden):
    golden *= 1.05


def shifted_by_one(golden):
    golden[1:] = golden[:-1].copy()


def not_a_number(golden):
    golden[::10] = np.nan


@pytest.mark.parametrize("spoil", [wrong_norm, shifted_by_one, not_a_number])
def test_a_wrong_golden_is_noticed(spoil):
    right = golden("qwen3_moe")["logits"]
    spoiled = right.copy()
    spoil(spoiled)
    check_logits(right, right)
    with pytest.raises(AssertionError):
        check_logits(right, spoiled)


@pytest.mark.parametrize("name", ["gptq8-order", "int4-bytes", "mxfp8"])
def test_formats_of_no_golden_model(tandem, cuda, tandem_bin, name, tmp_path):  # noqa: F811
    stored, used = test_formats.make(tmp_path, name)
    want, _ = test_formats.logits(tandem_bin, used)
    out, ids = tmp_path / "logits.npy", ",".join(map(str, test_formats.PROMPT))
    args = ["--model", stored, "--token-ids", ids, "--out", out, "--device", "cuda"]
    tandem("eval", "logits", *args, **cuda)
    check_logits(np.load(out), want)
