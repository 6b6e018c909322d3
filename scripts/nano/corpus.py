"""Documentation text for the corpus, from pinned Debian packages.

Each source names its package, version, licence and the members that are read.
`load(work)` downloads what is missing with apt-get and returns plain paragraph groups
("passages") of a few hundred characters each.
"""

import gzip
import re
import subprocess
from pathlib import Path

# package, version, licence, globs below the package root
SOURCES = [
    ("python3.11-doc", "3.11.2-6+deb12u*", "PSF-2.0 (text), 0BSD (examples)",
     ["usr/share/doc/python3.11/html/_sources/tutorial/*.txt",
      "usr/share/doc/python3.11/html/_sources/faq/*.txt",
      "usr/share/doc/python3.11/html/_sources/howto/*.txt",
      "usr/share/doc/python3.11/html/_sources/glossary.rst.txt"]),
    ("debian-policy", "4.6.2.0", "GPL-2+", ["usr/share/doc/debian-policy/policy.txt.gz",
                                            "usr/share/doc/debian-policy/fhs/fhs-3.0.txt.gz"]),
    ("debian-faq", "11.1", "GPL-2+", ["usr/share/doc/debian/FAQ/debian-faq.en.txt.gz"]),
    ("developers-reference", "12.18", "GPL-2+",
     ["usr/share/developers-reference/developers-reference.txt.gz"]),
    ("debian-reference-en", "2.100", "GPL-2+",
     ["usr/share/debian-reference/debian-reference.en.txt.gz"]),
]

# The held-out text is shipped, so it comes from the one source with a permissive licence.
SHIPPABLE = "python3.11-doc"

PASSAGE_CHARS = 900


def fetch(package: str, version: str, work: Path) -> Path:
    """Unpacks the package below work/debs and returns its root."""
    root = work / "debs" / package
    if root.exists():
        return root
    debs = work / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=debs, check=True)
    deb = next(debs.glob(f"{package}_*.deb"))
    part = root.with_suffix(".part")
    subprocess.run(["dpkg-deb", "-x", str(deb), str(part)], check=True)
    part.rename(root)
    return root


def read_text(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return raw.decode("utf-8", "replace")


def clean(text: str) -> str:
    """Drops reStructuredText roles, directives and rules; keeps prose and code."""
    text = re.sub(r":[a-z:]+:`~?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"``?([^`]+)``?_{0,2}", r"\1", text)
    lines = []
    for line in text.replace("\r", "").split("\n"):
        if re.match(r"^\s*\.\. ", line) or re.match(r"^\s*:[a-z-]+:", line):
            continue
        if re.match(r"^\s*([=\-~*^#\".+|_])\1{3,}", line):
            continue
        if re.search(r"\.{5,}", line):  # table of contents
            continue
        lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def passages(text: str):
    """Consecutive paragraphs, wrapped prose joined, about PASSAGE_CHARS each."""
    group, size = [], 0
    for para in text.split("\n\n"):
        if not para.strip():
            continue
        if not re.search(r"^\s{2,}\S", para, re.M) or "   " not in para.strip():
            para = re.sub(r"\s*\n\s*", " ", para.strip())
        letters = sum(c.isalpha() or c == " " for c in para)
        if len(para) < 20 or letters < 0.7 * len(para):
            continue
        group.append(para)
        size += len(para)
        if size >= PASSAGE_CHARS:
            yield "\n\n".join(group)
            group, size = [], 0
    if size > 200:
        yield "\n\n".join(group)


def load(work: Path) -> list[tuple[str, str]]:
    """(package, passage) of every source, in a fixed order."""
    out = []
    for package, version, _licence, globs in SOURCES:
        root = fetch(package, version, work)
        for pattern in globs:
            found = sorted(root.glob(pattern))
            if not found:
                raise SystemExit(f"{package}: nothing matches {pattern}")
            for path in found:
                out.extend((package, p) for p in passages(clean(read_text(path))))
    return out
