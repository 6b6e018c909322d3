#!/usr/bin/env python3
"""Draws the roofline of `tandem bench kernels --json` or `bench layer --json`: GFLOP/s over the
FLOPs done for each byte of weights, beside the machine's limits, one panel a number of threads
(needs matplotlib). Of a folder of results, bench/results, the README's chart."""

import argparse
import json
from pathlib import Path

PEERS = {"llama.cpp": "#8c959f", "ik_llama.cpp": "#d4a72c", "tandem": "#0969da"}
STYLE = "text { font: 12px sans-serif; fill: #1f2328 } .title { font-weight: bold } .value { font-size: 9px }"
HEIGHT = 200  # of a panel's tallest bar

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


def draw_records(axes, records, colors):
    seen = set()
    for r in records:
        key = (r["format"], r["variant"])
        axes.plot(
            r["gflops"] / r["gbps"], r["gflops"], MARKERS.get(r["variant"], "d"),
            color=colors[r["format"]], markersize=5, linestyle="none",
            label=None if key in seen else " ".join(key),
        )  # fmt: skip
        seen.add(key)


def draw_roofline(source, image):
    import matplotlib.pyplot as plt

    head, *records = map(json.loads, source.read_text().splitlines())
    limits = head["machine"]["limits"]
    figure, panels = plt.subplots(1, len(limits), figsize=(7 * len(limits), 6), squeeze=False)
    intensities = [r["gflops"] / r["gbps"] for r in records]
    colors = dict(zip(sorted({r["format"] for r in records}), plt.colormaps["tab20"].colors))
    for axes, limit in zip(panels[0], limits):
        draw_roof(axes, limit, min(intensities) / 2, max(intensities) * 2)
        draw_records(axes, [r for r in records if r["threads"] == limit["threads"]], colors)
        axes.set(
            xscale="log", yscale="log", xlabel="FLOPs a byte of weights", ylabel="GFLOP/s",
            title=f"{head['machine']['cpu']}, {limit['threads']} threads",
        )  # fmt: skip
        axes.grid(True, which="both", linewidth=0.3)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(image)


def text(x, y, words, kind="", anchor="middle"):
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def draw_panel(x, title, groups, highest, bar=15, number=str):
    """Groups of bars beside each other: {label: {peer: value}}."""
    yield text(x, 20, title, "title", "start")
    for label, values in groups.items():
        yield text(x + bar * len(values) / 2, HEIGHT + 60, label)
        for peer, value in values.items():
            height = round(HEIGHT * value / highest)
            y = HEIGHT + 44 - height
            yield f'<rect x="{x}" y="{y}" width="{bar - 2}" height="{height}" fill="{PEERS[peer]}"/>'
            yield text(x + bar / 2 - 1, y - 3, number(value), "value")
            x += bar
        x += 14


def draw_chart(folder):
    """Rates beside those of others on a CPU; of streamed prompts, the share of the link on a GPU."""
    _, *rows = map(json.loads, (folder / "cpu-peers.jsonl").read_text().splitlines())
    out = []
    for x, kind, title in ((10, "prefill", "prefill of 512 tokens, tokens/s"), (390, "decode", "decode, tokens/s")):
        groups = {row["file"]: row[kind] for row in rows if "llama.cpp" in row[kind]}
        out += draw_panel(x, title, groups, max(max(v.values()) for v in groups.values()))
    paths = map(json.loads, (folder / "h100-paths.jsonl").read_text().splitlines())
    streams = {
        f"{path['tokens'] // 1024}K": {"tandem": path["share_of_pinned_bandwidth"]}
        for path in paths
        if path.get("path") == "stream" and not path["streamed_dense_bytes"]
    }
    out += draw_panel(770, "H100: share of the PCIe link", streams, 1, 44, "{:.2f}".format)
    for i, (peer, color) in enumerate(PEERS.items()):
        out.append(f'<rect x="{10 + 110 * i}" y="276" width="10" height="10" fill="{color}"/>')
        out.append(text(25 + 110 * i, 285, peer, anchor="start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 296" width="960" height="296"><style>{STYLE}</style>'
    return "\n".join([head, '<rect width="960" height="296" fill="#ffffff"/>', *out, "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="what --json printed, or bench/results")
    parser.add_argument("image", type=Path, help="PNG, SVG or PDF to write; SVG for the chart")
    args = parser.parse_args()
    if args.json.is_dir():
        args.image.write_text(draw_chart(args.json))
    else:
        draw_roofline(args.json, args.image)


if __name__ == "__main__":
    main()
