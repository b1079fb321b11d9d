// How turns of a conversation look: what was said, its figures and receipt, its tokens with their probabilities.

import { digits, dollars, duration, h, iconButton, percent } from "./kit.js";
import { render } from "./markdown.js";

/** A user's turn. `actions`: {edit, branch, step(by)}; `place`: [which, of how many] versions. */
export function userTurn(node, place, actions) {
  return h("article", { class: "user", "aria-label": "You", dataset: { id: node.id } },
    h("div", { class: "said" }, node.shown ?? node.content),
    (node.files ?? []).map((file) => h("details", {}, h("summary", { class: "note" }, file.name), h("pre", { tabIndex: 0 }, file.text))),
    h("div", { class: "foot" }, versions(place, actions), h("span", { class: "tools" },
      iconButton("edit", "Edit", actions.edit), iconButton("branch", "Branch into a new chat", actions.branch))));
}

/** An assistant's turn, which `update` shows anew as it grows. */
export class AnswerView {
  constructor(node, place, actions) {
    this.node = node;
    this.actions = actions;
    this.place = place;
    this.asTokens = false;
    this.said = h("div", { class: "said" });
    this.thought = h("details", { class: "thought", hidden: true }, h("summary", {}, "Reasoning"), h("div"));
    this.foot = h("div", { class: "foot" });
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    const side = node.side ? [h("strong", {}, node.side)] : [];
    this.element = h("article", { class: "assistant", "aria-label": node.side ? `Answer ${node.side}` : "Answer", dataset: { id: node.id } },
      h("div", { class: "who" }, side, h("span", {}, node.model ?? ""), node.note ? h("span", {}, node.note) : null,
        actions.choose ? h("button", { type: "button", class: "plain choose", onclick: actions.choose }, "Go on with this one") : null),
      this.thought, this.said, this.problem, this.foot);
    this.update();
  }

  update() {
    const { node } = this;
    this.element.classList.toggle("running", Boolean(node.running));
    this.element.classList.toggle("chosen", Boolean(this.actions.chosen?.()));
    this.thought.hidden = !node.thought;
    if (node.thought) this.thought.lastChild.textContent = node.thought;
    if (this.asTokens && node.tokens?.length) showTokens(this.said, node.tokens);
    else {
      if (this.said.className !== "said") { this.said.className = "said"; this.said.replaceChildren(); this.said.rendered = []; }
      render(this.said, node.content);
    }
    this.problem.hidden = !node.error;
    this.problem.textContent = node.error ?? "";
    if (!node.running) this.foot.replaceChildren(...this.#tools());
  }

  #tools() {
    const { node, actions } = this;
    const toggle = node.tokens?.length ? iconButton("bars", "Probabilities of the tokens", () => {
      this.asTokens = !this.asTokens;
      this.update();
    }, { "aria-pressed": String(this.asTokens) }) : null;
    return [numbers(node), versions(this.place, actions), h("span", { class: "tools" },
      iconButton("copy", "Copy", actions.copy), toggle, iconButton("retry", "Retry", actions.retry),
      iconButton("edit", "Edit", actions.edit), iconButton("branch", "Branch into a new chat", actions.branch)), bill(node)].filter(Boolean);
  }
}

function versions([which, many], actions) {
  if (many < 2) return null;
  return h("span", { class: "tools", role: "group", "aria-label": "Versions" },
    iconButton("left", "Version before", () => actions.step(-1), { disabled: which === 0 }),
    h("span", { class: "num" }, `${which + 1}/${many}`),
    iconButton("right", "Version after", () => actions.step(1), { disabled: which === many - 1 }));
}

const ENDS = { stopped: "stopped", length: "cut at the limit", content_filter: "filtered" };

function numbers(node) {
  const { ttft, tpot, usage } = node.stats ?? {};
  const figure = (name, value, title) => h("span", { dataset: { figure: name }, title }, value);
  const parts = [];
  if (ttft !== undefined) parts.push(figure("ttft", `TTFT ${duration(ttft)}`, "Time to first token, as this page saw it"));
  if (tpot !== undefined) parts.push(figure("tpot", `${duration(tpot)}/token`, `Time per output token: ${digits(1 / tpot)} tokens/s`));
  if (usage) {
    parts.push(figure("tokens", `${usage.completion_tokens} tokens`, "Generated"));
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(figure("prompt", `${usage.prompt_tokens} prompt${cached ? `, ${cached} cached` : ""}`, "Tokens of the prompt"));
    if (usage.receipt?.dollars !== undefined) parts.push(figure("cost", dollars(usage.receipt.dollars), "Its share of the machine"));
  }
  if (ENDS[node.finish]) parts.push(h("span", { class: "warn" }, ENDS[node.finish]));
  return h("span", { class: "numbers" }, parts);
}

const LINES = { queue_ms: "Waited", prefill_ms: "Prefill, its share", decode_ms: "Decode, its share", stalls_ms: "Longer because of others" };

function bill(node) {
  const receipt = node.stats?.usage?.receipt;
  if (!receipt) return null;
  const line = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  return h("details", { class: "bill" }, h("summary", {}, "Receipt"), h("dl", {},
    Object.entries(LINES).map(([name, text]) => line(text, duration(receipt[name] / 1000))),
    line("Tokens computed", receipt.computed_tokens), line("Tokens from the cache", receipt.cached_tokens),
    line("Machine time", duration(receipt.machine_seconds)),
    receipt.dollars === undefined ? [] : line("Dollars", dollars(receipt.dollars))));
}

// Tokens and their probabilities

const shade = (p) => (p > 0.9 ? "" : p > 0.6 ? "p1" : p > 0.3 ? "p2" : p > 0.1 ? "p3" : "p4");

function showTokens(element, tokens) {
  if (element.count === tokens.length && element.className === "tokens") return;
  element.className = "tokens";
  element.count = tokens.length;
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", "Tokens; the arrow keys step through them");
  element.replaceChildren(...tokens.map((token) => {
    const span = h("span", { class: shade(Math.exp(token.logprob)), onmouseenter: () => tip(span, token), onmouseleave: closeTip }, token.text.replaceAll("\n", "↵\n"));
    return span;
  }));
  let at = -1;
  element.onkeydown = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    element.children[at]?.classList.remove("at");
    at = Math.max(0, Math.min(tokens.length - 1, at + by));
    element.children[at].classList.add("at");
    tip(element.children[at], tokens[at]);
  };
  element.onblur = closeTip;
}

function closeTip() {
  document.querySelector(".tip")?.remove();
}

function tip(span, token) {
  closeTip();
  const top = token.top.some(([text]) => text === token.text) ? token.top : [...token.top, [token.text, token.logprob]];
  const rows = top.map(([text, logprob]) => {
    const p = Math.exp(logprob);
    return h("tr", { class: text === token.text ? "chosen" : "" },
      h("td", {}, JSON.stringify(text).slice(1, -1)), h("td", {}, percent(p)), h("td", {}, h("meter", { value: p, "aria-label": "probability" })));
  });
  const box = h("div", { class: "tip", role: "status" }, h("table", {}, h("tbody", {}, rows)));
  document.body.append(box);
  const at = span.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  box.style.top = `${at.bottom + size.height + 8 > innerHeight ? at.top - size.height - 6 : at.bottom + 6}px`;
}

