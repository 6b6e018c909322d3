"""Every family against transformers, on small checkpoints made on the spot from a seed.

families/ holds prompts, logits and continuations, made by scripts/make_golden.py; the cases and what
each is there for are in scripts/golden_families.py.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from test_golden import CHUNKS, ROUNDING, check_logits, ids_of, relative_errors, tandem  # noqa: F401
from test_golden_cuda import check_logits as check_cuda_logits
from test_golden_cuda import cuda  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT.parents[1] / "scripts"), str(ROOT.parent / "e2e")]

import architectures  # noqa: E402
import checkpoint  # noqa: E402
import golden_families  # noqa: E402
import golden_recurrent  # noqa: E402
import golden_weights  # noqa: E402
from serving import SANITIZED, make_model  # noqa: E402

DATA = ROOT / "families"
PROVENANCE = json.loads((DATA / "provenance.json").read_text())["cases"]
CASES = sorted(golden_families.CASES)
SELECTING = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3")


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """Makes a case's checkpoint once; a generator that gives other bytes is an error."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("families") / case
            facts = PROVENANCE[case]
            digest = golden_families.make(case, made[case], facts["seed"])
            assert digest == facts["digest"], f"{case}: not the checkpoint that the golden is of"
        return made[case]

    return get


def test_each_family_has_three_cases():
    assert set(PROVENANCE) == set(CASES)
    assert {p.stem for p in DATA.glob("*.npz")} == set(CASES)
    types = [architectures.text_config(golden_families.CASES[c][0])["model_type"] for c in CASES]
    assert min(types.count(t) for t in types) >= 3, types


def logits_of(tandem, model, prompt, out, chunk, *options):  # noqa: F811
    args = ["--model", model, "--token-ids", ids_of(prompt), "--activations", "f32"]
    args += [] if chunk is None else ["--chunk-tokens", chunk]
    args += [] if "--device" in options else ["--device", "cpu"]
    tandem("eval", "logits", *args, "--out", out, *options)
    return np.load(out)


@pytest.mark.parametrize("case", CASES)
def test_logits(tandem, checkpoint_of, case, tmp_path):  # noqa: F811
    golden, model = np.load(DATA / f"{case}.npz"), checkpoint_of(case)
    # Blocks and ragged ones are in chunks of 37; decode sees more than a page.
    for chunk, n in [(37, None), (1, 70)] if SANITIZED else [(chunk, None) for chunk in CHUNKS]:
        ours = logits_of(tandem, model, golden["prompt"][:n], tmp_path / "logits.npy", chunk)
        check_logits(ours, golden["logits"][:n])


# A recurrent state passes from step to step by the bit, wherever a prompt is cut, and so do selections of keys.
@pytest.mark.no_asan
@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(("qwen3_next", "qwen3_5", "kimi_linear", "bailing", "glm5_next", "qwen4_exp", *SELECTING))])
def test_the_same_bits_in_chunks(tandem, checkpoint_of, case, tmp_path):  # noqa: F811
    golden, model = np.load(DATA / f"{case}.npz"), checkpoint_of(case)
    ours = [
        logits_of(tandem, model, golden["prompt"], tmp_path / "l.npy", chunk)
        for chunk in (None, 64, 37, 2)  # one by one they are decoded, with other kernels
    ]
    assert all((one == ours[0]).all() for one in ours[1:])


@pytest.mark.no_asan
@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation(tandem, checkpoint_of, case):  # noqa: F811
    golden, model = np.load(DATA / f"{case}.npz"), checkpoint_of(case)
    wanted = golden["continuation"].tolist()
    out = tandem(
        *("run", "--model", model, "--raw", "--token-ids", ids_of(golden["prompt"])),
        *("-n", len(wanted), "--temperature", 0, "--ignore-eos", "--json"),
        *("--activations", "f32"),
    )
    assert json.loads(out)["token_ids"] == wanted


RECURRENT = [c for c in CASES if c.startswith(("qwen3_next", "qwen3_5", "kimi_linear"))]
# A token that another expert computed stays in the states of the delta nets and puts all later positions
# off; these models have up to five layers and choose 1 to 3 of 6 experts. The CPU's operators with results
# rounded to BF16 give medians of 1.9 %, 2.6 % and 5.7 % for qwen3_next, qwen3_5_moe and qwen3_next_odd (a
# single expert in each of five layers), and 97 %, 79 % and 51 % of positions below 6 %: the GPU 2.2 %,
# 2.8 % and 6.1 %, and 93 %, 79 % and 49 %.
RECURRENT_BOUNDS = dict.fromkeys(RECURRENT, (0.035, 0.7)) | {"qwen3_next_odd": (0.09, 0.35)}


# Experts of gpt_oss nearly tie from position 24 on, with any window, so that BF16 chooses others, and later
# positions look back at those. (The CPU's BF16 kernels are more than 6 % off at 28 of the 140, too.)
# So do keys' scores: of 24 selected keys another one puts a position off by some percent, though the first 24
# positions, which see all keys, select none. The reference with results rounded to BF16 has 70 % of the
# positions of deepseek_v32 below 6 % and 62 % of those of glm_moe_dsa_shared, with medians of 2.2 % and 3.2 %;
# the emulator, of the first 90 and 60, 79 % and 78 %, 1.7 % and 2.6 %.
# The CPU's operators with results rounded to BF16 have 95 % of the positions of deepseek_v4 below 6 % and 81 %
# of those of deepseek_v4_odd (5 selected keys, 3 of 6 experts), with medians of 0.9 % and 1.6 %; the emulator,
# which also rounds pooled keys, weights of keys and what is between an expert's matrices, 94 % and 73 %, 1.0 % and
# 2.0 %.
# They have 92 % of those of minimax_m3 and, of the first 60, 85 % of those of minimax_m3_odd (one of 6 experts), with
# medians of 0.8 % and 1.0 %; the emulator 91 % and 78 %, 0.9 % and 1.2 %.
# The reference with results rounded to BF16 has, of the first 80 and 50, 90 % of the positions of glm5_next and all of
# glm5_next_odd, with medians of 1.9 % and 1.1 %; the emulator, which also rounds what attention absorbs, 72 % and 86 %,
# 2.1 % and 1.1 %: groups and experts that nearly tie, whose choices stay in the states. Positions that see all keys
# have none of the former.
# The CPU's operators with results rounded to BF16 have, of the first 50 and 40, 98 % of the positions of qwen4_exp_text
# and 70 % of those of qwen4_exp_odd (two selected groups), with medians of 1.4 % and 3.4 %; the emulator, which also
# rounds what is between an expert's matrices, 94 % and 70 %, 1.5 % and 3.4 %. Of all 140 they have 89 % and 81 %, 1.9 %
# and 2.5 %, the emulator 87 % and 78 %, 2.1 % and 2.8 %, and they are off at the same positions but for a few.
CUDA_TIES = {"glm5_next": 27, "glm5_next_odd": 30, "deepseek_v32": 24, "gpt_oss": 24, "deepseek_v4": 33, "minimax_m3_odd": 30, "qwen4_exp_text": 16}
CUDA_BOUNDS = RECURRENT_BOUNDS | {
    "deepseek_v32": (0.05, 0.5), "glm_moe_dsa_shared": (0.06, 0.5), "gpt_oss": (0.06, 0.6),
    "deepseek_v4": (0.03, 0.8), "deepseek_v4_odd": (0.05, 0.5), "minimax_m3": (0.03, 0.8),
    "minimax_m3_odd": (0.03, 0.6), "glm5_next": (0.035, 0.6), "glm5_next_odd": (0.03, 0.75),
    "qwen4_exp_text": (0.03, 0.85), "qwen4_exp_odd": (0.05, 0.6)}


EXPERTS = {
    "gpu": ("--expert-device", "gpu"),
    "cpu": ("--expert-device", "cpu"),
    "streamed": ("--expert-device", "cpu", "--weights", "resident", "--stream-from", 2),
}


# What the device computes otherwise than for the older families: a part of each head rotates, one norm
# over all heads, scaled queries and a softmax router with groups; gated delta nets, gated attention and
# a gated shared expert; sinks, windows, biases of everything and pairs of gate and up; pooled keys,
# hyper-connections and routers by token id; selected blocks; with experts on either device, or streamed. Tolerances: test_golden_cuda.py.
# The emulator takes long: it sees the first 70 tokens, more than a page, and of latent attention what SHORT says.
SHORT = {"bailing_hybrid": 40, "bailing_hybrid_odd": 40, "bailing_hybrid_fp8": 40, "deepseek_v32": 90, "glm_moe_dsa_shared": 60, "kimi_k25_int4": 40, "glm4_moe_lite": 40, "mistral4_fp8": 40,
         "glm5_next": 80, "glm5_next_fp8": 70, "glm5_next_odd": 50, "kimi_linear": 80, "kimi_linear_fp8": 70, "kimi_linear_odd": 50, "deepseek_v4": 80, "deepseek_v4_odd": 60, "minimax_m3_odd": 60,
         "qwen4_exp_text": 50, "qwen4_exp_odd": 40, "qwen4_exp_fp8": 40}


@pytest.mark.slow
@pytest.mark.no_asan
@pytest.mark.parametrize(
    ("case", "chunk", "experts"),
    [("kimi_k25_int4", 37, "cpu"), ("glm4_moe_lite", 37, "cpu"), ("mistral4_fp8", 13, "gpu")]
    + [(case, 37, "gpu") for case in ("glm4_moe_norms", "minimax_m2", "mistral4_groups", *RECURRENT)]
    + [("hy_v3_published", 37, "gpu"), ("deepseek_v32", 37, "gpu"), ("glm_moe_dsa_shared", 37, "cpu")]
    + [("gpt_oss", None, "gpu"), ("gpt_oss", 37, "cpu"), ("gpt_oss_layers", 64, "gpu")]
    + [("gpt_oss_layers", 1, "cpu"), ("gpt_oss_plain", 37, "gpu")]
    + [("deepseek_v4", 37, "cpu"), ("deepseek_v4", None, "streamed"), ("deepseek_v4_odd", 1, "gpu")]
    + [("deepseek_v4_dense", 37, "streamed")]
    + [("kimi_linear_odd", 1, "cpu"), ("kimi_linear_fp8", None, "streamed")]
    + [("bailing_hybrid", 13, "cpu"), ("bailing_hybrid_odd", 1, "gpu"), ("bailing_hybrid_fp8", None, "streamed")]
    + [("glm5_next", 37, "cpu"), ("glm5_next", None, "streamed"), ("glm5_next_odd", 1, "gpu"), ("glm5_next_fp8", 37, "gpu")]
    + [("minimax_m3", 37, "cpu"), ("minimax_m3_odd", 1, "gpu"), ("minimax_m3_fp8", None, "streamed")]
    + [("qwen4_exp_text", 37, "cpu"), ("qwen4_exp_odd", 1, "gpu"), ("qwen4_exp_fp8", 13, "streamed")],
)
def test_logits_on_cuda(tandem, cuda, checkpoint_of, case, chunk, experts, tmp_path, monkeypatch):  # noqa: F811
    golden, model = np.load(DATA / f"{case}.npz"), checkpoint_of(case)
    for name, value in cuda.items():
        monkeypatch.setenv(name, value)
    out, options = tmp_path / "logits.npy", ("--device", "cuda", *EXPERTS[experts])
    prompt = golden["prompt"][: SHORT.get(case, 70)]
    ours = logits_of(tandem, model, prompt, out, chunk, *options)
    check_cuda_logits(ours, golden["logits"][: len(prompt)], *CUDA_BOUNDS.get(case, ()))
    n_sure = CUDA_TIES.get(case)
    if n_sure:
        check_cuda_logits(ours[:n_sure], golden["logits"][:n_sure])


# Matrices are tandem's own kernels here, whose results do not depend on a step's number of tokens up to
# 64: cuBLAS takes 17 and more. Keys have 16 elements, so that delta nets compute prompts token by token.
@pytest.mark.no_asan
@pytest.mark.parametrize(
    ("case", "chunks"),
    [(case, (64, 37)) for case in ("qwen3_next", "kimi_linear", "deepseek_v4", "qwen4_exp_text")]
    + [("glm5_next", (64, 2))],  # which takes the emulator long
)
def test_recurrent_states_in_chunks_on_cuda(tandem, cuda, checkpoint_of, case, chunks, tmp_path, monkeypatch):  # noqa: F811
    golden, model = np.load(DATA / f"{case}.npz"), checkpoint_of(case)
    for name, value in (cuda | {"TANDEM_EMU_BLAS": "0"}).items():
        monkeypatch.setenv(name, value)
    prompt = golden["prompt"][:70]  # more than a page
    ours = [
        logits_of(tandem, model, prompt, tmp_path / "l.npy", chunk, "--device", "cuda")
        for chunk in chunks
    ]
    assert all((one == ours[0]).all() for one in ours[1:])


# Keys as wide as published ones, whose prompts a GPU computes in chunks of 32 positions, with cuts at others;
# no golden is as wide, so against the CPU.
@pytest.mark.no_asan
@pytest.mark.parametrize("chunk", [None, 37])
def test_delta_nets_in_chunks_on_cuda(tandem, cuda, chunk, tmp_path, monkeypatch):  # noqa: F811
    config = golden_recurrent.QWEN3_NEXT | {
        "full_attention_interval": 2, "linear_key_head_dim": 128, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_value_head_dim": 40, "num_hidden_layers": 2}
    model = tmp_path / "model"
    stored, _ = golden_weights.weights(config, "bf16", 1)
    golden_weights.write_checkpoint(model, config, stored)
    prompt = np.random.default_rng(1).integers(2, golden_families.N_VOCAB, 90)
    want = logits_of(tandem, model, prompt, tmp_path / "logits.npy", None)
    for name, value in cuda.items():
        monkeypatch.setenv(name, value)
    ours = logits_of(tandem, model, prompt, tmp_path / "logits.npy", chunk, "--device", "cuda")
    check_cuda_logits(ours, want)


# A generated token's states follow those of the prompt: what decode computes agrees with the same tokens in
# a prompt.
@pytest.mark.no_asan
@pytest.mark.parametrize(
    ("case", "experts"), [("qwen3_5_moe_text", "gpu"), ("qwen3_5_moe_text", "cpu"), ("kimi_linear", "gpu"), ("glm5_next_fp8", "gpu"), ("gpt_oss_layers", "gpu"),
        ("deepseek_v4_dense", "cpu"), ("minimax_m3_fp8", "gpu"), ("qwen4_exp_fp8", "gpu")]
)
def test_states_in_decode_on_cuda(tandem, cuda, checkpoint_of, case, experts, monkeypatch):  # noqa: F811
    golden, model = np.load(DATA / f"{case}.npz"), checkpoint_of(case)
    for name, value in cuda.items():
        monkeypatch.setenv(name, value)
    wanted = golden["continuation"].tolist()[:8]
    out = tandem(
        *("run", "--model", model, "--raw", "--token-ids", ids_of(golden["prompt"]), "-n", len(wanted)),
        *("--temperature", 0, "--ignore-eos", "--json", "--device", "cuda", "--expert-device", experts),
    )
    assert json.loads(out)["token_ids"] == wanted


def test_inspect_of_windows_and_pairs(tandem, tmp_path):  # noqa: F811
    make_model(tmp_path / "m", "tiny-gpt-oss")
    text = tandem("inspect", "--model", tmp_path / "m")
    assert "32 wide, 128 positions in 2 of the 4 layers\n" in text
    assert "F4_E2M1 768.00 KiB" in text
    # Of 2 layers all keys and values, of 2 those of 192 tokens.
    words = "1000.00 KiB for every 1000 tokens of context, and 192.00 KiB in layers with a window for every 512"
    assert words in text


def test_inspect_of_selections(tandem, checkpoint_of):  # noqa: F811
    text = tandem("inspect", "--model", checkpoint_of("glm_moe_dsa_shared"))
    assert "selection     5 keys for a token, by 12 heads, 20 wide, in 2 of the 4 layers\n" in text
    # Latents of 16 with 8 rotary, and keys of the indexer, in F32.
    assert "687.50 KiB for every 1000 tokens of context" in text


def test_inspect_of_recurrent_states(tandem, checkpoint_of):  # noqa: F811
    text = tandem("inspect", "--model", checkpoint_of("qwen3_5_moe"))
    assert "delta nets    in 3 of the 4 layers instead: 2 heads of keys, 4 of values, 16 and 16 wide" in text
    assert "GQA: 2 of keys and values, 16 wide, 4 rotary\n" in text
    assert "by a layer of multi-token prediction\n" in text and "vision: 2 tensors" in text
    facts = json.loads(tandem("inspect", "--model", checkpoint_of("qwen3_5_moe"), "--json"))
    # Three inputs of 128 channels, and a matrix of 16 x 32 for each of four heads, in three layers.
    assert facts["state_bytes_per_page"] == 3 * 4 * (3 * 128 + 4 * 16 * 32)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 16 * 4 and facts["page_tokens"] == 64
    # On a GPU keys and values are BF16, states are not.
    assert "with a GPU" in text and "on the GPU" in text
    for card in [plan["gpu"] for plan in facts["plans"] if plan["gpus"]]:
        pages = card["kv_tokens"] // 64
        assert pages > 0 and card["kv_bytes"] == pages * (64 * 2 * 2 * 16 * 2 + facts["state_bytes_per_page"])


def test_tables_of_ngrams(tandem, checkpoint_of, tmp_path):  # noqa: F811
    make_model(tmp_path / "m", "tiny-qwen4-exp")
    text = tandem("inspect", "--model", tmp_path / "m")
    assert "selection     8 groups of 8 keys for a token, by 8 heads, 32 wide, in 1 of the 4 layers\n" in text
    assert "n-grams       of up to 3 tokens, 2 rows of a table each, in 2 of the 4 layers\n" in text
    assert "tables        260.00 KiB of n-grams" in text  # 2 layers, 4 heads of 1000 rows and more, 16 wide
    prompt = np.random.default_rng(1).integers(2, 900, 150)
    ours = [
        logits_of(tandem, tmp_path / "m", prompt, tmp_path / "l.npy", 64, "--weights", weights)
        for weights in ("mmap", "resident")
    ]
    assert (ours[0] == ours[1]).all()
    fp8 = tmp_path / "fp8"
    tandem("quantize", "--model", tmp_path / "m", "--to", "fp8", "--out", fp8)
    assert "tables        260.00 KiB" in tandem("inspect", "--model", fp8)
    assert np.median(relative_errors(logits_of(tandem, fp8, prompt, tmp_path / "l.npy", None), ours[0])) < 0.25


def test_inspect_of_decays_by_channel(tandem, checkpoint_of):  # noqa: F811
    model = checkpoint_of("kimi_linear")
    text = tandem("inspect", "--model", model)
    assert "delta nets    in 2 of the 4 layers instead: 2 heads, 16 wide, with a decay for each channel\n" in text
    assert "MLA: keys and values of rank 16 and 8 shared, queries of full rank\n" in text
    facts = json.loads(tandem("inspect", "--model", model, "--json"))
    # Three inputs of 96 channels, and a matrix of 16 x 32 for each of two heads, in two layers.
    assert facts["state_bytes_per_page"] == 2 * 4 * (3 * 96 + 2 * 16 * 32)
    assert facts["kv_bytes_per_token"] == 2 * (16 + 8) * 4


def test_inspect_of_selected_groups(tandem, checkpoint_of):  # noqa: F811
    model = checkpoint_of("glm5_next")
    text = tandem("inspect", "--model", model)
    assert "MLA: keys and values of rank 16, queries of rank 24\n" in text
    assert "selection     6 groups of 4 keys for a token, by 9 heads, 16 wide, in 2 of the 4 layers\n" in text
    facts = json.loads(tandem("inspect", "--model", model, "--json"))
    # Latents of 16 and, in a page of 64, 16 pooled keys of 16 and an open one of three times that, in two layers.
    assert facts["kv_bytes_per_token"] == 2 * (16 * 4 + (16 + 3) * 16 * 4 // 64)


# Blocks of MXFP4 by the kernels that round activations, in a case where no two experts nearly tie; what is
# expected of each kernel: test_golden.py.
@pytest.mark.no_asan
@pytest.mark.parametrize("isa", ROUNDING)
def test_rounded_activations(tandem, checkpoint_of, isa, tmp_path, monkeypatch):  # noqa: F811
    flag, tolerance, n_ties, _ = ROUNDING[isa]
    if flag not in pathlib.Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {flag}")
    monkeypatch.setenv("TANDEM_FORCE_ISA", isa)
    golden, model = np.load(DATA / "gpt_oss_plain.npz"), checkpoint_of("gpt_oss_plain")
    ours = [
        logits_of(tandem, model, golden["prompt"], tmp_path / "l.npy", chunk, "--activations", "auto")
        for chunk in (None, 7)
    ]
    errors = relative_errors(ours[0], golden["logits"])
    assert (errors < tolerance).sum() >= len(errors) - n_ties, np.sort(errors)[-4:]
    assert (ours[0] == ours[1]).all()


def test_quantizes_the_text_model_of_a_wrapped_one(tandem, checkpoint_of, tmp_path):  # noqa: F811
    out = tmp_path / "fp8"
    table = tandem("quantize", "--model", checkpoint_of("kimi_k25_bf16"), "--to", "fp8", "--out", out)
    kinds = [line.split()[0] for line in table.splitlines() if line.split()]
    assert "mlp.experts.up_proj" in kinds and "lm_head" in kinds
    text = tandem("inspect", "--model", out)
    assert "F8_E4M3" in text and "vision: 2 tensors" in text
    tandem("run", "--model", out, "--raw", "--token-ids", "3,4,5", "-n", 2)


@pytest.mark.parametrize("family", ["hy_v3", "qwen3_5_moe"])
def test_fused_experts_are_quantized_one_by_one(tandem, checkpoint_of, tmp_path, family):  # noqa: F811
    """The logits stay near the golden ones; with experts or halves exchanged they would have nothing in common."""
    model, out = checkpoint_of(family), tmp_path / "fp8"
    table = tandem("quantize", "--model", model, "--to", "fp8", "--out", out)
    kinds = [line.split()[0] for line in table.splitlines() if line.split()]
    assert {"mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"} <= set(kinds)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(name.endswith(".mlp.experts.3.up_proj.weight_scale") for name in index)
    assert not any(name.endswith("layers.1.mlp.experts.gate_up_proj") for name in index)
    golden = np.load(DATA / f"{family}.npz")
    ours = logits_of(tandem, out, golden["prompt"], tmp_path / "l.npy", None)
    assert np.median(relative_errors(ours, golden["logits"])) < 0.25


def test_blocks_of_mxfp4_are_small_already(tandem_bin, checkpoint_of, tmp_path):
    options = ["--model", checkpoint_of("gpt_oss"), "--to", "fp8", "--out", tmp_path / "fp8"]
    refused = subprocess.run([tandem_bin, "quantize", *options], capture_output=True, text=True)
    assert refused.returncode == 1 and "F4_E2M1 already; give a checkpoint in BF16" in refused.stderr


def test_transposed_experts_are_not_quantized(tandem_bin, checkpoint_of, tmp_path):
    options = ["--model", checkpoint_of("qwen3_vl_moe"), "--to", "fp8", "--out", tmp_path / "fp8"]
    refused = subprocess.run([tandem_bin, "quantize", *options], capture_output=True, text=True)
    assert refused.returncode == 1 and "holds transposed experts, which are served but not quantized" in refused.stderr


def in_bf16(case, directory, one_by_one):
    """gpt_oss as it is saved after training: experts in BF16, of the values that MXFP4 stands for, either
    transposed in one tensor, or one by one, gate and up apart, as tools have them that quantize."""
    config, dtype = golden_families.config_of(case)
    stored, used = golden_weights.weights(config, dtype, PROVENANCE[case]["seed"])
    entries = [e for e in stored if not e.name.endswith(("_blocks", "_scales"))]

    def add(name, values):
        bits = checkpoint.to_bf16(np.ascontiguousarray(values))
        assert (checkpoint.from_bf16(bits) == values).all()
        entries.append(checkpoint.Entry.of_array(name, bits, "BF16"))

    for name, values in used.items():
        prefix, _, kind = name.rpartition(".")
        if one_by_one and prefix.endswith("experts") and kind.endswith("_bias"):
            entries = [e for e in entries if e.name != name]
        elif not kind.endswith("_proj"):
            continue
        elif not one_by_one:
            add(name, values)
            continue
        what = "bias" if kind.endswith("_bias") else "weight"
        for e, v in enumerate(values):
            parts = {"gate": v.T[0::2], "up": v.T[1::2]} if "gate_up" in kind else {"down": v.T}
            for role, part in parts.items():
                add(f"{prefix}.{e}.{role}_proj.{what}", part)
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    golden_weights.write_checkpoint(directory, config, entries)


# The same values as in MXFP4, in another order of sums.
in_bf16_cases = pytest.mark.parametrize("case", ["gpt_oss", "gpt_oss_layers", "gpt_oss_plain"])


@pytest.mark.parametrize("one_by_one", [False, True])
@in_bf16_cases
def test_gpt_oss_in_bf16(tandem, case, one_by_one, tmp_path):
    golden = np.load(DATA / f"{case}.npz")
    in_bf16(case, tmp_path / "m", one_by_one)
    for weights in ("mmap", "resident"):
        ours = logits_of(tandem, tmp_path / "m", golden["prompt"], tmp_path / "l.npy", 37, "--weights", weights)
        check_logits(ours, golden["logits"])


@pytest.mark.no_asan
@in_bf16_cases
def test_gpt_oss_in_bf16_on_a_gpu(tandem, cuda, case, tmp_path, monkeypatch):  # noqa: F811
    golden = np.load(DATA / f"{case}.npz")
    in_bf16(case, tmp_path / "m", one_by_one=case == "gpt_oss_layers")
    for name, value in cuda.items():
        monkeypatch.setenv(name, value)
    for experts, chunk in (("gpu", 37), ("cpu", 37), ("gpu", 1)):
        options = ("--device", "cuda", "--expert-device", experts)
        ours = logits_of(tandem, tmp_path / "m", golden["prompt"], tmp_path / "l.npy", chunk, *options)
        check_cuda_logits(ours, golden["logits"], *CUDA_BOUNDS.get(case, ()))
