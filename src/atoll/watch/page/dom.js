// Makes elements. Text reaches the page through textContent only, so it is never read as markup.

const SVG = "http://www.w3.org/2000/svg";
// Controls but for tab and newline, and marks that turn the direction of the text around them.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

let made = 0;

/** Returns an id that no other element of the page has. */
export function freshId() {
  made += 1;
  return `n${made}`;
}

const clean = (text) => text.toWellFormed().replace(CONTROLS, "\ufffd");

/** Returns text of at most `most` characters, none of them a control character. */
export function plain(text, most = 400) {
  const shown = clean(String(text ?? "").slice(0, 4 * most));
  const letters = Array.from(shown);
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : shown;
}

/** Returns an element with attributes (`on...` are listeners, false is left out) and children. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Returns an SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  const there = children.filter((child) => child !== null);
  node.append(...there.map((child) => (typeof child === "string" ? clean(child) : child)));
  return node;
}

/** Returns a span of a class. */
export function span(name, ...children) {
  return element("span", { class: name }, ...children);
}

/** Returns a small mark in a series' colour, for eyes only. */
export function swatch(classes) {
  return element("span", { class: `key ${classes}`, "aria-hidden": "true" });
}

/** Moves a box of text beside a place, in pixels from the left of what it lies in, and keeps it inside. */
export function putBeside(box, place) {
  const [width, free] = [box.offsetWidth, box.parentElement.clientWidth];
  const left = place + 14 + width > free ? place - 14 - width : place + 14;
  box.style.left = `${Math.max(0, Math.min(free - width, left))}px`;
}

/** Sets an element's text, and touches nothing if it is the same: a screen reader then stays quiet. */
export function setText(node, text) {
  const shown = clean(text);
  if (node.textContent !== shown) node.textContent = shown;
}

/** Returns a row of buttons of which one is pressed; `choose` gets the key of the button that is. */
export function choices(label, options, choose) {
  const buttons = Object.entries(options).map(([key, name], at) =>
    element("button", { type: "button", "aria-pressed": String(at === 0), onclick: (event) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      choose(key);
    } }, name));
  return element("div", { class: "choices", role: "group", "aria-label": label }, ...buttons);
}
