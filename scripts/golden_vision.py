#!/usr/bin/env python3
"""Golden models that see: random towers beside random language models, made on the spot from a seed.

tests/golden/vision/NAME.npz holds a prompt with images of noise, the embeddings that transformers' tower
makes of them ([1 + layers added behind the language model's first ones][tokens][width], image by image),
logits of every position and a greedy continuation, all in float32. With NAME... as arguments this script
makes them: in the environment of scripts/setup.sh --dev.
"""

import json
import os
import struct
import sys

import numpy as np

import checkpoint
import golden_common
import golden_families
import golden_weights

IMAGE_TOKEN, VISION_START, N_GREEDY, MIN_LEAD = 60, 61, 24, 0.02
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden", "vision")

_TOWER = {
    "deepstack_visual_indexes": [0, 2],
    "depth": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 24,
    "in_channels": 3,
    "intermediate_size": 36,
    "num_heads": 2,
    "num_position_embeddings": 25,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


_GLM = {k: v for k, v in _TOWER.items() if not k.startswith(("deepstack", "num_position"))} | {
    "attention_bias": False,
    "hidden_act": "silu",
    "image_size": 20,
    "rms_norm_eps": 1e-5,
}
_GLM5 = {k: v for k, v in _GLM.items() if k != "image_size"} | {
    "attention_bias": True,
    "projection_intermediate_size": 52,
    "swiglu_limit": 0.7,
}


# The language model of Qwen3-Omni's thinker, and what transformers wants to know of the rest.
_THINKER = {k: v for k, v in golden_families.config_of("qwen3_vl_moe")[0]["text_config"].items()} | {
    "model_type": "qwen3_moe", "norm_topk_prob": True}
_AUDIO = {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "encoder_layers": 1, "n_window": 50,
          "downsample_hidden_size": 8, "num_mel_bins": 16, "output_dim": 40, "max_source_positions": 64}


def _omni(grids, **tower):
    vision = _TOWER | {"model_type": "qwen3_omni_moe_vision_encoder", "out_hidden_size": _THINKER["hidden_size"]} | tower
    text = _THINKER | {"model_type": "qwen3_omni_moe_text"}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "audio_config": _AUDIO, "text_config": text,
               "vision_config": vision, "audio_token_id": 62, "image_token_id": IMAGE_TOKEN, "video_token_id": 63,
               "vision_start_token_id": VISION_START}
    return {"config": {"model_type": "qwen3_omni_moe", "thinker_config": thinker}, "dtype": "bf16", "grids": grids,
            "mean": 0.5, "std": 0.5}


def parts(case):
    """The configurations of the language model and of the tower."""
    config = case["config"].get("thinker_config", case["config"])
    return config["text_config"], config["vision_config"]


def _whole(family, grids, mean=0.5, std=0.5, base=_TOWER, **tower):
    """A configuration beside which the language model's is that of a golden of its family."""
    config, dtype = golden_families.config_of(family)
    if "text_config" not in config:
        config = golden_common.wrapped(config["model_type"].removesuffix("_text"), config)
    tower = {"model_type": config["model_type"] + "_vision",
             "out_hidden_size": config["text_config"]["hidden_size"]} | tower
    config = config | {"image_token_id": IMAGE_TOKEN, "vision_config": base | tower}
    return {"config": config, "dtype": dtype, "grids": grids, "mean": mean, "std": std}


# Grids are rows and columns of patches.
CASES = {
    "qwen3_vl_moe": _whole("qwen3_vl_moe", [(6, 4), (2, 8)]),
    # A patch of 7 x 7, three frames, groups of nine; heads of 8; means and deviations that show; one layer.
    "qwen3_vl_moe_odd": _whole(
        "qwen3_vl_moe_odd", [(3, 9), (6, 3)], 0.4, 0.3, deepstack_visual_indexes=[0], depth=1, num_heads=3,
        num_position_embeddings=4, patch_size=7, spatial_merge_size=3, temporal_patch_size=3),
    # Nothing is added behind layers; a token between images, the last of which is at the prompt's end.
    "qwen3_vl_moe_plain": _whole(
        "qwen3_vl_moe", [(4, 4), (8, 2), (2, 2)], deepstack_visual_indexes=[], num_position_embeddings=64),
    "qwen3_omni_moe": _omni([(6, 4), (2, 8)]),
    "qwen3_5_moe": _whole("qwen3_5_moe", [(6, 4), (2, 8)]),
    "qwen3_5_moe_odd": _whole(
        "qwen3_5_moe_odd", [(3, 9), (6, 3)], 0.4, 0.3, depth=1, num_heads=3, num_position_embeddings=4,
        patch_size=7, spatial_merge_size=3, temporal_patch_size=3),
    "qwen3_5_moe_fp8": _whole("qwen3_5_moe_fp8", [(4, 4), (8, 2), (2, 2)], num_position_embeddings=64),
    "glm4v_moe": _whole("glm4v_moe", [(6, 4), (2, 8)], 0.45, 0.27, _GLM),
    # A patch of 7 x 7, one frame, groups of nine; biases of attention; a square of four positions.
    "glm4v_moe_odd": _whole(
        "glm4v_moe_odd", [(3, 9), (6, 3)], 0.4, 0.3, _GLM, attention_bias=True, depth=1, image_size=14, num_heads=3,
        patch_size=7, rms_norm_eps=1e-3, spatial_merge_size=3, temporal_patch_size=1),
    "glm4v_moe_sizes": _whole("glm4v_moe", [(4, 4), (8, 2), (2, 2)], base=_GLM, image_size=35),
    "glm5_next": _whole("glm5_next", [(6, 4), (2, 8)], 0.45, 0.27, _GLM5),
    "glm5_next_odd": _whole(
        "glm5_next_odd", [(3, 9), (6, 3)], 0.4, 0.3, _GLM5, attention_bias=False, depth=1, num_heads=3, patch_size=7,
        rms_norm_eps=1e-3, spatial_merge_size=3, swiglu_limit=10.0, temporal_patch_size=1),
}


def _glm_shapes(config):
    """And which of them have biases."""
    v, is_5 = config["vision_config"], config["model_type"] == "glm5_next"
    dim, out, m, bias = v["hidden_size"], v["out_hidden_size"], v["spatial_merge_size"], v["attention_bias"]
    mlp = v["intermediate_size"] if is_5 else out
    context = v["projection_intermediate_size"] if is_5 else v["intermediate_size"]
    shapes = {"patch_embed.proj": ((dim, 3, v["temporal_patch_size"], v["patch_size"], v["patch_size"]), True),
              "post_layernorm": ((dim,), False), "downsample": ((out, dim, m, m), True),
              "merger.proj": ((out, out), False), "merger.post_projection_norm": ((out,), True),
              "merger.gate_proj": ((context, out), False), "merger.up_proj": ((context, out), False),
              "merger.down_proj": ((out, context), False)}
    if not is_5:
        shapes |= {"post_conv_layernorm": ((dim,), False),
                   "embeddings.position_embedding": (((v["image_size"] // v["patch_size"]) ** 2, dim), False)}
    for i in range(v["depth"]):
        p = f"blocks.{i}."
        shapes |= {p + "norm1": ((dim,), False), p + "norm2": ((dim,), False), p + "attn.qkv": ((3 * dim, dim), bias),
                   p + "attn.proj": ((dim, dim), bias and is_5), p + "mlp.gate_proj": ((mlp, dim), bias and is_5),
                   p + "mlp.up_proj": ((mlp, dim), bias and is_5), p + "mlp.down_proj": ((dim, mlp), bias and is_5)}
        if is_5:
            shapes |= {p + f"attn.{x}_norm": ((dim // v["num_heads"],), False) for x in "qk"}
    return shapes


def _tower_shapes(config):
    if config["model_type"].startswith("glm"):
        return _glm_shapes(config)
    return {k: (v, k != "pos_embed") for k, v in _qwen_shapes(config).items()}


def _qwen_shapes(config):
    is_omni = config["model_type"] == "qwen3_omni_moe"
    v = config.get("thinker_config", config)["vision_config"]
    names = ("ln_q", "mlp.0", "mlp.2") if is_omni else ("norm", "linear_fc1", "linear_fc2")
    dim, mlp, out, merged = (v["hidden_size"], v["intermediate_size"], v["out_hidden_size"],
                             v["hidden_size"] * v["spatial_merge_size"] ** 2)
    shapes = {"patch_embed.proj": (dim, 3, v["temporal_patch_size"], v["patch_size"], v["patch_size"]),
              "pos_embed": (v["num_position_embeddings"], dim)}

    def add_merger(name, normed):
        shapes.update(zip((f"{name}.{n}" for n in names), ((normed,), (merged, merged), (out, merged))))

    for i in range(v["depth"]):
        p = f"blocks.{i}."
        shapes.update({p + "norm1": (dim,), p + "norm2": (dim,), p + "attn.qkv": (3 * dim, dim),
                       p + "attn.proj": (dim, dim), p + "mlp.linear_fc1": (mlp, dim), p + "mlp.linear_fc2": (dim, mlp)})
    add_merger("merger", dim)
    has_deep = config["model_type"] != "qwen3_5_moe"
    for i in range(len(v["deepstack_visual_indexes"]) if has_deep else 0):
        add_merger(f"{'' if is_omni else 'deepstack_'}merger_list.{i}", merged)
    return shapes


def weights(name, seed):
    """(entries as published, the float32 values that they stand for), of the whole."""
    case = CASES[name]
    is_omni = "thinker_config" in case["config"]
    text = (_THINKER if is_omni else case["config"]) | {"vision_config": {}}
    stored, used = golden_weights.weights(text, case["dtype"], seed)
    if is_omni:
        stored = [checkpoint.Entry("thinker." + e.name, e.shape, e.dtype, e.chunks) for e in stored]
        used = {"thinker." + k: v for k, v in used.items()}
    stored = [e for e in stored if not e.name.startswith("model.visual.")]
    used = {k: v for k, v in used.items() if not k.startswith("model.visual.")}
    rng = np.random.default_rng([seed, 2])
    for module, (shape, has_bias) in _tower_shapes(case["config"]).items():
        is_norm = len(shape) == 1
        fan = int(np.prod(shape[1:]))
        scale = 0.2 if is_norm else 1.0 if module.endswith(("pos_embed", "embedding")) else 1.5 / fan**0.5
        values = {"weight": rng.normal(is_norm, scale, shape).astype(np.float32)}
        if has_bias:
            values["bias"] = rng.normal(0, 0.2, shape[:1]).astype(np.float32)
        for part, value in values.items():
            bits = checkpoint.to_bf16(value)
            full = f"{'thinker' if is_omni else 'model'}.visual.{module}.{part}"
            stored.append(checkpoint.Entry.of_array(full, bits, "BF16"))
            used[full] = checkpoint.from_bf16(bits)
    return stored, used


def make(name, directory, seed):
    """Writes the checkpoint of a case; returns its digest."""
    case = CASES[name]
    stored, _ = weights(name, seed)
    golden_weights.write_checkpoint(directory, case["config"], stored, parts(case)[0]["vocab_size"])
    return golden_weights.digest(case["config"], stored)


def prompt_of(name, seed):
    """Token ids and images: (at, n_tokens, grid_h, grid_w, pixels as uint8 [rows][columns][3])."""
    case, rng = CASES[name], np.random.default_rng([seed, 3])
    v = parts(case)[1]
    ids, images = rng.integers(2, IMAGE_TOKEN, 9).tolist(), []
    for i, (h, w) in enumerate(case["grids"]):
        n = h * w // v["spatial_merge_size"] ** 2
        pixels = rng.integers(0, 256, (h * v["patch_size"], w * v["patch_size"], 3), dtype=np.uint8)
        ids += [VISION_START] if "thinker_config" in case["config"] else []
        images.append((len(ids), n, h, w, pixels))
        ids += [IMAGE_TOKEN] * n
        n_text = 7 if len(case["grids"]) < 3 else int(i + 1 < len(case["grids"]))
        ids += rng.integers(2, IMAGE_TOKEN, n_text).tolist()
    return ids, images


def write_prompt(path, name, ids, images):
    """As tests/tools/vision_driver reads it; an image's hash is its number."""
    norm = struct.pack("<6f", *[CASES[name]["mean"]] * 3, *[CASES[name]["std"]] * 3)
    with open(path, "wb") as f:
        f.write(struct.pack("<II", len(ids), len(images)) + np.array(ids, "<i4").tobytes())
        for i, (at, n, h, w, pixels) in enumerate(images):
            f.write(struct.pack("<IIII", at, n, h, w) + bytes([i + 1] * 32) + norm + pixels.tobytes())


# ---- the reference ---------------------------------------------------------------------------------


def _patches(case, pixels):
    """As the processor cuts them: groups of merge^2 patches, each [channel][frame][row][column]."""
    v = parts(case)[1]
    p, m, t = v["patch_size"], v["spatial_merge_size"], v["temporal_patch_size"]
    x = (pixels.astype(np.float32) / 255 - np.float32(case["mean"])) / np.float32(case["std"])
    h, w = x.shape[0] // p, x.shape[1] // p
    x = x.reshape(h // m, m, p, w // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    x = np.repeat(x[:, :, :, :, :, None], t, axis=5)
    return x.reshape(h * w, -1)


def _reference(name, seed):
    import tempfile

    import torch
    import transformers

    case = CASES[name]
    _, used = weights(name, seed)
    kind = {"qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5_moe": "Qwen3_5Moe", "glm4v_moe": "Glm4vMoe",
            "glm5_next": "Glm5Next", "qwen3_omni_moe": "Qwen3OmniMoeThinker"}[case["config"]["model_type"]]
    whole = case["config"].get("thinker_config", case["config"])
    plain = {k: v for k, v in whole.items() if k != "quantization_config"}
    with tempfile.TemporaryDirectory() as directory:
        entries = [checkpoint.Entry.of_array(n, v, "F32") for n, v in used.items()]
        checkpoint.write_shard(os.path.join(directory, "model.safetensors"), entries)
        checkpoint.write_json(os.path.join(directory, "config.json"), plain)
        model, info = getattr(transformers, kind + "ForConditionalGeneration").from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    prediction = f"model.language_model.layers.{parts(case)[0]['num_hidden_layers']}."
    unexpected = [k for k in info["unexpected_keys"] if not k.startswith(("mtp.", prediction))]
    missing = [k for k in info["missing_keys"] if not k.startswith("model.audio_tower.")]
    if missing or info["mismatched_keys"] or unexpected:
        raise SystemExit(f"transformers did not take the checkpoint as it is: {info}")
    return model.eval()


def _compute(name, seed):
    import torch

    case, model = CASES[name], _reference(name, seed)
    prompt, images = prompt_of(name, seed)
    pixels = torch.tensor(np.concatenate([_patches(case, i[4]) for i in images]))
    grids = torch.tensor([[1, i[2], i[3]] for i in images])

    def forward(ids):
        kinds = torch.tensor([[int(t == IMAGE_TOKEN and i < len(prompt)) for i, t in enumerate(ids)]])
        more = {"attention_mask": torch.ones_like(kinds)} if "thinker_config" in case["config"] else {
            "mm_token_type_ids": kinds}
        return model(input_ids=torch.tensor([ids]), pixel_values=pixels, image_grid_thw=grids, use_cache=False,
                     **more).logits[0].numpy()

    with torch.no_grad():
        seen = model.model.visual(pixels, grid_thw=grids)
        deep = getattr(seen, "deepstack_features", None) or []
        counts = [i[1] for i in images]
        parts = [x.split(counts) for x in (seen.pooler_output, *deep)]
        rows = torch.cat([part[i].flatten() for i in range(len(images)) for part in parts]).numpy()
        logits = forward(prompt)
        ids, lead = list(prompt), np.inf
        for _ in range(N_GREEDY):
            last = forward(ids)[-1]
            second, best = np.sort(last)[-2:]
            lead = min(lead, (best - second) / np.sqrt(np.mean(last**2)))
            ids.append(int(last.argmax()))
            if lead < MIN_LEAD or ids[-1] == IMAGE_TOKEN:
                return None
    return {"rows": rows.astype(np.float32), "logits": logits.astype(np.float32),
            "continuation": np.array(ids[len(prompt):], np.int32)}


def main():
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.makedirs(ROOT, exist_ok=True)
    path = os.path.join(ROOT, "provenance.json")
    known = json.load(open(path, encoding="utf-8")) if os.path.exists(path) else {"cases": {}}
    known["versions"] = {"numpy": np.__version__, "python": sys.version.split()[0],
                         "torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    for name in sys.argv[1:] or CASES:
        seed, case = next((s, c) for s in range(100) if (c := _compute(name, s)))
        stored, _ = weights(name, seed)
        np.savez_compressed(os.path.join(ROOT, name + ".npz"), **case)
        known["cases"][name] = {"seed": seed, "digest": golden_weights.digest(CASES[name]["config"], stored)}
        checkpoint.write_json(path, known)
        print(name, seed, os.path.getsize(os.path.join(ROOT, name + ".npz")), flush=True)


if __name__ == "__main__":
    main()
