// The Evolution view: status, versions, canary, alerts, reviews and audit log. Polls every two seconds while it is visible.

import { Failure, explain, request } from "./api.js";
import { canaryChart } from "./chart.js";
import { $, clean, confirm, facts, h, isNumber, number, percent, plural, foreignText, asWords, timeAgo } from "./dom.js";
import { Reviews } from "./reviews.js";

const POLL_MS = 2000;
const MAX_POLL_MS = 30000;
const MAX_VERSIONS = 50;
const MAX_LINES = 30;

let [visible, polling, timer, delay, requestKey, reviews] = [false, false, 0, POLL_MS, () => {}, null];
const parts = new Map();
const rendered = new Map();

export function setUp(settings, onKeyNeeded) {
  requestKey = onKeyNeeded;
  reviews = new Reviews();
  const part = (name, ...children) => {
    const box = h("div", { id: `evolution-${name}` });
    parts.set(name, box);
    return [...children, box];
  };
  $("evolution").append(
    h("h1", {}, "Evolution"), ...part("error"), ...part("result"), ...part("status"),
    h("div", { class: "columns" },
      h("section", {}, part("canary", h("h2", {}, "Canary"))), h("section", {}, part("alerts", h("h2", {}, "Alerts")))),
    h("section", {}, part("versions", h("h2", {}, "Versions"))),
    reviews.element,
    h("section", {}, part("audit", h("h2", {}, "Audit log"))));
  document.addEventListener("visibilitychange", () => schedule(0));
}

export function show(isVisible) {
  visible = isVisible;
  schedule(0);
}

export function refresh() {
  delay = POLL_MS;
  schedule(0);
}

function schedule(ms) {
  clearTimeout(timer);
  if (visible && document.visibilityState === "visible") timer = setTimeout(poll, ms);
}

async function poll() {
  if (polling) return;
  polling = true;
  try {
    render(await request("/v1/evolution"));
    await reviews.refresh();
    parts.get("error").replaceChildren();
    delay = POLL_MS;
  } catch (error) {
    const [message, advice] = explain(error);
    parts.get("error").replaceChildren(h("div", { class: "card error" }, h("p", {}, h("b", {}, message)), h("p", {}, advice)));
    delay = Math.min(MAX_POLL_MS, Math.max(2 * delay, 1000 * ((error instanceof Failure && error.retryAfter) || 0)));
    if (error instanceof Failure && error.status === 401) {
      requestKey();
      return; // a new key restarts the polling
    }
  } finally {
    polling = false;
  }
  schedule(delay);
}

/** Rebuild a part if its data has changed, and restore the focus. */
function update(name, data, build) {
  const text = JSON.stringify(data);
  if (rendered.get(name) === text) return;
  rendered.set(name, text);
  const box = parts.get(name);
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  box.replaceChildren(...[build()].flat(9).filter(Boolean));
  if (focused) box.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

function render(reply) {
  const status = reply.status ?? {};
  const served = status.served ?? reply.policy_version;
  const list = (name) => (Array.isArray(reply[name]) ? reply[name] : []);
  const minute = Math.floor(Date.now() / 60000); // ages are shown in minutes
  update("status", [reply.enabled, reply.read_only, reply.updates, reply.queue, status, reply.memory, served], () => statusCard(reply, status, served));
  const versions = list("versions");
  update("versions", [versions, served, reply.read_only, minute], () => versionTable(versions, served, reply.read_only === true));
  const canary = list("canary");
  const width = parts.get("canary").clientWidth;
  update("canary", [canary, minute, width], () => canaryChart(canary, width));
  const alerts = list("alerts");
  update("alerts", [alerts, minute], () => alertList(alerts));
  const audit = list("audit");
  update("audit", [audit, minute], () => auditTable(audit));
}

function statusCard(reply, status, served) {
  const paused = status.paused === true;
  const enabled = reply.enabled === true;
  const [state, kind] = reply.read_only ? ["read-only: nothing is learnt or stored", ""] : !enabled ? ["learning is off", ""] : paused ? ["paused", "wrong"]
    : status.learning === false || status.learning === 0 ? [status.learner_failure ? `no learner is running: ${status.learner_failure}` : "no learner is running", "wrong"] : ["learning", "right"];
  const candidate = status.candidate;
  const experiences = reply.memory?.["memory/size"] ?? reply.memory?.size;
  const waiting = reply.queue ?? status.queue;
  const actions = enabled && !reply.read_only ? h("div", { class: "row" },
    h("button", { type: "button", "data-focus": "pause", onclick: () => sendOrder(paused ? "resume" : "pause", {}) }, paused ? "Resume learning" : "Pause learning"),
    h("button", { type: "button", class: "danger", "data-focus": "back", onclick: async () => {
      if (await confirm(`Roll back to the version before v${served}? It serves the next request.`, "Roll back")) sendOrder("rollback", {});
    } }, "Roll back")) : null;
  return h("article", { class: "card status" },
    h("p", { class: "state" }, h("span", { class: `pill ${kind}` }, state), isNumber(served) ? [" Version ", h("b", {}, `v${served}`), " is served."] : " No version has been served yet."),
    facts(
      ["Updates", number(reply.updates ?? status.updates)],
      ["Waiting updates", isNumber(waiting) ? number(waiting) : null],
      ["Candidate", isNumber(candidate) ? `v${candidate}` : null],
      ["KL to the initial policy", isNumber(status.mean_kl) ? number(status.mean_kl) : null],
      ["KL weight β", isNumber(status.beta) ? number(status.beta) : null],
      ["Experiences", isNumber(experiences) ? number(experiences) : null],
      ["Waiting for review", isNumber(status.review?.waiting) ? number(status.review.waiting) : null],
      ["Memory", reply.memory?.["memory/shards_away"] ? `${reply.memory["memory/shards_away"]} of ${reply.memory["memory/shards"]} shards do not answer` : null],
    ),
    actions, counters({ ...(reply.counts ?? {}), ...(status.counts ?? {}) }));
}

function counters(counts) {
  const entries = Object.entries(counts).filter(([, value]) => isNumber(value));
  return entries.length ? h("details", {}, h("summary", {}, "All counters"), facts(...entries.map(([name, value]) => [asWords(name), number(value)]))) : null;
}

/** Send an order and show its result until the next one. */
async function sendOrder(action, body) {
  const showResult = (message, details, failed) => parts.get("result").replaceChildren(h("div", { class: failed ? "card error" : "card", role: failed ? "alert" : "status" }, h("p", {}, h("b", {}, message)), details ? h("p", {}, details) : null));
  showResult(action === "promote" ? "The canary is running…" : "Sending…");
  try {
    const { result } = await request(`/v1/evolution/${action}`, { method: "POST", body });
    if (result?.promoted === false) {
      showResult(`Version ${body.version} was not promoted.`, `The canary refused it: ${asWords(result.reason ?? "")} (accuracy ${percent(result.accuracy)}, reference ${percent(result.reference_accuracy)}).`, true);
    } else {
      const messages = { pause: "Learning is paused.", resume: "Learning has resumed.", promote: `Version ${body.version} is now served.`, rollback: isNumber(result?.version) ? `Version ${result.version} is served again.` : "Rolled back." };
      showResult(messages[action]);
    }
  } catch (error) {
    showResult(...explain(error), true);
  }
  refresh();
}

function versionTable(versions, served, readOnly) {
  if (!versions.length) return h("p", { class: "missing" }, "No version has been published yet.");
  const newest = versions.slice().sort((a, b) => b.version - a.version).slice(0, MAX_VERSIONS);
  const rows = newest.map((v) => {
    const isServed = v.version === served;
    const promote = !readOnly && !isServed && v.status !== "rolled_back" ? h("button", { type: "button", "data-focus": `promote-${v.version}`, onclick: async () => {
      if (await confirm(`Serve version ${v.version}? It must pass the canary first.`, `Promote v${v.version}`)) sendOrder("promote", { version: v.version });
    } }, "Promote") : null;
    const back = !readOnly && v.version < served && v.status === "promoted" ? h("button", { type: "button", class: "danger", "data-focus": `back-${v.version}`, onclick: async () => {
      if (await confirm(`Roll back to version ${v.version}? It serves the next request.`, `Roll back to v${v.version}`)) sendOrder("rollback", { version: v.version });
    } }, "Roll back to this") : null;
    const metrics = Object.entries(v.metrics ?? {}).filter(([, value]) => isNumber(value)).slice(0, 6);
    return h("tr", { class: isServed ? "served" : "" },
      h("th", { scope: "row" }, `v${v.version}`, isNumber(v.parent) ? h("small", {}, ` from v${v.parent}`) : null),
      h("td", { "data-label": "State" }, isServed ? h("span", { class: "pill right" }, "served") : h("span", { class: v.status === "rolled_back" ? "wrong" : "" }, asWords(v.status ?? ""))),
      h("td", { "data-label": "Metrics" }, metrics.length ? metrics.map(([name, value], i) => [i ? ", " : "", asWords(name), " ", h("b", {}, /accuracy|share|rate$/.test(name) ? percent(value) : number(value))]) : "–"),
      h("td", { "data-label": "When" }, timeAgo(v.created_at)),
      h("td", { class: "actions" }, back ?? promote));
  });
  return [h("div", { class: "wide" }, h("table", { class: "versions" }, h("thead", {}, h("tr", {}, ["Version", "State", "Metrics", "When", ""].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))),
    versions.length > MAX_VERSIONS ? h("p", {}, h("small", {}, `The newest ${MAX_VERSIONS} of ${plural(versions.length, "version")}.`)) : null];
}

function alertList(alerts) {
  if (!alerts.length) return h("p", { class: "missing" }, "No alerts.");
  const newest = alerts.slice().sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, MAX_LINES);
  return h("ul", { class: "alerts" }, newest.map((a) => h("li", { class: clean(a.severity ?? "", 12) === "critical" ? "critical" : "" },
    h("b", {}, asWords(a.severity ?? "")), " ", a.message && !a.metric ? foreignText(a.message, 300)
      : [foreignText(asWords(a.metric ?? ""), 80), ` is ${number(a.value)}`, isNumber(a.limit) ? `, ${a.side === "over" ? "above" : "at or below"} ${number(a.limit)}` : ""],
    " ", h("small", {}, timeAgo(a.time)))));
}

function auditTable(events) {
  if (!events.length) return h("p", { class: "missing" }, "The audit log is empty.");
  const newest = events.slice().sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, MAX_LINES);
  return h("div", { class: "wide" }, h("table", {},
    h("thead", {}, h("tr", {}, ["When", "Who", "What", "Result", "Details"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, newest.map((e) => h("tr", {},
      h("td", { "data-label": "When" }, timeAgo(e.time)), h("td", { "data-label": "Who" }, foreignText(e.actor ?? "", 80)),
      h("td", { "data-label": "What" }, foreignText([e.event, e.action].filter((word, i, all) => word && all.indexOf(word) === i).map(asWords).join(": "), 120)),
      h("td", { "data-label": "Result", class: e.result === "success" ? "" : "wrong" }, foreignText(asWords(e.result ?? ""), 80)),
      h("td", { "data-label": "Details" }, Object.keys(e.details ?? {}).length ? h("small", {}, foreignText(e.details, 240)) : ""))))));
}
