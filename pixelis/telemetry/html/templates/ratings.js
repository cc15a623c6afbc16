"use strict";
(() => {
  const root = document.getElementById("rating");
  const key = "pixelis-ratings-" + root.dataset.page;
  const rater = document.getElementById("rater");
  const items = [...root.querySelectorAll("form.item")];
  const forms = [document.getElementById("start"), ...items, document.getElementById("end")];
  const saved = JSON.parse(localStorage.getItem(key) || "null") || { rater: "", at: 0, entries: {}, seconds: {} };
  let shown = 0, since = performance.now(), visible = !document.hidden;

  const store = () => localStorage.setItem(key, JSON.stringify(saved));

  // Only time with the pair on a visible screen counts.
  const count = () => {
    const now = performance.now(), item = forms[shown].dataset.item;
    if (item && visible) saved.seconds[item] = (saved.seconds[item] || 0) + (now - since) / 1000;
    since = now;
    visible = !document.hidden;
  };

  const show = (index) => {
    count();
    forms[shown].hidden = true;
    shown = saved.at = index;
    forms[shown].hidden = false;
    store();
    const heading = forms[shown].querySelector("h2");
    if (heading) heading.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  };

  const entriesOf = (form) => {
    const entries = {};
    for (const [name, value] of new FormData(form)) entries[name.slice(form.dataset.item.length + 1)] = value;
    return entries;
  };

  const ratingOf = (form) => {
    const entries = saved.entries[form.dataset.item];
    const side = (name) => ({
      correct: entries[name + "-correct"] === "yes",
      coherence: Number(entries[name + "-coherence"]),
      efficiency: Number(entries[name + "-efficiency"]),
      thoroughness: Number(entries[name + "-thoroughness"]),
    });
    return {
      item: form.dataset.item, left: side("left"), right: side("right"), preference: entries.preference,
      confidence: Number(entries.confidence), comment: entries.comment || "", seconds: saved.seconds[form.dataset.item] || 0,
    };
  };

  const download = () => {
    const ratings = { page: root.dataset.page, rater: saved.rater, ratings: items.map(ratingOf) };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(ratings, null, 1)], { type: "application/json" }));
    link.download = "ratings-" + saved.rater.replace(/[^A-Za-z0-9_-]/g, "_") + ".json";
    link.click();
    URL.revokeObjectURL(link.href);
  };

  for (const form of items) {
    for (const [name, value] of Object.entries(saved.entries[form.dataset.item] || {})) {
      const field = form.elements[form.dataset.item + "-" + name];
      if (field) field.value = value;
    }
    form.addEventListener("change", () => { saved.entries[form.dataset.item] = entriesOf(form); store(); });
  }
  forms.forEach((form, index) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (index === 0) saved.rater = rater.value.trim();
      if (index === 0 && !saved.rater) return;
      if (index < forms.length - 1) show(index + 1); else download();
    });
    const back = form.querySelector(".back");
    if (back) back.addEventListener("click", () => show(index - 1));
  });
  document.addEventListener("visibilitychange", count);
  rater.value = saved.rater;
  if (saved.at) show(Math.min(saved.at, forms.length - 1));
})();
