// The conversation about a picture: its thread on the page, and the exchanges that go with a follow-up question.

import { $, foreignText, h } from "./dom.js";

export class Conversation {
  /** `settings` has `max_exchanges` and `max_question_chars` of the service. */
  constructor(settings) {
    Object.assign(this, { settings, exchanges: [], question: null, last: null });
  }

  /** There is something that a new conversation would clear. */
  get begun() {
    return this.last !== null || this.exchanges.length > 0;
  }

  get full() {
    return this.exchanges.length >= this.settings.max_exchanges;
  }

  clear() {
    Object.assign(this, { exchanges: [], question: null, last: null });
    $("thread").replaceChildren();
    $("answer").replaceChildren();
    this.show(null);
  }

  /** Move the last answer into the thread, and show the next question. */
  ask(question) {
    if (this.last) {
      const { question: earlier, answered, card } = this.last;
      $("thread").append(h("li", {}, h("p", { class: "question" }, foreignText(earlier)),
        h("p", {}, answered === null ? h("span", { class: "missing" }, "No answer: the follow-up questions leave this one out.") : foreignText(answered)),
        h("details", {}, h("summary", {}, "Votes and feedback"), card)));
      this.last = null;
    }
    $("answer").replaceChildren();
    this.show(question);
  }

  /** The fields of the request: `media`, { image } or { video }, goes with the first question of the conversation. */
  body(question, media, earlier = this.exchanges) {
    const history = earlier.map((exchange, i) => (i ? exchange : { ...exchange, ...media }));
    return history.length ? { question, history } : { question, ...media };
  }

  /** The fields of the question answered last, once more; null for none. */
  again(media) {
    if (!this.last) return null;
    return this.body(this.last.question, media, this.last.answered === null ? this.exchanges : this.exchanges.slice(0, -1));
  }

  /** Show the answer. Without one, the question is no part of the conversation. */
  answer(reply, card) {
    const answered = typeof reply.answer === "string" && reply.answer.trim() ? reply.answer : null;
    // The service has one limit for the texts of questions and of earlier answers.
    if (answered !== null) this.exchanges.push({ question: this.question, answer: [...answered].slice(0, this.settings.max_question_chars).join("") });
    this.last = { question: this.question, answered, card };
    $("answer").replaceChildren(card);
    $("question-label").textContent = "Ask a follow-up question";
  }

  /** The question has failed and may be asked again. */
  withdraw() {
    this.show(null);
  }

  show(question) {
    this.question = question;
    $("asked").hidden = question === null;
    $("asked").replaceChildren(question === null ? "" : foreignText(question));
    $("question-label").textContent = this.exchanges.length ? "Ask a follow-up question" : "Your question";
    $("restart").hidden = !this.begun;
  }
}
