// @ts-check
/**
 * The conversations and the answers that grow in them: what the page knows, without its looks.
 *
 * Answers run side by side, also in conversations that are not shown. Each is written to the store
 * as it grows, its text together with the number of the event that it reaches to, so that after a
 * reload, or in another tab, it goes on exactly there.
 *
 * Events: "list" (conversations changed), "path" (the messages shown are others), "answer" (one of
 * them grew or ended; `detail` is its Message).
 */

import { newId } from "./store.js";

/**
 * @typedef {import("./store.js").Conversation} Conversation
 * @typedef {import("./store.js").Message} Message
 * @typedef {import("./client.js").Answer} Answer
 */

/** What `nameOf` calls the conversation that is shown. */
export const THIS_CHAT = "this chat";

const SAVE_MS = 300;
/** Where the answers that grow are noted when the page goes: IndexedDB may be too slow for that. */
const LEAVING_KEY = "tinyvllm.leaving";
const TITLE_LENGTH = 60;
/** A message that no server has accepted for so long was lost with the tab that sent it. */
const ORPHAN_MS = 15_000;
/** The server has dropped the events of a response that has ended, or the response itself. */
const GONE = new Set(["resume_window_exceeded", "response_not_found"]);

export class Chats extends EventTarget {
  #client;
  #store;
  #settings;
  /** @type {Map<string, Message>} of the conversation that is shown */
  #messages = new Map();
  /**
   * @type {Map<string, { message: Message, answer: Answer }>} by message id, in any conversation
   */
  #live = new Map();
  /** @type {Set<Message>} grown since they were written */
  #unsaved = new Set();
  #saveTimer = 0;
  #numOpened = 0;
  /** @type {() => void} */
  #setStarted = () => {};
  /** @type {Promise<void>} */
  #started = new Promise((resolve) => {
    this.#setStarted = resolve;
  });

  /**
   * @param {import("./client.js").ResponsesClient} client
   * @param {import("./store.js").Store} store
   * @param {import("./settings.js").Settings} settings
   */
  constructor(client, store, settings) {
    super();
    this.#client = client;
    this.#store = store;
    this.#settings = settings;
    /** @type {Conversation[]} the latest first */
    this.list = [];
    /**
     * Null is a new one, which begins to exist with its first message.
     * @type {Conversation | null}
     */
    this.current = null;
    store.addEventListener("change", (event) => {
      void this.#adopt(/** @type {CustomEvent<string>} */ (event).detail);
    });
    addEventListener("pagehide", () => this.#leave());
    document.addEventListener("visibilitychange", () => this.#save());
  }

  /** Read the list, and show a conversation if it exists. @param {string} id */
  async start(id) {
    try {
      await this.#return();
      this.list = await this.#store.conversations();
      this.dispatchEvent(new Event("list"));
      await this.open(id);
    } finally {
      this.#setStarted();
    }
  }

  /** Show a conversation; anything unknown shows a new one. @param {string | null} id */
  async open(id) {
    const number = ++this.#numOpened;
    const conversation = this.list.find((other) => other.id === id) ?? null;
    const messages = conversation ? await this.#store.messages(conversation.id) : [];
    if (number !== this.#numOpened) return; // The reader was quicker.
    this.current = conversation;
    this.#messages = new Map();
    this.#merge(messages);
    this.dispatchEvent(new Event("path"));
  }

  /**
   * The messages of the branch that is shown, or that ends with a given one.
   * @returns {Message[]}
   */
  path(leafId = this.current?.leafId) {
    const path = [];
    for (let message = this.#messages.get(leafId ?? ""); message;) {
      path.push(message);
      message = this.#messages.get(message.parentId ?? "");
    }
    return path.reverse();
  }

  /** All versions of a message, itself included, the oldest first. @param {Message} message */
  versions(message) {
    return [...this.#messages.values()].filter(
      (other) => other.parentId === message.parentId && other.role === message.role,
    );
  }

  /** Show another version of a message, and what followed it last. @param {Message} message */
  select(message) {
    let leaf = message;
    for (;;) {
      const next = [...this.#messages.values()]
        .filter((other) => other.parentId === leaf.id)
        .at(-1);
      if (!next) break;
      leaf = next;
    }
    this.#show(leaf);
  }

  /** @param {Message} message @returns {Answer | undefined} while it grows in this tab */
  answerOf(message) {
    return this.#live.get(message.id)?.answer;
  }

  /** The answer that is growing in a conversation. @returns {Message | undefined} */
  running(conversationId = this.current?.id) {
    for (const { message, answer } of this.#live.values()) {
      if (message.conversationId === conversationId && !answer.cancelled) return message;
    }
    return undefined;
  }

  /** The conversation of a request in the engine, by its label there. @param {string} tag */
  nameOf(tag) {
    for (const { message } of this.#live.values()) {
      if (message.tag !== tag) continue;
      if (message.conversationId === this.current?.id) return THIS_CHAT;
      return this.list.find(({ id }) => id === message.conversationId)?.title;
    }
    return undefined;
  }

  /** Ask, at the end of the branch that is shown. @param {string} text */
  ask(text) {
    // Who types at once after a reload asks in the conversation that was shown before it.
    void this.#started.then(() => this.#ask(text, this.current?.leafId ?? null));
  }

  /** Ask something else in a question's place. @param {Message} question @param {string} text */
  edit(question, text) {
    this.stop();
    this.#ask(text, question.parentId);
  }

  /** Another try at an answer. @param {Message} answer */
  retry(answer) {
    const question = this.#messages.get(answer.parentId ?? "");
    if (!question) return;
    this.stop();
    this.#begin(question);
  }

  /** Stop the answer that is growing in the conversation that is shown. */
  stop() {
    const message = this.running();
    if (message) this.#live.get(message.id)?.answer.cancel();
  }

  /** @param {Conversation} conversation @param {string} title */
  rename(conversation, title) {
    conversation.title = title.trim() || conversation.title;
    this.#put(conversation);
  }

  /**
   * Delete a conversation.
   * @param {Conversation} conversation
   * @returns {Promise<() => Promise<void>>} undoes it
   */
  async remove(conversation) {
    for (const { message, answer } of this.#live.values()) {
      if (message.conversationId === conversation.id) answer.cancel();
    }
    const messages = await this.#store.messages(conversation.id);
    this.list = this.list.filter((other) => other.id !== conversation.id);
    this.dispatchEvent(new Event("list"));
    if (this.current?.id === conversation.id) await this.open(null);
    await this.#store.deleteConversation(conversation.id);
    return async () => {
      await this.#store.putConversation(conversation);
      if (messages.length) await this.#store.putMessages(...messages);
      this.list = await this.#store.conversations();
      this.dispatchEvent(new Event("list"));
      await this.open(conversation.id);
    };
  }

  /**
   * The conversations whose title or text has these words.
   * @param {string} words
   * @returns {Promise<Conversation[]>}
   */
  async search(words) {
    const found = await this.#store.search(words);
    const wanted = words.toLowerCase();
    return this.list.filter(
      ({ id, title }) => found.has(id) || title.toLowerCase().includes(wanted),
    );
  }

  /** A conversation with all its branches. @param {Conversation} conversation */
  async asJson(conversation) {
    const messages = await this.#store.messages(conversation.id);
    return JSON.stringify(
      { format: "tinyvllm.conversation", version: 1, conversation, messages },
      null,
      2,
    );
  }

  /** The branch that is shown, to be read. @param {Conversation} conversation */
  async asMarkdown(conversation) {
    const messages = new Map((await this.#store.messages(conversation.id)).map((m) => [m.id, m]));
    const parts = [];
    for (let message = messages.get(conversation.leafId ?? ""); message;) {
      parts.unshift(`## ${whoOf(message)}\n\n${message.content}\n`);
      message = messages.get(message.parentId ?? "");
    }
    return `# ${conversation.title}\n\n${parts.join("\n")}`;
  }

  // Asking

  /** @param {string} text @param {string | null} parentId */
  #ask(text, parentId) {
    const now = Date.now();
    let conversation = this.current;
    if (!conversation) {
      const title = titleOf(text);
      conversation = {
        id: newId(),
        title,
        createdAt: now,
        updatedAt: now,
        changedAt: now,
        leafId: null,
      };
      this.current = conversation;
      this.list.unshift(conversation);
    }
    /** @type {Message} */
    const question = {
      id: newId(),
      conversationId: conversation.id,
      parentId,
      role: "user",
      content: text,
      createdAt: now,
    };
    this.#messages.set(question.id, question);
    this.#begin(question);
  }

  /** @param {Message} question */
  #begin(question) {
    /** @type {Message} */
    const message = {
      id: newId(),
      conversationId: question.conversationId,
      parentId: question.id,
      role: "assistant",
      content: "",
      createdAt: Math.max(Date.now(), question.createdAt + 1),
      status: "streaming",
      sequenceNumber: -1,
      numTokens: 0,
    };
    this.#messages.set(message.id, message);
    const answer = this.#client.create({
      input: this.#told(question),
      ...this.#settings.request(),
    });
    this.#follow(message, answer);
    void this.#store.putMessages(question, message);
    if (this.current) {
      this.current.updatedAt = message.createdAt;
      this.list.sort((a, b) => b.updatedAt - a.updatedAt);
    }
    this.#show(message);
  }

  /**
   * What the model is told: the branch up to a question, without turns that failed.
   * @param {Message} question
   */
  #told(question) {
    /** @type {import("./client.js").Message[]} */
    const told = [];
    for (const { role, content, status } of this.path(question.id)) {
      if (status === "failed") told.pop();
      else told.push({ role, content });
    }
    return told;
  }

  /** @param {Message} leaf */
  #show(leaf) {
    if (!this.current) return;
    this.current.leafId = leaf.id;
    this.#put(this.current);
    this.dispatchEvent(new Event("path"));
  }

  /** @param {Conversation} conversation */
  #put(conversation) {
    conversation.changedAt = Date.now();
    void this.#store.putConversation(conversation);
    this.dispatchEvent(new Event("list"));
  }

  // Answers that grow

  /** @param {Message} message @param {Answer} answer */
  #follow(message, answer) {
    this.#live.set(message.id, { message, answer });
    const before = { numTokens: message.numTokens ?? 0, timings: message.timings };
    const update = () => {
      const isAccepted = Boolean(answer.id) && message.responseId !== answer.id;
      message.content = answer.text;
      message.sequenceNumber = answer.sequenceNumber;
      message.responseId = answer.id || undefined;
      message.tag = answer.tag || message.tag;
      message.numTokens = before.numTokens + answer.numDeltas;
      message.timings = {
        startedAt: before.timings?.startedAt || answer.startedAt,
        firstTextAt: before.timings?.firstTextAt || answer.firstTextAt,
        lastTextAt: answer.lastTextAt || before.timings?.lastTextAt || 0,
      };
      if (answer.cancelled) message.status = "stopped";
      if (answer.ended) {
        this.#live.delete(message.id);
        this.#end(message, answer);
      } else if (isAccepted) {
        void this.#store.putMessages(message);
      } else {
        this.#unsaved.add(message);
        this.#saveTimer ||= setTimeout(() => this.#save(), SAVE_MS);
      }
      this.#tell(message);
    };
    answer.addEventListener("update", update);
    if (answer.ended) update();
  }

  /** @param {Message} message @param {Answer} answer that has ended */
  #end(message, answer) {
    const { response, error } = answer;
    if (response) this.#describe(message, response);
    if (answer.cancelled) {
      message.status = "stopped";
    } else if (error && GONE.has(error.code)) {
      void this.#recover(message);
      return;
    } else if (error?.code === "closed" && message.responseId) {
      return; // It may go on at the server: `goOn` asks when there is a connection again.
    } else if (error) {
      message.status = "failed";
      message.error = error.message;
    }
    this.#finish(message);
  }

  /** @param {Message} message @param {import("./client.js").Response} response its final form */
  #describe(message, { model, usage, incomplete_details: incomplete }) {
    message.model = model;
    if (usage) {
      message.usage = {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cached_tokens: usage.input_tokens_details.cached_tokens,
      };
    }
    message.status = !incomplete
      ? "completed"
      : incomplete.reason === "cancelled"
        ? "stopped"
        : "length";
  }

  /** The events are gone, but the server may still know the whole. @param {Message} message */
  async #recover(message) {
    try {
      const reply = await fetch(`/v1/responses/${encodeURIComponent(message.responseId ?? "")}`);
      const response = await reply.json();
      if (!reply.ok || response.status === "failed") throw new Error(response.error?.message);
      const parts = response.output.flatMap((/** @type {any} */ item) => item.content ?? []);
      message.content = parts.map((/** @type {any} */ part) => part.text ?? "").join("");
      this.#describe(message, response);
    } catch {
      message.status = "failed";
      message.error = "The server no longer has the rest of this answer.";
    }
    this.#finish(message);
  }

  /** @param {Message} message */
  #finish(message) {
    this.#unsaved.delete(message);
    if (!this.list.some(({ id }) => id === message.conversationId)) return; // Deleted meanwhile.
    void this.#store.putMessages(message);
    this.#tell(message);
    this.dispatchEvent(new Event("list"));
  }

  /** @param {Message} message */
  #tell(message) {
    if (message.conversationId !== this.current?.id) return;
    this.dispatchEvent(new CustomEvent("answer", { detail: message }));
  }

  #save() {
    clearTimeout(this.#saveTimer);
    this.#saveTimer = 0;
    if (this.#unsaved.size) void this.#store.putProgress(...this.#unsaved);
    this.#unsaved.clear();
  }

  #leave() {
    this.#save();
    /** @type {Message[]} */
    const messages = [];
    for (const { message } of this.#live.values()) {
      const question = this.#messages.get(message.parentId ?? "");
      messages.push(...(question ? [question, message] : [message]));
    }
    if (!messages.length) return;
    const live = new Set(messages.map((message) => message.conversationId));
    const conversations = this.list.filter(({ id }) => live.has(id));
    try {
      sessionStorage.setItem(LEAVING_KEY, JSON.stringify({ conversations, messages }));
    } catch {
      // Storage is blocked or full: the server tells again what was not written.
    }
  }

  async #return() {
    try {
      const left = JSON.parse(sessionStorage.getItem(LEAVING_KEY) ?? "null");
      sessionStorage.removeItem(LEAVING_KEY);
      if (!left) return;
      // A conversation that has just begun may not have been written when the page went.
      const stored = new Map((await this.#store.conversations()).map((each) => [each.id, each]));
      for (const conversation of left.conversations) {
        const changedAt = stored.get(conversation.id)?.changedAt ?? 0;
        if (changedAt < conversation.changedAt) await this.#store.putConversation(conversation);
      }
      await this.#store.putProgress(...left.messages);
    } catch {
      // Storage is blocked.
    }
  }

  // Other tabs, and the time before a reload

  /** There is a connection again after one that was closed for good. */
  goOn() {
    if (!this.#messages.size) return;
    this.#merge([...this.#messages.values()]);
    this.dispatchEvent(new Event("path"));
  }

  /** Another tab has changed a conversation. @param {string} id */
  async #adopt(id) {
    this.list = await this.#store.conversations();
    const stored = this.list.find((conversation) => conversation.id === id);
    const shown = this.current;
    if (shown) {
      // The object that is shown stays the one in the list, where it may not have arrived yet.
      this.list = this.list.map((other) => (other.id === shown.id ? shown : other));
      if (shown.id !== id && !this.list.includes(shown)) this.list.unshift(shown);
    }
    this.dispatchEvent(new Event("list"));
    if (shown?.id !== id) return;
    if (!stored) {
      await this.open(null);
      return;
    }
    const messages = await this.#store.messages(id);
    if (this.current !== shown) return;
    this.#merge(messages);
    if (stored.changedAt > shown.changedAt) Object.assign(shown, stored);
    this.dispatchEvent(new Event("path"));
  }

  /**
   * Take messages from the store, and go on with answers that were growing.
   * @param {Message[]} messages
   */
  #merge(messages) {
    for (const stored of messages) {
      const message = this.#live.get(stored.id)?.message ?? this.#messages.get(stored.id) ?? stored;
      this.#messages.set(message.id, message);
      if (!this.#live.has(message.id)) Object.assign(message, stored);
      if (message.status !== "streaming" || this.#live.has(message.id)) continue;
      if (message.responseId) {
        const answer = this.#client.resume(message.responseId, {
          startingAfter: message.sequenceNumber,
          text: message.content,
        });
        this.#follow(message, answer);
      } else if (Date.now() - message.createdAt > ORPHAN_MS) {
        message.status = "failed";
        message.error = "The page was closed before the server had accepted this.";
      } else {
        // Another tab may be sending it: look again, once it has had its time.
        setTimeout(() => this.goOn(), ORPHAN_MS);
      }
    }
  }
}

/** @param {string} text */
function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
}

/** @param {Message} message */
function whoOf({ role, model }) {
  return role === "user" ? "You" : model || "Assistant";
}
