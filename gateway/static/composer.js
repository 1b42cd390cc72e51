// @ts-check
/** The box that questions are typed into: send, stop, and how full the model's context is. */

import { byId, grouped } from "./dom.js";

/** Around the gauge's circle, as index.html draws it. */
const RING = 2 * Math.PI * 7;
const NEARLY_FULL = 0.85;

export class Composer {
  #chats;
  #client;
  #input = byId("input");
  #maxLength = 0;
  #onSend;

  /**
   * @param {import("./chats.js").Chats} chats
   * @param {import("./client.js").ResponsesClient} client
   * @param {() => void} onSend
   */
  constructor(chats, client, onSend) {
    this.#chats = chats;
    this.#client = client;
    this.#onSend = onSend;
    this.#input.addEventListener("input", () => this.#fit());
    this.#input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) =>
      this.#key(event),
    );
    byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => {
      chats.stop();
      this.focus();
    });
    for (const name of ["path", "answer"]) chats.addEventListener(name, () => this.show());
    client.addEventListener("state", () => this.show());
  }

  /** @param {number} maxLength tokens that the model holds */
  setMaxLength(maxLength) {
    this.#maxLength = maxLength;
    this.show();
  }

  /** Where typing needs no screen keyboard, the reader can type at once. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.#input.focus();
  }

  send(text = this.#input.value.trim()) {
    if (!text || this.#client.state !== "open" || this.#chats.running()) return;
    this.#input.value = "";
    this.#fit();
    this.#onSend();
    this.#chats.ask(text);
  }

  show() {
    const running = this.#chats.running() !== undefined;
    byId("stop").hidden = !running;
    byId("send").hidden = running;
    byId("send").disabled = this.#client.state !== "open" || !this.#input.value.trim();
    this.#showContext();
  }

  #fit() {
    this.#input.style.height = "auto";
    this.#input.style.height = `${this.#input.scrollHeight}px`;
    this.show();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    // While an input method composes, Enter chooses a word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  /** What the last answer left in the context, and what a running one has added. */
  #showContext() {
    const path = this.#chats.path();
    const counted = path.findLast((message) => message.usage);
    const running = path.at(-1)?.usage ? 0 : (path.at(-1)?.numTokens ?? 0);
    const used =
      (counted?.usage ? counted.usage.input_tokens + counted.usage.output_tokens : 0) + running;
    const gauge = byId("context");
    gauge.hidden = !used || !this.#maxLength;
    if (gauge.hidden) return;
    const share = Math.min(1, used / this.#maxLength);
    const words = `${grouped(used)} of ${grouped(this.#maxLength)} tokens of context used`;
    gauge.classList.toggle("full", share > NEARLY_FULL);
    gauge.title = words;
    byId("context-ring").style.strokeDasharray = `${share * RING} ${RING}`;
    byId("context-text").textContent = `${grouped(used)} / ${grouped(this.#maxLength)}`;
  }
}
