"""What is wrong about a GGUF file is named as the file names it: keys of its metadata, its tensors."""

import re
import subprocess

import numpy as np
import pytest
from test_gguf_values import CASES, PROVENANCE, text_of

import gguf_files  # by test_gguf_values
import golden_families
import golden_weights
from gguf_files import Tensor

FIRST = {gguf_files.ARCHS[text_of(golden_families.CASES[c][0])["model_type"]]: c for c in reversed(CASES)}
# What any of them calls something else, or does not have.
PUBLISHED = re.compile(
    r"json|model\.layers|self_attn|_proj|n_group|topk_group|rms_norm_eps|vocab_size|head_dim|(?<!attention\.q_)"
    r"(?<!attention\.kv_)lora_rank|num_|hidden_|rope_theta|partial_rotary|(?<!interleave_)moe_|index_|linear_|layer_types|model_type")
SEEN = set()  # parts of layers that an architecture before had


@pytest.fixture(scope="module", params=sorted(FIRST))
def model(request):
    case = FIRST[request.param]
    config, dtype = golden_families.config_of(case)
    _, values = golden_weights.weights(config, dtype, PROVENANCE[case]["seed"])
    values = {n.replace("model.language_model.", "model."): v for n, v in values.items() if "vis" not in n}
    config = text_of(config)
    tensors = [Tensor.of_values(n, v) for n, v in gguf_files.named(config, values)]
    return request.param, gguf_files.metadata_of(config), tensors


def refused(tandem_bin, path, metadata, tensors):
    """The error of a file; None if it is taken."""
    gguf_files.write(path, metadata, tensors)
    done = subprocess.run([tandem_bin, "inspect", "--model", path], capture_output=True, text=True)
    return done.stderr.replace(str(path), "").strip() if done.returncode else None


@pytest.mark.no_asan
def test_keys(model, tandem_bin, tmp_path):
    arch, metadata, tensors = model
    n_named = 0
    for i, key in enumerate(k for k in metadata if k.startswith(arch) or k.endswith("token_id")):
        wrong = metadata | {key: (0, 4_000_000_000, 0.3, "x")[i % 4]}
        said = refused(tandem_bin, tmp_path / "model.gguf", wrong, tensors)
        if said is not None:
            assert not PUBLISHED.search(said), (key, said)
            n_named += key in said
    assert n_named > 5


@pytest.mark.no_asan
def test_tensors(model, tandem_bin, tmp_path):
    arch, metadata, tensors = model
    for t in tensors:
        part = re.sub(r"blk\.\d+\.", "", t.name)
        if part in SEEN:
            continue
        SEEN.add(part)
        longer = Tensor.of_values(t.name, np.zeros((*t.shape[:-1], 2 * t.shape[-1]), np.float32))
        for now in ([], [longer]):
            others = [o for o in tensors if o is not t]
            said = refused(tandem_bin, tmp_path / "model.gguf", metadata, others + now)
            assert said is None or not PUBLISHED.search(said), (t.name, said)
            assert not now or said is None or re.search(re.escape(t.name) + "|attn_kv_b|ssm_ba", said), said
