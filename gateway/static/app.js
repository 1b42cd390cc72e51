// @ts-check
/**
 * The chat page: its parts, put together. `chats.js` knows the conversations, `thread.js`,
 * `sidebar.js`, `composer.js` and `engine.js` show them, `client.js` speaks to the server.
 */

import { Chats } from "./chats.js";
import { ResponsesClient } from "./client.js";
import { Composer } from "./composer.js";
import { byId } from "./dom.js";
import { EngineView } from "./engine.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { Thread } from "./thread.js";

const THEME_KEY = "tinyvllm.theme";
const ENGINE_KEY = "tinyvllm.engine";
const STATE_WORDS = {
  connecting: "connecting",
  open: "connected",
  waiting: "offline",
  closed: "closed",
};
const UNAUTHORIZED = 1008;
/** Wider than this, panels stand beside the conversation; else they lie over it. */
const wide = matchMedia("(min-width: 60rem)");

const url = new URL("/v1/responses", location.href);
url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
url.hash = "";
const client = new ResponsesClient(url);
const settings = new Settings();
const chats = new Chats(client, await Store.open(), settings);
const thread = new Thread(chats);
new Sidebar(chats);
const composer = new Composer(chats, client, () => thread.follow());
const engine = new EngineView(client, (tag) => chats.nameOf(tag));

let modelName = "";
let countdown = 0;

// Connection

async function describeModel() {
  const reply = await fetch("/v1/models");
  if (!reply.ok) return; // 401: the socket says so too. The name comes with the next connection.
  const [model] = (await reply.json()).data;
  modelName = model.id;
  settings.adopt(model.tinyvllm);
  composer.setMaxLength(model.tinyvllm.max_model_len);
  byId("model").textContent = modelName;
  byId("welcome-model").textContent = modelName;
  document.title = `${modelName} · tinyvllm`;
}

function showConnection() {
  const { state } = client;
  byId("connection").dataset.state = state;
  byId("state").textContent = STATE_WORDS[state];
  clearInterval(countdown);
  if (state === "open") {
    byId("banner").hidden = true;
    chats.goOn();
    if (!modelName) describeModel().catch(() => {}); // The banner tells of a server that is away.
  } else if (state === "waiting") {
    tellWaiting();
    countdown = setInterval(tellWaiting, 500);
  } else if (state === "closed") {
    if (client.closeCode === UNAUTHORIZED && client.closeReason.includes("unauthorized"))
      byId("login").showModal();
    tell(
      `The server closed the connection${client.closeReason ? `: ${client.closeReason}` : ""}.`,
      "Connect again",
    );
  }
}

function tellWaiting() {
  const seconds = Math.max(0, Math.ceil((client.retryAt - Date.now()) / 1000));
  const running = chats.running() ? " The answer goes on when it is back." : "";
  tell(`Connection lost. Next try in ${seconds} s.${running}`, "Try now");
}

/** @param {string} text @param {string} action */
function tell(text, action) {
  byId("banner-text").textContent = text;
  byId("retry").textContent = action;
  byId("banner").hidden = false;
}

client.addEventListener("state", showConnection);
client.addEventListener("draining", () => {
  tell("The server is about to restart. Running answers still finish.", "Connect again");
});
byId("retry").addEventListener("click", () => client.retryNow());
addEventListener("online", () => client.retryNow());

byId("login-form").addEventListener("submit", async (/** @type {Event} */ event) => {
  event.preventDefault();
  // The cookie that comes back goes along with every later request; no script can read it.
  const headers = { Authorization: `Bearer ${byId("key").value}` };
  const reply = await fetch("/login", { method: "POST", headers }).catch(() => null);
  byId("login-error").hidden = reply?.ok ?? false;
  byId("login-error").textContent = reply ? "That is not the key." : "The server does not answer.";
  if (!reply?.ok) return;
  byId("key").value = "";
  byId("login").close();
  client.retryNow();
});

// Panels

/** @param {string} name "sidebar", "settings" or "engine" @param {boolean} isOpen */
function openPanel(name, isOpen) {
  if (name === "engine") engine.open(isOpen);
  else byId(name).hidden = !isOpen;
  byId(`${name}-toggle`).setAttribute("aria-expanded", String(isOpen));
  // Two panels over a small screen would hide each other.
  if (isOpen && !wide.matches) {
    for (const other of ["sidebar", "settings", "engine"])
      if (other !== name) openPanel(other, false);
  }
  byId("shade").hidden = wide.matches || ["sidebar", "engine"].every((panel) => byId(panel).hidden);
  if (name === "engine") remember(ENGINE_KEY, isOpen && wide.matches ? "open" : null);
}

/** @param {string} name */
function togglePanel(name) {
  const isOpen = byId(name).hidden;
  openPanel(name, isOpen);
  if (!isOpen) byId(`${name}-toggle`).focus();
  else if (name === "settings") byId("instructions").focus();
}

for (const name of ["sidebar", "settings", "engine"]) {
  byId(`${name}-toggle`).addEventListener("click", () => togglePanel(name));
  byId(`${name}-close`).addEventListener("click", () => togglePanel(name));
}
byId("shade").addEventListener("click", () => closeOverlays());
document.addEventListener("pointerdown", (event) => {
  const target = /** @type {Element} */ (event.target);
  if (!byId("settings").hidden && !target.closest("#settings, #settings-toggle"))
    openPanel("settings", false);
});

/** @returns {boolean} whether there was one */
function closeOverlays() {
  const open = (wide.matches ? ["settings"] : ["settings", "sidebar", "engine"]).filter(
    (name) => !byId(name).hidden,
  );
  for (const name of open) togglePanel(name);
  return open.length > 0;
}

wide.addEventListener("change", () => {
  openPanel("sidebar", wide.matches);
  if (!wide.matches) openPanel("engine", false);
});

// Conversations

function newChat() {
  location.hash = "";
  void chats.open(null);
  if (!wide.matches) openPanel("sidebar", false);
  composer.focus();
}

byId("new-chat").addEventListener("click", newChat);
byId("suggestions").addEventListener("click", (/** @type {MouseEvent} */ event) => {
  const button = /** @type {HTMLElement} */ (event.target).closest("button");
  if (button) composer.send(button.dataset.prompt ?? "");
});
byId("chat-list").addEventListener("click", (/** @type {MouseEvent} */ event) => {
  if (/** @type {HTMLElement} */ (event.target).closest("a") && !wide.matches)
    openPanel("sidebar", false);
});
addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id !== (chats.current?.id ?? "")) void chats.open(id);
});
chats.addEventListener("path", () => {
  // A new conversation gets its address with its first message: reload and other tabs find it.
  const id = chats.current?.id ?? "";
  if (location.hash.slice(1) !== id) history.pushState(null, "", id ? `#${id}` : location.pathname);
});

// Keys

document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") {
    if (document.querySelector("dialog[open], :popover-open")) return; // They close themselves.
    if (closeOverlays()) return;
    chats.stop();
  } else if (command && event.shiftKey && event.code === "KeyO") {
    event.preventDefault();
    newChat();
  } else if (command && event.shiftKey && event.code === "KeyE") {
    event.preventDefault();
    togglePanel("engine");
  } else if (command && event.key === "k") {
    event.preventDefault();
    openPanel("sidebar", true);
    byId("search").focus();
  } else if (command && event.key === "/") {
    event.preventDefault();
    byId("help").showModal();
  } else if (event.key === "ArrowUp" && event.target === byId("input") && !byId("input").value) {
    event.preventDefault();
    thread.editLast();
  } else if (event.key === "/" && !isTyping(event.target)) {
    event.preventDefault();
    byId("input").focus();
  }
});
byId("help-toggle").addEventListener("click", () => byId("help").showModal());

/** @param {EventTarget | null} target */
function isTyping(target) {
  return target instanceof Element && target.matches("input, textarea, select");
}

// Theme, and what is remembered

/** @param {string} key @param {string | null} value */
function remember(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch {
    // Storage is blocked or full: it holds as long as the page.
  }
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  remember(THEME_KEY, root.dataset.theme);
});

openPanel("sidebar", wide.matches);
try {
  if (wide.matches && localStorage.getItem(ENGINE_KEY) === "open") openPanel("engine", true);
} catch {
  // Storage is blocked.
}
showConnection();
await chats.start(location.hash.slice(1));
composer.focus();
