/* The list of videos, and what is done to it. It follows figure.js in the same function. */

const OPEN = 3; // videos that are open at first
const FEW = 4; // segments of each

/* Videos and segments unfold when they are opened. */

const span = (segment) => (segment.end === null ? "" : `${segment.start.toFixed(1)}\u2013${seconds(segment.end)}`);

function timeline(video) {
  const layers = Math.max(0, ...video.segments.map((segment) => (segment.change || []).length));
  const chart = make("div", { class: "timeline" });
  for (let layer = 0; layer < layers; layer++) {
    const most = Math.max(...video.segments.map((segment) => segment.change?.[layer] || 0));
    const row = make("div", { class: "row", "aria-hidden": "true" });
    for (const segment of video.segments) {
      const change = segment.change?.[layer] || 0;
      const title = `${span(segment)}: ${Math.round(100 * change)}%`;
      row.append(make("span", { "--long": (segment.end ?? 1) - segment.start, "--high": `${most ? (100 * change) / most : 0}%`, title }));
    }
    chart.append(make("p", { text: `Change of memory by each segment, layer ${layer + 1}, at most ${Math.round(100 * most)}%` }), row);
  }
  return chart;
}

function segments(video, place, id) {
  place.append(timeline(video));
  video.segments.forEach((segment, at) => {
    const inside = make("div", { id: `${id}-${at}`, hidden: true });
    const change = segment.change ? ` Memory changed by ${segment.change.map((each) => (each === null ? "?" : `${Math.round(100 * each)}%`)).join(", ")}.` : "";
    const opener = make("button", { type: "button", class: "opener", "aria-expanded": "false", "aria-controls": inside.id });
    opener.append(make("span", { class: "when", text: span(segment) }), make("span", { class: "said", text: segment.captions[0].text || "(no words)" }));
    const best = segment.captions[0];
    const facts = make("p", { class: "facts", text: `log-probability ${number(best.logprob)}, ${number(best.logprob / best.words.length)} per word${best.confidence === null ? "" : `, confidence ${best.confidence.toFixed(2)}`}.${change}` });
    opener.unfold = () => {
      inside.append(facts, make("div"));
      new Figure(video, segment, inside.lastChild).build();
    };
    place.append(make("section", { class: "segment" }, make("h3", {}, opener), inside));
    if (at < FEW) toggle(opener);
  });
}

function unfold(article) {
  const video = JSON.parse(article.querySelector("script").textContent);
  video.posterSource = article.querySelector("img.poster")?.src;
  const body = article.querySelector(".body");
  if (video.paragraph) segments(video, body, body.id);
  else new Figure(video, video.segments[0], body).build();
}

function toggle(opener) {
  const inside = document.getElementById(opener.getAttribute("aria-controls"));
  const open = opener.getAttribute("aria-expanded") !== "true";
  if (open && !inside.hasChildNodes()) (opener.unfold || (() => unfold(opener.closest("article"))))();
  opener.setAttribute("aria-expanded", String(open));
  inside.hidden = !open;
}

/* The list: filter, order, theme. */

const list = document.getElementById("videos");
const filter = document.getElementById("filter");
const sort = document.getElementById("sort");
const stretch = document.getElementById("stretch");
const theme = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const texts = new WeakMap(); // what each video is found by

const textOf = (article) => {
  if (!texts.has(article)) {
    const parts = [...article.querySelectorAll(".name, .top .caption, .error")];
    texts.set(article, parts.map((part) => part.textContent).join(" ").toLowerCase());
  }
  return texts.get(article);
};
const videos = () => [...list.querySelectorAll(":scope > article")];

function filtered() {
  const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = videos();
  let count = 0;
  for (const article of all) {
    const text = textOf(article);
    article.hidden = !wanted.every((word) => text.includes(word));
    count += !article.hidden;
  }
  document.getElementById("found").textContent = wanted.length ? `${count} of ${all.length}` : "";
}

const likely = (article) => (article.dataset.likely === undefined ? NaN : Number(article.dataset.likely));
const name = (article) => article.querySelector(".name").textContent;
const order = (a, b) => a.dataset.number - b.dataset.number;
const last = (a, b) => Number(isNaN(likely(a))) - Number(isNaN(likely(b)));
const ORDERS = {
  number: order,
  name: (a, b) => name(a).localeCompare(name(b), undefined, { numeric: true }) || order(a, b),
  likely: (a, b) => last(a, b) || likely(b) - likely(a) || order(a, b),
  unlikely: (a, b) => last(a, b) || likely(a) - likely(b) || order(a, b),
  failed: (a, b) => last(b, a) || order(a, b),
};

const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
const showTheme = () => theme.setAttribute("aria-pressed", String(isDark()));

theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();
stretch.addEventListener("change", () => {
  for (const [canvas, paint] of paints) {
    if (canvas.isConnected) paint();
    else paints.delete(canvas);
  }
});
filter.addEventListener("input", filtered);
filter.form.addEventListener("submit", (event) => event.preventDefault());
sort.addEventListener("change", () => list.append(...videos().sort(ORDERS[sort.value])));
list.addEventListener("click", (event) => {
  const opener = event.target.closest(".opener");
  const top = event.target.closest(".top");
  if (opener) toggle(opener);
  else if (top && String(getSelection()) === "") {
    const own = top.querySelector(".opener");
    if (own) toggle(own);
  }
});
addEventListener("pageshow", () => {
  if (filter.value) filtered(); // the browser kept what was typed
  if (sort.value !== "number") sort.dispatchEvent(new Event("change"));
});

/* The first videos are opened as they come, before those below them are there, so that nothing moves. */

const opened = new WeakSet();
const coming = new MutationObserver(openFirst);
function openFirst() {
  const loading = document.readyState === "loading";
  const first = videos().slice(0, OPEN);
  for (const article of first) {
    if (opened.has(article) || (loading && !article.nextSibling)) continue; // it may not be whole
    opened.add(article);
    const opener = article.querySelector(".opener"); // none of a video that failed
    if (opener) toggle(opener);
  }
  if (!loading || (first.length === OPEN && first.every((article) => opened.has(article)))) coming.disconnect();
}
coming.observe(list, { childList: true });
document.addEventListener("DOMContentLoaded", openFirst);
