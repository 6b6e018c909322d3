"""Muon for the weight matrices, AdamW for experts, embeddings, head, router and norms."""

import torch


def orthogonal(g: torch.Tensor, steps=5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, by Newton-Schulz iteration."""
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    return x.T if flip else x


def is_muon(name: str, p: torch.Tensor) -> bool:
    return p.dim() == 2 and not any(s in name for s in ("embed_tokens", "lm_head", "gate.weight"))


class Optimizer:
    """State is kept by parameter name, so that a checkpoint can be read without the model."""

    def __init__(self, model, lr_muon=0.004, lr_adam=0.003, decay=0.02):
        self.params = dict(model.named_parameters())
        self.lr_muon, self.lr_adam, self.decay = lr_muon, lr_adam, decay
        self.state = {n: [torch.zeros_like(p)] + ([] if is_muon(n, p) else [torch.zeros_like(p)])
                      for n, p in self.params.items()}

    @torch.no_grad()
    def step(self, t: int, scale: float):
        """One update; t counts from 1, scale is the schedule's factor."""
        adam = [], [], [], [], [], []  # parameters, gradients, m, v, (max v), steps
        for n, p in self.params.items():
            if p.grad is None:
                continue
            s = self.state[n]
            if is_muon(n, p):
                s[0].mul_(0.95).add_(p.grad)
                update = orthogonal(p.grad.add(s[0], alpha=0.95))
                lr = self.lr_muon * scale
                p.mul_(1 - lr * self.decay).add_(update, alpha=-lr * 0.2 * max(p.shape) ** 0.5)
            else:
                for k, x in zip((0, 1, 2, 3, 5), (p, p.grad, *s, torch.tensor(float(t - 1)))):
                    adam[k].append(x)
        torch._foreach_add_(adam[5], 1)
        torch._fused_adamw_(*adam, amsgrad=False, lr=self.lr_adam * scale, beta1=0.9, beta2=0.97,
                            weight_decay=0.0, eps=1e-8, maximize=False)
        for p in self.params.values():
            p.grad = None
