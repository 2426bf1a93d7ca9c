/* One segment, or a whole video: its frames and, behind "Details", charts of what each word looked at. */

const SCALE = 10000; // weights are whole numbers of this fraction
const HEAT = getComputedStyle(document.documentElement).getPropertyValue("--heat").match(/\d+/g).map(Number);
const ALIGNED = 16; // frames at most that stand above their columns; more have small ones there, too
const MINIS = 32;
const KINDS = {
  write_text: ["Writing words", "The memory slots that the sentence so far is written to"],
  read_attention: ["Reading for attention", "The memory slots that decide which frames to look at"],
  write_visual: ["Writing frames", "The memory slots that what was seen is written to"],
  read_decoder: ["Reading for the word", "The memory slots that the next word is made of"],
  states: ["Earlier words", "The states after earlier words that this word is made of, the first before any word"],
  memory: ["Reading the memory", "The memory slots, filled by earlier segments, that this word is made of"],
};

const make = (tag, options = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};
const percent = (weight) => {
  const share = (100 * weight) / SCALE;
  return `${share < 0.95 && share > 0 ? share.toFixed(1) : Math.round(share)}%`;
};
/* 3.2 as 0:03.2; with hours from one hour on. */
const clock = (value) => {
  const tenths = Math.round(10 * value);
  const [hours, minutes] = [Math.floor(tenths / 36000), Math.floor(tenths / 600) % 60];
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
};
const seconds = (value) => (value < 59.95 ? `${value.toFixed(1)} s` : clock(value));
/* From one time to another. */
const range = (start, end) => (end < 59.95 ? `${start.toFixed(1)}\u2013${seconds(end)}` : `${clock(start)}\u2013${clock(end)}`);
const number = (value) => value === null ? "?" : value.toFixed(2).replace("-", "\u2212");
const across = (count) => Math.ceil(count / Math.ceil(count / ALIGNED)); // tiles in a row, rows being alike
const sum = (row) => row.reduce((a, b) => a + b, 0);
const greatest = (rows) => rows.reduce((most, row) => row.reduce((a, b) => Math.max(a, b), most), 0);
const least = (rows) => rows.reduce((low, row) => (sum(row) ? row.reduce((a, b) => Math.min(a, b), low) : low), SCALE);

/* Strips: a canvas of one pixel for each column, in the strength of its weight. */

function strip(row) {
  const canvas = make("canvas", { width: Math.max(1, row.length), height: 1, "aria-hidden": "true" });
  return make("span", { class: row.length > 64 ? "strip fine" : "strip", "--columns": row.length }, canvas);
}

function paint(canvas, row, [low, high]) {
  const image = new ImageData(canvas.width, 1);
  row.forEach((weight, column) => {
    const strength = high > low ? Math.max(0, (weight - low) / (high - low)) : weight && 1;
    image.data.set([...HEAT, Math.round(255 * strength)], 4 * column);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/* A disclosure whose contents are drawn when it is opened for the first time. */

function disclosure(title, kind, draw) {
  const details = make("details", { class: kind }, make("summary", { text: title }));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) draw(details);
  });
  return details;
}

const likelihood = (logprob, mean) =>
  `Log-probability ${number(logprob)}, ${number(mean)} per word: 0 is certain, and the lower the less likely.`;

class Figure {
  constructor(video, segment, place) {
    this.video = video;
    this.segment = segment;
    this.place = place;
    this.tiles = [];
  }

  build() {
    if (this.video.size && this.segment.thumbnails.length) this.place.append(this.frames());
    this.place.append(disclosure("Details", "details", (details) => this.draw(details)));
  }

  draw(place) {
    const { captions, change, thumbnails } = this.segment;
    this.place = place;
    this.facts = make("p", { class: "note" });
    this.looked = make("p", { class: "looked" });
    this.words = make("div", { class: "words" });
    this.aligned = thumbnails.length <= ALIGNED;
    place.append(...(captions.length > 1 ? [this.choices()] : []), this.facts);
    if (change) {
      const layers = change.map((each) => (each === null ? "?" : `${Math.round(100 * each)}%`)).join(", ");
      place.append(make("p", { class: "note", text: `Memory changed by ${layers}. A large change of a layer means that the segment brought much that is new.` }));
    }
    if (captions[0].traces.attention) {
      const blank = captions[0].traces.blank ? "; blank is the share of no frame" : "";
      place.append(make("p", { class: "note", text: `Each row is a word and each column a frame: the darker, the more the model looked there for this word${blank}.` }));
    }
    place.append(this.looked);
    if (thumbnails.length && (captions[0].traces.attention || !this.video.size)) place.append(this.film());
    place.append(this.words);
    if (Object.keys(captions[0].traces).length) place.append(this.stretching());
    this.show(captions[0]);
  }

  /* Colours from the least to the greatest weight of a caption, instead of from nothing. */
  stretching() {
    this.stretch = make("input", { type: "checkbox", class: "stretch" });
    this.stretch.addEventListener("change", () => this.strips.forEach((repaint) => repaint()));
    return make("label", { class: "stretching" }, this.stretch, " Stretch colours from the least to the greatest weight");
  }

  strip(row, rows) {
    const drawn = strip(row);
    const [low, high] = [least(rows), greatest(rows)];
    const repaint = () => paint(drawn.firstChild, row, [this.stretch.checked ? low : 0, high]);
    repaint();
    this.strips.push(repaint);
    return drawn;
  }

  source(frame) {
    return frame === this.video.poster ? this.video.posterSource : this.video.thumbnails[frame];
  }

  time(column) {
    const { times, until, first } = this.segment;
    if (!times) return `frame ${(first ? first[column] : column) + 1}`;
    return until && until[column] > times[column]
      ? range(times[column], until[column])
      : seconds(times[column]);
  }

  thumbnail(frame, when) {
    const [width, height] = this.video.size || [4, 3];
    const thumbnail = make("span", { class: "thumbnail" });
    if (frame !== null)
      thumbnail.append(make("img", { src: this.source(frame), alt: `Frame at ${when}`, width, height, loading: "lazy", decoding: "async" }));
    return thumbnail;
  }

  /* The frames alone. */
  frames() {
    const shown = this.segment.thumbnails.map((frame, column) => [frame, this.time(column)]).filter(([frame]) => frame !== null);
    const list = make("ol", { class: "film plain", "aria-label": "Frames", "--across": across(shown.length), "--ratio": this.video.size.join(" / ") });
    for (const [frame, when] of shown) list.append(make("li", {}, this.thumbnail(frame, when), make("span", { class: "when", text: when })));
    return list;
  }

  /* The frames with the weight of each. */
  film() {
    const { thumbnails } = this.segment;
    const list = make("ol", {
      class: `film${this.aligned ? " aligned" : ""}${this.video.size ? "" : " bare"}`, "aria-label": "Weights of the frames",
      "--columns": thumbnails.length, "--across": across(thumbnails.length), "--ratio": (this.video.size || [4, 3]).join(" / "),
    });
    thumbnails.forEach((frame, column) => {
      const when = this.time(column);
      const share = make("span", { class: "share" });
      const tile = make("li", {}, this.thumbnail(frame, when), make("span", { class: "bar" }), make("span", { class: "when", text: when }), share);
      this.tiles.push({ tile, share });
      list.append(tile);
    });
    this.list = list;
    return list;
  }

  choices() {
    const group = make("div", { class: "choices", role: "group", "aria-label": "Captions, best first" });
    this.segment.captions.forEach((caption, at) => {
      const button = make("button", { type: "button", "aria-pressed": String(!at), text: `${caption.text || "(no words)"}  ${number(caption.logprob)}` });
      button.addEventListener("click", () => {
        for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
        this.show(caption);
      });
      group.append(button);
    });
    return group;
  }

  show(caption) {
    this.caption = caption;
    this.attention = caption.traces.attention;
    this.facts.textContent = likelihood(caption.logprob, caption.logprob === null ? null : caption.logprob / caption.words.length);
    this.rows = [];
    this.strips = [];
    this.words.replaceChildren();
    this.place.style.setProperty("--blank", caption.traces.blank ? "2.9rem" : "0rem");
    if (this.attention) this.words.append(this.head());
    const group = make("div", { role: "radiogroup", "aria-label": "Words" });
    caption.words.forEach((_, at) => group.append(this.word(at)));
    this.words.append(group);
    const memory = this.memory();
    if (memory) this.words.append(memory);
    this.rows[0].tabIndex = 0;
    this.choose(null);
  }

  head() {
    const { thumbnails, times, until } = this.segment;
    const above = make("div");
    if (this.video.size && !this.aligned && thumbnails.length <= MINIS) {
      const minis = make("div", { class: "minis", "--columns": thumbnails.length, "--ratio": this.video.size.join(" / "), "aria-hidden": "true" });
      for (const frame of thumbnails)
        minis.append(frame === null ? make("span") : make("img", { src: this.source(frame), alt: "", decoding: "async" }));
      above.append(minis);
    }
    const axis = make("div", { class: "axis" });
    if (times && times.length > 1 && !this.aligned)
      axis.append(...[times[0], times[times.length >> 1], (until || times)[times.length - 1]].map((time) => make("span", { text: seconds(time) })));
    above.append(axis);
    const blank = this.caption.traces.blank ? [make("span", { class: "right", text: "blank", title: "The weight of no frame at all" })] : [];
    return make("div", { class: "line head" }, make("span", { class: "text", text: "word" }), make("span", { class: "right", text: "log p" }), above, ...blank);
  }

  word(at) {
    const [text, logprob] = this.caption.words[at];
    const { blank } = this.caption.traces;
    const row = make("button", {
      type: "button", class: "word line", role: "radio", "aria-checked": "false", tabindex: "-1",
      "aria-label": `${text ?? "end of the sentence"}, log-probability ${number(logprob)}${this.attention ? `, ${this.told(this.attention[at])}` : ""}`,
    });
    row.append(make("span", text === null ? { class: "text end", text: "(end)" } : { class: "text", text }), make("span", { class: "right", text: number(logprob) }));
    row.append(this.attention ? this.cells(at) : make("span"));
    if (blank) row.append(make("span", { class: "right", text: percent(blank[at][0]) }));
    row.addEventListener("focus", () => this.choose(at));
    row.addEventListener("click", () => {
      row.focus();
      this.choose(at);
    });
    row.addEventListener("keydown", (event) => this.key(event, at));
    this.rows.push(row);
    return row;
  }

  cells(at) {
    const found = this.strip(this.attention[at], this.attention);
    const columns = this.attention[at].length;
    const over = (event) => {
      const box = found.getBoundingClientRect();
      const column = event ? Math.min(columns - 1, Math.floor((columns * (event.clientX - box.left)) / box.width)) : -1;
      this.tiles.forEach(({ tile }, each) => tile.classList.toggle("under", each === column));
      if (column >= 0) found.title = `${this.time(column)}: ${percent(this.attention[at][column])}`;
    };
    found.addEventListener("pointermove", over);
    found.addEventListener("pointerleave", () => over(null));
    return found;
  }

  key(event, at) {
    const last = this.rows.length - 1;
    const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.rows[Math.min(last, Math.max(0, to))].focus();
    } else if (event.key === "Escape" && this.rows[at].getAttribute("aria-checked") === "true") {
      event.stopPropagation(); // the next one leaves the video
      this.choose(null);
    }
  }

  told(row) {
    const all = sum(row);
    if (!all) return "nothing was looked at yet";
    const best = row.map((weight, column) => [weight, column]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    const rest = all < 0.995 * SCALE ? `; all frames together ${percent(all)}` : "";
    return `looks most at ${best.filter(([weight]) => weight).map(([weight, column]) => `${this.time(column)} (${percent(weight)})`).join(", ")}${rest}`;
  }

  /* The weights of word number `at` on the frames; of all words on average where it is null. */
  choose(at) {
    this.rows.forEach((row, each) => {
      row.setAttribute("aria-checked", String(each === at));
      row.tabIndex = each === (at ?? 0) ? 0 : -1;
    });
    for (const line of this.place.querySelectorAll(".memory .line")) line.classList.toggle("chosen", at !== null && line.dataset.word === String(at));
    if (!this.attention) {
      this.looked.textContent = this.segment.thumbnails.length ? "This captioner does not say what it looked at." : "";
      return;
    }
    const row = at === null ? this.attention[0].map((_, column) => sum(this.attention.map((each) => each[column])) / this.attention.length) : this.attention[at];
    const name = at === null ? "All words, on average" : (this.caption.words[at][0] ?? "(end)");
    this.looked.replaceChildren(make("strong", { text: name }), `: ${this.told(row)}.`, at === null ? " Choose a word to see its own." : "");
    const most = greatest([row]);
    this.tiles.forEach(({ tile, share }, column) => {
      tile.style.setProperty("--weight", most ? (row[column] / most).toFixed(3) : "0");
      tile.classList.toggle("most", most > 0 && row[column] === most);
      share.textContent = percent(row[column]);
    });
    if (at !== null && this.list && this.list.scrollWidth > this.list.clientWidth) {
      const tile = this.tiles[row.indexOf(most)].tile;
      this.list.scrollLeft = tile.offsetLeft - this.list.offsetLeft - (this.list.clientWidth - tile.clientWidth) / 2;
    }
  }

  memory() {
    const others = Object.entries(this.caption.traces).filter(([name]) => name !== "attention" && name !== "blank");
    if (!others.length) return null;
    const title = others.some(([name]) => name === "states") ? "States that each word is made of" : "Memory, word by word";
    return disclosure(title, "memory", (details) => details.append(this.blocks(others)));
  }

  blocks(traces) {
    const blocks = make("div", { class: "blocks" });
    const chosen = this.rows.findIndex((row) => row.getAttribute("aria-checked") === "true");
    for (const [name, rows] of traces) {
      const [title, note] = KINDS[name] || [name.replaceAll("_", " "), ""];
      const columns = rows[0].length;
      const block = make("section", { class: columns < 6 ? "narrow" : "" }, make("h4", { text: title }));
      block.append(make("p", { class: "note", text: `${note ? `${note}; ` : ""}${columns === 1 ? "1 slot" : `${columns} slots`}, at most ${percent(greatest(rows))}.` }));
      rows.forEach((row, at) => {
        const most = greatest([row]);
        const told = `${this.caption.words[at][0] ?? "end"}: most at slot ${row.indexOf(most) + 1}, ${percent(most)}`;
        const drawn = this.strip(row, rows);
        drawn.setAttribute("role", "img");
        drawn.setAttribute("aria-label", told);
        drawn.title = told;
        block.append(make("div", { class: at === chosen ? "line chosen" : "line", "data-word": at }, make("span", { text: this.caption.words[at][0] ?? "(end)" }), drawn));
      });
      blocks.append(block);
    }
    return blocks;
  }
}
