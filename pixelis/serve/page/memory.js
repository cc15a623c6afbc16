// The Memory view: the newest stored answers, and a search by words, by a picture, or by both.

import { explain, Failure, request } from "./api.js";
import { $, clean, h, percent, plural, foreignText, timeAgo } from "./dom.js";
import { BadPicture, onFile, openPicture } from "./picture.js";
import { bars } from "./verdict.js";

const COUNT = 12;

let [visible, settings, requestKey, picture, running] = [false, null, () => {}, null, null];

/** Set up the view. `given` is /page/settings.json; `onKeyNeeded()` opens the field of the API key. */
export function setUp(given, onKeyNeeded) {
  [settings, requestKey] = [given, onKeyNeeded];
  $("search").hidden = !settings.memory;
  $("words").maxLength = settings.max_question_chars;
  if (!settings.memory) $("memory-about").textContent = "This service runs without a memory: it stores no questions and no answers.";
  if (matchMedia("(pointer: coarse)").matches) $("search-hint").hidden = true;
  $("search-choose").addEventListener("change", (event) => {
    usePicture(event.target.files[0]);
    event.target.value = "";
  });
  onFile($("memory"), $("search"), usePicture);
  $("search-remove").addEventListener("click", () => {
    showPicture(null);
    $("search-choose").focus();
  });
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    refresh();
  });
  $("search").addEventListener("reset", () => {
    showPicture(null);
    setTimeout(refresh); // once the fields are empty
  });
}

export function show(isVisible) {
  if (isVisible && !visible) refresh();
  visible = isVisible;
}

/** Show what the form asks for: the results of a search, or the newest experiences. */
export async function refresh() {
  if (!settings.memory || $("memory").hidden) return;
  running?.abort();
  const controller = (running = new AbortController());
  const text = $("words").value.trim();
  const body = { k: COUNT, ...(text && { text }), ...(picture && { image: picture.url }) };
  const searched = Boolean(text || picture);
  $("found").setAttribute("aria-busy", "true");
  $("memory-note").textContent = searched ? "Searching…" : "Loading…";
  try {
    const reply = await request(searched ? "/v1/experiences/search" : `/v1/experiences?limit=${COUNT}`,
      searched ? { method: "POST", body, signal: controller.signal } : { signal: controller.signal });
    const experiences = searched ? reply.data.map((found) => found.experience) : reply.data;
    $("memory-error").replaceChildren();
    $("memory-note").textContent = note(experiences.length, searched, text) + (reply.partial ? " A part of the memory did not answer: try again." : "");
    $("found").replaceChildren(...experiences.map(card));
    $("search-reset").hidden = !searched;
  } catch (error) {
    if (controller.signal.aborted) return;
    $("memory-note").textContent = "";
    $("found").replaceChildren();
    showError(...explain(error));
    if (error instanceof Failure && error.status === 401) requestKey();
  } finally {
    if (running === controller) $("found").removeAttribute("aria-busy");
  }
}

function note(count, searched, text) {
  if (!searched) return count ? `The newest ${plural(count, "answer")}.` : "Nothing has been stored yet: ask a question first.";
  if (!count) return text ? `No stored question or answer has the words “${clean(text, 80)}”.` : "Nothing has been stored yet: ask a question first.";
  return count === COUNT ? `The ${count} most similar, the most similar first.` : `${plural(count, "result")}, the most similar first.`;
}

const showError = (message, advice) => $("memory-error").replaceChildren(h("div", { class: "card error" }, h("p", {}, h("b", {}, message)), h("p", {}, advice)));

async function usePicture(file) {
  if (!file) return;
  try {
    $("memory-error").replaceChildren();
    showPicture(await openPicture(file, settings));
    refresh();
  } catch (error) {
    showError("The file cannot be used.", error instanceof BadPicture ? error.message : String(error));
  }
}

function showPicture(opened) {
  picture = opened;
  $("search-picture").hidden = $("search-remove").hidden = picture === null;
  if (picture) $("search-picture").src = picture.url;
  else $("search-picture").removeAttribute("src");
}

const MARKS = { processed: ["right", "learnt from"], failed: ["wrong", "taken back with the version that answered"], pending: ["", "not learnt from"], archived: ["", "not learnt from"] };

/** An experience as a list item. Its picture is loaded afterwards. */
function card(experience) {
  const verdict = experience.verdict ?? {};
  const [kind, words] = MARKS[experience.status] ?? MARKS.pending;
  const marks = (experience.feedback ?? []).map((entry) => entry.correct).filter((correct) => typeof correct === "boolean");
  const said = marks.length ? (marks.at(-1) ? "a user marked it as correct" : "a user marked it as wrong") : null;
  const box = h("div", { class: "seen" });
  const item = h("li", { class: "card experience" }, box,
    h("div", {},
      h("p", { class: "question" }, foreignText(experience.question?.question ?? "", 600)),
      typeof verdict.answer === "string" ? h("p", { class: "answered" }, foreignText(verdict.answer, 400)) : h("p", { class: "missing" }, "No answer"),
      h("p", {}, h("small", {}, percent(verdict.confidence), " confident · ", timeAgo(experience.created_at), ` · version ${experience.policy_version}`)),
      h("p", {}, h("span", { class: `pill ${kind}` }, words), said && h("small", {}, ` ${said}`)),
      verdict.votes?.length ? h("details", {}, h("summary", {}, "Votes"), bars(verdict)) : null));
  loadPicture(experience, box);
  return item;
}

async function loadPicture(experience, box) {
  const media = experience.question?.media ?? [];
  if (!media.length) {
    box.replaceChildren(h("small", {}, "no picture"));
    return;
  }
  try {
    const { pictures } = await request(`/v1/experiences/${encodeURIComponent(experience.id)}`);
    const url = pictures[media[0].id] ?? Object.values(pictures)[0];
    if (typeof url === "string" && url.startsWith("data:image/")) {
      box.replaceChildren(h("img", { class: "pixels", src: url, alt: "the picture as the model saw it" }));
      return;
    }
    box.replaceChildren(h("small", {}, "no picture stored"));
  } catch {
    box.replaceChildren(h("small", {}, "The picture could not be loaded."));
  }
}
