"""Whole models against transformers: logits at every position, greedy text token for token.

data/ is made by scripts/make_golden.py; data/provenance.json says with which versions. scripts/golden_models.py makes the
checkpoints on the spot.
"""

import ctypes
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
from golden_models import DATA, config_of, golden, made
from golden_models import CASES as ALL

CASES = sorted(ALL)
TOLERANCE = 1e-3  # norm of the difference over norm of the reference, at each position
# With rounded activations, and the flag of /proc/cpuinfo that takes: a product is off by 1e-3 of its
# norm at most in FP16, twice as much in BF16 (tests/unit/test_kernels_rounding.c measures 7e-4 and
# 1.7e-3), and a logit comes after some 20 of them, whose errors are independent: their root is 5e-3
# and 1e-2; experts weigh a little otherwise besides.
# Then: at how many of 140 positions a logit may be off by more, where experts of a random model tie so
# nearly that another is chosen (and at later positions, which look back at that), and how many tokens
# are sure to be greedy's, for those nearly tie, too.
# In 16 bits a product is off by 3e-5, which the tolerance for none allows.
ROUNDING = {
    "avx512amx": ("amx_int8", 1e-2, 2, 64),
    "avx512fp16": ("avx512_fp16", 1e-2, 2, 64),
    "avx512bf16": ("avx512_bf16", 2e-2, 28, 16),
    "avx512int16": ("avx512vbmi", TOLERANCE, 0, 64),
    "avx2int16": ("avx2", TOLERANCE, 0, 64),
    "avxvnni": ("avx_vnni", TOLERANCE, 0, 64),
}

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # as Linux names them

# How the prompt reaches the model: tokens a pass; None is all at once. 64 is a KV page; 37 divides
# neither the page nor the prompt.
CHUNKS = [None, 64, 37, 1]


# A flag of /proc/cpuinfo without which a kernel version cannot be forced.
ISAS = {"scalar": None, "avx2": "avx2", "avx512": "avx512vbmi"}


@pytest.fixture
def tandem(tandem_bin):
    """Runs the program, which must succeed; returns what it printed."""

    def run(*args, **environment):
        result = subprocess.run(
            [tandem_bin, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | environment,
        )
        assert result.returncode == 0, f"tandem {args[0]}: {result.returncode}\n{result.stderr}"
        return result.stdout

    return run


def ids_of(array):
    return ",".join(str(i) for i in array.tolist())


def logits_of(tandem, case, tmp_path, chunk, *options, activations="f32", n_tokens=None, **environment):
    """Of the golden's prompt, or the first n_tokens of it."""
    out = tmp_path / "logits.npy"
    args = ["--model", made() / case, "--token-ids", ids_of(golden(case)["prompt"][:n_tokens])]
    args += ["--activations", activations]
    args += [] if "--device" in options else ["--device", "cpu"]
    if chunk is not None:
        args += ["--chunk-tokens", chunk]
    tandem("eval", "logits", *args, "--out", out, *options, **environment)
    return np.load(out)


def relative_errors(ours, golden):
    """One figure for each position."""
    assert ours.dtype == np.float32
    assert ours.shape == golden.shape
    difference = ours.astype(np.float64) - golden
    return np.linalg.norm(difference, axis=1) / np.linalg.norm(golden, axis=1)


def check_logits(ours, golden):
    errors = relative_errors(ours, golden)
    worst = int(errors.argmax())
    print(f"worst relative error {errors[worst]:.2e} at position {worst} of {len(errors)}")
    # A NaN must fail, so the comparison is written to be false for it.
    assert (errors < TOLERANCE).all(), f"position {worst}: {errors[worst]:.2e}"


def test_there_are_goldens():
    assert {p.stem for p in DATA.glob("*.npz")} == set(CASES) and len(CASES) >= 10
    families = {config_of(c)[0]["model_type"] for c in CASES}
    assert families == {"deepseek_v3", "qwen3_moe"}


def chunks_of(case):
    """Each with its marks: blocks, ragged ones and single tokens are all in chunks of 37."""
    for chunk in CHUNKS:
        marks = [pytest.mark.no_asan] if chunk != 37 else []
        if chunk == 37 and case in ("deepseek_fp8", "qwen3_moe"):
            marks.append(pytest.mark.tsan)
        yield pytest.param(case, chunk, marks=marks, id=f"{case}-chunk_{chunk or 'all'}")


@pytest.mark.parametrize("case, chunk", [p for case in CASES for p in chunks_of(case)])
def test_logits(tandem, case, chunk, tmp_path):
    check_logits(logits_of(tandem, case, tmp_path, chunk), golden(case)["logits"])


@pytest.mark.no_asan  # which has this CPU's kernels only
def test_every_isa_is_tested(tandem_bin):
    """The program names its instruction sets where it is asked for an unknown one."""
    case = made() / CASES[0]
    result = subprocess.run(
        [tandem_bin, "run", "--model", case, "--raw", "--token-ids", "1", "-n", "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"TANDEM_FORCE_ISA": "abacus"},
    )
    names = result.stderr.split("use one of ")[1].split("\n")[0].split(", ")
    assert set(names) == set(ISAS) | set(ROUNDING)


@pytest.mark.no_asan
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", ["deepseek_fp8", "deepseek_yarn_mscale", "qwen3_mixed_tied"])
def test_logits_of_each_isa(tandem, case, isa, tmp_path):
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    if ISAS[isa] and ISAS[isa] not in flags:
        pytest.skip(f"this processor has no {ISAS[isa]}")
    ours = logits_of(tandem, case, tmp_path, 37, TANDEM_FORCE_ISA=isa)
    check_logits(ours, golden(case)["logits"])


def check_greedy(tandem, case, n_tokens, activations, **environment):
    wanted = golden(case)["continuation"].tolist()[:n_tokens]
    prompt = ids_of(golden(case)["prompt"])
    out = tandem(
        *("run", "--model", made() / case, "--raw", "--token-ids", prompt, "-n", len(wanted)),
        *("--temperature", 0, "--ignore-eos", "--json", "--activations", activations),
        **environment,
    )
    assert json.loads(out)["token_ids"] == wanted


@pytest.mark.no_asan
@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation(tandem, case):
    check_greedy(tandem, case, None, "f32")


def is_quantized(case):
    return "quantization_config" in config_of(case)[0]


@pytest.mark.no_asan
@pytest.mark.parametrize("case", [c for c in CASES if is_quantized(c)])
@pytest.mark.parametrize("isa", ROUNDING)
def test_rounded_activations(tandem, case, isa, tmp_path):
    flag, tolerance, n_ties, n_greedy = ROUNDING[isa]
    if flag not in pathlib.Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {flag}")
    if flag.startswith("amx") and ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA):
        pytest.skip("the kernel does not permit tiles")
    forced = {"activations": "auto", "TANDEM_FORCE_ISA": isa}
    whole = logits_of(tandem, case, tmp_path, None, **forced)
    errors = relative_errors(whole, golden(case)["logits"])
    assert (errors < tolerance).sum() >= len(errors) - n_ties, np.sort(errors)[-4:]
    assert np.median(errors) < tolerance / 2
    chunks = logits_of(tandem, case, tmp_path, 7, **forced)
    assert (whole == chunks).all()
    check_greedy(tandem, case, n_greedy, **forced)


# E4M3 errs by 2.6 % of a row's norm, keys and values of three layers by sqrt(6) * 2.6 = 6.4 %.
F8_KV_MEDIAN = 0.1
F8_KV_CASES = ["deepseek_v3", "qwen3_dense_layers"]  # latents; heads


@pytest.mark.parametrize("case", F8_KV_CASES)
def test_fp8_kv(tandem, case, tmp_path):
    whole = logits_of(tandem, case, tmp_path, None, "--kv-dtype", "fp8")
    errors = relative_errors(whole, golden(case)["logits"])
    print(f"median {np.median(errors):.2e}")
    assert 0.01 < np.median(errors) < F8_KV_MEDIAN  # it does something
    chunks = logits_of(tandem, case, tmp_path, 7, "--kv-dtype", "fp8")
    assert (whole == chunks).all()


def wrong_position(golden):
    golden[77] = np.roll(golden[77], 1)


def wrong_by_two_thousandths(golden):
    golden[130] *= 1.002


def shifted_by_one(golden):
    golden[1:] = golden[:-1].copy()


def not_a_number(golden):
    golden[3, 5] = np.nan


@pytest.mark.parametrize(
    "spoil", [wrong_position, wrong_by_two_thousandths, shifted_by_one, not_a_number]
)
def test_a_wrong_golden_is_noticed(spoil):
    right = golden(CASES[0])["logits"]
    spoiled = right.copy()
    spoil(spoiled)
    check_logits(right, right)
    with pytest.raises(AssertionError):
        check_logits(right, spoiled)


def test_a_wrong_golden_fails_the_program_too(tandem, tmp_path):
    ours = logits_of(tandem, CASES[0], tmp_path, None)
    wrong = golden(CASES[0])["logits"]
    wrong_by_two_thousandths(wrong)
    with pytest.raises(AssertionError):
        check_logits(ours, wrong)
