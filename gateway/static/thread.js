// @ts-check
/**
 * The conversation that is shown: questions, answers as they grow, and what can be done with them.
 * The DOM changes at most once per animation frame, and scrolls along only while the reader is at
 * its end.
 */

import { byId, copyText, element, grouped, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/**
 * @typedef {import("./chats.js").Chats} Chats
 * @typedef {import("./store.js").Message} Message
 */

/** Nearer to the bottom than this, in pixels, the reader follows the answer. */
const FOLLOW_PX = 48;
/** So many times as long as it took to draw, nothing is drawn. */
const REST = 2;
const TAGS = /** @type {Record<string, string>} */ ({
  stopped: "stopped",
  length: "cut at max tokens",
});

export class Thread {
  #chats;
  #root = byId("messages");
  #scroller = byId("scroller");
  /** @type {(QuestionView | AnswerView)[]} */
  #views = [];
  /** @type {Set<AnswerView>} to be drawn in the next frame */
  #grown = new Set();
  #frame = 0;
  #restUntil = 0;
  #following = true;
  #lastTop = 0;
  /** @type {string | undefined} */
  #shownId;

  /** @param {Chats} chats */
  constructor(chats) {
    this.#chats = chats;
    chats.addEventListener("path", () => this.#render());
    chats.addEventListener("answer", (event) =>
      this.#grow(/** @type {CustomEvent<Message>} */ (event).detail),
    );
    this.#root.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      const button = /** @type {HTMLElement} */ (event.target).closest("[data-action=copy-code]");
      const code = button?.closest(".code")?.querySelector("code");
      if (button && code)
        void copyText(code.textContent ?? "", /** @type {HTMLElement} */ (button));
    });
    this.#scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    byId("latest").addEventListener("click", () => this.follow());
    // The window or the composer changed its height, or a font came.
    const sizes = new ResizeObserver(() => this.#stick());
    sizes.observe(this.#scroller);
    sizes.observe(this.#root);
  }

  /** Go to the end, and stay there. */
  follow() {
    this.#following = true;
    this.#stick();
  }

  /** Change the last question. */
  editLast() {
    this.#views.findLast((view) => view instanceof QuestionView)?.edit();
  }

  #render() {
    const path = this.#chats.path();
    const conversationId = this.#chats.current?.id;
    const isOther = conversationId !== this.#shownId;
    this.#shownId = conversationId;
    byId("welcome").hidden = path.length > 0;
    let same = 0;
    while (same < path.length && this.#views[same]?.message === path[same]) same += 1;
    for (const view of this.#views.splice(same)) view.node.remove();
    for (const message of path.slice(same)) {
      const View = message.role === "user" ? QuestionView : AnswerView;
      const view = new View(message, this.#chats);
      this.#views.push(view);
      this.#root.append(view.node);
    }
    for (const view of this.#views) view.show();
    // A question that was just asked, or another conversation: to its end.
    const asked = path.at(-1)?.status === "streaming" && same < path.length;
    if (isOther || asked) this.follow();
    else this.#stick();
  }

  /** @param {Message} message */
  #grow(message) {
    const view = this.#views.find((other) => other.message === message);
    if (!(view instanceof AnswerView)) return;
    this.#grown.add(view);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    const start = performance.now();
    if (start < this.#restUntil) {
      this.#frame = requestAnimationFrame(() => this.#draw());
      return;
    }
    this.#frame = 0;
    for (const grown of this.#grown) grown.show();
    this.#grown.clear();
    this.#stick();
    // Where drawing is slow it leaves most of the time to everything else.
    const end = performance.now();
    this.#restUntil = end + REST * (end - start);
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    // Only the reader scrolls up; growing text moves the end away, but not the position.
    if (scrollHeight - scrollTop - clientHeight < FOLLOW_PX) this.#following = true;
    else if (scrollTop < this.#lastTop) this.#following = false;
    this.#lastTop = scrollTop;
    byId("latest").hidden = this.#following;
  }

  #stick() {
    if (this.#following) {
      this.#scroller.scrollTop = this.#scroller.scrollHeight;
      this.#lastTop = this.#scroller.scrollTop;
    }
    byId("latest").hidden = this.#following;
  }
}

class QuestionView {
  #chats;
  #bubble;
  #actions;
  #versions;

  /** @param {Message} message @param {Chats} chats */
  constructor(message, chats) {
    this.message = message;
    this.#chats = chats;
    this.#bubble = element("div", "bubble", message.content);
    this.#versions = new Versions(message, chats);
    const copy = iconButton(
      "icon-copy",
      "Copy message",
      () => void copyText(message.content, copy),
    );
    const edit = iconButton("icon-edit", "Edit and send again", () => this.edit());
    this.#actions = element("div", "actions", this.#versions.node, copy, edit);
    this.node = element(
      "article",
      "message user",
      element("h2", "hidden", "You"),
      this.#bubble,
      this.#actions,
    );
  }

  show() {
    this.#versions.show();
  }

  /** Change the question in its place; sending asks it anew, beside the first. */
  edit() {
    if (this.#bubble.hidden) return;
    const form = /** @type {HTMLFormElement} */ (element("form", "editor"));
    const text = /** @type {HTMLTextAreaElement} */ (element("textarea"));
    const cancel = /** @type {HTMLButtonElement} */ (element("button", "quiet", "Cancel"));
    const send = /** @type {HTMLButtonElement} */ (element("button", "primary", "Send"));
    text.value = this.message.content;
    text.rows = Math.min(12, this.message.content.split("\n").length + 1);
    text.setAttribute("aria-label", "Edit message");
    cancel.type = "button";
    send.type = "submit";
    form.append(text, element("div", "editor-actions", cancel, send));
    const close = () => {
      form.remove();
      this.#bubble.hidden = this.#actions.hidden = false;
      byId("input").focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const changed = text.value.trim();
      if (!changed) return;
      close();
      this.#chats.edit(this.message, changed);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (
        event.key === "Enter" &&
        !event.shiftKey &&
        !event.isComposing &&
        event.target === text
      ) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.#bubble.hidden = this.#actions.hidden = true;
    this.node.append(form);
    text.focus();
    text.setSelectionRange(text.value.length, text.value.length);
  }
}

class AnswerView {
  #chats;
  #text = element("div", "text");
  #markdown = new MarkdownView(this.#text);
  #typing = element("div", "typing", element("i"), element("i"), element("i"), element("span"));
  #error = element("p", "error");
  #numbers = element("span", "numbers");
  #tag = element("span", "tag");
  #actions;
  #versions;

  /** @param {Message} message @param {Chats} chats */
  constructor(message, chats) {
    this.message = message;
    this.#chats = chats;
    this.#versions = new Versions(message, chats);
    this.#error.setAttribute("role", "alert");
    const copy = iconButton("icon-copy", "Copy answer", () => void copyText(message.content, copy));
    copy.classList.add("copy-answer");
    const retry = iconButton("icon-retry", "Try again", () => chats.retry(message));
    retry.classList.add("retry-answer");
    this.#actions = element("div", "actions", this.#versions.node, copy, retry);
    const meta = element("div", "meta", this.#actions, this.#tag, this.#numbers);
    this.node = element(
      "article",
      "message assistant",
      element("h2", "hidden", "Assistant"),
      this.#typing,
      this.#text,
      this.#error,
      meta,
    );
  }

  show() {
    const { message } = this;
    const growing = message.status === "streaming";
    const answer = this.#chats.answerOf(message);
    this.#markdown.update(message.content);
    this.#typing.hidden = !growing || Boolean(message.content);
    this.#setText(
      /** @type {HTMLElement} */ (this.#typing.lastChild),
      answer?.queued ? "waiting for a free slot" : answer ? "" : "waiting for the connection",
    );
    this.node.classList.toggle("streaming", growing && answer !== undefined);
    // Screen readers get the answer when it is whole, not word by word.
    if (growing) this.node.setAttribute("aria-busy", "true");
    else this.node.removeAttribute("aria-busy");
    this.#error.hidden = message.status !== "failed";
    this.#setText(this.#error, message.error ?? "");
    this.#tag.hidden = !(message.status && message.status in TAGS);
    this.#setText(this.#tag, TAGS[message.status ?? ""] ?? "");
    this.#setText(this.#numbers, summaryOf(message));
    this.#actions.hidden = growing;
    this.#versions.show();
  }

  /** @param {HTMLElement} node @param {string} text */
  #setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }
}

/** "‹ 2 / 3 ›": the other versions of a message. */
class Versions {
  #count = element("span", "count");

  /** @param {Message} message @param {Chats} chats */
  constructor(message, chats) {
    this.message = message;
    this.chats = chats;
    this.node = element(
      "span",
      "versions",
      iconButton("icon-left", "Previous version", () => this.#move(-1)),
      this.#count,
      iconButton("icon-right", "Next version", () => this.#move(1)),
    );
  }

  show() {
    const versions = this.chats.versions(this.message);
    this.node.hidden = versions.length < 2;
    this.#count.textContent = `${versions.indexOf(this.message) + 1} / ${versions.length}`;
  }

  /** @param {number} step */
  #move(step) {
    const versions = this.chats.versions(this.message);
    const next = versions[versions.indexOf(this.message) + step];
    if (next) this.chats.select(next);
  }
}

/** Tokens, speed and wait of an answer. @param {Message} message */
function summaryOf({ usage, numTokens, timings }) {
  if (!timings?.firstTextAt) return "";
  const tokens = usage?.output_tokens || numTokens || 0;
  const seconds = (timings.lastTextAt - timings.firstTextAt) / 1000;
  const parts = [`${grouped(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (tokens > 1 && seconds > 0) {
    const rate = (tokens - 1) / seconds;
    parts.push(`${rate < 100 ? rate.toFixed(1) : grouped(rate)} tok/s`);
  }
  const wait = timings.firstTextAt - timings.startedAt;
  parts.push(
    `first token ${wait < 10_000 ? `${Math.round(wait)} ms` : `${(wait / 1000).toFixed(1)} s`}`,
  );
  return parts.join(" · ");
}
