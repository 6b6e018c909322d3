#!/usr/bin/env python3
"""Keeps retired words out: identifiers that had a name of their own for what the field has a word for.

src/README.md has the glossary. Prints each use as file:line with the word to use instead; exit status
1 on a use, 2 when there is nothing to check. --self-test puts every retired word into a synthetic
file and expects it to be found.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

# retired identifier (a whole word; * ends a prefix) -> what to say. The list only grows.
RETIRED = {
    "TD_SUBMIT_READ_ONLY": "TD_SUBMIT_PREFILL_ONLY",
    "TD_DONE_READ": "TD_DONE_PREFILLED",
    "TD_READY_OWN_PAGES": "TD_READY_DEVICE_KV",
    "td_way": "td_gemv_schedule",
    "TD_WAY_*": "TD_GEMV_SEQUENTIAL, TD_GEMV_INTERLEAVED",
    "td_kernels_prompt_pays": "td_kernels_use_gemm",
    "linear_q4_a8*": "linear_w4a8",
    "vi_turn*": "vi_transpose",
    "turn_some": "transpose_rows",
    "td_team*": "td_thread_pool",
    "td_lease": "td_thread_split",
    "has_own_memory": "is_discrete",
    "n_own_layers": "n_gpu_expert_layers",
    "td_engine_side": "td_moe_offload",
    "td_engine_part": "td_microbatch",
    "td_engine_given*": "td_engine_offload_input",
    "begin_aside": "begin_offload",
    "queue_aside": "td_moe_offload_enqueue",
    "let_aside_go": "td_moe_offload_release",
    "take_sum": "receive_sum",
    "td_engine_hand_over": "td_engine_copy_outputs",
    "td_halves*": "td_dual_batch",
    "cut_in_two": "split_microbatches",
    "n_flat": "break_even_tokens",
    "td_pace*": "td_prefill_budget",
    "rest_ns": "decode_credit_ns",
    "n_answers": "n_decode",
    "n_unread": "n_prefill_left",
    "n_to_read": "n_to_prefill",
    "td_outlet*": "td_front_link",
    "td_place": "td_tensor_spec or td_page_range",
    "td_binder": "td_tensor_binder",
    "td_parts*": "td_output_parser",
    "with_calls": "parse_tool_calls",
    "td_guard*": "td_framing",
    "td_pending": "td_front_request",
    "td_peer": "td_worker_handle",
    "wait_again": "requeue",
    "goes_on": "should_continue",
    "blame": "crash_score",
    "on_trial": "on_probation",
    "td_kv_tier*": "td_kv_disk",
    "td_kv_park": "td_kv_suspend",
    "td_ids*": "td_token_ids",
}
SUFFIXES = {".c", ".h", ".inc", ".cu", ".cuh", ".cpp", ".txt", ".cmake", ".md"}


def pattern_of(word):
    return r"\b" + re.escape(word.rstrip("*")) + (r"\w*" if word.endswith("*") else r"\b")


PATTERNS = [(re.compile(pattern_of(word)), word) for word in RETIRED]


def check(root, files):
    """(number of files, list of uses)."""
    uses = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, word in PATTERNS:
                found = pattern.search(line)
                if found:
                    path = file.relative_to(root).as_posix()
                    uses.append(f"{path}:{number}: {found.group()}: say {RETIRED[word]}")
    return len(files), uses


def tracked(root):
    names = subprocess.run(
        ["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    data = ("configs/models/",)
    return [
        root / name
        for name in names
        if pathlib.PurePath(name).suffix in SUFFIXES
        and not name.startswith(data)
        and (root / name).is_file()
    ]


def self_test():
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "a.c"
        words = [word.replace("*", "_x") for word in RETIRED]
        lines = words + [f"not_{words[0]}", "a prompt is prefilled, then decoded"]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        _, uses = check(pathlib.Path(directory), [file])
    wrong = []
    for number, word in enumerate(words, 1):
        if not any(use.startswith(f"a.c:{number}: {word}: ") for use in uses):
            wrong.append(f"{word} is not found")
    wrong += [use for use in uses if int(use.split(":")[1]) > len(words)]
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test:
        wrong = self_test()
        print("\n".join(wrong) or f"{len(RETIRED)} retired words found")
        return 1 if wrong else 0
    root = pathlib.Path(__file__).resolve().parent.parent
    n_files, uses = check(root, tracked(root))
    print("\n".join([*uses, f"{n_files} files, {len(uses)} uses of retired words"]))
    if n_files == 0:
        print(f"nothing to check under {root}", file=sys.stderr)
        return 2
    return 1 if uses else 0


if __name__ == "__main__":
    sys.exit(main())
