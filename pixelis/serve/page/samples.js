// Samples as they work: their turns one after another, with thoughts, calls, crops and what was found.

import { $, clean, facts, h, isNumber, number, percent, plural, said, spaced } from "./dom.js";
import { COLOURS, Scene } from "./marks.js";

const PADS = /(?:<\|(?:image|video)_pad\|>)+/g;
const CONTROL = /<\|[A-Za-z0-9_]+\|>/g;
const CALL = /<(tool_call|grounding|code)>[\s\S]*?(?:<\/\1>|$)/g;
const ANSWER = /<answer>([\s\S]*?)(?:<\/answer>|$)/g;
const MAX_LINES = 60;

/** The samples of one question, their places on the stage and in the page. */
export class Samples {
  constructor(stage) {
    Object.assign(this, { stage, attempt: 0, box: $("samples-list"), legend: $("legend") });
    this.clear();
  }

  clear() {
    this.list = [];
    this.stage.clear();
    this.box.replaceChildren();
    this.legend.replaceChildren();
    this.legend.hidden = true;
  }

  /** Make room for `count` samples. */
  expect(count) {
    while (this.list.length < Math.min(count, 64)) this.list.push(this.make(this.list.length));
    this.chips();
  }

  make(index) {
    const status = h("span", { class: "status" }, "waiting");
    const turns = h("ol", { class: "turns" });
    const badge = h("b", { class: `mark s${index % COLOURS.length}` }, String(index + 1));
    const element = h("details", { class: "sample", open: index === 0 },
      h("summary", {}, badge, h("span", { class: "name" }, `Sample ${index + 1}`), status), turns);
    this.box.append(element);
    return { index, element, status, turns, scene: new Scene(), action: null, count: 0, policyTurns: 0 };
  }

  /** Buttons that choose whose marks are drawn; they are the legend of the colours, too. */
  chips() {
    const chip = (label, index, mark) => h("button", { type: "button", class: "chip", "aria-pressed": String(this.stage.only === index),
      onclick: () => this.choose(index) }, mark, label);
    this.legend.replaceChildren(chip("All", null), ...this.list.map((s) =>
      chip("", s.index, h("b", { class: `mark s${s.index % COLOURS.length}`, "aria-label": `Sample ${s.index + 1}` }, String(s.index + 1)))));
    this.legend.hidden = this.list.length < 2;
  }

  choose(index) {
    this.stage.choose(index);
    [...this.legend.children].forEach((chip, i) => chip.setAttribute("aria-pressed", String((i === 0 ? null : i - 1) === index)));
  }

  /** One event: a turn of a sample, and the pictures that became visible with it. */
  turn(event) {
    if (!Number.isInteger(event.sample) || event.sample < 0 || event.sample >= 64 || !event.turn) return;
    if ((event.attempt ?? 0) < this.attempt) return;
    if ((event.attempt ?? 0) > this.attempt) {
      // Another generator began again: what the lost one did counts no more.
      const { length } = this.list;
      this.attempt = event.attempt;
      this.clear();
      this.expect(length);
    }
    this.expect(Math.max(event.samples ?? 0, event.sample + 1));
    const sample = this.list[event.sample];
    const { turn } = event;
    sample.scene.learn(event.images);
    sample.count += 1;
    const item = turn.role === "assistant" ? this.policy(sample, turn) : turn.role === "tool" ? this.reply(sample, turn, event.images ?? []) : prompt(turn);
    if (item) sample.turns.append(item);
  }

  policy(sample, turn) {
    sample.policyTurns += 1;
    sample.action = turn.action ?? null;
    const { thought, answer } = read(turn.text ?? "");
    let deed = "says";
    let detail = null;
    if (turn.action) {
      deed = ["calls ", h("b", {}, said(turn.action.op, 80)), " on ", said(turn.action.target, 80)];
      detail = parameters(turn.action.arguments);
      sample.status.replaceChildren(doing(turn.action.op));
    } else if (turn.error) {
      deed = `makes a call that cannot be read (${spaced(turn.error)})`;
      sample.status.replaceChildren("made a broken call");
    } else if (answer !== null) {
      deed = ["answers ", h("b", {}, said(answer, 500))];
      sample.status.replaceChildren("answers ", h("b", {}, said(answer, 80)));
    }
    return h("li", { class: turn.error ? "policy failed" : "policy" },
      h("p", { class: "deed" }, h("small", {}, `Turn ${sample.policyTurns} `), deed),
      thought ? h("p", { class: "thought" }, said(thought)) : null, detail, folded("The turn as it was written", turn.text));
  }

  reply(sample, turn, images) {
    const seen = turn.observation;
    if (!seen) return h("li", { class: "tool" }, h("p", { class: "deed" }, "The operation replies"), folded("The reply", turn.text));
    if (seen.status === "error") {
      sample.status.replaceChildren("a call failed");
      return h("li", { class: "tool failed" }, h("p", { class: "deed" }, `The call fails: ${spaced(seen.code ?? "error")}`),
        h("p", {}, said(seen.text)), folded("The reply as it was read", turn.text));
    }
    const marks = sample.scene.marks(sample.action, seen);
    const name = `${sample.index + 1}.${sample.scene.number}`;
    const id = `${sample.index}:${sample.count}`;
    this.stage.add(marks.map((mark) => ({ ...mark, sample: sample.index, name, turn: id })));
    const button = marks.length ? h("button", { type: "button", class: `mark s${sample.index % COLOURS.length}`, title: "show this place on the picture",
      "aria-label": `Show place ${name} on the picture`, onfocus: () => this.stage.light(id), onblur: () => this.stage.light(null),
      onclick: () => this.stage.canvas.scrollIntoView({ block: "nearest", behavior: "smooth" }) }, name) : null;
    const views = new Map([...(seen.images ?? []), ...images].map((view) => [view.id, view]));
    const pictures = [...views.values()].filter((view) => shown(view.uri)).map((view) => crop(view));
    return h("li", { class: "tool", onmouseenter: () => marks.length && this.stage.light(id), onmouseleave: () => this.stage.light(null) },
      h("p", { class: "deed" }, button, " The operation replies"), pictures, found(seen.data ?? {}), folded("The reply as it was read", turn.text || seen.text));
  }

  /** The whole of a sample whose turns were not streamed. */
  trajectory(index, trajectory) {
    this.expect(index + 1);
    const images = trajectory.images ?? [];
    const byId = new Map(images.map((view) => [view.id, view]));
    this.list[index].scene.learn(images);
    for (const turn of trajectory.turns ?? []) {
      this.turn({ sample: index, samples: 0, turn, images: (turn.images ?? []).map((id) => byId.get(id)).filter(Boolean) });
    }
  }

  /** After the vote: what each sample said, and the winner open and alone on the stage. */
  settle(winner, answers) {
    this.list.forEach((sample, i) => {
      if (answers[i] !== undefined) sample.status.replaceChildren(...(answers[i] === null ? ["no answer"] : ["answers ", h("b", {}, said(answers[i], 80))]));
      sample.element.classList.toggle("winner", i === winner);
    });
    if (winner === null || !this.list[winner]) return;
    for (const sample of this.list) sample.element.open = sample.index === winner;
    const badge = h("span", { class: "pill" }, "shown as the reason");
    this.list[winner].status.before(badge);
    if (this.list.length > 1) this.choose(winner);
  }

  /** The stream ended early. */
  stop(word) {
    for (const sample of this.list) if (!/^(answers|no answer)/.test(sample.status.textContent)) sample.status.replaceChildren(word);
  }
}

/** Thought and answer out of a policy turn's text, whatever tags its dialect writes; tags inside the thought are not looked at. */
export function read(text) {
  const cut = text.indexOf("</think>");
  const body = cut < 0 ? text : text.slice(cut + 8);
  const answer = [...body.matchAll(ANSWER)].at(-1)?.[1].trim() ?? boxed(body);
  const rest = body.replace(CALL, " ").replace(ANSWER, " ");
  const thought = `${cut < 0 ? "" : text.slice(0, cut)} ${rest}`.replace(/^\s*<think>/, "").replace(PADS, " ").replace(CONTROL, " ").trim();
  return { thought, answer };
}

/** What stands in the last \boxed{...}; null for none. */
function boxed(text) {
  const last = [...text.matchAll(/\\boxed\s*\{/g)].at(-1);
  if (!last) return null;
  const start = last.index + last[0].length;
  let end = start;
  for (let depth = 1; end < text.length && depth > 0; end++) depth += { "{": 1, "}": -1 }[text[end]] ?? 0;
  return text.slice(start, end - 1).trim();
}

const DOING = { zoom_in: "looks closer", read_text: "reads", segment_object_at: "outlines an object", track_object: "follows an object",
  get_properties: "measures", select_frames: "picks frames" };
const doing = (op) => DOING[op] ?? clean(op, 40);

const shown = (uri) => typeof uri === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(uri);

function crop(view) {
  const [width, height] = Array.isArray(view.source_size) ? view.source_size : [];
  const [w, h_] = Array.isArray(view.view_size) ? view.view_size : [];
  const caption = [said(view.id, 40), width ? `: ${width} × ${height} pixels of the picture` : "", w ? `, seen at ${w} × ${h_}` : ""];
  const image = h("img", { class: Math.max(w ?? 0, h_ ?? 0) <= 200 ? "pixels" : "", alt: `what ${clean(view.id, 40)} shows`, src: view.uri });
  return h("figure", { class: "crop" }, image, h("figcaption", {}, caption));
}

const prompt = (turn) => (turn.text ? h("li", { class: "prompt" }, folded(`The prompt (${clean(turn.role, 20)})`, turn.text)) : null);

function folded(title, text) {
  if (!text) return null;
  const tidy = text.replace(PADS, (run) => `[picture: ${run.split("_pad|>").length - 1} tokens]`).trim();
  return h("details", { class: "raw" }, h("summary", {}, title), h("pre", {}, said(tidy)));
}

function parameters(values) {
  const entries = Object.entries(values ?? {}).slice(0, 20);
  if (!entries.length) return null;
  return h("p", { class: "arguments" }, entries.map(([name, value]) => [h("code", {}, said(name, 40), " = ", said(plain(value), 200)), " "]));
}

function plain(value) {
  if (isNumber(value)) return number(value);
  if (Array.isArray(value)) return value.length > 12 ? `${value.length} values` : `[${value.map(plain).join(", ")}]`;
  return value && typeof value === "object" ? clean(value, 200) : String(value);
}

/** What an observation found, as words. */
function found(data) {
  const out = [];
  const list = (value) => (Array.isArray(value) ? value.filter((v) => v && typeof v === "object") : []);
  for (const thing of list(data.objects).slice(0, 12)) {
    const parts = [["object ", h("b", {}, said(thing.id, 40))], isNumber(thing.area) && plural(thing.area, "pixel"), isNumber(thing.score) && `score ${number(thing.score)}`];
    out.push(h("p", {}, parts.filter(Boolean).map((part, i) => [i ? ", " : "", part])));
  }
  const lines = list(data.lines);
  if (lines.length) {
    out.push(h("ol", { class: "read" }, lines.slice(0, MAX_LINES).map((line) => h("li", {}, said(line.text, 500), isNumber(line.confidence) && h("small", {}, ` ${percent(line.confidence)}`)))));
    if (lines.length > MAX_LINES) out.push(h("p", {}, h("small", {}, `and ${plural(lines.length - MAX_LINES, "more line", "more lines")}`)));
  }
  for (const track of list(data.tracks)) out.push(h("p", {}, "track ", h("b", {}, said(track.id, 40)), `: ${spaced(track.status ?? "")}`));
  for (const [group, values] of Object.entries(data.properties ?? {})) {
    if (!values || typeof values !== "object") continue;
    out.push(h("p", {}, h("b", {}, spaced(group))), facts(...Object.entries(values).slice(0, 40).map(([name, value]) => [spaced(name), property(value)])));
  }
  return out;
}

function property(value) {
  let unit = "";
  if (value && typeof value === "object" && !Array.isArray(value) && "value" in value) {
    unit = ["", "ratio", "bool", "name", "names", "count", "1"].includes(value.unit ?? "") ? "" : ` ${clean(value.unit, 30)}`;
    value = value.value;
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  const words = said(Array.isArray(value) && value.every((v) => typeof v !== "object") ? value.slice(0, 8).map(plain).join(", ") : plain(value), 200);
  if (!/0\.\.255/.test(unit) || !Array.isArray(value) || value.length !== 3 || !value.every(isNumber)) return [words, h("small", {}, unit)];
  const patch = h("i", { class: "swatch" });
  patch.style.background = `rgb(${value.map(Math.round).join(" ")})`; // through the object model: a style attribute would break the policy
  return [patch, words];
}
