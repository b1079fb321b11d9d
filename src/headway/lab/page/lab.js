// The lab: a page is its controls, what it asks of Python, and how it draws the answer. Its state is in the address.

import { ask, h, iconButton, saveCsv, themeButton, toast } from "./kit.js";
import { frontier } from "./frontier.js";
import { request } from "./request.js";
import { sampler } from "./sampler.js";
import { traffic } from "./traffic.js";

const PAGES = { request, sampler, frontier, traffic };
const $ = (id) => document.getElementById(id);

let name = "";
let page = null; // of PAGES
let state = {};
let answer = null;
let shown = null; // what draws this page's answers
let known = { models: [], hardware: [] };

// The state: of a page's controls, what differs from its start in the address

const start = (of) => Object.fromEntries(of.controls.map((control) => [control.name, control.value]));

function read() {
  const [wanted, query] = location.hash.slice(1).split("?");
  const next = wanted in PAGES ? wanted : "request";
  const given = Object.fromEntries(new URLSearchParams(query));
  const before = next === name;
  name = next;
  page = PAGES[name];
  state = start(page);
  for (const control of page.controls) {
    if (!(control.name in given)) continue;
    const text = given[control.name];
    state[control.name] = control.kind === "check" ? text === "true" : typeof control.value === "number" ? Number(text) : text;
  }
  return before;
}

function write() {
  const first = start(page);
  const changed = Object.entries(state).filter(([key, value]) => value !== first[key]);
  const query = new URLSearchParams(changed).toString();
  history.replaceState(null, "", `#${name}${query ? `?${query}` : ""}`);
}

// Controls

const steps = (control) => (control.log ? Math.log(control.max / control.min) : control.max - control.min);
const toSlider = (control, value) => (control.log ? (1000 * Math.log(Math.max(value, control.min) / control.min)) / steps(control) : value);

/** A value of few digits where the slider stands; what it means is for Python to say. */
function fromSlider(control, at) {
  if (!control.log) return Number(at);
  const value = control.min * Math.exp((at / 1000) * steps(control));
  const unit = 10 ** Math.max(0, Math.floor(Math.log10(value)) - 1);
  return control.whole === false ? Number(value.toPrecision(2)) : Math.round(value / unit) * unit;
}

function drawControls() {
  $("title").textContent = page.title;
  $("lead").textContent = page.lead;
  $("presets").replaceChildren(...(page.presets ?? []).map(([text, values]) => h("button", {
    type: "button", onclick: () => { Object.assign(state, start(page), values); drawControls(); changed(); },
  }, text)));
  $("controls").replaceChildren(...page.controls.map(drawControl));
}

function drawControl(control) {
  const id = `c-${control.name}`;
  const set = (value) => { state[control.name] = value; changed(); };
  if (control.kind === "check") {
    const input = h("input", { type: "checkbox", id, checked: state[control.name], onchange: () => set(input.checked) });
    return h("label", { class: "check" }, input, control.label);
  }
  if (control.kind === "select") {
    const options = control.of ? known[control.of] : control.options;
    const input = h("select", { id, onchange: () => set(input.value) },
      options.map((option) => h("option", { value: option, selected: option === state[control.name] }, option || "as stored")));
    return h("label", { class: "field" }, h("span", {}, control.label), input);
  }
  if (control.kind === "text") {
    const input = h("input", { id, value: state[control.name], onchange: () => set(input.value) });
    return h("label", { class: "field" }, h("span", {}, control.label), input);
  }
  const told = h("output", { for: id }, String(state[control.name]));
  const input = h("input", {
    type: "range", id, min: control.log ? 0 : control.min, max: control.log ? 1000 : control.max, step: control.log ? 1 : control.step ?? 1,
    value: toSlider(control, state[control.name]), oninput: () => {
      const value = fromSlider(control, input.value);
      told.textContent = value.toLocaleString("en-US", { maximumFractionDigits: 3 });
      set(value);
    },
  });
  told.textContent = state[control.name].toLocaleString("en-US", { maximumFractionDigits: 3 });
  return h("label", { class: "field" }, h("span", {}, control.label, told), input);
}

// Answers: the newest question goes next, one at a time; of a page that has a sketch, that first, and the whole of what
// was not changed meanwhile

let asking = false;
let again = false;

function changed() {
  write();
  document.body.dataset.open = ""; // a question is
  if (asking) again = true;
  else answerIt();
}

async function answerIt() {
  asking = true;
  do {
    again = false;
    if (page.sketch && answer) await drawAnswer(page.sketch);
    if (!again) await drawAnswer({});
  } while (again);
  asking = false;
  delete document.body.dataset.open;
  document.body.dataset.drawn = name;
}

async function drawAnswer(changes) {
  const asked = page;
  try {
    const response = await ask(`api/${name}?${new URLSearchParams({ ...state, ...changes })}`);
    const found = await response.json();
    if (asked !== page) return;
    answer = found;
    $("problem").hidden = true;
    $("see").textContent = answer.see;
    shown.draw(answer, state);
  } catch (error) {
    $("problem").textContent = error.message;
    $("problem").hidden = false;
  }
}

function open() {
  const same = read();
  for (const link of $("pages").children) link.ariaCurrent = link.dataset.page === name ? "page" : null;
  document.title = `${page.title} · Headway Lab`;
  drawControls();
  if (!same) {
    shown?.close?.();
    $("panels").replaceChildren();
    shown = page.open($("panels"), (values) => { Object.assign(state, values); drawControls(); changed(); });
  }
  changed();
}

$("pages").append(...Object.entries(PAGES).map(([key, one]) => h("a", { href: `#${key}`, dataset: { page: key } }, one.title)));
$("top-end").append(
  h("button", { type: "button", class: "plain", id: "csv", onclick: () => answer && saveCsv(`${name}.csv`, ...page.csv(answer)) }, "CSV"),
  h("button", { type: "button", class: "plain", id: "png", onclick: () => shown?.chart.png(`${name}.png`) }, "PNG"),
  iconButton("copy", "Copy a link to this state", async () => {
    await navigator.clipboard?.writeText(location.href);
    toast("The address of this state is copied");
  }, { id: "link" }), themeButton());
addEventListener("hashchange", open);

known = await (await ask("api/known")).json();
open();
