// The canary chart: accuracy of every judged version and of its reference version.

import { h, isNumber, percent, asWords, svg, timeAgo } from "./dom.js";

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [240, 46, 18, 14, 34];

const WORDS = { promote: "promoted", refuse: "refused", wait: "not served yet", keep: "kept", roll_back: "rolled back" };
const KINDS = { promote: "good", keep: "good", wait: "open" };

/** The outcome of a judgement as { kind, words }; kind: good, bad, or open if the test decided nothing. */
export function outcome(entry) {
  const words = WORDS[entry.decision] ?? asWords(entry.decision ?? "");
  return { kind: KINDS[entry.decision] ?? "bad", words: entry.reason ? `${words} (${asWords(entry.reason)})` : words };
}

/** The chart and its table. `width` is in CSS pixels, so that text keeps its size on a phone. */
export function canaryChart(entries, width) {
  const chartWidth = Math.min(900, Math.max(260, Math.round(width)));
  const points = entries.filter((entry) => isNumber(entry.accuracy)).slice(-200);
  if (!points.length) return h("p", { class: "missing" }, "No version has been tested yet.");
  const values = points.flatMap((p) => [p.accuracy, p.reference_accuracy]).filter(isNumber);
  const low = Math.max(0, Math.floor((Math.min(...values) - 0.05) * 10) / 10);
  const high = Math.min(1, Math.max(low + 0.2, Math.ceil((Math.max(...values) + 0.02) * 10) / 10));
  const x = (i) => (points.length === 1 ? (LEFT + chartWidth - RIGHT) / 2 : LEFT + (i * (chartWidth - LEFT - RIGHT)) / (points.length - 1));
  const y = (v) => TOP + ((high - v) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const steps = Math.max(1, Math.round((high - low) * 10));
  const every = Math.ceil(steps / 5);
  const grid = [];
  for (let i = 0; i <= steps; i += every) {
    const v = low + i / 10;
    grid.push(svg("line", { class: "grid", x1: LEFT, x2: chartWidth - RIGHT, y1: y(v), y2: y(v) }),
      svg("text", { x: LEFT - 8, y: y(v) + 4, "text-anchor": "end" }, percent(v)));
  }
  const skip = Math.ceil(points.length / (chartWidth / 70));
  const names = points.map((p, i) => (i % skip ? null : svg("text", { x: x(i), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, `v${p.version}`)));
  const line = (key, kind) => svg("polyline", { class: kind, points: points.map((p, i) => (isNumber(p[key]) ? `${x(i).toFixed(1)},${y(p[key]).toFixed(1)}` : "")).join(" ") });
  const dots = points.map((p, i) => {
    const { kind, words } = outcome(p);
    const title = svg("title", {}, `v${p.version}: ${percent(p.accuracy)}, reference ${percent(p.reference_accuracy)}${words ? `, ${words}` : ""}`);
    // The shape repeats what the colour says: a cross is a refusal or rollback, an empty circle no decision.
    const [a, b] = [x(i), y(p.accuracy)];
    return kind !== "bad" ? svg("circle", { class: kind, cx: a, cy: b, r: 5 }, title)
      : svg("path", { class: "bad", d: `M${a - 5} ${b - 5}l10 10m0-10l-10 10` }, title);
  });
  const last = points.at(-1);
  const label = `Share of test questions answered correctly in ${points.length} tests; the last, version ${last.version}: ${percent(last.accuracy)}, compared with ${percent(last.reference_accuracy)}`;
  const rows = points.slice().reverse().map((p) => h("tr", {}, h("td", { "data-label": "Version" }, `v${p.version}`), h("td", { "data-label": "Accuracy" }, percent(p.accuracy)),
    h("td", { "data-label": "Reference" }, percent(p.reference_accuracy)), h("td", { "data-label": "Decision", class: { good: "right", bad: "wrong" }[outcome(p).kind] ?? "" }, outcome(p).words), h("td", { "data-label": "When" }, timeAgo(p.time))));
  return h("figure", { class: "curve" },
    svg("svg", { class: "chart", viewBox: `0 0 ${chartWidth} ${HEIGHT}`, role: "img", "aria-label": label }, grid, names, line("reference_accuracy", "reference"), line("accuracy", "accuracy"), dots),
    h("figcaption", {}, h("span", { class: "k" }, h("i", { class: "key line" }), "test questions that the version answered correctly"), h("span", { class: "k" }, h("i", { class: "key dashed" }), "and the version that it was compared with"),
      h("span", { class: "k right" }, "● accepted"), h("span", { class: "k" }, "○ not decided"), h("span", { class: "k wrong" }, "× refused or rolled back")),
    h("details", {}, h("summary", {}, "As a table"), h("div", { class: "wide" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Version", "Accuracy", "Reference", "Decision", "When"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)))));
}
