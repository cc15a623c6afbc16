// Updates that wait for a person: what was asked, seen and voted, and whether it may be learnt.

import { explain, Failure, request } from "./api.js";
import { facts, h, percent, plural, said, when } from "./dom.js";
import { bars } from "./verdict.js";

const SHOWN = 20;
const PICTURES = 12;

export class Reviews {
  constructor() {
    this.cards = new Map();
    this.gone = new Set();
    this.note = h("p", { class: "missing" });
    this.list = h("div", { class: "reviews" });
    this.name = h("input", { type: "text", id: "reviewer", autocomplete: "name", maxlength: "200" });
    this.who = h("label", { class: "setting", for: "reviewer" }, "Your name, for the audit log ", this.name);
    this.element = h("section", { id: "reviews" }, h("h2", {}, "Review queue"), this.note, this.who, this.list);
  }

  /** Ask for the waiting ones and show them; cards that are there stay as they are, with what was typed into them. */
  async refresh() {
    let body;
    try {
      body = await request(`/v1/review?state=waiting&limit=${SHOWN}`);
    } catch (error) {
      if (!(error instanceof Failure) || error.status === 401) throw error;
      this.note.textContent = [403, 404, 405].includes(error.status) ? "This service keeps no review queue." : explain(error).join(" ");
      this.who.hidden = !this.cards.size;
      return;
    }
    const waiting = (Array.isArray(body) ? body : body.data ?? body.reviews ?? []).filter((item) => item?.id && !this.gone.has(item.id)).slice(0, SHOWN);
    const ids = new Set(waiting.map((item) => item.id));
    for (const [id, card] of this.cards) {
      if (ids.has(id) || card.contains(document.activeElement)) continue;
      card.remove();
      this.cards.delete(id);
    }
    for (const item of waiting) {
      if (this.cards.has(item.id)) continue;
      const card = this.card(item);
      this.cards.set(item.id, card);
      this.list.append(card);
    }
    this.count(Number(body.waiting ?? body.total) || this.cards.size);
  }

  count(n) {
    this.note.textContent = n ? `${plural(n, "update")} waiting for somebody to look at ${n === 1 ? "it" : "them"}${n > this.cards.size ? `; the oldest ${this.cards.size} are here` : ""}.` : "Nothing waits for review.";
    this.who.hidden = !this.cards.size;
  }

  card(item) {
    const verdict = item.verdict ?? {};
    const task = item.task ?? {};
    const label = task.pseudo_label ?? verdict.answer ?? item.pseudo_label;
    const pictures = h("div", { class: "shots" });
    const answer = h("input", { type: "text", name: "answer", maxlength: "1000", autocomplete: "off" });
    const comment = h("input", { type: "text", name: "comment", maxlength: "4000", autocomplete: "off" });
    const status = h("p", { role: "status" });
    const buttons = [];
    const decide = async (decision) => {
      for (const button of buttons) button.disabled = true;
      status.textContent = "Sending…";
      const body = { decision };
      if (decision === "approve" && answer.value.trim()) body.answer = answer.value.trim();
      if (comment.value.trim()) body.comment = comment.value.trim();
      if (this.name.value.trim()) body.reviewer = this.name.value.trim();
      try {
        await request(`/v1/review/${encodeURIComponent(item.id)}`, { method: "POST", body });
        this.gone.add(item.id);
        this.cards.delete(item.id);
        card.replaceChildren(h("p", { role: "status" }, decision === "approve" ? `Approved: ${body.answer ? "it will learn your answer." : "it will be learnt."}` : "Rejected: nothing is learnt from it."));
        card.classList.add("done");
        setTimeout(() => card.remove(), 4000);
        this.count(this.cards.size);
      } catch (error) {
        status.textContent = explain(error).join(" ");
        for (const button of buttons) button.disabled = false;
      }
    };
    buttons.push(h("button", { type: "button", class: "main", onclick: () => decide("approve") }, "Approve"),
      h("button", { type: "button", class: "danger", onclick: () => decide("reject") }, "Reject"));
    const card = h("article", { class: "card review" },
      h("p", { class: "question" }, said(item.question?.question ?? item.question ?? "")), pictures,
      facts(["It would learn", label === undefined || label === null ? null : h("b", {}, said(label, 300))], ["Confidence", percent(task.confidence ?? verdict.confidence)],
        ["Asked", when(item.created_at)]),
      bars(verdict),
      h("label", {}, "Another answer is right: ", answer), h("label", {}, "Comment: ", comment),
      h("div", { class: "row" }, buttons), status);
    this.pictures(item, pictures);
    return card;
  }

  async pictures(item, box) {
    try {
      const body = item.pictures ? item : await request(`/v1/review/${encodeURIComponent(item.id)}`);
      const found = Object.entries(body.pictures ?? body.review?.pictures ?? {}).filter(([, url]) => typeof url === "string" && url.startsWith("data:image/"));
      box.replaceChildren(...found.slice(0, PICTURES).map(([name, url]) => h("figure", {}, h("img", { class: "pixels", src: url, alt: `what the policy saw as ${name}` }), h("figcaption", {}, said(name, 40)))));
    } catch {
      box.replaceChildren(h("p", { class: "missing" }, "Its pictures could not be loaded."));
    }
  }
}
