// @ts-check
/**
 * The engine view: what continuous batching and paged KV do, while they do it.
 *
 * Every request in the engine is a row, drawn as the KV blocks it holds, 16 tokens or so each: the
 * prompt's (those found in the prefix cache are striped), then the answer's, one filling up at a
 * time. Below them the whole pool. A few times a second, from the server's tinyvllm.stats.
 */

import { THIS_CHAT } from "./chats.js";
import { byId, element, grouped } from "./dom.js";

/**
 * @typedef {import("./client.js").Stats} Stats
 * @typedef {import("./client.js").Sequence} Sequence
 */

const INTERVAL_MS = 250;
const HISTORY = 240; // a minute
const NUM_HUES = 8;
const MAX_ROWS = 12;
const MAX_SLOTS = 256;
const DEFAULT_BLOCK_SIZE = 16;
/** Pixels: a block of a row, and of the pool. */
const CELL = 9;
const POOL_CELL = 7;
const POOL_ROWS = 18;
const GAP = 2;
const STATE_WORDS = { waiting: "waiting", prefill: "reading", decode: "writing", paused: "paused" };
const LOAD_PROMPTS = [
  "Tell me a story about a lighthouse.",
  "Describe a walk through an old forest.",
  "Explain how bread is made.",
  "Why do cats purr?",
  "Write a letter to a friend about the sea.",
  "What makes a good teacher?",
  "Describe the perfect breakfast.",
  "How do bees find their way home?",
];
const LOAD_TOKENS = 160;

export class EngineView {
  #client;
  #nameOf;
  #panel = byId("engine");
  #rows = byId("engine-rows");
  /** @type {Map<string, Row>} by the request's tag */
  #byTag = new Map();
  /** @type {number[]} output tokens a second, the latest last */
  #history = [];
  /** @type {Stats | null} */
  #stats = null;
  /** @type {Set<import("./client.js").Answer>} */
  #load = new Set();

  /**
   * @param {import("./client.js").ResponsesClient} client
   * @param {(tag: string) => string | undefined} nameOf what this page calls a request of its own
   */
  constructor(client, nameOf) {
    this.#client = client;
    this.#nameOf = nameOf;
    client.addEventListener("stats", (event) =>
      this.#take(/** @type {CustomEvent<Stats>} */ (event).detail),
    );
    document.addEventListener("visibilitychange", () => this.#watch());
    byId("engine-load").addEventListener("click", () => this.#toggleLoad());
    // Colours are read from the style sheet when something is drawn.
    const redraw = () => this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new MutationObserver(redraw).observe(document.documentElement, {
      attributeFilter: ["data-theme"],
    });
    new ResizeObserver(redraw).observe(this.#panel);
  }

  get isOpen() {
    return !this.#panel.hidden;
  }

  /** @param {boolean} isOpen */
  open(isOpen) {
    this.#panel.hidden = !isOpen;
    this.#watch();
    this.#draw();
  }

  /** Nobody looks: the server need not tell. */
  #watch() {
    this.#client.watchStats(this.isOpen && !document.hidden ? INTERVAL_MS : 0);
  }

  /** @param {Stats} stats */
  #take(stats) {
    this.#stats = stats;
    this.#history.push(stats.tokens_per_second);
    if (this.#history.length > HISTORY) this.#history.shift();
    this.#draw();
  }

  #draw() {
    const stats = this.#stats;
    if (!stats || !this.isOpen) return;
    byId("engine-empty").hidden = true;
    byId("engine-body").hidden = false;
    this.#drawRates(stats);
    this.#drawRows(stats);
    this.#drawSlots(stats);
    this.#drawPool(stats);
    this.#drawTotals(stats);
  }

  /** @param {Stats} stats */
  #drawRates(stats) {
    byId("engine-rate").textContent = rated(stats.tokens_per_second);
    byId("engine-prompt-rate").textContent = rated(stats.prompt_tokens_per_second);
    byId("engine-steps").textContent = rated(stats.steps_per_second);
    const { context, width, height } = prepared(byId("engine-history"));
    const top = Math.max(10, ...this.#history) * 1.1;
    const step = width / (HISTORY - 1);
    const left = width - (this.#history.length - 1) * step;
    context.beginPath();
    for (const [n, rate] of this.#history.entries()) {
      context.lineTo(left + n * step, height - 1.5 - (rate / top) * (height - 4));
    }
    context.strokeStyle = colour("--accent");
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(left, height);
    context.globalAlpha = 0.12;
    context.fillStyle = colour("--accent");
    context.fill();
  }

  /** @param {Stats} stats */
  #drawRows({ sequences, num_sequences: numSequences, blocks }) {
    const shown = sequences.slice(0, MAX_ROWS);
    const size = blocks.size ?? DEFAULT_BLOCK_SIZE;
    // Hues stay with a request while it lives, whether its row is shown or not.
    const tags = new Set(sequences.map(({ tag }) => tag));
    for (const [tag, row] of this.#byTag) {
      if (tags.has(tag)) continue;
      row.node.remove();
      this.#byTag.delete(tag);
    }
    for (const { tag } of sequences) {
      if (!this.#byTag.has(tag)) this.#byTag.set(tag, new Row(this.#hueOf(tag)));
    }
    for (const [n, sequence] of shown.entries()) {
      const row = /** @type {Row} */ (this.#byTag.get(sequence.tag));
      if (this.#rows.children[n] !== row.node)
        this.#rows.insertBefore(row.node, this.#rows.children[n] ?? null);
      row.show(sequence, this.#nameOf(sequence.tag) ?? this.#promptOf(sequence.tag), size);
    }
    while (this.#rows.childElementCount > shown.length) this.#rows.lastChild.remove();
    byId("engine-idle").hidden = numSequences > 0;
    const more = numSequences - shown.length;
    byId("engine-more").hidden = more <= 0;
    byId("engine-more").textContent = `and ${grouped(Math.max(0, more))} more`;
  }

  /**
   * The page's own colour for its conversations; for others the one that is used least.
   * @param {string} tag
   */
  #hueOf(tag) {
    if (this.#nameOf(tag)) return 0;
    const counts = new Array(NUM_HUES).fill(0);
    for (const { hue } of this.#byTag.values()) counts[hue] += 1;
    return 1 + counts.slice(1).indexOf(Math.min(...counts.slice(1)));
  }

  /** What a request of `#toggleLoad` asked. @param {string} tag */
  #promptOf(tag) {
    for (const answer of this.#load) if (answer.tag === tag) return String(answer.request?.input);
    return undefined;
  }

  /** @param {Stats} stats */
  #drawSlots({ slots, sequences }) {
    const { running: busy, total } = slots;
    const words = [
      total === null ? `${grouped(busy)} running` : `${grouped(busy)} of ${grouped(total)} slots`,
    ];
    if (slots.waiting) words.push(`${grouped(slots.waiting)} waiting`);
    if (slots.paused) words.push(`${grouped(slots.paused)} paused`);
    byId("engine-slot-words").textContent = words.join(" · ");
    const canvas = byId("engine-slots");
    const count = Math.min(total ?? busy, MAX_SLOTS);
    const columns = Math.max(1, Math.floor((canvas.clientWidth + GAP) / (CELL + GAP)));
    canvas.style.height = `${Math.max(1, Math.ceil(count / columns)) * (CELL + GAP) - GAP}px`;
    const { context } = prepared(canvas);
    const running = sequences.filter(({ state }) => state !== "waiting");
    for (let n = 0; n < count; n++) {
      // Without slot numbers the busy ones stand first.
      const owner = running.find(({ slot }, place) => (slot ?? place) === n);
      const row = owner && this.#byTag.get(owner.tag);
      context.fillStyle = row ? colour(`--hue-${row.hue}`) : colour("--cell");
      context.globalAlpha = owner?.state === "prefill" || owner?.state === "paused" ? 0.5 : 1;
      cell(
        context,
        (n % columns) * (CELL + GAP),
        Math.floor(n / columns) * (CELL + GAP),
        CELL,
        CELL,
      );
    }
    canvas.setAttribute("aria-label", words.join(", "));
  }

  /**
   * The pool: each request's blocks in its colour, then shared, cached and free ones.
   * @param {Stats} stats
   */
  #drawPool({ blocks, sequences }) {
    const canvas = byId("engine-pool");
    const columns = Math.max(1, Math.floor((canvas.clientWidth + GAP) / (POOL_CELL + GAP)));
    const scale = Math.max(1, Math.ceil(blocks.total / (columns * POOL_ROWS)));
    const count = Math.ceil(blocks.total / scale);
    canvas.style.height = `${Math.ceil(count / columns) * (POOL_CELL + GAP) - GAP}px`;
    const { context } = prepared(canvas);
    const shared = blocks.shared ?? 0;
    const cached = blocks.cached ?? 0;
    const size = blocks.size ?? DEFAULT_BLOCK_SIZE;
    const own = sequences.filter(({ state }) => state !== "waiting");
    const held = own.map((sequence) => sequence.blocks ?? Math.ceil(lengthOf(sequence) / size));
    const sum = held.reduce((total, number) => total + number, 0);
    /**
     * @type {[string, number][]} colour and number of blocks; what blocks are shared counts once
     */
    const parts = [["--shared", shared]];
    const rest = blocks.used - shared;
    for (const [place, { tag }] of own.entries()) {
      parts.push([`--hue-${this.#byTag.get(tag)?.hue ?? 0}`, (held[place] / sum) * rest]);
    }
    if (!own.length) parts.push(["--accent", rest]);
    parts.push(["--cached", cached], ["--cell", blocks.free - cached]);
    let n = 0;
    let end = 0;
    for (const [name, number] of parts) {
      end += number / scale;
      // Whatever there is shows, if only as one cell of many blocks.
      const last = number > 0 ? Math.max(n + 1, Math.round(end)) : n;
      context.fillStyle = colour(name);
      for (; n < last && n < count; n++) {
        cell(
          context,
          (n % columns) * (POOL_CELL + GAP),
          Math.floor(n / columns) * (POOL_CELL + GAP),
          POOL_CELL,
          POOL_CELL,
        );
      }
    }
    const each = scale > 1 ? `, a square is ${scale} blocks` : "";
    byId("engine-pool-words").textContent =
      `${grouped(blocks.used)} of ${grouped(blocks.total)} in use`;
    byId("engine-pool-note").textContent = `A block holds ${size} tokens${each}.`;
    byId("engine-shared").textContent = blocks.shared === null ? "–" : grouped(shared);
    byId("engine-cached").textContent = blocks.cached === null ? "–" : grouped(cached);
    byId("engine-free").textContent = grouped(blocks.free - cached);
    canvas.setAttribute(
      "aria-label",
      `${blocks.used} of ${blocks.total} KV blocks in use, ${shared} of them shared; ` +
        `${cached} free ones keep a prefix`,
    );
  }

  /** @param {Stats} stats */
  #drawTotals({ prefix_cache: prefix, num_requests, num_output_tokens, num_preemptions }) {
    byId("engine-hits").textContent = prefix.queries
      ? `${Math.round((100 * prefix.hits) / prefix.queries)} %`
      : "–";
    byId("engine-requests").textContent = grouped(num_requests);
    byId("engine-tokens").textContent = grouped(num_output_tokens);
    byId("engine-preemptions").textContent = grouped(num_preemptions);
  }

  /** Eight requests at once, after everybody else's, to have something to look at. */
  #toggleLoad() {
    if (this.#load.size) {
      for (const answer of this.#load) answer.cancel();
      return;
    }
    for (const input of LOAD_PROMPTS) {
      const answer = this.#client.create({
        input,
        max_output_tokens: LOAD_TOKENS,
        tinyvllm: { priority: 1, resume_seconds: 0 },
      });
      this.#load.add(answer);
      const end = () => {
        this.#load.delete(answer);
        this.#showLoad();
      };
      answer.done.then(end, end);
    }
    this.#showLoad();
  }

  #showLoad() {
    byId("engine-load").textContent = this.#load.size ? "Stop them" : "Send 8 at once";
  }
}

/** @param {Sequence} sequence @returns {number} its tokens so far */
function lengthOf({ prompt_tokens: prompt, output_tokens: output }) {
  return prompt + output;
}

/** One request. */
class Row {
  #name = element("span", "row-name");
  #state = element("span", "row-state");
  #numbers = element("span", "row-numbers");
  #canvas = /** @type {HTMLCanvasElement} */ (element("canvas"));

  /** @param {number} hue */
  constructor(hue) {
    this.hue = hue;
    this.#canvas.setAttribute("aria-hidden", "true"); // The numbers say it.
    const head = element(
      "div",
      "row-head",
      element("i", `swatch hue-${hue}`),
      this.#name,
      this.#state,
      this.#numbers,
    );
    this.node = element("li", "row", head, this.#canvas);
  }

  /**
   * @param {Sequence} sequence
   * @param {string | undefined} name
   * @param {number} size tokens of a block
   */
  show(sequence, name, size) {
    const { prompt_tokens: prompt, output_tokens: output, cached_tokens: cached, state } = sequence;
    this.#name.textContent = name ?? "another client";
    this.node.classList.toggle("shown", name === THIS_CHAT);
    this.node.dataset.state = state;
    this.#state.textContent = STATE_WORDS[state];
    this.#numbers.textContent = `${grouped(prompt)} + ${grouped(output)}`;
    this.#numbers.title =
      `${prompt} tokens of prompt, ${cached} of them from the prefix cache, ` +
      `and ${output} of the answer`;
    const length = lengthOf(sequence);
    const computed = sequence.computed_tokens ?? (state === "waiting" ? 0 : length);
    const numBlocks = Math.max(1, Math.ceil(length / size));
    // Long requests have smaller blocks, so that each fits its row.
    const width = Math.max(1, this.#canvas.clientWidth);
    const pitch = Math.min(CELL + GAP, width / numBlocks);
    const side = pitch > 3 ? pitch - GAP * (pitch / (CELL + GAP)) : pitch;
    const { context } = prepared(this.#canvas);
    for (let n = 0; n < numBlocks; n++) {
      const from = n * size;
      const held = Math.min(size, Math.max(0, computed - from));
      const filled =
        Math.max(held, Math.min(size, length - from) * Number(state === "decode")) / size;
      context.fillStyle = colour("--cell");
      context.globalAlpha = 1;
      cell(context, n * pitch, 0, side, CELL);
      context.fillStyle = colour(`--hue-${this.hue}`);
      context.globalAlpha = from < prompt ? 0.55 : 1;
      if (filled > 0) cell(context, n * pitch, 0, Math.max(1, side * filled), CELL);
      if (from + size <= cached && pitch > 3) stripe(context, n * pitch, side);
    }
  }
}

/**
 * Cached: drawn as taken over, not computed.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} side
 */
function stripe(context, x, side) {
  context.globalAlpha = 0.9;
  context.strokeStyle = colour("--raised");
  context.lineWidth = 1.4;
  context.beginPath();
  context.moveTo(x + 1, CELL - 1);
  context.lineTo(x + side - 1, 1);
  context.stroke();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 */
function cell(context, x, y, width, height) {
  context.beginPath();
  context.roundRect(x, y, width, height, Math.min(2, width / 3));
  context.fill();
}

/** A canvas that is empty and as sharp as the screen. @param {HTMLCanvasElement} canvas */
function prepared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = devicePixelRatio;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.globalAlpha = 1;
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** @param {string} name of a custom property of the style sheet */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

/** @param {number} rate */
function rated(rate) {
  return rate > 0 && rate < 10 ? rate.toFixed(1) : grouped(rate);
}
