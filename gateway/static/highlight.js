// @ts-check
/**
 * Light code colours, a line at a time: comments, strings, numbers, keywords and calls.
 *
 * `highlightLine` gives DOM nodes and the state that the next line begins in, so a growing block
 * only ever colours its last line again. Languages are families: what matters for reading is what
 * begins a comment and which words are the language's own, not a grammar.
 */

import { element } from "./dom.js";

/**
 * @typedef {object} Family
 * @property {string[]} line what begins a comment up to the end of the line
 * @property {[string, string][]} spans [open, close] of comments that may cross lines
 * @property {[string, string][]} strings [open, close] of strings that may cross lines
 * @property {string} quotes characters that delimit strings within a line
 * @property {Set<string>} keywords
 */

/** @param {string} text */
const words = (text) => new Set(text.split(" "));

/** @type {Family} */
const C_LIKE = {
  line: ["//"],
  spans: [["/*", "*/"]],
  strings: [["`", "`"]],
  quotes: "\"'",
  keywords: words(
    "abstract as async await auto bool boolean break byte case catch char class const constexpr " +
      "continue default defer delete do double else enum export extends extern false final " +
      "finally float fn for from func function go if impl implements import in inline instanceof " +
      "int interface let long loop match mod move mut namespace new nil null nullptr of operator " +
      "override package private protected public pub range readonly ref return self short signed " +
      "sizeof static string struct super switch template this throw throws trait true try type " +
      "typedef typename typeof undefined union unsafe unsigned use using val var virtual void " +
      "volatile where while yield",
  ),
};
/** @type {Family} */
const PYTHON = {
  line: ["#"],
  spans: [],
  strings: [
    ['"""', '"""'],
    ["'''", "'''"],
  ],
  quotes: "\"'",
  keywords: words(
    "False None True and as assert async await begin break case class continue def del elif else " +
      "elsif end except finally for from global if import in is lambda match module nil nonlocal " +
      "not or pass raise require rescue return self then try unless until while with yield",
  ),
};
/** @type {Family} */
const SHELL = {
  line: ["#"],
  spans: [],
  strings: [],
  quotes: "\"'",
  keywords: words(
    "apt-get brew bash case cd cp curl do docker done echo elif else esac exit export fi for " +
      "function git if in local make mkdir mv npm pip python python3 return rm set sudo then " +
      "true false until while",
  ),
};
/** @type {Family} */
const SQL = {
  line: ["--"],
  spans: [["/*", "*/"]],
  strings: [],
  quotes: "\"'",
  keywords: words(
    "add all alter and as asc between by case constraint create cross default delete desc " +
      "distinct drop else end exists foreign from full group having in index inner insert int " +
      "integer into is join key left like limit not null on or order outer primary references " +
      "right select set table text then union unique update values varchar when where with",
  ),
};
/** @type {Family} */
const DATA = {
  line: ["#", "//"],
  spans: [],
  strings: [],
  quotes: "\"'",
  keywords: words("true false null yes no on off"),
};
/** @type {Family} */
const MARKUP = {
  line: [],
  spans: [["<!--", "-->"]],
  strings: [],
  quotes: '"',
  keywords: words(
    "DOCTYPE a body button div footer form h1 h2 h3 head header html img input li link main meta " +
      "nav ol p script section span style table td th title tr ul",
  ),
};

/** @type {Map<string, Family>} */
const FAMILIES = new Map();
for (const [family, names] of /** @type {[Family, string][]} */ ([
  [
    C_LIKE,
    "c h cpp c++ cc cxx cuda cu cs csharp dart go golang java javascript js jsx kotlin kt " +
      "mjs php rust rs scala swift ts tsx typescript zig",
  ],
  [PYTHON, "py python python3 py3 pycon rb ruby"],
  [SHELL, "bash console sh shell zsh dockerfile makefile"],
  [SQL, "sql mysql postgresql sqlite"],
  [DATA, "json jsonc toml yaml yml ini"],
  [MARKUP, "html xml svg"],
])) {
  for (const name of names.split(" ")) FAMILIES.set(name, family);
}

/** A number, a word with what may follow it, or one other character. */
const TOKEN = /(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_$][\w$]*)(?<call>\s*\()?|[^]/y;

/**
 * One line of code as nodes, and the state for the line after it: what ends the comment or string
 * that is still open, with its class; null when none is.
 * @param {string} line without its newline
 * @param {string} language as the fence names it
 * @param {{ close: string, kind: string } | null} state
 * @returns {{ nodes: (Node | string)[], state: { close: string, kind: string } | null }}
 */
export function highlightLine(line, language, state) {
  const family = FAMILIES.get(language.toLowerCase());
  if (!family) return { nodes: [line], state: null };
  /** @type {(Node | string)[]} */
  const nodes = [];
  let plain = "";
  let i = 0;
  /** @param {string} kind @param {number} end */
  const take = (kind, end) => {
    if (plain) nodes.push(plain);
    plain = "";
    if (end > i) nodes.push(element("span", kind, line.slice(i, end)));
    i = end;
  };
  /** @param {{ close: string, kind: string }} open @param {number} from */
  const takeSpan = (open, from) => {
    const end = line.indexOf(open.close, from);
    state = end < 0 ? open : null;
    take(open.kind, end < 0 ? line.length : end + open.close.length);
  };
  if (state) takeSpan(state, 0);
  while (i < line.length) {
    const comment = family.spans.find(([open]) => line.startsWith(open, i));
    const string = family.strings.find(([open]) => line.startsWith(open, i));
    if (comment) {
      takeSpan({ close: comment[1], kind: "c" }, i + comment[0].length);
    } else if (beginsLineComment(line, i, family)) {
      take("c", line.length);
    } else if (string) {
      takeSpan({ close: string[1], kind: "s" }, i + string[0].length);
    } else if (family.quotes.includes(line[i])) {
      take("s", endOfString(line, i));
    } else {
      TOKEN.lastIndex = i;
      const match = /** @type {RegExpExecArray} */ (TOKEN.exec(line));
      const { number, word, call } = match.groups ?? {};
      const known = word && family.keywords.has(family === SQL ? word.toLowerCase() : word);
      if (number) take("n", i + number.length);
      else if (known) take("k", i + word.length);
      else if (word && call) take("f", i + word.length);
      else {
        const text = word ?? match[0];
        plain += text;
        i += text.length;
      }
    }
  }
  if (plain) nodes.push(plain);
  return { nodes, state };
}

/**
 * "https://" begins no comment, nor does "$#".
 * @param {string} line
 * @param {number} i
 * @param {Family} family
 */
function beginsLineComment(line, i, family) {
  if (!family.line.some((open) => line.startsWith(open, i))) return false;
  return i === 0 || /[\s;{}(),]/.test(line[i - 1]);
}

/** @param {string} line @param {number} start of the opening quote */
function endOfString(line, start) {
  for (let i = start + 1; i < line.length; i++) {
    if (line[i] === "\\") i += 1;
    else if (line[i] === line[start]) return i + 1;
  }
  return line.length;
}
