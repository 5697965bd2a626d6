// A window of time onto a run, moved and zoomed by mouse, wheel, fingers and keys.

const LEAST_S = 0.2;

/** Holds the seconds that are in sight, within [0, end]; `changed` is called whenever they change. */
export class Zoom {
  constructor(changed) {
    this.changed = changed;
    this.end = 1;
    this.from = 0;
    this.to = 1;
    this.whole = true;
    this.fingers = new Map();
    this.drag = null; // where a mouse began to drag and where it is now, as shares of the width
  }

  /** Takes the run's length in seconds: the whole run stays in sight if it was. */
  grow(end) {
    this.end = Math.max(end, 1e-3);
    if (this.whole) [this.from, this.to] = [0, this.end];
  }

  set(from, to) {
    const width = Math.min(this.end, Math.max(LEAST_S, to - from));
    this.from = Math.min(Math.max(0, from), this.end - width);
    this.to = this.from + width;
    this.whole = width >= this.end * 0.999;
    if (this.whole) [this.from, this.to] = [0, this.end];
    this.changed();
  }

  /** Zooms in by a factor around a place, a share of the width. */
  by(factor, place = 0.5) {
    const middle = this.from + place * (this.to - this.from);
    const width = Math.min(this.end, Math.max(LEAST_S, (this.to - this.from) / factor));
    this.set(middle - place * width, middle - place * width + width);
  }

  /** Moves by a share of the width. */
  move(part) {
    const shift = part * (this.to - this.from);
    this.set(this.from + shift, this.to + shift);
  }

  all() {
    this.set(0, this.end);
  }

  /** Listens to an element; `place` turns a clientX into a share of the width of the drawing. */
  listen(node, place) {
    node.addEventListener("keydown", (event) => this.#key(event));
    node.addEventListener("wheel", (event) => this.#wheel(event, place(event.clientX)), { passive: false });
    node.addEventListener("dblclick", () => this.all());
    node.addEventListener("pointerdown", (event) => this.#down(event, place(event.clientX), node));
    node.addEventListener("pointermove", (event) => this.#moved(event, place(event.clientX)));
    for (const name of ["pointerup", "pointercancel"]) node.addEventListener(name, (event) => this.#up(event));
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      "+": () => this.by(1.6), "=": () => this.by(1.6), "-": () => this.by(1 / 1.6), "_": () => this.by(1 / 1.6),
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2),
      Home: () => this.move(-1e9), End: () => this.move(1e9),
      0: () => this.all(), Escape: () => this.all(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #wheel(event, place) {
    if (event.ctrlKey) {
      event.preventDefault();
      this.by(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.004)), clamp(place));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && !this.whole) {
      event.preventDefault();
      this.move(event.deltaX / 800);
    }
  }

  #down(event, place, node) {
    if (event.pointerType === "touch") {
      this.fingers.set(event.pointerId, place);
    } else if (event.button === 0) {
      this.drag = { from: clamp(place), to: clamp(place) };
      node.setPointerCapture(event.pointerId);
    }
  }

  #moved(event, place) {
    if (this.drag) {
      this.drag.to = clamp(place);
      this.changed();
      return;
    }
    const before = this.fingers.get(event.pointerId);
    if (before === undefined) return;
    if (this.fingers.size === 1) {
      this.move(before - place);
    } else {
      const other = [...this.fingers].find(([finger]) => finger !== event.pointerId)[1];
      const factor = Math.abs(place - other) / Math.max(0.02, Math.abs(before - other));
      this.by(Math.min(2, Math.max(0.5, factor)), clamp((place + other) / 2));
    }
    this.fingers.set(event.pointerId, place);
  }

  #up(event) {
    this.fingers.delete(event.pointerId);
    if (!this.drag) return;
    const [low, high] = [Math.min(this.drag.from, this.drag.to), Math.max(this.drag.from, this.drag.to)];
    this.drag = null;
    const width = this.to - this.from;
    if (high - low > 0.01) this.set(this.from + low * width, this.from + high * width);
    else this.changed();
  }
}

const clamp = (share) => Math.min(1, Math.max(0, share));
