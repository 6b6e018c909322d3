"""Writes a Nano model as a DeepSeek-V3 checkpoint, in the layout of the hub."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .model import Nano
from .quant import is_quantized, quantize
from .text import BOS, CONTEXT, END, PAD, tokenizer_config


def config(m: Nano, fp8: bool) -> dict:
    c = m.c
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": BOS, "eos_token_id": END,
        "pad_token_id": PAD, "ep_size": 1, "first_k_dense_replace": c.dense_layers, "hidden_act": "silu",
        "hidden_size": c.hidden, "initializer_range": 0.02, "intermediate_size": c.dense_inter,
        "kv_lora_rank": c.kv_lora, "max_position_embeddings": CONTEXT, "moe_intermediate_size": c.moe_inter,
        "moe_layer_freq": 1, "n_group": c.groups, "n_routed_experts": c.experts, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": c.heads, "num_experts_per_tok": c.top_k,
        "num_hidden_layers": c.layers, "num_key_value_heads": c.heads, "num_nextn_predict_layers": 1,
        "q_lora_rank": c.q_lora, "qk_nope_head_dim": c.nope, "qk_rope_head_dim": c.rope,
        "v_head_dim": c.v_dim, "rms_norm_eps": c.eps, "rope_interleave": True, "rope_scaling": None,
        "rope_theta": c.theta, "routed_scaling_factor": c.scaling, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": c.top_groups, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": c.vocab}
    if fp8:
        fields["quantization_config"] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                         "weight_block_size": [128, 128]}
    return fields


def published_name(name: str, layers: int) -> str:
    """The hub's name of a parameter of Nano that is no stack of experts."""
    last = f"model.layers.{layers}"
    for ours, theirs in (("mtp.layer.", f"{last}."), ("mtp.norm.", f"{last}.shared_head.norm."),
                         ("mtp.", f"{last}."), ("lm_head.", "lm_head.")):
        if name.startswith(ours):
            return theirs + name[len(ours):]
    return "model." + name


def tensors(m: Nano):
    """Yields (published name, float32 tensor, quantized) of every tensor of the checkpoint."""
    for name, p in m.state_dict().items():
        quantized = is_quantized(name, p)
        if ".experts." in name and "shared" not in name:
            base = published_name(name.rsplit(".experts.", 1)[0], m.c.layers) + ".experts"
            for e in range(m.c.experts):
                if name.endswith("gate_up"):
                    gate, up = p[e].chunk(2)
                    yield f"{base}.{e}.gate_proj.weight", gate, True
                    yield f"{base}.{e}.up_proj.weight", up, True
                else:
                    yield f"{base}.{e}.down_proj.weight", p[e], True
        elif name.endswith("e_score_correction_bias"):
            # Only differences count; non-negative values agree with every published top-k.
            yield published_name(name, m.c.layers), p - p.min(), False
        else:
            yield published_name(name, m.c.layers), p, quantized
    last = f"model.layers.{m.c.layers}"
    yield f"{last}.embed_tokens.weight", m.embed_tokens.weight, False
    yield f"{last}.shared_head.head.weight", m.lm_head.weight, False


@torch.no_grad()
def write(m: Nano, out: Path, fp8: bool = True):
    """The checkpoint without its tokenizer and template. fp8: matrices in E4M3 blocks, else BF16."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, p, quantized in tensors(m):
        if quantized and fp8:
            stored[name], stored[name + "_scale_inv"] = (t.contiguous().cpu() for t in quantize(p))
        elif name.endswith("e_score_correction_bias"):
            stored[name] = p.float().contiguous().cpu()
        else:
            stored[name] = p.bfloat16().contiguous().cpu().clone()
    save_file(dict(sorted(stored.items())), out / "model.safetensors", metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": {n: "model.safetensors" for n in sorted(stored)}}
    generation = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD, "do_sample": True,
                  "temperature": 0.3, "top_p": 0.9}
    for name, value in (("config.json", config(m, fp8)), ("generation_config.json", generation),
                        ("tokenizer_config.json", tokenizer_config()), ("model.safetensors.index.json", index)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    print(f"{out}: {len(stored)} tensors, {total / 1e6:.1f} MB")
