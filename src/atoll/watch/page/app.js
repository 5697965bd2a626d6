// Starts the page: frozen if the page holds its content, else live from the server.

import { Connection, detail } from "./connection.js";
import { element, plain } from "./dom.js";
import { report } from "./report.js";
import { Run } from "./run.js";

const frozen = document.getElementById("frozen");

if (frozen) {
  const content = JSON.parse(frozen.textContent);
  document.body.append(report(content));
} else {
  const run = new Run(1, detail);
  const connection = new Connection((sections) => {
    run.show(sections);
    const { name, state, step, steps } = run.sections.run ?? {};
    const done = steps ? `${Math.floor(100 * step / steps)} % ` : "";
    document.title = `${done}${plain(name, 60)}, ${plain(state, 30)} - atoll`;
  });
  const top = element("div", { class: "top" }, element("p", { class: "kicker" }, "atoll watch"), connection.node);
  document.body.append(element("main", {}, top, run.node));
}
