"""How the page shows Markdown, formulas and code: every form, letter by letter, and in bounded time."""

import random

import pytest
from test_page import MARKDOWN, browser, check_accessible, gate, open_page, server, shoot  # fixtures, too

pytestmark = pytest.mark.no_asan

# What a text becomes, as tags and text; each part ends where the next begins.
CASES = [
    ("a_b_c and _d_", "<p>a_b_c and <em>d</em></p>"),
    ("***x*** __y__", "<p><strong><em>x</em></strong> <strong>y</strong></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("a  \nb\\\nc\nd", "<p>a  <br>b<br>c<br>d</p>"),
    ("a\\b \\", "<p>a\\b \\</p>"),
    ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
    (r"\*not\* ``a`b``", "<p>*not* <code>a`b</code></p>"),
    ("see https://a.org/x_(y).", "<p>see <a>https://a.org/x_(y</a>).</p>"),
    ("![alt](https://a.org/i.png)", "<p><a>alt</a></p>"),
    ("## A ##\ntext\n---", "<h3>A</h3><p>text</p><hr>"),
    ("3. a\n4. b\n\ntext", "<ol start=3><li>a</li><li>b</li></ol><p>text</p>"),
    ("- a\n\n  more\n- b", "<ul><li><p>a</p><p>more</p></li><li>b</li></ul>"),
    ("- a\n  ```\n  x\n  ```", "<ul><li>a<pre>x</pre></li></ul>"),
    ("~~~\n```\n~~~", "<pre>```</pre>"),
    ("```js\nopen", "<pre>open</pre>"),
    ("a | b\n--|--\n1 | 2 | 3", "<table>a,b/1,2</table>"),
    ("a | b", "<p>a | b</p>"),
    ("|a\n---", "<p>|a</p><hr>"),
    ("<b>x</b> &amp;", "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp;</p>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    (">" * 100 + " deep", None),
    ("*" * 5000 + "a", None),
    ("[" * 5000, None),
    ("*a " * 5000, None),
    ("- " * 2000, None),
    ("# a #b # ##", "<h2>a #b #</h2>"),
    ("# #", "<h2></h2>"),
    ("` a ` ` ` `  `", "<p><code>a</code> <code> </code> <code>  </code></p>"),
    ("a|b|c\n-|-|-\n1\\|", "<table>a,b,c/1|</table>"),
    (" | a |\n | :-: | \n", "<table>a</table>"),
    (r"so $x_1$, $$y$$ and \(z\) of $5", "<p>so <span>x_1</span>, <span>y</span> and <span>z</span> of $5</p>"),
    (r"$5-$10, $PATH:$HOME, US$5 or $ 6, \$a$ \(b", "<p>$5-$10, $PATH:$HOME, US$5 or $ 6, $a$ (b</p>"),
    ("text\n\\[\na\n+ b\n= c\n\\]\nend", "<p>text</p><p><span>a\n+ b\n= c</span></p><p>end</p>"),
    ("$$ a\n- b $$\n\n$$ c $$ d\n$$\nopen", "<p><span>a\n- b</span></p><p><span>c</span> d<br>$$<br>open</p>"),
    ("- [x] a\n- [ ] b\n- [y] c", "<ul><li><input></input>a</li><li><input></input>b</li><li>[y] c</li></ul>"),
    ("a[^1] b[^x y]\n\n[^1]: note *n*\n[^n]: m",
     "<p>a<sup>1</sup> b[^x y]</p><p><sup>1</sup> note <em>n</em></p><p><sup>n</sup> m</p>"),
    ("<details><summary>S *s*</summary>\n\nbody\n\n- x\n</details>\nafter",
     "<details><summary>S <em>s</em></summary><p>body</p><ul><li>x</li></ul></details><p>after</p>"),
    ("<details>\n<details>\na\n</details>\nb\n</details>",
     "<details><summary>Details</summary><details><summary>Details</summary><p>a</p></details><p>b</p></details>"),
    ("<details open>\n<summary>S</summary>\n<b>x", "<details><summary>S</summary><p>&lt;b&gt;x</p></details>"),
    ("<details>\n" * 3000, None),
    (r"**$a*b*c$** `$x$` \[ \]", "<p><strong><span>a*b*c</span></strong> <code>$x$</code> [ ]</p>"),
]

# What random texts are made of.
PARTS = ["a", "word ", "\n", "\n\n", "    ", "  ", "\t", "*", "**", "_", "~~", "`", "```", "~~~", "- ", "1. ",
         "> ", "# ", "|", "|-|-|", "--|--", "---", "[", "](", "https://a.org", ")", "!", "<", ">", "\\", "\r\n",
         "\u65e5", "\U0001f600", ":", "a|b\n-|-\n", "$", "$$", "\\(", "\\]", "```py\n", "[^1]", "[^1]: ", "- [ ] ", "<details>", "</details>\n", "<summary>s</summary>"]

SHAPE = """async (text) => {
  const { renderBlock, splitBlocks } = await import("/page/markdown.js");
  const escape = (t) => t.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shape = (node) => {
    if (node.nodeType === 3) return escape(node.data);
    if (node.className === "code") return `<pre>${escape(node.querySelector("code").textContent)}</pre>`;
    if (node.className === "table")
      return `<table>${[...node.querySelectorAll("tr")].map((r) =>
        [...r.children].map((c) => c.textContent).join()).join("/")}</table>`;
    const name = node.tagName.toLowerCase(), start = node.start > 1 ? ` start=${node.start}` : "";
    if (name === "hr" || name === "br") return `<${name}>`;
    return `<${name}${start}>${[...node.childNodes].map(shape).join("")}</${name}>`;
  };
  return splitBlocks(text).flatMap(renderBlock).map(shape).join("");
}"""

# The same text, shown at once and letter by letter.
GROWING = """async (text) => {
  const { viewOf } = await import("/page/view.js");
  const message = (content) => ({ role: "assistant", content, reasoning: "" });
  const grown = message(""), view = viewOf(grown, {});
  for (const letter of text) {
    grown.content += letter;
    view.update({ begin: 0 });
  }
  return [view.body.outerHTML, viewOf(message(text), {}).body.outerHTML];
}"""


def test_markdown_cases(open_page):
    page = open_page()
    for text, shape in CASES:
        became = page.evaluate(SHAPE, text)
        assert became == shape or shape is None, text
    for text in [MARKDOWN, "\r\n".join(MARKDOWN.split("\n")), "- a\n\n\t- b\n\n  more\n\nend\n***",
                 "text\na|b\n-|-\n1|2"]:
        grown, whole = page.evaluate(GROWING, text)
        assert grown == whole
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 40)))
        grown, whole = page.evaluate(GROWING, text)
        assert grown == whole, repr(text)


# Texts on which a pattern that looks at a character more than a few times takes seconds to minutes.
HOSTILE = [
    "|" * 10_000 + "\n" + "|-" * 5_000 + "|\n" + "|a" * 5_000 + "\n" + "|\n" * 5_000,
    "|a" * 150 + "|\n" + "|-" * 150 + "|\n" + "|\n" * 10_000,
    "# a" + " " * 20_000 + "b",
    "a |" + " " * 20_000 + "x\n" + " " * 20_000 + "|" + " " * 20_000 + "x",
    "```" + " " * 20_000 + "`",
    "~" * 20_000 + "`",
    "` " + "x" * 20_000 + "`",
    "[](" + " " * 20_000,
    ("[](" + " " * 3_000) * 10,
    "*a`" * 7_000,
    "* " * 9_000 + "x",
    "word\n\n" * 20_000,
    "$a " * 7_000,
    "$$\n" + "a\n" * 10_000,
    "$$a\n" * 10_000,
    "\\(" * 10_000,
    "$" * 20_000,
    *("```" + name + "\n" + part * (19_000 // len(part))
      for name in ("c", "js", "py", "sql", "html", "diff")
      for part in ("/", "/*", '"', "'", "\"'", "\\", "`", "#", "--", "<!--", "a", "1.", "+", "'" * 3, "\n ")),
    "x" * 300_000,
    "a\n" * 50_000,
    "\\```py\n" * 3_000,
]

# Nodes, characters shown, and characters that searches for a mark's end looked at.
COUNTED = """async (text) => {
  const { renderBlock, splitBlocks } = await import("/page/markdown.js"), { indexOf } = String.prototype;
  let searched = 0;
  String.prototype.indexOf = function (part, from = 0) {
    const found = indexOf.call(this, part, from);
    searched += Math.max(0, (found < 0 ? this.length : found) - from);
    return found;
  };
  const nodes = splitBlocks(text).flatMap(renderBlock);
  String.prototype.indexOf = indexOf;
  const all = nodes.reduce((sum, node) => sum + 1 + node.querySelectorAll("*").length, 0);
  return [all, nodes.map((node) => node.textContent).join("").length, searched];
}"""

# Shown in slices, whole in the end.
SLICED = """async (text) => {
  const { viewOf } = await import("/page/view.js");
  const view = viewOf({ role: "assistant", content: text, reasoning: "" }, {}), counts = [];
  while (counts.at(-1) !== text.split("\\n\\n").length) {
    counts.push(view.body.children.length);
    await new Promise((done) => setTimeout(done, 0));
  }
  return counts;
}"""


def test_no_text_freezes_the_page(open_page):
    """No more nodes than characters, none lost, no end searched for again and again, and long answers
    come in slices."""
    page = open_page()
    for text in HOSTILE:
        n_nodes, n_shown, n_searched = page.evaluate(COUNTED, text)
        assert n_nodes <= len(text) and n_searched <= 8 * len(text), text[:40]
        assert n_shown <= len(text)
    counts = page.evaluate(SLICED, "\n\n".join(["word " * 20] * 3000))
    assert counts[0] < 1000 and counts[-1] == 3000


FORMULAS = r"""The roots of $ax^2+bx+c=0$ are
\[
x_{1,2} = \frac{-b \pm \sqrt{b^2-4ac}}{2a}
\]
and \(\begin{pmatrix} a & b \\ c & d \end{pmatrix}\) is a matrix, $\unknown{x}$ nothing, as is
$\href{javascript:alert(1)}{x}$.

$$\int_0^\infty e^{-x^2}\,dx = \frac{\sqrt\pi}{2}, \quad \sum_{i=1}^n i = \begin{cases} 1 & n = 1 \\ \frac{n(n+1)}{2} \end{cases}$$

```python
# a comment
def area(r):  # "quoted"
    return 3.14 * r ** 2, "it's\" # no comment"
```

```rust
fn first<'a>(x: &'a str) -> char { 'b' } // it's
```

```diff
-old
+new
```
"""

FORMULA_SHAPE = """async (text) => {
  const { viewOf } = await import("/page/view.js");
  const { body } = viewOf({ role: "assistant", content: text, reasoning: "" }, {});
  document.querySelector("#messages").replaceChildren(body);
  while (body.querySelectorAll(".formula").length !== body.querySelectorAll("math, .unknown").length)
    await new Promise((done) => setTimeout(done, 10));
  const all = (names) => [...body.querySelectorAll(names)].map((node) => node.textContent);
  return { math: body.querySelectorAll("math").length, display: body.querySelectorAll("p math.tml-display").length,
    roots: body.querySelectorAll("msqrt").length, cells: body.querySelectorAll("mtd").length,
    unknown: all(".unknown"), links: body.querySelectorAll("a").length,
    ...Object.fromEntries(["comment", "string", "number", "keyword", "called", "added", "removed"].map((kind) =>
      [kind, all(`.code-${kind}`)])),
    code: all("pre code") };
}"""


# The longest that are looked at, macros, and what the library builds twice.
HOSTILE_FORMULAS = [part * (1900 // len(part)) for part in (
    "{", "x^", r"\frac", r"\left(", r"\sqrt{", r"\begin{matrix}", "&", "'", r"\text{", r"\hat", r"_{a}^{b}")] + \
    [r"\def\a{\a\a}\a", r"\def\a#1{\a{#1#1}}\a{x}", r"\rule{1000000em}{1000000em}",
     r"\def\a{" + "x" * 100 + "}" + r"\a" * 100, r"\newcommand\a[1]{" + "#1" * 50 + r"}\a{\a{x}}",
     *(begin * n + "x" + end * n for n, begin, end in (
         (10, r"\mathllap{", "}"), (5, r"\cancelto{x}{", "}"), (8, r"\equilibriumRight{", "}"),
         (150, r"\vphantom{", "}"), (100, r"\binom{x}{", "}"), (200, r"\boxed{", "}")))]
# Elements of MathML, and how many are in one another.
DRAWN = """async (formula) => {
  const { renderBlock } = await import("/page/markdown.js"), [node] = renderBlock(`$$${formula}$$`);
  while (!node.querySelector("math, .unknown")) await new Promise((done) => setTimeout(done, 0));
  const depthOf = ({ children }) => 1 + [...children].reduce((most, child) => Math.max(most, depthOf(child)), 0);
  return [node.querySelectorAll("math *").length, depthOf(node)];
}"""


def test_formulas_and_colours(open_page):
    page = open_page()
    found = page.evaluate(FORMULA_SHAPE, FORMULAS)
    assert (found["math"], found["display"], found["roots"]) == (4, 2, 2) and found["cells"] >= 8
    assert found["unknown"] == [r"\unknown{x}", r"\href{javascript:alert(1)}{x}"] and found["links"] == 0
    assert found["comment"] == ["# a comment", '# "quoted"', "// it's"]
    assert found["string"] == ['"it\'s\\" # no comment"', "'b'"]
    assert (found["number"], found["called"]) == (["3.14", "2"], ["area"])
    assert found["keyword"] == ["def", "return", "fn", "char"]
    assert (found["added"], found["removed"]) == (["+new"], ["-old"])
    blocks = [block.split("\n```")[0].split("\n", 1)[1] for block in FORMULAS.split("\n```")[1::2]]
    assert found["code"] == blocks
    check_accessible(page)
    shoot(page, "formulas")
    for formula in HOSTILE_FORMULAS:
        n, depth = page.evaluate(DRAWN, formula)
        assert n <= 4 * len(formula) + 40 and depth <= 60, formula[:40]
    continued = r"a + \cfrac{1}{" * 9 + "x" + "}" * 9
    assert page.evaluate(DRAWN, continued)[1] > 30
