// @ts-check
/** The settings panel: system prompt and sampling parameters, kept in this browser. */

import { byId, grouped } from "./dom.js";

const KEY = "tinyvllm.settings";

/**
 * @typedef {object} Values
 * @property {string} instructions
 * @property {number} temperature
 * @property {number} top_p
 * @property {number} top_k  0: all.
 * @property {number} min_p
 * @property {number} max_output_tokens
 * @property {number | null} seed
 * @property {string} stop  One stop string a line.
 */

/** @type {Values} */
const BUILT_IN = {
  instructions: "",
  temperature: 0.7,
  top_p: 0.95,
  top_k: 0,
  min_p: 0,
  max_output_tokens: 1024,
  seed: null,
  stop: "",
};
/** Each field by the id of its input. @type {Record<string, keyof Values>} */
const FIELDS = {
  instructions: "instructions",
  temperature: "temperature",
  "top-p": "top_p",
  "top-k": "top_k",
  "min-p": "min_p",
  "max-tokens": "max_output_tokens",
  seed: "seed",
  "stop-strings": "stop",
};
/** The model's own defaults that count before ours. */
const OF_MODEL = /** @type {const} */ (["temperature", "top_p", "top_k", "min_p"]);

export class Settings {
  /** @type {Values} */
  #defaults = { ...BUILT_IN };
  /**
   * What the reader chose: a later change of the defaults reaches everyone who never did.
   * @type {Partial<Values>}
   */
  #chosen = {};

  constructor() {
    try {
      this.#chosen = JSON.parse(localStorage.getItem(KEY) ?? "{}") ?? {};
    } catch {
      // Storage is blocked: the defaults it is.
    }
    byId("settings").addEventListener("input", (/** @type {Event} */ event) => this.#read(event));
    byId("reset").addEventListener("click", () => this.#reset());
    this.#show();
  }

  /** @returns {Values} */
  get values() {
    return { ...this.#defaults, ...this.#chosen };
  }

  /**
   * What /v1/models tells of the model.
   * @param {{ max_model_len: number, sampling_defaults: Record<string, number> }} model
   */
  adopt({ max_model_len: maxLength, sampling_defaults: own }) {
    for (const name of OF_MODEL) {
      if (typeof own[name] === "number") this.#defaults[name] = Math.max(0, own[name]);
    }
    byId("max-tokens").max = maxLength;
    byId("max-tokens-hint").textContent =
      `Longest answer. The model holds ${grouped(maxLength)} tokens in all.`;
    this.#show();
  }

  /** The fields of response.create that they make. */
  request() {
    const { instructions, temperature, top_p, top_k, min_p, max_output_tokens, seed, stop } =
      this.values;
    const stops = stop.split("\n").filter(Boolean);
    /** @type {Record<string, unknown>} */
    const own = {};
    if (top_k !== this.#defaults.top_k) own.top_k = top_k;
    if (min_p !== this.#defaults.min_p) own.min_p = min_p;
    if (seed !== null) own.seed = seed;
    if (stops.length) own.stop = stops;
    return {
      instructions: instructions.trim() || undefined,
      temperature,
      top_p,
      max_output_tokens,
      tinyvllm: Object.keys(own).length ? own : undefined,
    };
  }

  /** @param {Event} event */
  #read(event) {
    const input = /** @type {HTMLInputElement} */ (event.target);
    const name = FIELDS[input.id];
    if (!name) return;
    /** @type {any} */
    let value = input.value;
    if (input.type === "range" || input.type === "number") {
      if (!input.validity.valid) return;
      value = input.value === "" ? this.#defaults[name] : Number(input.value);
    }
    if (value === this.#defaults[name]) delete this.#chosen[name];
    else this.#chosen = { ...this.#chosen, [name]: value };
    this.#showOutputs();
    this.#store();
  }

  #reset() {
    this.#chosen = {};
    this.#store();
    this.#show();
  }

  #store() {
    try {
      if (Object.keys(this.#chosen).length) localStorage.setItem(KEY, JSON.stringify(this.#chosen));
      else localStorage.removeItem(KEY);
    } catch {
      // Storage is blocked or full: they hold as long as the tab.
    }
  }

  #show() {
    for (const [id, name] of Object.entries(FIELDS)) byId(id).value = this.values[name] ?? "";
    this.#showOutputs();
  }

  #showOutputs() {
    for (const id of ["temperature", "top-p", "min-p"]) {
      byId(`${id}-out`).textContent = Number(byId(id).value).toFixed(2);
    }
  }
}
