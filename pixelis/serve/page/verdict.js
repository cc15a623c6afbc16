// The answer, how it was voted, where it comes from, and what the reader thinks of it.

import { explain, request } from "./api.js";
import { facts, h, isNumber, number, percent, plural, said, spaced, svg } from "./dom.js";

const REASONS = {
  tie: "several answers had the most votes; the first of them is given",
  insufficient_votes: "too few samples reached an answer for a vote to mean much",
  abstained: "no answer had enough of the votes",
  cold_start: "the memory is still too small for votes: one sample answers",
  overruled: "remembered neighbours decided against the samples; nothing is learnt from this",
};
const STOPS = { length: "a turn grew too long", over_turn: "no turns were left", over_context: "no room was left", over_images: "too many pictures",
  no_action: "the policy neither answered nor called an operation", deadline: "the time was up", error: "a failure of the system" };

/** Text as votes compare it (rewards.scorers.canonical). */
const canonical = (text) => text.normalize("NFC").trim().replace(/\s+/gu, " ").toLowerCase();

/** The votes by answer, most weight first: { answer, samples, neighbours, own, lent } with `own` and `lent` their weights. */
export function tally(votes) {
  const rows = new Map();
  for (const vote of Array.isArray(votes) ? votes : []) {
    const name = typeof vote.answer === "string" && canonical(vote.answer) ? canonical(vote.answer) : null;
    if (!rows.has(name)) rows.set(name, { answer: name === null ? null : vote.answer, samples: 0, neighbours: 0, own: 0, lent: 0 });
    const row = rows.get(name);
    const weight = isNumber(vote.weight) ? Math.max(0, vote.weight) : 0;
    if (vote.source === "neighbour") {
      row.neighbours += 1;
      row.lent += weight;
    } else {
      row.samples += 1;
      row.own += weight;
    }
  }
  return [...rows.values()].sort((a, b) => (a.answer === null) - (b.answer === null) || b.own + b.lent - a.own - a.lent);
}

/** The votes as bars; the winner's is filled, neighbours' share is hatched. */
export function bars(verdict) {
  const rows = tally(verdict.votes);
  if (!rows.length) return null;
  const most = Math.max(...rows.map((row) => row.own + row.lent), 1e-9);
  const won = typeof verdict.answer === "string" ? canonical(verdict.answer) : null;
  return h("ul", { class: "votes" }, rows.slice(0, 20).map((row) => {
    const own = h("span", { class: "own" });
    const lent = h("span", { class: "lent" });
    own.style.width = `${(100 * row.own) / most}%`;
    lent.style.width = `${(100 * row.lent) / most}%`;
    const who = [row.samples && plural(row.samples, "sample"), row.neighbours && plural(row.neighbours, "neighbour")].filter(Boolean).join(", ");
    return h("li", { class: row.answer !== null && canonical(row.answer) === won ? "won" : row.answer === null ? "none" : "" },
      h("span", { class: "voted" }, row.answer === null ? "no answer" : said(row.answer, 200)),
      h("span", { class: "bar", "aria-hidden": "true" }, own, lent),
      h("small", {}, `${who} · weight ${number(row.own + row.lent)}`));
  }));
}

/** The card of a reply of /v1/agent. */
export function verdictCard(reply, seconds, readOnly) {
  const verdict = reply.verdict ?? {};
  const answered = typeof reply.answer === "string";
  const stop = reply.trajectory?.stop_reason;
  const sure = isNumber(reply.confidence) ? reply.confidence : 0;
  const meter = h("span", { class: "bar sure", "aria-hidden": "true" }, h("span", { class: "own" }));
  meter.firstChild.style.width = `${100 * Math.min(1, Math.max(0, sure))}%`;
  const strategies = Object.entries(verdict.strategies ?? {});
  return h("article", { class: "card verdict" },
    answered ? h("p", { class: "final" }, said(reply.answer)) : h("p", { class: "final none" }, "No answer"),
    !answered && h("p", {}, STOPS[stop] ? `No answer had enough votes; the sample shown stopped: ${STOPS[stop]}.` : "No answer had enough votes."),
    h("p", { class: "confidence" }, "Confidence ", h("b", {}, percent(sure)), meter),
    verdict.reason && verdict.reason !== "no_answer" ? h("p", { class: "why" }, `Note: ${REASONS[verdict.reason] ?? spaced(verdict.reason)}.`) : null,
    h("h3", {}, "Votes"), bars(verdict) ?? h("p", { class: "missing" }, "There were none."),
    verdict.votes?.some((vote) => vote.source === "neighbour") && h("p", {}, h("small", {}, h("i", { class: "key lent" }), " hatched: remembered questions that are much like this one")),
    h("h3", {}, "Where it comes from"),
    facts(
      ["Vote", verdict.strategy && spaced(verdict.strategy)],
      ["Its parts", strategies.length ? strategies.map(([name, answer], i) => [i ? ", " : "", spaced(name), ": ", answer === null ? "none" : said(answer, 60)]) : null],
      ["First sample said", typeof verdict.self_answer === "string" ? said(verdict.self_answer, 80) : null],
      ["Neighbours found", isNumber(verdict.neighbours) ? `${verdict.neighbours}${verdict.partial ? " (some of the memory did not answer)" : ""}` : null],
      ["Policy version", isNumber(reply.policy_version) ? `v${reply.policy_version}` : null],
      ["Time", `${number(isNumber(reply.seconds) ? reply.seconds : seconds)} s${reply.cached ? " (a kept reply)" : ""}`],
      ["Model", reply.model && said(reply.model, 60)],
    ),
    feedback(reply, readOnly));
}

const thumb = (way) => svg("svg", { class: `thumb ${way}`, viewBox: "0 0 20 20", "aria-hidden": "true" },
  svg("path", { d: "M2.5 9h3.5v8H2.5zM6 9l3.5-6.5c1.6 0 2.3 1.2 2 2.6L11 8h4.6c1.3 0 2.1 1.1 1.8 2.3l-1.2 5c-.2 1-1 1.7-2 1.7H6" }));

function feedback(reply, readOnly) {
  const id = reply.experience_id;
  if (readOnly) return h("p", {}, h("small", {}, "This service is read-only: it takes no feedback."));
  if (!id) return h("p", {}, h("small", {}, "Nothing of this is remembered, so there is nothing to give feedback on."));
  const answered = typeof reply.answer === "string";
  const note = h("p", { role: "status", class: "feedback-note" });
  const box = h("div", { class: "feedback" });
  const buttons = [];
  const send = async (told) => {
    for (const button of buttons) button.disabled = true;
    note.textContent = "Sending…";
    try {
      await request("/v1/feedback", { method: "POST", body: { experience_id: id, ...told } });
      box.replaceChildren(h("p", { role: "status", class: "feedback-note" }, told.correct ? "Thank you: noted as right." : answered ? "Thank you: noted as wrong." : "Thank you: noted."));
    } catch (error) {
      note.textContent = explain(error).join(" ");
      for (const button of buttons) button.disabled = false;
    }
  };
  const answer = h("input", { type: "text", name: "answer", maxlength: "1000", autocomplete: "off" });
  const comment = h("input", { type: "text", name: "comment", maxlength: "4000", autocomplete: "off" });
  const form = h("form", { hidden: true, onsubmit: (event) => {
    event.preventDefault();
    const told = { correct: false };
    if (answer.value.trim()) told.answer = answer.value.trim();
    if (comment.value.trim()) told.comment = comment.value.trim();
    send(told);
  } }, h("label", {}, "What would be right? ", answer), h("label", {}, "Anything else? ", comment), h("button", { type: "submit" }, "Send"));
  const right = h("button", { type: "button", onclick: () => send({ correct: true }) }, thumb("up"), "Right");
  const wrong = h("button", { type: "button", "aria-expanded": "false", onclick: () => {
    form.hidden = !form.hidden;
    wrong.setAttribute("aria-expanded", String(!form.hidden));
    if (!form.hidden) answer.focus();
  } }, thumb("down"), "Wrong");
  if (!answered) wrong.replaceChildren("Tell the answer");
  buttons.push(right, wrong, form.lastChild);
  box.append(h("h3", {}, answered ? "Is it right?" : "Do you know it?"), h("div", { class: "row" }, ...(answered ? [right, wrong] : [wrong])), form, note);
  return box;
}
