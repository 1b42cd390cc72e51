// @ts-check
/**
 * Markdown as chat models write it, made of DOM nodes: no HTML is ever parsed, so a model's text
 * can only become the elements below. GitHub's flavour: paragraphs, headings, lists and task lists,
 * quotes, tables, rules, code; `inline.js` has what stands inside a line.
 *
 * `MarkdownView` is for a text that grows. Each update parses from the last block but one (the
 * unfinished last line can still join that one), and changes only the DOM that differs: a code
 * block or a list grows in place. The result is the same DOM that one call with the whole text
 * gives. What is still open counts as closed: a fence, and a table's half-written rule.
 */

import { element } from "./dom.js";
import { highlightLine } from "./highlight.js";
import { renderInline } from "./inline.js";

/**
 * @typedef {"left" | "center" | "right" | ""} Align
 * @typedef {{ key: string, start: number } & (
 *     { kind: "paragraph", text: string }
 *   | { kind: "quote", text: string }
 *   | { kind: "heading", level: number, text: string }
 *   | { kind: "code", language: string, text: string }
 *   | { kind: "list", ordered: boolean, first: number, items: string[] }
 *   | { kind: "table", head: string[], aligns: Align[], rows: string[][] }
 *   | { kind: "rule" })} Block
 *   `key` is equal for blocks that look the same; `start` is its offset in the text.
 */

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$/;
const UNDERLINE = /^ {0,3}(=+|-+)\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*))?$/;
const INDENTED = /^ {4,}\S/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const HALF_TABLE_RULE = /^ {0,3}\|?\s*:?-[-:|\s]*$/;
const TASK = /^\[([ xX])\][ \t]+/;
const MAX_DEPTH = 8;
const MAX_COLUMNS = 64;

/**
 * @param {string} source
 * @param {number} [from] the beginning of a block
 * @returns {Block[]}
 */
export function parseBlocks(source, from = 0) {
  return new BlockParser(source, from).parse();
}

class BlockParser {
  /** @param {string} source @param {number} from */
  constructor(source, from) {
    this.from = from;
    const raw = (from ? source.slice(from) : source).split("\n");
    /** @type {number[]} where each line begins in the source */
    this.starts = [];
    let start = from;
    for (const line of raw) {
      this.starts.push(start);
      start += line.length + 1;
    }
    this.lines = raw.map((line) => (/[\t\r]/.test(line) ? withoutTabs(line) : line));
    this.i = 0;
    /** @type {Block[]} */
    this.blocks = [];
  }

  /** @returns {Block[]} */
  parse() {
    while (this.i < this.lines.length) {
      const line = this.lines[this.i];
      if (!line.trim()) this.i += 1;
      else if (INDENTED.test(line)) this.#indented();
      else if (FENCE.test(line)) this.#fence();
      else if (HEADING.test(line)) this.#heading();
      else if (RULE.test(line)) this.#add({ kind: "rule" }, "", 1);
      else if (QUOTE.test(line)) this.#quote();
      else if (ITEM.test(line)) this.#list();
      else if (!this.#table()) this.#paragraph();
    }
    return this.blocks;
  }

  /**
   * @param {any} block
   * @param {string} content
   * @param {number} numLines
   */
  #add(block, content, numLines) {
    this.blocks.push({ ...block, key: `${block.kind}\0${content}`, start: this.starts[this.i] });
    this.i += numLines;
  }

  #indented() {
    const { lines } = this;
    let end = this.i;
    for (let i = this.i; i < lines.length && (INDENTED.test(lines[i]) || !lines[i].trim()); i++) {
      if (lines[i].trim()) end = i + 1;
    }
    const text = lines
      .slice(this.i, end)
      .map((line) => line.slice(4))
      .join("\n");
    this.#add({ kind: "code", language: "", text }, `\n${text}`, end - this.i);
  }

  #fence() {
    const { lines } = this;
    const [, indent, fence, language] = /** @type {RegExpExecArray} */ (FENCE.exec(lines[this.i]));
    const body = [];
    let end = this.i + 1;
    for (; end < lines.length && !closes(lines[end], fence); end++) {
      body.push(withoutIndent(lines[end], indent.length));
    }
    const isOpen = end >= lines.length;
    // A closing fence that is being written is not code.
    if (isOpen && body.length && isPartOf(body[body.length - 1], fence)) body.pop();
    const text = body.join("\n");
    this.#add({ kind: "code", language, text }, `${language}\n${text}`, end + 1 - this.i);
  }

  #heading() {
    const [, hashes, text = ""] = /** @type {RegExpExecArray} */ (HEADING.exec(this.lines[this.i]));
    this.#add({ kind: "heading", level: hashes.length, text }, hashes + text, 1);
  }

  #quote() {
    const { lines } = this;
    const body = [];
    let end = this.i;
    for (; end < lines.length; end++) {
      const match = QUOTE.exec(lines[end]);
      // A line without its ">" still belongs to the paragraph before it.
      if (!match && !(isPlain(lines[end]) && isPlain(body.at(-1) ?? ""))) break;
      body.push(match ? match[1] : lines[end]);
    }
    const text = body.join("\n");
    this.#add({ kind: "quote", text }, text, end - this.i);
  }

  /** Nested items need two columns only: models are less careful than CommonMark wants. */
  #list() {
    const { lines } = this;
    const [, indent, marker] = /** @type {RegExpExecArray} */ (ITEM.exec(lines[this.i]));
    const items = [];
    let end = this.i;
    while (end < lines.length) {
      const match = ITEM.exec(lines[end]);
      if (!match || match[1].length > indent.length + 1) break;
      if (markerKind(match[2]) !== markerKind(marker) || RULE.test(lines[end])) break;
      const column = match[1].length + match[2].length + Math.min(match[3]?.length ?? 1, 4);
      const body = [match[4] ?? ""];
      for (end += 1; end < lines.length && this.#inItem(end, match[1].length); end++) {
        body.push(withoutIndent(lines[end], column));
      }
      items.push(body.join("\n").trimEnd());
    }
    const ordered = /\d/.test(marker);
    const first = ordered ? parseInt(marker, 10) : 1;
    const block = { kind: "list", ordered, first, items };
    this.#add(block, `${ordered} ${first}\0${items.join("\0")}`, end - this.i);
  }

  /** Whether a line belongs to the item above it. @param {number} i @param {number} indent */
  #inItem(i, indent) {
    const { lines } = this;
    if (!lines[i].trim()) {
      let next = i + 1;
      while (next < lines.length && !lines[next].trim()) next += 1;
      if (next >= lines.length) return false;
      return columnOf(lines[next]) >= indent + 2 || this.#isSibling(next, i, indent);
    }
    if (columnOf(lines[i]) >= indent + 2) return true;
    return Boolean(lines[i - 1].trim()) && !interrupts(lines[i], true);
  }

  /**
   * Blank lines between two items are the first one's.
   * @param {number} next
   * @param {number} i
   * @param {number} indent
   */
  #isSibling(next, i, indent) {
    const match = ITEM.exec(this.lines[next]);
    return Boolean(match && match[1].length <= indent + 1 && i < next);
  }

  #table() {
    const { lines } = this;
    const found = this.#tableAt(this.i);
    if (!found) return false;
    const rows = [];
    let end = this.i + 2;
    for (; end < lines.length && lines[end].trim() && !interrupts(lines[end]); end++) {
      rows.push(cellsOf(lines[end]));
    }
    const content = lines.slice(this.i, end).join("\n");
    this.#add({ kind: "table", ...found, rows }, content, end - this.i);
    return true;
  }

  /**
   * A table's first two lines, or null.
   * @param {number} i
   * @returns {{ head: string[], aligns: Align[] } | null}
   */
  #tableAt(i) {
    const { lines } = this;
    const rule = lines[i + 1];
    if (rule === undefined || !lines[i].includes("|")) return null;
    // A line that begins something else is no head, or a paragraph would end before it in vain.
    if (INDENTED.test(lines[i]) || interrupts(lines[i], true)) return null;
    const isLast = i + 2 === lines.length;
    if (!TABLE_RULE.test(rule) && !(isLast && HALF_TABLE_RULE.test(rule))) return null;
    const head = cellsOf(lines[i]);
    const rules = cellsOf(rule);
    if (head.length > MAX_COLUMNS) return null;
    if (rules.length !== head.length && !(isLast && rules.length < head.length)) return null;
    const aligns = head.map((_, column) => alignOf(rules[column] ?? ""));
    return { head, aligns };
  }

  #paragraph() {
    const { lines } = this;
    const body = [];
    let end = this.i;
    for (; end < lines.length && lines[end].trim(); end++) {
      const underline = body.length ? UNDERLINE.exec(lines[end]) : null;
      if (underline) {
        const level = underline[1][0] === "=" ? 1 : 2;
        const text = body.join("\n");
        this.#add({ kind: "heading", level, text }, "#".repeat(level) + text, end + 1 - this.i);
        return;
      }
      if (body.length && (interrupts(lines[end]) || this.#tableAt(end))) break;
      body.push(lines[end].trimStart());
    }
    const text = body.join("\n").trimEnd();
    this.#add({ kind: "paragraph", text }, text, end - this.i);
  }
}

/** Leading tabs as columns, no carriage return. @param {string} line */
function withoutTabs(line) {
  return line.replace(/\r$/, "").replace(/^[ \t]+/, (indent) => {
    let columns = 0;
    for (const char of indent) columns += char === "\t" ? 4 - (columns % 4) : 1;
    return " ".repeat(columns);
  });
}

/** @param {string} line */
function columnOf(line) {
  return line.length - line.trimStart().length;
}

/** @param {string} line @param {number} columns at most so many spaces go */
function withoutIndent(line, columns) {
  return line.slice(Math.min(columns, columnOf(line)));
}

/** @param {string} marker */
function markerKind(marker) {
  return marker[marker.length - 1];
}

/** @param {string} line @param {string} fence */
function closes(line, fence) {
  const trimmed = line.trim();
  return columnOf(line) < 4 && trimmed.length >= fence.length && isRunOf(trimmed, fence[0]);
}

/** @param {string} line @param {string} fence */
function isPartOf(line, fence) {
  const trimmed = line.trim();
  return trimmed.length > 0 && trimmed.length < fence.length && isRunOf(trimmed, fence[0]);
}

/** @param {string} text @param {string} char */
function isRunOf(text, char) {
  return text === char.repeat(text.length);
}

/**
 * Whether a line ends the paragraph before it. A number other than 1 does not ("in\n1984. Then"),
 * unless that paragraph is a list's.
 * @param {string} line
 * @param {boolean} [inList]
 */
function interrupts(line, inList = false) {
  if ([FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line))) return true;
  const item = ITEM.exec(line);
  if (!item?.[4]) return Boolean(item && inList);
  return inList || !/\d/.test(item[2]) || parseInt(item[2], 10) === 1;
}

/** Whether a line can only be a paragraph's. @param {string} line */
function isPlain(line) {
  return Boolean(line.trim()) && !interrupts(line, true) && !UNDERLINE.test(line);
}

/** @param {string} line a row of a table */
function cellsOf(line) {
  const cells = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "")
    .split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {string} rule @returns {Align} */
function alignOf(rule) {
  if (rule.startsWith(":") && rule.endsWith(":") && rule.length > 1) return "center";
  if (rule.endsWith(":")) return "right";
  return rule.startsWith(":") ? "left" : "";
}

// Views: a block's element, and how it changes into a block that is longer.

/** Some blocks in a row, in an element of their own. */
class BlocksView {
  /** @param {HTMLElement} root @param {number} depth */
  constructor(root, depth) {
    this.root = root;
    this.depth = depth;
    /** @type {BlockView[]} */
    this.views = [];
  }

  /** @param {Block[]} blocks @param {number} [numSettled] so many views stay as they are */
  update(blocks, numSettled = 0) {
    let n = 0;
    let same = numSettled;
    while (n < blocks.length && this.views[same]?.key === blocks[n].key) {
      same += 1;
      n += 1;
    }
    if (n < blocks.length && this.views[same]?.grow(blocks[n])) {
      same += 1;
      n += 1;
    }
    for (const view of this.views.splice(same)) view.node.remove();
    for (const block of blocks.slice(n)) {
      const view = new VIEWS[block.kind](block, this.depth, this.#topLevel(block));
      this.views.push(view);
      this.root.append(view.node);
    }
  }

  /** The level of the first heading here, which may be the next one. @param {Block} next */
  #topLevel(next) {
    if (next.kind !== "heading") return 0;
    const first = this.views.find((view) => view instanceof HeadingView);
    return first instanceof HeadingView ? first.level : next.level;
  }
}

class BlockView {
  /** @param {Block} block @param {HTMLElement} node */
  constructor(block, node) {
    this.key = block.key;
    this.node = node;
  }

  /** Become this block, if that is cheaper than a new view. @param {Block} _block */
  grow(_block) {
    return false;
  }
}

class ParagraphView extends BlockView {
  /** @param {Extract<Block, { kind: "paragraph" }>} block */
  constructor(block) {
    super(block, element("p", "", ...renderInline(block.text)));
  }

  /** @param {Block} block */
  grow(block) {
    if (block.kind !== "paragraph") return false;
    this.key = block.key;
    replaceTail(this.node, renderInline(block.text));
    return true;
  }
}

/**
 * Give an element new children, and leave those at its beginning that stay the same: the browser
 * then keeps what it knows of their layout.
 * @param {HTMLElement} parent
 * @param {(Node | string)[]} nodes
 */
function replaceTail(parent, nodes) {
  let n = 0;
  let child = parent.firstChild;
  for (; child && n < nodes.length; child = child.nextSibling, n++) {
    const node = nodes[n];
    if (child instanceof Text && typeof node === "string" && node.startsWith(child.data)) {
      if (node.length > child.length) child.appendData(node.slice(child.length));
    } else if (typeof node === "string" || !child.isEqualNode(node)) {
      break;
    }
  }
  while (child) {
    const next = child.nextSibling;
    child.remove();
    child = next;
  }
  parent.append(...nodes.slice(n));
}

class HeadingView extends BlockView {
  /**
   * The page has the levels above: a text's first heading is an h3, whatever it was written as.
   * @param {Extract<Block, { kind: "heading" }>} block
   * @param {number} _depth
   * @param {number} topLevel
   */
  constructor(block, _depth, topLevel) {
    const level = Math.min(6, 3 + Math.max(0, block.level - topLevel));
    super(block, element(`h${level}`, "", ...renderInline(block.text)));
    this.level = block.level;
  }
}

class RuleView extends BlockView {
  /** @param {Block} block */
  constructor(block) {
    super(block, element("hr"));
  }
}

class CodeView extends BlockView {
  /** @param {Extract<Block, { kind: "code" }>} block */
  constructor(block) {
    const copy = element("button", "copy", "Copy");
    copy.setAttribute("type", "button");
    copy.setAttribute("data-action", "copy-code");
    const head = element("div", "code-head", element("span", "", block.language || "text"), copy);
    const code = element("code");
    const pre = element("pre", "", code);
    pre.setAttribute("tabindex", "0"); // It may scroll: keys must reach it.
    super(block, element("div", "code", head, pre));
    this.language = block.language;
    this.code = code;
    /** The lines that are complete, each with its newline. */
    this.settled = "";
    this.numSettled = 0;
    /** @type {ReturnType<typeof highlightLine>["state"]} at the end of them */
    this.state = null;
    this.#fill(block.text);
  }

  /** @param {Block} block */
  grow(block) {
    if (block.kind !== "code" || block.language !== this.language) return false;
    if (!block.text.startsWith(this.settled)) return false;
    this.key = block.key;
    this.#fill(block.text);
    return true;
  }

  /** @param {string} text */
  #fill(text) {
    const lines = text.slice(this.settled.length).split("\n");
    while (this.code.childElementCount > this.numSettled) this.code.lastChild?.remove();
    for (const [n, line] of lines.entries()) {
      const { nodes, state } = highlightLine(line, this.language, this.state);
      if (n < lines.length - 1) {
        this.state = state;
        this.settled += `${line}\n`;
        this.numSettled += 1;
        nodes.push("\n");
      }
      this.code.append(element("span", "line", ...nodes));
    }
  }
}

class QuoteView extends BlockView {
  /** @param {Extract<Block, { kind: "quote" }>} block @param {number} depth */
  constructor(block, depth) {
    super(block, element("blockquote"));
    this.inner = new BlocksView(this.node, depth + 1);
    this.grow(block);
  }

  /** @param {Block} block */
  grow(block) {
    if (block.kind !== "quote") return false;
    this.key = block.key;
    if (this.inner.depth > MAX_DEPTH) this.node.textContent = block.text;
    else this.inner.update(parseBlocks(block.text));
    return true;
  }
}

class ListView extends BlockView {
  /** @param {Extract<Block, { kind: "list" }>} block @param {number} depth */
  constructor(block, depth) {
    super(block, element(block.ordered ? "ol" : "ul"));
    if (block.first !== 1) this.node.setAttribute("start", String(block.first));
    this.ordered = block.ordered;
    this.first = block.first;
    this.depth = depth;
    /** @type {ItemView[]} */
    this.items = [];
    this.grow(block);
  }

  /** @param {Block} block */
  grow(block) {
    if (block.kind !== "list" || block.ordered !== this.ordered || block.first !== this.first) {
      return false;
    }
    this.key = block.key;
    for (const [n, text] of block.items.entries()) {
      const item = (this.items[n] ??= new ItemView(this.node, this.depth + 1));
      item.update(text);
    }
    for (const item of this.items.splice(block.items.length)) item.node.remove();
    return true;
  }
}

class ItemView {
  /** @param {HTMLElement} list @param {number} depth */
  constructor(list, depth) {
    this.node = element("li");
    list.append(this.node);
    this.inner = new BlocksView(this.node, depth);
    /** @type {string | null} */
    this.text = null;
  }

  /** @param {string} text */
  update(text) {
    if (text === this.text) return;
    this.text = text;
    if (this.inner.depth > MAX_DEPTH) {
      this.node.textContent = text;
      return;
    }
    const task = TASK.exec(text);
    this.node.className = task ? "task" : "";
    if (!task) this.node.removeAttribute("class");
    const blocks = parseBlocks(task ? text.slice(task[0].length) : text);
    if (task) blocks.unshift(boxBlock(task[1] !== " "));
    this.inner.update(blocks);
  }
}

/** A task's box stands before its blocks. @param {boolean} done @returns {any} */
function boxBlock(done) {
  return { kind: "box", done, key: `box\0${done}`, start: 0 };
}

class BoxView extends BlockView {
  /** @param {any} block */
  constructor(block) {
    const box = element("span", "box", block.done ? "☑" : "☐");
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", block.done ? "done" : "to do");
    super(block, box);
  }
}

class TableView extends BlockView {
  /** @param {Extract<Block, { kind: "table" }>} block */
  constructor(block) {
    const body = element("tbody");
    const table = element("table", "", element("thead", "", rowOf("th", block.head, block)), body);
    const frame = element("div", "table", table);
    frame.setAttribute("tabindex", "0"); // It may scroll: keys must reach it.
    super(block, frame);
    this.body = body;
    this.top = topOf(block);
    /** @type {string[]} */
    this.rows = [];
    this.grow(block);
  }

  /** @param {Block} block */
  grow(block) {
    if (block.kind !== "table" || topOf(block) !== this.top) return false;
    this.key = block.key;
    const rows = block.rows.map((cells) => cells.join("\0"));
    let same = 0;
    while (same < rows.length && rows[same] === this.rows[same]) same += 1;
    while (this.body.childElementCount > same) this.body.lastChild?.remove();
    for (const cells of block.rows.slice(same)) this.body.append(rowOf("td", cells, block));
    this.rows = rows;
    return true;
  }
}

/** @param {Extract<Block, { kind: "table" }>} block what a row cannot change */
function topOf({ head, aligns }) {
  return [...head, ...aligns].join("\0");
}

/**
 * @param {"th" | "td"} tag
 * @param {string[]} cells
 * @param {Extract<Block, { kind: "table" }>} table
 */
function rowOf(tag, cells, { head, aligns }) {
  const row = element("tr");
  for (const [column] of head.entries()) {
    const cell = element(tag, aligns[column], ...renderInline(cells[column] ?? ""));
    if (tag === "th") cell.setAttribute("scope", "col");
    row.append(cell);
  }
  return row;
}

/** @type {Record<string, new (block: any, depth: number, topLevel: number) => BlockView>} */
const VIEWS = {
  paragraph: ParagraphView,
  heading: HeadingView,
  code: CodeView,
  list: ListView,
  quote: QuoteView,
  table: TableView,
  rule: RuleView,
  box: BoxView,
};

export class MarkdownView {
  #blocks;
  /** What comes before `#restart` can only be as it is. */
  #settled = "";
  #numSettled = 0;
  #source = "";

  /** @param {HTMLElement} root is filled with the blocks, and nothing else may change it */
  constructor(root) {
    this.#blocks = new BlocksView(root, 0);
  }

  /** @param {string} source the whole text so far */
  update(source) {
    if (source === this.#source) return;
    this.#source = source;
    if (!source.startsWith(this.#settled)) {
      this.#settled = "";
      this.#numSettled = 0;
    }
    const blocks = parseBlocks(source, this.#settled.length);
    this.#blocks.update(blocks, this.#numSettled);
    if (blocks.length > 2) {
      this.#numSettled += blocks.length - 2;
      this.#settled = source.slice(0, blocks[blocks.length - 2].start);
    }
  }
}
