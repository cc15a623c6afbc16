// The samples of a question: their turns with thoughts, calls, crops and results.

import { $, clean, facts, h, isNumber, number, percent, plural, foreignText, asWords } from "./dom.js";
import { COLOURS, Scene } from "./marks.js";

const PADS = /(?:<\|(?:image|video)_pad\|>)+/g;
const CONTROL = /<\|[A-Za-z0-9_]+\|>/g;
const CALL = /<(tool_call|grounding|code)>[\s\S]*?(?:<\/\1>|$)/g;
const ANSWER = /<answer>([\s\S]*?)(?:<\/answer>|$)/g;
const MAX_LINES = 60;
/** Causal use in nats from which on an observation decided the answer. */
const DECIDES = 1;
/** What a sample saw that saw the pictures corrected, by the names of `serve.augmentations`. */
const LIGHTS = { grey_world: "saw the colours balanced", autocontrast: "saw the contrast stretched" };

/** The samples of one question in the page, and their marks on the stage. */
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

  /** Create samples up to `count`. */
  ensure(count) {
    while (this.list.length < Math.min(count, 64)) this.list.push(this.createSample(this.list.length));
    this.drawLegend();
  }

  createSample(index) {
    const status = h("span", { class: "status" }, "waiting");
    const turns = h("ol", { class: "turns" });
    const badge = h("b", { class: `mark s${index % COLOURS.length}` }, String(index + 1));
    const light = h("small", { class: "light" });
    const element = h("details", { class: "sample", open: index === 0 },
      h("summary", {}, badge, h("span", { class: "name" }, `Sample ${index + 1}`, light), status), turns);
    this.box.append(element);
    return { index, element, status, light, turns, scene: new Scene(), actions: [], tools: [], count: 0, policyTurns: 0 };
  }

  /** The legend of the samples' colours; its buttons select the samples whose marks are drawn. */
  drawLegend() {
    const chip = (label, index, mark) => h("button", { type: "button", class: "chip", "aria-pressed": String(this.stage.selected === index),
      onclick: () => this.select(index) }, mark, label);
    this.legend.replaceChildren(chip("All", null), ...this.list.map((s) =>
      chip("", s.index, h("b", { class: `mark s${s.index % COLOURS.length}`, "aria-label": `Sample ${s.index + 1}` }, String(s.index + 1)))));
    this.legend.hidden = this.list.length < 2;
  }

  select(index) {
    this.stage.select(index);
    [...this.legend.children].forEach((chip, i) => chip.setAttribute("aria-pressed", String((i === 0 ? null : i - 1) === index)));
  }

  /** Add the turn of a TurnEvent. */
  turn(event) {
    if (!Number.isInteger(event.sample) || event.sample < 0 || event.sample >= 64 || !event.turn) return;
    if ((event.attempt ?? 0) < this.attempt) return;
    if ((event.attempt ?? 0) > this.attempt) {
      // The generator was lost and another one started over.
      const { length } = this.list;
      this.attempt = event.attempt;
      this.clear();
      this.ensure(length);
    }
    this.ensure(Math.max(event.samples ?? 0, event.sample + 1));
    const sample = this.list[event.sample];
    const { turn } = event;
    if (event.augmentation) sample.light.textContent = ` ${LIGHTS[event.augmentation] ?? asWords(event.augmentation)}`;
    sample.scene.addViews(event.images);
    sample.count += 1;
    const item = turn.role === "assistant" ? this.policyTurn(sample, turn) : turn.role === "tool" ? this.toolTurn(sample, turn, event.images ?? []) : prompt(turn);
    if (item) sample.turns.append(item);
    if (turn.role === "tool") sample.tools.push(item);
  }

  policyTurn(sample, turn) {
    sample.policyTurns += 1;
    const calls = turn.action ? [turn.action, ...(turn.further_actions ?? [])] : [];
    sample.actions = [...calls];
    const { thought, answer } = parseTurn(turn.text ?? "");
    let action = "says";
    let detail = null;
    if (calls.length) {
      action = calls.flatMap((call, number) => [number ? ", then " : "calls ", h("b", {}, foreignText(call.op, 80)), " on ", foreignText(call.target, 80)]);
      detail = calls.map((call) => parameters(call.arguments));
      sample.status.replaceChildren(activity(calls[0].op));
    } else if (turn.error) {
      action = `makes an invalid call (${asWords(turn.error)})`;
      sample.status.replaceChildren("made an invalid call");
    } else if (answer !== null) {
      action = ["answers ", h("b", {}, foreignText(answer, 500))];
      sample.status.replaceChildren("answers ", h("b", {}, foreignText(answer, 80)));
    }
    return h("li", { class: turn.error ? "policy failed" : "policy" },
      h("p", { class: "action" }, h("small", {}, `Turn ${sample.policyTurns} `), action),
      thought ? h("p", { class: "thought" }, foreignText(thought)) : null, detail, collapsible("Raw turn", turn.text));
  }

  toolTurn(sample, turn, images) {
    const observation = turn.observation;
    if (!observation) return h("li", { class: "tool" }, h("p", { class: "action" }, "The operation replies"), collapsible("Raw reply", turn.text));
    const call = sample.actions.shift() ?? null;
    if (observation.status === "error") {
      sample.status.replaceChildren("a call failed");
      return h("li", { class: "tool failed" }, h("p", { class: "action" }, `The call fails: ${asWords(observation.code ?? "error")}`),
        h("p", {}, foreignText(observation.text)), collapsible("Raw reply", turn.text));
    }
    const marks = sample.scene.marks(call, observation);
    const name = `${sample.index + 1}.${sample.scene.number}`;
    const id = `${sample.index}:${sample.count}`;
    this.stage.add(marks.map((mark) => ({ ...mark, sample: sample.index, name, turn: id })));
    const button = marks.length ? h("button", { type: "button", class: `mark s${sample.index % COLOURS.length}`, title: "show on the picture",
      "aria-label": `Show place ${name} on the picture`, onfocus: () => this.stage.highlight(id), onblur: () => this.stage.highlight(null),
      onclick: () => this.stage.canvas.scrollIntoView({ block: "nearest", behavior: "smooth" }) }, name) : null;
    const views = new Map([...(observation.images ?? []), ...images].map((view) => [view.id, view]));
    const pictures = [...views.values()].filter((view) => isDataUrl(view.uri)).map((view) => crop(view, (time) => this.stage.canvas.dispatchEvent(new CustomEvent("seek", { detail: time }))));
    return h("li", { class: "tool", onmouseenter: () => marks.length && this.stage.highlight(id), onmouseleave: () => this.stage.highlight(null) },
      h("p", { class: "action" }, button, " The operation replies"), pictures, observationDetails(observation.data ?? {}), collapsible("Raw reply", turn.text || observation.text));
  }

  /** Show all turns of a trajectory that was not streamed. */
  showTrajectory(index, trajectory) {
    this.ensure(index + 1);
    const images = trajectory.images ?? [];
    const byId = new Map(images.map((view) => [view.id, view]));
    this.list[index].scene.addViews(images);
    for (const turn of trajectory.turns ?? []) {
      this.turn({ sample: index, samples: 0, turn, augmentation: trajectory.augmentation, images: (turn.images ?? []).map((id) => byId.get(id)).filter(Boolean) });
    }
  }

  /** Show the samples' answers; open the winner, draw only its marks, and say which calls decided its answer. */
  finish(winner, answers, trajectory) {
    this.list.forEach((sample, i) => {
      if (answers[i] !== undefined) sample.status.replaceChildren(...(answers[i] === null ? ["no answer"] : ["answers ", h("b", {}, foreignText(answers[i], 80))]));
      sample.element.classList.toggle("winner", i === winner);
    });
    if (winner === null || !this.list[winner]) return;
    for (const sample of this.list) sample.element.open = sample.index === winner;
    const badge = h("span", { class: "pill" }, "winner");
    this.list[winner].status.before(badge);
    (trajectory?.turns ?? []).filter((turn) => turn.role === "tool").forEach((turn, i) => {
      const use = causalUse(turn.observation);
      if (use !== null) this.list[winner].tools[i]?.append(h("p", { class: "use" }, h("b", {}, use)));
    });
    if (this.list.length > 1) this.select(winner);
  }

  /** Set the status of samples without an answer, when the stream ends early. */
  stop(status) {
    for (const sample of this.list) if (!/^(answers|no answer)/.test(sample.status.textContent)) sample.status.replaceChildren(status);
  }
}

/** Thought and answer of a policy turn's text, in any dialect. Tags inside the thought are ignored. */
export function parseTurn(text) {
  const thoughtEnd = text.indexOf("</think>");
  const body = thoughtEnd < 0 ? text : text.slice(thoughtEnd + 8);
  const answer = [...body.matchAll(ANSWER)].at(-1)?.[1].trim() ?? boxed(body) ?? answerLine(body);
  const rest = body.replace(CALL, " ").replace(ANSWER, " ");
  const thought = `${thoughtEnd < 0 ? "" : text.slice(0, thoughtEnd)} ${rest}`.replace(/^\s*<think>/, "").replace(PADS, " ").replace(CONTROL, " ").trim();
  return { thought, answer };
}

/** The rest of the last line that begins with `Answer:`, as the dialect dapo writes it; null for none. */
function answerLine(text) {
  return [...text.replace(CONTROL, "").matchAll(/^\s*Answer:[ \t]*(.+)$/gm)].at(-1)?.[1].trim() ?? null;
}

/** The content of the last \boxed{...}; null for none. */
function boxed(text) {
  const last = [...text.matchAll(/\\boxed\s*\{/g)].at(-1);
  if (!last) return null;
  const start = last.index + last[0].length;
  let end = start;
  for (let depth = 1; end < text.length && depth > 0; end++) depth += { "{": 1, "}": -1 }[text[end]] ?? 0;
  return text.slice(start, end - 1).trim();
}

/** What each operation lets a sample do, for the introduction. */
export const ABILITIES = { zoom_in: "zoom in", read_text: "read text", segment_object_at: "outline objects", track_object: "follow objects through a clip",
  get_properties: "measure", select_frames: "pick frames of a clip" };
const ACTIVITIES = { zoom_in: "zooms in", read_text: "reads text", segment_object_at: "outlines an object", track_object: "follows an object",
  get_properties: "measures", select_frames: "picks frames" };
const activity = (op) => ACTIVITIES[op] ?? clean(op, 40);

const isDataUrl = (uri) => typeof uri === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(uri);

/** A view as a figure. `seek(time)` shows the frame in the clip. */
function crop(view, seek) {
  const [width, height] = Array.isArray(view.source_size) ? view.source_size : [];
  const [w, h_] = Array.isArray(view.view_size) ? view.view_size : [];
  const frame = isNumber(view.frame) && isNumber(view.time);
  const caption = frame ? h("button", { type: "button", class: "seek", onclick: () => seek(view.time) }, `Frame ${number(view.frame)} at ${view.time.toFixed(2)} s`) : [foreignText(view.id, 40), width ? `: ${width} × ${height} pixels of the picture` : "", w ? `, shown at ${w} × ${h_}` : ""];
  const image = h("img", { class: Math.max(w ?? 0, h_ ?? 0) <= 200 ? "pixels" : "", alt: `view ${clean(view.id, 40)}`, src: view.uri });
  return h("figure", { class: "crop" }, image, h("figcaption", {}, caption));
}

const prompt = (turn) => (turn.text ? h("li", { class: "prompt" }, collapsible(`The prompt (${clean(turn.role, 20)})`, turn.text)) : null);

function collapsible(title, text) {
  if (!text) return null;
  const compact = text.replace(PADS, (run) => `[picture: ${run.split("_pad|>").length - 1} tokens]`).trim();
  return h("details", { class: "raw" }, h("summary", {}, title), h("pre", {}, foreignText(compact)));
}

function parameters(values) {
  const entries = Object.entries(values ?? {}).slice(0, 20);
  if (!entries.length) return null;
  return h("p", { class: "arguments" }, entries.map(([name, value]) => [h("code", {}, foreignText(name, 40), " = ", foreignText(plain(value), 200)), " "]));
}

function plain(value) {
  if (isNumber(value)) return number(value);
  if (Array.isArray(value)) return value.length > 12 ? `${value.length} values` : `[${value.map(plain).join(", ")}]`;
  return value && typeof value === "object" ? clean(value, 200) : String(value);
}

/** What the answer owes to an observation, as `Observation.causal_use` has it; null if that was not measured. */
function causalUse(observation) {
  const { real, elsewhere, blank } = observation?.answer_log_probs ?? {};
  const shams = (observation?.text ? [blank] : [blank, elsewhere]).filter(isNumber);
  if (!isNumber(real) || !shams.length) return null;
  const use = real - shams.reduce((sum, value) => sum + value, 0) / shams.length;
  if (use < DECIDES) return "The answer hardly depends on this.";
  const times = Math.exp(use);
  return `This decided the answer: ${times < 1000 ? times.toFixed(0) : "over 1000"} times likelier than without it.`;
}

/** The results of an observation as elements. */
function observationDetails(data) {
  const elements = [];
  const list = (value) => (Array.isArray(value) ? value.filter((v) => v && typeof v === "object") : []);
  for (const object of list(data.objects).slice(0, 12)) {
    const parts = [["object ", h("b", {}, foreignText(object.id, 40))], isNumber(object.area) && plural(object.area, "pixel"), isNumber(object.score) && `score ${number(object.score)}`];
    elements.push(h("p", {}, parts.filter(Boolean).map((part, i) => [i ? ", " : "", part])));
  }
  const lines = list(data.lines);
  if (lines.length) {
    elements.push(h("ol", { class: "read" }, lines.slice(0, MAX_LINES).map((line) => h("li", {}, foreignText(line.text, 500), isNumber(line.confidence) && h("small", {}, ` ${percent(line.confidence)}`)))));
    if (lines.length > MAX_LINES) elements.push(h("p", {}, h("small", {}, `and ${plural(lines.length - MAX_LINES, "more line", "more lines")}`)));
  }
  for (const track of list(data.tracks)) elements.push(h("p", {}, "track ", h("b", {}, foreignText(track.id, 40)), `: ${asWords(track.status ?? "")}`));
  for (const [group, values] of Object.entries(data.properties ?? {})) {
    if (!values || typeof values !== "object") continue;
    elements.push(h("p", {}, h("b", {}, asWords(group))), facts(...Object.entries(values).slice(0, 40).map(([name, value]) => [asWords(name), property(value)])));
  }
  return elements;
}

function property(value) {
  let unit = "";
  if (value && typeof value === "object" && !Array.isArray(value) && "value" in value) {
    unit = ["", "ratio", "bool", "name", "names", "count", "1"].includes(value.unit ?? "") ? "" : ` ${clean(value.unit, 30)}`;
    value = value.value;
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  const content = foreignText(Array.isArray(value) && value.every((v) => typeof v !== "object") ? value.slice(0, 8).map(plain).join(", ") : plain(value), 200);
  if (!/0\.\.255/.test(unit) || !Array.isArray(value) || value.length !== 3 || !value.every(isNumber)) return [content, h("small", {}, unit)];
  const swatch = h("i", { class: "swatch" });
  swatch.style.background = `rgb(${value.map(Math.round).join(" ")})`; // a style attribute would violate the content security policy
  return [swatch, content];
}
