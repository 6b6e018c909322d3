"""Compares an exported checkpoint with transformers on the same dequantized weights.

    python -m nano.check_export MODEL_DIR CHECKPOINT.pt        (from scripts/)

The largest difference of any logit must stay below 1e-4."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from .model import Config, Nano, row_inputs
from .quant import FakeQuant, dequantize


def reference(directory: Path) -> DeepseekV3ForCausalLM:
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    config["torch_dtype"] = "float32"
    n_layers = config["num_hidden_layers"]
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).float().eval()
    stored = load_file(directory / "model.safetensors")
    plain = {}
    for name, t in stored.items():
        if name.endswith("_scale_inv") or f".layers.{n_layers}." in name:
            continue
        scale = stored.get(name + "_scale_inv")
        plain[name] = dequantize(t, scale) if scale is not None else t.float()
    wanted = model.state_dict()
    for name in list(wanted):  # newer versions stack the experts of a layer
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and name not in plain:
            base = name.rsplit(".", 1)[0]
            each = range(config["n_routed_experts"])
            if name.endswith("gate_up_proj"):
                plain[name] = torch.stack([torch.cat((plain.pop(f"{base}.{e}.gate_proj.weight"),
                                                      plain.pop(f"{base}.{e}.up_proj.weight"))) for e in each])
            else:
                plain[name] = torch.stack([plain.pop(f"{base}.{e}.down_proj.weight") for e in each])
    model.load_state_dict(plain, strict=True)
    return model


@torch.no_grad()
def main(directory: Path, checkpoint: Path):
    nano = Nano(Config())
    nano.load_state_dict(torch.load(checkpoint)["model"])
    nano.eval()
    hf = reference(directory)
    ids = torch.randint(0, nano.c.vocab, (2, 200), generator=torch.Generator().manual_seed(0))
    pos, bias = row_inputs(torch.ones_like(ids))
    with FakeQuant(nano):
        ours = nano.lm_head(nano.trunk(ids, pos, bias))
    theirs = hf(ids).logits
    worst = float((ours - theirs).abs().max())
    print(f"logits up to {float(theirs.abs().max()):.2f}, largest difference {worst:.2e}")
    if worst > 1e-4:
        raise SystemExit("the export disagrees with transformers")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
