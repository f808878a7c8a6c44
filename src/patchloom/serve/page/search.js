"use strict";

// The neighbours of an image in the index of `patchloom serve RUN --index INDEX`. Uses the helpers of app.js.

const NEIGHBOURS = 24;

class Search {
  constructor({ images, columns, coarse }) {
    this.root = $("#similar");
    this.find = (selector) => $(selector, this.root);
    Object.assign(this, { columns, coarse, asked: null, urls: [] });
    this.find(".about").textContent = `${images.toLocaleString("en")} images`;
    this.conditioned = false;
    const condition = this.find(".condition");
    condition.hidden = coarse === null;
    condition.textContent = `Prefer the predicted ${coarse}`;
    condition.onclick = () => {
      this.conditioned = !this.conditioned;
      condition.setAttribute("aria-pressed", String(this.conditioned));
      this.run();
    };
    this.find(".home").onclick = () => this.take();
  }

  // The image that was dropped is the query; null: it, else an image of the index.
  take() {
    this.asked = null;
    return this.run();
  }

  pick(neighbour) {
    this.asked = neighbour;
    this.root.scrollIntoView({ block: "nearest" });
    return this.run();
  }

  clear() {
    this.cancel?.abort();
    this.release();
    this.root.hidden = true;
  }

  async run() {
    this.cancel?.abort();
    this.cancel = new AbortController();
    const { signal } = this.cancel;
    this.root.hidden = false;
    this.root.setAttribute("aria-busy", "true");
    this.find(".problem").textContent = "";
    const query = { k: NEIGHBOURS, condition: this.conditioned ? "coarse" : "none" };
    try {
      const found = this.asked ? await this.byKey(query, signal) : await send("api/search", query, signal);
      this.show(found, signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.release();
      this.find(".neighbours").replaceChildren();
      this.find(".votes").textContent = "";
      this.find(".problem").textContent = error.message;
    }
    this.root.removeAttribute("aria-busy");
  }

  byKey(query, signal) {
    const words = new URLSearchParams({ ...query, key: this.asked.key });
    return call(`api/search/key?${words}`, { method: "POST", signal }).then((answer) => answer.json());
  }

  show({ results, knn, timings }, signal) {
    this.release();
    this.showQuery(knn, signal);
    this.find(".neighbours").replaceChildren(...results.map((one) => element("li", {}, this.neighbour(one, signal))));
    this.find(".found-in").textContent = `Found in ${time(timings.total_ms)}.`;
    const [first] = results;
    announce(first ? `${results.length} similar images; the first is ${this.words(first.labels) || first.key}.` : "No similar image.");
  }

  showQuery(knn, signal) {
    const picture = this.find(".query-picture");
    picture.classList.remove("pixelated");
    if (this.asked) this.load(picture, this.asked.key, signal);
    else {
      picture.src = state.image.url;
      picture.onload = () => picture.classList.toggle("pixelated", picture.naturalWidth <= 64);
    }
    this.find(".query-name").textContent = this.asked ? this.asked.key : state.image.name;
    this.find(".home").hidden = this.asked === null;
    const lines = this.columns.map((column) => {
      const [best] = Object.entries(knn[column] ?? {});
      const own = this.asked?.labels[column];
      const votes = best ? `${best[0]} ${percent(best[1])}` : "not known";
      return element(
        "span",
        { className: "vote" },
        element("span", { className: "muted", textContent: `${column} ` }),
        own ? `${own}; by its neighbours ${votes}` : votes,
      );
    });
    this.find(".votes").replaceChildren(...lines);
  }

  neighbour(one, signal) {
    const image = element("img", { alt: "" });
    const button = element(
      "button",
      { type: "button", className: "neighbour", title: `${one.key}: find images similar to this one`, onclick: () => this.pick(one) },
      image,
      element("span", { className: "labels", textContent: this.words(one.labels) || one.key.split("/").pop() }),
      element("span", { className: "score muted", textContent: one.score.toFixed(3) }),
    );
    button.dataset.key = one.key;
    this.load(image, one.key, signal);
    return button;
  }

  words(labels) {
    return this.columns.map((column) => labels[column]).filter(Boolean).join(" · ");
  }

  // Fetched, not linked: an <img> cannot send the token.
  async load(image, key, signal) {
    image.removeAttribute("src");
    try {
      const answer = await call(`api/search/image?${new URLSearchParams({ key })}`, { signal });
      const url = URL.createObjectURL(await answer.blob());
      if (signal.aborted) return URL.revokeObjectURL(url);
      this.urls.push(url);
      image.onload = () => image.classList.toggle("pixelated", image.naturalWidth <= 64);
      image.src = url;
    } catch (error) {
      if (error.name !== "AbortError") image.title = error.message;
    }
  }

  release() {
    for (const url of this.urls.splice(0)) URL.revokeObjectURL(url);
  }
}
