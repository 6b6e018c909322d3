"""The layer of multi-token prediction of every family that publishes one: what it says, and that texts stay the same.

Checkpoints are made on the spot from a seed. The reference of the layer is numpy for what is around it (norms, the
projection of a token's state beside the embedding of the next one, and what goes on to the guess after that) and, for
the layer itself, a model of that layer alone whose embeddings are the layer's inputs: models are held against
transformers in test_families.py and test_golden.py. DeepSeek-V4's layer, whose inputs are several streams, is numpy, too.
"""

import concurrent.futures
import pathlib
import subprocess
import sys

import httpx
import numpy as np
import pytest
from test_golden import check_logits, ids_of, tandem  # noqa: F401
from test_golden_cuda import cuda  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/e2e")]

import checkpoint  # noqa: E402
import golden_families  # noqa: E402
import golden_recurrent  # noqa: E402
import golden_weights  # noqa: E402
import architectures  # noqa: E402
from serving import Server, metric  # noqa: E402

CASES = {
    "deepseek_v3": (golden_families.KIMI | {"model_type": "deepseek_v3", "n_group": 2}, "bf16"),
    "deepseek_v3_fp8": (golden_families.KIMI | {"model_type": "deepseek_v3", "q_lora_rank": None}, "fp8"),
    # Norms of queries and keys, one key head for five, two shared experts.
    "glm4_moe": (golden_families.CASES["glm4_moe_norms"][0], "bf16"),
    "glm4_moe_bias": (golden_families.CASES["glm4_moe_bias"][0], "bf16"),
    "glm4_moe_lite": (golden_families.CASES["glm4_moe_lite"][0], "bf16"),
    # A norm of its own behind the layer, neither embedding nor head; by the names of Tencent, and of transformers.
    "hy_v3_published": golden_families.CASES["hy_v3_published"],
    "hy_v3": (golden_families.CASES["hy_v3"][0], "bf16"),
    # Apart from the other layers, with norms less the 1 that is added, of a model with recurrent states.
    "qwen3_next": golden_families.CASES["qwen3_next"],
    "qwen3_next_fp8": golden_families.CASES["qwen3_next_fp8"],
    "qwen3_5_moe": (golden_recurrent.QWEN35, "bf16"),
    # From several streams; in FP8 and FP4, with two streams.
    "deepseek_v4": golden_families.CASES["deepseek_v4"],
    "deepseek_v4_dense": golden_families.CASES["deepseek_v4_dense"],
}
WRAPPED = "qwen3_5_moe_wrapped"  # as it is published
DRAFTS = 3


def config_of(case):
    config, dtype = golden_families.CASES["qwen3_5_moe"] if case == WRAPPED else CASES[case]
    more = {} if case.startswith("qwen") else {"num_nextn_predict_layers": 1}
    return architectures.quantize_config(config | more, dtype), dtype


def published_name(config, name):
    """What the tensor of a prediction layer in DeepSeek's layout is called; None: it is not published."""
    if config["model_type"] != "hy_v3":
        return name
    if name.endswith((f".{config['num_hidden_layers']}.embed_tokens.weight", ".shared_head.head.weight")):
        return None
    return name.replace("shared_head.norm", "final_layernorm")


def make_entries(config, dtype, change=lambda tensor, values: values):
    """Entries by the name that the whole model has them under, and the values that they stand for."""
    rng, stored, used = np.random.default_rng(7), [], {}
    for tensor in architectures.tensors(config):
        values = change(tensor, golden_weights.random_values(tensor, config, rng))
        name = published_name(config, tensor.name)
        if name is None:
            continue
        tensor = architectures.Tensor(name, tensor.shape, tensor.role, tensor.expert)
        entries, used[name] = golden_weights.stored_and_used(tensor, values, config, dtype)
        stored += entries
    return stored, used


def renamed(entry, name):
    return checkpoint.Entry(name, entry.shape, entry.dtype, entry.chunks)


def f32(name, values):
    return checkpoint.Entry.of_array(name, np.ascontiguousarray(values, np.float32), "F32")


def padded(rows):
    return np.concatenate([rows, np.zeros((golden_families.N_VOCAB - len(rows), rows.shape[1]))])


class Reference:
    """The prediction layer of a checkpoint, out of models that have none."""

    def __init__(self, tandem, directory, config, stored, used):  # noqa: F811
        self.tandem, self.directory, self.used = tandem, directory, used
        self.config, self.dim, self.eps = config, config["hidden_size"], config["rms_norm_eps"]
        self.less = float(architectures.family(config).norm == "norm1")  # what stored norms lack
        last = f"model.layers.{config['num_hidden_layers']}."
        self.is_apart = "mtp.fc.weight" in used
        self.prefix = "mtp.layers.0." if self.is_apart else last
        names = {"embed_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm",
                 "proj": "mtp.fc"}  # fmt: skip
        own_norm = last + "final_layernorm"
        if not self.is_apart:
            norm = own_norm if own_norm + ".weight" in used else last + "shared_head.norm"
            names = {"embed_norm": last + "enorm", "hidden_norm": last + "hnorm", "norm": norm, "proj": last + "eh_proj"}
        self.is_normed = self.is_apart or names["norm"] == own_norm
        self.around = {k: used[v + ".weight"].astype(np.float64) + self.less * (k != "proj") for k, v in names.items()}
        skipped = tuple(last + part for part in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head", "final_"))
        self.main = [e for e in stored if not e.name.startswith((last, "mtp."))]
        own = [e for e in stored if e.name.startswith(self.prefix) and not e.name.startswith(skipped)]
        self.layer = [renamed(e, e.name.replace(self.prefix, "model.layers.0.")) for e in own]

    def _logits(self, name, config, entries, ids):
        directory, out = self.directory / name, self.directory / (name + ".npy")
        alone = {"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}
        golden_weights.write_checkpoint(directory, config | {k: v for k, v in alone.items() if k in config}, entries)
        self.tandem("eval", "logits", "--model", directory, "--token-ids", ids_of(np.array(ids)),
                    "--activations", "f32", "--device", "cpu", "--out", out)  # fmt: skip
        return np.load(out).astype(np.float64)

    def states(self, tokens):
        """The model's states behind the last norm: with the identity for a head, they are the logits."""
        entries = [e for e in self.main if e.name != "lm_head.weight"]
        head = f32("lm_head.weight", padded(np.eye(self.dim)))
        return self._logits("states", self.config, [*entries, head], tokens)[:, : self.dim]

    def through_layer(self, name, inputs, norm, head):
        """Its output for these inputs, one a position, behind the norm and the head."""
        config = self.config | {"num_hidden_layers": 1}
        config |= {"layer_types": ["full_attention"]} if self.is_apart else {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
        ends = [f32("model.embed_tokens.weight", padded(inputs)), f32("model.norm.weight", norm - self.less)]
        return self._logits(name, config, [*ends, f32("lm_head.weight", head), *self.layer], range(len(inputs)))

    def rms(self, x, w):
        x = x.astype(np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * w

    def inputs(self, tokens, states):
        embeddings = self.used["model.embed_tokens.weight"][tokens]
        both = [self.rms(embeddings, self.around["embed_norm"]), self.rms(states, self.around["hidden_norm"])]
        return np.concatenate(both, -1) @ self.around["proj"].T

    def guesses(self, tokens, n):
        """Logits of n guesses behind the last of the tokens."""
        inputs, out = self.inputs(tokens[1:], self.states(tokens[:-1])), []
        for k in range(n):
            head = self.used["lm_head.weight"]
            out.append(self.through_layer(f"guess{k}", inputs, self.around["norm"], head)[-1])
            # A norm takes no notice of its input's length, so that the state divided by it will do.
            state = self.through_layer(f"state{k}", inputs, np.ones(self.dim), padded(np.eye(self.dim)))[-1:, : self.dim]
            state = state * self.around["norm"] if self.is_normed else state
            inputs = np.concatenate([inputs, self.inputs([int(out[-1].argmax())], state)])
        return np.array(out)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotated(x, angles, sign):
    """The last elements of x [tokens][...][dim], in neighbouring pairs."""
    n = 2 * angles.shape[-1]
    shape = (len(x),) + (1,) * (x.ndim - 2) + (n // 2,)
    c, s = np.cos(angles).reshape(shape), sign * np.sin(angles).reshape(shape)
    u, v, out = x[..., -n::2], x[..., -n + 1 :: 2], x.copy()
    out[..., -n::2], out[..., -n + 1 :: 2] = u * c - v * s, v * c + u * s
    return out


class StreamReference(Reference):
    """DeepSeek-V4's prediction layer: states and inputs are [tokens][streams][dim]."""

    def __init__(self, tandem, directory, config, stored, used):  # noqa: F811
        self.tandem, self.directory, self.config = tandem, directory, config
        self.dim, self.eps, self.n = config["hidden_size"], config["rms_norm_eps"], config["hc_mult"]
        self.all = {name: values.astype(np.float64) for name, values in used.items()}
        self.own = {k.removeprefix("mtp.0."): v for k, v in self.all.items() if k.startswith("mtp.0.")}
        self.main = [e for e in stored if not e.name.startswith("mtp.")]

    def stream(self, tokens, k):
        """A stream of the model's states, normed: with nothing but it in front of the head, and the identity for one."""
        ends = {"hc_head_fn": np.zeros((self.n, self.n * self.dim)), "hc_head_scale": np.zeros(1),
                "hc_head_base": np.where(np.arange(self.n) == k, 40, -40), "norm.weight": np.ones(self.dim),
                "head.weight": padded(np.eye(self.dim))}  # fmt: skip
        entries = [e for e in self.main if e.name not in ends] + [f32(*end) for end in ends.items()]
        config = self.config | {"tie_word_embeddings": False}
        return self._logits(f"stream{k}", config, entries, tokens)[:, : self.dim]

    def states(self, tokens):
        return np.stack([self.stream(tokens, k) for k in range(self.n)], 1)

    def inputs(self, tokens, states):
        embeddings = self.rms(self.all["embed.weight"][tokens], self.own["enorm.weight"]) @ self.own["e_proj.weight"].T
        return embeddings[:, None] + self.rms(states, self.own["hnorm.weight"]) @ self.own["h_proj.weight"].T

    def scores(self, x, name):
        flat = x.reshape(len(x), -1)
        return flat @ self.own[name + "_fn"].T / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.eps)

    def through_block(self, x, name, norm, block):
        """The streams behind a block that reads and writes all of them."""
        n, eps, scale, base = self.n, self.config["hc_eps"], self.own[name + "_scale"], self.own[name + "_base"]
        scores = self.scores(x, name)
        pre, post, comb = scores[:, :n], scores[:, n : 2 * n], scores[:, 2 * n :]
        pre = sigmoid(pre * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(post * scale[1] + base[n : 2 * n])
        comb = np.exp(comb * scale[2] + base[2 * n :]).reshape(-1, n, n)
        comb = comb / comb.sum(-1, keepdims=True) + eps
        comb /= comb.sum(1, keepdims=True) + eps
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb /= comb.sum(2, keepdims=True) + eps
            comb /= comb.sum(1, keepdims=True) + eps
        y = block(self.rms((pre[:, :, None] * x).sum(1), self.own[norm + ".weight"]))
        return post[:, :, None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, x)

    def attention(self, h):
        own, c, n_tokens = self.own, self.config, len(h)
        heads, dim, rot = c["num_attention_heads"], c["head_dim"], c["qk_rope_head_dim"]
        angles = np.outer(np.arange(n_tokens), c["rope_theta"] ** (-np.arange(0, rot, 2) / rot))
        q = self.rms(h @ own["attn.wq_a.weight"].T, own["attn.q_norm.weight"]) @ own["attn.wq_b.weight"].T
        q = rotated(self.rms(q.reshape(n_tokens, heads, dim), 1), angles, 1)
        k = rotated(self.rms(h @ own["attn.wkv.weight"].T, own["attn.kv_norm.weight"]), angles, 1)
        ago = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        is_seen = (ago >= 0) & (ago < c["sliding_window"])
        weights = np.where(is_seen[:, None], np.exp(np.einsum("thd,sd->ths", q, k) / np.sqrt(dim)), 0)
        weights /= weights.sum(-1, keepdims=True) + np.exp(own["attn.attn_sink"])[None, :, None]
        out = rotated(weights @ k, angles, -1).reshape(n_tokens, c["o_groups"], -1)
        low = np.einsum("tgd,grd->tgr", out, own["attn.wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1))
        return low.reshape(n_tokens, -1) @ own["attn.wo_b.weight"].T

    def expert(self, h, name):
        w, limit = [self.own[f"ffn.{name}.w{i}.weight"] for i in (1, 2, 3)], self.config["swiglu_limit"]
        gate, up = np.minimum(h @ w[0].T, limit), np.clip(h @ w[2].T, -limit, limit)
        return gate * sigmoid(gate) * up @ w[1].T

    def experts(self, h):
        scores = np.sqrt(np.log1p(np.exp(h @ self.own["ffn.gate.weight"].T)))
        out = self.expert(h, "shared_experts")
        for t, row in enumerate(scores):
            chosen = np.argsort(-(row + self.own["ffn.gate.bias"]))[: self.config["num_experts_per_tok"]]
            for e in chosen:
                weight = row[e] / row[chosen].sum() * self.config["routed_scaling_factor"]
                out[t] += weight * self.expert(h[t], f"experts.{e}")
        return out

    def guesses(self, tokens, n):
        inputs, out = self.inputs(tokens[1:], self.states(tokens[:-1])), []
        head = self.all.get("head.weight", self.all["embed.weight"])
        for _ in range(n):
            x = self.through_block(inputs, "hc_attn", "attn_norm", self.attention)
            x = self.through_block(x, "hc_ffn", "ffn_norm", self.experts)[-1:]
            pre = self.scores(x, "hc_head") * self.own["hc_head_scale"] + self.own["hc_head_base"]
            pre = sigmoid(pre) + self.config["hc_eps"]
            out.append(self.rms((pre[:, :, None] * x).sum(1), self.own["norm.weight"])[0] @ head.T)
            inputs = np.concatenate([inputs, self.inputs([int(out[-1].argmax())], x)])
        return np.array(out)


@pytest.mark.parametrize("case", CASES)
def test_what_the_layer_says(tandem, build_dir, case, tmp_path):  # noqa: F811
    config, dtype = config_of(case)
    stored, used = make_entries(config, dtype)
    golden_weights.write_checkpoint(tmp_path / "whole", config, stored)
    tokens = np.random.default_rng(1).integers(2, golden_families.N_VOCAB, 50)
    args = [build_dir / "bin/draft_driver", tmp_path / "whole", ids_of(tokens), DRAFTS, tmp_path / "drafts"]
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = np.fromfile(tmp_path / "drafts", np.float32).reshape(DRAFTS, golden_families.N_VOCAB)
    reference = StreamReference if "hc_mult" in config else Reference
    wanted = reference(tandem, tmp_path, config, stored, used).guesses(tokens, DRAFTS)
    check_logits(ours, wanted)
    assert [int(line) for line in done.stdout.split()] == wanted.argmax(-1).tolist()


def predictable(config):
    """Weights with which a token follows from the one before, nearly, and the layer knows it as well as the model."""
    last = f"model.layers.{architectures.text_config(config)['num_hidden_layers']}."
    ones = [last + "enorm", last + "shared_head.norm", "mtp.pre_fc_norm_embedding", "mtp.norm", "norm", "mtp.0.norm",
            "mtp.0.enorm"]  # fmt: skip

    def change(tensor, values):
        name = tensor.name.removesuffix(".weight")
        if tensor.role in ("o", "down"):
            return values * np.float32(0.1)
        if name in ones or name.endswith(("model.norm", "language_model.norm")):
            return np.full_like(values, tensor.role != "norm1")
        if name in (last + "eh_proj", "mtp.fc"):  # the embedding as it is
            return np.concatenate([np.eye(len(values)), np.zeros((len(values),) * 2)], 1).astype(np.float32)
        if name in ("mtp.0.e_proj", "mtp.0.h_proj"):
            return np.eye(len(values), dtype=np.float32) * (name == "mtp.0.e_proj")
        return values

    return change


def check_texts(tandem_bin, case, folder, n_requests, n_clients, *options, n_prompt=9):
    """The same with and without the layer's guesses, of which many are right."""
    config, dtype = config_of(case)
    stored, _ = make_entries(config, dtype, predictable(config))
    golden_weights.write_checkpoint(folder / "model", config, stored)
    rng = np.random.default_rng(2)
    bodies = [
        {"prompt": rng.integers(2, golden_families.N_VOCAB, n_prompt + 5 * i).tolist(), "max_tokens": 14, "seed": i,
         "temperature": (0.2, 0.5, 0.9)[i % 3], "logprobs": 2, "ignore_eos": True}  # fmt: skip
        for i in range(n_requests)
    ]
    answers = {}
    for draft in "off", "3":
        options_of = ["--disaggregate", "off", "--draft", draft, "--prefill-chunk", "16", *options]
        server = Server(tandem_bin, folder / "model", *options_of)
        with concurrent.futures.ThreadPoolExecutor(n_clients) as pool:
            ask = lambda body: httpx.post(server.url + "/v1/completions", json=body, timeout=300, trust_env=False)
            answers[draft] = [reply.json() for reply in pool.map(ask, bodies)]
        n_drafted = metric(server, "spec_decode_num_draft_tokens_total")
        server.close()
    assert [a["choices"] for a in answers["3"]] == [a["choices"] for a in answers["off"]]
    # Texts so short hardly repeat three tokens: nearly all guesses are the layer's, and many are right.
    details = [a["usage"]["completion_tokens_details"] for a in answers["3"]]
    accepted = sum(d["accepted_prediction_tokens"] for d in details)
    assert n_drafted > n_requests * 14 / 2 and n_drafted / 5 < accepted < n_drafted


@pytest.mark.no_asan
@pytest.mark.parametrize("case", [*CASES, WRAPPED])
def test_texts_are_the_same(tandem_bin, case, tmp_path):
    check_texts(tandem_bin, case, tmp_path, 12, 4)


@pytest.mark.no_asan
@pytest.mark.slow
@pytest.mark.parametrize(("case", "experts"), [("deepseek_v3_fp8", "cpu"), ("glm4_moe", "cpu"), ("hy_v3", "gpu"),
                                                ("qwen3_next", "gpu"), ("qwen3_5_moe", "cpu"), ("deepseek_v4", "gpu")])  # fmt: skip
def test_texts_are_the_same_on_a_gpu(tandem_bin, cuda, case, experts, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TANDEM_CUDA_LIB", cuda["TANDEM_CUDA_LIB"])
    options = ["--device", "cuda", "--expert-device", experts]
    if case.startswith("qwen"):  # whose prompts two GPUs cannot share: the first one also drafts alone
        monkeypatch.setenv("TANDEM_EMU_DEVICES", "2")
        options += ["--devices", "0,1"]
    # One request at a time: on a GPU how a prompt is cut beside others rounds differently.
    check_texts(tandem_bin, case, tmp_path, 6, 1, *options)


@pytest.mark.no_asan
@pytest.mark.slow
@pytest.mark.parametrize("case,n_prompt", [("glm4_moe", 185), ("deepseek_v3_fp8", 72)])
def test_behind_prompts_whose_experts_stream(tandem_bin, cuda, case, n_prompt, tmp_path, monkeypatch):  # noqa: F811
    """The layer begins near their end, at one page or another."""
    monkeypatch.setenv("TANDEM_CUDA_LIB", cuda["TANDEM_CUDA_LIB"])
    options = ["--device", "cuda", "--expert-device", "cpu", "--stream-from", "32", "--prefill-chunk", "256"]
    check_texts(tandem_bin, case, tmp_path, 2, 1, *options, n_prompt=n_prompt)
