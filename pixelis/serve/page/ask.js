// The Ask view: a picture, a question, and the turns and answer as they arrive.

import { aborted, explain, Failure, stream } from "./api.js";
import { $, h } from "./dom.js";
import { Stage } from "./marks.js";
import { compare } from "./compare.js";
import { Conversation } from "./conversation.js";
import { BadPicture, onFile, openMedia } from "./picture.js";
import { Player } from "./player.js";
import { ABILITIES, Samples } from "./samples.js";
import { verdictCard } from "./verdict.js";

/** Set up the view. `settings` is /page/settings.json; `requestKey()` opens the field of the API key. */
export function setUp(settings, requestKey) {
  const stage = new Stage($("stage"));
  const player = new Player(stage);
  const conversation = new Conversation(settings);
  let picture = null;
  let running = null;
  let clock = 0;
  $("samples").max = $("samples").value = settings.samples;
  $("question").maxLength = settings.max_question_chars;
  if (!settings.operations.length) $("operations").closest("label").hidden = $("compare").hidden = true;
  if (settings.read_only || !settings.evolution) {
    $("learn").checked = false;
    $("learn").closest("label").hidden = true;
  }
  if (!matchMedia("(pointer: coarse)").matches) $("photo-label").hidden = true;

  const showError = (message, advice) => $("error").replaceChildren(h("div", { class: "card error" }, h("p", {}, h("b", {}, message)), advice ? h("p", {}, advice) : null));
  const clearResults = () => {
    $("error").replaceChildren();
    $("comparison").replaceChildren();
    conversation.clear();
    new Samples(stage);
  };

  async function usePicture(file) {
    if (!file || running) return;
    $("picture-note").textContent = "Reading the picture…";
    try {
      const opened = await openMedia(file, settings);
      clearResults();
      picture?.clip?.release();
      picture = opened;
      if (picture.clip) player.show(picture.clip);
      else player.hide();
      if (!picture.clip) stage.show(picture.element);
      $("empty").hidden = true;
      $("ask").classList.add("started");
      $("picture-note").textContent = picture.note;
      if (matchMedia("(pointer: fine)").matches) $("question").focus({ preventScroll: true });
    } catch (error) {
      $("picture-note").textContent = "";
      showError("The file cannot be used.", error instanceof BadPicture ? error.message : String(error));
    }
  }

  for (const id of ["choose", "photo"]) {
    $(id).addEventListener("change", (event) => {
      usePicture(event.target.files[0]);
      event.target.value = ""; // so that choosing the same file again is a change
    });
  }
  onFile($("ask"), $("drop"), usePicture);
  introduce(settings);
  $("examples").replaceChildren(...settings.examples.map(({ file, question }) => h("button", { type: "button", class: "example", onclick: async () => {
    if (running) return;
    try {
      await usePicture(await (await fetch(`/page/${file}`)).blob());
      $("question").value = question;
      $("form").requestSubmit();
    } catch {
      showError("The example cannot be loaded.", "Check your connection, or choose a picture of your own.");
    }
  } }, preview(file), h("span", {}, question))));

  /** A picture, or the first frame of a clip. */
  function preview(file) {
    const src = `/page/${file}`;
    if (!file.endsWith(".mp4")) return h("img", { src, alt: "" });
    return h("video", { src, muted: "", preload: "metadata", "aria-hidden": "true", tabindex: "-1" });
  }

  $("pointing").hidden = !settings.points;
  if (settings.points) {
    stage.onPlace((place) => {
      const field = $("question");
      field.setRangeText(`[${place.join(", ")}]`, field.selectionStart, field.selectionEnd, "end");
      field.focus({ preventScroll: true });
    });
  }
  $("question").addEventListener("input", () => {
    const left = settings.max_question_chars - $("question").value.length;
    $("question-note").textContent = left < 200 ? `${left} characters left` : "";
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("form").requestSubmit();
  });

  /** The question to send; null, with advice on the page, if something is missing. */
  function ready() {
    const question = $("question").value.trim();
    if (!picture) {
      showError("There is no picture or clip yet.", "Choose one, drop it, or paste it.");
      $("choose").focus();
    } else if (!question) {
      showError("There is no question yet.", "Write what you want to know about the picture.");
      $("question").focus();
    } else if (conversation.full) {
      showError("This conversation is too long to be continued.", "Start a new one.");
      $("restart").focus();
    } else {
      return question;
    }
    return null;
  }
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = running ? null : ready();
    if (question) ask(question);
  });
  $("compare").addEventListener("click", async () => {
    if (running) return;
    let body = $("question").value.trim() ? null : conversation.again(picture && media());
    if (!body) {
      const question = ready();
      if (!question) return;
      body = conversation.body(question, media());
    }
    $("error").replaceChildren();
    $("hint").hidden = true;
    const controller = new AbortController();
    setRunning(controller);
    try {
      await compare({ ...body, samples: sampleCount() }, controller.signal);
    } catch {
      $("comparison").replaceChildren(); // cancelled
    } finally {
      setRunning(null);
    }
  });
  $("cancel").addEventListener("click", () => running?.abort());
  $("restart").addEventListener("click", () => {
    clearResults();
    $("question").focus();
  });

  function setRunning(controller) {
    running = controller;
    $("send").disabled = $("compare").disabled = controller !== null;
    $("cancel").hidden = controller === null;
    $("restart").hidden = controller !== null || !conversation.begun;
    clearInterval(clock);
    $("progress").textContent = "";
    if (controller === null) return;
    const started = performance.now();
    const tick = () => {
      $("progress").textContent = `Working… ${Math.floor((performance.now() - started) / 1000)} s`;
    };
    tick();
    clock = setInterval(tick, 1000);
  }

  const media = () => (picture.clip ? { video: picture.url } : { image: picture.url });
  const sampleCount = () => Math.min(settings.samples, Math.max(1, Math.floor(Number($("samples").value)) || settings.samples));

  async function ask(question) {
    $("error").replaceChildren();
    $("comparison").replaceChildren();
    $("hint").hidden = true;
    conversation.ask(question);
    $("question").value = "";
    const controller = new AbortController();
    const samples = new Samples(stage);
    const count = sampleCount();
    const started = performance.now();
    samples.ensure(count);
    setRunning(controller);
    let reply = null;
    const onEvent = (name, data) => {
      if (name === "turn") samples.turn(data);
      else if (name === "answer") reply = data;
      else if (name === "error") throw streamFailure(data);
    };
    const body = { ...conversation.body(question, media()), samples: count, operations: $("operations").checked, learn: $("learn").checked,
      remember: $("remember").checked, stream: true };
    try {
      await stream("/v1/agent", body, controller.signal, onEvent);
      if (reply === null) throw new Failure(0, "the connection ended before the reply did");
      showVote(samples, reply);
      conversation.answer(reply, verdictCard(reply, (performance.now() - started) / 1000, settings.read_only));
      // On a phone the answer may be below the visible part of the page.
      if (innerWidth <= 820) $("answer").scrollIntoView({ block: "nearest", behavior: "smooth" });
    } catch (error) {
      samples.stop("stopped");
      conversation.withdraw();
      $("question").value ||= question;
      if (aborted(error) || controller.signal.aborted) {
        showError("Cancelled.", "The service has stopped working on it and stores nothing.");
      } else {
        controller.abort();
        showError(...explain(error));
        if (error instanceof Failure && error.status === 401) requestKey();
      }
    } finally {
      setRunning(null);
    }
  }
}

/** Say what the model can and cannot do, and how it works. */
function introduce(settings) {
  const [can, cannot] = settings.about;
  $("about").replaceChildren(h("b", {}, settings.model), " ", can, " ", cannot);
  const abilities = settings.operations.map((name) => ABILITIES[name]).filter(Boolean);
  const list = abilities.length > 1 ? `${abilities.slice(0, -1).join(", ")} or ${abilities.at(-1)}` : abilities[0];
  if (list) $("hint-abilities").textContent = `: each may ${list}`;
}

/** After the vote: mark the winner and each sample's answer. */
function showVote(samples, reply) {
  const votes = (reply.verdict?.votes ?? []).filter((vote) => vote.source !== "neighbour");
  const index = votes.findIndex((vote) => vote.id && vote.id === reply.trajectory?.id);
  if (!samples.list.some((sample) => sample.count) && reply.trajectory) {
    // A cached reply has no turn events: show the turns of its trajectory.
    samples.clear();
    samples.showTrajectory(0, reply.trajectory);
    samples.finish(0, [reply.trajectory.answer], reply.trajectory);
    return;
  }
  samples.finish(index < 0 ? null : index, votes.length === samples.list.length ? votes.map((vote) => vote.answer) : [], reply.trajectory);
}

/** The Failure of a stream's error event, {error: {message, code, ...}}, with the HTTP status of the same error without a stream. */
function streamFailure(data) {
  const error = data?.error ?? data ?? {};
  const status = Number(error.status ?? data?.status) || { timeout: 504, overloaded: 429, rate_limit_exceeded: 429, unavailable: 503, internal_error: 500, invalid_api_key: 401 }[error.code]
    || (error.type === "invalid_request_error" ? 400 : 500);
  const retryAfter = Number(error.retry_after_s ?? data?.retry_after_s);
  return new Failure(status, String(error.message ?? ""), String(error.code ?? ""), Number.isFinite(retryAfter) && retryAfter > 0 ? retryAfter : null);
}
