"use strict";

// The page of `patchloom serve`: an image goes to each pane's model; what comes back is drawn in canvases.

const $ = (selector, inside = document) => inside.querySelector(selector);
const CIVIDIS = ramp("00224e002e6a1a386f32436d434e6c535a6d61656f6f70737d7c788c88789b9476aba072bcae6ccdbb63dec958f0d846fee838");
const MAPS = {
  "class-attention": "Class attention", rollout: "Rollout", pooling: "Pooling", "per-class": "Class map",
  "cross-patch": "Cross-patch", "grad-cam": "Grad-CAM", occlusion: "Occlusion",
};
const OF_A_CLASS = ["grad-cam", "occlusion"]; // these explain one class, the others the whole answer

const state = { models: [], panes: [], image: null, search: null };

// Colours

function ramp(hex) {
  const stops = hex.match(/../g).map((pair) => parseInt(pair, 16));
  const last = stops.length / 3 - 1;
  return Uint8ClampedArray.from({ length: 256 * 3 }, (_, i) => {
    const place = (Math.floor(i / 3) / 255) * last;
    const below = Math.min(Math.floor(place), last - 1);
    const [low, high] = [stops[below * 3 + (i % 3)], stops[below * 3 + 3 + (i % 3)]];
    return Math.round(low + (high - low) * (place - below));
  });
}

async function picture(base64) {
  const image = new Image();
  image.src = `data:image/png;base64,${base64}`;
  await image.decode();
  return image;
}

// A grey map drawn at the size of the canvas, then coloured: smoothing greys first keeps the colours on the scale.
// As a veil over the image it is thinner where the map is low.
async function drawMap(canvas, base64, width, height, veil = false) {
  const image = await picture(base64);
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const place = pixels.data[i] * 3;
    pixels.data[i] = CIVIDIS[place];
    pixels.data[i + 1] = CIVIDIS[place + 1];
    pixels.data[i + 2] = CIVIDIS[place + 2];
    pixels.data[i + 3] = veil ? 110 + (145 * place) / 765 : 255;
  }
  context.putImageData(pixels, 0, 0);
}

// Requests

async function call(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  if (answer.status === 401) {
    // another request may have asked meanwhile; then its token is tried first
    if (sessionStorage.getItem("token") === token) await askForToken(token ? "That token is wrong." : "");
    return call(path, options);
  }
  if (!answer.ok) {
    const reply = await answer.json().catch(() => ({}));
    throw new Error(reply.error || `The server answered ${answer.status}.`);
  }
  return answer;
}

function send(path, query, signal) {
  const body = new FormData();
  body.append("file", state.image.blob, "image");
  const words = new URLSearchParams(query);
  return call(`${path}?${words}`, { method: "POST", body, signal }).then((answer) => answer.json());
}

let asking = null;

// Resolves when a token was given, fails when the dialog is closed without one.
function askForToken(problem) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = $("#ask");
    let given = false;
    const done = () => {
      const token = $("#token").value.trim();
      if (!/^[\x20-\x7e]+$/.test(token)) {
        $("#ask-problem").textContent = token ? "A token has ASCII letters, digits and signs only." : "Type the token.";
        return;
      }
      sessionStorage.setItem("token", token);
      given = true;
      dialog.close();
    };
    $("#ask-problem").textContent = problem;
    $("#ask-done").onclick = done;
    dialog.onkeydown = (event) => {
      if (event.key === "Enter" && event.target === $("#token")) done();
      if (event.key === "Escape") dialog.close();
    };
    dialog.onclose = () => {
      asking = null;
      if (given) resolve();
      else reject(new Error("Without its token the service does not answer. Choose an image to be asked again."));
    };
    dialog.showModal();
    $("#token").select();
  });
  return asking;
}

function announce(text) {
  $("#live").textContent = text;
}

function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}

// A pane: one model looking at the image

class Pane {
  constructor(model) {
    this.root = $("#pane").content.firstElementChild.cloneNode(true);
    this.find = (selector) => $(selector, this.root);
    this.select = this.find(".model");
    this.select.append(...state.models.map(({ name }) => new Option(name, name)));
    this.select.onchange = () => this.choose(this.select.value);
    this.find(".opacity").oninput = () => this.mix();
    this.find(".layers").onkeydown = (event) => this.walk(event);
    this.mix();
    this.choose(model);
  }

  choose(name) {
    this.model = state.models.find((model) => model.name === name);
    this.select.value = name;
    this.root.setAttribute("aria-label", `What ${name} sees`);
    this.root.classList.toggle("plain", this.model.maps.length === 0);
    const { architecture, parameters, image_size: size, classes } = this.model;
    const count = parameters >= 1e6 ? `${(parameters / 1e6).toFixed(1)} million` : `${Math.round(parameters / 1e3)} thousand`;
    this.find(".about").textContent =
      `${architecture} · ${count} parameters · ${size[1]} × ${size[0]} pixels · ${classes.length} classes`;
    if (state.image) this.run();
  }

  mix() {
    this.find(".overlay").style.opacity = this.find(".opacity").value / 100;
  }

  // What is no longer looked at is not waited for: the server drops it.
  stop() {
    this.cancel?.abort();
    this.looking?.abort();
  }

  look() {
    this.looking?.abort();
    this.looking = new AbortController();
    return this.looking.signal;
  }

  begin() {
    this.stop();
    this.cancel = new AbortController();
    Object.assign(this, { maps: new Map(), shown: null, pinned: null, picked: null, photo: null, laid: null, busy: null });
    this.root.classList.add("working");
    this.find(".pane-problem").textContent = "";
    this.find(".caption").textContent = "";
    this.find(".classes").replaceChildren(...[1, 2, 3].map(() => element("li", { className: "skeleton" })));
    this.find(".chips").replaceChildren();
    this.find(".layers").replaceChildren();
    this.find(".heads-card").hidden = true;
    this.find(".timings").textContent = "";
    this.showTrust();
    this.find(".overlay").width = 1;
    this.preview();
    return this.cancel.signal;
  }

  // The middle of the image, until the very pixels that the network saw are there.
  async preview() {
    const canvas = this.find(".photo");
    canvas.width = canvas.height = 448;
    const bitmap = await createImageBitmap(state.image.blob).catch(() => null); // a format that browsers do not read
    if (!bitmap || this.photo) return;
    const side = Math.min(bitmap.width, bitmap.height);
    const [left, top] = [(bitmap.width - side) / 2, (bitmap.height - side) / 2];
    canvas.getContext("2d").drawImage(bitmap, left, top, side, side, 0, 0, 448, 448);
  }

  // Classes first, then the model's own maps, then how far the one that is shown can be trusted.
  async run() {
    const signal = this.begin();
    const model = this.model.name;
    try {
      const reply = await send("api/predict", { model, top: 5 }, signal);
      this.showClasses(reply);
      if (!this.model.maps.length) return this.finish(reply); // a network of another library: nothing to explain
      const own = this.model.maps.filter((name) => name !== "occlusion").join(",");
      const seen = await send("api/explain", { model, maps: own, faithfulness: false }, signal);
      this.showTimings(reply.timings, seen.timings);
      await this.showStage(seen);
      this.finish(reply);
    } catch (error) {
      this.fail(error);
    }
  }

  finish({ predictions: [best] }) {
    this.root.classList.remove("working");
    announce(`${this.model.name} predicts ${best.class}, ${percent(best.probability)}.`);
  }

  fail(error) {
    if (error.name === "AbortError") return;
    this.root.classList.remove("working");
    for (const row of this.root.querySelectorAll(".skeleton")) row.remove();
    this.find(".pane-problem").textContent = error.message;
    this.busy = null;
    if (this.shown && !this.maps.get(this.shown).png) this.clear("");
    this.showChips();
    this.showTrust();
  }

  showClasses({ predictions, timings }) {
    this.best = predictions[0].class;
    const rows = predictions.map(({ class: name, probability }) => {
      const fill = element("i");
      const button = element(
        "button",
        { type: "button", className: "class-row", onclick: () => this.pickClass(name) },
        element("span", { className: "name", textContent: name, title: name }),
        element("span", { className: "chance", textContent: percent(probability) }),
        element("span", { className: "bar" }, fill),
      );
      button.setAttribute("aria-pressed", "false");
      button.dataset.name = name;
      requestAnimationFrame(() => (fill.style.width = `${100 * probability}%`));
      return element("li", {}, button);
    });
    this.find(".classes").replaceChildren(...rows);
    this.showTimings(timings);
  }

  async showStage(seen) {
    this.photo = await picture(seen.image);
    const { width, height } = this.photo;
    const canvas = this.find(".photo");
    canvas.width = width;
    canvas.height = height;
    canvas.classList.toggle("pixelated", width <= 64);
    canvas.getContext("2d").drawImage(this.photo, 0, 0);
    this.find(".stage").style.aspectRatio = `${width} / ${height}`;
    this.showHeads(seen.layers);
    this.takeMaps(seen);
    const name = "occlusion"; // takes many passes: only when it is asked for
    if (this.model.maps.includes(name)) this.maps.set(name, { name, label: nameOf(name), target: seen.target, about: this.best });
    await this.show(this.maps.keys().next().value);
  }

  takeMaps({ maps, faithfulness, target }) {
    for (const { name, png } of maps) {
      const own = name.startsWith("per-class: ");
      const about = own ? name.slice(11) : OF_A_CLASS.includes(name) ? target : null;
      const id = own || about === null || about === this.best ? name : `${name}: ${about}`;
      const label = own ? `Class map: ${about}` : nameOf(name) + (id === name ? "" : `: ${about}`);
      this.maps.set(id, { name, png, label, target: own ? about : target, about, faith: faithfulness[name] ?? this.maps.get(id)?.faith });
    }
    this.showChips();
    this.showTrust();
  }

  showChips() {
    const held = document.activeElement?.dataset?.map;
    const chips = [...this.maps].map(([id, { label, png }]) => {
      const chip = element("button", { type: "button", className: "quiet", textContent: label, onclick: () => this.show(id) });
      chip.dataset.map = id;
      chip.setAttribute("aria-pressed", String(id === this.shown));
      chip.setAttribute("aria-busy", String(id === this.busy && !png));
      return chip;
    });
    const box = this.find(".chips");
    const inside = box.contains(document.activeElement);
    box.replaceChildren(...chips);
    if (inside) chips.find((chip) => chip.dataset.map === held)?.focus();
  }

  async show(id) {
    this.unpin();
    if (this.shown === id && this.busy === id) return this.back();
    const signal = this.look();
    this.shown = this.busy = id;
    const map = this.maps.get(id);
    this.picked = map.about;
    for (const row of this.root.querySelectorAll(".class-row"))
      row.setAttribute("aria-pressed", String(row.dataset.name === this.picked));
    this.find(".pane-problem").textContent = "";
    this.showChips();
    this.showTrust();
    try {
      if (!map.png) {
        this.clear(`${map.label} …`);
        await this.fetchMap(map, false, signal);
      }
      if (!this.pinned) await this.lay(this.maps.get(id).png, map.label);
      if (!this.maps.get(id).faith) await this.fetchMap(map, true, signal); // only what is looked at is measured
      if (this.shown === id) this.busy = null;
    } catch (error) {
      this.fail(error);
    }
  }

  async fetchMap({ name, target, about }, faithfulness, signal) {
    const query = { model: this.model.name, maps: name.split(": ")[0], target: about ?? target, faithfulness };
    this.takeMaps(await send("api/explain", query, signal));
  }

  async lay(png, words) {
    const large = Math.max(1, Math.ceil(448 / this.photo.width));
    this.laid = png;
    const draft = document.createElement("canvas");
    await drawMap(draft, png, this.photo.width * large, this.photo.height * large, true);
    if (this.laid !== png) return; // another one was asked for meanwhile
    const overlay = this.find(".overlay");
    overlay.width = draft.width;
    overlay.height = draft.height;
    overlay.getContext("2d").drawImage(draft, 0, 0);
    this.find(".caption").textContent = words;
    this.find(".stage").setAttribute("aria-label", `The image with a map laid over it: ${words}`);
  }

  clear(words) {
    this.laid = null;
    this.find(".overlay").width = 1;
    this.find(".caption").textContent = words;
  }

  back() {
    const map = this.maps.get(this.shown);
    if (this.pinned) this.lay(this.pinned.png, this.pinned.words);
    else if (map?.png) this.lay(map.png, map.label);
    else if (map) this.clear(this.busy ? `${map.label} …` : ""); // still in the making, or failed
  }

  async pickClass(name) {
    if (!this.photo) return;
    if (this.picked === name) return this.show(this.maps.keys().next().value);
    const map = this.model.per_class ? "per-class" : "grad-cam";
    const id = this.model.per_class ? `per-class: ${name}` : name === this.best ? map : `${map}: ${name}`;
    try {
      if (!this.maps.has(id)) {
        this.busy = null;
        await this.fetchMap({ name: map, about: name }, false, this.look());
      }
      announce(`Where ${this.model.name} finds ${name}.`);
      await this.show(id);
    } catch (error) {
      this.fail(error);
    }
  }

  // Heads

  showHeads(layers) {
    this.find(".heads-card").hidden = layers.length === 0;
    const rows = layers.map(({ name, heads }) => {
      const buttons = heads.map((png, i) => this.headButton(png, `${layerName(name)}, head ${i + 1}`));
      return element("div", { className: "layer" }, element("span", { textContent: layerName(name) }), element("div", { className: "heads" }, ...buttons));
    });
    this.find(".layers").replaceChildren(...rows);
    const first = this.find(".head");
    if (first) first.tabIndex = 0;
  }

  headButton(png, words) {
    const canvas = document.createElement("canvas");
    drawMap(canvas, png, 56, 56);
    const button = element("button", { type: "button", className: "head", title: words, tabIndex: -1 }, canvas);
    button.setAttribute("aria-label", words);
    button.setAttribute("aria-pressed", "false");
    button.onpointerenter = button.onfocus = () => this.lay(png, words);
    button.onpointerleave = button.onblur = () => this.back();
    button.onclick = () => {
      const was = this.pinned?.button === button;
      this.unpin();
      if (was) return;
      this.pinned = { png, words, button };
      button.setAttribute("aria-pressed", "true");
      this.lay(png, words);
    };
    return button;
  }

  unpin() {
    this.pinned?.button.setAttribute("aria-pressed", "false");
    this.pinned = null;
  }

  walk(event) {
    const heads = [...this.root.querySelectorAll(".head")];
    const here = heads.indexOf(document.activeElement);
    const across = document.activeElement.parentElement?.children.length ?? 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -here, End: heads.length - 1 - here };
    if (here < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const next = heads[Math.min(heads.length - 1, Math.max(0, here + steps[event.key]))];
    heads[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  // Trust

  showTrust() {
    const verdict = this.find(".verdict");
    const gauges = this.find(".gauges");
    gauges.replaceChildren();
    const map = this.maps?.get(this.shown);
    const faith = map?.faith;
    if (!faith) {
      verdict.className = "verdict muted";
      verdict.textContent = map && !map.png ? "Computing it …" : "Measuring it against random maps …";
      if (this.find(".pane-problem").textContent) {
        const again = () => (this.shown ? this.show(this.shown) : this.run());
        const button = element("button", { type: "button", className: "quiet again", textContent: "Try again", onclick: again });
        verdict.replaceChildren("It was not measured. ", button);
      }
      return;
    }
    verdict.className = "verdict";
    const [mood, head, words] = inWords(faith.verdict, map.target);
    verdict.replaceChildren(element("b", { className: mood, textContent: head }), ` ${words}`);
    const { deletion, insertion, random } = faith;
    const most = 1.2 * Math.max(0.02, deletion, insertion, ...Object.values(random).map(({ mean, std }) => mean + 2 * std));
    gauges.append(
      gauge("Blurred first", "less is better", deletion, random.deletion, most),
      gauge("Shown first", "more is better", insertion, random.insertion, most),
    );
  }

  showTimings(reply, seen) {
    const parts = [`Answered in ${time(reply.total_ms)}: decoding ${time(reply.decode_ms)}, waiting ${time(reply.queue_ms)}, network ${time(reply.model_ms)}`];
    if (seen) parts.push(`maps ${time(seen.total_ms)}`);
    this.find(".timings").textContent = `${parts.join(" · ")}.`;
  }
}

// Words

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const time = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function nameOf(map) {
  const [name, ...rest] = map.split(": ");
  return [MAPS[name] ?? name, ...rest].join(": ");
}

function layerName(name) {
  const [path, which] = name.split(": ");
  const [, stage, number] = path.match(/^(blocks|pool)\.(\d+)/) ?? [];
  const plain = stage ? `${stage === "blocks" ? "Block" : "Reading layer"} ${Number(number) + 1}` : path;
  const branch = path.match(/branches\.(\d+)/);
  return plain + (branch && Number(branch[1]) ? ` / ${Number(branch[1]) + 1}` : "") + (which ? `, ${which}` : "");
}

function inWords(verdict, target) {
  if (verdict.startsWith("better") && verdict.includes("only"))
    return ["unsure", "Partly.", `For “${target}” it beats random maps of the same smoothness ${verdict.includes("deletion") ? "when its pixels are blurred, not when they are shown" : "when its pixels are shown, not when they are blurred"} first.`];
  if (verdict.startsWith("better"))
    return ["good", "Yes.", `The pixels it marks matter for “${target}”: it beats random maps of the same smoothness both ways.`];
  if (verdict.startsWith("worse"))
    return ["bad", "No.", `Random maps of the same smoothness find what matters for “${target}” better.`];
  return ["bad", "No.", `For “${target}” it does no better than random maps of the same smoothness.`];
}

// How much of the class is there while pixels go or come: the map as a mark, random maps as a band of two deviations.
function gauge(words, wish, value, random, most) {
  const band = element("span", { className: "band" });
  const mark = element("span", { className: "mark" });
  const clip = (share) => Math.min(1, Math.max(0, share / most));
  const [low, high] = [clip(random.mean - 2 * random.std), clip(random.mean + 2 * random.std)];
  band.style.left = `${100 * low}%`;
  band.style.width = `${Math.max(0.5, 100 * (high - low))}%`;
  mark.style.left = `${100 * clip(value)}%`;
  const figures = `${value.toFixed(2)}, random ${random.mean.toFixed(2)} ± ${random.std.toFixed(2)}`;
  const line = element(
    "div",
    { className: "gauge-words" },
    element("span", {}, element("b", { textContent: words }), `, ${wish}`),
    element("span", { textContent: figures }),
  );
  return element("div", { className: "gauge" }, line, element("div", { className: "track", ariaHidden: "true" }, band, mark));
}

// The image

async function take(blob, name) {
  if (state.image) URL.revokeObjectURL(state.image.url);
  state.image = { blob, name, url: URL.createObjectURL(blob) };
  const intake = $("#intake");
  intake.classList.remove("empty");
  const thumb = $("#thumb");
  thumb.hidden = false;
  thumb.src = state.image.url;
  thumb.classList.remove("pixelated");
  thumb.onload = () => thumb.classList.toggle("pixelated", thumb.naturalWidth <= 64);
  $("#headline").textContent = name;
  $("#subline").textContent = `${size(blob.size)}. Drop, paste or choose another at any time.`;
  $("#choose").textContent = "Choose another";
  $("#problem").textContent = "";
  const { image } = state;
  // one small question first: a file that is not an image gets one message, not one in each pane
  try {
    await loadModels(); // they may still be on their way
    if (state.image !== image) return;
    if (state.models.length) await send("api/predict", { model: state.panes[0]?.model.name ?? state.models[0].name, top: 1 });
    else if (!state.search) throw new Error("This model has no classes. To search with it, start the server with --index INDEX.");
  } catch (error) {
    if (state.image === image) refuse(error.message);
    return;
  }
  if (state.image !== image) return; // another one came meanwhile
  state.search?.take();
  if (!state.models.length) return;
  if (!state.panes.length) addPane(state.models[0].name);
  else for (const pane of state.panes) pane.run();
}

function refuse(text) {
  $("#thumb").hidden = true;
  $("#problem").textContent = text;
  state.search?.clear();
  for (const pane of state.panes.splice(0)) pane.stop();
  $("#panes").replaceChildren();
  $("#panes").classList.remove("two");
  $("#compare").setAttribute("aria-pressed", "false");
  state.image = null;
}

const size = (bytes) => (bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1e3))} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

function addPane(model) {
  const pane = new Pane(model);
  state.panes.push(pane);
  $("#panes").append(pane.root);
}

function compare() {
  const two = state.panes.length < 2;
  if (two) {
    const other = state.models.find(({ name }) => name !== state.panes[0]?.model.name);
    if (!state.panes.length) addPane(state.models[0].name);
    addPane(other.name);
  } else {
    const last = state.panes.pop();
    last.stop();
    last.root.remove();
  }
  $("#panes").classList.toggle("two", two);
  $("#compare").setAttribute("aria-pressed", String(two));
}

async function showSamples() {
  const { samples } = await call("api/samples").then((answer) => answer.json());
  const box = $("#samples");
  for (const { name, label, pixelated } of samples) {
    const blob = await call(`api/samples/${encodeURIComponent(name)}`).then((answer) => answer.blob());
    const image = element("img", { src: URL.createObjectURL(blob), alt: label, className: pixelated ? "pixelated" : "" });
    const button = element("button", { type: "button", className: "sample", title: label, onclick: () => take(blob, label) }, image);
    box.append(button);
  }
  box.hidden = samples.length === 0;
}

function listen() {
  $("#choose").onclick = () => $("#file").click();
  $("#file").onchange = (event) => {
    const [file] = event.target.files;
    if (file) take(file, file.name);
    event.target.value = "";
  };
  $("#compare").onclick = compare;
  document.addEventListener("paste", (event) => {
    const [file] = event.clipboardData.files;
    if (file) take(file, file.name || "Pasted image");
  });
  let depth = 0;
  const dragging = (change) => {
    depth = Math.max(0, depth + change);
    document.body.classList.toggle("dragging", depth > 0);
  };
  document.addEventListener("dragenter", (event) => (event.preventDefault(), dragging(1)));
  document.addEventListener("dragleave", () => dragging(-1));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    dragging(-depth);
    const [file] = event.dataTransfer.files;
    if (file) take(file, file.name);
  });
}

let loading = null;

// Once; after a failure the next call tries again.
function loadModels() {
  loading ??= call("api/models")
    .then((answer) => answer.json())
    .then(({ models, index }) => {
      state.models = models.filter(({ classes }) => classes.length); // others are for search alone
      $("#compare").hidden = state.models.length < 2;
      if (index) {
        state.search = new Search(index);
        if (!state.image) $("#headline").textContent = "Drop an image to find similar ones";
      }
      showSamples().catch((error) => ($("#problem").textContent = error.message));
    })
    .catch((error) => {
      loading = null;
      throw error;
    });
  return loading;
}

function start() {
  $("#intake").classList.add("empty");
  listen();
  loadModels().catch((error) => ($("#problem").textContent = error.message));
}

start();
