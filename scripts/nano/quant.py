"""FP8 E4M3 in blocks of 128 x 128 with one float32 scale each, as DeepSeek-V3 publishes it."""

import torch

BLOCK, MAX = 128, 448.0


def is_quantized(name: str, p: torch.Tensor) -> bool:
    """Linear weights are; embeddings, head, router, norms and the correction bias are not."""
    return p.dim() >= 2 and not any(s in name for s in ("embed_tokens", "lm_head", "gate.weight", "shared_head"))


def quantize(w: torch.Tensor):
    """w [..., R, C], R and C multiples of 128 -> (e4m3 codes, scales [..., R/128, C/128])."""
    r, c = w.shape[-2:]
    blocks = w.float().unflatten(-1, (c // BLOCK, BLOCK)).unflatten(-3, (r // BLOCK, BLOCK))
    scale = blocks.abs().amax((-3, -1)).clamp_min(1e-12) / MAX
    codes = (blocks / scale[..., :, None, :, None]).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-4, -3).flatten(-2, -1), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor):
    r, c = codes.shape[-2:]
    blocks = codes.float().unflatten(-1, (c // BLOCK, BLOCK)).unflatten(-3, (r // BLOCK, BLOCK))
    return (blocks * scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1)


class FakeQuant:
    """with FakeQuant(model): weights are what the export will hold; masters return at the end."""

    def __init__(self, model, on=True):
        self.params = [(n, p) for n, p in model.named_parameters() if on]

    @torch.no_grad()
    def __enter__(self):
        self.masters = [p.detach().clone() for _, p in self.params]
        for n, p in self.params:
            p.copy_(dequantize(*quantize(p)) if is_quantized(n, p) else p.bfloat16().float())

    @torch.no_grad()
    def __exit__(self, *_):
        for (_, p), master in zip(self.params, self.masters):
            p.copy_(master)
