// The audit log in plain words, with each line's details.

import { h, isNumber, number, percent, plural, foreignText, asWords, timeAgo } from "./dom.js";

const MAX_LINES = 30;
const RESULTS = { success: "done", failure: "failed", refused: "refused", skipped: "skipped" };

const isUndecided = (event) => event.result === "skipped" && ["canary", "promotion"].includes(event.event);

/** What happened, by event and action; null where the event's own name has to do. */
function sentence(event) {
  const d = event.details ?? {};
  const version = `version ${number(d.version)}`;
  switch (event.event) {
    case "start":
      return event.action === "begin" ? "Learning began" : `The service started with ${version}`;
    case "stop":
      return "Learning stopped";
    case "update":
      return `Learnt from ${plural(d.experiences?.length ?? 0, "answer")}`;
    case "candidate":
      return `Made ${version}`;
    case "canary":
      if (!isNumber(d.accuracy)) return `Tested ${version}`;
      if (event.action === "judge_traffic") return `Asked ${version} questions of users: ${percent(d.accuracy)} as they were answered`;
      return `Tested ${version}${event.action === "watch" ? " again" : ""}: ${percent(d.accuracy)} right`;
    case "promotion":
      return event.result === "success" ? `Let ${version} answer` : `Did not let ${version} answer${event.action === "wait" ? " yet" : ""}`;
    case "rollback":
      return `Went back from version ${number(d.before)} to ${version}`;
    case "review":
      return event.action === "approved" ? "Approved an update" : "Rejected an update";
    case "feedback":
      return d.correct === false ? "Called an answer wrong" : d.correct ? "Called an answer correct" : "Commented on an answer";
    case "deletion":
      return `Deleted ${plural(d.count ?? 0, "stored answer")}`;
    case "unlearning":
      return `Repeated ${plural(d.repeated ?? 0, "update")} without deleted answers`;
    case "pause":
      return event.action === "resume" ? "Resumed learning" : "Paused learning";
    default:
      return null;
  }
}

export function auditTable(events) {
  if (!events.length) return h("p", { class: "missing" }, "The audit log is empty.");
  const newest = events.slice().sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, MAX_LINES);
  return h("div", { class: "wide" }, h("table", { class: "audit" },
    h("thead", {}, h("tr", {}, ["When", "Who", "What", "Result", "Details"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, newest.map((e) => h("tr", {},
      h("td", { "data-label": "When" }, timeAgo(e.time)), h("td", { "data-label": "Who" }, foreignText(e.actor ?? "", 80)),
      h("td", { "data-label": "What" }, sentence(e) ?? foreignText([e.event, e.action].filter((word, i, all) => word && all.indexOf(word) === i).map(asWords).join(": "), 120)),
      h("td", { "data-label": "Result", class: ["failure", "refused"].includes(e.result) ? "wrong" : "" }, isUndecided(e) ? "not decided" : RESULTS[e.result] ?? foreignText(asWords(e.result ?? ""), 80)),
      h("td", {}, Object.keys(e.details ?? {}).length ? h("details", {}, h("summary", {}, "Details"), h("small", {}, foreignText(e.details, 600))) : ""))))));
}
