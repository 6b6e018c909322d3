#!/usr/bin/env python3
"""Measures `tandem bench` and peers' llama-bench in turn on GGUF files, and prints a table.

In each round each program runs once, so that a machine that slows down slows all; the table has medians of
tokens/s, prefill then decode, and the share of the best peer's that tandem reaches.

    scripts/bench_peers.py --tandem build/bin/tandem --peer llama.cpp=/opt/llama.cpp/llama-bench \\
        --peer ik_llama.cpp=/opt/ik/llama-bench -t 2 m-q4_k_m.gguf m-q8_0.gguf
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys


def output_of(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def of_tandem(binary, model, args):
    """Tokens/s of prefill and decode."""
    command = [binary, "bench", "-m", model, "--device", "cpu", "-p", str(args.prompt_tokens), "-r", "1", "--json",
               "-n", str(args.gen_tokens), "-t", str(args.threads), "--activations", args.activations]
    records = [json.loads(line) for line in output_of(command).splitlines() if line.startswith("{")]
    return tuple(next(r["tokens_per_s"]["median"] for r in records if r.get("kind") == kind)
                 for kind in ("prefill", "decode"))


def of_peer(binary, model, args):
    command = [binary, "-m", model, "-p", str(args.prompt_tokens), "-n", str(args.gen_tokens), "-ngl", "0",
               "-t", str(args.threads), "-r", "1", "-o", "json"]
    text = output_of(command)
    records = json.loads(text[text.index("["):])  # some write lines before
    return (next(r["avg_ts"] for r in records if r["n_prompt"] and not r["n_gen"]),
            next(r["avg_ts"] for r in records if r["n_gen"] and not r["n_prompt"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="GGUF")
    parser.add_argument("--tandem", default="build/bin/tandem", metavar="BINARY")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=LLAMA-BENCH")
    parser.add_argument("--activations", default="auto", help="of tandem")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-p", "--prompt-tokens", type=int, default=512)
    parser.add_argument("-n", "--gen-tokens", type=int, default=48)
    parser.add_argument("-t", "--threads", type=int, required=True)
    args = parser.parse_args()
    if any("=" not in peer for peer in args.peer):
        parser.error("--peer: write NAME=PATH, as llama.cpp=/opt/llama.cpp/llama-bench")
    programs = [(*peer.split("=", 1), of_peer) for peer in args.peer] + [("tandem", args.tandem, of_tandem)]
    names = ", ".join(name for name, _, _ in programs)
    print(f"| file | prefill: {names} | decode: the same | tandem / best peer |\n| --- | --- | --- | --- |", flush=True)
    for model in args.models:
        measured = [[] for _ in programs]
        for _ in range(args.rounds):
            for (_, binary, speeds), seen in zip(programs, measured):
                seen.append(speeds(binary, model, args))
        medians = [[statistics.median(one) for one in zip(*seen)] for seen in measured]
        cells = [", ".join(f"{of[i]:.3g}" for of in medians) for i in range(2)]
        shares = [f"{medians[-1][i] / max(of[i] for of in medians[:-1]):.2f}" for i in range(2)] if args.peer else []
        print(f"| {pathlib.Path(model).name} | {cells[0]} | {cells[1]} | {', '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
