// @ts-check
/** The chat page: one conversation, kept in memory, streamed through `client.js`. */

import { ResponsesClient } from "./client.js";
import { MarkdownView, copyText, element } from "./markdown.js";

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);

const SETTINGS_KEY = "tinyvllm.settings";
const THEME_KEY = "tinyvllm.theme";
const STATE_WORDS = { connecting: "connecting", open: "connected", waiting: "offline", closed: "closed" };
/** Nearer to the bottom than this, in pixels, the reader follows the answer. */
const FOLLOW_PX = 48;

const url = new URL("/v1/responses", location.href);
url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
const client = new ResponsesClient(url);

/** @type {import("./client.js").Message[]} */
let history = [];
/** @type {import("./client.js").Answer | null} */
let running = null;
let modelName = "";

// Storage can be blocked or full: the page works without.

/** @param {string} key */
function load(key) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? "null");
  } catch {
    return null;
  }
}

/** @param {string} key @param {string | null} value */
function store(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch {
    // Nothing to do.
  }
}

// Settings

const defaults = { instructions: "", temperature: 0.7, top_p: 0.95, max_output_tokens: 512 };
const settings = { ...defaults, ...load(SETTINGS_KEY) };

function showSettings() {
  byId("instructions").value = settings.instructions;
  byId("temperature").value = settings.temperature;
  byId("top-p").value = settings.top_p;
  byId("max-tokens").value = settings.max_output_tokens;
  byId("temperature-out").value = Number(settings.temperature).toFixed(2);
  byId("top-p-out").value = Number(settings.top_p).toFixed(2);
}

function readSettings() {
  settings.instructions = byId("instructions").value;
  settings.temperature = Number(byId("temperature").value);
  settings.top_p = Number(byId("top-p").value);
  const maxTokens = Math.floor(Number(byId("max-tokens").value));
  if (maxTokens >= 1) settings.max_output_tokens = maxTokens;
  byId("temperature-out").value = settings.temperature.toFixed(2);
  byId("top-p-out").value = settings.top_p.toFixed(2);
  // Only what differs: a later change of the defaults reaches everyone who never chose.
  const chosen = Object.entries(settings).filter(
    ([name, value]) => value !== defaults[/** @type {keyof typeof defaults} */ (name)],
  );
  store(SETTINGS_KEY, chosen.length ? JSON.stringify(Object.fromEntries(chosen)) : null);
}

/** @param {boolean} open */
function openSettings(open) {
  byId("settings").hidden = !open;
  byId("settings-toggle").setAttribute("aria-expanded", String(open));
  byId(open ? "instructions" : "settings-toggle").focus();
}

async function describeModel() {
  try {
    const [model] = (await (await fetch("/v1/models")).json()).data;
    modelName = model.id;
    const { max_model_len: maxLength, sampling_defaults: own } = model.tinyvllm;
    const chosen = load(SETTINGS_KEY) ?? {};
    for (const name of /** @type {const} */ (["temperature", "top_p"])) {
      if (typeof own[name] !== "number") continue;
      defaults[name] = own[name];
      settings[name] = chosen[name] ?? own[name];
    }
    byId("max-tokens").max = maxLength;
    byId("max-tokens-hint").textContent = `Longest answer. The model holds ${maxLength.toLocaleString("en")} tokens in all.`;
    byId("model").textContent = modelName;
    byId("welcome-model").textContent = modelName;
    document.title = `${modelName} · tinyvllm`;
    showSettings();
  } catch {
    // The banner tells of a server that is away; the name comes with the next connection.
  }
}

// Connection

let countdown = 0;

function showConnection() {
  const state = client.state;
  byId("connection").dataset.state = state;
  byId("state").textContent = STATE_WORDS[state];
  clearInterval(countdown);
  const tell = () => {
    const seconds = Math.max(0, Math.ceil((client.retryAt - Date.now()) / 1000));
    byId("banner-text").textContent =
      state === "closed" ? "The server closed the connection." : `Connection lost. Next try in ${seconds} s.`;
  };
  if (state === "open") {
    byId("banner").hidden = true;
    if (!modelName) void describeModel();
  } else if (state === "waiting") {
    tell();
    countdown = setInterval(tell, 500);
    byId("banner").hidden = false;
    byId("retry").hidden = false;
  } else if (state === "closed") {
    tell();
    byId("banner").hidden = false;
    byId("retry").hidden = true;
  }
  updateButtons();
}

function updateButtons() {
  byId("stop").hidden = running === null;
  byId("send").hidden = running !== null;
  byId("send").disabled = client.state !== "open" || !byId("input").value.trim();
}

// Scrolling: follow the answer only while the reader is at its end.

const scroller = byId("scroller");
let following = true;

scroller.addEventListener(
  "scroll",
  () => {
    following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < FOLLOW_PX;
    byId("latest").hidden = following;
  },
  { passive: true },
);

function follow() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
  else byId("latest").hidden = false;
}

// Messages

/** @param {string} role @param {...(Node | string)} children */
function addMessage(role, ...children) {
  byId("welcome").hidden = true;
  const who = element("span", "hidden", role === "user" ? "You" : "Assistant");
  const message = element("article", `message ${role}`, who, ...children);
  byId("messages").append(message);
  return message;
}

/** @param {string} text */
async function ask(text) {
  if (running || client.state !== "open") return;
  addMessage("user", element("div", "bubble", text));
  const question = /** @type {const} */ ({ role: "user", content: text });
  const answer = client.create({
    input: [...history, question],
    instructions: settings.instructions || undefined,
    temperature: settings.temperature,
    top_p: settings.top_p,
    max_output_tokens: settings.max_output_tokens,
  });
  running = answer;
  following = true;
  const shown = showAnswer(answer);
  updateButtons();
  follow();
  try {
    await answer.done;
  } catch {
    // Shown with the answer.
  }
  shown();
  // What the reader saw is what the model is told next time: stopped answers too, failed ones not.
  if (running === answer) {
    if (!answer.error) history.push(question, { role: "assistant", content: answer.text });
    running = null;
  }
  updateButtons();
}

/**
 * Show an answer as it grows: at most one change of the DOM per animation frame.
 * @param {import("./client.js").Answer} answer
 * @returns {() => void} call at the end, to show the rest at once
 */
function showAnswer(answer) {
  const body = element("div", "text");
  const typing = element("div", "typing", element("i"), element("i"), element("i"));
  typing.setAttribute("role", "img");
  typing.setAttribute("aria-label", "Thinking");
  const meta = element("div", "meta");
  const message = addMessage("assistant", typing, body, meta);
  // Screen readers get the answer when it is whole, not word by word.
  message.setAttribute("aria-busy", "true");
  message.classList.add("streaming");
  const view = new MarkdownView(body);
  let frame = 0;
  const render = () => {
    frame = 0;
    if (answer.text) typing.remove();
    view.update(answer.text);
    meta.replaceChildren(element("span", "", summary(answer)));
    follow();
  };
  answer.addEventListener("update", () => {
    frame ||= requestAnimationFrame(render);
  });
  return () => {
    cancelAnimationFrame(frame);
    render();
    typing.remove();
    message.classList.remove("streaming");
    message.removeAttribute("aria-busy");
    if (answer.error) {
      const note = element("p", "error", answer.error.message);
      note.setAttribute("role", "alert");
      meta.before(note);
    }
    const reason = answer.response?.incomplete_details?.reason;
    if (reason) meta.append(element("span", "tag", reason === "cancelled" ? "stopped" : "cut at max tokens"));
    if (answer.text) {
      const copy = element("button", "copy", "Copy");
      copy.setAttribute("type", "button");
      copy.addEventListener("click", () => copyText(answer.text, copy));
      meta.append(copy);
    }
    follow();
  };
}

/** Tokens, speed and wait of an answer. @param {import("./client.js").Answer} answer */
function summary(answer) {
  if (!answer.firstTextAt) return "";
  const tokens = answer.response?.usage?.output_tokens || answer.numDeltas;
  const seconds = (answer.lastTextAt - answer.firstTextAt) / 1000;
  const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (tokens > 1 && seconds > 0) {
    const rate = (tokens - 1) / seconds;
    parts.push(`${rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en")} tok/s`);
  }
  parts.push(`first token ${Math.round(answer.firstTextAt - answer.startedAt)} ms`);
  return parts.join(" · ");
}

function stop() {
  running?.cancel();
}

function newChat() {
  stop();
  running = null;
  history = [];
  byId("messages").replaceChildren();
  byId("welcome").hidden = false;
  byId("latest").hidden = true;
  following = true;
  updateButtons();
  focusInput();
}

// Input

const input = byId("input");

/** Where typing needs no screen keyboard, the reader can type at once. */
function focusInput() {
  if (!matchMedia("(pointer: coarse)").matches) input.focus();
}

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  updateButtons();
}

function submit() {
  const text = input.value.trim();
  if (!text || running || client.state !== "open") return;
  input.value = "";
  fitInput();
  void ask(text);
}

input.addEventListener("input", fitInput);
input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  // While an input method composes, Enter chooses a word.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if (!byId("settings").hidden) openSettings(false);
});
byId("stop").addEventListener("click", () => {
  stop();
  focusInput();
});
byId("new-chat").addEventListener("click", newChat);
byId("retry").addEventListener("click", () => client.retryNow());
byId("latest").addEventListener("click", () => {
  following = true;
  follow();
  byId("latest").hidden = true;
});
byId("suggestions").addEventListener("click", (/** @type {MouseEvent} */ event) => {
  const button = /** @type {HTMLElement} */ (event.target).closest("button");
  if (button) void ask(button.textContent ?? "");
});
byId("settings").addEventListener("input", readSettings);
byId("settings-toggle").addEventListener("click", () => openSettings(byId("settings").hidden));
document.addEventListener("pointerdown", (event) => {
  const target = /** @type {Element} */ (event.target);
  if (!byId("settings").hidden && !target.closest("#settings, #settings-toggle")) openSettings(false);
});
byId("settings-close").addEventListener("click", () => openSettings(false));
byId("reset").addEventListener("click", () => {
  Object.assign(settings, defaults);
  store(SETTINGS_KEY, null);
  showSettings();
});
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  store(THEME_KEY, root.dataset.theme);
});
client.addEventListener("state", showConnection);

showSettings();
showConnection();
void describeModel();
focusInput();
