// The Evolution view: what the service learns, what it serves, and the way back. Asks every two seconds while it is looked at.

import { Failure, explain, request } from "./api.js";
import { curve } from "./chart.js";
import { $, clean, confirm, facts, h, isNumber, number, percent, plural, said, spaced, when } from "./dom.js";
import { Reviews } from "./reviews.js";

const EVERY_MS = 2000;
const SLOWEST_MS = 30000;
const MAX_VERSIONS = 50;
const MAX_LINES = 30;

let [shown, busy, timer, wait, needKey, reviews] = [false, false, 0, EVERY_MS, () => {}, null];
const parts = new Map();
const known = new Map();

export function setUp(settings, askForKey) {
  needKey = askForKey;
  reviews = new Reviews();
  const part = (name, ...children) => {
    const box = h("div", { id: `evolution-${name}` });
    parts.set(name, box);
    return [...children, box];
  };
  $("evolution").append(
    h("h1", {}, "Evolution"), ...part("trouble"), ...part("told"), ...part("status"),
    h("div", { class: "columns" },
      h("section", {}, part("canary", h("h2", {}, "Canary"))), h("section", {}, part("alerts", h("h2", {}, "Alerts")))),
    h("section", {}, part("versions", h("h2", {}, "Versions"))),
    reviews.element,
    h("section", {}, part("audit", h("h2", {}, "Audit log"))));
  document.addEventListener("visibilitychange", () => plan(0));
}

export function show(visible) {
  shown = visible;
  plan(0);
}

export function refresh() {
  wait = EVERY_MS;
  plan(0);
}

function plan(delay) {
  clearTimeout(timer);
  if (shown && document.visibilityState === "visible") timer = setTimeout(poll, delay);
}

async function poll() {
  if (busy) return;
  busy = true;
  try {
    render(await request("/v1/evolution"));
    await reviews.refresh();
    parts.get("trouble").replaceChildren();
    wait = EVERY_MS;
  } catch (error) {
    const [words, advice] = explain(error);
    parts.get("trouble").replaceChildren(h("div", { class: "card trouble" }, h("p", {}, h("b", {}, words)), h("p", {}, advice)));
    wait = Math.min(SLOWEST_MS, Math.max(2 * wait, 1000 * ((error instanceof Failure && error.wait) || 0)));
    if (error instanceof Failure && error.status === 401) {
      needKey();
      return; // until there is another key
    }
  } finally {
    busy = false;
  }
  plan(wait);
}

/** Build a part anew only when what it shows has changed, and leave the focus where it was. */
function put(name, data, build) {
  const text = JSON.stringify(data);
  if (known.get(name) === text) return;
  known.set(name, text);
  const box = parts.get(name);
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  box.replaceChildren(...[build()].flat(9).filter(Boolean));
  if (focused) box.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

function render(reply) {
  const status = reply.status ?? {};
  const served = status.served ?? reply.policy_version;
  const list = (name) => (Array.isArray(reply[name]) ? reply[name] : []);
  const minute = Math.floor(Date.now() / 60000); // times are said as ages
  put("status", [reply.enabled, reply.read_only, reply.updates, reply.queue, status, reply.memory, served], () => statusCard(reply, status, served));
  const versions = list("versions");
  put("versions", [versions, served, reply.read_only, minute], () => versionTable(versions, served, reply.read_only === true));
  const canary = list("canary");
  const width = parts.get("canary").clientWidth;
  put("canary", [canary, minute, width], () => curve(canary, width));
  const alerts = list("alerts");
  put("alerts", [alerts, minute], () => alertList(alerts));
  const audit = list("audit");
  put("audit", [audit, minute], () => auditTable(audit));
}

function statusCard(reply, status, served) {
  const paused = status.paused === true;
  const enabled = reply.enabled === true;
  const [word, kind] = reply.read_only ? ["read-only: nothing is learnt or kept", ""] : !enabled ? ["learning is switched off", ""] : paused ? ["paused", "wrong"]
    : status.learning === false || status.learning === 0 ? [status.learner_failure ? `no learner at work: ${status.learner_failure}` : "no learner at work", "wrong"] : ["learning", "right"];
  const candidate = status.candidate;
  const experiences = reply.memory?.["memory/size"] ?? reply.memory?.size;
  const waiting = reply.queue ?? status.queue;
  const actions = enabled && !reply.read_only ? h("div", { class: "row" },
    h("button", { type: "button", "data-focus": "pause", onclick: () => order(paused ? "resume" : "pause", {}) }, paused ? "Resume learning" : "Pause learning"),
    h("button", { type: "button", class: "danger", "data-focus": "back", onclick: async () => {
      if (await confirm(`Go back to the version before v${served}? It answers from the next request on.`, "Roll back")) order("rollback", {});
    } }, "Roll back")) : null;
  return h("article", { class: "card status" },
    h("p", { class: "state" }, h("span", { class: `pill ${kind}` }, word), isNumber(served) ? [" Version ", h("b", {}, `v${served}`), " answers."] : " No version has answered yet."),
    facts(
      ["Updates", number(reply.updates ?? status.updates)],
      ["Waiting updates", isNumber(waiting) ? number(waiting) : null],
      ["Candidate", isNumber(candidate) ? `v${candidate}` : null],
      ["KL to the start", isNumber(status.mean_kl) ? number(status.mean_kl) : null],
      ["KL weight β", isNumber(status.beta) ? number(status.beta) : null],
      ["Experiences", isNumber(experiences) ? number(experiences) : null],
      ["Waiting for review", isNumber(status.review?.waiting) ? number(status.review.waiting) : null],
      ["Memory", reply.memory?.["memory/shards_away"] ? `${reply.memory["memory/shards_away"]} of ${reply.memory["memory/shards"]} shards do not answer` : null],
    ),
    actions, counters({ ...(reply.counts ?? {}), ...(status.counts ?? {}) }));
}

function counters(counts) {
  const entries = Object.entries(counts).filter(([, value]) => isNumber(value));
  return entries.length ? h("details", {}, h("summary", {}, "All counters"), facts(...entries.map(([name, value]) => [spaced(name), number(value)]))) : null;
}

/** Give an order and tell what came of it until the next one. */
async function order(what, body) {
  const tell = (words, more, bad) => parts.get("told").replaceChildren(h("div", { class: bad ? "card trouble" : "card", role: bad ? "alert" : "status" }, h("p", {}, h("b", {}, words)), more ? h("p", {}, more) : null));
  tell(what === "promote" ? "The canary is asked…" : "Sending…");
  try {
    const { result } = await request(`/v1/evolution/${what}`, { method: "POST", body });
    if (result?.promoted === false) {
      tell(`Version ${body.version} was not promoted.`, `The canary refused it: ${spaced(result.reason ?? "")} (accuracy ${percent(result.accuracy)}, reference ${percent(result.reference_accuracy)}).`, true);
    } else {
      const words = { pause: "Learning is paused.", resume: "Learning goes on.", promote: `Version ${body.version} answers now.`, rollback: isNumber(result?.version) ? `Version ${result.version} answers again.` : "Rolled back." };
      tell(words[what]);
    }
  } catch (error) {
    tell(...explain(error), true);
  }
  refresh();
}

function versionTable(versions, served, readOnly) {
  if (!versions.length) return h("p", { class: "missing" }, "No version was published yet.");
  const newest = versions.slice().sort((a, b) => b.version - a.version).slice(0, MAX_VERSIONS);
  const rows = newest.map((v) => {
    const isServed = v.version === served;
    const promote = !readOnly && !isServed && v.status !== "rolled_back" ? h("button", { type: "button", "data-focus": `promote-${v.version}`, onclick: async () => {
      if (await confirm(`Let version ${v.version} answer? It must pass the canary first.`, `Promote v${v.version}`)) order("promote", { version: v.version });
    } }, "Promote") : null;
    const back = !readOnly && v.version < served && v.status === "promoted" ? h("button", { type: "button", class: "danger", "data-focus": `back-${v.version}`, onclick: async () => {
      if (await confirm(`Roll back to version ${v.version}? It answers from the next request on.`, `Roll back to v${v.version}`)) order("rollback", { version: v.version });
    } }, "Roll back to it") : null;
    const metrics = Object.entries(v.metrics ?? {}).filter(([, value]) => isNumber(value)).slice(0, 6);
    return h("tr", { class: isServed ? "served" : "" },
      h("th", { scope: "row" }, `v${v.version}`, isNumber(v.parent) ? h("small", {}, ` from v${v.parent}`) : null),
      h("td", { "data-label": "State" }, isServed ? h("span", { class: "pill right" }, "answers") : h("span", { class: v.status === "rolled_back" ? "wrong" : "" }, spaced(v.status ?? ""))),
      h("td", { "data-label": "Measured" }, metrics.length ? metrics.map(([name, value], i) => [i ? ", " : "", spaced(name), " ", h("b", {}, /accuracy|share|rate$/.test(name) ? percent(value) : number(value))]) : "–"),
      h("td", { "data-label": "When" }, when(v.created_at)),
      h("td", { class: "deeds" }, back ?? promote));
  });
  return [h("div", { class: "wide" }, h("table", { class: "versions" }, h("thead", {}, h("tr", {}, ["Version", "State", "Measured", "When", ""].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))),
    versions.length > MAX_VERSIONS ? h("p", {}, h("small", {}, `The newest ${MAX_VERSIONS} of ${plural(versions.length, "version")}.`)) : null];
}

function alertList(alerts) {
  if (!alerts.length) return h("p", { class: "missing" }, "No alerts.");
  const newest = alerts.slice().sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, MAX_LINES);
  return h("ul", { class: "alerts" }, newest.map((a) => h("li", { class: clean(a.severity ?? "", 12) === "critical" ? "critical" : "" },
    h("b", {}, spaced(a.severity ?? "")), " ", a.message && !a.metric ? said(a.message, 300)
      : [said(spaced(a.metric ?? ""), 80), ` is ${number(a.value)}`, isNumber(a.limit) ? `, ${a.side === "over" ? "above" : "at or below"} ${number(a.limit)}` : ""],
    " ", h("small", {}, when(a.time)))));
}

function auditTable(events) {
  if (!events.length) return h("p", { class: "missing" }, "Nothing is logged yet.");
  const newest = events.slice().sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, MAX_LINES);
  return h("div", { class: "wide" }, h("table", {},
    h("thead", {}, h("tr", {}, ["When", "Who", "What", "Result", "Details"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, newest.map((e) => h("tr", {},
      h("td", { "data-label": "When" }, when(e.time)), h("td", { "data-label": "Who" }, said(e.actor ?? "", 80)),
      h("td", { "data-label": "What" }, said([e.event, e.action].filter((word, i, all) => word && all.indexOf(word) === i).map(spaced).join(": "), 120)),
      h("td", { "data-label": "Result", class: e.result === "success" ? "" : "wrong" }, said(spaced(e.result ?? ""), 80)),
      h("td", { "data-label": "Details" }, Object.keys(e.details ?? {}).length ? h("small", {}, said(e.details, 240)) : ""))))));
}
