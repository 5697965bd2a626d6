// Makes tables, and folds those with the numbers of a chart away until somebody opens them.

import { element, plain } from "./dom.js";

/** Returns a table; the first cell of every row is its heading. Cells are text or elements. */
export function table(columns, rows, label) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, at) =>
    element(at ? "td" : "th", at ? {} : { scope: "row" }, cell))));
  const made = element("table", { class: "numbers" }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "scroll", role: "region", "aria-label": plain(label), tabindex: "0" }, made);
}

/** Holds the numbers behind a chart: a table that is made while it is open. */
export class FoldedTable {
  constructor(label) {
    this.label = label;
    this.content = null;
    const summary = element("summary", {}, `Table: ${label}`);
    this.node = element("details", { class: "folded", ontoggle: () => this.draw() }, summary);
  }

  /** Takes a function that returns the columns and rows as they are now. */
  show(content) {
    this.content = content;
    this.draw();
  }

  draw() {
    const before = this.node.querySelector(".scroll");
    if (!this.node.open || !this.content) {
      before?.remove();
      return;
    }
    const { columns, rows } = this.content();
    const after = table(columns, rows, this.label);
    if (!before) this.node.append(after);
    else before.replaceChildren(...after.childNodes); // stays scrolled and focused where it is
  }
}
