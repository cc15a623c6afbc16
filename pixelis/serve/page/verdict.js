// The card of a verdict: the answer, its votes, its provenance, and feedback.

import { explain, request } from "./api.js";
import { facts, h, isNumber, number, percent, plural, foreignText, asWords, svg } from "./dom.js";

const REASONS = {
  tie: "several answers had the most votes; this is the first of them",
  insufficient_votes: "too few samples reached an answer for a reliable vote",
  abstained: "no answer had enough votes",
  cold_start: "the memory is still too small for a vote: one sample answers",
  overruled: "similar stored questions outvoted the samples; nothing is learnt from this",
  rewarded: "a client's reward decides, not a vote",
};
const STOPS = { length: "a turn was too long", over_turn: "no turns were left", over_context: "the context was full", over_images: "there were too many pictures",
  done: "the environment ended it", call: "it called a tool of its client", no_action: "the policy neither answered nor called an operation", deadline: "time ran out", error: "the system failed" };

/** Text as votes compare it, see rewards.scorers.canonical. */
const canonical = (text) => text.normalize("NFC").trim().replace(/\s+/gu, " ").toLowerCase();

const total = (row) => row.sampleWeight + row.neighbourWeight;

/** The votes by answer, in order of weight: numbers of samples and neighbours, and their weights. */
export function tally(votes) {
  const rows = new Map();
  for (const vote of Array.isArray(votes) ? votes : []) {
    const name = typeof vote.answer === "string" && canonical(vote.answer) ? canonical(vote.answer) : null;
    if (!rows.has(name)) rows.set(name, { answer: name === null ? null : vote.answer, samples: 0, neighbours: 0, sampleWeight: 0, neighbourWeight: 0 });
    const row = rows.get(name);
    const weight = isNumber(vote.weight) ? Math.max(0, vote.weight) : 0;
    if (vote.source === "neighbour") {
      row.neighbours += 1;
      row.neighbourWeight += weight;
    } else {
      row.samples += 1;
      row.sampleWeight += weight;
    }
  }
  return [...rows.values()].sort((a, b) => (a.answer === null) - (b.answer === null) || total(b) - total(a));
}

/** The votes as bars. The winner's bar is coloured, the share of neighbours hatched. */
export function bars(verdict) {
  const rows = tally(verdict.votes);
  if (!rows.length) return null;
  const max = Math.max(...rows.map(total), 1e-9);
  const winner = typeof verdict.answer === "string" ? canonical(verdict.answer) : null;
  return h("ul", { class: "votes" }, rows.slice(0, 20).map((row) => {
    const filled = h("span", { class: "filled" });
    const hatched = h("span", { class: "hatched" });
    filled.style.width = `${(100 * row.sampleWeight) / max}%`;
    hatched.style.width = `${(100 * row.neighbourWeight) / max}%`;
    const voters = [row.samples && plural(row.samples, "sample"), row.neighbours && plural(row.neighbours, "neighbour")].filter(Boolean).join(", ");
    return h("li", { class: row.answer !== null && canonical(row.answer) === winner ? "won" : row.answer === null ? "none" : "" },
      h("span", { class: "voted" }, row.answer === null ? "no answer" : foreignText(row.answer, 200)),
      h("span", { class: "bar", "aria-hidden": "true" }, filled, hatched),
      h("small", {}, `${voters} · weight ${number(total(row))}`));
  }));
}

/** The card of a reply of /v1/agent. */
export function verdictCard(reply, seconds, readOnly) {
  const verdict = reply.verdict ?? {};
  const answered = typeof reply.answer === "string";
  const stop = reply.trajectory?.stop_reason;
  const confidence = isNumber(reply.confidence) ? reply.confidence : 0;
  const meter = h("span", { class: "bar meter", "aria-hidden": "true" }, h("span", { class: "filled" }));
  meter.firstChild.style.width = `${100 * Math.min(1, Math.max(0, confidence))}%`;
  const strategies = Object.entries(verdict.strategies ?? {});
  return h("article", { class: "card verdict" },
    answered ? h("p", { class: "final" }, foreignText(reply.answer)) : h("p", { class: "final none" }, "No answer"),
    !answered && h("p", {}, STOPS[stop] ? `No answer had enough votes. The sample shown stopped because ${STOPS[stop]}.` : "No answer had enough votes."),
    h("p", { class: "confidence" }, "Confidence ", h("b", {}, percent(confidence)), meter),
    h("p", {}, h("small", {}, "How far the votes agree.")),
    verdict.reason && verdict.reason !== "no_answer" ? h("p", { class: "reason" }, `Note: ${REASONS[verdict.reason] ?? asWords(verdict.reason)}.`) : null,
    h("h3", {}, "Votes"), bars(verdict) ?? h("p", { class: "missing" }, "No sample voted."),
    verdict.votes?.some((vote) => vote.source === "neighbour") && h("p", {}, h("small", {}, h("i", { class: "key hatched" }), " hatched: similar stored questions")),
    h("h3", {}, "Provenance"),
    facts(
      ["Strategy", verdict.strategy && asWords(verdict.strategy)],
      ["Other strategies", strategies.length ? strategies.map(([name, answer], i) => [i ? ", " : "", asWords(name), ": ", answer === null ? "none" : foreignText(answer, 60)]) : null],
      ["First sample", typeof verdict.self_answer === "string" ? foreignText(verdict.self_answer, 80) : null],
      ["Neighbours found", isNumber(verdict.neighbours) ? `${verdict.neighbours}${verdict.partial ? " (part of the memory did not answer)" : ""}` : null],
      ["Policy version", isNumber(reply.policy_version) ? `v${reply.policy_version}` : null],
      ["Time", `${number(Number((isNumber(reply.seconds) ? reply.seconds : seconds).toPrecision(2)))} s${reply.cached ? " (cached)" : ""}`],
      ["Model", reply.model && foreignText(reply.model, 60)],
    ),
    feedback(reply, readOnly));
}

const thumb = (direction) => svg("svg", { class: `thumb ${direction}`, viewBox: "0 0 20 20", "aria-hidden": "true" },
  svg("path", { d: "M2.5 9h3.5v8H2.5zM6 9l3.5-6.5c1.6 0 2.3 1.2 2 2.6L11 8h4.6c1.3 0 2.1 1.1 1.8 2.3l-1.2 5c-.2 1-1 1.7-2 1.7H6" }));

function feedback(reply, readOnly) {
  const id = reply.experience_id;
  if (readOnly) return h("p", {}, h("small", {}, "This service is read-only: it accepts no feedback."));
  if (!id) return h("p", {}, h("small", {}, "This answer is not stored, so it cannot get feedback."));
  const answered = typeof reply.answer === "string";
  const note = h("p", { role: "status", class: "feedback-note" });
  const box = h("div", { class: "feedback" });
  const buttons = [];
  const send = async (body) => {
    for (const button of buttons) button.disabled = true;
    note.textContent = "Sending…";
    try {
      await request("/v1/feedback", { method: "POST", body: { experience_id: id, ...body } });
      box.replaceChildren(h("p", { role: "status", class: "feedback-note" }, body.correct ? "Thank you. Marked as correct." : answered ? "Thank you. Marked as wrong." : "Thank you. Saved."));
    } catch (error) {
      note.textContent = explain(error).join(" ");
      for (const button of buttons) button.disabled = false;
    }
  };
  const answer = h("input", { type: "text", name: "answer", maxlength: "1000", autocomplete: "off" });
  const comment = h("input", { type: "text", name: "comment", maxlength: "4000", autocomplete: "off" });
  const form = h("form", { hidden: true, onsubmit: (event) => {
    event.preventDefault();
    const body = { correct: false };
    if (answer.value.trim()) body.answer = answer.value.trim();
    if (comment.value.trim()) body.comment = comment.value.trim();
    send(body);
  } }, h("label", {}, "Correct answer: ", answer), h("label", {}, "Comment: ", comment), h("button", { type: "submit" }, "Send"));
  const correct = h("button", { type: "button", onclick: () => send({ correct: true }) }, thumb("up"), "Correct");
  const wrong = h("button", { type: "button", "aria-expanded": "false", onclick: () => {
    form.hidden = !form.hidden;
    wrong.setAttribute("aria-expanded", String(!form.hidden));
    if (!form.hidden) answer.focus();
  } }, thumb("down"), "Wrong");
  if (!answered) wrong.replaceChildren("Enter the answer");
  buttons.push(correct, wrong, form.lastChild);
  box.append(h("h3", {}, answered ? "Is this correct?" : "Do you know the answer?"), h("div", { class: "row" }, ...(answered ? [correct, wrong] : [wrong])), form, note);
  return box;
}
