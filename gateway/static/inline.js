// @ts-check
/**
 * The inline half of Markdown: a line of text as DOM nodes, by CommonMark's delimiter algorithm.
 *
 * `code`, **bold**, *italic*, ~~struck~~, [links](https://...), <https://...>, bare addresses,
 * escapes, character references. Newlines break lines, as people expect of a chat. HTML stays text,
 * and an image becomes a link to it: a model's text must not make the browser fetch anything.
 */

import { element } from "./dom.js";

/**
 * @typedef {object} Delimiter a run of *, _ or ~ that may turn out to be emphasis
 * @property {string} char
 * @property {number} count how many are left of it
 * @property {number} length how many it began with
 * @property {boolean} opens
 * @property {boolean} closes
 * @property {number} at its index in `nodes`, where its own text stands
 * @property {Delimiter | null} before the last one before it that may open something
 *
 * @typedef {object} Bracket an open [ or ![
 * @property {number} at its index in `nodes`
 * @property {number} end where its label begins in the text
 * @property {boolean} image
 * @property {number} delimiters how many there were before it
 *
 * @typedef {(Node | string)[]} Nodes
 */

const ESCAPABLE = /[!-/:-@[-`{-~]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const CODE_CHARACTERS = new Map([
  ["&amp;", "&"],
  ["&lt;", "<"],
  ["&gt;", ">"],
  ["&quot;", '"'],
  ["&apos;", "'"],
  ["&nbsp;", "\u00a0"],
  ["&copy;", "©"],
  ["&hellip;", "…"],
  ["&ndash;", "–"],
  ["&mdash;", "—"],
  ["&times;", "×"],
  ["&rarr;", "→"],
]);
const REFERENCE = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|[a-z]{2,6});/y;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BARE_LINK = /https?:\/\/[^\s<>`]+/y;
/** "(address)" or "(address "title")"; bounded, so that many of them take no quadratic time. */
const DESTINATION = new RegExp(
  [
    /\(\s{0,9}/,
    /(?:<([^<>\n]{0,2000})>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.){0,500}\)){0,2000}))/,
    /(?:\s{1,9}(?:"(?:[^"\\]|\\.){0,500}"|'(?:[^'\\]|\\.){0,500}'))?\s{0,9}\)/,
  ]
    .map((part) => part.source)
    .join(""),
  "y",
);
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;
/** Closers look this far back for their opener, so that no text takes quadratic time. */
const MAX_LOOK_BACK = 64;
/** Elements in elements: more is no emphasis, and browsers do not bear thousands. */
const MAX_DEPTH = 16;

/** @param {string} text @returns {Nodes} */
export function renderInline(text) {
  return new InlineParser(text).parse();
}

class InlineParser {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
    this.i = 0;
    /** @type {Nodes} */
    this.nodes = [];
    /** @type {Delimiter[]} */
    this.delimiters = [];
    /** @type {Bracket[]} */
    this.brackets = [];
    /** @type {Set<number>} lengths of backtick runs that no later run closes */
    this.unclosed = new Set();
    /** @type {Map<Node, number>} how deep emphasis is nested in an element, itself included */
    this.depths = new Map();
    this.plain = "";
  }

  /** @returns {Nodes} */
  parse() {
    const { text } = this;
    while (this.i < text.length) {
      const char = text[this.i];
      if (char === "`") this.#code();
      else if (char === "\\") this.#escape();
      else if (char === "\n") this.#newline();
      else if (char === "*" || char === "_" || char === "~") this.#delimiter(char);
      else if (char === "[" || (char === "!" && text[this.i + 1] === "[")) this.#openBracket();
      else if (char === "]") this.#closeBracket();
      else if (char === "<") this.#angle();
      else if (char === "&") this.#reference();
      else if (char === "h" && !/\w/.test(text[this.i - 1] ?? " ")) this.#bareLink();
      else this.#take(1);
    }
    this.#flush();
    this.#emphasize(0);
    return merged(this.nodes);
  }

  /** @param {number} length */
  #take(length) {
    this.plain += this.text.slice(this.i, this.i + length);
    this.i += length;
  }

  #flush() {
    if (this.plain) this.nodes.push(this.plain);
    this.plain = "";
  }

  /** @param {Node} node @param {number} length */
  #push(node, length) {
    this.#flush();
    this.nodes.push(node);
    this.i += length;
  }

  /** @param {RegExp} sticky */
  #match(sticky) {
    sticky.lastIndex = this.i;
    return sticky.exec(this.text);
  }

  #code() {
    const { text } = this;
    const length = runLength(text, this.i);
    if (this.unclosed.has(length)) return this.#take(length);
    let end = this.i + length;
    while ((end = text.indexOf("`", end)) >= 0) {
      const found = runLength(text, end);
      if (found === length) break;
      end += found;
    }
    if (end < 0) {
      this.unclosed.add(length);
      return this.#take(length);
    }
    let code = text.slice(this.i + length, end).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(code)) code = code.slice(1, -1);
    this.#push(element("code", "", code), end + length - this.i);
  }

  #escape() {
    const next = this.text[this.i + 1] ?? "";
    if (next === "\n") {
      this.i += 1;
      this.#newline();
    } else if (ESCAPABLE.test(next)) {
      this.plain += next;
      this.i += 2;
    } else {
      this.#take(1);
    }
  }

  #newline() {
    this.plain = this.plain.trimEnd();
    this.#push(element("br"), 1);
    while (this.text[this.i] === " ") this.i += 1;
  }

  #reference() {
    const match = this.#match(REFERENCE);
    if (!match) return this.#take(1);
    const [whole, decimal, hex] = match;
    const point = decimal ? parseInt(decimal, 10) : hex ? parseInt(hex, 16) : -1;
    const named = CODE_CHARACTERS.get(whole);
    if (point < 0 && named === undefined) return this.#take(1);
    const valid = point > 0 && point <= 0x10ffff && !(point >= 0xd800 && point <= 0xdfff);
    this.plain += named ?? (valid ? String.fromCodePoint(point) : "\ufffd");
    this.i += whole.length;
  }

  #angle() {
    const match = this.#match(ANGLE_LINK);
    if (match) this.#push(link(match[1], [match[1]]), match[0].length);
    else this.#take(1);
  }

  #bareLink() {
    const match = this.#match(BARE_LINK);
    if (!match || this.brackets.some((bracket) => !bracket.image)) return this.#take(1);
    const url = withoutTail(match[0]);
    if (/^https?:\/\/$/.test(url)) return this.#take(url.length);
    this.#push(link(url, [url]), url.length);
  }

  /** @param {string} char */
  #delimiter(char) {
    const { text, i } = this;
    let length = 1;
    while (text[i + length] === char) length += 1;
    if (char === "~" && length > 2) return this.#take(length);
    const before = charBefore(text, i);
    const after = charAfter(text, i + length);
    const left =
      !/\s/.test(after) &&
      (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const right =
      !/\s/.test(before) &&
      (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const inWord = char === "_";
    this.#flush();
    this.delimiters.push({
      char,
      count: length,
      length,
      opens: left && (!inWord || !right || PUNCTUATION.test(before)),
      closes: right && (!inWord || !left || PUNCTUATION.test(after)),
      at: this.nodes.length,
      before: null,
    });
    this.nodes.push(char.repeat(length));
    this.i += length;
  }

  #openBracket() {
    const image = this.text[this.i] === "!";
    this.#flush();
    this.brackets.push({
      at: this.nodes.length,
      end: this.i + (image ? 2 : 1),
      image,
      delimiters: this.delimiters.length,
    });
    this.nodes.push(image ? "![" : "[");
    this.i += image ? 2 : 1;
  }

  #closeBracket() {
    const bracket = this.brackets.pop();
    if (!bracket) return this.#take(1);
    const labelEnd = this.i;
    this.i += 1;
    const match = this.#match(DESTINATION);
    this.i -= 1;
    const href = (match?.[1] ?? match?.[2] ?? "").replace(/\\([!-/:-@[-`{-~])/g, "$1");
    if (!match || !SAFE_LINK.test(href)) return this.#take(1);
    this.#flush();
    this.#emphasize(bracket.delimiters);
    const inside = this.nodes.splice(bracket.at);
    const label = bracket.image
      ? [this.text.slice(bracket.end, labelEnd) || href]
      : merged(inside.slice(1));
    this.#push(link(href, label), 1 + match[0].length);
    // A link holds no other link: brackets that opened before this one are text.
    if (!bracket.image) this.brackets = this.brackets.filter((open) => open.image);
  }

  /** Turn matching delimiters from index `from` on into elements. @param {number} from */
  #emphasize(from) {
    const { nodes } = this;
    /** @type {Delimiter | null} the last one that may still open something */
    let last = null;
    for (const closer of this.delimiters.splice(from)) {
      closer.before = last;
      while (closer.closes && closer.count > 0) {
        const opener = findOpener(closer);
        if (!opener) break;
        // Places in `nodes` stay what they are: what moves into the element leaves "" behind.
        const first = opener.at + 1;
        const inside = merged(nodes.slice(first, closer.at));
        const depth = 1 + Math.max(0, ...inside.map((node) => this.#depthOf(node)));
        if (depth > MAX_DEPTH) break;
        const size = closer.char === "~" ? closer.count : Math.min(2, opener.count, closer.count);
        const tag = closer.char === "~" ? "s" : size === 2 ? "strong" : "em";
        const node = element(tag, "", ...inside);
        this.depths.set(node, depth);
        nodes.fill("", first, closer.at);
        nodes[first] = node;
        opener.count -= size;
        closer.count -= size;
        nodes[opener.at] = opener.char.repeat(opener.count);
        nodes[closer.at] = closer.char.repeat(closer.count);
        // What lay between them is inside the element: no delimiter any more.
        closer.before = opener.count > 0 ? opener : opener.before;
      }
      last = closer.opens && closer.count > 0 ? closer : closer.before;
    }
  }

  /** @param {Node | string} node */
  #depthOf(node) {
    return typeof node === "string" ? 0 : (this.depths.get(node) ?? 0);
  }
}

/** @param {Delimiter} closer @returns {Delimiter | null} */
function findOpener(closer) {
  let opener = closer.before;
  for (let n = 0; opener && n < MAX_LOOK_BACK; n++, opener = opener.before) {
    if (opener.char !== closer.char) continue;
    if (closer.char === "~" && opener.count !== closer.count) continue;
    // CommonMark's rule of three: `**a*b**` is not emphasis around "a".
    const both = opener.closes || closer.opens;
    const three = (opener.length + closer.length) % 3 === 0;
    if (both && three && (opener.length % 3 !== 0 || closer.length % 3 !== 0)) continue;
    return opener;
  }
  return null;
}

/** Adjacent strings as one, empty ones gone. @param {Nodes} nodes @returns {Nodes} */
function merged(nodes) {
  /** @type {Nodes} */
  const out = [];
  for (const node of nodes) {
    const last = out.at(-1);
    if (typeof node === "string" && typeof last === "string") out[out.length - 1] = last + node;
    else if (node !== "") out.push(node);
  }
  return out;
}

/** @param {string} text @param {number} i */
function runLength(text, i) {
  let length = 1;
  while (text[i + length] === "`") length += 1;
  return length;
}

/**
 * The whole character before an index; a space at the edge.
 * @param {string} text
 * @param {number} i
 */
function charBefore(text, i) {
  if (i === 0) return " ";
  const unit = text.charCodeAt(i - 1);
  return unit >= 0xdc00 && unit <= 0xdfff ? text.slice(Math.max(0, i - 2), i) : text[i - 1];
}

/** @param {string} text @param {number} i */
function charAfter(text, i) {
  return i < text.length ? String.fromCodePoint(/** @type {number} */ (text.codePointAt(i))) : " ";
}

/** An address without the punctuation of the sentence around it. @param {string} url */
function withoutTail(url) {
  const open = { ")": url.split("(").length, "]": url.split("[").length };
  const close = { ")": url.split(")").length, "]": url.split("]").length };
  let end = url.length;
  for (; end > 0; end--) {
    const last = url[end - 1];
    if (last === ")" || last === "]") {
      if (open[last] >= close[last]) break;
      close[last] -= 1;
    } else if (!/[?!.,:;*_~'"|]/.test(last)) {
      break;
    }
  }
  return url.slice(0, end);
}

/** @param {string} href one that SAFE_LINK matches @param {Nodes} label */
function link(href, label) {
  const anchor = element("a", "", ...label);
  anchor.setAttribute("href", href);
  anchor.setAttribute("target", "_blank");
  anchor.setAttribute("rel", "noopener noreferrer nofollow");
  return anchor;
}
