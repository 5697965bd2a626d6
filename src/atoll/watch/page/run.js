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
  state: ["run", "loss", "lanes"], loss: ["loss"], members: ["lanes", "now", "run"], traffic: ["traffic", "run"], speed: ["speed"],
  outer: ["outer", "run"], faults: ["faults"], samples: ["samples"], scores: ["scores"], settings: ["settings"],
};

export class Run {
  /** Headings begin at `level`; `detail` fetches single waits and rounds, or is null. */
  constructor(level, detail) {
    this.sections = {};
    this.parts = {
      state: new State(level), loss: new Loss(level + 1), members: new Members(level + 1, detail), traffic: new Traffic(level + 1), speed: new Speed(level + 1),
      outer: new Outer(level + 1), faults: new Faults(level + 1), samples: new Samples(level + 1), scores: new Scores(level + 1), settings: new Settings(level + 1),
    };
    const { state, ...others } = this.parts;
    this.node = element("article", { class: "run" }, state.node, element("div", { class: "parts" }, ...Object.values(others).map(({ node }) => node)));
  }

  /** Takes the sections that have changed. */
  show(changed) {
    Object.assign(this.sections, changed);
    for (const [name, part] of Object.entries(this.parts)) {
      if (DRAWS[name].some((section) => section in changed)) part.show(this.sections);
    }
  }
}
