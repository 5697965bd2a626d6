// Makes tables, and folds those with the numbers of a chart away until somebody opens them.

import { element, plain } from "./dom.js";

/** Returns a table; the first cell of every row is its heading. Cells are text or elements. */
export function table(columns, rows, { label, names = false } = {}) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, at) =>
    at === 0 ? element("th", { scope: "row" }, cell) : element("td", { "data-label": columns[at] }, cell))));
  const made = element("table", { class: names ? "facts" : "numbers" }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "scroll", role: "region", "aria-label": plain(label), tabindex: "0" }, made);
}

/** Holds the numbers behind a chart: a table that is made while it is open. */
export class FoldedTable {
  constructor(label) {
    this.label = label;
    this.content = null;
    this.node = element("details", { class: "folded", ontoggle: () => this.draw() }, element("summary", {}, `Table: ${label}`));
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
    const after = table(columns, rows, { label: this.label });
    if (!before) this.node.append(after);
    else before.replaceChildren(...after.childNodes); // stays scrolled and focused where it is
  }
}
