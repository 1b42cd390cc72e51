// @ts-check
/** The list of conversations: search, rename, delete with undo, export. */

import { byId, download, element, iconButton } from "./dom.js";

/**
 * @typedef {import("./chats.js").Chats} Chats
 * @typedef {import("./store.js").Conversation} Conversation
 */

const SEARCH_MS = 150;
const UNDO_MS = 8000;
const DAY_MS = 24 * 60 * 60 * 1000;

export class Sidebar {
  #chats;
  #list = byId("chat-list");
  #menu = byId("chat-menu");
  #toast = byId("toast");
  /** The one whose menu is open. @type {Conversation | null} */
  #chosen = null;
  /** Shown instead of all while there are words to search for. @type {Conversation[] | null} */
  #found = null;
  #searchTimer = 0;
  #toastTimer = 0;
  /** @type {() => void} */
  #undo = () => {};

  /** @param {Chats} chats */
  constructor(chats) {
    this.#chats = chats;
    chats.addEventListener("list", () => this.#listChanged());
    chats.addEventListener("path", () => this.#render());
    byId("search").addEventListener("input", () => {
      clearTimeout(this.#searchTimer);
      this.#searchTimer = setTimeout(() => void this.#search(), SEARCH_MS);
    });
    byId("menu-rename").addEventListener("click", () =>
      this.#withChosen((chat) => this.#rename(chat)),
    );
    byId("menu-delete").addEventListener("click", () =>
      this.#withChosen((chat) => void this.#delete(chat)),
    );
    byId("menu-markdown").addEventListener("click", () =>
      this.#withChosen(async (chat) =>
        download(fileName(chat, "md"), "text/markdown", await chats.asMarkdown(chat)),
      ),
    );
    byId("menu-json").addEventListener("click", () =>
      this.#withChosen(async (chat) =>
        download(fileName(chat, "json"), "application/json", await chats.asJson(chat)),
      ),
    );
    byId("undo").addEventListener("click", () => {
      this.#toast.hidden = true;
      this.#undo();
    });
  }

  #listChanged() {
    if (byId("search").value.trim()) void this.#search();
    else this.#render();
  }

  async #search() {
    const words = byId("search").value.trim();
    const found = words ? await this.#chats.search(words) : null;
    if (words !== byId("search").value.trim()) return; // Typed on meanwhile.
    this.#found = found;
    this.#render();
  }

  #render() {
    if (this.#list.querySelector("input")) return; // A title is being typed.
    const chats = this.#found ?? this.#chats.list;
    const groups = new Map();
    for (const chat of chats) {
      const age = ageOf(chat.updatedAt);
      if (!groups.has(age)) groups.set(age, []);
      groups.get(age).push(this.#item(chat));
    }
    const nodes = [...groups].map(([age, items]) =>
      element("section", "", element("h2", "", age), element("ul", "", ...items)),
    );
    const empty = this.#found ? "Nothing found." : "Conversations stay in this browser.";
    this.#list.replaceChildren(...(nodes.length ? nodes : [element("p", "empty", empty)]));
  }

  /** @param {Conversation} chat */
  #item(chat) {
    const link = element("a", "", element("span", "title", chat.title));
    link.setAttribute("href", `#${chat.id}`);
    link.title = chat.title;
    if (this.#chats.current?.id === chat.id) link.setAttribute("aria-current", "page");
    if (this.#chats.running(chat.id)) {
      const busy = element("span", "busy");
      busy.setAttribute("role", "img");
      busy.setAttribute("aria-label", "answering");
      link.append(busy);
    }
    const more = iconButton("icon-more", `More for ${chat.title}`, () =>
      this.#openMenu(chat, more),
    );
    return element("li", "", link, more);
  }

  /** @param {Conversation} chat @param {HTMLElement} button */
  #openMenu(chat, button) {
    this.#chosen = chat;
    this.#menu.showPopover();
    const at = button.getBoundingClientRect();
    const height = this.#menu.offsetHeight;
    const below = at.bottom + 4 + height < innerHeight;
    this.#menu.style.left = `${Math.min(at.left, innerWidth - this.#menu.offsetWidth - 8)}px`;
    this.#menu.style.top = `${below ? at.bottom + 4 : at.top - height - 4}px`;
    this.#menu.querySelector("button").focus();
  }

  /** @param {(chat: Conversation) => void} work */
  #withChosen(work) {
    this.#menu.hidePopover();
    if (this.#chosen) work(this.#chosen);
  }

  /** @param {Conversation} chat */
  #rename(chat) {
    const link = this.#list.querySelector(`a[href="#${chat.id}"]`);
    if (!link) return;
    const input = /** @type {HTMLInputElement} */ (element("input", "rename"));
    input.value = chat.title;
    input.setAttribute("aria-label", "Title");
    link.replaceWith(input);
    input.select();
    let isDone = false;
    /** @param {string} title */
    const finish = (title) => {
      if (isDone) return;
      isDone = true;
      input.remove();
      this.#chats.rename(chat, title);
    };
    input.addEventListener("blur", () => finish(input.value));
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") finish(input.value);
      else if (event.key === "Escape") finish(chat.title);
    });
  }

  /** @param {Conversation} chat */
  async #delete(chat) {
    const undo = await this.#chats.remove(chat);
    this.#undo = () => void undo();
    byId("toast-text").textContent = `“${chat.title}” was deleted.`;
    this.#toast.hidden = false;
    clearTimeout(this.#toastTimer);
    this.#toastTimer = setTimeout(() => (this.#toast.hidden = true), UNDO_MS);
  }
}

/** @param {number} time */
function ageOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  return time >= today - 7 * DAY_MS ? "This week" : "Older";
}

/** @param {Conversation} chat @param {string} suffix */
function fileName(chat, suffix) {
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${name || "conversation"}.${suffix}`;
}
