// The panel on the right: the system prompt, how answers are sampled, and a second set to compare with.

import { NUMBERS } from "./generate.js";
import { h, iconButton } from "./kit.js";

export class SettingsPanel {
  /** `chosen`: {a, b, compare}, changed in place; `on`: {changed(), system(text)}. */
  constructor(element, chosen, on) {
    this.element = element;
    this.chosen = chosen;
    this.on = on;
    this.onshow = () => {};
    this._models = [];
    this._system = h("textarea", { id: "system", rows: 4, placeholder: "What the model is told first", oninput: () => on.system(this._system.value) });
    this.#draw();
  }

  get open() { return !this.element.hidden; }

  set system(text) { this._system.value = text; }

  set models(names) {
    this._models = names;
    this.#draw();
  }

  /** Open or close; undefined = stay as it is, but drawn anew. */
  show(open = this.open) {
    this.element.hidden = !open;
    this.#draw();
    this.onshow(open);
  }

  /** What differs from the model's own settings, in a few words. */
  describe(own) {
    return Object.entries(NUMBERS).filter(([name]) => (own[name] ?? "") !== "").map(([name, [text]]) => `${text.split(" (")[0].toLowerCase()} ${own[name]}`).join(", ");
  }

  #draw() {
    this.element.replaceChildren(
      h("h2", {}, "Settings", iconButton("close", "Close settings", () => this.show(false))),
      h("label", { class: "field" }, h("span", {}, "System prompt"), this._system),
      this.#set("a", this.chosen.compare ? "A" : "Sampling"),
      ...(this.chosen.compare ? [this.#set("b", "B")] : []),
      h("p", { class: "note" }, "What is left empty is as the model's makers set it."));
  }

  #set(side, title) {
    const own = this.chosen[side];
    const field = (label, input, wide) => h("label", { class: wide ? "field wide" : "field" }, h("span", {}, label), input);
    const keep = (name, input, value) => { own[name] = value(input); this.on.changed(); };
    const numbers = Object.entries(NUMBERS).map(([name, [label, min, max]]) => {
      const input = h("input", { type: "number", id: `${side}-${name}`, step: "any", min, max, value: own[name] ?? "", placeholder: "–" });
      input.addEventListener("change", () => {
        if (input.reportValidity()) keep(name, input, (it) => it.value);
      });
      return field(label, input, name === "max_tokens");
    });
    const stop = h("textarea", { id: `${side}-stop`, rows: 2, value: own.stop ?? "", placeholder: "One a line" });
    stop.addEventListener("change", () => keep("stop", stop, (it) => it.value));
    const probabilities = h("input", { type: "checkbox", id: `${side}-probabilities`, checked: Boolean(own.probabilities) });
    probabilities.addEventListener("change", () => keep("probabilities", probabilities, (it) => it.checked));
    const model = h("select", { id: `${side}-model` }, this._models.map((name) => h("option", { value: name, selected: name === (own.model ?? this.chosen.a.model) }, name)));
    model.addEventListener("change", () => keep("model", model, (it) => it.value));
    return h("fieldset", {}, h("legend", {}, title), side === "b" ? field("Model", model, true) : null, numbers, field("Stop at", stop, true),
      h("label", { class: "check wide" }, probabilities, "Probabilities of tokens"));
  }
}
