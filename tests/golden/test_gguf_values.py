"""GGUF files against the float32 values that they stand for, and against transformers.

Files are made on the spot (scripts/gguf_files.py): random blocks in every format, and the families'
goldens as llama.cpp's converter writes them.
"""

import hashlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from test_families import DATA, PROVENANCE
from test_formats import CONFIG, PROMPT, random_values
from test_golden import check_logits, ids_of, relative_errors, tandem  # noqa: F401
from test_golden_cuda import check_logits as check_cuda_logits
from test_golden_cuda import cuda  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import architectures
import checkpoint
import gguf_files
import golden_families
import golden_weights
import published
from checkpoint import Entry
from gguf_files import Tensor

TOLERANCE = 1e-5
SMALL = CONFIG | {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
# Latent attention, whose keys are joined of two tensors; groups of experts; YaRN.
LATENT = published.DEEPSEEK_BASE | {
    "first_k_dense_replace": 1, "hidden_size": 256, "intermediate_size": 256, "kv_lora_rank": 64,
    "max_position_embeddings": 512, "moe_intermediate_size": 256, "n_group": 2,
    "n_routed_experts": 8, "num_attention_heads": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "topk_group": 1, "v_head_dim": 64, "vocab_size": 264,
    "rope_scaling": published.DEEPSEEK_BASE["rope_scaling"] | {"original_max_position_embeddings": 16},
}


def logits(tandem_bin, model, prompt, out, *options, activations="f32"):
    args = ["eval", "logits", "--model", model, "--token-ids", ids_of(np.asarray(prompt)), "--device", "cpu"]
    done = subprocess.run(
        [tandem_bin, *args, "--activations", activations, "--out", out, *options],
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    return np.load(out)


def blocks_or_values(name, values, dtype, rng):
    """The tensor in blocks, where llama.cpp's quantizer would have any, and what it stands for."""
    if values.ndim < 2 or "norm" in name or "gate_inp" in name:
        return Tensor.of_values(name, values), values
    data, values = gguf_files.random_blocks(dtype, values.shape, values.std(), rng)
    return Tensor(name, values.shape, dtype, data), values


def make(dtype, config=SMALL):
    """Metadata and tensors of a GGUF file, and the tensors' values by llama.cpp's names."""
    rng = np.random.default_rng(5)
    values = {t.name: random_values(t, rng) for t in architectures.tensors(config)}
    tensors, used = [], {}
    for name, v in gguf_files.named(config, values):
        tensor, used[name] = blocks_or_values(name, v, dtype, rng)
        tensors.append(tensor)
    return gguf_files.metadata_of(config), tensors, used


def value_of(t, config, used):
    """A tensor of the publisher's by the values in a GGUF file."""
    parts = [used[n] for n, _ in gguf_files.named(config, {t.name: np.zeros(t.shape, np.float32)})]
    if len(parts) == 2:  # kv_b
        return np.concatenate([parts[0].transpose(0, 2, 1), parts[1]], 1).reshape(t.shape)
    expert = t.name.partition(".experts.")[2].partition(".")[0]
    return parts[0][int(expert)] if expert else parts[0]


def write_used(directory, used, config=SMALL):
    """The same model as a publisher's checkpoint in F32."""
    entries = []
    for t in architectures.tensors(config):
        v = np.ascontiguousarray(value_of(t, config, used), np.float32)
        entries.append(Entry.of_array(t.name, v, "F32"))
    directory.mkdir()
    checkpoint.write_shards(str(directory), entries, 1 << 30)
    checkpoint.write_json(str(directory / "config.json"), config)


# scripts/make_gguf_grids.py
@pytest.mark.parametrize("dtype", gguf_files.BLOCKS)
def test_reference(dtype):
    want = json.loads((pathlib.Path(__file__).parent / "gguf_blocks.json").read_text())
    values = gguf_files.BLOCKS[dtype][4](gguf_files.sample_blocks(dtype)).astype(np.float32)
    assert hashlib.sha256((values + np.float32(0)).tobytes()).hexdigest() == want[dtype]


@pytest.mark.no_asan
@pytest.mark.parametrize("dtype", gguf_files.BLOCKS)
def test_values(dtype, tandem_bin, tmp_path, monkeypatch):
    metadata, tensors, used = make(dtype)
    gguf_files.write(tmp_path / "model.gguf", metadata, tensors)
    write_used(tmp_path / "used", used)
    want = logits(tandem_bin, tmp_path / "used", PROMPT, tmp_path / "want.npy")
    for isa in ("", "avx2", "scalar"):
        if isa:
            monkeypatch.setenv("TANDEM_FORCE_ISA", isa)
        ours = logits(tandem_bin, tmp_path / "model.gguf", PROMPT, tmp_path / "ours.npy")
        errors = relative_errors(ours, want)
        assert (errors < TOLERANCE).all(), f"{isa}: {errors.max():.1e}"


# Where the CPU has AVX-512, activations are rounded to 15 bits (test_golden.py, ROUNDING).
@pytest.mark.parametrize("dtype", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
def test_rounded_activations(dtype, tandem_bin, tmp_path):
    metadata, tensors, _ = make(dtype)
    gguf_files.write(tmp_path / "model.gguf", metadata, tensors)
    want = logits(tandem_bin, tmp_path / "model.gguf", PROMPT, tmp_path / "want.npy")
    for options in ([], ["--chunk-tokens", "1"]):
        ours = logits(tandem_bin, tmp_path / "model.gguf", PROMPT, tmp_path / "ours.npy", *options,
                      activations="auto")
        check_logits(ours, want)


@pytest.mark.no_asan
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["Q4_K", "Q6_K", "MXFP4"])
def test_cuda(tandem, cuda, tandem_bin, dtype, tmp_path):  # noqa: F811
    metadata, tensors, _ = make(dtype)
    model, out = tmp_path / "model.gguf", tmp_path / "logits.npy"
    gguf_files.write(model, metadata, tensors)
    want = logits(tandem_bin, model, PROMPT, tmp_path / "want.npy")
    for chunk in ((), ("--chunk-tokens", "7")):
        args = ("--model", model, "--token-ids", ids_of(np.asarray(PROMPT)), "--out", out, "--device", "cuda")
        tandem("eval", "logits", *args, *chunk, **cuda)
        check_cuda_logits(np.load(out), want)


def test_parts_and_weights_in_memory(tandem_bin, tmp_path):
    metadata, tensors, _ = make("Q4_K")
    gguf_files.write(tmp_path / "model.gguf", metadata, tensors)
    want = logits(tandem_bin, tmp_path / "model.gguf", PROMPT, tmp_path / "want.npy")
    first = gguf_files.write_parts(str(tmp_path / "parts"), metadata, tensors, 3)
    for options in ([], ["--weights", "resident"]):
        ours = logits(tandem_bin, first, PROMPT, tmp_path / "ours.npy", *options)
        assert (ours == want).all()
    (tmp_path / "parts-00002-of-00003.gguf").unlink()
    args = [tandem_bin, "inspect", "--model", first]
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 1 and "download all of them" in done.stderr


def refusal(tandem_bin, path):
    done = subprocess.run([tandem_bin, "inspect", "--model", path], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_refusals(tandem_bin, tmp_path):
    metadata, tensors, _ = make("Q8_0")
    path = tmp_path / "model.gguf"
    gguf_files.write(path, metadata | {"general.architecture": "llama", "llama.block_count": 2, "llama.expert_count": 0}, tensors)
    assert "llama.expert_count: is absent: a dense model" in refusal(tandem_bin, path)
    gguf_files.write(path, metadata | {"general.architecture": "gemma"}, tensors)
    assert "architecture gemma is not supported; supported are qwen3moe" in refusal(tandem_bin, path)
    shape = next(t.shape for t in tensors if t.name == "blk.1.attn_q.weight")
    small = Tensor("blk.1.attn_q.weight", shape, "NVFP4",
                   np.zeros(int(np.prod(shape)) // 64 * 36, np.uint8))
    gguf_files.write(path, metadata, [t if t.name != small.name else small for t in tensors])
    assert "dtype NVFP4 is not supported here; supported: F32, F16, BF16, Q8_0" in refusal(
        tandem_bin, path)


# The parts of kv_b_proj become F16.
@pytest.mark.parametrize("change", [{}, {"q_lora_rank": None, "n_group": 1, "rope_scaling": None}])
def test_latent_attention(change, tandem_bin, tmp_path):
    config = LATENT | change
    metadata, tensors, used = make("Q8_0", config)
    gguf_files.write(tmp_path / "model.gguf", metadata, tensors)
    write_used(tmp_path / "used", used, config)
    want = logits(tandem_bin, tmp_path / "used", PROMPT, tmp_path / "want.npy")
    for options in ([], ["--weights", "resident"], ["--chunk-tokens", "1"]):
        ours = logits(tandem_bin, tmp_path / "model.gguf", PROMPT, tmp_path / "ours.npy", *options)
        check_logits(ours, want)


# Families of which there are goldens with the values of transformers, but for what GGUF cannot say:
# which layers have experts or a window, rows of queries in halves, another activation, weights that
# are not normed.
UNSAID = {"glm4_moe_lite_layers", "glm4_moe_lite_whole", "gpt_oss_layers", "gpt_oss_plain",
          "dots1_windows", "dots1_fp8", "ernie4_5_moe_layers", "olmoe_bias", "qwen3_vl_moe_odd", "qwen3_next_odd", "qwen3_next_fp8", "hy_v3_published", "deepseek_v32_dense"}


def text_of(config):
    """The language model's configuration."""
    return config["text_config"] if config["model_type"] in ("gemma4", "qwen3_5_moe", "qwen3_vl_moe") else config


CASES = [c for c in golden_families.CASES
         if text_of(golden_families.CASES[c][0])["model_type"] in gguf_files.ARCHS and c not in UNSAID]


@pytest.mark.parametrize("case", CASES)
def test_families(case, tandem_bin, tmp_path):
    config, dtype = golden_families.config_of(case)
    _, used = golden_weights.weights(config, dtype, PROVENANCE[case]["seed"])
    used = {n.replace("model.language_model.", "model."): v for n, v in used.items() if "vis" not in n}
    config = text_of(config)
    golden = np.load(DATA / f"{case}.npz")
    tensors = [Tensor.of_values(n, v) for n, v in gguf_files.named(config, used)]
    gguf_files.write(tmp_path / "model.gguf", gguf_files.metadata_of(config), tensors)
    ours = logits(tandem_bin, tmp_path / "model.gguf", golden["prompt"], tmp_path / "l.npy")
    check_logits(ours, golden["logits"])
    done = subprocess.run([tandem_bin, "inspect", "--model", tmp_path / "model.gguf", "--json"],
                          capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)
    scale = [k for k in gguf_files.metadata_of(config) if k.endswith("attention.temperature_scale")]
    assert "temperature_scale" not in done.stderr
    if scale:  # as converted without it
        metadata = {k: v for k, v in gguf_files.metadata_of(config).items() if k not in scale}
        gguf_files.write(tmp_path / "model.gguf", metadata, tensors)
        done = subprocess.run([*done.args], capture_output=True, text=True, check=True)
        assert "no metadata attention.temperature_scale: queries beyond position 8192" in done.stderr
