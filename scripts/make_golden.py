#!/usr/bin/env python3
"""Makes tests/golden/data and tests/golden/families: what transformers computes with small random checkpoints.

For each case of golden_models.py and golden_families.py, which make its checkpoint again from the seed: NAME.npz of
prompt (int32 token ids), logits (float32 [n_prompt][n_vocab], every position) and continuation (int32, greedy, 64
tokens). The reference runs in float32 with eager attention on the weights as stored, dequantized. Run in the
environment of scripts/setup.sh --dev.

Seeds are searched until nothing rests on a near-tie: the best token leads by MIN_LEAD of the logits'
RMS at each greedy step, and the last expert (and group) taken leads the first left out by
MIN_MARGIN in score, as does the last key that an indexer selects, by MIN_INDEX_MARGIN of the scores' RMS.
A case in which attention, routing or an expert hardly matters is refused.
"""

import argparse
import json
import os
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
import golden_models
from golden_weights import digest, weights

N_PROMPT = 140  # more than two KV pages of 64
N_GREEDY = 64
MIN_LEAD = 0.01
MIN_MARGIN = 5e-5
MIN_INDEX_MARGIN = 3e-5
NOT_AUTO = {"mistral4": "Mistral4ForCausalLM"}  # families that AutoModelForCausalLM does not list
INSIDE_ONLY = {"glm5_next_text": "Glm5Next", "glm4v_moe_text": "Glm4vMoe", "qwen3_vl_moe_text": "Qwen3VLMoe"}
MIN_INFLUENCE = 5e-3  # of the first token on the last logits, relative

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


def search(name, config, dtype, n_seeds):
    """The first seed that will do: attempt's dict."""
    for seed in range(n_seeds):
        case = attempt(config, dtype, seed)
        if isinstance(case, dict):
            print(f"{name}: {case['facts']}", flush=True)
            return case
        print(f"{name}: seed {seed}: {case}", file=sys.stderr, flush=True)
    raise SystemExit(f"{name}: none of {n_seeds} seeds will do")


def make_case(name, config, dtype, folder, n_seeds):
    """Writes the results; returns what provenance.json says of the case."""
    case = search(name, config, dtype, n_seeds)
    np.savez_compressed(
        os.path.join(folder, name + ".npz"),
        prompt=np.array(case["prompt"], np.int32),
        logits=case["logits"].astype(np.float32),
        continuation=np.array(case["continuation"], np.int32),
    )
    return {"dtype": dtype, "digest": digest(config, case["stored"])} | case["facts"]


def make_all(cases, names, folder, n_seeds):
    os.makedirs(folder, exist_ok=True)
    path, provenance = os.path.join(folder, "provenance.json"), {"cases": {}}
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
        provenance["cases"][name] = make_case(name, *cases.config_of(name), folder, n_seeds)
        checkpoint.write_json(path, provenance)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    both = [*golden_models.CASES, *golden_families.CASES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.path.join(here, "..", "tests", "golden"))
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to try a case")
    parser.add_argument("cases", nargs="*", help=f"default: all of {', '.join(both)}")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of a sum is then the same everywhere
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for cases, folder in ((golden_models, "data"), (golden_families, "families")):
        names = [n for n in args.cases or cases.CASES if n in cases.CASES]
        if names:
            make_all(cases, names, os.path.join(args.out, folder), args.seeds)


if __name__ == "__main__":
    main()
