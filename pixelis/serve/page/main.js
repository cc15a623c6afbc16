// The page's frame: views selected by the URL's hash, the API key, and the settings of the service.

import * as ask from "./ask.js";
import { key, setKey } from "./api.js";
import { $, h } from "./dom.js";
import * as evolution from "./evolution.js";
import * as memory from "./memory.js";

const VIEWS = { ask: "Pixelis", memory: "Pixelis · Memory", evolution: "Pixelis · Evolution" };

function route() {
  const name = location.hash.replace(/^#\/?/, "");
  const view = Object.hasOwn(VIEWS, name) ? name : "ask";
  for (const name of Object.keys(VIEWS)) $(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = VIEWS[view];
  memory.show(view === "memory");
  evolution.show(view === "evolution");
}

function showKeyPanel(open) {
  $("key-panel").hidden = !open;
  $("key-button").setAttribute("aria-expanded", String(open));
  if (open) $("key").focus();
}

function setUpKey(required) {
  $("key-button").hidden = !required;
  $("key").value = key();
  $("key-button").addEventListener("click", () => showKeyPanel($("key-panel").hidden));
  $("key-panel").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value.trim());
    $("key-note").textContent = "";
    showKeyPanel(false);
    evolution.refresh();
    memory.refresh();
  });
  $("key-forget").addEventListener("click", () => {
    setKey("");
    $("key").value = "";
    $("key-note").textContent = "The key has been removed.";
  });
  if (required && !key()) $("key-panel").hidden = false;
}

async function start() {
  let settings;
  try {
    settings = await (await fetch("/page/settings.json", { cache: "no-store" })).json();
  } catch {
    $("view").prepend(h("p", { class: "card error" }, "The service cannot be reached. Check that it runs, then reload this page."));
    return;
  }
  const requestKey = () => {
    $("key-button").hidden = false;
    $("key-note").textContent = key() ? "This key is not accepted." : "A key is required.";
    showKeyPanel(true);
  };
  $("model").textContent = settings.model ?? "";
  setUpKey(settings.needs_key);
  ask.setUp(settings, requestKey);
  memory.setUp(settings, requestKey);
  evolution.setUp(settings, requestKey);
  window.addEventListener("hashchange", route);
  route();
}

start();
