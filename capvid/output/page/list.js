/* The list of videos: unfolding, search, order, keyboard. It follows review.js in the same function. */

const OPEN = 3; // videos that are open at first
const FEW = 4; // segments of each, or one of a long video

/* Videos and segments unfold when they are opened. */

const span = (segment) => (segment.end === null ? "" : range(segment.start, segment.end));

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
    chart.append(make("p", { text: `How much each segment changed the memory of layer ${layer + 1}, at most ${Math.round(100 * most)}%: a tall bar is a segment with much that is new.` }), row);
  }
  return chart;
}

function segments(article, video, place) {
  video.segments.forEach((segment, at) => {
    const inside = make("div", { id: `${place.id}-${at}`, hidden: true });
    const opener = make("button", { type: "button", class: "opener", "aria-expanded": "false", "aria-controls": inside.id });
    const best = segment.captions[0];
    const said = make("span", { class: "said", text: best.text || "(no words)" });
    opener.append(make("span", { class: "when", text: span(segment) }), said);
    opener.unfold = () => new Figure(video, segment, inside).build();
    const facts = best.confidence === null ? [] : [make("p", { class: "facts" }, `confidence ${best.confidence.toFixed(2)}`)];
    if (best.low_confidence) facts[0].append(" \u00b7 ", make("strong", { class: "low", text: "low confidence" }));
    const row = make("div", { class: "review" }, ...facts);
    place.append(make("section", { class: "segment" }, make("h3", {}, opener), row, inside));
    addHost(`${article.dataset.number}.${at}`, said, row, `segment ${at + 1} of ${name(article)}`);
    if (at < (article.classList.contains("long") ? 1 : FEW)) toggle(opener);
  });
  place.append(disclosure("Details of the video", "details", (details) => {
    const { logprob, mean_logprob } = JSON.parse(article.dataset.record).captions[0];
    details.append(make("p", { class: "note", text: likelihood(logprob, mean_logprob) }), timeline(video));
  }));
}

function unfold(article) {
  const video = JSON.parse(article.querySelector("script").textContent);
  video.posterSource = article.querySelector("img.poster")?.src;
  const body = article.querySelector(".body");
  if (video.paragraph) segments(article, video, body);
  else new Figure(video, video.segments[0], body).build();
}

function toggle(opener) {
  const inside = document.getElementById(opener.getAttribute("aria-controls"));
  const open = opener.getAttribute("aria-expanded") !== "true";
  if (open && !inside.hasChildNodes()) (opener.unfold || (() => unfold(opener.closest("article"))))();
  opener.setAttribute("aria-expanded", String(open));
  inside.hidden = !open;
}

/* The list: search, filter, order. */

const search = document.getElementById("filter");
const controls = search.form;
const sort = document.getElementById("sort");
const texts = new Map(); // by number, what each video is found by

/* A function of videos that looks at each only once. */
function cached(compute) {
  const values = new WeakMap();
  return (article) => {
    if (!values.has(article)) values.set(article, compute(article));
    return values.get(article);
  };
}

const name = cached((article) => article.querySelector(".name").textContent);
const textOf = (article) => {
  const { number } = article.dataset;
  if (!texts.has(number)) {
    const parts = [...article.querySelectorAll(".name, .top .caption, .error")];
    texts.set(number, parts.map((part) => part.textContent).join(" ").toLowerCase());
  }
  return texts.get(number);
};
const KEEPS = {
  all: () => true,
  failed: (article) => article.classList.contains("failed"),
  "low-confidence": (article) => article.classList.contains("low-confidence"),
  edited: (article, changed) => changed.has(article.dataset.number),
};

function applyFilter() {
  const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = controls.elements.show.value;
  const keeps = KEEPS[kind];
  const changed = editedNumbers();
  let count = 0;
  for (const article of articles) {
    const text = textOf(article);
    article.hidden = !(keeps(article, changed) && wanted.every((word) => text.includes(word)));
    count += !article.hidden;
  }
  document.getElementById("found").textContent = wanted.length || kind !== "all" ? `${count} of ${articles.length}` : "";
  document.getElementById("nothing").hidden = count > 0 || !articles.length;
}

function showCounts() {
  const changed = editedNumbers();
  for (const [kind, keeps] of Object.entries(KEEPS))
    document.getElementById(`count-${kind}`).textContent = articles.filter((article) => keeps(article, changed)).length;
}

function captionChanged(number) {
  texts.delete(number);
  showCounts();
}

const collator = new Intl.Collator(undefined, { numeric: true });
const measure = (key) => cached(({ dataset }) => (dataset[key] ? Number(dataset[key]) : NaN));
const [likely, confidence] = [measure("likely"), measure("confidence")];
const index = measure("number");
const order = (a, b) => index(a) - index(b);
const last = (a, b) => Number(isNaN(likely(a))) - Number(isNaN(likely(b)));
const unlikely = (a, b) => last(a, b) || likely(a) - likely(b) || order(a, b);
const unmeasured = (a, b) => Number(isNaN(confidence(a))) - Number(isNaN(confidence(b)));
const ORDERS = {
  number: order,
  name: (a, b) => collator.compare(name(a), name(b)) || order(a, b),
  confidence: (a, b) => unmeasured(a, b) || confidence(a) - confidence(b) || unlikely(a, b),
  likely: (a, b) => last(a, b) || likely(b) - likely(a) || order(a, b),
  unlikely,
  failed: (a, b) => last(b, a) || order(a, b),
};
const applyOrder = () => main.append(...[...articles].sort(ORDERS[sort.value]));

search.addEventListener("input", applyFilter);
controls.addEventListener("change", (event) => {
  if (event.target.name === "show") applyFilter();
});
controls.addEventListener("submit", (event) => event.preventDefault());
sort.addEventListener("change", applyOrder);

/* Videos, segments and captions by mouse. */

function startEdit(key) {
  const article = articleOf(key);
  if (article.classList.contains("segmented") && !key.includes(".")) {
    const opener = article.querySelector(".opener");
    if (opener.getAttribute("aria-expanded") === "false") toggle(opener);
    key += ".0";
  }
  edit(key);
}

/* Open a segment that was chosen on the time line. */
function showSegment(mark) {
  const article = mark.closest("article");
  const own = article.querySelector(".opener");
  if (own.getAttribute("aria-expanded") === "false") toggle(own);
  const opener = article.querySelectorAll(".segment > h3 > .opener")[[...mark.parentElement.children].indexOf(mark)];
  if (opener.getAttribute("aria-expanded") === "false") toggle(opener);
  opener.focus({ preventScroll: true });
  const scroll = () => opener.scrollIntoView({ block: "center" });
  scroll();
  requestAnimationFrame(() => requestAnimationFrame(scroll)); // segments that came into sight have another height now
}

main.addEventListener("click", (event) => {
  const mark = event.target.closest(".overview rect");
  const opener = event.target.closest(".opener");
  const row = event.target.closest(".review");
  const top = event.target.closest(".top");
  if (mark) showSegment(mark);
  else if (opener) toggle(opener);
  else if (event.target.closest(".edit")) startEdit(row.dataset.key);
  else if (event.target.closest(".revert")) {
    setCaption(row.dataset.key, null);
    row.querySelector(".edit").focus();
  } else if (top && !event.target.closest("form, button, .overview") && String(getSelection()) === "") {
    const own = top.querySelector(".opener");
    if (own) toggle(own);
  }
});

/* The keyboard: stops are videos and the segments of open ones. */

const STOPS = "article:not([hidden]) > .top .opener, article.failed:not([hidden]), article:not([hidden]) > .body:not([hidden]) > .segment > h3 > .opener";
let stop = null; // the last one

function currentStop() {
  const inside = document.activeElement.closest?.(".segment, article");
  if (inside) stop = inside.querySelector(".opener") || inside;
  return stop;
}

function move(step) {
  const stops = [...main.querySelectorAll(STOPS)];
  const at = stops.indexOf(currentStop());
  const next = stops[at < 0 ? 0 : at + step];
  if (!next) return;
  if (next.matches(".failed")) next.tabIndex = -1;
  next.focus({ preventScroll: true });
  (next.closest(".top, h3") || next).scrollIntoView({ block: "nearest" });
  stop = next;
}

function leave() {
  const stop = document.activeElement === search ? null : currentStop();
  if (stop && stop !== document.activeElement) stop.focus();
  else document.activeElement.blur();
}

function editCurrent() {
  const current = currentStop();
  const article = current?.closest("article");
  if (!article || article.hidden || article.matches(".failed")) return;
  const row = (current.closest(".segment") || article.querySelector(".top")).querySelector(".review");
  if (row.dataset.key) startEdit(row.dataset.key); // none before the page is complete
}

const KEYS = {
  "/": () => {
    search.focus();
    search.select();
  },
  j: () => move(1),
  k: () => move(-1),
  e: editCurrent,
};

/* Keys that follow typing at once belong to the text, such as the rest of a sentence after an Enter that saved it:
they are no shortcuts, and press no button. Escape and Tab end the typing. */

const TYPING_PAUSE = 700; // milliseconds
let lastTyped = -Infinity;
const isTextField = (element) => element.matches("textarea, [type=search]");
const isPlain = (event) => event.key && !(event.ctrlKey || event.metaKey || event.altKey || event.isComposing);

for (const kind of ["keydown", "keyup", "input"]) {
  const guard = (event) => {
    if (event.key === "Escape" || event.key === "Tab") lastTyped = -Infinity;
    else if (isTextField(event.target)) lastTyped = event.timeStamp;
    else if (event.timeStamp - lastTyped < TYPING_PAUSE && isPlain(event) && (event.key.length === 1 || event.key === "Enter")) {
      lastTyped = event.timeStamp;
      event.preventDefault();
      event.stopImmediatePropagation();
    }
  };
  addEventListener(kind, guard, { capture: true });
}

addEventListener("keydown", (event) => {
  if (!isPlain(event)) return;
  const target = document.activeElement;
  const typing = isTextField(target) || target.matches("select");
  const arrow = target.matches(STOPS) && { ArrowDown: KEYS.j, ArrowUp: KEYS.k }[event.key];
  const action = arrow || (event.key === "Escape" ? leave : typing ? undefined : KEYS[event.key]);
  if (!action) return;
  event.preventDefault();
  action();
});

/* Light or dark. */

const theme = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
const showTheme = () => theme.setAttribute("aria-pressed", String(isDark()));

theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();

/* The first videos are opened as they come, before those below them are there, so that nothing moves. */

const opened = new WeakSet();
const coming = new MutationObserver(openFirst);
function openFirst() {
  const loading = document.readyState === "loading";
  const first = [...main.querySelectorAll(":scope > article")].slice(0, OPEN);
  for (const article of first) {
    if (opened.has(article) || (loading && !article.nextSibling)) continue; // it may not be whole
    opened.add(article);
    const opener = article.querySelector(".opener"); // none of a video that failed
    if (opener) toggle(opener);
  }
  if (!loading || (first.length === OPEN && first.every((article) => opened.has(article)))) coming.disconnect();
}
coming.observe(main, { childList: true });

document.addEventListener("DOMContentLoaded", () => {
  openFirst();
  articles = [...main.querySelectorAll(":scope > article")];
  restore();
  for (const key of [...hosts.keys()]) showHost(key); // segments of the first videos
  for (const article of articles.filter((each) => !each.matches(".failed")))
    addHost(article.dataset.number, article.querySelector(".caption bdi"), article.querySelector(".top .review"), name(article));
  showCounts();
  showEdits();
});
addEventListener("pageshow", () => {
  applyFilter(); // the browser may keep what was typed and chosen
  if (sort.value !== "number") applyOrder();
});
