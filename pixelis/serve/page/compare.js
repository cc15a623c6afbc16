// One question answered in several ways, side by side: without operations, with them, and what learning changed.

import { aborted, explain, request } from "./api.js";
import { $, h, isNumber, number, percent, plural, foreignText } from "./dom.js";
import { decisive, testResult } from "./versions.js";
import { bars, tally } from "./verdict.js";

const ARMS = [
  { operations: false, name: "One look", about: "Without operations: it sees the reduced picture and answers." },
  { operations: true, name: "A closer look", about: "With operations, such as zooming in, before it answers." },
];

/** Ask `body` in each way and show the answers. Nothing of it is stored or learnt from. */
export async function compare(body, signal) {
  const seed = crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
  const boxes = ARMS.map(({ name, about }) => h("article", { class: "card arm", "aria-busy": "true" }, h("h3", {}, name), h("p", {}, h("small", {}, about)), h("p", { class: "missing" }, "Working…")));
  const learning = h("article", { class: "card arm" }, h("h3", {}, "Before it learnt"), h("p", { class: "missing" }, "Loading…"));
  const note = h("p", { role: "status" });
  $("comparison").replaceChildren(h("h2", {}, "The same question, several ways: ", foreignText(body.question, 300)), h("div", { class: "arms" }, boxes, learning), note);
  $("comparison").scrollIntoView({ block: "start", behavior: "smooth" });
  const answers = await Promise.all(ARMS.map(async ({ operations }, i) => {
    try {
      const reply = await request("/v1/agent", { method: "POST", signal, body: { ...body, operations, seed, stream: false, remember: false, learn: false } });
      boxes[i].lastChild.replaceWith(...armAnswer(reply));
      return reply;
    } catch (error) {
      if (aborted(error)) throw error;
      boxes[i].lastChild.replaceWith(h("p", { class: "wrong" }, explain(error).join(" ")));
      return null;
    } finally {
      boxes[i].removeAttribute("aria-busy");
    }
  }));
  learning.lastChild.replaceWith(...(await learningArm()));
  const versions = [...new Set(answers.filter(Boolean).map((reply) => reply.policy_version))];
  if (!versions.length) return;
  note.textContent = `${versions.length === 1 ? `Both were answered by version ${versions[0]}` : `A new version arrived in between: they were answered by versions ${versions.join(" and ")}`}, with ${plural(body.samples, "sample")} each and the same random seed. The memory has no vote, and nothing of this is stored or learnt from.`;
}

/** The samples' own answer: votes of the memory, which may know the question from just before, are left out. */
function armAnswer(reply) {
  const votes = (reply.verdict?.votes ?? []).filter((vote) => vote.source !== "neighbour");
  const best = tally(votes).find((row) => row.answer !== null);
  const calls = (reply.trajectory?.turns ?? []).filter((turn) => turn.action).length;
  return [
    best ? h("p", { class: "final" }, foreignText(best.answer, 400)) : h("p", { class: "final none" }, "No answer"),
    h("p", {}, best && h("b", {}, `${best.samples} of ${plural(votes.length, "sample")}`), h("small", {}, `${best ? " · " : ""}${plural(calls, "operation")} · ${isNumber(reply.seconds) ? number(Number(reply.seconds.toPrecision(2))) : "–"} s`)),
    bars({ votes, answer: best?.answer }) ?? h("p", { class: "missing" }, "No sample voted."),
  ];
}

/** What learning changed. The service holds one version at a time, so the starting one cannot be asked: its test stands in. */
async function learningArm() {
  const link = h("p", {}, h("a", { href: "#/evolution" }, "What the model has learnt"));
  let status;
  try {
    status = await request("/v1/evolution");
  } catch {
    return [h("p", {}, "This key may not see what the service has learnt.")];
  }
  const served = status.status?.served ?? status.policy_version;
  if (!status.enabled) return [h("p", {}, "This service does not learn: there is only this version.")];
  if (!served) return [h("p", {}, "Version 0 answers, the policy as it was trained: no later version has passed its test yet."), link];
  const judged = decisive(status.canary ?? [], served);
  const first = (status.canary ?? []).find((entry) => entry.against === 0 && isNumber(entry.reference_accuracy));
  return [
    h("p", {}, "The service answers with one version at a time, so version 0 is not asked your question here. On test questions with known answers:"),
    judged ? h("p", {}, `Version ${served}: `, testResult(judged)) : h("p", {}, `Version ${served} has not been tested.`),
    first && judged?.against !== 0 ? h("p", {}, `Version 0: ${percent(first.reference_accuracy)}.`) : "",
    link,
  ];
}
