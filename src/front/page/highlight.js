// Colours for code: comments, strings, numbers, keywords and called functions, told apart by a few
// families of languages. One pattern whose alternatives each consume what they look at, so that the
// time is linear in the text.

import { element } from "./markdown.js";

const MAX_CODE = 20_000; // characters; longer code has no colours

const BLOCK = String.raw`/\*[^]*?(?:\*/|$)`, QUOTED = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`, BACKTICK = String.raw`\`(?:[^\`\\]|\\[^])*\`?`;
const CHAR = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^\n][^'\n]{0,8})'`; // a lone ' is a lifetime
const FAMILIES = [ // names, comments, strings
  ["c h cc cpp c++ cxx hpp cuda cu cs csharp java kotlin kt scala swift go rust rs zig glsl hlsl proto objc",
    String.raw`//.*|${BLOCK}`, CHAR],
  ["js javascript jsx mjs ts typescript tsx json jsonc json5 css scss less php dart groovy", String.raw`//.*|${BLOCK}`,
    `${QUOTED}|${BACKTICK}`],
  ["py python python3 rb ruby sh bash shell zsh console fish perl pl r julia jl elixir ex yaml yml toml ini conf " +
    "dockerfile docker make makefile cmake nix nginx powershell ps1 awk tcl graphql hcl terraform",
  String.raw`(?<!\S)#.*`, `${TRIPLE}|${QUOTED}`],
  ["sql lua haskell hs ada elm vhdl plsql postgresql mysql", String.raw`--.*|${BLOCK}`, QUOTED],
  ["html xml svg vue xhtml markup", String.raw`<!--[^]*?(?:-->|$)`, QUOTED],
];
const PATTERNS = new Map(FAMILIES.flatMap(([names, comment, string]) => {
  const pattern = new RegExp(String.raw`(?<comment>${comment})|(?<string>${string})|` +
    String.raw`(?<number>(?<![\w.])\d[\w.]*)|(?<word>[A-Za-z_$][\w$]*)`, "g");
  return names.split(" ").map((name) => [name, pattern]);
}));
PATTERNS.set("diff", /(?<added>^\+.*)|(?<removed>^-.*)|(?<comment>^@@.*)/gm).set("patch", PATTERNS.get("diff"));

const KEYWORDS = new Set(`abstract alignas alignof and as assert async await begin bool boolean break byte case catch
char class co_await co_return co_yield const constexpr continue debugger declare def default defer del delete do done
double echo elif else elsif elseif end ensure enum esac except export extends extern false False fi final finally
float fn for foreach from func function goto guard if impl implements import in include inline instanceof int interface
internal is lambda let local long loop match mod module mut namespace new nil None nonlocal not null nullptr of or
override package pass private protected pub public raise readonly ref register require rescue return self short signed
sizeof static static_assert struct super switch template then this throw throws trait true True try type typedef
typename typeof union unless unsafe unsigned until use using var virtual void volatile when where while with yield
SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE INDEX VIEW DROP ALTER ADD JOIN LEFT RIGHT INNER
OUTER FULL ON AS AND OR NOT NULL IS IN LIKE BETWEEN GROUP ORDER BY HAVING LIMIT OFFSET UNION ALL DISTINCT CASE WHEN
THEN ELSE END PRIMARY KEY FOREIGN REFERENCES WITH EXISTS BEGIN COMMIT ROLLBACK`.split(/\s+/));

function kindOf({ word, ...groups }, next) {
  if (word) return KEYWORDS.has(word) ? "keyword" : next === "(" ? "called" : "";
  return Object.keys(groups).find((name) => groups[name] !== undefined);
}

// Strings and spans whose texts together are the code.
export function colour(code, language) {
  const pattern = PATTERNS.get(language.toLowerCase()), nodes = [];
  if (!pattern || code.length > MAX_CODE) return [code];
  let plain = 0; // from where on nothing is in nodes yet
  for (const match of code.matchAll(pattern)) {
    const end = match.index + match[0].length, kind = kindOf(match.groups, code[end]);
    if (!kind) continue;
    if (match.index > plain) nodes.push(code.slice(plain, match.index));
    nodes.push(element("span", `code-${kind}`, match[0]));
    plain = end;
  }
  if (plain < code.length) nodes.push(code.slice(plain));
  return nodes;
}
