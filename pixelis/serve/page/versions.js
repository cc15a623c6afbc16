// The versions of the policy: what each learnt and from whom, what its test showed, and orders to serve another one.

import { h, isNumber, number, percent, plural, asWords, foreignText, timeAgo } from "./dom.js";

const MAX_VERSIONS = 50;
const INTERVAL = 1.96;
const REASONS = {
  inconclusive: "its test has not ruled out that it is worse; it learns on",
  blind: "the version before answers too few test questions for a fall to show; it learns on",
  too_few_questions: "too few test questions could be scored",
  fell: "it answers fewer test questions correctly",
  fell_significantly: "it answers clearly fewer test questions correctly",
  does_not_look: "its answers no longer depend on what it looks at",
  traffic_fell_significantly: "it agrees clearly less with what users were answered",
};
const TESTS = ["promote", "refuse", "wait"];

/** `+3.1 points (95 % interval −0.4 to +6.6)` of a paired difference of accuracies. */
export function difference(judged) {
  if (!isNumber(judged.mean) || !isNumber(judged.se)) return "";
  if (judged.mean === 0 && judged.se === 0) return "No question changed.";
  const points = (value) => `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)}`;
  const [low, high] = [judged.mean - INTERVAL * judged.se, judged.mean + INTERVAL * judged.se];
  return `${points(judged.mean)} points (95 % interval ${points(low)} to ${points(high)})${low < 0 && high > 0 ? ", too little to tell from chance" : ""}.`;
}

/** What a test showed, in words. */
export function testResult(judged) {
  const against = isNumber(judged.against) ? `version ${judged.against}` : "the version before";
  return [h("b", {}, percent(judged.accuracy)), ` of ${isNumber(judged.questions) ? number(judged.questions) : "the"} test questions right; ${against}: ${percent(judged.reference_accuracy)}. `, difference(judged), onTraffic(judged.traffic)];
}

/** How often a version gave the answers that votes elected for requests held out from learning; nothing if it was not asked. */
function onTraffic(traffic) {
  if (!traffic || !isNumber(traffic.questions) || !traffic.questions) return "";
  return ` Of ${plural(traffic.questions, "request")} that it did not learn from, ${percent(traffic.accuracy)} answered as voted; before: ${percent(traffic.reference_accuracy)}. ${difference(traffic)}`;
}

/** The version to which a rollback returns: the last one that was served before `served`; null for none. */
export function previousVersion(versions, served) {
  const earlier = versions.filter((v) => v.status === "promoted" && v.version < served).map((v) => v.version);
  return earlier.length ? Math.max(...earlier) : null;
}

/** What a rollback to `target` will do, for the dialog that asks. */
export function rollbackWarning(target, versions, served) {
  const later = versions.filter((v) => v.version > target && v.version <= served && v.status === "promoted").map((v) => v.version);
  const withdrawn = later.length > 1 ? `Versions ${later.slice(0, -1).join(", ")} and ${later.at(-1)} are withdrawn: what they learnt is no longer used, and their`
    : `Version ${later[0] ?? served} is withdrawn: what it learnt is no longer used, and its`;
  return [h("b", {}, `Go back to version ${target}?`), h("ul", {},
    h("li", {}, `Version ${target} answers from the next request on.`),
    h("li", {}, `${withdrawn} answers no longer vote.`),
    h("li", {}, `The model goes on learning from version ${target}.`),
    h("li", {}, "Stored questions and answers stay. The audit log records who went back."))];
}

/** The judgement that decided about a version, its last one if there were several. */
export const decisive = (canary, version) => canary.filter((entry) => entry.version === version && TESTS.includes(entry.decision)).at(-1);

/** The table of versions. `learnt` has the tasks and users of each; `order(action, version)` sends an order after a confirmation. */
export function versionTable({ versions, served, canary, learnt, readOnly, order }) {
  if (!versions.length) return h("p", { class: "missing" }, "No version has been published yet.");
  const newest = versions.slice().sort((a, b) => b.version - a.version).slice(0, MAX_VERSIONS);
  const rows = newest.map((v) => {
    const judged = decisive(canary, v.version);
    const source = learnt.find((entry) => entry.version === v.version);
    const [state, kind] = stateOf(v, served, judged);
    const button = (action, words, danger) => h("button", { type: "button", class: danger ? "danger" : "", "data-focus": `${action}-${v.version}`, onclick: () => order(action, v.version) }, words);
    const first = v.version > 0 && v.step === 0 && !source; // the learner publishes the weights from which it begins
    const back = v.version < served && v.status === "promoted";
    return h("tr", { class: v.version === served ? "served" : "" },
      h("th", { scope: "row" }, `Version ${v.version}`),
      h("td", { "data-label": "State" }, h("span", { class: `pill ${kind}` }, state), ["refuse", "wait"].includes(judged?.decision) && h("p", {}, h("small", {}, REASONS[judged.reason] ?? asWords(judged.reason ?? "")))),
      h("td", { "data-label": "Learnt from" }, v.version === 0 ? "nothing yet: the policy as it was trained" : first ? "nothing yet: where learning began" : source ? learntFrom(source) : "–"),
      h("td", { "data-label": "Test" }, judged ? testResult(judged) : v.version === 0 ? "the others are measured against it" : first ? "none: it answers as the version before" : "–"),
      h("td", { "data-label": "When" }, timeAgo(v.created_at)),
      h("td", { class: "actions" }, readOnly || v.version === served ? null : back ? button("rollback", "Go back to this", true) : !["rolled_back", "unlearnt"].includes(v.status) ? button("promote", "Serve this") : null));
  });
  const names = ["Version", "State", "Learnt from", "Test", "When"];
  return [h("div", { class: "wide" }, h("table", { class: "versions" },
    h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)), h("td", {}))), h("tbody", {}, rows))),
  versions.length > MAX_VERSIONS ? h("p", {}, h("small", {}, `The newest ${MAX_VERSIONS} of ${plural(versions.length, "version")}.`)) : null];
}

/** `16 answers by 5 users; the most from one user: 25 %`. */
function learntFrom(source) {
  const share = `${percent(source.user_share)}`;
  const who = source.users > 1 ? [` by ${plural(source.users, "user")}; the most from one user: ${share}`, source.user ? [" (", foreignText(source.user, 20), ")"] : " (callers that gave no name)"]
    : source.user ? [" by one user, ", foreignText(source.user, 20)] : " by callers that gave no name";
  return [h("b", {}, plural(source.tasks, "answer")), who];
}

function stateOf(v, served, judged) {
  if (v.version === served) return ["answers now", "right"];
  if (v.status === "rolled_back") return judged?.decision === "refuse" ? ["refused", "wrong"] : ["withdrawn", "wrong"];
  if (v.status === "unlearnt") return ["removed: it had learnt deleted answers", ""];
  return v.status === "promoted" ? ["answered before", ""] : [v.status === "candidate" ? "not served" : asWords(v.status ?? ""), ""];
}
