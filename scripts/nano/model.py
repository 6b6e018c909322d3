"""DeepSeek-V3 as Hugging Face publishes it, written for fast training on a few CPU cores.

Parameter names and shapes are the published ones, except that the experts of a layer are
stacked: experts.gate_up [E][2I][H] and experts.down [E][H][I]. `export.py` takes them apart.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Config:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 4
    dense_layers: int = 1
    heads: int = 4
    q_lora: int = 128
    kv_lora: int = 128
    nope: int = 64
    rope: int = 128
    v_dim: int = 64
    dense_inter: int = 512
    moe_inter: int = 128
    experts: int = 32
    top_k: int = 4
    groups: int = 4
    top_groups: int = 2
    scaling: float = 2.0
    theta: float = 10000.0
    eps: float = 1e-6


class GroupedExperts(torch.autograd.Function):
    """y[t] = sum_k w[t][k] * down[e] (silu(gate[e] x) * (up[e] x)), e = index[t][k].

    Rows are sorted by expert so that each expert is three plain matrix products."""

    @staticmethod
    def forward(ctx, x, gate_up, down, index, weight):
        t, k = index.shape
        order = torch.argsort(index.reshape(-1), stable=True)
        ends = torch.bincount(index.reshape(-1), minlength=gate_up.shape[0]).cumsum(0).tolist()
        token = order // k
        xs = x.index_select(0, token)
        w = weight.reshape(-1).index_select(0, order).unsqueeze(1)
        h = torch.empty(t * k, gate_up.shape[1])
        y = torch.empty(t * k, x.shape[1])
        inter = down.shape[2]
        spans = list(zip([0] + ends[:-1], ends))
        for e, (a, b) in enumerate(spans):
            torch.mm(xs[a:b], gate_up[e].t(), out=h[a:b])
        act = F.silu(h[:, :inter]).mul_(h[:, inter:])
        aw = act * w
        for e, (a, b) in enumerate(spans):
            torch.mm(aw[a:b], down[e].t(), out=y[a:b])
        back = torch.empty_like(order)
        back[order] = torch.arange(t * k)
        ctx.save_for_backward(xs, gate_up, down, h, act, w, token, back, order)
        ctx.spans, ctx.tk = spans, (t, k)
        return y.index_select(0, back).view(t, k, -1).sum(1)

    @staticmethod
    def backward(ctx, grad):
        xs, gate_up, down, h, act, w, token, back, order = ctx.saved_tensors
        t, k = ctx.tk
        inter = down.shape[2]
        dy = grad.index_select(0, token)
        daw = torch.empty_like(act)
        d_down, d_gate_up = torch.empty_like(down), torch.empty_like(gate_up)
        aw = act * w
        for e, (a, b) in enumerate(ctx.spans):
            torch.mm(dy[a:b], down[e], out=daw[a:b])
            torch.mm(dy[a:b].t(), aw[a:b], out=d_down[e])
        dw = (daw * act).sum(1)
        da = daw.mul_(w)
        gate, up = h[:, :inter], h[:, inter:]
        sig = torch.sigmoid(gate)
        silu = gate * sig
        dh = torch.empty_like(h)
        torch.mul(da, silu, out=dh[:, inter:])
        sig.add_(silu - silu * sig)  # derivative of silu: s + x s (1 - s)
        torch.mul(da.mul_(up), sig, out=dh[:, :inter])
        dxs = dy  # its storage is free now
        for e, (a, b) in enumerate(ctx.spans):
            torch.mm(dh[a:b], gate_up[e], out=dxs[a:b])
            torch.mm(dh[a:b].t(), xs[a:b], out=d_gate_up[e])
        dx = dxs.index_select(0, back).view(t, k, -1).sum(1)
        return dx, d_gate_up, d_down, None, dw.index_select(0, back).view(t, k)


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of h @ head.T against target; the probabilities become the gradient in place."""

    @staticmethod
    def forward(ctx, h, head, target):
        p = h @ head.t()
        n = torch.arange(len(target))
        top = p.amax(1, keepdim=True)
        picked = p[n, target] - top[:, 0]
        total = p.sub_(top).exp_().sum(1, keepdim=True)
        loss = (total[:, 0].log() - picked).mean()
        p.div_(total * len(target))
        p[n, target] -= 1 / len(target)
        ctx.save_for_backward(h, head, p)
        return loss

    @staticmethod
    def backward(ctx, grad):
        h, head, p = ctx.saved_tensors
        return p @ head * grad, p.t() @ h * grad, None


def rms(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x, cos, sin):
    """Interleaved pairs, as the stored weights have them: x [..., d], cos and sin [..., d/2]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q_a_proj = nn.Linear(c.hidden, c.q_lora, bias=False)
        self.q_a_layernorm = Norm(c.q_lora)
        self.q_b_proj = nn.Linear(c.q_lora, c.heads * (c.nope + c.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden, c.kv_lora + c.rope, bias=False)
        self.kv_a_layernorm = Norm(c.kv_lora)
        self.kv_b_proj = nn.Linear(c.kv_lora, c.heads * (c.nope + c.v_dim), bias=False)
        self.o_proj = nn.Linear(c.heads * c.v_dim, c.hidden, bias=False)

    def forward(self, x, cos, sin, bias, cache=None):
        c = self.c
        b, t, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, c.heads, -1)
        kv, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora, c.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(kv)).view(b, t, c.heads, -1)
        k_nope, v = kv.split([c.nope, c.v_dim], -1)
        q_nope, q_rope = q.split([c.nope, c.rope], -1)
        q = torch.cat((q_nope, rotate(q_rope, cos.unsqueeze(2), sin.unsqueeze(2))), -1).transpose(1, 2)
        k_rope = rotate(k_rope, cos, sin).unsqueeze(2).expand(-1, -1, c.heads, -1)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(self, k, v)
        scale = (c.nope + c.rope) ** -0.5
        scores = torch.baddbmm(bias.expand(-1, c.heads, -1, -1).reshape(b * c.heads, t, -1),
                               q.reshape(b * c.heads, t, -1), k.reshape(b * c.heads, k.shape[2], -1).mT,
                               alpha=scale)
        out = torch.bmm(scores.softmax(-1), v.reshape(b * c.heads, v.shape[2], -1))
        return self.o_proj(out.view(b, c.heads, t, -1).transpose(1, 2).reshape(b, t, -1))


class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return rms(x, self.weight, self.eps)


class Mlp(nn.Module):
    def __init__(self, hidden, inter):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.experts, c.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.experts))


class Experts(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(c.experts, 2 * c.moe_inter, c.hidden))
        self.down = nn.Parameter(torch.empty(c.experts, c.hidden, c.moe_inter))


class Moe(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.gate, self.experts = Gate(c), Experts(c)
        self.shared_experts = Mlp(c.hidden, c.moe_inter)
        self.load = torch.zeros(c.experts)  # tokens since the last bias update
        self.balance = None

    def route(self, x):
        c = self.c
        scores = torch.sigmoid(F.linear(x, self.gate.weight))
        with torch.no_grad():
            choice = scores + self.gate.e_score_correction_bias
            groups = choice.view(-1, c.groups, c.experts // c.groups)
            best = groups.topk(2, -1).values.sum(-1).topk(c.top_groups, -1).indices
            keep = torch.zeros(x.shape[0], c.groups, dtype=torch.bool).scatter_(1, best, True)
            choice = groups.masked_fill(~keep.unsqueeze(-1), -1e9).view(-1, c.experts)
            index = choice.topk(c.top_k, -1).indices
        picked = scores.gather(1, index)
        return scores, index, picked / (picked.sum(-1, keepdim=True) + 1e-20) * c.scaling

    def forward(self, x):
        c = self.c
        flat = x.reshape(-1, c.hidden)
        scores, index, weight = self.route(flat)
        with torch.no_grad():
            self.load += torch.bincount(index.reshape(-1), minlength=c.experts)
        if self.training:
            rows = x.shape[0]
            share = F.one_hot(index, c.experts).sum(1).view(rows, -1, c.experts).float().mean(1)
            prob = (scores / scores.sum(-1, keepdim=True)).view(rows, -1, c.experts).mean(1)
            self.balance = (share * prob).sum(-1).mean() * c.experts / c.top_k
        out = GroupedExperts.apply(flat, self.experts.gate_up, self.experts.down, index, weight)
        return out.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: Config, dense: bool):
        super().__init__()
        self.input_layernorm = Norm(c.hidden)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c.hidden)
        self.mlp = Mlp(c.hidden, c.dense_inter) if dense else Moe(c)

    def forward(self, x, cos, sin, bias, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, bias, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Mtp(nn.Module):
    """The multi-token-prediction layer: from the state at i and token i+1, token i+2."""

    def __init__(self, c: Config):
        super().__init__()
        self.enorm, self.hnorm = Norm(c.hidden), Norm(c.hidden)
        self.eh_proj = nn.Linear(2 * c.hidden, c.hidden, bias=False)
        self.layer = Layer(c, dense=False)
        self.norm = Norm(c.hidden)


class Nano(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, i < c.dense_layers) for i in range(c.layers))
        self.norm = Norm(c.hidden)
        self.lm_head = nn.Linear(c.hidden, c.vocab, bias=False)
        self.mtp = Mtp(c)
        for name, p in self.named_parameters():
            if p.dim() == 1:
                continue
            # Embeddings as large as what the layers add: with small ones copying is learned late.
            std = 1.0 if "embed" in name else 0.02 if "gate.weight" in name else p.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down")):
                std *= (2 * c.layers) ** -0.5
            nn.init.normal_(p, std=std * (0.5 if "lm_head" in name else 1))

    def moes(self):
        return [m for m in self.modules() if isinstance(m, Moe)]

    def angles(self, pos):
        d = self.c.rope
        freq = self.c.theta ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
        a = pos.unsqueeze(-1) * freq
        return a.cos(), a.sin()

    def trunk(self, ids, pos, bias, cache=None):
        """Hidden states after the final norm: [B][T][H]. bias is [B][1][T][S], added to scores."""
        cos, sin = self.angles(pos.float())
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, bias, cache)
        return self.norm(x)

    def mtp_states(self, hidden, next_ids, pos, bias):
        cos, sin = self.angles(pos.float())
        m = self.mtp
        x = m.eh_proj(torch.cat((m.enorm(self.embed_tokens(next_ids)), m.hnorm(hidden)), -1))
        return m.norm(m.layer(x, cos, sin, bias))


def on_device(array):
    return torch.from_numpy(array).to(torch.get_default_device())


def row_inputs(doc):
    """Positions within each document and the additive mask of its own past: doc [B][T]."""
    b, t = doc.shape
    index = torch.arange(t).expand(b, t)
    start = torch.ones_like(doc, dtype=torch.bool)
    start[:, 1:] = doc[:, 1:] != doc[:, :-1]
    pos = index - torch.where(start, index, 0).cummax(1).values
    same = (doc.unsqueeze(2) == doc.unsqueeze(1)).tril()
    bias = torch.zeros(b, 1, t, t).masked_fill_(~same.unsqueeze(1), float("-1e30"))
    return pos, bias
