#!/usr/bin/env python3
"""Checks who includes whom: folder ranks, fences between trees, fences around vendor headers; and
that the environment is read in one place.

Reads the #include lines of src/, kernels/ and include/; prints each breach as file:line with the
rule it breaks. Exit status 1 on a breach, 2 when there is nothing to check. --self-test breaks
every rule in a synthetic tree and expects each breach to be found.
"""

import argparse
import pathlib
import re
import sys
import tempfile

# A folder of src/ includes lower ranks, and itself.
RANKS = [
    ["base"],
    ["options", "shm", "gguf"],
    ["model", "text", "kv", "hub", "image"],
    ["device"],
    ["comm"],
    ["engine", "sched"],
    ["runtime"],
    ["worker", "http", "api"],
    ["front"],
    ["bench"],
    ["cli"],
]
RANK = {folder: rank for rank, folders in enumerate(RANKS) for folder in folders}

# (folder, what it must not include, why) where the ranks alone would allow it.
SEPARATE = [
    ("src/sched", "src/device", "sched never sees a device"),
    ("src/sched", "src/comm", "sched never sees a device"),
    ("src/worker", "src/sched", "sched and worker share only include/tandem/wire.h"),
    ("src/engine/attn", "src/engine/experts", "attention does not know who computes the experts"),
    ("src/device/cpu", "src/device/cuda", "the devices do not know each other"),
    ("src/device/cuda", "src/device/cpu", "the devices do not know each other"),
    ("kernels/cpu", "kernels/cuda", "the devices do not know each other"),
    ("kernels/cuda", "kernels/cpu", "the devices do not know each other"),
]

# Vendor headers by file name, and the folders in which they may stand.
VENDORS = [
    (r"uv\.h|llhttp\.h", ["src/http", "src/front", "src/bench"]),
    (r"cJSON\.h", ["src/api", "src/text", "src/model", "src/base", "src/options", "src/hub"]),
    (r"pcre2\w*\.h", ["src/text", "src/model"]),
    (r"(cuda|cublas|nv)\w*\.h|mma\.h|cooperative_groups\.h", ["src/device/cuda", "kernels/cuda"]),
    (r"nccl\w*\.h", ["src/comm"]),
    (r"histedit\.h", ["src/cli"]),
    (r"curl\.h", ["src/hub"]),
    (r"png\.h|jpeglib\.h|jerror\.h|decode\.h", ["src/image"]),
]

# Kernels do no allocation, logging, threading or environment: the rest of the C library is not
# for them. Vendor headers of the GPU are fenced above.
KERNEL_SYSTEM = re.compile(
    r"(assert|cpuid|float|limits|math|stdalign|stdbool|stddef|stdint|string|\w*intrin|arm_\w+)\.h"
    r"|(cuda|cublas|nv)\w*\.(h|hpp)|mma\.h|cooperative_groups\.h"
)

# The one file that reads the environment.
ENVIRONMENT = "src/base/env.h"
GETENV = re.compile(r"\b(secure_)?getenv *\(")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\b\s*(?:"([^"\n]*)"|<([^>\n]*)>|.*)', re.M)
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
SUFFIXES = {".c", ".h", ".inc", ".cu", ".cuh", ".cpp", ".hpp"}


def without_comments(text):
    """Blanks comments and keeps line numbers; strings stay as they are."""

    def blank(match):
        found = match.group()
        return found if found[0] == '"' else re.sub(r"[^\n]", " ", found)

    return COMMENT.sub(blank, text)


def includes(text):
    """(line, header, is_quoted); header is None for an include that is not written out."""
    text = without_comments(text)
    for match in INCLUDE.finditer(text):
        quoted, angled = match.groups()
        header = quoted if quoted is not None else angled
        yield text.count("\n", 0, match.start()) + 1, header, quoted is not None


def resolve(root, file, header):
    """The project file that a header names, relative to root, or None."""
    for base in (file.parent, root / "include", root / "src", root):
        path = (base / header).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return None


def inside(path, folder):
    return path.startswith(folder + "/")


def vendor_breach(path, header):
    name = header.rsplit("/", 1)[-1]
    for pattern, folders in VENDORS:
        if re.fullmatch(pattern, name) and not any(inside(path, f) for f in folders):
            return f"{name} is fenced in {', '.join(folders)}"
    return None


def rank_breach(path, target):
    """Both in src/: only lower ranks or one's own folder."""
    own, other = path.split("/")[1], target.split("/")[1]
    for folder, name in ((own, path), (other, target)):
        if folder not in RANK:
            return f"{name}: folder src/{folder} has no rank: give it one in src/README.md and here"
    if own != other and RANK[other] >= RANK[own]:
        return (
            f"{own} (rank {RANK[own]}) must not include {other} (rank {RANK[other]}): "
            "only lower ranks and its own folder"
        )
    return None


def project_breach(path, target):
    for folder, forbidden, why in SEPARATE:
        if inside(path, folder) and inside(target, forbidden):
            return why
    if inside(path, "include"):
        return None if inside(target, "include") else "include/ must not depend on other trees"
    if inside(path, "kernels"):
        if inside(target, "kernels") or inside(target, "include/tandem"):
            return None
        return "kernels/ includes only include/tandem/ and itself"
    if inside(target, "kernels"):
        ok = inside(path, "src/device")
        return None if ok else "only src/device/ includes kernels/: others use include/tandem/"
    if inside(target, "src"):
        return rank_breach(path, target)
    return None if inside(target, "include") else "src/ includes only src/, include/ and kernels/"


def breach(root, file, path, header, quoted):
    if header is None:
        return "write the header's name out, so that it can be checked"
    target = resolve(root, file, header)
    if target:
        return project_breach(path, target)
    if quoted:
        return f'"{header}" is no file of this project'
    found = vendor_breach(path, header)
    if not found and inside(path, "kernels") and not KERNEL_SYSTEM.fullmatch(header):
        found = f"<{header}> in kernels/: no allocation, logging, threading or environment there"
    return found


def check(root):
    """(number of files, list of breaches)."""
    root = root.resolve()
    trees = [root / tree for tree in ("src", "kernels", "include")]
    files = sorted(f for tree in trees for f in tree.rglob("*") if f.suffix in SUFFIXES)
    breaches = []
    for file in files:
        path = file.relative_to(root).as_posix()
        text = file.read_text(encoding="utf-8")
        for match in GETENV.finditer(without_comments(text)):
            if path != ENVIRONMENT:
                line = text.count("\n", 0, match.start()) + 1
                breaches.append(f"{path}:{line}: the environment is read in {ENVIRONMENT}")
        for line, header, quoted in includes(text):
            rule = breach(root, file, path, header, quoted)
            if rule:
                breaches.append(f"{path}:{line}: {rule}")
    return len(files), breaches


# path -> (its text, what the checker must say of it; None: nothing).
SELF_TEST = {
    "include/tandem.h": ("#include <stdint.h>\n", None),
    "include/tandem/wire.h": ('#include "tandem/types.h"\n', None),
    "include/tandem/types.h": ("", None),
    "include/tandem/bad.h": ('#include "base/log.h"\n', "include/ must not depend"),
    "src/base/log.h": ("#include <stdlib.h>\n", None),
    "src/base/env.h": ("#include <stdlib.h>\n getenv(name)\n", None),
    "src/base/home.c": ('// getenv(name)\ngetenv("HOME")\n', "the environment is read in"),
    "src/base/up.c": ('\n#include "options/options.h"\n', "base (rank 0) must not include options"),
    "src/options/options.h": ('#include "base/log.h"\n#include <cjson/cJSON.h>\n', None),
    "src/shm/ring.c": ('#include "options/options.h"\n', "shm (rank 1) must not include options"),
    "src/kv/kv.h": ('#include "tandem/wire.h"\n', None),
    "src/kv/kv.c": ('#include "kv.h"\n// #include "cli/a.h"\n/*\n#include "cli/a.h"\n*/\n', None),
    "src/image/jpeg.c": ("#include <jpeglib.h>\n", None),
    "src/api/picture.c": ("#include <png.h>\n", "png.h is fenced"),
    "src/text/bpe.c": ("#include <pcre2.h>\n", None),
    "src/text/json.c": ("  #  include <uv.h> // loop\n", "uv.h is fenced"),
    "src/model/split.c": ('#include "pcre2.h"\n', "is no file of this project"),
    "src/device/device.h": ("", None),
    "src/device/cpu/cpu.h": ('#include "device/device.h"\n#include "kernels/decl.h"\n', None),
    "src/device/cuda/cuda.h": (
        '#include <cuda_runtime.h>\n#include "device/cpu/cpu.h"\n',
        "know each other",
    ),
    "src/comm/nccl.c": ("#include <nccl.h>\n", None),
    "src/engine/run.c": (
        '#include "device/device.h"\n#include "kernels/decl.h"\n',
        "only src/device/ includes",
    ),
    "src/engine/experts/ranks.h": ('#include "device/device.h"\n', None),
    "src/engine/attn/gqa.c": (
        '#include "engine/experts/ranks.h"\n',
        "attention does not know",
    ),
    "src/engine/gpu.c": ("#include <cublas_v2.h>\n", "cublas_v2.h is fenced"),
    "src/sched/sched.h": ('#include "kv/kv.h"\n#include "device/device.h"\n', "sched never sees"),
    "src/worker/loop.c": (
        '#include "engine/run.c"\n#include "sched/sched.h"\n',
        "share only include/tandem",
    ),
    "src/worker/front.c": ('#include "http/http.h"\n', "worker (rank 7) must not include http"),
    "src/http/http.h": ("#include <uv.h>\n#include <llhttp.h>\n", None),
    "src/http/json.c": ("#include <cjson/cJSON.h>\n", "cJSON.h is fenced"),
    "src/api/chat.c": ('#include "front/serve.h"\n', "api (rank 7) must not include front"),
    "src/front/serve.h": ('#include "api/chat.c"\n#include "worker/loop.c"\n#include <uv.h>\n', None),
    "src/cli/macro.c": ("#include HEADER\n", "write the header's name out"),
    "src/stray/a.c": ('#include "base/log.h"\n', "has no rank"),
    "kernels/decl.h": (
        '#include "tandem/types.h"\n#include <immintrin.h>\n#include <string.h>\n',
        None,
    ),
    "kernels/cpu/scalar/log.c": ('#include "base/log.h"\n', "kernels/ includes only"),
    "kernels/cpu/scalar/heap.c": ("#include <stdlib.h>\n", "no allocation"),
    "kernels/cuda/gemm.cu": (
        '#include <cuda_bf16.h>\n#include "kernels/cpu/scalar/heap.c"\n',
        "know each other",
    ),
}


def self_test():
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        if check(root) != (0, []):
            return ["an empty tree is not empty"]
        for path, (text, _) in SELF_TEST.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        _, breaches = check(root)
    wrong = []
    for path, (text, expected) in SELF_TEST.items():
        found = [b for b in breaches if b.startswith(path + ":")]
        # The offending line is the last one of each text.
        prefix = f"{path}:{text.count(chr(10))}: "
        if expected is None and found:
            wrong.append(f"{path}: should be fine, but: {found}")
        elif expected is not None and not (
            len(found) == 1 and found[0].startswith(prefix) and expected in found[0]
        ):
            wrong.append(f"{path}: expected one breach, '{prefix}...{expected}', found {found}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    if args.self_test:
        wrong = self_test()
        print("\n".join(wrong) or f"{len(SELF_TEST)} synthetic files judged rightly")
        return 1 if wrong else 0
    n_files, breaches = check(pathlib.Path(args.root))
    for text in breaches:
        print(text)
    print(f"{n_files} files, {len(breaches)} breaches")
    if n_files == 0:
        print(f"nothing to check under {args.root}", file=sys.stderr)
        return 2
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
