// @ts-check
/**
 * Markdown as chat models write it, made of DOM nodes: no HTML is ever parsed, so a model's text
 * can only become the elements below. Paragraphs, headings, lists, quotes, rules, code fences (an
 * open one counts as closed), `code`, **bold**, *italic*, ~~struck~~, [links](https://...).
 *
 * `MarkdownView` keeps the blocks that have not changed, so each frame of a growing answer touches
 * only its tail; the result is the same DOM that one call with the whole text gives.
 */

/**
 * @typedef {{ kind: "paragraph" | "quote", text: string }
 *   | { kind: "heading", level: number, text: string }
 *   | { kind: "code", language: string, text: string }
 *   | { kind: "list", lines: string[] }
 *   | { kind: "rule" }} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const MAX_DEPTH = 6;

/** @param {string} source @returns {Block[]} */
export function parseBlocks(source) {
  /** @type {Block[]} */
  const blocks = [];
  const lines = source.replace(/\r\n?/g, "\n").split("\n");
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) {
      i += 1;
    } else if ((match = FENCE.exec(line))) {
      const [, fence, language] = match;
      const body = [];
      for (i += 1; i < lines.length && !closes(lines[i], fence); i++) body.push(lines[i]);
      i += 1;
      blocks.push({ kind: "code", language, text: body.join("\n") });
    } else if ((match = HEADING.exec(line))) {
      blocks.push({ kind: "heading", level: match[1].length, text: match[2] });
      i += 1;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule" });
      i += 1;
    } else if (QUOTE.test(line)) {
      const body = [];
      for (; i < lines.length && (match = QUOTE.exec(lines[i])); i++) body.push(match[1]);
      blocks.push({ kind: "quote", text: body.join("\n") });
    } else if (ITEM.test(line)) {
      const body = [];
      for (; i < lines.length && continuesList(lines, i); i++) body.push(lines[i]);
      blocks.push({ kind: "list", lines: body });
    } else {
      const body = [];
      for (; i < lines.length && lines[i].trim() && (!body.length || !interrupts(lines[i])); i++) {
        body.push(lines[i].trim());
      }
      blocks.push({ kind: "paragraph", text: body.join("\n") });
    }
  }
  return blocks;
}

/** @param {string} line @param {string} fence */
function closes(line, fence) {
  const trimmed = line.trim();
  return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
}

/** @param {string} line */
function interrupts(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

/** @param {string[]} lines @param {number} i */
function continuesList(lines, i) {
  const line = lines[i];
  if (!line.trim()) return i + 1 < lines.length && (ITEM.test(lines[i + 1]) || /^\s{2,}\S/.test(lines[i + 1]));
  if (RULE.test(line)) return false;
  return ITEM.test(line) || /^\s/.test(line) || !interrupts(line) && Boolean(lines[i - 1]?.trim());
}

/**
 * @param {string} tag
 * @param {string} [className]
 * @param {...(Node | string)} children
 */
export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** @param {Block} block @param {number} depth @returns {HTMLElement} */
function renderBlock(block, depth) {
  switch (block.kind) {
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, "", ...renderInline(block.text));
    case "code":
      return renderCode(block);
    case "quote": {
      const quote = element("blockquote");
      if (depth >= MAX_DEPTH) quote.append(block.text);
      else for (const inner of parseBlocks(block.text)) quote.append(renderBlock(inner, depth + 1));
      return quote;
    }
    case "list":
      return renderList(block.lines, depth);
    case "rule":
      return element("hr");
    default:
      return element("p", "", ...renderInline(block.text));
  }
}

/** @param {{ language: string, text: string }} block */
function renderCode({ language, text }) {
  const copy = element("button", "copy", "Copy");
  copy.setAttribute("type", "button");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = element("div", "code-head", element("span", "", language || "text"), copy);
  return element("div", "code", head, element("pre", "", element("code", "", text)));
}

/** @param {string[]} lines @param {number} depth @returns {HTMLElement} */
function renderList(lines, depth) {
  const first = /** @type {RegExpExecArray} */ (ITEM.exec(lines[0]));
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const list = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) list.setAttribute("start", String(parseInt(first[2], 10)));
  let i = 0;
  while (i < lines.length) {
    const match = ITEM.exec(lines[i]);
    const body = [match ? match[3] : lines[i].trim()];
    for (i += 1; i < lines.length; i++) {
      const next = ITEM.exec(lines[i]);
      if (next && next[1].length <= indent + 1) break;
      body.push(lines[i].replace(new RegExp(`^\\s{0,${indent + 2}}`), ""));
    }
    const item = element("li");
    const blocks = depth >= MAX_DEPTH ? [] : parseBlocks(body.join("\n"));
    if (depth >= MAX_DEPTH) item.append(body.join("\n"));
    for (const [n, block] of blocks.entries()) {
      // A tight item: its first paragraph needs no <p>.
      if (n === 0 && block.kind === "paragraph") item.append(...renderInline(block.text));
      else item.append(renderBlock(block, depth + 1));
    }
    list.append(item);
  }
  return list;
}

// One alternative per inline form; the first that matches at the earliest place wins.
const INLINE = new RegExp(
  [
    /(?<ticks>`+)(?<code>[^\n]*?[^`\n])\k<ticks>(?!`)/,
    /\\(?<escaped>[\\`*_{}[\]()#+\-.!~>|])/,
    /\*\*\*(?<both>[^\s*](?:[^\n]*?[^\s*])??)\*\*\*/,
    /\*\*(?<bold>[^\s*](?:[^\n]*?[^\s])??)\*\*(?!\*)/,
    /(?<![\w_])__(?<bold2>[^\s_](?:[^\n]*?[^\s])??)__(?![\w_])/,
    /(?<!\*)\*(?<italic>[^\s*](?:[^*\n]*?[^\s*])??)\*(?!\*)/,
    /(?<![\w_])_(?<italic2>[^\s_](?:[^_\n]*?[^\s_])??)_(?![\w_])/,
    /~~(?<struck>[^\s~](?:[^\n]*?[^\s~])??)~~/,
    /\[(?<label>[^\]\n]+)\]\((?<href>https?:\/\/[^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)*)\)/,
    /(?<url>https?:\/\/[^\s<>()"'`*]+[^\s<>()"'`*.,;:!?])/,
    /(?<newline>\n)/,
  ]
    .map((part) => part.source)
    .join("|"),
  "g",
);

/** @param {string} text @param {number} [depth] @returns {(Node | string)[]} */
function renderInline(text, depth = 0) {
  if (depth >= MAX_DEPTH) return [text];
  /** @type {(Node | string)[]} */
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const found = /** @type {Record<string, string | undefined>} */ (match.groups);
    const bold = found.bold ?? found.bold2;
    const italic = found.italic ?? found.italic2;
    if (found.code !== undefined) nodes.push(element("code", "", found.code));
    else if (found.escaped !== undefined) nodes.push(found.escaped);
    else if (found.both !== undefined) {
      nodes.push(element("strong", "", element("em", "", ...renderInline(found.both, depth + 1))));
    } else if (bold !== undefined) nodes.push(element("strong", "", ...renderInline(bold, depth + 1)));
    else if (italic !== undefined) nodes.push(element("em", "", ...renderInline(italic, depth + 1)));
    else if (found.struck !== undefined) nodes.push(element("s", "", ...renderInline(found.struck, depth + 1)));
    else if (found.href !== undefined) nodes.push(link(found.href, String(found.label)));
    else if (found.url !== undefined) nodes.push(link(found.url, found.url));
    else nodes.push(element("br"));
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** @param {string} href http(s) only: the pattern sees to it @param {string} label */
function link(href, label) {
  const anchor = element("a", "", label);
  anchor.setAttribute("href", href);
  anchor.setAttribute("target", "_blank");
  anchor.setAttribute("rel", "noopener noreferrer nofollow");
  return anchor;
}

/** @param {string} text @param {HTMLElement} button says for a moment how it went */
export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

export class MarkdownView {
  /** @param {HTMLElement} root is filled with the blocks, and nothing else may change it */
  constructor(root) {
    this.root = root;
    /** @type {string[]} */
    this.keys = [];
  }

  /** @param {string} source the whole text so far */
  update(source) {
    const blocks = parseBlocks(source);
    const keys = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild?.remove();
    for (const block of blocks.slice(same)) this.root.append(renderBlock(block, 0));
    this.keys = keys;
  }
}
