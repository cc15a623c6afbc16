// Draws the results of operations on the question's picture: boxes, masks, points, text lines, tracks.

import { frameTimes } from "./clip.js";
import { decode } from "./masks.js";
import { isNumber, plural } from "./dom.js";

const WHOLE = [0, 0, 1, 1];
const MAX_MARKS = 300;

/** A valid box or null. The data comes from a model or a custom operation and may be anything. */
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

/** The views and objects of one sample. */
export class Scene {
  constructor() {
    this.views = new Map(["img0", "vid0"].map((id) => [id, { id }]));
    this.objects = new Map();
    this.number = 0;
  }

  addViews(images) {
    for (const view of images ?? []) this.views.set(view.id, view);
  }

  /** The location of a view: its root picture and a box in that; null for a video frame or a broken chain of parents. */
  locate(id) {
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

  /** The numbers and seconds of the frames that were shown of a clip. */
  shownFrames(clip) {
    return [...this.views.values()].filter((view) => view.parent === clip && isNumber(view.frame) && isNumber(view.time)).map((view) => [view.frame, view.time]);
  }

  /** The marks of a successful observation. Observations with marks are numbered. */
  marks(action, observation) {
    this.addViews(observation.images);
    const data = observation.data ?? {};
    const target = this.locate(action?.target ?? data.target ?? "img0");
    const marks = [];
    const add = (kind, root, values) => root !== null && marks.push({ kind, root, ...values });
    const root = target?.root ?? null;
    for (const object of records(data.objects)) {
      if (typeof object.id === "string") this.objects.set(object.id, object);
      if (object.kind === "track" || isNumber(object.frame)) continue;
      const mask = object.mask && typeof object.mask === "object" ? object.mask : null;
      const box = asBox(object.box);
      if (box || mask) add(mask ? "mask" : "box", object.root ?? root, { box, mask });
    }
    for (const item of Array.isArray(data.boxes) ? data.boxes.slice(0, MAX_MARKS) : []) {
      const box = asBox(Array.isArray(item) ? item : item?.box);
      if (box) add("box", root, { box });
    }
    for (const line of records(data.lines)) {
      if (asBox(line.box)) add("line", root, { box: line.box });
    }
    for (const track of records(data.tracks)) {
      const boxes = (Array.isArray(track.boxes) ? track.boxes : []).map(asBox).filter(Boolean);
      const clip = track.root ?? root;
      const frames = Array.isArray(track.frames) && track.frames.length === boxes.length && track.frames.every(isNumber) ? track.frames : null;
      if (boxes.length) add("track", clip, { box: boxes.at(-1), boxes, frames, times: frames && frameTimes(frames, this.shownFrames(clip)) });
    }
    if (target?.root.startsWith("vid")) {
      // Other marks belong to a frame, which the observation shows itself.
      const tracks = marks.filter((mark) => mark.kind === "track");
      if (tracks.length) this.number += 1;
      return tracks;
    }
    const point = asPoint(action?.arguments?.point);
    if (point && target) add("point", root, { at: compose(target.box, point).slice(0, 2) });
    if (!marks.some((mark) => mark.kind !== "line")) {
      // Without an outline, mark the region that the operation used.
      const regions = (observation.images ?? []).map((view) => this.locate(view.id)).filter((region) => region && region.box !== WHOLE);
      for (const region of regions) add("box", region.root, { box: region.box });
      const object = this.objects.get(action?.arguments?.object);
      const box = asBox(action?.arguments?.box);
      if (!regions.length && object && asBox(object.box)) add("box", object.root ?? root, { box: object.box });
      else if (!regions.length && target && box) add("box", root, { box: compose(target.box, box) });
    }
    if (marks.length) this.number += 1;
    return marks;
  }
}

/** A track at a time of the clip: its path so far and its box, which is missing outside of the track and where it has a gap. */
export function atTime(mark, time) {
  if (!mark.times) return mark;
  const count = mark.times.filter((t) => t <= time + 0.001).length;
  const continues = count < mark.times.length && mark.frames[count] === mark.frames[count - 1] + 1;
  const ended = !continues && time > mark.times[count - 1] + 0.2;
  return { ...mark, boxes: mark.boxes.slice(0, count), box: count && !ended ? mark.boxes[count - 1] : null };
}

export const COLOURS = ["#ff2d7a", "#00b3ff", "#ffb700", "#39d353", "#b180ff", "#ff7043", "#00d8c8", "#d7ff3e"];
const MIN_SIDE = 720;
const MAX_SIDE = 1600;

/** The picture with marks. A mark has a kind, a location, its `sample`, its `turn` and its label `name`. */
export class Stage {
  constructor(canvas) {
    Object.assign(this, { canvas, picture: null, list: [], selected: null, highlighted: null, tints: new Map(), scheduled: false });
    new ResizeObserver(() => this.scheduleDraw()).observe(canvas);
  }

  /** Show a picture (an image element) or a clip. */
  show(picture) {
    Object.assign(picture, picture.source ? {} : { width: picture.naturalWidth, height: picture.naturalHeight });
    this.root = picture.source ? "vid0" : "img0";
    const longest = Math.max(picture.width, picture.height);
    const scale = Math.min(MAX_SIDE, Math.max(MIN_SIDE, longest)) / longest;
    this.picture = picture;
    this.canvas.width = Math.max(1, Math.round(picture.width * scale));
    this.canvas.height = Math.max(1, Math.round(picture.height * scale));
    this.canvas.hidden = false;
    this.clear();
  }

  /** Call `use` with each place that is pointed at, in thousandths of the picture: a clicked point, or a dragged box. */
  onPlace(use) {
    const at = (event) => {
      const { left, top, width, height } = this.canvas.getBoundingClientRect();
      return [(event.clientX - left) / width, (event.clientY - top) / height].map((v) => Math.round(1000 * Math.min(1, Math.max(0, v))));
    };
    let start = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      start = at(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (!start) return;
      const [[a, b], [c, d]] = [start, at(event)];
      start = null;
      const dragged = Math.abs(a - c) > 20 && Math.abs(b - d) > 20;
      use(dragged ? [Math.min(a, c), Math.min(b, d), Math.max(a, c), Math.max(b, d)] : [c, d]);
    });
  }

  clear() {
    Object.assign(this, { list: [], selected: null, highlighted: null, tints: new Map() });
    this.scheduleDraw();
  }

  add(marks) {
    this.list.push(...marks.filter((mark) => mark.root === this.root));
    this.scheduleDraw();
  }

  /** Draw only this sample's marks; null: all. */
  select(sample) {
    this.selected = sample;
    this.scheduleDraw();
  }

  /** Dim the marks of all other turns; null: none. */
  highlight(turn) {
    if (this.highlighted === turn) return;
    this.highlighted = turn;
    this.scheduleDraw();
  }

  scheduleDraw() {
    if (this.scheduled || !this.picture) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    const { canvas, picture } = this;
    const context = canvas.getContext("2d");
    const { width, height } = canvas;
    // Canvas pixels per CSS pixel, so that lines and labels have the same size on every device.
    const unit = Math.max(width / (canvas.clientWidth || width), height / (canvas.clientHeight || height));
    context.imageSmoothingEnabled = Math.max(picture.width, picture.height) > 200;
    context.globalAlpha = 1;
    context.drawImage(picture.source ?? picture, 0, 0, width, height);
    const chosen = this.list.filter((mark) => this.highlighted === mark.turn || this.selected === null || this.selected === mark.sample);
    const visible = picture.source ? chosen.map((mark) => atTime(mark, picture.time)) : chosen;
    const dim = (mark) => (this.highlighted !== null && this.highlighted !== mark.turn ? 0.25 : 1);
    for (const mark of visible) {
      context.globalAlpha = dim(mark);
      if (mark.mask) this.tint(context, mark);
    }
    for (const mark of visible) {
      context.globalAlpha = dim(mark);
      this.outline(context, mark, unit);
    }
    const occupied = [];
    const labelled = new Set();
    for (const mark of visible) {
      const anchor = mark.at ? [...mark.at, ...mark.at] : mark.box;
      if (!anchor || labelled.has(mark.turn)) continue;
      labelled.add(mark.turn);
      context.globalAlpha = dim(mark);
      this.label(context, mark, anchor, unit, occupied);
    }
    context.globalAlpha = 1;
    const places = visible.filter((mark) => mark.kind !== "line").length;
    const lines = visible.length - places;
    canvas.setAttribute("aria-label", `the ${picture.source ? "clip" : "picture"}${places ? `, ${plural(places, "marked place")}` : ""}${lines ? `, ${plural(lines, "line")} of text` : ""}`);
    canvas.dataset.marks = String(visible.length);
  }

  tint(context, mark) {
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
    if (layer) context.drawImage(layer, 0, 0);
  }

  outline(context, mark, unit) {
    const { width, height } = this.canvas;
    const colour = COLOURS[mark.sample % COLOURS.length];
    // A dark line below the coloured one stays visible on any background.
    const strokes = (path, thickness) => {
      for (const [style, lineWidth] of [["rgb(0 0 0 / 0.75)", thickness + 2], [colour, thickness]]) {
        context.strokeStyle = style;
        context.lineWidth = lineWidth * unit;
        context.beginPath();
        path();
        context.stroke();
      }
    };
    context.lineJoin = "round";
    if (mark.kind === "track") {
      strokes(() => {
        mark.boxes.forEach(([x0, y0, x1, y1], i) => context[i ? "lineTo" : "moveTo"](((x0 + x1) / 2) * width, ((y0 + y1) / 2) * height));
      }, 2);
    }
    if (mark.at) {
      const [x, y] = [mark.at[0] * width, mark.at[1] * height];
      strokes(() => {
        context.moveTo(x - 9 * unit, y);
        context.lineTo(x + 9 * unit, y);
        context.moveTo(x, y - 9 * unit);
        context.lineTo(x, y + 9 * unit);
      }, 3);
    }
    if (mark.box) {
      const [x0, y0, x1, y1] = mark.box;
      strokes(() => context.rect(x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height), mark.kind === "line" || mark.mask ? 1.25 : 3);
    }
  }

  label(context, mark, [x0, y0], unit, occupied) {
    const { width, height } = this.canvas;
    context.font = `700 ${12 * unit}px system-ui, sans-serif`;
    const [labelWidth, labelHeight] = [context.measureText(mark.name).width + 9 * unit, 18 * unit];
    const left = Math.min(Math.max(0, x0 * width - 1.5 * unit), width - labelWidth);
    let top = y0 * height - labelHeight;
    if (top < 0) top = y0 * height;
    const free = (y) => !occupied.some(([l, t, w]) => l < left + labelWidth && left < l + w && t < y + labelHeight && y < t + labelHeight);
    for (let i = 0; i < 12 && !free(top); i++) top += labelHeight;
    top = Math.min(top, height - labelHeight);
    occupied.push([left, top, labelWidth]);
    context.fillStyle = COLOURS[mark.sample % COLOURS.length];
    context.fillRect(left, top, labelWidth, labelHeight);
    context.fillStyle = "#000";
    context.textBaseline = "middle";
    context.fillText(mark.name, left + 4.5 * unit, top + labelHeight / 2 + unit);
  }
}
