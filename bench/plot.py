#!/usr/bin/env python3
"""Draws the roofline of `tandem bench kernels --json` or `bench layer --json`: GFLOP/s over the
FLOPs done for each byte of weights, beside the machine's limits, one panel a number of threads."""

import argparse
import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MARKERS = {"avx512": "o", "avx2": "s", "scalar": "x"}


def draw_roof(axes, limit, lowest, highest):
    """The slanted roof is memory, the level ones are the arithmetic."""
    xs = [lowest * (highest / lowest) ** (i / 200) for i in range(201)]
    for key, label in (("fma_gflops", "FP32 FMA"), ("dot_gflops", "BF16 dot products")):
        if not limit[key]:
            continue
        ys = [min(x * limit["read_gbps"], limit[key]) for x in xs]
        (line,) = axes.plot(xs, ys, linewidth=1)
        axes.annotate(label, (xs[-1], ys[-1]), ha="right", va="bottom", color=line.get_color())


def draw_records(axes, records):
    formats = sorted({r["format"] for r in records})
    colors = dict(zip(formats, plt.colormaps["tab20"].colors))
    seen = set()
    for r in records:
        key = (r["format"], r["variant"])
        axes.plot(
            r["gflops"] / r["gbps"], r["gflops"], MARKERS.get(r["variant"], "d"),
            color=colors[r["format"]], markersize=5, linestyle="none",
            label=None if key in seen else " ".join(key),
        )  # fmt: skip
        seen.add(key)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", help="what --json printed")
    parser.add_argument("image", help="PNG, SVG or PDF to write")
    args = parser.parse_args()
    with open(args.json) as file:
        head, *records = map(json.loads, file)
    if not records:
        parser.error(f"{args.json}: no records")
    limits = head["machine"]["limits"]
    figure, panels = plt.subplots(1, len(limits), figsize=(7 * len(limits), 6), squeeze=False)
    intensities = [r["gflops"] / r["gbps"] for r in records]
    for axes, limit in zip(panels[0], limits):
        draw_roof(axes, limit, min(intensities) / 2, max(intensities) * 2)
        draw_records(axes, [r for r in records if r["threads"] == limit["threads"]])
        axes.set(
            xscale="log", yscale="log", xlabel="FLOPs a byte of weights", ylabel="GFLOP/s",
            title=f"{head['machine']['cpu']}, {limit['threads']} threads",
        )  # fmt: skip
        axes.grid(True, which="both", linewidth=0.3)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.image)


if __name__ == "__main__":
    main()
