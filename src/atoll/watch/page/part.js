// Frames one part of the page: a heading, controls beside it, one sentence that sums it up, and its content.

import { element, freshId, setText } from "./dom.js";

export class Part {
  constructor(title, { level = 2, wide = false } = {}) {
    const id = freshId();
    this.controls = element("div", { class: "controls" });
    this.summary = element("p", { class: "summary" });
    this.body = element("div", { class: "body" });
    this.node = element("section", { class: wide ? "part wide" : "part", "aria-labelledby": id },
      element("div", { class: "head" }, element(`h${level}`, { id }, title), this.controls), this.summary, this.body);
  }

  /** Says in a sentence what the part shows now. */
  say(text) {
    setText(this.summary, text);
    this.summary.hidden = !text;
  }

  /** Shows the content, or only the sentence that says why there is none. */
  reveal(isThere) {
    this.body.hidden = !isThere;
    this.controls.hidden = !isThere;
  }
}
