// Builds elements and formats values. Text of models, callers and the service becomes text nodes, never markup.

const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]|\p{Surrogate}/gu;
const MAX_TEXT = 20000;

/** An HTML element. Attributes named on* are listeners; children are nodes, strings, nested lists, null or false. */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** The same for an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** The value as text, at most `limit` characters, with control and direction characters replaced by U+FFFD. */
export function clean(value, limit = MAX_TEXT) {
  const raw = typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value);
  const rest = raw.length > limit ? ` … (${raw.length - limit} more characters)` : "";
  return raw.slice(0, limit).replace(INVISIBLE, "\ufffd") + rest;
}

/** Text of others in an element that isolates its direction. */
export const foreignText = (value, limit) => h("bdi", {}, clean(value, limit));

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** `84.5 %`. */
export function percent(value) {
  if (!isNumber(value)) return "–";
  return `${Number((100 * value).toPrecision(3))} %`;
}

/** `0.0012`, `12k`, `3`. */
export function number(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace("e+", "e");
  if (size >= 1e4) return `${Number((value / 1000).toPrecision(3))}k`;
  return String(Number(value.toPrecision(4)));
}

export const plural = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

/** `3 min ago`, from seconds since 1970. */
export function ago(time, now = Date.now() / 1000) {
  if (!isNumber(time) || time <= 0) return "";
  const s = Math.max(0, now - time);
  if (s < 5) return "just now";
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 129600) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} days ago`;
}

/** The age of a point in time, with its date as the title. */
export function timeAgo(time) {
  if (!isNumber(time) || time <= 0) return "";
  const date = new Date(time * 1000);
  return Number.isNaN(date.getTime()) ? "" : h("time", { datetime: date.toISOString(), title: date.toLocaleString() }, ago(time));
}

/** The words of an identifier such as `insufficient_votes`. */
export const asWords = (name) => clean(name, 80).replaceAll("_", " ");

/** A list of terms and values, without those that have no value. */
export function facts(...pairs) {
  const present = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
  return h("dl", { class: "facts" }, present.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
}

/** Ask for confirmation of an action that affects others. Resolves to true or false. */
export function confirm(question, yes) {
  const dialog = $("confirm");
  $("confirm-text").replaceChildren(...[question].flat(9));
  $("confirm-yes").textContent = yes;
  return new Promise((resolve) => {
    const done = (value) => {
      $("confirm-yes").onclick = $("confirm-no").onclick = dialog.onclose = null;
      dialog.close();
      resolve(value);
    };
    $("confirm-yes").onclick = () => done(true);
    $("confirm-no").onclick = () => done(false);
    dialog.onclose = () => done(false);
    dialog.showModal();
    $("confirm-no").focus();
  });
}
