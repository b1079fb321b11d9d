// A panel of the lab: a heading and what stands under it.

import { h } from "./kit.js";

export function panel(title, ...content) {
  return h("section", { class: "card", "aria-label": title }, h("h2", {}, title), ...content);
}

export function widePanel(title, ...content) {
  const element = panel(title, ...content);
  element.classList.add("wide");
  return element;
}

export const MODEL = { name: "model", label: "Model", kind: "select", of: "models", value: "llama-3.1-8b" };
export const HARDWARE = { name: "hardware", label: "Hardware", kind: "select", of: "hardware", value: "h100-sxm" };
