#!/usr/bin/env python3
"""Makes tests/golden/data: small random checkpoints and what transformers computes with them.

For each case: the checkpoint as a hub would publish it (BF16, FP8 blocks, or a format of
quant_formats.py), prompt.npy (int32 token ids), logits.npy (float32 [n_prompt][n_vocab], every
position) and continuation.npy (int32, greedy, 64 tokens). The reference runs in float32 with eager attention on
the weights as stored, dequantized. Run in the environment of scripts/setup.sh --dev.

Seeds are searched until nothing rests on a near-tie: the best token leads by MIN_LEAD of the logits'
RMS at each greedy step, and the last expert (and group) taken leads the first left out by
MIN_MARGIN in score, as does the last key that an indexer selects, by MIN_INDEX_MARGIN of the scores' RMS.
A case in which attention, routing or an expert hardly matters is refused.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import unittest.mock

import numpy as np
import torch
import transformers
from transformers import conversion_mapping

import architectures
import checkpoint
import golden_families
import published
from golden_weights import digest, weights

N_PROMPT = 140  # more than two KV pages of 64
N_GREEDY = 64
N_VOCAB = 264  # 256 bytes and a few special tokens
MIN_LEAD = 0.01
MIN_MARGIN = 5e-5
MIN_INDEX_MARGIN = 3e-5
NOT_AUTO = {"mistral4": "Mistral4ForCausalLM"}  # families that AutoModelForCausalLM does not list
INSIDE_ONLY = {"glm5_next_text": "Glm5Next", "glm4v_moe_text": "Glm4vMoe", "qwen3_vl_moe_text": "Qwen3VLMoe"}
MIN_INFLUENCE = 5e-3  # of the first token on the last logits, relative

DEEPSEEK = {
    "first_k_dense_replace": 1,
    "hidden_size": 68,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "rope_scaling": None,
    "topk_group": 1,
    "v_head_dim": 20,
    "vocab_size": N_VOCAB,
}
QWEN3 = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 24,
    "hidden_size": 68,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "moe_intermediate_size": 20,
    "num_attention_heads": 6,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": N_VOCAB,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "type": "yarn",
}


def deepseek(**changes):
    return published.DEEPSEEK_BASE | DEEPSEEK | changes


def qwen3(**changes):
    return published.QWEN3_BASE | QWEN3 | changes


# name -> (config, dtype); each says what it is there for. What all deepseek_v3 cases share: the
# latent norms use eps 1e-6 whatever rms_norm_eps says.
CASES = {
    "deepseek_v3": (deepseek(), "bf16"),
    "deepseek_no_q_lora": (
        # Moonlight's form: one query matrix, two shared experts; three heads; an eps that shows.
        deepseek(
            n_shared_experts=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=None,
            rms_norm_eps=1e-3,
            rope_theta=50000.0,
            routed_scaling_factor=2.446,
        ),
        "bf16",
    ),
    "deepseek_groups": (
        deepseek(n_group=4, n_routed_experts=16, num_experts_per_tok=4, topk_group=2), "bf16",
    ),
    "deepseek_yarn": (
        deepseek(n_group=2, rope_scaling=YARN, topk_group=1, num_experts_per_tok=2), "bf16",
    ),
    "deepseek_yarn_mscale": (
        # mscale differs from mscale_all_dim: cosines are scaled, too. Two dense layers; top-k
        # weights not normalized; the bias of attention_bias; a prediction layer to be skipped.
        deepseek(
            attention_bias=True,
            first_k_dense_replace=2,
            norm_topk_prob=False,
            num_nextn_predict_layers=1,
            rope_scaling=YARN | {"mscale": 0.707, "factor": 4},
            routed_scaling_factor=1.0,
        ),
        "bf16",
    ),
    "deepseek_fp8": (
        # No dimension is a multiple of 128; groups, YaRN and two blocks each way.
        deepseek(
            hidden_size=200,
            intermediate_size=192,
            kv_lora_rank=136,
            moe_intermediate_size=136,
            n_group=2,
            n_routed_experts=4,
            num_attention_heads=3,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_key_value_heads=3,
            q_lora_rank=80,
            qk_nope_head_dim=40,
            rope_scaling=YARN,
            topk_group=2,
            v_head_dim=56,
        ),
        "fp8",
    ),
    "deepseek_mixed": (
        deepseek(
            hidden_size=136,
            moe_intermediate_size=72,
            n_routed_experts=6,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            q_lora_rank=None,
        ),
        "mixed",
    ),
    "qwen3_moe": (qwen3(), "bf16"),
    "qwen3_tied": (
        qwen3(norm_topk_prob=False, num_attention_heads=3, num_key_value_heads=1,
              tie_word_embeddings=True),
        "bf16",
    ),
    "qwen3_dense_layers": (
        # Layer 1 and 3 by decoder_sparse_step; 3 is dense after all by mlp_only_layers.
        qwen3(
            decoder_sparse_step=2,
            head_dim=32,
            mlp_only_layers=[3],
            num_attention_heads=4,
            num_hidden_layers=4,
            num_key_value_heads=4,
        ),
        "bf16",
    ),
    "qwen3_yarn_bias": (
        qwen3(
            attention_bias=True,
            num_experts_per_tok=1,
            num_hidden_layers=2,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "bf16",
    ),
    "qwen3_fp8": (
        qwen3(
            head_dim=40,
            hidden_size=192,
            moe_intermediate_size=136,
            num_attention_heads=5,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_key_value_heads=1,
        ),
        "fp8",
    ),
    "qwen3_mixed_tied": (
        qwen3(
            hidden_size=136,
            moe_intermediate_size=40,
            num_experts=6,
            num_hidden_layers=2,
            tie_word_embeddings=True,
        ),
        "mixed",
    ),
    # The formats of quant_formats.py; layers enough that both kinds of MLP are there.
    "deepseek_int4": (
        deepseek(hidden_size=96, moe_intermediate_size=32, n_routed_experts=6,
                 num_hidden_layers=2, num_experts_per_tok=2),
        "int4-g32",
    ),
    "deepseek_mxfp4": (
        deepseek(hidden_size=96, moe_intermediate_size=32, n_routed_experts=6, q_lora_rank=32,
                 num_hidden_layers=2, num_experts_per_tok=2, v_head_dim=24),
        "mxfp4",
    ),
    "deepseek_awq": (
        deepseek(hidden_size=96, moe_intermediate_size=32, n_routed_experts=6, q_lora_rank=32,
                 num_hidden_layers=2, num_experts_per_tok=2, v_head_dim=24),
        "awq",
    ),
    "deepseek_fp8_rows": (
        deepseek(moe_intermediate_size=36, n_routed_experts=4, num_hidden_layers=2,
                 num_experts_per_tok=2),
        "fp8-rows",
    ),
    "qwen3_int4_zeros": (
        qwen3(head_dim=32, hidden_size=128, moe_intermediate_size=64, num_experts=4,
              num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=2),
        "int4-g64-zeros",
    ),
    "qwen3_nvfp4": (
        qwen3(head_dim=24, hidden_size=80, moe_intermediate_size=48, num_attention_heads=4,
              num_experts=6, num_experts_per_tok=2, num_hidden_layers=2),
        "nvfp4",
    ),
    "qwen3_gptq": (
        qwen3(head_dim=24, hidden_size=96, moe_intermediate_size=32, num_attention_heads=4,
              num_experts=6, num_experts_per_tok=2, num_hidden_layers=2),
        "gptq",
    ),
    "qwen3_int8": (
        qwen3(moe_intermediate_size=36, num_experts=6, num_experts_per_tok=2,
              num_hidden_layers=2),
        "int8",
    ),
}


# Published names are known of the whole alone, and the language model is loaded by itself.
for whole in ("minimax_m3_vl", "qwen3_vl_moe", "glm4v_moe"):
    conversion_mapping.register_checkpoint_conversion_mapping(
        whole + "_text", conversion_mapping.get_checkpoint_conversion_mapping(whole))


def language_model_of(name):
    """The class of a language model alone, with the whole's head; transformers has it inside the whole only."""

    class Alone(getattr(transformers, name + "PreTrainedModel")):
        config_class = getattr(transformers, name + "TextConfig")
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config):
            super().__init__(config)
            self.model = getattr(transformers, name + "TextModel")(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids, use_cache=False):
            hidden = self.model(input_ids, use_cache=use_cache).last_hidden_state
            return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(hidden))

    return Alone


def load_reference(config, used):
    """transformers' own model of the architecture, float32, eager attention, every tensor loaded."""
    text = architectures.text_config(config)
    if text is not config:  # the language model by itself
        used = {t.name: used[architectures.wrapped_name(config["model_type"], t.name)]
                for t in architectures.tensors(architectures.language_model(config))}
        config = text | ({"model_type": "deepseek_v3"} if text["model_type"] == "kimi_k2" else {})
    with tempfile.TemporaryDirectory() as directory:
        entries = [checkpoint.Entry.of_array(n, v, "I64" if v.dtype == np.int64 else "F32")
                   for n, v in used.items()]
        checkpoint.write_shard(os.path.join(directory, "model.safetensors"), entries)
        plain = {k: v for k, v in config.items() if k != "quantization_config"}
        checkpoint.write_json(os.path.join(directory, "config.json"), plain)
        auto = transformers.AutoModelForCausalLM
        model_class = getattr(transformers, NOT_AUTO.get(config["model_type"], ""), auto)
        if config["model_type"] in INSIDE_ONLY:
            model_class = language_model_of(INSIDE_ONLY[config["model_type"]])
        model, info = model_class.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    skipped = f"model.layers.{config['num_hidden_layers']}."  # the prediction layer
    unexpected = [k for k in info["unexpected_keys"] if not k.startswith((skipped, "mtp."))]
    if info["missing_keys"] or info["mismatched_keys"] or unexpected:
        raise SystemExit(f"transformers did not take the checkpoint as it is: {info}")
    return model.eval()


def router_margins(module, args, softmax):
    """How far the last choice taken leads the first left out, for each token, and the choices."""
    hidden = args[0]
    logits = hidden.reshape(-1, hidden.shape[-1]).float() @ module.weight.float().T
    logits = logits + getattr(module, "bias", 0)
    scores = logits.softmax(-1) if softmax else getattr(module, "score_fn", torch.sigmoid)(logits)
    bias = args[1] if len(args) > 1 else getattr(
        getattr(module, "moe_statics", module), "e_score_correction_bias", None)
    scores = scores if bias is None else scores + bias
    n_groups = getattr(module, "num_group", 1)
    if n_groups == 1:
        return lead(scores, module.top_k)
    grouped = scores.view(len(scores), n_groups, -1)
    margin, groups = lead(grouped.topk(2, dim=-1)[0].sum(-1), module.topk_group)
    mask = torch.full(grouped.shape, -torch.inf)
    mask.scatter_(1, groups.unsqueeze(-1).expand(-1, -1, grouped.shape[-1]), 0.0)
    inner, chosen = lead((grouped + mask).flatten(1), module.top_k)
    return torch.minimum(margin, inner), chosen


def lead(scores, k):
    if k >= scores.shape[-1]:
        return torch.full((len(scores),), torch.inf), scores.topk(k)[1]
    values, indices = torch.topk(scores, k + 1)
    return values[:, k - 1] - values[:, k], indices[:, :k]


class Routing:
    """Watches every router and indexer of a model; after a forward pass knows margins and choices."""

    def __init__(self, model, n_experts):
        self.margin, self.chosen, self.n_experts = torch.inf, {}, n_experts
        self.index_margin = torch.inf
        self.softmax = architectures.has_softmax({"model_type": model.config.model_type})
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_pre_hook(self._hook(name))
            if type(module).__name__ == "Gemma4TextRouter":
                module.register_forward_hook(self._hook_result(name))
            if type(module).__name__.endswith("Indexer"):
                self._watch_indexer(module)

    def _watch_indexer(self, module):
        select, forward = torch.Tensor.topk, module.forward

        def watch_select(scores, k, **options):
            if k < scores.shape[-1]:
                seen = scores.view(-1, scores.shape[-1])
                is_seen = seen > torch.finfo(seen.dtype).min / 2
                margin, _ = lead(seen, k)
                is_scored = is_seen & seen.isfinite()  # not those that count in any case
                margin = margin[is_seen.sum(-1) > k] / seen[is_scored].square().mean().sqrt()
                self.index_margin = min([self.index_margin, *margin.tolist()])
            return select(scores, k, **options)

        def watched(*args, **options):
            with unittest.mock.patch.object(torch.Tensor, "topk", watch_select):
                return forward(*args, **options)

        module.forward = watched

    def tie(self):
        """What nearly ties, or nothing."""
        if self.margin < MIN_MARGIN:
            return f"router margin {self.margin:.1e}"
        return f"selection margin {self.index_margin:.1e}" if self.index_margin < MIN_INDEX_MARGIN else ""

    def _hook(self, name):
        def watch(module, args):
            margin, chosen = router_margins(module, args, self.softmax)
            self.margin = min(self.margin, float(margin.min()))
            self.chosen.setdefault(name, set()).update(chosen.flatten().tolist())

        return watch

    def _hook_result(self, name):
        def watch(module, args, result):
            margin, chosen = lead(result[0], module.config.top_k_experts)
            self.margin = min(self.margin, float(margin.min()))
            self.chosen.setdefault(name, set()).update(chosen.flatten().tolist())

        return watch

    def all_used(self):
        return bool(self.chosen) and all(len(s) == self.n_experts for s in self.chosen.values())


@torch.no_grad()
def forward(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def greedy(model, prompt, min_lead):
    """The continuation, or None where two tokens come too close to each other."""
    ids, smallest = list(prompt), np.inf
    for _ in range(N_GREEDY):
        last = forward(model, ids)[-1]
        second, best = np.sort(last)[-2:]
        gap = (best - second) / np.sqrt(np.mean(last**2))
        smallest = min(smallest, float(gap))
        if gap < min_lead:
            return None, smallest
        ids.append(int(last.argmax()))
    return ids[len(prompt) :], smallest


def attempt(config, dtype, seed):
    """One seed: a dict of everything a case needs, or the reason why this seed will not do."""
    stored, used = weights(config, dtype, seed)
    model = load_reference(config, used)
    text = architectures.text_config(config)
    n_vocab = text["vocab_size"]
    routing = Routing(model, architectures.n_experts(text))
    prompt = np.random.default_rng([seed, 1]).integers(0, n_vocab, N_PROMPT).tolist()
    logits = forward(model, prompt)
    if routing.tie():
        return routing.tie()
    if not routing.all_used():
        return "an expert is never used"
    other = forward(model, [(prompt[0] + 1) % n_vocab] + prompt[1:])
    influence = np.linalg.norm(other[-1] - logits[-1]) / np.linalg.norm(logits[-1])
    if influence < MIN_INFLUENCE:
        return f"first token moves the last logits by {influence:.1e} only"
    routing.margin = torch.inf
    continuation, smallest = greedy(model, prompt, MIN_LEAD)
    if continuation is None:
        return f"lead {smallest:.1e}"
    if routing.tie():
        return f"{routing.tie()} in the continuation"
    if len(set(continuation)) < N_GREEDY // 8:
        return "the continuation runs in a small circle"
    facts = {
        "seed": seed,
        "logits_rms": float(np.sqrt(np.mean(logits**2))),
        "smallest_lead": smallest,
        "router_margin": routing.margin,
        "first_token_influence": float(influence),
        "distinct_tokens": len(set(continuation)),
    }
    return {"stored": stored, "prompt": prompt, "logits": logits, "continuation": continuation,
            "facts": facts}


def write_tokenizer(directory):
    """A token for each byte and no merges; the special tokens fill the rest of the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<bos>", "<eos>"] + [f"<reserved_{i}>" for i in range(N_VOCAB - 258)]
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    tokenizer.save(os.path.join(directory, "tokenizer.json"), pretty=False)
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": None}
    checkpoint.write_json(os.path.join(directory, "tokenizer_config.json"), config)


def write_case(directory, config, case):
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    total = sum(e.n_bytes for e in case["stored"])
    checkpoint.write_shards(directory, case["stored"], total // 2 + 1)
    checkpoint.write_json(os.path.join(directory, "config.json"), config)
    write_tokenizer(directory)
    np.save(os.path.join(directory, "prompt.npy"), np.array(case["prompt"], np.int32))
    np.save(os.path.join(directory, "logits.npy"), case["logits"].astype(np.float32))
    np.save(os.path.join(directory, "continuation.npy"), np.array(case["continuation"], np.int32))


def search(name, config, dtype, n_seeds):
    """The first seed that will do: attempt's dict."""
    for seed in range(n_seeds):
        case = attempt(config, dtype, seed)
        if isinstance(case, dict):
            print(f"{name}: {case['facts']}", flush=True)
            return case
        print(f"{name}: seed {seed}: {case}", file=sys.stderr, flush=True)
    raise SystemExit(f"{name}: none of {n_seeds} seeds will do")


def make_case(name, out, n_seeds):
    config, dtype = CASES[name]
    config = architectures.quantize_config(config, dtype)
    case = search(name, config, dtype, n_seeds)
    write_case(os.path.join(out, "data", name), config, case)
    return {"dtype": dtype} | case["facts"]


def make_family_case(name, out, n_seeds):
    """Results alone: the checkpoint is made again from the seed (golden_families.py)."""
    config, dtype = golden_families.config_of(name)
    case = search(name, config, dtype, n_seeds)
    os.makedirs(os.path.join(out, "families"), exist_ok=True)
    np.savez(
        os.path.join(out, "families", name + ".npz"),
        prompt=np.array(case["prompt"], np.int32),
        logits=case["logits"].astype(np.float32),
        continuation=np.array(case["continuation"], np.int32),
    )
    return {"dtype": dtype, "digest": digest(config, case["stored"])} | case["facts"]


def make_all(make, names, out, folder, n_seeds):
    path, provenance = os.path.join(out, folder, "provenance.json"), {"cases": {}}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            provenance = json.load(f)
    provenance |= {
        "command": "python scripts/make_golden.py",
        "reference": "transformers AutoModelForCausalLM, float32, eager attention, CPU",
        "versions": {
            "numpy": np.__version__,
            "python": sys.version.split()[0],
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
        },
    }
    for name in names:
        provenance["cases"][name] = make(name, out, n_seeds)
        checkpoint.write_json(path, provenance)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    both = [*CASES, *golden_families.CASES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.path.join(here, "..", "tests", "golden"))
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to try a case")
    parser.add_argument("cases", nargs="*", help=f"default: all of {', '.join(both)}")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of a sum is then the same everywhere
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for make, cases, folder in (
        (make_case, CASES, "data"),
        (make_family_case, golden_families.CASES, "families"),
    ):
        names = [n for n in args.cases or cases if n in cases]
        if names:
            make_all(make, names, args.out, folder, args.seeds)


if __name__ == "__main__":
    main()
