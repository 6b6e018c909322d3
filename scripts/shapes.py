"""Architectures: the tensors a config.json promises, and the published shapes to choose from."""

import copy
from dataclasses import dataclass

import quant_formats

# What is quantized in a published FP8 checkpoint: the matrices of the layers, but not the router.
LINEAR = {"q", "k", "v", "o", "gate", "up", "down", "latent"}
# What is published in FP32.
PRECISE = {"router_bias", "hyper", "hyper_base", "hyper_scale", "ape"}


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple
    role: str  # what it does, which decides dtype and scale of its random values
    expert: bool = False

    @property
    def fan_in(self):
        return self.shape[-1]


def _mlp(prefix, dim, inner):
    yield Tensor(f"{prefix}.gate_proj.weight", (inner, dim), "gate")
    yield Tensor(f"{prefix}.up_proj.weight", (inner, dim), "up")
    yield Tensor(f"{prefix}.down_proj.weight", (dim, inner), "down")


def _mla(c, p):
    dim, heads, bias = c["hidden_size"], c["num_attention_heads"], c.get("attention_bias", False)
    latent, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
    q_rows = heads * (c["qk_nope_head_dim"] + rope)
    if c["q_lora_rank"] is None:
        yield Tensor(f"{p}.q_proj.weight", (q_rows, dim), "q")
    else:
        yield Tensor(f"{p}.q_a_proj.weight", (c["q_lora_rank"], dim), "latent")
        if bias:
            yield Tensor(f"{p}.q_a_proj.bias", (c["q_lora_rank"],), "bias")
        yield Tensor(f"{p}.q_a_layernorm.weight", (c["q_lora_rank"],), "norm")
        yield Tensor(f"{p}.q_b_proj.weight", (q_rows, c["q_lora_rank"]), "q")
    yield Tensor(f"{p}.kv_a_proj_with_mqa.weight", (latent + rope, dim), "latent")
    if bias:
        yield Tensor(f"{p}.kv_a_proj_with_mqa.bias", (latent + rope,), "bias")
    yield Tensor(f"{p}.kv_a_layernorm.weight", (latent,), "norm")
    kv_rows = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    yield Tensor(f"{p}.kv_b_proj.weight", (kv_rows, latent), "k")
    yield Tensor(f"{p}.o_proj.weight", (dim, heads * c["v_head_dim"]), "o")
    if bias:
        yield Tensor(f"{p}.o_proj.bias", (dim,), "bias")


def has_indexer(c, i):
    """Whether layer i selects keys itself, rather than attend to those of an earlier one."""
    if c.get("indexer_types"):
        return c["indexer_types"][i] == "full"
    if c.get("index_topk_pattern"):
        return c["index_topk_pattern"][i] == "F"
    return max(i - c.get("index_skip_topk_offset", 2) + 1, 0) % c.get("index_topk_freq", 1) == 0


def _dsa(c, p):
    yield from _mla(c, p)
    if not has_indexer(c, int(p.split(".")[2])):
        return
    p, n, width = f"{p}.indexer", c["index_n_heads"], c["index_head_dim"]
    yield Tensor(f"{p}.wq_b.weight", (n * width, c["q_lora_rank"]), "latent")
    yield Tensor(f"{p}.wk.weight", (width, c["hidden_size"]), "latent")
    yield Tensor(f"{p}.k_norm.weight", (width,), "norm")
    yield Tensor(f"{p}.k_norm.bias", (width,), "bias")
    yield Tensor(f"{p}.weights_proj.weight", (n, c["hidden_size"]), "router")


def _gqa(c, p):
    f, dim, head = family(c), c["hidden_size"], c["head_dim"]
    rows = {"q": c["num_attention_heads"] * head, "k": c["num_key_value_heads"] * head}
    rows["v"] = rows["k"]
    for role in "qkv":
        yield Tensor(f"{p}.{role}_proj.weight", (rows[role], dim), role)
        if c.get("attention_bias"):
            yield Tensor(f"{p}.{role}_proj.bias", (rows[role],), "bias")
    yield Tensor(f"{p}.o_proj.weight", (dim, rows["q"]), "o")
    if c.get("attention_bias") and f.out_bias:
        yield Tensor(f"{p}.o_proj.bias", (dim,), "bias")
    if f.sinks:
        yield Tensor(f"{p}.sinks", (c["num_attention_heads"],), "sinks")
    if f.qk_norm and c.get("use_qk_norm", True):
        for role in "qk":
            n = head if f.qk_norm == "head" else rows[role]
            yield Tensor(f"{p}.{role}_norm.weight", (n,), "qk_norm")


def selects_blocks(c, i):
    """Whether layer i of MiniMax-M3 has an indexer."""
    if c.get("layer_types"):
        return c["layer_types"][i] == "minimax_m3_sparse"
    return bool(c.get("sparse_attention_config", {}).get("sparse_attention_freq", [0] * (i + 1))[i])


def _block_attention(c, p):
    dim, head, sparse = c["hidden_size"], c["head_dim"], c.get("sparse_attention_config", {})
    n_q, n_kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    for role, rows in (("q", n_q), ("k", n_kv), ("v", n_kv)):
        yield Tensor(f"{p}.{role}_proj.weight", (rows, dim), role)
    yield Tensor(f"{p}.o_proj.weight", (dim, n_q), "o")
    for role in "qk":
        yield Tensor(f"{p}.{role}_norm.weight", (head,), "norm1")
    if not selects_blocks(c, int(p.split(".")[2])):
        return
    width = sparse.get("sparse_index_dim", c.get("index_head_dim"))
    for role, rows in (("q", c["num_key_value_heads"] * width), ("k", width)):
        yield Tensor(f"{p}.index_{role}_proj.weight", (rows, dim), "latent")
        yield Tensor(f"{p}.index_{role}_norm.weight", (width,), "norm1")


def _fuses_experts(c):
    """Whether a layer's experts are two tensors: quantized ones are not, but for Mistral's."""
    quant = c.get("quantization_config", {})
    is_static = quant.get("quant_method") == "fp8" and not quant.get("weight_block_size")
    return family(c).fused and not is_published_hy3(c) and (not quant or is_static)


def is_published_hy3(c):
    """Whether names are those of Tencent, rather than those of transformers."""
    return "expert_hidden_dim" in c


def _experts(c, p):
    f, dim, inner = family(c), c["hidden_size"], c[family(c).expert_dim]
    n, (gate, up, down) = n_experts(c), f.expert_names
    bias, shared, router = f.router_bias, "shared_experts", "gate"
    if is_published_hy3(c):
        bias, shared, router = "expert_bias", "shared_mlp", "router.gate"
    if bias:
        yield Tensor(f"{p}.{bias}", (n,), "router_bias")
    n_shared = c.get("n_shared_experts", c.get("num_shared_experts", 0))
    shared_dim = c.get("shared_intermediate_size", inner * n_shared)
    if shared_dim:
        yield from _mlp(f"{p}.{shared}", dim, shared_dim)
    yield Tensor(f"{p}.{router}.weight", (n, dim), "router")
    if _fuses_experts(c):
        yield Tensor(f"{p}.experts.gate_up_proj", (n, 2 * inner, dim), "gate", True)
        yield Tensor(f"{p}.experts.down_proj", (n, dim, inner), "down", True)
    for i in range(0 if _fuses_experts(c) else n):
        yield Tensor(f"{p}.experts.{i}.{gate}.weight", (inner, dim), "gate", True)
        yield Tensor(f"{p}.experts.{i}.{up}.weight", (inner, dim), "up", True)
        yield Tensor(f"{p}.experts.{i}.{down}.weight", (dim, inner), "down", True)


def _experts_with_bias(c, p):
    dim, inner, n = c["hidden_size"], c["intermediate_size"], n_experts(c)
    yield Tensor(f"{p}.router.weight", (n, dim), "router")
    yield Tensor(f"{p}.router.bias", (n,), "bias")
    yield Tensor(f"{p}.experts.gate_up_proj", (n, 2 * inner, dim), "gate", True)
    yield Tensor(f"{p}.experts.gate_up_proj_bias", (n, 2 * inner), "bias")
    yield Tensor(f"{p}.experts.down_proj", (n, dim, inner), "down", True)
    yield Tensor(f"{p}.experts.down_proj_bias", (n, dim), "bias")


def _gated_attention(c, p):
    dim, head = c["hidden_size"], c["head_dim"]
    n_q, n_kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    for role, rows in (("q", 2 * n_q), ("k", n_kv), ("v", n_kv)):
        yield Tensor(f"{p}.{role}_proj.weight", (rows, dim), role)
        if c.get("attention_bias"):
            yield Tensor(f"{p}.{role}_proj.bias", (rows,), "bias")
    yield Tensor(f"{p}.o_proj.weight", (dim, n_q), "o")
    if c.get("attention_bias"):
        yield Tensor(f"{p}.o_proj.bias", (dim,), "bias")
    for role in "qk":
        yield Tensor(f"{p}.{role}_norm.weight", (head,), "norm1")


def _delta_net(c, p):
    dim, n = c["hidden_size"], c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = n * c["linear_value_head_dim"]
    channels = 2 * keys + values
    yield Tensor(f"{p}.conv1d.weight", (channels, 1, c["linear_conv_kernel_dim"]), "conv")
    if family(c).fused:
        yield Tensor(f"{p}.in_proj_qkv.weight", (channels, dim), "latent")
        yield Tensor(f"{p}.in_proj_z.weight", (values, dim), "gate")
        yield Tensor(f"{p}.in_proj_b.weight", (n, dim), "delta_gate")
        yield Tensor(f"{p}.in_proj_a.weight", (n, dim), "delta_gate")
    else:
        yield Tensor(f"{p}.in_proj_qkvz.weight", (channels + values, dim), "latent")
        yield Tensor(f"{p}.in_proj_ba.weight", (2 * n, dim), "delta_gate")
    yield Tensor(f"{p}.A_log", (n,), "decay")
    yield Tensor(f"{p}.dt_bias", (n,), "bias")
    yield Tensor(f"{p}.norm.weight", (c["linear_value_head_dim"],), "norm")
    yield Tensor(f"{p}.out_proj.weight", (dim, values), "o")


def _gated_shared(c, p):
    yield from _mlp(f"{p}.shared_expert", c["hidden_size"], c["shared_expert_intermediate_size"])
    yield Tensor(f"{p}.shared_expert_gate.weight", (1, c["hidden_size"]), "router")
    yield from _experts(c, p)


V4_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
V4_RATES = {V4_TYPES[4]: 4, V4_TYPES[128]: 128}


def _v4_pool(p, rate, dim, width, key):
    yield Tensor(f"{p}.wkv.weight", (width, dim), "pool")
    yield Tensor(f"{p}.wgate.weight", (width, dim), "pool")
    yield Tensor(f"{p}.ape", (rate, width), "ape")
    yield Tensor(f"{p}.norm.weight", (key,), "norm")


def _v4_layer(c, i):
    p, dim, head = f"layers.{i}", c["hidden_size"], c["head_dim"]
    n, rank, groups = c["num_attention_heads"], c["q_lora_rank"], c["o_groups"]
    yield Tensor(f"{p}.attn_norm.weight", (dim,), "norm")
    yield Tensor(f"{p}.ffn_norm.weight", (dim,), "norm")
    for site in ("attn", "ffn"):
        scores, width = (2 + c["hc_mult"]) * c["hc_mult"], c["hc_mult"] * dim
        yield Tensor(f"{p}.hc_{site}_fn", (scores, width), "hyper")
        yield Tensor(f"{p}.hc_{site}_base", (scores,), "hyper_base")
        yield Tensor(f"{p}.hc_{site}_scale", (3,), "hyper_scale")
    yield Tensor(f"{p}.attn.wq_a.weight", (rank, dim), "latent")
    yield Tensor(f"{p}.attn.q_norm.weight", (rank,), "norm")
    yield Tensor(f"{p}.attn.wq_b.weight", (n * head, rank), "q")
    yield Tensor(f"{p}.attn.wkv.weight", (head, dim), "k")
    yield Tensor(f"{p}.attn.kv_norm.weight", (head,), "norm")
    yield Tensor(f"{p}.attn.wo_a.weight", (groups * c["o_lora_rank"], n * head // groups), "latent")
    yield Tensor(f"{p}.attn.wo_b.weight", (dim, groups * c["o_lora_rank"]), "o")
    yield Tensor(f"{p}.attn.attn_sink", (n,), "sinks")
    kind = c["layer_types"][i] if "layer_types" in c else V4_TYPES[c["compress_ratios"][i]]
    rate = c.get("compress_rates", V4_RATES).get(kind)
    is_top = kind == V4_TYPES[4]
    if rate:
        yield from _v4_pool(f"{p}.attn.compressor", rate, dim, head * (1 + is_top), head)
    if is_top:
        key = c["index_head_dim"]
        yield Tensor(f"{p}.attn.indexer.wq_b.weight", (c["index_n_heads"] * key, rank), "latent")
        yield Tensor(f"{p}.attn.indexer.weights_proj.weight", (c["index_n_heads"], dim), "router")
        yield from _v4_pool(f"{p}.attn.indexer.compressor", rate, dim, 2 * key, key)
    p, experts, inner = f"{p}.ffn", c["n_routed_experts"], c["moe_intermediate_size"]
    yield Tensor(f"{p}.gate.weight", (experts, dim), "router")
    if i < c.get("num_hash_layers", 3):
        yield Tensor(f"{p}.gate.tid2eid", (c["vocab_size"], c["num_experts_per_tok"]), "table")
    else:
        yield Tensor(f"{p}.gate.bias", (experts,), "router_bias")
    for e in ["shared_experts", *(f"experts.{k}" for k in range(experts))]:
        is_expert = e != "shared_experts"
        yield Tensor(f"{p}.{e}.w1.weight", (inner, dim), "gate", is_expert)
        yield Tensor(f"{p}.{e}.w3.weight", (inner, dim), "up", is_expert)
        yield Tensor(f"{p}.{e}.w2.weight", (dim, inner), "down", is_expert)


def _v4_tensors(c):
    dim, n = c["hidden_size"], c["hc_mult"]
    yield Tensor("embed.weight", (c["vocab_size"], dim), "embed")
    for i in range(c["num_hidden_layers"]):
        yield from _v4_layer(c, i)
    yield Tensor("norm.weight", (dim,), "norm")
    yield Tensor("hc_head_fn", (n, n * dim), "hyper")
    yield Tensor("hc_head_base", (n,), "hyper_base")
    yield Tensor("hc_head_scale", (1,), "hyper_scale")
    if not c["tie_word_embeddings"]:
        yield Tensor("head.weight", (c["vocab_size"], dim), "head")


@dataclass(frozen=True)
class Family:
    """What its tensors are called, as published."""

    attention: object = _gqa
    out_bias: bool = True  # attention_bias gives o_proj one, too
    qk_norm: str = ""  # "head": each by itself; "all": all heads together
    experts_key: str = "n_routed_experts"
    expert_dim: str = "moe_intermediate_size"
    expert_names: tuple = ("gate_proj", "up_proj", "down_proj")
    moe: str = "mlp"
    router_bias: str = "gate.e_score_correction_bias"
    fused: bool = False  # a layer's experts are two tensors
    sinks: bool = False
    experts: object = _experts
    mxfp4: bool = False  # experts are published in blocks of MXFP4
    norm: str = "norm"  # "norm1": without the 1 that is added to each weight
    has_delta_nets: bool = False  # layer_types or full_attention_interval say where


FAMILIES = {
    "deepseek_v3": Family(_mla),
    "deepseek_v32": Family(_dsa),
    "deepseek_v4": Family(),
    "qwen3_moe": Family(qk_norm="head", experts_key="num_experts", router_bias=""),
    "glm4_moe": Family(qk_norm="head", out_bias=False),
    "glm4_moe_lite": Family(_mla),
    "glm_moe_dsa": Family(_dsa),
    "minimax_m2": Family(
        qk_norm="all",
        experts_key="num_local_experts",
        expert_dim="intermediate_size",
        expert_names=("w1", "w3", "w2"),
        moe="block_sparse_moe",
        router_bias="e_score_correction_bias",
    ),
    "minimax_m3_vl_text": Family(
        _block_attention,
        experts_key="num_local_experts",
        expert_dim="intermediate_size",
        expert_names=("w1", "w3", "w2"),
        moe="block_sparse_moe",
        router_bias="e_score_correction_bias",
        norm="norm1",
    ),
    "hy_v3": Family(
        qk_norm="head",
        experts_key="num_experts",
        router_bias="e_score_correction_bias",
        fused=True,
    ),
    "mistral4": Family(_mla, router_bias="", fused=True),
    "gpt_oss": Family(
        experts_key="num_local_experts",
        expert_dim="intermediate_size",
        sinks=True,
        experts=_experts_with_bias,
        mxfp4=True,
    ),
    "qwen3_next": Family(
        _gated_attention,
        experts_key="num_experts",
        router_bias="",
        experts=_gated_shared,
        norm="norm1",
        has_delta_nets=True,
    ),
    "qwen3_5_moe_text": Family(
        _gated_attention,
        experts_key="num_experts",
        router_bias="",
        experts=_gated_shared,
        fused=True,
        norm="norm1",
        has_delta_nets=True,
    ),
}

# Checkpoints with vision: what stands before the language model's names, and some other tensors.
WRAPPERS = {
    "kimi_k25": ["vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"],
    "mistral3": ["vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"],
    "minimax_m3_vl": ["vision_tower.vision_model.pre_layrnorm.weight", "patch_merge_mlp.linear_1.weight"],
    "qwen3_5_moe": ["model.visual.patch_embed.proj.weight", "model.visual.merger.norm.weight"],
}


def wrapped_name(model_type, name):
    """The name in a checkpoint with vision of the tensor that the language model alone calls `name`."""
    if model_type != "qwen3_5_moe":
        return "language_model." + name
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def text_config(c):
    return c["text_config"] if c["model_type"] in WRAPPERS else c


def language_model(c):
    """The configuration that the language model of config c has by itself."""
    quant = {k: v for k, v in c.items() if k == "quantization_config"}
    return c if text_config(c) is c else text_config(c) | quant


def family(c):
    name = text_config(c)["model_type"]
    return FAMILIES["deepseek_v3" if name == "kimi_k2" else name]


def n_experts(c):
    return c[family(c).experts_key]


def is_delta(c, i):
    """Whether layer i is a gated delta net."""
    if c.get("layer_types"):
        return c["layer_types"][i] == "linear_attention"
    return (i + 1) % c.get("full_attention_interval", 4) != 0


def _is_moe(c, i):
    if c["model_type"] in ("qwen3_moe", "qwen3_next"):
        return i not in c["mlp_only_layers"] and (i + 1) % c["decoder_sparse_step"] == 0
    if c.get("mlp_layer_types"):
        return c["mlp_layer_types"][i] == "sparse"
    if isinstance(c.get("moe_layer_freq"), list):
        return bool(c["moe_layer_freq"][i])
    return i >= c.get("first_k_dense_replace", 0)


def _layer(c, i):
    p, dim, f = f"model.layers.{i}", c["hidden_size"], family(c)
    yield Tensor(f"{p}.input_layernorm.weight", (dim,), f.norm)
    if f.has_delta_nets and is_delta(c, i):
        yield from _delta_net(c, f"{p}.linear_attn")
    else:
        yield from f.attention(c, f"{p}.self_attn")
    yield Tensor(f"{p}.post_attention_layernorm.weight", (dim,), f.norm)
    if _is_moe(c, i):
        yield from f.experts(c, f"{p}.{f.moe}")
    else:
        yield from _mlp(f"{p}.mlp", dim, c.get("dense_intermediate_size", c["intermediate_size"]))


def _mtp(c, i):
    """The multi-token-prediction layer, stored behind the last one; a plain forward skips it."""
    p, dim = f"model.layers.{i}", c["hidden_size"]
    yield Tensor(f"{p}.embed_tokens.weight", (c["vocab_size"], dim), "embed")
    yield Tensor(f"{p}.enorm.weight", (dim,), "norm")
    yield Tensor(f"{p}.hnorm.weight", (dim,), "norm")
    yield Tensor(f"{p}.eh_proj.weight", (dim, 2 * dim), "mtp")
    yield from _layer(c, i)
    yield Tensor(f"{p}.shared_head.norm.weight", (dim,), "norm")
    yield Tensor(f"{p}.shared_head.head.weight", (c["vocab_size"], dim), "head")


def _mtp_apart(c):
    """Multi-token prediction as Qwen3-Next is published with it."""
    dim, n = c["hidden_size"], c["mtp_num_hidden_layers"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield Tensor(f"mtp.{name}.weight", (dim,), "norm1")
    yield Tensor("mtp.fc.weight", (dim, 2 * dim), "mtp")
    alone = c | {"layer_types": ["full_attention"] * n, "mlp_only_layers": []}
    for i in range(n):
        for t in _layer(alone, i):
            yield Tensor(t.name.replace("model.", "mtp.", 1), t.shape, t.role, t.expert)


def tensors(c):
    """Every tensor of the checkpoint of config c, FP8 scales excluded."""
    if c["model_type"] in WRAPPERS:
        for t in tensors(language_model(c)):
            name = wrapped_name(c["model_type"], t.name)
            yield Tensor(name, t.shape, t.role, t.expert)
        for name in WRAPPERS[c["model_type"]]:
            yield Tensor(name, (4, 8), "vision")
        return
    if c["model_type"] == "deepseek_v4":
        yield from _v4_tensors(c)
        return
    yield Tensor("model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]), "embed")
    for i in range(c["num_hidden_layers"]):
        yield from _layer(c, i)
    for i in range(c.get("num_nextn_predict_layers", 0)):
        yield from _mtp(c, c["num_hidden_layers"] + i)
    if c.get("mtp_num_hidden_layers"):
        yield from _mtp_apart(c)
    yield Tensor("model.norm.weight", (c["hidden_size"],), family(c).norm)
    if not c["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (c["vocab_size"], c["hidden_size"]), "head")


def is_quantized(tensor, dtype):
    """Whether one of quant_formats.FORMATS is for this tensor."""
    if dtype not in quant_formats.FORMATS or tensor.role not in LINEAR:
        return False
    return tensor.expert or dtype not in quant_formats.EXPERTS_ONLY


def is_fp8(tensor, dtype):
    """In blocks. mixed: the routed experts alone are FP8."""
    if dtype in quant_formats.FORMATS or dtype in ("fp8-static", "deepseek-v4"):
        return False
    if dtype == "bf16" or tensor.role not in LINEAR or len(tensor.shape) != 2:
        return False
    return dtype == "fp8" or tensor.expert


def quantize_config(c, dtype):
    """Adds the quantization_config that such a checkpoint is published with."""
    if family(c).mxfp4:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        quant = {"modules_to_not_convert": [*kept, "lm_head"], "quant_method": "mxfp4"}
        return c | {"quantization_config": quant}
    if dtype == "bf16":
        return c
    if c["model_type"] == "kimi_k25":
        return c | {"text_config": quantize_config(c["text_config"], dtype)}
    if dtype == "fp8-static":
        return c | {"quantization_config": _static_fp8(c)}
    if dtype in quant_formats.FORMATS:
        kept = [t for t in tensors(c) if len(t.shape) == 2 and not is_quantized(t, dtype)]
        ignore = [t.name.removesuffix(".weight") for t in kept if t.role != "embed"]
        if dtype in quant_formats.EXPERTS_ONLY:
            ignore = quant_formats.KIMI_IGNORE
        return c | {"quantization_config": quant_formats.FORMATS[dtype].config(ignore)}
    quant = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    if dtype == "deepseek-v4":
        return c | {"expert_dtype": "fp4", "quantization_config": quant | {"scale_fmt": "ue8m0"}}
    if c["model_type"] == "minimax_m2":
        kept = ["gate", "e_score_correction_bias", "lm_head"]
        return c | {"quantization_config": quant | {"fmt": "float8_e4m3fn", "modules_to_not_convert": kept}}
    if dtype == "mixed" or c["model_type"] == "qwen3_moe":
        kept = [t.name for t in tensors(c) if len(t.shape) == 2 and not is_fp8(t, dtype)]
        quant["modules_to_not_convert"] = [n.removesuffix(".weight") for n in kept]
    return c | {"quantization_config": quant}


def _static_fp8(c):
    """FP8 with one scale a matrix and one for its activations, as Mistral Small 4 and Hy3 have it."""
    quant = {"activation_scheme": "static", "quant_method": "fp8"}
    if is_published_hy3(c):
        return quant | {"ignored_layers": ["lm_head", "model.embed_tokens"], "kv_cache_scheme": "static"}
    kept = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    return quant | {"modules_to_not_convert": kept, "weight_block_size": None}


DEEPSEEK_BASE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

QWEN3_BASE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

_MOONLIGHT = {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}

_TINY = {
    "first_k_dense_replace": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "kv_lora_rank": 64,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "n_routed_experts": 16,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rope_scaling": None,
    "topk_group": 2,
    "v_head_dim": 32,
    "vocab_size": 1024,
}

_TINY_QWEN3 = {
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}

# What configurations have in common that are not derived from one above.
_BASE = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_GLM_AIR = _BASE | {
    "attention_bias": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 96,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}

_GLM_FLASH = _BASE | {
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

_INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
_V32 = DEEPSEEK_BASE | _INDEXER | {"model_type": "deepseek_v32"}
_GLM_5 = _GLM_FLASH | _INDEXER | {
    "first_k_dense_replace": 3,
    "hidden_size": 6144,
    "index_n_heads": 32,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "intermediate_size": 12288,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "routed_scaling_factor": 2.5,
}

_V4 = {k: v for k, v in _BASE.items() if k != "first_k_dense_replace"} | {
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "vocab_size": 129280,
}

_MINIMAX_M2 = _BASE | {
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "vocab_size": 200064,
}

_MINIMAX_M3 = {k: v for k, v in _MINIMAX_M2.items() if k not in ("first_k_dense_replace", "qk_norm_type")} | {
    "dense_intermediate_size": 12288,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "max_position_embeddings": 524288,
    "model_type": "minimax_m3_vl_text",
    "moe_layer_freq": [0, 1, 1, 1],
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 128,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.0,
    "shared_intermediate_size": 3072,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_block_size": 128,
        "sparse_index_dim": 128,
        "sparse_local_block": 1,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
    },
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}

_HY3 = _BASE | {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "max_position_embeddings": 131072,
    "model_type": "hy_v3",
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_shared_experts": 1,
    "rope_theta": 11158840.0,
    "router_scaling_factor": 2.826,
    "vocab_size": 120832,
}

_MISTRAL_SMALL_4 = _GLM_FLASH | {
    "first_k_dense_replace": 0,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "model_type": "mistral4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 128.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "v_head_dim": 128,
    "vocab_size": 131072,
}

_KIMI_K2 = {
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 64,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


_GPT_OSS = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


_QWEN3_NEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "decoder_sparse_step": 1,
    "eos_token_id": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def qwen35_of(qwen3_next):
    """What of a configuration of Qwen3-Next stands in one of Qwen3.5, too."""
    own = ("decoder_sparse_step", "intermediate_size", "mlp_only_layers", "norm_topk_prob")
    own += ("partial_rotary_factor", "rope_theta")
    return {k: v for k, v in qwen3_next.items() if k not in own}


_QWEN35 = qwen35_of(_QWEN3_NEXT) | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}


def _wrapped(model_type, text):
    return {"model_type": model_type, "text_config": text, "vision_config": {}}


# name -> (config, tokens the tokenizer is trained to)
SHAPES = {
    "tiny": (DEEPSEEK_BASE | _TINY, 1000),
    "tiny-dsa": (_V32 | _TINY | {"index_head_dim": 32, "index_n_heads": 8, "index_topk": 48}, 1000),
    "tiny-deepseek-v4": (
        _V4
        | {
            "compress_rates": {V4_TYPES[4]: 4, V4_TYPES[128]: 32},
            "head_dim": 32,
            "hidden_size": 128,
            "index_head_dim": 32,
            "index_n_heads": 8,
            "index_topk": 16,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
            "num_attention_heads": 4,
            "num_experts_per_tok": 4,
            "o_groups": 2,
            "o_lora_rank": 32,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "rope_scaling": None,
            "sliding_window": 48,
            "vocab_size": 1024,
        },
        1000,
    ),
    "tiny-qwen3": (QWEN3_BASE | _TINY_QWEN3, 1000),
    "tiny-gpt-oss": (
        _GPT_OSS
        | {
            "head_dim": 32,
            "hidden_size": 128,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 16,
            "vocab_size": 1024,
        },
        1000,
    ),
    "tiny-qwen3-next": (
        _QWEN3_NEXT
        | {
            "head_dim": 32,
            "hidden_size": 128,
            "intermediate_size": 256,
            "linear_key_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 32,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 64,
            "num_attention_heads": 4,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 64,
            "vocab_size": 1024,
        },
        1000,
    ),
    # As small as it can be, for tests on the emulated GPU.
    "mini-qwen3-next": (
        _QWEN3_NEXT
        | {
            "full_attention_interval": 2,
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "linear_key_head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 16,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 32,
            "num_attention_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "shared_expert_intermediate_size": 32,
            "vocab_size": 1024,
        },
        1000,
    ),
    "moonlight-16b-a3b": (DEEPSEEK_BASE | _MOONLIGHT, 4000),
    "qwen3-30b-a3b": (QWEN3_BASE, 4000),
    # Four of the 61 layers unless --layers says otherwise: three dense and one of experts.
    "deepseek-v3-layers": (DEEPSEEK_BASE | {"num_hidden_layers": 4}, 4000),
    "deepseek-v3.2-layers": (_V32 | {"num_hidden_layers": 4}, 4000),
    "deepseek-v4-layers": (_V4, 4000),
    "glm-5-layers": (_GLM_5, 4000),
    "kimi-k2.5-layers": (_wrapped("kimi_k25", DEEPSEEK_BASE | _KIMI_K2), 4000),
    "glm-4.5-air": (_GLM_AIR, 4000),
    "glm-4.7-flash": (_GLM_FLASH, 4000),
    "minimax-m2": (_MINIMAX_M2, 4000),
    "minimax-m3-layers": (_wrapped("minimax_m3_vl", _MINIMAX_M3), 4000),
    "hy3": (_HY3, 4000),
    "gpt-oss-20b": (_GPT_OSS, 4000),
    "gpt-oss-120b": (_GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 4000),
    "qwen3-next-80b-a3b": (_QWEN3_NEXT, 4000),
    "qwen3.5-35b-a3b": (_wrapped("qwen3_5_moe", _QWEN35), 4000),
    "mistral-small-4": (_wrapped("mistral3", _MISTRAL_SMALL_4), 4000),
}


def config_of(shape, n_layers=None):
    config = copy.deepcopy(SHAPES[shape][0])
    if n_layers is not None:
        text_config(config)["num_hidden_layers"] = n_layers
    return config
