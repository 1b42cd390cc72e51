// @ts-check
/** The few DOM helpers that every part of the page uses. Nothing here, or anywhere, parses HTML. */

/** @param {string} id @returns {any} an element that index.html is known to have */
export const byId = (id) => document.getElementById(id);

/**
 * @param {string} tag
 * @param {string} [className]
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/**
 * A button with one of index.html's icons.
 * @param {string} icon the id of a <symbol>
 * @param {string} label for screen readers and the tooltip
 * @param {() => void} onClick
 * @param {string} [className]
 */
export function iconButton(icon, label, onClick, className = "icon-button") {
  const button = /** @type {HTMLButtonElement} */ (element("button", className, iconOf(icon)));
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", onClick);
  return button;
}

/** @param {string} icon the id of a <symbol> of index.html */
function iconOf(icon) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#${icon}`);
  svg.append(use);
  return svg;
}

/**
 * Copy, and let the button say for a moment how it went.
 * @param {string} text
 * @param {HTMLElement} button
 */
export async function copyText(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text); // Plain http from another machine has no clipboard API.
  }
  button.dataset.copied = done ? "Copied" : "Not allowed";
  announce(done ? "Copied" : "Copying is not allowed here");
  setTimeout(() => delete button.dataset.copied, 1500);
}

/** @param {string} text */
function copyBySelection(text) {
  const area = /** @type {HTMLTextAreaElement} */ (element("textarea", "hidden"));
  const before = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (before instanceof HTMLElement) before.focus();
  return done;
}

/** Tell screen readers. @param {string} text */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** @param {string} name @param {string} type @param {string} text */
export function download(name, type, text) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(new Blob([text], { type }));
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

/** 12345 as "12,345". @param {number} value */
export const grouped = (value) => Math.round(value).toLocaleString("en");
