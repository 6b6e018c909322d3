"""What the READMEs name is there: files, folders, sections; and the drawing is that of its text."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_asan

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
PAGES = [ROOT / name for name in TRACKED if name.endswith(".md") and "/data/" not in name]
FILES = {Path(name).name for name in TRACKED}
FOLDERS = {parent.name for name in TRACKED for parent in Path(name).parents}
# A file or folder in code style: `src/base/log.h`, `front/routes.h`, `scripts/gpu/`.
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:c|h|cu|cuh|py|sh|inc|md|cmake))`")
# A source file named without it: (kv/pool.c), | framing.c |.
BARE = re.compile(r"(?<![\w./*`-])([a-z]\w*(?:/\w+)*\.(?:c|h|cu|cuh|py|sh|inc))(?![\w/*`])")
PLACEHOLDER = re.compile(r"[A-Z]{2}|\b[XN]\b|\*|^[a-z]+/(?:plain|json|event)|^(?:v1|api|etc|dev|proc|tmp|sys)/|^[A-Za-z]+/[A-Z]|build|OUT/")
# What is made or published elsewhere.
ELSEWHERE = {"uv.h", "llhttp.h", "cJSON.h", "curl.h", "nccl.h"}


def slug(heading):
    """The anchor that a heading has on a forge."""
    text = re.sub(r"[`*]|\[|\]\([^)]*\)", "", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


def resolves(name, page):
    """Relative to the page, to the project, or to a folder that the page's text is about."""
    bases = [page.parent, ROOT, ROOT / "src", ROOT / "kernels", ROOT / "kernels/cpu", ROOT / "tests", ROOT / "include", ROOT / "src/model"]
    if any((base / name).exists() for base in bases):
        return True
    return name in FILES or (name.count("/") == 1 and name[:-1] in FOLDERS)


@pytest.mark.skipif(not PAGES, reason="no git here lists the pages")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, section = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            wrong.append(target)
        elif section and section not in map(slug, re.findall(r"^#+ (.*)$", file.read_text(), re.M)):
            wrong.append(target)
    for name in NAMED.findall(prose) + BARE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)):
        if name not in ELSEWHERE and not PLACEHOLDER.search(name) and not resolves(name, page):
            wrong.append(name)
    assert not wrong, f"{page.relative_to(ROOT)} names what is not there"


def test_a_missing_name_is_noticed(tmp_path):
    assert not resolves("src/base/no_such_file.h", ROOT / "README.md")
    assert resolves("base/log.h", ROOT / "src/README.md")
    assert BARE.findall("| a.c | x/b.h (c.py), `d.c`") == ["a.c", "x/b.h", "c.py"]
    assert slug("Will it fit, and how fast?") == "will-it-fit-and-how-fast"


def test_the_drawing_is_that_of_its_text(tmp_path):
    source = ROOT / "src/architecture.txt"
    subprocess.run([sys.executable, ROOT / "scripts/draw.py", source, tmp_path / "a.svg"], check=True)
    assert (tmp_path / "a.svg").read_text() == source.with_suffix(".svg").read_text(), "run scripts/draw.py"


def test_the_chart_is_that_of_the_results(tmp_path):
    subprocess.run([sys.executable, ROOT / "bench/plot.py", ROOT / "bench/results", tmp_path / "a.svg"], check=True)
    assert (tmp_path / "a.svg").read_text() == (ROOT / "bench/chart.svg").read_text(), "run bench/plot.py bench/results bench/chart.svg"


def planned(tandem_bin, shape, form, *more):
    options = ["plan", "-m", f"someone/{shape}", "--format", form, "--machine", "desktop-64gb", "--json", *more]
    return json.loads(subprocess.run([tandem_bin, *options], capture_output=True, text=True, check=True).stdout)


def test_models_of_the_readme_have_the_sizes_of_their_shapes(tandem_bin):
    known = {path.stem for path in (ROOT / "configs/shapes").glob("*.json")}
    rows = re.findall(r"^\| (\S.*?) \| ([\d.]+) B \([\d.]+ B\) \| (.*?) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) == 6
    for names, total, cells in rows:
        name = next(path for path in known if path == names.split(", ")[0].replace("4.6", "4.7").replace(" ", "-"))
        *sizes, gpu, _ = (float(cell.split()[0]) for cell in cells.split(" | "))
        for form, size in zip(["bf16", "fp8-b128", "int4-g128"], sizes):
            facts = planned(tandem_bin, name.lower(), form)
            assert abs(facts["params"] / 1e9 - float(total)) < 0.55, name
            assert facts["weight_bytes"] / 2**30 == pytest.approx(size, abs=1), (name, form)
            if form == "fp8-b128":
                assert (facts["weight_bytes"] - facts["expert_bytes"]) / 2**30 == pytest.approx(gpu, abs=0.06), name


@pytest.mark.parametrize("name, others", [("gpt-oss-120b", "bf16"), ("DeepSeek-V4-Flash", "fp8-b128")])
def test_around_experts_in_fp4_is_what_the_shape_says(tandem_bin, name, others):
    facts = [planned(tandem_bin, name, form) for form in ("mxfp4", others)]
    beside, as_published = (one["weight_bytes"] - one["expert_bytes"] for one in facts)
    assert beside == as_published and facts[0]["expert_bytes"] < 0.6 * facts[1]["expert_bytes"]


def recommended(tandem_bin, *options):
    found = [subprocess.run([tandem_bin, "recommend", *options, *form], capture_output=True, text=True, check=True).stdout
             for form in (["--json"], [])]  # fmt: skip
    return json.loads(found[0]), found[1]


def test_recommendations_fit(tandem_bin):
    """Each is what the plan says of its shape, on any machine; published formats where memory holds them."""
    machines = {"desktop-64gb": 62, "desktop-64gb+rtx-4090": 62, "epyc-9355x2": 1128}
    speeds = {}
    for machine, gib in machines.items():
        found, text = recommended(tandem_bin, "--machine", machine)
        assert round(found["memory_gib"]) == gib and len(found["models"]) > 10
        assert all(model["model"] in text for model in found["models"])
        sizes = [model["parameters"] for model in found["models"]]
        assert sizes == sorted(sizes, reverse=True)
        for model in found["models"]:
            assert (1.1 * model["weights_gib"] > gib) <= model["from_drive"] and model["prompt_s"] > 0, model
            assert model["format"] == "Q4_K_M" or ":" not in model["model"]
            speeds[machine, model["model"]] = model["tokens_per_s"]
        assert not (machine == "epyc-9355x2" and any(model["from_drive"] for model in found["models"]))
    fp8 = "Qwen/Qwen3-30B-A3B-FP8"
    assert speeds["desktop-64gb", fp8] < speeds["desktop-64gb+rtx-4090", fp8]
    facts = planned(tandem_bin, "Qwen3-30B-A3B", "fp8-b128", "--ctx-size", "8192")
    assert facts["decode"][0]["tokens_per_s"] == pytest.approx(speeds["desktop-64gb", fp8], rel=1e-6)


def test_recommendations_for_this_machine(tandem_bin):
    found, text = recommended(tandem_bin)
    assert found["memory_gib"] > 1 and found["read_gbps"] > 0 and found["drive_gbps"] > 0
    assert text.startswith("this: ") and (found["models"] or "none" in text)
