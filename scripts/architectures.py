"""Architectures: the tensors a config.json promises, and the quantization it is published with."""

import math
from dataclasses import dataclass, replace

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
    ids: tuple = ()  # of role "ids": what it holds

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


def _dsa_pool(c, p):
    yield from _dsa(c, p)
    if has_indexer(c, int(p.split(".")[2])):
        p, width = f"{p}.indexer.index_kpool_compress", c["index_head_dim"]
        yield Tensor(f"{p}_ape", (c["index_kpool"], width), "ape")
        yield Tensor(f"{p}_gate", (width, c["hidden_size"]), "pool")


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
        yield Tensor(f"{p}.{bias}", (1, n) if bias.startswith("moe_statics") else (n,), "router_bias")
    n_shared = c.get("n_shared_experts", c.get("num_shared_experts", c.get("moe_num_shared_experts", 0)))
    shared_dim = c.get("shared_intermediate_size", inner * n_shared)
    if shared_dim:
        yield from _mlp(f"{p}.{shared}", dim, shared_dim)
    yield Tensor(f"{p}.{router}.weight", (n, dim), "router")
    if _fuses_experts(c):
        for name, role, shape in (("gate_up_proj", "gate", (2 * inner, dim)), ("down_proj", "down", (dim, inner))):
            yield Tensor(f"{p}.experts.{name}", (n, *shape[:: -1 if f.turned else 1]), role, True)
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
    p, dim, n = f"{p}.linear_attn", c["hidden_size"], c["linear_num_value_heads"]
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


def _bounded_kda(c, p):
    for t in _kda(c, p):
        if t.name.endswith("A_log"):
            yield Tensor(t.name, (t.shape[2],), "bounded_decay")
        elif t.name.endswith("dt_bias"):
            yield Tensor(t.name, t.shape, "bounded_bias")
        else:
            yield t


def _kda(c, p):
    p, dim, own = f"{p}.self_attn", c["hidden_size"], c.get("linear_attn_config", {})
    n, width = own.get("num_heads", c.get("linear_num_heads")), own.get("head_dim", c.get("linear_head_dim"))
    values, taps = n * width, own.get("short_conv_kernel_size", c.get("linear_conv_kernel_dim"))
    for role in "qkv":
        yield Tensor(f"{p}.{role}_proj.weight", (values, dim), role)
        yield Tensor(f"{p}.{role}_conv1d.weight", (values, 1, taps), "conv")
    yield Tensor(f"{p}.f_a_proj.weight", (width, dim), "delta_gate")
    yield Tensor(f"{p}.f_b_proj.weight", (values, width), "delta_gate")
    yield Tensor(f"{p}.A_log", (1, 1, n, 1), "decay")
    yield Tensor(f"{p}.dt_bias", (values,), "bias")
    yield Tensor(f"{p}.b_proj.weight", (n, dim), "delta_gate")
    yield Tensor(f"{p}.g_a_proj.weight", (width, dim), "latent")
    yield Tensor(f"{p}.g_b_proj.weight", (values, width), "gate")
    yield Tensor(f"{p}.o_norm.weight", (width,), "norm")
    yield Tensor(f"{p}.o_proj.weight", (dim, values), "o")


def _whole_kda(c, p):
    p, dim, n, width = f"{p}.self_attn", c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    for role in "qkv":
        yield Tensor(f"{p}.{role}_proj.weight", (n * width, dim), role)
        yield Tensor(f"{p}.{role}_conv1d.weight", (n * width, 1, c["short_conv_kernel_size"]), "conv")
    yield Tensor(f"{p}.f_proj.weight", (n * width, dim), "delta_gate")
    yield Tensor(f"{p}.A_log", (n,), "bounded_decay")
    yield Tensor(f"{p}.dt_bias", (n * width,), "bounded_bias")
    yield Tensor(f"{p}.b_proj.weight", (n, dim), "delta_gate")
    yield Tensor(f"{p}.g_proj.weight", (n * width, dim), "gate")
    yield Tensor(f"{p}.o_norm.weight", (width,), "norm")
    yield Tensor(f"{p}.o_proj.weight", (dim, n * width), "o")


def _gated_mla(c, p):
    yield from _mla(c, p)
    yield Tensor(f"{p}.g_proj.weight", (c["num_attention_heads"], c["hidden_size"]), "router")


def bailing_name(name):
    """A tensor's name as Ling is published."""
    name = name.replace("model.embed_tokens.", "model.word_embeddings.").replace(".self_attn.", ".attention.")
    return name.replace(".attention.o_proj.", ".attention.dense.")


def _gated_shared(c, p):
    yield from _mlp(f"{p}.shared_expert", c["hidden_size"], c["shared_expert_intermediate_size"])
    yield Tensor(f"{p}.shared_expert_gate.weight", (1, c["hidden_size"]), "router")
    yield from _experts(c, p)


def ngram_hash(c, nth):
    """Factors of an n-gram's tokens and rows of its heads, of the nth layer that has n-grams."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def splitmix(x):
        x = (x + gamma) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    half = max(1, ((1 << 63) - 1) // c["vocab_size"] // 2)
    at = [c["seed"] + 10007 * nth + gamma * (i + 1) for i in range(c["ngram_size"])]
    n, primes, value = (c["ngram_size"] - 1) * c["heads_per_ngram"], [], c["ngram_vocab_size_base"]
    while len(primes) < n * (nth + 1):
        if value > 1 and all(value % d for d in range(2, math.isqrt(value) + 1)):
            primes.append(value)
        value += 1
    return [2 * (splitmix(x & mask) % half) + 1 for x in at], primes[n * nth :]


def _ngrams(c, p, nth):
    dim, width, taps = c["hidden_size"], c["hc_count"] * c["hidden_size"], c["ple_conv_kernel_size"]
    factors, sizes = ngram_hash(c, nth)
    unit, table = c["make_ngram_vocab_size_divisible_by"], f"{p}.ple_embedding"
    rows = (sum(sizes) + unit - 1) // unit * unit
    offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
    for name, ids in (("layer_multipliers", factors), ("ngram_heads_vocab_sizes", sizes), ("ngram_heads_offsets", offsets)):
        yield Tensor(f"{table}.{name}", (len(ids),), "ids", ids=tuple(ids))
    each = -(-rows // c["split_ngram_parts"])
    for i, begin in enumerate(range(0, rows, each)):
        shape = (min(each, rows - begin), c["ple_embed_dim"] // len(sizes))
        yield Tensor(f"{table}.ngram_embedding.shard_{i}.weight", shape, "ngram")
    yield Tensor(f"{p}.key_proj.weight", (width, c["ple_embed_dim"]), "latent")
    yield Tensor(f"{p}.value_proj.weight", (dim, c["ple_embed_dim"]), "latent")
    for name in ("key", "query", "conv"):
        yield Tensor(f"{p}.norm_{name}.weight", (width,), "norm1")
    yield Tensor(f"{p}.conv1d.weight", (width, 1, taps), "conv")


def _gated_streams(c, p):
    width = c["hc_count"] * c["hidden_size"]
    yield Tensor(f"{p}.hc_norm.weight", (width,), "norm1")
    yield Tensor(f"{p}.input_mix_weight_down.weight", (c["hc_lowrank"], width), "mix_down")
    yield Tensor(f"{p}.input_mix_weight_up.weight", (width, c["hc_lowrank"]), "mix_up")


def _qwen4_layer(c, i):
    p, dim = f"model.layers.{i}", c["hidden_size"]
    for site in ("attn", "mlp"):
        yield from _gated_streams(c, f"{p}.{site}_hyper_connection")
        name = f"{p}.{site}_hyper_connection.block_inject_weight.weight"
        yield Tensor(name, (c["hc_count"], c["hc_count"] * dim), "inject")
    if i + 1 in c["ple_layer_ids"]:
        yield from _ngrams(c, f"{p}.ple", sorted(c["ple_layer_ids"]).index(i + 1))
    if is_delta(c, i):
        yield from _delta_net(c, p)
    else:
        index, width = f"{p}.self_attn.indexer", c["indexer_head_dim"]
        yield from _gated_attention(c, f"{p}.self_attn")
        yield Tensor(f"{index}.index_qk_proj.weight", ((c["indexer_n_heads"] + 1) * width, dim), "latent")
        yield Tensor(f"{index}.q_layernorm.weight", (width,), "norm1")
        yield Tensor(f"{index}.k_layernorm.weight", (width,), "norm1")
    yield from _gated_shared(c, f"{p}.mlp")


def _gemma_attention(c, i):
    p, dim, heads = f"model.layers.{i}.self_attn", c["hidden_size"], c["num_attention_heads"]
    is_last, types = i + 1 == c["num_hidden_layers"], c.get("layer_types")
    has_window = not is_last and (types[i] == "sliding_attention" if types else (i + 1) % 6 != 0)
    shares = c["attention_k_eq_v"] and not has_window
    head = c["head_dim"] if has_window else c["global_head_dim"]
    kv = c["num_global_key_value_heads"] if shares else c["num_key_value_heads"]
    for role, n in (("q", heads), ("k", kv), *([] if shares else [("v", kv)])):
        yield Tensor(f"{p}.{role}_proj.weight", (n * head, dim), role)
        if c.get("attention_bias"):
            yield Tensor(f"{p}.{role}_proj.bias", (n * head,), "bias")
    yield Tensor(f"{p}.o_proj.weight", (dim, heads * head), "o")
    if c.get("attention_bias"):
        yield Tensor(f"{p}.o_proj.bias", (dim,), "bias")
    for role in "qk":
        yield Tensor(f"{p}.{role}_norm.weight", (head,), "norm")


def _gemma_layer(c, i):
    p, dim, inner, n = f"model.layers.{i}", c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield Tensor(f"{p}.{name}_layernorm.weight", (dim,), "norm")
    for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
        yield Tensor(f"{p}.{name}.weight", (dim,), "norm")
    yield Tensor(f"{p}.layer_scalar", (1,), "norm")
    yield from _gemma_attention(c, i)
    yield from _mlp(f"{p}.mlp", dim, c["intermediate_size"])
    yield Tensor(f"{p}.router.scale", (dim,), "router_scale")
    yield Tensor(f"{p}.router.per_expert_scale", (n,), "norm")
    yield Tensor(f"{p}.router.proj.weight", (n, dim), "router")
    yield Tensor(f"{p}.experts.gate_up_proj", (n, 2 * inner, dim), "gate", True)
    yield Tensor(f"{p}.experts.down_proj", (n, dim, inner), "down", True)


V4_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
V4_RATES = {V4_TYPES[4]: 4, V4_TYPES[128]: 128}


def _v4_pool(p, rate, dim, width, key):
    yield Tensor(f"{p}.wkv.weight", (width, dim), "pool")
    yield Tensor(f"{p}.wgate.weight", (width, dim), "pool")
    yield Tensor(f"{p}.ape", (rate, width), "ape")
    yield Tensor(f"{p}.norm.weight", (key,), "norm")


def _hyper(c, p):
    for site in ("attn", "ffn"):
        scores, width = (2 + c["hc_mult"]) * c["hc_mult"], c["hc_mult"] * c["hidden_size"]
        yield Tensor(f"{p}.hc_{site}_fn", (scores, width), "hyper")
        yield Tensor(f"{p}.hc_{site}_base", (scores,), "hyper_base")
        yield Tensor(f"{p}.hc_{site}_scale", (3,), "hyper_scale")


def _v4_layer(c, i):
    p, dim, head = f"layers.{i}", c["hidden_size"], c["head_dim"]
    n, rank, groups = c["num_attention_heads"], c["q_lora_rank"], c["o_groups"]
    yield Tensor(f"{p}.attn_norm.weight", (dim,), "norm")
    yield Tensor(f"{p}.ffn_norm.weight", (dim,), "norm")
    yield from _hyper(c, p)
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


def _v4_end(c, p):
    dim, n = c["hidden_size"], c["hc_mult"]
    yield Tensor(f"{p}norm.weight", (dim,), "norm")
    yield Tensor(f"{p}hc_head_fn", (n, n * dim), "hyper")
    yield Tensor(f"{p}hc_head_base", (n,), "hyper_base")
    yield Tensor(f"{p}hc_head_scale", (1,), "hyper_scale")


def _v4_mtp(c):
    """The prediction layer: a window alone, experts chosen by a router, and a head's reading of the streams."""
    dim, n = c["hidden_size"], c["num_hidden_layers"]
    key, kind = ("layer_types", V4_TYPES[0]) if "layer_types" in c else ("compress_ratios", 0)
    for t in _v4_layer(c | {key: [*c[key][:n], kind], "num_hash_layers": 0}, n):
        yield Tensor(t.name.replace(f"layers.{n}.", "mtp.0.", 1), t.shape, t.role, t.expert)
    for name in ("enorm", "hnorm"):
        yield Tensor(f"mtp.0.{name}.weight", (dim,), "norm")
    for name in ("e_proj", "h_proj"):
        yield Tensor(f"mtp.0.{name}.weight", (dim, dim), "mtp")
    yield from _v4_end(c, "mtp.0.")


def _v4_tensors(c):
    dim = c["hidden_size"]
    yield Tensor("embed.weight", (c["vocab_size"], dim), "embed")
    for i in range(c["num_hidden_layers"]):
        yield from _v4_layer(c, i)
    if c.get("num_nextn_predict_layers"):
        yield from _v4_mtp(c)
    yield from _v4_end(c, "")
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
    softmax: bool = False  # scores of experts, as without router_bias
    fused: bool = False  # a layer's experts are two tensors
    turned: bool = False  # which are transposed
    sinks: bool = False
    experts: object = _experts
    mxfp4: bool = False  # experts are published in blocks of MXFP4
    norm: str = "norm"  # "norm1": without the 1 that is added to each weight
    recurrent: object = None  # tensors of layers without keys: is_delta says where
    streams: bool = False  # hyper-connections
    layer: object = None  # all tensors of a layer, where they are unlike the others'


FAMILIES = {
    "deepseek_v3": Family(_mla),
    "deepseek_v32": Family(_dsa),
    "deepseek_v4": Family(),
    "qwen3_moe": Family(qk_norm="head", experts_key="num_experts", router_bias=""),
    "qwen3_vl_moe_text": Family(qk_norm="head", experts_key="num_experts", router_bias="", fused=True, turned=True),
    "olmoe": Family(
        qk_norm="all", experts_key="num_experts", expert_dim="intermediate_size", router_bias=""
    ),
    "mixtral": Family(
        experts_key="num_local_experts",
        expert_dim="intermediate_size",
        expert_names=("w1", "w3", "w2"),
        moe="block_sparse_moe",
        router_bias="",
    ),
    "glm4_moe": Family(qk_norm="head", out_bias=False),
    "glm4_moe_lite": Family(_mla),
    "glm4v_moe_text": Family(out_bias=False),
    "solar_open": Family(out_bias=False),
    "glm_moe_dsa": Family(_dsa),
    "dots1": Family(qk_norm="head"),
    "ernie4_5_moe": Family(
        experts_key="moe_num_experts", router_bias="moe_statics.e_score_correction_bias", softmax=True
    ),
    "exaone_moe": Family(qk_norm="head", experts_key="num_experts", router_bias="e_score_correction_bias"),
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
        softmax=True,
        mxfp4=True,
    ),
    "qwen3_next": Family(
        _gated_attention,
        experts_key="num_experts",
        router_bias="",
        experts=_gated_shared,
        norm="norm1",
        recurrent=_delta_net,
    ),
    "qwen3_5_moe_text": Family(
        _gated_attention,
        experts_key="num_experts",
        router_bias="",
        experts=_gated_shared,
        fused=True,
        norm="norm1",
        recurrent=_delta_net,
    ),
    "kimi_linear": Family(
        _mla,
        experts_key="num_experts",
        expert_names=("w1", "w3", "w2"),
        moe="block_sparse_moe",
        recurrent=_kda,
    ),
    "gemma4_text": Family(experts_key="num_experts", router_bias="", fused=True, layer=_gemma_layer),
    "bailing_hybrid": Family(
        _gated_mla, experts_key="num_experts", router_bias="gate.expert_bias", recurrent=_whole_kda
    ),
    "glm5_next_text": Family(_dsa_pool, recurrent=_bounded_kda, streams=True),
    "qwen4_exp_text": Family(
        experts_key="num_experts", router_bias="", fused=True, norm="norm1", recurrent=_delta_net, layer=_qwen4_layer
    ),
}

# Checkpoints with vision: what stands before the language model's names, and some other tensors.
WRAPPERS = {
    "kimi_k25": ["vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"],
    "mistral3": ["vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"],
    "minimax_m3_vl": ["vision_tower.vision_model.pre_layrnorm.weight", "patch_merge_mlp.linear_1.weight"],
    "glm4v_moe": ["model.visual.patch_embed.proj.weight", "model.visual.merger.proj.weight"],
    "qwen3_vl_moe": ["model.visual.patch_embed.proj.weight", "model.visual.merger.norm.weight"],
    "qwen3_5_moe": ["model.visual.patch_embed.proj.weight", "model.visual.merger.norm.weight"],
    "gemma4": ["model.vision_tower.patch_embedder.input_proj.weight", "model.embed_vision.embedding_projection.weight"],
    "glm5_next": ["model.visual.patch_embed.proj.weight", "model.visual.merger.proj.weight"],
    "qwen4_exp": ["model.visual.patch_embed.proj.weight", "model.visual.merger.norm.weight"],
}


def wrapped_name(model_type, name):
    """The name in a checkpoint with vision of the tensor that the language model alone calls `name`."""
    if not WRAPPERS[model_type][0].startswith("model."):
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


def has_softmax(c):
    return family(c).softmax or not family(c).router_bias


def n_experts(c):
    return c[family(c).experts_key]


def is_delta(c, i):
    """Whether layer i is a gated delta net."""
    if c.get("layer_types"):
        return c["layer_types"][i] == "linear_attention"
    if "layer_group_size" in c:
        return (i + 1) % c["layer_group_size"] != 0
    if "kda_layers" in c.get("linear_attn_config", {}):
        return i + 1 in c["linear_attn_config"]["kda_layers"]
    return (i + 1) % c.get("full_attention_interval", 4) != 0


def _is_moe(c, i):
    if "decoder_sparse_step" in c:
        return i not in c["mlp_only_layers"] and (i + 1) % c["decoder_sparse_step"] == 0
    if c.get("mlp_layer_types"):
        return c["mlp_layer_types"][i] == "sparse"
    if isinstance(c.get("moe_layer_freq"), list):
        return bool(c["moe_layer_freq"][i])
    if "moe_layer_start_index" in c:
        end = c["moe_layer_end_index"] % c["num_hidden_layers"]
        return c["moe_layer_start_index"] <= i <= end and (i + 1) % c["moe_layer_interval"] == 0
    return i >= c.get("first_k_dense_replace", 0)


def _layer(c, i):
    p, dim, f = f"model.layers.{i}", c["hidden_size"], family(c)
    if f.layer:
        yield from f.layer(c, i)
        return
    yield Tensor(f"{p}.input_layernorm.weight", (dim,), f.norm)
    if f.recurrent and is_delta(c, i):
        yield from f.recurrent(c, p)
    else:
        yield from f.attention(c, f"{p}.self_attn")
    yield Tensor(f"{p}.post_attention_layernorm.weight", (dim,), f.norm)
    if f.streams:
        yield from _hyper(c, p)
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
    alone = c | {"layer_types": ["full_attention"] * n, "mlp_only_layers": [], "ple_layer_ids": []}
    for i in range(n):
        for t in _layer(alone, i):
            yield Tensor(t.name.replace("model.", "mtp.", 1), t.shape, t.role, t.expert)


def _biased(name, shape):
    yield Tensor(name + ".weight", shape, "norm" if len(shape) == 1 else "vision")
    yield Tensor(name + ".bias", shape[:1], "bias")


def _qwen3_tower(v):
    """Qwen3-VL's and Qwen3.5's."""
    p, dim, patch = "model.visual.", v["hidden_size"], v["patch_size"]
    merged = dim * v["spatial_merge_size"] ** 2
    yield from _biased(p + "patch_embed.proj", (dim, 3, v["temporal_patch_size"], patch, patch))
    yield Tensor(p + "pos_embed.weight", (v["num_position_embeddings"], dim), "vision")
    for i in range(v["depth"]):
        b, inner = f"{p}blocks.{i}.", v["intermediate_size"]
        for norm in "norm1", "norm2":
            yield from _biased(b + norm, (dim,))
        yield from _biased(b + "attn.qkv", (3 * dim, dim))
        yield from _biased(b + "attn.proj", (dim, dim))
        yield from _biased(b + "mlp.linear_fc1", (inner, dim))
        yield from _biased(b + "mlp.linear_fc2", (dim, inner))
    mergers = [f"deepstack_merger_list.{i}" for i in range(len(v.get("deepstack_visual_indexes", [])))]
    for name in "merger", *mergers:
        yield from _biased(f"{p}{name}.norm", (dim if name == "merger" else merged,))
        yield from _biased(f"{p}{name}.linear_fc1", (merged, merged))
        yield from _biased(f"{p}{name}.linear_fc2", (v["out_hidden_size"], merged))


def tensors(c):
    """Every tensor of the checkpoint of config c, FP8 scales excluded."""
    if c["model_type"] in WRAPPERS:
        for t in tensors(language_model(c)):
            name = wrapped_name(c["model_type"], t.name)
            yield replace(t, name=name)
        if c["vision_config"].get("depth"):
            yield from _qwen3_tower(c["vision_config"])
            return
        for name in WRAPPERS[c["model_type"]]:
            yield Tensor(name, (4, 8), "vision")
        return
    if c["model_type"] == "deepseek_v4":
        yield from _v4_tensors(c)
        return
    if c["model_type"] == "bailing_hybrid" and c.get("norm_head") is None:
        for t in tensors(c | {"norm_head": False}):
            yield replace(t, name=bailing_name(t.name))
        return
    yield Tensor("model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]), "embed")
    for i in range(c["num_hidden_layers"]):
        yield from _layer(c, i)
    for i in range(c.get("num_nextn_predict_layers", 0)):
        yield from _mtp(c, c["num_hidden_layers"] + i)
    if c.get("mtp_num_hidden_layers"):
        yield from _mtp_apart(c)
    if c["model_type"] == "qwen4_exp_text":
        yield from _gated_streams(c, "model.hyper_connection_mixer")
    else:
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
