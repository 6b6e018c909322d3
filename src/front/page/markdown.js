// Markdown as models write it, as DOM nodes: headings, lists, tasks, quotes, tables, footnotes, fenced code,
// code spans, formulas, emphasis, strikethrough, links and <details>. Only createElement and text nodes are used,
// so nothing in the text can become markup; other raw HTML is shown as it is, and images as links.

import { colour } from "./highlight.js";

const MAX_DEPTH = 12; // of quotes, lists, emphasis and brackets in one another

const MAX_SPAN = 4000; // characters of emphasis or a link: bounds the search for its end

const MAX_BLOCK = 100_000; // characters of a block that is rendered; longer ones are plain text
const MAX_FORMULA = 2000; // characters; longer ones stay LaTeX
const MAX_NODES = 4; // for a character of a formula; its largest commands take 3.6
const MAX_NESTED = 50; // nodes in one another; for some, browsers take a time that grows with the cube
const MAX_COLUMNS = 200; // of a table; wider ones are plain text

// No pattern may look at a character more than a few times, whatever the text: a run that could be
// divided between two parts of a pattern is matched by one alone.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TASK = /^\[([ xX])\][ \t]+/; // of an item
const FOOTNOTE = /^ {0,3}\[\^([^\]\s]{1,40})\]:[ \t]*/;
const DETAILS = /^ {0,3}<details(?: open)?>/i;
const SUMMARY = /^\s*<summary>(.{0,2000}?)<\/summary>/i;
const DELIMITERS = /^\|? *:?-+:?(?: *\| *:?-+:?)* *\|?$/; // of a trimmed line

// children: nodes, strings and lists of them. No list may be spread over arguments, which browsers
// limit to some ten thousand.
export function element(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  for (const child of children.flat()) node.append(child);
  return node;
}

// ---- blocks ------------------------------------------------------------------------------------

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

const isTableOf = (n, nMarks) => n === nMarks && n <= MAX_COLUMNS;

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") &&
    DELIMITERS.test(lines[at + 1].trim()) && isTableOf(cells(lines[at]).length, cells(lines[at + 1]).length);
}

// The mark that ends the display formula which begins a line, if one does.
const formulaEnd = (line) => ({ "$$": "$$", "\\[": "\\]" })[line.trimStart().slice(0, 2)];

// The number of lines from `at` on that are a display formula and nothing else, or 0.
function formulaLines(lines, at) {
  const mark = formulaEnd(lines[at]);
  if (!mark) return 0;
  for (let end = at, left = MAX_FORMULA; end < lines.length && left > 0; left -= lines[end++].length + 1) {
    const line = end === at ? lines[at].trim().slice(2) : lines[end], found = line.indexOf(mark);
    if (found >= 0) return line.slice(found + 2).trim() ? 0 : end + 1 - at;
  }
  return 0;
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) ||
    ITEM.test(line) || FOOTNOTE.test(line) || DETAILS.test(line) || isTable(lines, at) ||
    formulaLines(lines, at) > 0;
}

// The lines from `at` on that belong to one block, as [kind, number of lines].
function blockAt(lines, at) {
  const line = lines[at], fence = FENCE.exec(line);
  let end = at + 1;
  if (fence) {
    const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
    while (end < lines.length && !close.test(lines[end])) end++;
    return ["code", Math.min(end + 1, lines.length) - at];
  }
  const nFormula = formulaLines(lines, at);
  if (nFormula) return ["formula", nFormula];
  if (HEADING.test(line)) return ["heading", 1];
  if (RULE.test(line)) return ["rule", 1];
  if (QUOTE.test(line)) {
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    return ["quote", end - at];
  }
  if (ITEM.test(line)) return ["list", listLength(lines, at)];
  if (DETAILS.test(line)) return ["details", detailsLength(lines, at)];
  if (isTable(lines, at)) {
    end++;
    while (end < lines.length && lines[end].includes("|")) end++;
    return ["table", end - at];
  }
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines, end)) end++;
  return [FOOTNOTE.test(line) ? "footnote" : "paragraph", end - at];
}

// Up to the end of a <details> and of those within it; without an end, up to that of the text.
function detailsLength(lines, at) {
  let open = 0, end = at;
  for (; end < lines.length; end++) {
    if (DETAILS.test(lines[end])) open++;
    if (lines[end].toLowerCase().includes("</details>") && --open === 0) return end + 1 - at;
  }
  return end - at;
}

const isNumbered = (line) => /\d/.test(ITEM.exec(line)[2]);

function listLength(lines, at) {
  const base = indentOf(lines[at]), numbered = isNumbered(lines[at]);
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (isBlank(line)) continue;
    const indent = indentOf(line);
    if (ITEM.test(line) && !RULE.test(line)) {
      if (indent < base || (indent < base + 2 && isNumbered(line) !== numbered)) break;
    } else if (indent < base + 2 && (isBlank(lines[end - 1]) || beginsBlock(lines, end))) {
      break;
    }
  }
  while (isBlank(lines[end - 1])) end--;
  return end - at;
}

// The source of each top-level block. A block is rendered alone, so that while a text grows those
// whose source stays the same need not be rendered again.
export function splitBlocks(text) {
  const lines = text.split("\n").map((line) => line.replace(/\r$/, "").replaceAll("\t", "    "));
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const n = isBlank(lines[at]) ? 1 : blockAt(lines, at)[1];
    if (!isBlank(lines[at])) blocks.push(lines.slice(at, at + n).join("\n"));
    at += n;
  }
  return blocks;
}

function renderLines(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const [kind, n] = blockAt(lines, at);
    nodes.push(RENDER[depth < MAX_DEPTH ? kind : "paragraph"](lines.slice(at, at + n), depth));
    at += n;
  }
  return nodes;
}

function renderCode(lines) {
  const [, fence, info] = FENCE.exec(lines[0]), last = lines.at(-1).trim();
  const isClosed = lines.length > 1 && last.length >= fence.length && !last.replaceAll(fence[0], "");
  const body = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const language = info.trim().split(/\s+/)[0] || "code";
  const copy = element("button", "", "Copy");
  copy.type = "button";
  copy.dataset.copies = "code";
  const pre = element("pre", "", element("code", "", colour(body, language)));
  pre.tabIndex = 0; // it scrolls
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", `Code: ${language}`);
  return element("div", "code", element("div", "code-head", element("span", "", language), copy), pre);
}

function renderList(lines, depth) {
  const base = indentOf(lines[0]), numbered = isNumbered(lines[0]);
  const list = element(numbered ? "ol" : "ul", "");
  if (numbered) list.start = parseInt(ITEM.exec(lines[0])[2], 10);
  for (let at = 0; at < lines.length;) {
    const mark = ITEM.exec(lines[at]), own = [lines[at].slice(mark[0].length)];
    const width = mark[0].length;
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      if (ITEM.test(line) && indentOf(line) < base + 2) break;
      own.push(line.slice(Math.min(indentOf(line), width)));
    }
    const task = TASK.exec(own[0]);
    if (task) own[0] = own[0].slice(task[0].length);
    const isLoose = own.some((line, i) => i && i < own.length - 1 && isBlank(line));
    const nodes = renderLines(own, depth + 1);
    const isTight = !isLoose && nodes[0]?.tagName === "P";
    list.append(element("li", task ? "task" : "", task ? checkbox(task[1] !== " ") : [],
      isTight ? [...nodes[0].childNodes] : [], isTight ? nodes.slice(1) : nodes));
  }
  return list;
}

function checkbox(isDone) {
  const box = element("input", "");
  box.type = "checkbox";
  box.checked = isDone;
  box.disabled = true;
  box.setAttribute("aria-label", isDone ? "done" : "to do");
  return box;
}

function renderDetails(lines, depth) {
  const first = lines[0].replace(DETAILS, ""), rest = [first, ...lines.slice(1)].join("\n");
  const summary = SUMMARY.exec(rest), body = (summary ? rest.slice(summary[0].length) : rest)
    .replace(/<\/details>\s*$/i, "");
  return element("details", "", element("summary", "", inline(summary?.[1].trim() || "Details", depth + 1)),
    renderLines(body.split("\n"), depth + 1));
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function renderTable(lines, depth) {
  const sides = cells(lines[1]).map((mark) =>
    !mark.endsWith(":") ? "" : mark.startsWith(":") ? "to-center" : "to-right");
  const row = (name, line) => element("tr", "", cells(line).slice(0, sides.length).map((cell, i) =>
    element(name, sides[i], inline(cell, depth + 1))));
  const table = element("table", "", element("thead", "", row("th", lines[0])),
    element("tbody", "", lines.slice(2).map((line) => row("td", line))));
  const scroller = element("div", "table", table);
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "group");
  scroller.setAttribute("aria-label", "Table");
  return scroller;
}

// A heading's text without the # that may close it.
function withoutMarks(text) {
  const whole = text.trim();
  let end = whole.length;
  while (whole[end - 1] === "#") end--;
  return end === 0 || /\s/.test(whole[end - 1]) ? whole.slice(0, end).trimEnd() : whole;
}

const RENDER = {
  code: renderCode,
  list: renderList,
  table: renderTable,
  details: renderDetails,
  footnote: (lines, depth) => element("p", "footnote", element("sup", "", FOOTNOTE.exec(lines[0])[1]), " ",
    inline(lines.join("\n").replace(FOOTNOTE, ""), depth)),
  formula: (lines) => element("p", "", formula(lines.join("\n").trim().slice(2, -2), true)),
  rule: () => element("hr", ""),
  heading: ([line], depth) => {
    const [all, marks] = HEADING.exec(line);
    return element(`h${Math.min(marks.length + 1, 6)}`, "", inline(withoutMarks(line.slice(all.length)), depth));
  },
  quote: (lines, depth) => element("blockquote", "",
    renderLines(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
  paragraph: (lines, depth) => element("p", "", inline(lines.map((line) =>
    line.trimStart()).join("\n"), depth)),
};

export const renderBlock = (source) => source.length > MAX_BLOCK ? [element("p", "plain", source)]
  : renderLines(source.split("\n"), 0);

// ---- formulas ----------------------------------------------------------------------------------

let temml; // a promise of the library that makes MathML of LaTeX
let nodesLeft = 0; // that it may make

function refuse() {
  throw new Error();
}

// The library builds what some commands hold several times, so that time and nodes double with each
// that is inside another. It has no limit of its own: here every node counts as its constructor sets
// its label.
async function loadLibrary() {
  const { default: library } = await import("./temml.js");
  Object.defineProperty(library.__renderToMathMLTree("", {}).constructor.prototype, "label", {
    set(value) {
      if (--nodesLeft < 0) refuse();
      Object.defineProperty(this, "label", { value, writable: true });
    },
  });
  return library;
}

// Definitions may grow without bound, and would be of this formula alone.
const NO_MACROS = ["def", "gdef", "edef", "xdef", "newcommand", "renewcommand", "providecommand"]
  .map((name) => [`\\${name}`, refuse]);

const depthOf = ({ children = [] }) => 1 + Math.max(0, ...children.map(depthOf));

// LaTeX as MathML, once the library is there. What it does not understand, and what would take long
// to build or to lay out, stays as it is.
function formula(source, isDisplayed) {
  const node = element("span", "formula", source.trim());
  temml ??= loadLibrary();
  temml.then((library) => {
    nodesLeft = MAX_NODES * (source.length + 10);
    const math = library.__renderToMathMLTree(source, {
      displayMode: isDisplayed, throwOnError: true, macros: Object.fromEntries(NO_MACROS) });
    if (depthOf(math) > MAX_NESTED) refuse();
    node.replaceChildren(math.toNode());
  }).catch(() => node.classList.add("unknown"));
  return node;
}

// $x$, $$x$$, \(x\) or \[x\] at `at`: [node, end], or null. A $ before a space, or where the
// next one is after a space or before a letter or digit, is only a character.
function formulaAt(text, at, vain) {
  const mark = /^(?:\$\$?|\\[([])/.exec(text.slice(at, at + 2))?.[0];
  if (!mark) return null;
  const begin = at + mark.length, near = text.slice(begin, begin + MAX_FORMULA);
  const close = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" }[mark];
  let end = near.indexOf(close, Math.max(0, (vain[close] ?? 0) - begin));
  while (mark === "$" && near[end - 1] === "\\") end = near.indexOf(close, end + 1);
  const isMoney = mark === "$" && (/^\s/.test(near) || /\s/.test(near[end - 1]) || isWord(near[end + 1]));
  if (end < 0) vain[close] = begin + near.length - 1;
  if (end < 0 || isMoney || !near.slice(0, end).trim()) return null;
  return [formula(near.slice(0, end), mark === "$$" || mark === "\\["), begin + end + close.length];
}

// ---- inline ------------------------------------------------------------------------------------

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SAFE = /^(?:https?:\/\/|mailto:)/i;
const BARE_URL = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]}*_]/;
const SPECIAL = /[\\`*_~[!<h\n$]/g;
const EMPHASIS = { "***": ["strong", "em"], "**": ["strong"], "__": ["strong"], "*": ["em"], "_": ["em"], "~~": ["s"] };

function link(url, children) {
  const node = element("a", "", children);
  node.href = url;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

// Where the mark of emphasis that begins before `from` closes it, or -1. Skips code spans and escapes.
// vain: by mark, those of formulas and code spans as well, how far an earlier search has found none.
function closing(text, mark, from, vain) {
  const limit = Math.min(text.length, from + MAX_SPAN);
  for (let at = Math.max(from, vain[mark] ?? 0); at < limit; at++) {
    if (text[at] === "\\") {
      at++;
    } else if (text[at] === "`") {
      const near = text.slice(at, limit), run = /^`+/.exec(near)[0];
      const end = near.indexOf(run, run.length);
      at += (end < 0 ? 0 : end) + run.length - 1;
    } else if (text.startsWith(mark, at) && at > from && !/\s/.test(text[at - 1])) {
      let end = at;
      while (text[end] === mark[0]) end++;
      const isWhole = mark.length > 1 || end - at !== 2; // ** does not close *
      if (isWhole && !(mark[0] === "_" && isWord(text[end]))) return end - mark.length;
      at = end - 1;
    }
  }
  vain[mark] = limit;
  return -1;
}

// [text](url) or ![text](url) at `at`: [text, url, end], or null.
function linkAt(text, at) {
  let depth = 0, close = at;
  for (const limit = Math.min(text.length, at + MAX_SPAN); close < limit; close++) {
    if (text[close] === "\\") close++;
    else if (text[close] === "[" && ++depth > MAX_DEPTH) return null;
    else if (text[close] === "]" && --depth === 0) break;
  }
  const target = /^\]\(\s{0,8}<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s{1,8}(?:"[^"]*"|'[^']*'))?\s{0,8}\)/
    .exec(text.slice(close, close + MAX_SPAN));
  return target && [text.slice(at + 1, close), target[1], close + target[0].length];
}

// What begins at text[at], a special character: [node, end], or null where it is only a character.
function spanAt(text, at, depth, vain) {
  const c = text[at], next = text[at + 1];
  if (c === "\\" && next === "\n") return [element("br", ""), at + 2];
  if (c === "$" || (c === "\\" && (next === "(" || next === "["))) {
    const found = formulaAt(text, at, vain);
    if (found || c === "$") return found;
  }
  if (c === "\\") return next && PUNCTUATION.test(next) ? [next, at + 2] : null;
  if (c === "\n") return [element("br", ""), at + 1]; // as models mean it, unlike CommonMark
  if (c === "`") {
    const run = /^`+/.exec(text.slice(at, at + 64))[0];
    let end = vain[run] ? -1 : text.indexOf(run, at + run.length);
    while (end >= 0 && text[end + run.length] === "`")
      end = text.indexOf(run, end + /^`+/.exec(text.slice(end))[0].length);
    if (end < 0) {
      vain[run] = text.length;
      return [run, at + run.length];
    }
    const code = text.slice(at + run.length, end).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    return [element("code", "", isPadded ? code.slice(1, -1) : code), end + run.length];
  }
  if (c === "!" && next !== "[") return null;
  const mark = c === "[" && next === "^" && /^\[\^([^\]\s]{1,40})\]/.exec(text.slice(at, at + 44));
  if (mark) return [element("sup", "", mark[1]), at + mark[0].length];
  if (c === "[" || c === "!") {
    const found = linkAt(text, c === "!" ? at + 1 : at);
    if (!found || !SAFE.test(found[1])) return null;
    return [link(found[1], inline(found[0] || found[1], depth + 1)), found[2]];
  }
  if (c === "<" || c === "h") {
    const begin = c === "<" ? at + 1 : at;
    if (c === "h" && isWord(text[at - 1])) return null;
    const url = BARE_URL.exec(text.slice(begin, begin + 2048))?.[0];
    if (!url || (c === "<" && text[begin + url.length] !== ">")) return null;
    return [link(url, url), begin + url.length + (c === "<" ? 1 : 0)];
  }
  return emphasisAt(text, at, depth, vain);
}

function emphasisAt(text, at, depth, vain) {
  const run = /^(?:\*+|_+|~+)/.exec(text.slice(at, at + 8))[0], names = EMPHASIS[run];
  const begin = at + run.length;
  const opens = names && text[begin] !== undefined && !/\s/.test(text[begin]) &&
    !(run[0] === "_" && isWord(text[at - 1]));
  const end = opens ? closing(text, run, begin, vain) : -1;
  if (end < 0) return [run, begin];
  const inner = inline(text.slice(begin, end), depth + 1);
  const node = names.reduceRight((nodes, name) => [element(name, "", nodes)], inner)[0];
  return [node, end + run.length];
}

// Nodes and strings.
function inline(text, depth) {
  if (depth >= MAX_DEPTH) return [text];
  const nodes = [], vain = {};
  let plain = "", at = 0;
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    const span = spanAt(text, at, depth, vain);
    if (!span) {
      plain += text[at++];
    } else {
      if (typeof span[0] === "string") {
        plain += span[0];
      } else {
        flush();
        nodes.push(span[0]);
      }
      at = span[1];
    }
  }
  flush();
  return nodes;
}
