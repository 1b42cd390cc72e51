// @ts-check
/**
 * A client for OpenAI's Responses over WebSocket, as tinyvllm's gateway speaks it. No dependencies.
 *
 *     import { ResponsesClient } from "./client.js";
 *
 *     const client = new ResponsesClient("ws://127.0.0.1:8765/v1/responses");
 *     const answer = client.create({ input: "Why is the sky blue?", max_output_tokens: 200 });
 *     for await (const text of answer) console.log(text);        // as the tokens come
 *     const { status, usage } = await answer.done;               // the final response object
 *
 * `answer.cancel()` stops it; leaving the loop early does too. Several answers may run at once.
 *
 * The client keeps one socket and reconnects by itself, waiting longer after each failure. It
 * dispatches "state" events; `state` is "connecting", "open", "waiting" (see `retryAt`) or "closed".
 * An answer that was running when the socket broke fails with a `ResponseError`, code
 * "connection_lost"; a `create` while the socket is down waits for it.
 */

/**
 * @typedef {"connecting" | "open" | "waiting" | "closed"} State
 * @typedef {{ role: "user" | "assistant" | "system", content: string }} Message
 *
 * @typedef {object} Request  Fields of response.create.
 * @property {string | Message[]} input
 * @property {string} [model]
 * @property {string} [instructions]
 * @property {number} [temperature]
 * @property {number} [top_p]
 * @property {number} [max_output_tokens]
 * @property {Record<string, string>} [metadata]
 * @property {Record<string, unknown>} [tinyvllm]  Engine parameters: top_k, min_p, seed, stop, ...
 *
 * @typedef {object} Usage
 * @property {number} input_tokens
 * @property {number} output_tokens
 * @property {number} total_tokens
 * @property {{ cached_tokens: number }} input_tokens_details
 *
 * @typedef {object} Response
 * @property {string} id
 * @property {"completed" | "incomplete" | "failed"} status
 * @property {string} model
 * @property {{ reason: string } | null} incomplete_details
 * @property {{ code: string, message: string } | null} error
 * @property {Usage} usage
 */

const FIRST_DELAY_MS = 500;
const LAST_DELAY_MS = 8000;
// Policy and size: trying the same again cannot help.
const FINAL_CLOSE_CODES = new Set([1008, 1009]);

/** Why there is no (complete) answer. `code` is the server's, or "connection_lost" or "closed". */
export class ResponseError extends Error {
  /**
   * @param {string} message
   * @param {string} code
   * @param {string | null} [param] the field at fault
   */
  constructor(message, code, param = null) {
    super(message);
    this.name = "ResponseError";
    this.code = code;
    this.param = param;
  }
}

export class ResponsesClient extends EventTarget {
  /** @type {WebSocket | null} */
  #socket = null;
  /** @type {Map<string, Answer>} by stream id: every answer has a lane of its own */
  #answers = new Map();
  #numCreated = 0;
  #numFailures = 0;
  #timer = 0;

  /** @param {string | URL} url ws:// or wss://, path /v1/responses */
  constructor(url) {
    super();
    this.url = String(url);
    /** @type {State} */
    this.state = "connecting";
    /** When the next attempt is made, in ms of Date.now(); meaningful while "waiting". */
    this.retryAt = 0;
    this.#connect();
  }

  /**
   * Ask. The answer begins to come as soon as the socket is open.
   * @param {Request} request
   * @returns {Answer}
   */
  create(request) {
    const streamId = `s${++this.#numCreated}`;
    const answer = new Answer(streamId, request, () => this.#cancel(answer));
    if (this.state === "closed") {
      answer._fail(new ResponseError("the client is closed", "closed"));
      return answer;
    }
    this.#answers.set(streamId, answer);
    if (this.state === "open") this.#submit(answer);
    return answer;
  }

  /** Do not wait for the next attempt. */
  retryNow() {
    if (this.state !== "waiting") return;
    clearTimeout(this.#timer);
    this.#connect();
  }

  /** Give up the socket and everything that runs on it. */
  close() {
    clearTimeout(this.#timer);
    this.#become("closed");
    this.#socket?.close(1000);
    this.#failAll(() => true, "the client was closed", "closed");
  }

  #connect() {
    this.#become("connecting");
    const socket = new WebSocket(this.url);
    this.#socket = socket;
    socket.onopen = () => {
      this.#numFailures = 0;
      this.#become("open");
      for (const answer of this.#answers.values()) this.#submit(answer);
    };
    socket.onmessage = (message) => this.#receive(message.data);
    socket.onclose = (event) => {
      if (socket !== this.#socket || this.state === "closed") return;
      this.#failAll((answer) => answer.sent, "the connection was lost", "connection_lost");
      if (FINAL_CLOSE_CODES.has(event.code)) {
        this.#failAll(() => true, event.reason || "the server closed the connection", "closed");
        this.#become("closed");
        return;
      }
      const delay = Math.min(LAST_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#numFailures++);
      // Jitter, so that a restarted server does not meet all of its clients in one moment.
      const wait = delay * (0.75 + Math.random() / 2);
      this.retryAt = Date.now() + wait;
      this.#timer = setTimeout(() => this.#connect(), wait);
      this.#become("waiting");
    };
  }

  /** @param {Answer} answer */
  #submit(answer) {
    answer.sent = true;
    const event = { type: "response.create", ...answer.request, stream_id: answer.streamId };
    this.#socket?.send(JSON.stringify(event));
  }

  /** @param {Answer} answer */
  #cancel(answer) {
    if (!answer.sent) {
      this.#answers.delete(answer.streamId);
      answer._fail(new ResponseError("cancelled before it was sent", "cancelled"));
    } else if (this.#answers.has(answer.streamId) && this.#socket?.readyState === WebSocket.OPEN) {
      const event = { type: "response.cancel", stream_id: answer.streamId };
      this.#socket.send(JSON.stringify(event));
    }
  }

  /** @param {string} data */
  #receive(data) {
    const event = JSON.parse(data);
    const answer = this.#answers.get(event.stream_id);
    if (!answer) return;
    if (event.type === "error") {
      this.#answers.delete(answer.streamId);
      const { message, code, param } = event.error;
      answer._fail(new ResponseError(message, code, param));
      return;
    }
    answer._take(event);
    if (answer.response) this.#answers.delete(answer.streamId);
  }

  /**
   * @param {(answer: Answer) => boolean} which
   * @param {string} message
   * @param {string} code
   */
  #failAll(which, message, code) {
    for (const [streamId, answer] of this.#answers) {
      if (!which(answer)) continue;
      this.#answers.delete(streamId);
      answer._fail(new ResponseError(message, code));
    }
  }

  /** @param {State} state */
  #become(state) {
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }
}

/**
 * One answer: an async iterable of text, and an EventTarget. "update" is dispatched when `text` has
 * grown or the answer has ended.
 */
export class Answer extends EventTarget {
  #cancel;
  /** @type {(response: Response) => void} */
  #resolve = () => {};
  /** @type {(error: ResponseError) => void} */
  #reject = () => {};

  /**
   * @param {string} streamId
   * @param {Request} request
   * @param {() => void} cancel
   */
  constructor(streamId, request, cancel) {
    super();
    this.streamId = streamId;
    this.request = request;
    this.sent = false;
    /** Everything that has come so far. */
    this.text = "";
    /** Deltas that have come: about the number of tokens while the connection keeps up. */
    this.numDeltas = 0;
    /** Set at the end. @type {Response | null} */
    this.response = null;
    /** Why it failed. @type {ResponseError | null} */
    this.error = null;
    /** performance.now() at the beginning, at the first and at the last text. */
    this.startedAt = performance.now();
    this.firstTextAt = 0;
    this.lastTextAt = 0;
    this.#cancel = cancel;
    /** The final response; rejects with a ResponseError. @type {Promise<Response>} */
    this.done = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    this.done.catch(() => {}); // Whoever cares looks at `error` or awaits `done`.
  }

  /** No more to come, one way or the other. */
  get ended() {
    return this.response !== null || this.error !== null;
  }

  /** Stop generating. What has come stays; the response ends as incomplete, "cancelled". */
  cancel() {
    if (!this.ended) this.#cancel();
  }

  /** Yields the text in the pieces it came in, and ends with the answer. Throws ResponseError. */
  async *[Symbol.asyncIterator]() {
    let seen = 0;
    try {
      for (;;) {
        if (seen < this.text.length) {
          const piece = this.text.slice(seen);
          seen = this.text.length;
          yield piece;
        } else if (this.error) {
          throw this.error;
        } else if (this.ended) {
          return;
        } else {
          await new Promise((resolve) => {
            this.addEventListener("update", resolve, { once: true });
          });
        }
      }
    } finally {
      this.cancel();
    }
  }

  /** @param {any} event */
  _take(event) {
    switch (event.type) {
      case "response.output_text.delta":
        this.lastTextAt = performance.now();
        this.firstTextAt ||= this.lastTextAt;
        this.numDeltas += 1;
        this.text += event.delta;
        break;
      case "response.completed":
      case "response.incomplete":
        this.response = event.response;
        this.#resolve(event.response);
        break;
      case "response.failed":
        this.response = event.response;
        this._fail(new ResponseError(event.response.error.message, event.response.error.code));
        return;
      default:
        return; // Events of later versions change nothing for us.
    }
    this.dispatchEvent(new Event("update"));
  }

  /** @param {ResponseError} error */
  _fail(error) {
    this.error = error;
    this.#reject(error);
    this.dispatchEvent(new Event("update"));
  }
}
