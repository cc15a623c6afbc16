// The Ask view: a picture, a question, and what comes back while it comes back.

import { aborted, explain, Failure, stream } from "./api.js";
import { $, h } from "./dom.js";
import { Stage } from "./marks.js";
import { BadPicture, open } from "./picture.js";
import { Samples } from "./samples.js";
import { verdictCard } from "./verdict.js";

/** Set up the view. `settings` as /page/settings.json; `needKey()` brings the reader to the field of the key. */
export function setUp(settings, needKey) {
  const stage = new Stage($("stage"));
  let picture = null;
  let running = null;
  let clock = 0;
  $("samples").max = $("samples").value = settings.samples;
  $("question").maxLength = settings.max_question_chars;
  if (!settings.operations) $("operations").closest("label").hidden = true;
  if (settings.read_only || !settings.evolution) {
    $("learn").checked = false;
    $("learn").closest("label").hidden = true;
  }
  if (!matchMedia("(pointer: coarse)").matches) $("photo-label").hidden = true;

  const trouble = (words, advice) => $("trouble").replaceChildren(h("div", { class: "card trouble" }, h("p", {}, h("b", {}, words)), advice ? h("p", {}, advice) : null));
  const forget = () => {
    $("trouble").replaceChildren();
    $("answer").replaceChildren();
    new Samples(stage);
  };

  async function take(file) {
    if (!file || running) return;
    $("picture-note").textContent = "Reading the picture…";
    try {
      const taken = await open(file, settings);
      forget();
      picture = taken;
      stage.show(picture.element);
      $("empty").hidden = true;
      $("picture-note").textContent = picture.note;
      if (matchMedia("(pointer: fine)").matches) $("question").focus({ preventScroll: true });
    } catch (error) {
      $("picture-note").textContent = "";
      trouble("The picture cannot be used.", error instanceof BadPicture ? error.message : String(error));
    }
  }

  for (const id of ["choose", "photo"]) {
    $(id).addEventListener("change", (event) => {
      take(event.target.files[0]);
      event.target.value = ""; // the same file may be chosen again
    });
  }
  const over = (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files") || $("ask").hidden) return;
    event.preventDefault();
    $("drop").classList.toggle("over", event.type === "dragover");
    if (event.type === "drop") take(event.dataTransfer.files[0]);
  };
  for (const name of ["dragover", "dragleave", "drop"]) window.addEventListener(name, over);
  window.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((item) => item.type.startsWith("image/"));
    if (!file || $("ask").hidden) return;
    event.preventDefault();
    take(file);
  });
  if (settings.example) {
    $("example").hidden = false;
    $("example").addEventListener("click", async () => {
      try {
        const [name, question] = settings.example;
        await take(await (await fetch(`/page/${name}`)).blob());
        $("question").value = question;
      } catch {
        trouble("The example cannot be loaded.", "Check that you are online, or choose a picture of your own.");
      }
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

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    const question = $("question").value.trim();
    if (!picture) {
      trouble("There is no picture yet.", "Choose one, drop it, or paste it.");
      $("choose").focus();
    } else if (!question) {
      trouble("There is no question yet.", "Write what you want to know about the picture.");
      $("question").focus();
    } else {
      ask(question);
    }
  });
  $("cancel").addEventListener("click", () => running?.abort());

  function busy(controller) {
    running = controller;
    $("send").disabled = controller !== null;
    $("cancel").hidden = controller === null;
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

  async function ask(question) {
    forget();
    $("hint").hidden = true;
    const controller = new AbortController();
    const samples = new Samples(stage);
    const wanted = Math.min(settings.samples, Math.max(1, Math.floor(Number($("samples").value)) || settings.samples));
    const started = performance.now();
    samples.expect(wanted);
    busy(controller);
    let reply = null;
    const onEvent = (name, data) => {
      if (name === "turn") samples.turn(data);
      else if (name === "answer") reply = data;
      else if (name === "error") throw failure(data);
    };
    const body = { question, image: picture.url, samples: wanted, operations: $("operations").checked, learn: $("learn").checked,
      remember: $("remember").checked, stream: true };
    try {
      await stream("/v1/agent", body, controller.signal, onEvent);
      if (reply === null) throw new Failure(0, "the reply broke off");
      settle(samples, reply);
      $("answer").replaceChildren(verdictCard(reply, (performance.now() - started) / 1000, settings.read_only));
      // On a phone the answer may lie below what is seen of the page.
      if (innerWidth <= 820) $("answer").scrollIntoView({ block: "nearest", behavior: "smooth" });
    } catch (error) {
      samples.stop("stopped");
      if (aborted(error) || controller.signal.aborted) {
        trouble("Cancelled.", "The service was told to stop; nothing of it is kept.");
      } else {
        controller.abort();
        trouble(...explain(error));
        if (error instanceof Failure && error.status === 401) needKey();
      }
    } finally {
      busy(null);
    }
  }
}

function settle(samples, reply) {
  const votes = (reply.verdict?.votes ?? []).filter((vote) => vote.source !== "neighbour");
  const place = votes.findIndex((vote) => vote.id && vote.id === reply.trajectory?.id);
  let winner = place < 0 ? null : place;
  if (!samples.list.some((sample) => sample.count) && reply.trajectory) {
    // Kept replies come without their turns: show those of the sample that stands for the answer.
    winner = 0;
    samples.clear();
    samples.trajectory(0, reply.trajectory);
    samples.settle(0, [reply.trajectory.answer]);
    return;
  }
  samples.settle(winner, votes.length === samples.list.length ? votes.map((vote) => vote.answer) : []);
}

/** The failure inside a stream, in the shape of all errors: {error: {message, code, ...}}, with the status it would have had. */
function failure(data) {
  const told = data?.error ?? data ?? {};
  const status = Number(told.status ?? data?.status) || { timeout: 504, overloaded: 429, rate_limit_exceeded: 429, unavailable: 503, internal_error: 500, invalid_api_key: 401 }[told.code]
    || (told.type === "invalid_request_error" ? 400 : 500);
  const wait = Number(told.retry_after_s ?? data?.retry_after_s);
  return new Failure(status, String(told.message ?? ""), String(told.code ?? ""), Number.isFinite(wait) && wait > 0 ? wait : null);
}
