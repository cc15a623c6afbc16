// Alerts in plain words.

import { clean, h, isNumber, number, percent, plural, foreignText, asWords, timeAgo } from "./dom.js";

const MAX_LINES = 30;

/** What an alert means, and what to do, by its metric. */
const WORDS = {
  update_rate: () => "Answers wait to be learnt from, but no update was made in the last minute. Look at the log of the learner.",
  faiss_failure_rate: (value) => `A part of the memory did not answer ${percent(value)} of the searches. Replies are complete without it, but fewer neighbours vote.`,
  memory_refuses: () => "The memory stores nothing: its disk is full or refuses to be written. Make room on it.",
  memory_damaged: (value) => `${plural(value, "stored answer was", "stored answers were")} found damaged on the disk. Restore them from an export.`,
  mean_kl: (value) => `The model has moved far from its starting point (KL ${number(value)} nats a token). Check its latest answers, or go back to an earlier version.`,
  update_kl: (value) => `An update would have moved the model by ${number(value)} nats a token. Above twice evolution.guard.target it is undone. Lower evolution.lr.`,
  gated_votes: (value) => `None of the last ${plural(value, "vote")} was clear enough to learn from. Train the model on demonstrations first, take more samples (serve.samples), or lower evolution.gate.`,
  queue_size: (value) => `${plural(value, "answer waits", "answers wait")} to be learnt from: more than the learner can take.`,
  queue_fill: (value) => `The queue of answers to learn from is ${percent(value)} full: the oldest are dropped when it is full.`,
  memory_usage: (value) => `${percent(value)} of the machine's memory is in use.`,
  p99_latency: (value) => `One reply in a hundred takes longer than ${number(value)} s.`,
  rollback: () => "The service went back to an earlier version. The audit log says why.",
  unusable_tasks: (value) => `Nothing could be learnt from the last ${plural(value, "answer")}.`,
  unclear_tasks: () => "Nothing is learnt at the moment: callers show what the model is rarely sure of, and where it is rarely sure, its votes are often wrong.",
  learner_failed: () => "The learner has failed. The service still answers, and learns nothing until the learner runs again.",
};
const SEVERITIES = { critical: "Act now", warning: "Have a look", info: "For information" };

export function alertList(alerts) {
  if (!alerts.length) return h("p", { class: "missing" }, "No alerts: nothing needs your attention.");
  const newest = alerts.slice().sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, MAX_LINES);
  return h("ul", { class: "alerts" }, newest.map((a) => h("li", { class: clean(a.severity ?? "", 12) === "critical" ? "critical" : "" },
    h("b", {}, SEVERITIES[a.severity] ?? asWords(a.severity ?? "")), " · ", timeAgo(a.time), h("p", {}, sentence(a)))));
}

function sentence(alert) {
  if (Object.hasOwn(WORDS, alert.metric ?? "") && isNumber(alert.value)) return WORDS[alert.metric](alert.value);
  if (alert.message && !alert.metric) return foreignText(alert.message, 300);
  return [foreignText(asWords(alert.metric ?? ""), 80), ` is ${number(alert.value)}`, isNumber(alert.limit) ? `, ${alert.side === "over" ? "above" : "at or below"} ${number(alert.limit)}` : ""];
}
