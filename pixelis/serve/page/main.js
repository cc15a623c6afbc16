// The frame of the page: views by hash, the key of this tab, and the settings of the service.

import * as ask from "./ask.js";
import { key, setKey } from "./api.js";
import { $, h } from "./dom.js";
import * as evolution from "./evolution.js";

const VIEWS = ["ask", "evolution"];

function route() {
  const wanted = location.hash.replace(/^#\/?/, "");
  const view = VIEWS.includes(wanted) ? wanted : "ask";
  for (const name of VIEWS) $(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "ask" ? "Pixelis" : "Pixelis · Evolution";
  evolution.show(view === "evolution");
}

function showKey(open) {
  $("key-panel").hidden = !open;
  $("key-button").setAttribute("aria-expanded", String(open));
  if (open) $("key").focus();
}

function setUpKey(needed) {
  $("key-button").hidden = !needed;
  $("key").value = key();
  $("key-button").addEventListener("click", () => showKey($("key-panel").hidden));
  $("key-panel").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value.trim());
    $("key-note").textContent = "";
    showKey(false);
    evolution.refresh();
  });
  $("key-forget").addEventListener("click", () => {
    setKey("");
    $("key").value = "";
    $("key-note").textContent = "Forgotten.";
  });
  if (needed && !key()) $("key-panel").hidden = false;
}

async function start() {
  let settings;
  try {
    settings = await (await fetch("/page/settings.json", { cache: "no-store" })).json();
  } catch {
    $("view").prepend(h("p", { class: "card trouble" }, "The service cannot be reached. Check that it runs, then reload this page."));
    return;
  }
  const needKey = () => {
    $("key-button").hidden = false;
    $("key-note").textContent = key() ? "This key is not taken." : "A key is needed.";
    showKey(true);
  };
  $("model").textContent = settings.model ?? "";
  setUpKey(settings.needs_key);
  ask.setUp(settings, needKey);
  evolution.setUp(settings, needKey);
  window.addEventListener("hashchange", route);
  route();
}

start();
