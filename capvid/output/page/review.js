/* Corrected captions: the editor, edits that outlive a reload, and downloads. It follows figure.js in the same function.

A caption is named by its key: "3" for that of video number 3, "3.0" for that of its first segment. */

const main = document.getElementById("videos");
const edits = new Map(); // texts by key
const hosts = new Map(); // by key, where a caption is shown and edited
let downloaded = true; // whether the last download has every edit
let articles = []; // by number

const articleOf = (key) => articles[key.split(".")[0]] || main.querySelector(`[data-number="${key.split(".")[0]}"]`);
const recordOf = (key) => JSON.parse(articleOf(key).dataset.record);

function original(key) {
  const at = key.split(".")[1];
  const record = recordOf(key);
  return at === undefined ? record.captions[0].text : record.segments[at].caption;
}

/* The text of a video from those of its segments, a sentence each, as capvid joins them. */
function paragraph(texts) {
  return texts.filter(Boolean).map(([first, ...rest]) => `${first.toUpperCase()}${rest.join("").replace(/\.$/, "")}.`).join(" ");
}

/* A caption that a person wrote has no probabilities. */
const written = (text) => ({ text, logprob: null, mean_logprob: null, words: [], edited: true });

/* The record of a video with its edits. */
function corrected(number) {
  const record = recordOf(number);
  if (edits.has(number)) record.captions[0] = written(edits.get(number));
  let changed = false;
  for (const [at, segment] of (record.segments || []).entries()) {
    const text = edits.get(`${number}.${at}`);
    if (text === undefined) continue;
    segment.caption = text;
    segment.captions[0] = written(text);
    changed = true;
  }
  if (changed) {
    const { prefix = "", suffix = "" } = record.settings;
    record.captions[0] = written(prefix + paragraph(record.segments.map((segment) => segment.caption)) + suffix);
  }
  return record;
}

const editedNumbers = () => new Set([...edits.keys()].map((key) => key.split(".")[0]));

/* Storage: none in some browsers for pages that are opened as files. */

const storageKey = () => `capvid ${document.getElementById("digest").value}`;

function store() {
  try {
    if (edits.size) localStorage.setItem(storageKey(), JSON.stringify({ downloaded, edits: [...edits] }));
    else localStorage.removeItem(storageKey());
  } catch {} // then edits last as long as the page
}

function restore() {
  try {
    const stored = JSON.parse(localStorage.getItem(storageKey()));
    for (const [key, text] of stored.edits) edits.set(String(key), String(text));
    downloaded = stored.downloaded;
  } catch {} // nothing stored, or no storage
}

/* Each caption has a host: its text, and below it a row of facts and buttons. */

function addHost(key, text, row, label) {
  row.dataset.key = key;
  hosts.set(key, { text, row, label });
  showHost(key);
}

function showHost(key) {
  const { text, row, label } = hosts.get(key);
  const [number, at] = key.split(".");
  const segmented = at === undefined && articleOf(key).classList.contains("segmented");
  const changed = segmented ? editedNumbers().has(number) : edits.has(key);
  if (changed || text.dataset.changed) text.textContent = (segmented ? corrected(number).captions[0].text : edits.get(key) ?? original(key)) || "(no words)";
  text.dataset.changed = changed ? "yes" : "";
  for (const old of row.querySelectorAll(".edit, .edited, .revert, .was")) old.remove();
  row.append(make("button", { type: "button", class: "edit", text: "Edit", "aria-label": `Edit ${segmented ? "the segments" : "the caption"} of ${label}` }));
  if (!changed) return;
  row.append(make("span", { class: "edited", text: "edited" }));
  if (segmented) return;
  row.append(make("button", { type: "button", class: "revert", text: "Revert", "aria-label": `Revert the caption of ${label}` }));
  row.append(make("p", { class: "was" }, "The model wrote: ", make("bdi", { text: original(key) || "(no words)" })));
}

/* Store the text of a caption; that of the model is no edit. */
function setCaption(key, text) {
  if (text === null || text === original(key)) edits.delete(key);
  else edits.set(key, text);
  downloaded = false;
  store();
  showHost(key);
  const number = key.split(".")[0];
  if (number !== key) showHost(number);
  captionChanged(number);
  showEdits();
}

function showEdits() {
  document.getElementById("edits").textContent = edits.size ? `${edits.size} edited${downloaded ? ", downloaded" : ""}` : "";
}

/* The editor: Enter saves, Escape leaves the caption as it was. */

function edit(key) {
  const { text, row, label } = hosts.get(key);
  const open = row.querySelector(".editor");
  if (open) {
    open.elements.text.focus();
    return;
  }
  const field = make("textarea", { name: "text", rows: 2, required: true, text: edits.get(key) ?? original(key), "aria-label": `Caption of ${label}` });
  const form = make("form", { class: "editor" }, field);
  const cancel = make("button", { type: "button", text: "Cancel" });
  form.append(make("div", {}, make("button", { text: "Save" }), cancel, make("span", { class: "note", text: "Enter saves, Escape cancels" })));
  const leave = () => {
    form.remove();
    const opener = text.closest(".opener") || text.closest(".top").querySelector(".opener");
    opener.focus();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const clean = field.value.replace(/[\s\p{Cc}]+/gu, " ").trim();
    field.value = clean;
    if (!form.reportValidity()) return;
    leave();
    setCaption(key, clean.toWellFormed?.() ?? clean);
  });
  cancel.addEventListener("click", leave);
  form.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    event.stopPropagation();
    if (event.key === "Escape") leave();
    else if (event.key === "Enter" && event.target === field) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  row.append(form);
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length); // nothing is selected that typing would replace
}

const unsaved = () => [...document.querySelectorAll(".editor textarea")].some((field) => field.value !== field.defaultValue);

addEventListener("beforeunload", (event) => {
  if (navigator.userActivation?.hasBeenActive === false) return; // browsers ask nothing then, and edits are stored
  if ((edits.size && !downloaded) || unsaved()) event.preventDefault();
});

/* Downloads: JSON Lines of all videos, or a text file per captioned video in a ZIP archive. */

const UNPRINTABLE = "\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"; // as capvid's writers escape them
const hex = (text, digits) => text.charCodeAt(0).toString(16).padStart(digits, "0");
const escapeJson = (text) => text.replace(new RegExp(`[${UNPRINTABLE}]`, "g"), (each) => `\\u${hex(each, 4)}`);
const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
const escapeLine = (text) =>
  text.replace(new RegExp(`[\\0-\\x1f${UNPRINTABLE}]`, "g"), (each) => NAMED[each] || (each < "\u0100" ? `\\x${hex(each, 2)}` : `\\u${hex(each, 4)}`));

function jsonLines() {
  const changed = editedNumbers();
  return articles.map((article, number) => `${changed.has(String(number)) ? escapeJson(JSON.stringify(corrected(String(number)))) : article.dataset.record}\n`);
}

/* A relative path that any system can unpack. */
function safePath(path) {
  const parts = path.replace(/^[a-z][a-z0-9+.-]*:\/\//i, "").split(/[\\/]+/);
  return parts.map((part) => part.replace(new RegExp(`[\\0-\\x1f<>:"|?*${UNPRINTABLE}]`, "g"), "_").replace(/[. ]+$/, "")).filter(Boolean).join("/") || "video";
}

/* The names of text files: unique, also where upper and lower case are one. A suffix stays where it tells two apart. */
function textNames(paths) {
  const shorten = (path) => path.replace(/(?<=[^/])\.[^./]+$/, "");
  const counts = new Map();
  for (const path of paths.map((each) => shorten(each).toLowerCase())) counts.set(path, (counts.get(path) || 0) + 1);
  const taken = new Set();
  return paths.map((path) => {
    const base = counts.get(shorten(path).toLowerCase()) > 1 ? path : shorten(path);
    let name = `${base}.txt`;
    for (let copy = 2; taken.has(name.toLowerCase()); copy++) name = `${base}-${copy}.txt`;
    taken.add(name.toLowerCase());
    return name;
  });
}

function sidecars() {
  const records = articles.map((_, number) => corrected(String(number))).filter((record) => record.status === "ok");
  const names = textNames(records.map((record) => safePath(record.video)));
  return records.map((record, at) => [names[at], record.captions.map((caption) => `${escapeLine(caption.text)}\n`).join("")]);
}

const CRC = Uint32Array.from({ length: 256 }, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});
const checksum = (bytes) => ~bytes.reduce((crc, byte) => CRC[(crc ^ byte) & 255] ^ (crc >>> 8), ~0) >>> 0;

/* Little-endian numbers, given as pairs of a number and its bytes. */
function packed(...fields) {
  const bytes = [];
  for (const [value, size] of fields) for (let at = 0; at < size; at++) bytes.push((value / 256 ** at) & 255);
  return Uint8Array.from(bytes);
}

/* The parts of an uncompressed ZIP archive of texts. */
function zip(files) {
  const encoder = new TextEncoder();
  const [parts, directory] = [[], []];
  let [offset, size] = [0, 0];
  for (const [name, text] of files) {
    const [path, data] = [encoder.encode(name), encoder.encode(text)];
    // Version 2.0, names in UTF-8, no compression, 1 January 1980.
    const common = [[20, 2], [0x800, 2], [0, 2], [0, 2], [0x21, 2], [checksum(data), 4], [data.length, 4], [data.length, 4], [path.length, 2], [0, 2]];
    const local = packed([0x04034b50, 4], ...common);
    const central = packed([0x02014b50, 4], [20, 2], ...common, [0, 2], [0, 2], [0, 2], [0, 4], [offset, 4]);
    parts.push(local, path, data);
    directory.push(central, path);
    offset += local.length + path.length + data.length;
    size += central.length + path.length;
  }
  const end = packed([0x06054b50, 4], [0, 4], [files.length, 2], [files.length, 2], [size, 4], [offset, 4], [0, 2]);
  return [...parts, ...directory, end];
}

function download(suffix, type, parts) {
  const page = decodeURIComponent(location.pathname).split("/").pop().replace(/\.html?$/i, "") || "captions";
  const link = make("a", { href: URL.createObjectURL(new Blob(parts, { type })), download: `${page}${suffix}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  downloaded = true;
  store();
  showEdits();
}

document.getElementById("jsonl").addEventListener("click", () => download(".jsonl", "application/jsonl", jsonLines()));
document.getElementById("zip").addEventListener("click", () => download(".zip", "application/zip", zip(sidecars())));
