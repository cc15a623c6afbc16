// What an operation looked at and found, as marks on the question's own picture: boxes, masks, points, lines, tracks.

import { decode } from "./masks.js";
import { isNumber, plural } from "./dom.js";

const WHOLE = [0, 0, 1, 1];
const MAX_MARKS = 300;

/** Four numbers in order, or null: this data was written by a model or an operation of the user's own. */
export function asBox(value) {
  if (!Array.isArray(value) || value.length !== 4 || !value.every((v) => isNumber(v) && Math.abs(v) < 1e4)) return null;
  return value[0] < value[2] && value[1] < value[3] ? value : null;
}

const asPoint = (value) => (Array.isArray(value) && value.length === 2 && value.every((v) => isNumber(v) && v >= 0 && v <= 1) ? value : null);

const compose = (outer, inner) => {
  const [width, height] = [outer[2] - outer[0], outer[3] - outer[1]];
  return inner.map((v, i) => outer[i % 2] + v * (i % 2 ? height : width));
};

const records = (values) => (Array.isArray(values) ? values.filter((v) => v && typeof v === "object").slice(0, MAX_MARKS) : []);

/** One sample's views and objects so far; `marks` reads the next observation. */
export class Scene {
  constructor() {
    this.views = new Map([["img0", { id: "img0" }]]);
    this.objects = new Map();
    this.number = 0;
  }

  learn(images) {
    for (const view of images ?? []) this.views.set(view.id, view);
  }

  /** Where a view lies: the question's picture and a box of it; null when its chain is broken or it is of a clip. */
  place(id) {
    let box = WHOLE;
    for (let depth = 0; depth < 64; depth++) {
      const view = this.views.get(id);
      if (!view || isNumber(view.frame)) return null;
      if (!view.parent) return { root: id, box };
      const inner = asBox(view.box);
      if (!inner) return null;
      box = compose(inner, box);
      id = view.parent;
    }
    return null;
  }

  /** Marks of a successful observation, and its number in this sample (only what can be drawn gets one). */
  marks(action, observation) {
    this.learn(observation.images);
    const data = observation.data ?? {};
    const target = this.place(action?.target ?? data.target ?? "img0");
    const found = [];
    const put = (kind, root, values) => root !== null && found.push({ kind, root, ...values });
    const root = target?.root ?? null;
    for (const thing of records(data.objects)) {
      if (typeof thing.id === "string") this.objects.set(thing.id, thing);
      if (thing.kind === "track" || isNumber(thing.frame)) continue;
      const mask = thing.mask && typeof thing.mask === "object" ? thing.mask : null;
      const box = asBox(thing.box);
      if (box || mask) put(mask ? "mask" : "box", thing.root ?? root, { box, mask });
    }
    for (const thing of Array.isArray(data.boxes) ? data.boxes.slice(0, MAX_MARKS) : []) {
      const box = asBox(Array.isArray(thing) ? thing : thing?.box);
      if (box) put("box", root, { box });
    }
    for (const line of records(data.lines)) {
      if (asBox(line.box)) put("line", root, { box: line.box });
    }
    for (const track of records(data.tracks)) {
      const boxes = (Array.isArray(track.boxes) ? track.boxes : []).map(asBox).filter(Boolean);
      if (boxes.length) put("track", track.root ?? root, { box: boxes.at(-1), boxes });
    }
    const point = asPoint(action?.arguments?.point);
    if (point && target) put("point", root, { at: compose(target.box, point).slice(0, 2) });
    if (!found.some((mark) => mark.kind !== "line")) {
      // Nothing with an outline was found: the region that was looked at says where this happened.
      const looked = (observation.images ?? []).map((view) => this.place(view.id)).filter((spot) => spot && spot.box !== WHOLE);
      for (const spot of looked) put("box", spot.root, { box: spot.box });
      const asked = this.objects.get(action?.arguments?.object);
      const box = asBox(action?.arguments?.box);
      if (!looked.length && asked && asBox(asked.box)) put("box", asked.root ?? root, { box: asked.box });
      else if (!looked.length && target && box) put("box", root, { box: compose(target.box, box) });
    }
    if (found.length) this.number += 1;
    return found;
  }
}

export const COLOURS = ["#ff2d7a", "#00b3ff", "#ffb700", "#39d353", "#b180ff", "#ff7043", "#00d8c8", "#d7ff3e"];
const SMALLEST = 720;
const LARGEST = 1600;

/** The picture with marks on it. A mark has `sample`, `name` (its label) and `turn` (what it belongs to) besides its place. */
export class Stage {
  constructor(canvas) {
    Object.assign(this, { canvas, picture: null, list: [], only: null, lit: null, tints: new Map(), asked: false });
    new ResizeObserver(() => this.later()).observe(canvas);
  }

  show(picture) {
    const longest = Math.max(picture.naturalWidth, picture.naturalHeight);
    const scale = Math.min(LARGEST, Math.max(SMALLEST, longest)) / longest;
    this.picture = picture;
    this.canvas.width = Math.max(1, Math.round(picture.naturalWidth * scale));
    this.canvas.height = Math.max(1, Math.round(picture.naturalHeight * scale));
    this.canvas.hidden = false;
    this.clear();
  }

  clear() {
    Object.assign(this, { list: [], only: null, lit: null, tints: new Map() });
    this.later();
  }

  add(marks) {
    this.list.push(...marks.filter((mark) => mark.root === "img0"));
    this.later();
  }

  /** Draw one sample's marks only; null: all. */
  choose(sample) {
    this.only = sample;
    this.later();
  }

  /** Bring out the marks of one turn; null: none. */
  light(turn) {
    if (this.lit === turn) return;
    this.lit = turn;
    this.later();
  }

  later() {
    if (this.asked || !this.picture) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  draw() {
    const { canvas, picture } = this;
    const pen = canvas.getContext("2d");
    const { width, height } = canvas;
    // Canvas pixels of one pixel on the screen, so that lines and labels have one size on every device.
    const unit = Math.max(width / (canvas.clientWidth || width), height / (canvas.clientHeight || height));
    pen.imageSmoothingEnabled = Math.max(picture.naturalWidth, picture.naturalHeight) > 200;
    pen.globalAlpha = 1;
    pen.drawImage(picture, 0, 0, width, height);
    const shown = this.list.filter((mark) => this.lit === mark.turn || this.only === null || this.only === mark.sample);
    const dim = (mark) => (this.lit !== null && this.lit !== mark.turn ? 0.25 : 1);
    for (const mark of shown) {
      pen.globalAlpha = dim(mark);
      if (mark.mask) this.tint(pen, mark);
    }
    for (const mark of shown) {
      pen.globalAlpha = dim(mark);
      this.outline(pen, mark, unit);
    }
    const taken = [];
    const named = new Set();
    for (const mark of shown) {
      const anchor = mark.at ? [...mark.at, ...mark.at] : mark.box;
      if (!anchor || named.has(mark.turn)) continue;
      named.add(mark.turn);
      pen.globalAlpha = dim(mark);
      this.label(pen, mark, anchor, unit, taken);
    }
    pen.globalAlpha = 1;
    const places = shown.filter((mark) => mark.kind !== "line").length;
    const lines = shown.length - places;
    canvas.setAttribute("aria-label", `the picture${places ? `, ${plural(places, "marked place")}` : ""}${lines ? `, ${plural(lines, "line")} of text` : ""}`);
    canvas.dataset.marks = String(shown.length);
  }

  tint(pen, mark) {
    const { width, height } = this.canvas;
    let layer = this.tints.get(mark);
    if (layer === undefined) {
      const inside = decode(mark.mask, width, height);
      layer = null;
      if (inside) {
        layer = document.createElement("canvas");
        Object.assign(layer, { width, height });
        const image = new ImageData(width, height);
        const colour = Number.parseInt(COLOURS[mark.sample % COLOURS.length].slice(1), 16);
        const words = new DataView(image.data.buffer);
        for (let y = 0; y < height; y++) {
          for (let x = 0; x < width; x++) {
            const i = y * width + x;
            if (!inside[i]) continue;
            const edge = x < 2 || y < 2 || x >= width - 2 || y >= height - 2 || !(inside[i - 2] && inside[i + 2] && inside[i - 2 * width] && inside[i + 2 * width]);
            words.setUint32(4 * i, colour * 256 + (edge ? 255 : 100));
          }
        }
        layer.getContext("2d").putImageData(image, 0, 0);
      }
      this.tints.set(mark, layer);
    }
    if (layer) pen.drawImage(layer, 0, 0);
  }

  outline(pen, mark, unit) {
    const { width, height } = this.canvas;
    const colour = COLOURS[mark.sample % COLOURS.length];
    // A dark line below the coloured one: seen on any ground.
    const strokes = (path, thick) => {
      for (const [style, wide] of [["rgb(0 0 0 / 0.75)", thick + 2], [colour, thick]]) {
        pen.strokeStyle = style;
        pen.lineWidth = wide * unit;
        pen.beginPath();
        path();
        pen.stroke();
      }
    };
    pen.lineJoin = "round";
    if (mark.kind === "track") {
      strokes(() => {
        mark.boxes.forEach(([x0, y0, x1, y1], i) => pen[i ? "lineTo" : "moveTo"](((x0 + x1) / 2) * width, ((y0 + y1) / 2) * height));
      }, 2);
    }
    if (mark.at) {
      const [x, y] = [mark.at[0] * width, mark.at[1] * height];
      strokes(() => {
        pen.moveTo(x - 9 * unit, y);
        pen.lineTo(x + 9 * unit, y);
        pen.moveTo(x, y - 9 * unit);
        pen.lineTo(x, y + 9 * unit);
      }, 3);
    }
    if (mark.box) {
      const [x0, y0, x1, y1] = mark.box;
      strokes(() => pen.rect(x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height), mark.kind === "line" || mark.mask ? 1.25 : 3);
    }
  }

  label(pen, mark, [x0, y0], unit, taken) {
    const { width, height } = this.canvas;
    pen.font = `700 ${12 * unit}px system-ui, sans-serif`;
    const [wide, tall] = [pen.measureText(mark.name).width + 9 * unit, 18 * unit];
    const left = Math.min(Math.max(0, x0 * width - 1.5 * unit), width - wide);
    let top = y0 * height - tall;
    if (top < 0) top = y0 * height;
    const free = (y) => !taken.some(([l, t, w]) => l < left + wide && left < l + w && t < y + tall && y < t + tall);
    for (let i = 0; i < 12 && !free(top); i++) top += tall;
    top = Math.min(top, height - tall);
    taken.push([left, top, wide]);
    pen.fillStyle = COLOURS[mark.sample % COLOURS.length];
    pen.fillRect(left, top, wide, tall);
    pen.fillStyle = "#000";
    pen.textBaseline = "middle";
    pen.fillText(mark.name, left + 4.5 * unit, top + tall / 2 + unit);
  }
}
