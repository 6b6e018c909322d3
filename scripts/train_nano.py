#!/usr/bin/env python3
"""Trains and exports configs/models/tandem-nano, from nothing, with one command:

    python scripts/train_nano.py all

Needs torch, transformers, tokenizers, safetensors, jinja2 and numpy (versions in the model
card) and apt-get for the documentation text. Steps can be run one by one: prepare, train
(resumes from its checkpoint, also with another --steps), lengthen (from what is in --out), eval, export. Work files go to
--work (default build/nano). Runs on a GPU where torch sees one, else on the CPU.
"""

import argparse
import math
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from tokenizers import Tokenizer

from nano import data, export
from nano import lengthen as lengthening
from nano.evaluate import losses, run_suite
from nano.model import Config, HeadLoss, Nano, on_device, row_inputs
from nano.optim import Optimizer
from nano.parallel import Team
from nano.quant import FakeQuant
from nano.text import Template

ROOT = Path(__file__).resolve().parent.parent


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["prepare", "train", "lengthen", "eval", "export", "all"])
    p.add_argument("--work", type=Path, default=ROOT / "build/nano")
    p.add_argument("--out", type=Path, default=ROOT / "configs/models/tandem-nano")
    p.add_argument("--bf16", type=Path, help="export also writes the weights before rounding to FP8, here")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tokens", type=int, default=12_000_000, help="tokens made by prepare")
    p.add_argument("--steps", type=int, default=2200)
    p.add_argument("--decay-from", type=int, default=1300, help="step at which the learning rate begins to fall")
    p.add_argument("--quant-from", type=int, default=1850, help="step from which weights are rounded to FP8")
    p.add_argument("--long-steps", type=int, default=360, help="of lengthen")
    p.add_argument("--batch-tokens", type=int, default=4096, help="over all processes")
    p.add_argument("--lr-muon", type=float, default=0.006)
    p.add_argument("--lr-adam", type=float, default=0.002)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--processes", type=int, help="default 1 on a GPU, else 2, with a core each")
    p.add_argument("--save-every", type=float, default=180, help="seconds")
    p.add_argument("--eval-every", type=int, default=200, help="steps; the suite every other time")
    p.add_argument("--stop-after", type=float, default=math.inf, help="seconds; for trials")
    return p.parse_args()


def schedule(step, args):
    """Warm-up over 50 steps, flat, then linear to almost nothing."""
    if step < args.decay_from:
        return min(1.0, (step + 1) / 50)
    return max(0.01, (args.steps - step) / (args.steps - args.decay_from))


def batch_loss(model, ids, doc, weight, at=None):
    """Sums up what one batch asks for: next token, balance, and MTP on a sixth of the rows. `at`:
    positions, where they are not those within each document."""
    ids, doc, weight = (on_device(a) for a in (ids, doc, weight))
    pos, bias = row_inputs(doc[:, :-1])
    if at is not None:
        pos = on_device(at)[:, :-1]
    counted = weight[:, 1:] > 0
    hidden = model.trunk(ids[:, :-1], pos, bias)
    loss = HeadLoss.apply(hidden[counted], model.lm_head.weight, ids[:, 1:][counted])
    rows = max(1, len(ids) // 6)
    same = doc[:rows, 2:] == doc[:rows, :-2]  # i, i+1 and i+2 lie in one document
    states = model.mtp_states(hidden[:rows, :-1], ids[:rows, 1:-1], pos[:rows, :-1], bias[:rows, :, :-1, :-1])
    picked = counted[:rows, 1:] & same
    mtp = HeadLoss.apply(states[picked], model.lm_head.weight, ids[:rows, 2:][picked])
    balance = sum(m.balance for m in model.moes()) / len(model.moes())
    return loss, mtp, balance


@torch.no_grad()
def update_bias(model, rate):
    """Experts with less than the mean load become likelier, the others less so."""
    for m in model.moes():
        m.gate.e_score_correction_bias += rate * torch.sign(m.load.mean() - m.load)
        m.load.zero_()


@torch.no_grad()
def settle_router(model, rows, steps=150, rate=0.01):
    """After training: moves the correction bias alone, by documentation (the rows of 512). That is a
    twentieth of what the bias has seen so far, and left some experts idle on plain text."""
    model.train()
    n = len(rows.arrays[512][0]) // 4
    for i in range(steps):
        ids, doc, _ = (on_device(a[i % n * 4:][:4].astype("int64")) for a in rows.arrays[512])
        model.trunk(ids, *row_inputs(doc))
        update_bias(model, rate * (1 - i / steps))


def save(path, model, opt, step, log):
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "opt": opt.state, "step": step, "log": log}, part)
    part.rename(path)


def train_process(rank, args, team):
    """What each process of `train` does; the first one also reports, evaluates and saves."""
    team.rank = rank
    torch.set_num_threads(1 if team.size > 1 else 2)
    torch.set_default_device(args.device)
    torch.manual_seed(args.seed)
    batch_tokens = args.batch_tokens // team.size
    rows = data.Rows(args.work, batch_tokens, args.seed)
    tok = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    template = Template(args.out / "chat_template.jinja")
    sets = data.validation(tok, args.work, args.out)
    model = Nano(Config())
    model.train()
    opt = Optimizer(model, args.lr_muon, args.lr_adam)
    path, step, log = args.work / "checkpoint.pt", 0, []
    if path.exists():
        saved = torch.load(path, map_location=args.device)
        model.load_state_dict(saved["model"])
        opt.state, step, log = saved["opt"], saved["step"], saved["log"]
    first, is_new = rank == 0, step < args.steps
    if first:
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
              f"{len(rows) // team.size} batches, from step {step}", flush=True)
    stopping = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.append(True))  # finish the step, then save
    begin = saved_at = mark = time.time()
    sums, n, tokens = [0.0] * 3, 0, 0
    while step < args.steps:
        with FakeQuant(model, step >= args.quant_from):
            loss, mtp, balance = batch_loss(model, *rows.batch(step * team.size + rank))
            (loss + 0.2 * mtp + 0.01 * balance).backward()
        stop = torch.tensor([float(bool(stopping) or time.time() - begin > args.stop_after)])
        team.average([p.grad for p in model.parameters()] + [m.load for m in model.moes()] + [stop])
        scale = schedule(step, args)
        step += 1
        opt.step(step, scale)
        update_bias(model, 0.002 * max(scale, 0.1))
        if stop > 0:  # of any process
            break
        if not first:
            continue
        sums = [a + b.item() for a, b in zip(sums, (loss, mtp, balance))]
        n, tokens = n + 1, tokens + args.batch_tokens
        if step % 20 == 0:
            now = time.time()
            print(f"step {step} loss {sums[0] / n:.3f} mtp {sums[1] / n:.3f} balance {sums[2] / n:.3f} "
                  f"lr {scale:.2f} {tokens / (now - mark):.0f} tokens/s {now - begin:.0f} s", flush=True)
            sums, n, tokens, mark = [0.0] * 3, 0, 0, now
        if step % args.eval_every == 0 or step == args.steps:
            with FakeQuant(model, step >= args.quant_from):
                held, load = losses(model, sets)
                log.append({"step": step, "tokens": step * args.batch_tokens, **held})
                print(f"step {step} held-out {held} load {load}", flush=True)
                if step % (2 * args.eval_every) == 0 or step == args.steps:
                    log[-1]["suite"] = report(*run_suite(model, tok, template, args.out / "suite.jsonl"))
            mark, tokens = time.time(), 0
        if time.time() - saved_at > args.save_every:
            save(path, model, opt, step, log)
            saved_at = time.time()
    if first and is_new:
        if step == args.steps:
            settle_router(model, rows)
        save(path, model, opt, step, log)


def train(args):
    size = args.processes or (1 if args.device.startswith("cuda") else 2)
    n_values = sum(p.numel() for p in Nano(Config()).parameters()) + Config().experts * Config().layers + 1
    team = Team(size, n_values if size > 1 else 0)
    if size == 1:
        train_process(0, args, team)
    else:
        mp.spawn(train_process, (args, team), nprocs=size)


def report(score, wrong, n_wrong=8):
    total = [sum(x) for x in zip(*score.values())]
    print(f"suite {total[0]}/{total[1]}: " + ", ".join(f"{k} {a}/{b}" for k, (a, b) in sorted(score.items())))
    for item in wrong[:n_wrong]:
        print("  wrong:", *map(repr, item), flush=True)
    return total[0] / total[1]


def lengthen(args):
    """Goes on from what is in --out, with --long-steps steps; see nano/lengthen.py."""
    torch.manual_seed(args.seed)
    tok = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    rows = lengthening.Rows(ROOT, args.work, tok, Template(args.out / "chat_template.jinja"), args.seed)
    model = Nano(Config())
    lengthening.load_export(model, args.out)
    model.train()
    opt = Optimizer(model, args.lr_muon / 6, args.lr_adam / 6)
    begin, sums = time.time(), [[0.0, 0], [0.0, 0]]
    for step in range(args.long_steps):
        with FakeQuant(model):
            loss, mtp, balance = batch_loss(model, *rows.batch(step))
            (loss + 0.2 * mtp + 0.01 * balance).backward()
        scale = min(1.0, (step + 1) / 20) * max(0.01, 1 - step / args.long_steps)
        opt.step(step + 1, scale)
        update_bias(model, 0.0005 * scale)
        total = sums[step % 2]
        total[0], total[1] = total[0] + loss.item(), total[1] + 1
        if step % 20 == 19:
            print(f"step {step + 1} loss, long {sums[0][0] / sums[0][1]:.3f} short {sums[1][0] / sums[1][1]:.3f} "
                  f"{time.time() - begin:.0f} s", flush=True)
            sums = [[0.0, 0], [0.0, 0]]
    lengthening.average(model, args.out)
    save(args.work / "checkpoint.pt", model, opt, args.long_steps, [])


def load_model(args):
    saved = torch.load(args.work / "checkpoint.pt", map_location=args.device)
    model = Nano(Config())
    model.load_state_dict(saved["model"])
    return model.eval(), saved


def evaluate(args):
    model, saved = load_model(args)
    tok = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    template = Template(args.out / "chat_template.jinja")
    sets = data.validation(tok, args.work, args.out)
    for quantized in (False, True):
        with FakeQuant(model, quantized):
            print("step", saved["step"], "FP8" if quantized else "float32", *losses(model, sets))
            if quantized:
                report(*run_suite(model, tok, template, args.out / "suite.jsonl"), n_wrong=50)


def main():
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_default_device(args.device)
    if args.what in ("prepare", "all"):
        data.prepare(ROOT, args.work, args.out, args.tokens, args.seed)
    if args.what in ("train", "all"):
        train(args)
    if args.what in ("lengthen", "all"):
        if args.what == "all":
            export.write(load_model(args)[0], args.out)
        lengthen(args)
    if args.what == "eval":
        evaluate(args)
    if args.what in ("export", "all"):
        model, _ = load_model(args)
        export.write(model, args.out)
        if args.bf16:
            export.write(model, args.bf16, fp8=False)
            for name in ("tokenizer.json", "chat_template.jinja"):
                shutil.copy(args.out / name, args.bf16 / name)


if __name__ == "__main__":
    main()
