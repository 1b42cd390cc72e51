// @ts-check
/**
 * A client for OpenAI's Responses over WebSocket, as tinyvllm's gateway speaks it. No dependencies:
 * copy this one file anywhere.
 *
 *     import { ResponsesClient } from "./client.js";
 *
 *     const client = new ResponsesClient("ws://127.0.0.1:8765/v1/responses", { key: "secret" });
 *     const answer = client.create({ input: "Why is the sky blue?", max_output_tokens: 200 });
 *     for await (const text of answer) console.log(text);        // as the tokens come
 *     const { status, usage } = await answer.done;               // the final response object
 *
 * Stop       `answer.cancel()`, or leave the loop early. The text stays as it is in that moment.
 * Lanes      Answers run side by side. With `stream_id: "a"`, those of lane "a" run one by one.
 * Events     `for await (const event of answer.events())` gives the server's own events; listeners
 *            of "update" hear that `answer.text` has grown or the answer has ended.
 * Resume     `client.resume(id, { startingAfter, text })` goes on with an answer that another page
 *            (or this one, before a reload) began: keep `answer.id`, `.sequenceNumber` and `.text`
 *            together. Without `startingAfter` it comes from its beginning: a second viewer.
 * Reconnect  The client keeps one socket. When that breaks (1001, 1005, 1006, 1011-1013, 1015, or
 *            silence where the server's pings should be) it connects again, waiting longer after
 *            each failure, and every running answer goes on where it was: nothing lost, nothing
 *            twice. A `create` meanwhile waits. Any other close is final until `retryNow()`.
 * State      "state" events; `client.state` is "connecting", "open", "waiting" (until `retryAt`)
 *            or "closed" (see `closeCode` and `closeReason`; 1008 wants a key).
 * Stats      `client.watchStats(250)` asks for a "stats" event that often, `watchStats(0)` ends it;
 *            `event.detail` is the server's tinyvllm.stats: slots, KV blocks, rates, queue.
 *
 * Failures are `ResponseError`s with the server's `code`, or "connection_lost" (the request may not
 * have arrived, twice), "cancelled" (before it was sent) or "closed". `client.close()` ends it all.
 */

/**
 * @typedef {"connecting" | "open" | "waiting" | "closed"} State
 * @typedef {{ role: "user" | "assistant" | "system", content: string }} Message
 *
 * @typedef {object} Request  Fields of response.create.
 * @property {string | Message[]} input
 * @property {string} [model]
 * @property {string} [instructions]
 * @property {string} [previous_response_id]
 * @property {number} [temperature]
 * @property {number} [top_p]
 * @property {number} [max_output_tokens]
 * @property {Record<string, string>} [metadata]
 * @property {string} [stream_id]  A lane; without one the answer has a lane of its own.
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
 * @property {Usage | null} usage
 * @property {{ tag: string }} [tinyvllm]  The label of this response in the stats.
 *
 * @typedef {object} Sequence  One request in the engine.
 * @property {string} tag
 * @property {"waiting" | "prefill" | "decode" | "paused"} state
 * @property {number | null} slot
 * @property {number} prompt_tokens
 * @property {number | null} computed_tokens
 * @property {number} cached_tokens
 * @property {number} output_tokens
 * @property {number | null} blocks
 *
 * @typedef {object} Stats  tinyvllm.stats; what the engine does not tell is null.
 * @property {number} time  Unix time, seconds.
 * @property {string} model
 * @property {number} tokens_per_second
 * @property {number} prompt_tokens_per_second
 * @property {number} steps_per_second
 * @property {number} queue
 * @property {{ total: number | null, running: number, waiting: number, paused: number }} slots
 * @property {{ total: number, free: number, used: number, shared: number | null,
 *   cached: number | null, size: number | null }} blocks
 * @property {{ queries: number, hits: number }} prefix_cache
 * @property {number} num_requests
 * @property {number} num_output_tokens
 * @property {number} num_prompt_tokens
 * @property {number} num_preemptions
 * @property {Sequence[]} sequences
 * @property {number} num_sequences
 */

const FIRST_DELAY_MS = 500;
const LAST_DELAY_MS = 8000;
const CONNECT_TIMEOUT_MS = 15_000;
/** The server pings every 15 s of silence; this long without anything, and the line is dead. */
const SILENCE_MS = 45_000;
const SILENCE_CHECK_MS = 5000;
/** Restart, overload, a broken line: worth another try. Any other code would only come again. */
const RECONNECT_CODES = new Set([1001, 1005, 1006, 1011, 1012, 1013, 1015]);
const CLOSE_DONE = 1000;
/** So often a request is sent whose fate is not known: the socket broke before it was accepted. */
const MAX_SENDS = 2;

/** Why there is no (complete) answer. */
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
  /** @type {Map<string, Answer>} by stream id: on the wire every answer has a lane of its own */
  #answers = new Map();
  /** @type {Map<string, Answer>} the last answer of each lane that the caller named */
  #lanes = new Map();
  #numCreated = 0;
  #numFailures = 0;
  #timer = 0;
  #watchdog = 0;
  #statsInterval = 0;
  #isDone = false;
  #key;

  /**
   * @param {string | URL} url ws:// or wss://, path /v1/responses
   * @param {{ key?: string }} [options] `key`: the server's token. Only where no cookie carries it.
   */
  constructor(url, { key } = {}) {
    super();
    this.url = String(url);
    this.#key = key;
    /** @type {State} */
    this.state = "connecting";
    /** When the next attempt is made, in ms of Date.now(); meaningful while "waiting". */
    this.retryAt = 0;
    this.closeCode = 0;
    this.closeReason = "";
    this.#connect();
  }

  /**
   * Ask. The answer begins to come as soon as the socket is open.
   * @param {Request} request
   * @returns {Answer}
   */
  create(request) {
    const { stream_id: lane, ...fields } = request;
    const answer = this.#add({ request: fields });
    if (lane !== undefined) this.#queue(answer, lane);
    this.#submit(answer);
    return answer;
  }

  /**
   * Hold an answer back until the one before it in its lane has ended.
   * @param {Answer} answer
   * @param {string} lane
   */
  #queue(answer, lane) {
    const before = this.#lanes.get(lane);
    this.#lanes.set(lane, answer);
    const leave = () => {
      if (this.#lanes.get(lane) === answer) this.#lanes.delete(lane);
    };
    answer.done.then(leave, leave);
    if (!before) return;
    answer.held = true;
    const release = () => {
      answer.held = false;
      this.#submit(answer);
    };
    before.done.then(release, release);
  }

  /**
   * Go on with an answer that was begun elsewhere, or watch it.
   * @param {string} id of the response
   * @param {{ startingAfter?: number, text?: string }} [from] the last event that was seen, and the
   *   text up to it
   * @returns {Answer}
   */
  resume(id, { startingAfter = -1, text = "" } = {}) {
    const answer = this.#add({ id, sequenceNumber: startingAfter, text });
    this.#submit(answer);
    return answer;
  }

  /**
   * Dispatch a "stats" event every so often; the subscription outlives reconnects.
   * @param {number} intervalMs 100 to 10,000; 0 ends it
   */
  watchStats(intervalMs) {
    if (intervalMs === this.#statsInterval) return;
    this.#statsInterval = intervalMs;
    this.#send({ type: "tinyvllm.stats", interval_ms: intervalMs });
  }

  /** Do not wait for the next attempt; also after a close that was final. */
  retryNow() {
    this.#isDone = false;
    if (this.state === "waiting" || this.state === "closed") this.#connect();
  }

  /** Give up the socket and everything that runs on it. */
  close() {
    this.#isDone = true;
    this.#drop(CLOSE_DONE, "closed by this page");
    this.#become("closed");
    this.#failAll("the client was closed", "closed");
  }

  /** @param {{ request?: Request, id?: string, sequenceNumber?: number, text?: string }} fields */
  #add(fields) {
    const streamId = `s${++this.#numCreated}`;
    const answer = new Answer(streamId, fields, () => this.#cancel(answer));
    if (this.state === "closed") {
      // An idle server hangs up in peace; any other close would only come again.
      if (this.closeCode !== CLOSE_DONE || this.#isDone) {
        answer._fail(new ResponseError("the connection is closed", "closed"));
        return answer;
      }
      this.#connect();
    }
    this.#answers.set(streamId, answer);
    return answer;
  }

  #connect() {
    clearTimeout(this.#timer);
    this.#become("connecting");
    // Browsers can send a key in no other way; the server selects "realtime", never the key.
    const protocols = this.#key ? ["realtime", `openai-insecure-api-key.${this.#key}`] : [];
    const socket = new WebSocket(this.url, protocols);
    this.#socket = socket;
    this.#timer = setTimeout(() => this.#lost(1006, "no answer"), CONNECT_TIMEOUT_MS);
    let lastHeard = 0;
    let pings = false;
    socket.onopen = () => {
      clearTimeout(this.#timer);
      lastHeard = Date.now();
      this.#watchdog = setInterval(() => {
        if (pings && Date.now() - lastHeard > SILENCE_MS) this.#lost(1006, "the line is silent");
      }, SILENCE_CHECK_MS);
      this.#become("open");
      if (this.#statsInterval) {
        this.#send({ type: "tinyvllm.stats", interval_ms: this.#statsInterval });
      }
      for (const answer of this.#answers.values()) this.#submit(answer);
    };
    socket.onmessage = ({ data }) => {
      lastHeard = Date.now();
      this.#numFailures = 0;
      const event = JSON.parse(data);
      pings ||= event.type === "tinyvllm.ping";
      this.#receive(event);
    };
    socket.onclose = (event) => this.#lost(event.code, event.reason);
  }

  /** The socket is of no more use. @param {number} code @param {string} reason */
  #drop(code, reason) {
    clearTimeout(this.#timer);
    clearInterval(this.#watchdog);
    this.closeCode = code;
    this.closeReason = reason;
    if (!this.#socket) return;
    this.#socket.onopen = this.#socket.onmessage = this.#socket.onclose = null;
    this.#socket.close(CLOSE_DONE);
    this.#socket = null;
  }

  /** @param {number} code @param {string} reason */
  #lost(code, reason) {
    this.#drop(code, reason);
    for (const answer of this.#answers.values()) {
      const unknown = answer.numSends > 0 && !answer.id;
      answer.sent = false;
      if (unknown && (answer.cancelled || answer.numSends >= MAX_SENDS)) {
        this.#fail(answer, new ResponseError("the connection was lost", "connection_lost"));
      }
    }
    if (!RECONNECT_CODES.has(code)) {
      this.#become("closed");
      this.#failAll(reason || "the server closed the connection", "closed");
      return;
    }
    const delay = Math.min(LAST_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#numFailures++);
    // Jitter, so that a restarted server does not meet all of its clients in one moment.
    const wait = delay * (0.75 + Math.random() / 2);
    this.retryAt = Date.now() + wait;
    this.#timer = setTimeout(() => this.#connect(), wait);
    this.#become("waiting");
  }

  /**
   * Send what this answer needs next, once the socket is open and its lane is free.
   * @param {Answer} answer
   */
  #submit(answer) {
    if (this.state !== "open" || answer.sent || answer.held || answer.ended) return;
    answer.sent = true;
    answer.numSends += 1;
    const lane = { stream_id: answer.streamId };
    if (answer.id) {
      const from = { response_id: answer.id, starting_after: answer.sequenceNumber };
      this.#send({ type: "response.resume", ...from, ...lane });
      if (answer.cancelled) this.#send({ type: "response.cancel", response_id: answer.id });
    } else {
      this.#send({ type: "response.create", ...answer.request, ...lane });
    }
  }

  /** @param {object} event */
  #send(event) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
  }

  /** @param {Answer} answer */
  #cancel(answer) {
    if (answer.id) this.#send({ type: "response.cancel", response_id: answer.id });
    else if (answer.sent) this.#send({ type: "response.cancel", stream_id: answer.streamId });
    else this.#fail(answer, new ResponseError("cancelled before it was sent", "cancelled"));
  }

  /** @param {any} event */
  #receive(event) {
    if (event.type === "tinyvllm.stats") {
      this.dispatchEvent(new CustomEvent("stats", { detail: event }));
    } else if (event.type === "tinyvllm.draining") {
      this.dispatchEvent(new CustomEvent("draining", { detail: event }));
    }
    const answer = this.#answers.get(event.stream_id);
    if (!answer) return;
    if (event.type === "error") {
      const { message, code, param } = event.error;
      this.#fail(answer, new ResponseError(message, code, param));
      return;
    }
    answer._take(event);
    if (answer.ended) this.#answers.delete(answer.streamId);
  }

  /** @param {Answer} answer @param {ResponseError} error */
  #fail(answer, error) {
    this.#answers.delete(answer.streamId);
    answer._fail(error);
  }

  /** @param {string} message @param {string} code */
  #failAll(message, code) {
    for (const answer of this.#answers.values())
      this.#fail(answer, new ResponseError(message, code));
  }

  /** @param {State} state */
  #become(state) {
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }
}

/**
 * One answer: an async iterable of text, and an EventTarget. "update" is dispatched when `text` has
 * grown, the answer was accepted or queued, or it has ended.
 */
export class Answer extends EventTarget {
  #cancel;
  /** @type {any[] | null} kept only while somebody iterates over them */
  #events = null;
  /** @type {(response: Response) => void} */
  #resolve = () => {};
  /** @type {(error: ResponseError) => void} */
  #reject = () => {};

  /**
   * Made by `create` and `resume`.
   * @param {string} streamId
   * @param {{ request?: Request, id?: string, sequenceNumber?: number, text?: string }} fields
   * @param {() => void} cancel
   */
  constructor(streamId, { request, id = "", sequenceNumber = -1, text = "" }, cancel) {
    super();
    this.streamId = streamId;
    this.request = request;
    /** The response's id, once the server has accepted it. */
    this.id = id;
    /** The response's label in the stats, once it is known. */
    this.tag = "";
    /** Of the last event that came: what `resume` starts after. */
    this.sequenceNumber = sequenceNumber;
    /** Everything that has come so far. */
    this.text = text;
    /** Events with text: about the number of tokens while the connection keeps up. */
    this.numDeltas = 0;
    /** The engine has no place for it yet. */
    this.queued = false;
    this.cancelled = false;
    /** Set at the end. @type {Response | null} */
    this.response = null;
    /** Why it failed. @type {ResponseError | null} */
    this.error = null;
    /** In ms of Unix time: when it was asked for, its first and its last text here. */
    this.startedAt = now();
    this.firstTextAt = 0;
    this.lastTextAt = 0;
    // For the client: what the present socket knows of it.
    this.sent = false;
    this.numSends = 0;
    this.held = false;
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

  /** Stop generating. `text` stays as it is; the response ends as incomplete, "cancelled". */
  cancel() {
    if (this.ended || this.cancelled) return;
    this.cancelled = true;
    this.#cancel();
    this.dispatchEvent(new Event("update"));
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
          await this.#change();
        }
      }
    } finally {
      this.cancel();
    }
  }

  /** Yields the server's events from now on, up to the terminal one. Throws ResponseError. */
  async *events() {
    const events = (this.#events ??= []);
    try {
      for (;;) {
        if (events.length) yield events.shift();
        else if (this.error) throw this.error;
        else if (this.ended) return;
        else await this.#change();
      }
    } finally {
      this.#events = null;
      this.cancel();
    }
  }

  #change() {
    return new Promise((resolve) => {
      this.addEventListener("change", resolve, { once: true });
    });
  }

  /** @param {any} event */
  _take(event) {
    // After a resume the server may tell again what is known.
    if (event.sequence_number <= this.sequenceNumber) return;
    this.sequenceNumber = event.sequence_number;
    this.#events?.push(event);
    switch (event.type) {
      case "response.created":
        this.id = event.response.id;
        this.tag = event.response.tinyvllm?.tag ?? "";
        break;
      case "response.queued":
        this.queued = true;
        break;
      case "response.output_text.delta":
        this.queued = false;
        if (this.cancelled) break;
        this.lastTextAt = now();
        this.firstTextAt ||= this.lastTextAt;
        this.numDeltas +=
          1 + event.sequence_number - (event.first_sequence_number ?? event.sequence_number);
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
      default: // Of no consequence for `text`, or of a later version.
        this.dispatchEvent(new Event("change"));
        return;
    }
    this.#updated();
  }

  /** @param {ResponseError} error */
  _fail(error) {
    this.error = error;
    this.#reject(error);
    this.#updated();
  }

  #updated() {
    this.dispatchEvent(new Event("change"));
    this.dispatchEvent(new Event("update"));
  }
}

/** Unix time in ms, as even as performance.now(). */
function now() {
  return performance.timeOrigin + performance.now();
}
