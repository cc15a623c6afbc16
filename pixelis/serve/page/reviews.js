// The review queue: updates that wait for a person's approval.

import { explain, Failure, request } from "./api.js";
import { facts, h, percent, plural, foreignText, timeAgo } from "./dom.js";
import { bars } from "./verdict.js";

const MAX_CARDS = 20;
const MAX_PICTURES = 12;

export class Reviews {
  constructor() {
    this.cards = new Map();
    this.decided = new Set();
    this.note = h("p", { class: "missing" });
    this.list = h("div", { class: "reviews" });
    this.reviewer = h("input", { type: "text", id: "reviewer", autocomplete: "name", maxlength: "200" });
    this.reviewerField = h("label", { class: "setting", for: "reviewer" }, "Your name, for the audit log ", this.reviewer);
    this.element = h("section", { id: "reviews" }, h("h2", {}, "Review queue"), this.note, this.reviewerField, this.list);
  }

  /** Load and show the waiting updates. Existing cards stay, with their input. */
  async refresh() {
    let body;
    try {
      body = await request(`/v1/review?state=waiting&limit=${MAX_CARDS}`);
    } catch (error) {
      if (!(error instanceof Failure) || error.status === 401) throw error;
      this.note.textContent = [403, 404, 405].includes(error.status) ? "This service has no review queue." : explain(error).join(" ");
      this.reviewerField.hidden = !this.cards.size;
      return;
    }
    const waiting = (Array.isArray(body) ? body : body.data ?? body.reviews ?? []).filter((item) => item?.id && !this.decided.has(item.id)).slice(0, MAX_CARDS);
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
    this.showCount(Number(body.waiting ?? body.total) || this.cards.size);
  }

  showCount(n) {
    this.note.textContent = n ? `${plural(n, "update")} waiting for review${n > this.cards.size ? `; the oldest ${this.cards.size} are shown` : ""}.` : "No update is waiting for review.";
    this.reviewerField.hidden = !this.cards.size;
  }

  card(item) {
    const verdict = item.verdict ?? {};
    const task = item.task ?? {};
    const label = task.pseudo_label ?? verdict.answer ?? item.pseudo_label;
    const pictures = h("div", { class: "thumbnails" });
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
      if (this.reviewer.value.trim()) body.reviewer = this.reviewer.value.trim();
      try {
        await request(`/v1/review/${encodeURIComponent(item.id)}`, { method: "POST", body });
        this.decided.add(item.id);
        this.cards.delete(item.id);
        card.replaceChildren(h("p", { role: "status" }, decision === "approve" ? `Approved: ${body.answer ? "your answer will be learnt." : "it will be learnt."}` : "Rejected: nothing is learnt from it."));
        card.classList.add("done");
        setTimeout(() => card.remove(), 4000);
        this.showCount(this.cards.size);
      } catch (error) {
        status.textContent = explain(error).join(" ");
        for (const button of buttons) button.disabled = false;
      }
    };
    buttons.push(h("button", { type: "button", class: "main", onclick: () => decide("approve") }, "Approve"),
      h("button", { type: "button", class: "danger", onclick: () => decide("reject") }, "Reject"));
    const card = h("article", { class: "card review" },
      h("p", { class: "question" }, foreignText(item.question?.question ?? item.question ?? "")), pictures,
      facts(["Label", label === undefined || label === null ? null : h("b", {}, foreignText(label, 300))], ["Confidence", percent(task.confidence ?? verdict.confidence)],
        ["Asked", timeAgo(item.created_at)]),
      bars(verdict),
      h("label", {}, "Correct answer, if another: ", answer), h("label", {}, "Comment: ", comment),
      h("div", { class: "row" }, buttons), status);
    this.loadPictures(item, pictures);
    return card;
  }

  async loadPictures(item, box) {
    try {
      const body = item.pictures ? item : await request(`/v1/review/${encodeURIComponent(item.id)}`);
      const urls = Object.entries(body.pictures ?? body.review?.pictures ?? {}).filter(([, url]) => typeof url === "string" && url.startsWith("data:image/"));
      box.replaceChildren(...urls.slice(0, MAX_PICTURES).map(([name, url]) => h("figure", {}, h("img", { class: "pixels", src: url, alt: `what the policy saw as ${name}` }), h("figcaption", {}, foreignText(name, 40)))));
    } catch {
      box.replaceChildren(h("p", { class: "missing" }, "Its pictures could not be loaded."));
    }
  }
}
