// @ts-check
/**
 * Conversations, kept in this browser: IndexedDB, shared by all tabs of the page.
 *
 * A conversation is a tree: each message knows the one it follows, so an edited question or another
 * try at an answer stands beside the first. Messages are records of their own, and only ever
 * replaced by what has come further: two tabs may write the same answer as it grows.
 * Where IndexedDB is blocked, everything lives as long as the tab.
 */

/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} createdAt  Unix time, ms, like all times here.
 * @property {number} updatedAt  Of the last message.
 * @property {number} changedAt  Of the last change of this record.
 * @property {string | null} leafId  The last message of the branch that is shown.
 *
 * @typedef {"streaming" | "completed" | "length" | "stopped" | "failed"} Status
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string} conversationId
 * @property {string | null} parentId
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {number} createdAt
 *
 * Of answers alone; `content` is the text up to the event `sequenceNumber`:
 * @property {Status} [status]
 * @property {string} [responseId]
 * @property {string} [tag]
 * @property {number} [sequenceNumber]
 * @property {number} [numTokens]
 * @property {{ input_tokens: number, output_tokens: number, cached_tokens: number }} [usage]
 * @property {{ startedAt: number, firstTextAt: number, lastTextAt: number }} [timings]
 * @property {string} [model]
 * @property {string} [error]
 */

const DATABASE = "tinyvllm";
const VERSION = 1;
const CHANNEL = "tinyvllm.changes";

/** Works without https too, unlike crypto.randomUUID. */
export function newId() {
  const words = crypto.getRandomValues(new Uint32Array(4));
  return [...words].map((word) => word.toString(36)).join("");
}

/** Dispatches "change" when another tab has written; `detail` is the conversation's id. */
export class Store extends EventTarget {
  /** @type {IDBDatabase | null} */
  #database = null;
  /** @type {Map<string, Conversation>} without a database: all there is */
  #conversations = new Map();
  /** @type {Map<string, Message>} */
  #messages = new Map();
  #channel = new BroadcastChannel(CHANNEL);

  /** @returns {Promise<Store>} */
  static async open() {
    const store = new Store();
    store.#channel.onmessage = ({ data }) => {
      store.dispatchEvent(new CustomEvent("change", { detail: data }));
    };
    try {
      const opening = indexedDB.open(DATABASE, VERSION);
      opening.onupgradeneeded = () => {
        opening.result.createObjectStore("conversations", { keyPath: "id" });
        const messages = opening.result.createObjectStore("messages", { keyPath: "id" });
        messages.createIndex("conversationId", "conversationId");
      };
      store.#database = await settled(opening);
    } catch (error) {
      console.warn("Conversations are not kept: this browser gives no IndexedDB.", error);
    }
    return store;
  }

  /** @returns {Promise<Conversation[]>} the latest first */
  async conversations() {
    const all = this.#database
      ? await settled(
          this.#database.transaction("conversations").objectStore("conversations").getAll(),
        )
      : [...this.#conversations.values()];
    return all.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  /** @param {string} conversationId @returns {Promise<Message[]>} the oldest first */
  async messages(conversationId) {
    const all = this.#database
      ? await settled(
          this.#database
            .transaction("messages")
            .objectStore("messages")
            .index("conversationId")
            .getAll(conversationId),
        )
      : [...this.#messages.values()].filter((message) => message.conversationId === conversationId);
    return all.sort((a, b) => a.createdAt - b.createdAt);
  }

  /**
   * The conversations with these words in a message.
   * @param {string} words
   * @returns {Promise<Set<string>>}
   */
  async search(words) {
    const wanted = words.toLowerCase();
    const found = new Set();
    /** @param {Message} message */
    const look = ({ conversationId, content }) => {
      if (content.toLowerCase().includes(wanted)) found.add(conversationId);
    };
    if (!this.#database) {
      for (const message of this.#messages.values()) look(message);
      return found;
    }
    // One at a time: all the text there is need not be in memory at once.
    const request = this.#database.transaction("messages").objectStore("messages").openCursor();
    await new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        if (!request.result) return resolve(null);
        look(request.result.value);
        request.result.continue();
      };
    });
    return found;
  }

  /** @param {Conversation} conversation */
  async putConversation(conversation) {
    if (this.#database) {
      await this.#write((_, conversations) => conversations.put({ ...conversation }));
    } else {
      this.#conversations.set(conversation.id, conversation);
    }
    this.#tell(conversation.id);
  }

  /** @param {...Message} messages of one conversation */
  async putMessages(...messages) {
    await this.putProgress(...messages);
    this.#tell(messages[0].conversationId);
  }

  /**
   * Write messages, unless another tab has come further with them, and tell no other tab: those
   * that show a growing answer get it from the server.
   * @param {...Message} messages
   */
  async putProgress(...messages) {
    if (this.#database) {
      await this.#write((records) => {
        for (const message of messages) {
          const copy = { ...message };
          const reading = records.get(message.id);
          reading.onsuccess = () => {
            if (!reading.result || isFurther(copy, reading.result)) records.put(copy);
          };
        }
      });
    } else {
      for (const message of messages) this.#messages.set(message.id, message);
    }
  }

  /** @param {string} id */
  async deleteConversation(id) {
    const messages = await this.messages(id);
    if (this.#database) {
      await this.#write((records, conversations) => {
        conversations.delete(id);
        for (const message of messages) records.delete(message.id);
      });
    } else {
      this.#conversations.delete(id);
      for (const message of messages) this.#messages.delete(message.id);
    }
    this.#tell(id);
  }

  /** @param {(messages: IDBObjectStore, conversations: IDBObjectStore) => void} work */
  #write(work) {
    const database = /** @type {IDBDatabase} */ (this.#database);
    const transaction = database.transaction(["messages", "conversations"], "readwrite");
    work(transaction.objectStore("messages"), transaction.objectStore("conversations"));
    return new Promise((resolve) => {
      transaction.oncomplete = () => resolve(null);
      transaction.onabort = () => {
        // The disk is full, say: the page goes on, and this is not there after a reload.
        console.warn("A conversation could not be kept.", transaction.error);
        resolve(null);
      };
    });
  }

  /** @param {string} conversationId */
  #tell(conversationId) {
    this.#channel.postMessage(conversationId);
  }
}

/** @param {Message} message @param {Message} stored */
function isFurther(message, stored) {
  const ahead = (message.sequenceNumber ?? -1) - (stored.sequenceNumber ?? -1);
  return ahead > 0 || (ahead === 0 && (stored.status ?? "streaming") === "streaming");
}

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
