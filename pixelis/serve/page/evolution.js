// The Evolution view: status, versions, canary, alerts, reviews and audit log. Polls every two seconds while it is visible.

import { Failure, explain, request } from "./api.js";
import { alertList } from "./alerts.js";
import { auditTable } from "./audit.js";
import { canaryChart } from "./chart.js";
import { $, asWords, confirm, facts, h, isNumber, number, percent } from "./dom.js";
import { Reviews } from "./reviews.js";
import { decisive, previousVersion, rollbackWarning, testResult, versionTable } from "./versions.js";

const POLL_MS = 2000;
const MAX_POLL_MS = 30000;

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
    h("h1", {}, "What the model has learnt"),
    h("p", { class: "lead" }, "The model answers a question several times. Where most of its answers agree, it learns from them, without anybody telling it the right one. Every few updates make a new version, which answers only if it passes a test."),
    ...part("error"), ...part("result"), ...part("status"),
    h("div", { class: "columns" },
      h("section", {}, part("canary", h("h2", {}, "What it improved"))), h("section", {}, part("alerts", h("h2", {}, "Alerts")))),
    h("section", {}, part("versions", h("h2", {}, "What each version learnt, and from whom"))),
    reviews.element,
    h("section", {}, part("audit", h("h2", {}, "Audit log"), h("p", { class: "lead" }, "Who changed what, and when. Each line is on disk before the change counts."))),
    h("section", {}, part("details")));
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
  const [versions, canary, learnt, alerts, audit] = ["versions", "canary", "learnt", "alerts", "audit"].map(list);
  update("status", [reply.enabled, reply.read_only, reply.updates, reply.queue, status, reply.memory, served, versions], () => statusCard(reply, status, served, versions));
  const order = (action, version) => confirmOrder(action, version, versions, served);
  update("versions", [versions, served, reply.read_only, canary, learnt, minute], () => versionTable({ versions, served, canary, learnt, readOnly: reply.read_only === true, order }));
  const width = parts.get("canary").clientWidth;
  update("canary", [canary, served, minute, width], () => [improvement(canary, served), canaryChart(canary, width)]);
  update("alerts", [alerts, minute], () => alertList(alerts));
  update("audit", [audit, minute], () => auditTable(audit));
  update("details", [reply.counts, status], () => details(reply, status));
}

/** When the weights lose what was deleted; null without a deletion to unlearn. */
function unlearning({ due_s: dueS, repeated, updates } = {}) {
  if (!isNumber(dueS) || dueS < 0) return null;
  if (updates) return `update ${number(repeated + 1)} of ${number(updates)} is repeated without them`;
  return dueS < 5400 ? `leave the model in ${Math.ceil(dueS / 60)} min` : `leave the model in ${Math.round(dueS / 3600)} h`;
}

/** Where the model stands: whether it learns, which version answers, and how to stop or undo its learning. */
function statusCard(reply, status, served, versions) {
  const paused = status.paused === true;
  const enabled = reply.enabled === true;
  const [state, kind] = reply.read_only ? ["read-only: nothing is learnt or stored", ""] : !enabled ? ["learning is off", ""] : paused ? ["paused", "wrong"]
    : status.learning === false || status.learning === 0 ? [status.learner_failure ? `no learner is running: ${status.learner_failure}` : "no learner is running", "wrong"] : ["learning", "right"];
  const candidate = status.candidate;
  const experiences = reply.memory?.["memory/size"] ?? reply.memory?.size;
  const waiting = reply.queue ?? status.queue;
  const previous = previousVersion(versions, served);
  const actions = enabled && !reply.read_only ? h("div", { class: "row" },
    h("button", { type: "button", "data-focus": "pause", onclick: () => sendOrder(paused ? "resume" : "pause", {}) }, paused ? "Resume learning" : "Pause learning"),
    previous === null ? h("small", {}, "There is no earlier version to go back to.")
      : h("button", { type: "button", class: "danger", "data-focus": "back", onclick: () => confirmOrder("rollback", previous, versions, served) }, `Go back to version ${previous}`)) : null;
  return h("article", { class: "card status" },
    h("p", { class: "state" }, h("span", { class: `pill ${kind}` }, state), isNumber(served) ? [" ", h("b", {}, `Version ${served}`), " answers now", served === 0 ? ", the policy as it was trained." : "."] : " No version has been served yet.",
      isNumber(candidate) ? ` Version ${candidate} is being tested.` : ""),
    facts(
      ["Stored answers", isNumber(experiences) ? number(experiences) : null],
      ["Waiting to be learnt from", isNumber(waiting) ? number(waiting) : null],
      ["Waiting for your review", isNumber(status.review?.waiting) ? number(status.review.waiting) : null],
      ["Deleted answers", unlearning(status.unlearning)],
      ["Updates made", number(reply.updates ?? status.updates)],
      ["Users lately", isNumber(status.shares?.users) && status.shares.users ? number(status.shares.users) : null],
      ["Most that one may decide", isNumber(status.shares?.user_cap) && status.shares.users ? percent(status.shares.user_cap) : null],
      ["Memory", reply.memory?.["memory/shards_away"] ? `${reply.memory["memory/shards_away"]} of ${reply.memory["memory/shards"]} shards do not answer` : null],
    ),
    actions);
}

/** What the served version gained, by its test before it was served. */
function improvement(canary, served) {
  const judged = decisive(canary, served);
  const about = h("p", {}, "Before a version answers anybody, it answers test questions whose answers are known, and must show that it is not clearly worse than the versions before it. ");
  if (!judged) return [about, served === 0 && canary.length ? h("p", {}, "No later version has passed the test so far.") : null];
  const first = canary.find((entry) => entry.against === 0 && isNumber(entry.reference_accuracy));
  const since = first && served > 0 && judged.against !== 0 ? h("p", {}, `Version 0, the policy as it was trained, answered ${percent(first.reference_accuracy)} of them.`) : null;
  return [about, h("p", { class: "gain" }, `Version ${served}: `, testResult(judged)), since];
}

/** Numbers for those who run the service. */
function details(reply, status) {
  return h("details", {}, h("summary", {}, "Numbers for operators"),
    facts(["KL to the initial policy", isNumber(status.mean_kl) ? number(status.mean_kl) : null], ["KL weight β", isNumber(status.beta) ? number(status.beta) : null]),
    counters({ ...(reply.counts ?? {}), ...(status.counts ?? {}) }));
}

async function confirmOrder(action, version, versions, served) {
  const [question, yes] = action === "rollback" ? [rollbackWarning(version, versions, served), `Go back to version ${version}`]
    : [[h("b", {}, `Serve version ${version}?`), h("p", {}, "It is tested first, and answers only if it is not worse than the versions before it.")], `Test and serve version ${version}`];
  if (await confirm(question, yes)) sendOrder(action, { version });
}

function counters(counts) {
  const entries = Object.entries(counts).filter(([, value]) => isNumber(value));
  return entries.length ? facts(...entries.map(([name, value]) => [asWords(name), number(value)])) : null;
}

/** Send an order and show its result until the next one. */
async function sendOrder(action, body) {
  const showResult = (message, details, failed) => parts.get("result").replaceChildren(h("div", { class: failed ? "card error" : "card", role: failed ? "alert" : "status" }, h("p", {}, h("b", {}, message)), details ? h("p", {}, details) : null));
  showResult(action === "promote" ? `Version ${body.version} is being tested…` : "Sending…");
  try {
    const { result } = await request(`/v1/evolution/${action}`, { method: "POST", body });
    if (result?.promoted === false) {
      showResult(`Version ${body.version} does not answer: its test failed.`, testResult(result), true);
    } else {
      const messages = { pause: "Learning is paused.", resume: "Learning has resumed.", promote: `Version ${body.version} answers now.`, rollback: `Version ${result?.version ?? body.version} answers again.` };
      showResult(messages[action]);
    }
  } catch (error) {
    showResult(...explain(error), true);
  }
  refresh();
}
