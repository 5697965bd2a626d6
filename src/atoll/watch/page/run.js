// One run: all its parts, each shown again when a section that it draws has changed.

import { Outer, Speed } from "./curves.js";
import { element } from "./dom.js";
import { Faults, Samples, Scores, Settings } from "./lists.js";
import { Loss } from "./loss.js";
import { Members } from "./members.js";
import { State } from "./state.js";
import { Traffic } from "./traffic.js";

/** Which sections each part draws. */
const DRAWS = {
  state: ["run", "loss", "lanes"],
  loss: ["loss", "lanes", "run"],
  members: ["lanes", "now", "run"],
  traffic: ["traffic", "lanes", "run"],
  speed: ["speed", "run"],
  outer: ["outer", "run"],
  faults: ["faults", "run"],
  samples: ["samples", "settings", "run"],
  scores: ["scores"],
  settings: ["settings"],
};

export class Run {
  /** Headings begin at `level`; `detail` fetches single waits and rounds, or is null. */
  constructor(level, detail) {
    this.sections = {};
    const below = level + 1;
    this.parts = {
      state: new State(level),
      loss: new Loss(below),
      members: new Members(below, detail),
      traffic: new Traffic(below),
      speed: new Speed(below),
      outer: new Outer(below),
      faults: new Faults(below, Boolean(detail)),
      samples: new Samples(below),
      scores: new Scores(below),
      settings: new Settings(below, Boolean(detail)),
    };
    const { state, ...others } = this.parts;
    const parts = element("div", { class: "parts" }, ...Object.values(others).map(({ node }) => node));
    this.node = element("article", { class: "run" }, state.node, parts);
  }

  /** Takes the sections that have changed. */
  show(changed) {
    Object.assign(this.sections, changed);
    for (const [name, part] of Object.entries(this.parts)) {
      if (DRAWS[name].some((section) => section in changed)) part.show(this.sections);
    }
  }
}
