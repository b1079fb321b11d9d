// The chat page: conversations on the left, the thread, the composer, settings on the right.

import { AnswerView, userTurn } from "./answers.js";
import { bodyOf, generate } from "./generate.js";
import { ask, askKey, copyText, h, icon, iconButton, saveFile, themeButton, toast } from "./kit.js";
import { SettingsPanel } from "./settings.js";
import { Store, add, asMarkdown, branch, messages, newId, parentOf, path, settings, siblings } from "./store.js";

const MOST_FILE = 512 * 1024; // bytes of a file that is attached
const SUGGESTIONS = ["Explain how a KV cache works, in five sentences.", "Write a haiku about waiting in a queue.", "What is 17 × 23? Show your steps."];

const $ = (id) => document.getElementById(id);
const store = new Store();
const chosen = { a: {}, b: {}, compare: false, ...settings.load() };
let current = store.all[0] ?? store.create();
let files = []; // to go with the next message: {name, text}
let views = new Map(); // of the answers shown, by node
const running = new Map(); // node id -> AbortController

// What is shown

function showHistory() {
  $("conversations").replaceChildren(...store.all.map((one) => h("li", {},
    h("button", { type: "button", "aria-current": one === current ? "true" : undefined, title: one.title, onclick: () => open(one) }, one.title),
    iconButton("bin", `Delete “${one.title}”`, () => remove(one)))));
}

function showThread() {
  const thread = $("thread");
  views = new Map();
  const turns = path(current);
  if (!turns.length) {
    thread.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "What shall it be?"),
      h("p", { class: "note" }, "Everything you write goes to this server, and is kept in this browser only."),
      h("div", { class: "suggestions" }, SUGGESTIONS.map((text) => h("button", { type: "button", onclick: () => send(text) }, text)))));
    return;
  }
  thread.replaceChildren(...turns.map((node) => (node.role === "user" ? user(node) : answers(node))));
}

/** Versions of a turn: answers that were asked for together count as one. */
function groups(node) {
  const found = new Map();
  for (const one of siblings(current, node)) found.set(one.pair ?? one.id, [...(found.get(one.pair ?? one.id) ?? []), one]);
  return [...found.values()];
}

function stepper(node) {
  const all = groups(node);
  const which = all.findIndex((group) => group.includes(node));
  const step = (by) => {
    parentOf(current, node).active = all[which + by][0].id;
    store.save();
    showThread();
  };
  return { place: [which, all.length], step };
}

function user(node) {
  const { place, step } = stepper(node);
  return userTurn(node, place, { step, edit: () => editTurn(node), branch: () => open(branch(store, current, node)) });
}

function answers(node) {
  const group = groups(node).find((one) => one.includes(node));
  const elements = group.map((one) => {
    const { place, step } = stepper(node);
    const above = parentOf(current, one);
    const view = new AnswerView(one, one === group[0] ? place : [0, 1], {
      step,
      copy: () => copyText(one.content),
      retry: () => answer(above),
      edit: () => editTurn(one),
      branch: () => { above.active = one.id; open(branch(store, current, one)); },
      chosen: () => group.length > 1 && above.active === one.id,
      choose: group.length > 1 ? () => { above.active = one.id; store.save(); showThread(); } : null,
    });
    views.set(one.id, view);
    return view.element;
  });
  return elements.length > 1 ? h("div", { class: "pair" }, elements) : elements[0];
}

function editTurn(node) {
  const article = $("thread").querySelector(`[data-id="${node.id}"]`);
  const field = h("textarea", { value: node.shown ?? node.content, rows: 4, "aria-label": "Edit the text" });
  const form = h("form", {
    class: "composer", onsubmit: (event) => {
      event.preventDefault();
      const parent = node.parent ? current.nodes[node.parent] : null;
      const text = field.value;
      if (node.role === "user") answer(add(current, parent, { role: "user", ...composed(text, node.files ?? []) }));
      else add(current, parent, { role: "assistant", content: text, model: node.model, note: "edited" });
      store.save();
      showThread();
    },
  }, field, h("div", { class: "row" }, h("button", { type: "button", onclick: showThread }, "Cancel"),
    h("button", { class: "primary" }, node.role === "user" ? "Send" : "Keep")));
  article.replaceChildren(form);
  field.focus();
}

function showComposer() {
  const busy = running.size > 0;
  $("composer-end").replaceChildren(busy
    ? h("button", { type: "button", class: "primary", id: "stop", "aria-label": "Stop", title: "Stop", onclick: stop }, icon("stop"))
    : h("button", { class: "primary", id: "send", "aria-label": "Send", title: "Send" }, icon("send")));
  $("files").replaceChildren(...files.map((file) => h("span", { class: "chip" }, file.name,
    iconButton("close", `Leave out ${file.name}`, () => { files = files.filter((one) => one !== file); showComposer(); }))));
}

const atEnd = () => $("thread").scrollHeight - $("thread").scrollTop - $("thread").clientHeight < 80;
const toEnd = () => { $("thread").scrollTop = $("thread").scrollHeight; };

// What happens

function open(conversation) {
  current = conversation;
  $("history").classList.remove("open");
  panel.system = conversation.system;
  showHistory();
  showThread();
  toEnd();
}

function remove(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  store.remove(conversation);
  open(conversation === current ? store.all[0] ?? store.create() : current);
}

/** What a message says with files: what is shown, and what is sent. */
function composed(text, attached) {
  const quoted = attached.map((file) => {
    const fence = "`".repeat(Math.max(3, ...(file.text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `${file.name}:\n${fence}\n${file.text}\n${fence}`;
  });
  return attached.length ? { content: [...quoted, text].join("\n\n"), shown: text, files: attached } : { content: text };
}

function send(text) {
  if ((!text.trim() && !files.length) || running.size) return;
  const turns = path(current);
  if (!turns.length) current.title = (text.trim() || files[0].name).slice(0, 60);
  const node = add(current, turns.at(-1) ?? null, { role: "user", ...composed(text, files) });
  files = [];
  $("prompt").value = "";
  resize();
  answer(node);
}

/** Ask for an answer to a user's turn, or for two with settings of their own. */
async function answer(node) {
  const sides = chosen.compare ? ["A", "B"] : [null];
  const pair = chosen.compare ? newId() : undefined;
  const asked = messages(current, node);
  const conversation = current;
  const nodes = sides.map((side) => {
    const own = side === "B" ? chosen.b : chosen.a;
    const model = (side === "B" && chosen.b.model) || chosen.a.model;
    const body = bodyOf(model, asked, own);
    return { body, node: add(conversation, node, { role: "assistant", content: "", model, side, pair, note: panel.describe(own) }) };
  });
  node.active = nodes[0].node.id;
  showHistory();
  for (const { node: one } of nodes) { one.running = true; running.set(one.id, new AbortController()); }
  showThread();
  showComposer();
  toEnd();
  await Promise.all(nodes.map(({ node: one, body }) => stream(one, body)));
  if (!store.save()) toast("This browser has no room left for conversations: delete some");
  $("status").textContent = "The answer is complete.";
}

async function stream(node, body) {
  let due = false;
  const show = () => {
    due = false;
    const follow = atEnd();
    views.get(node.id)?.update();
    if (follow) toEnd();
  };
  try {
    await generate(node, body, running.get(node.id).signal, () => {
      if (!due) { due = true; requestAnimationFrame(show); }
    });
  } catch (error) {
    node.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
  running.delete(node.id);
  delete node.running;
  showComposer();
  show();
}

function stop() {
  for (const controller of running.values()) controller.abort();
}

async function attach(list) {
  for (const file of list) {
    const text = file.size <= MOST_FILE ? await file.text() : null;
    if (text === null) toast(`${file.name} is larger than ${MOST_FILE / 1024} kB`);
    else if (text.includes("\u0000")) toast(`${file.name} is no text`);
    else files.push({ name: file.name, text });
  }
  showComposer();
}

function resize() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

// Set up

const panel = new SettingsPanel($("settings"), chosen, {
  changed: () => settings.save(chosen),
  system: (text) => { current.system = text; store.save(); },
});
panel.system = current.system;

const modelSelect = h("select", {
  id: "model", "aria-label": "Model", onchange: () => { chosen.a.model = modelSelect.value; settings.save(chosen); },
});

async function loadModels() {
  try {
    const names = (await (await ask("v1/models")).json()).data.map((model) => model.id);
    if (!names.includes(chosen.a.model)) chosen.a.model = names[0];
    if (!names.includes(chosen.b.model)) delete chosen.b.model;
    modelSelect.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen.a.model }, name)));
    panel.models = names;
  } catch (error) {
    toast(error.status === 401 ? "Without a key there is no model to talk to" : `No models: ${error.message}`);
  }
}

function exportAs(kind) {
  const name = current.title.replace(/[^\w-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "chat";
  if (kind === "md") saveFile(`${name}.md`, asMarkdown(current), "text/markdown");
  else saveFile(`${name}.json`, JSON.stringify(current, null, 2), "application/json");
}

const exports = h("select", {
  id: "export", "aria-label": "Export this conversation", title: "Export this conversation",
  onchange: () => { exportAs(exports.value); exports.value = ""; },
}, h("option", { value: "" }, "Export"), h("option", { value: "md" }, "Markdown"), h("option", { value: "json" }, "JSON, all branches"));

const compare = iconButton("columns", "Two settings side by side", () => {
  chosen.compare = !chosen.compare;
  compare.setAttribute("aria-pressed", String(chosen.compare));
  settings.save(chosen);
  panel.show(chosen.compare || undefined);
}, { id: "compare", "aria-pressed": String(chosen.compare) });
const gear = iconButton("gear", "Settings", () => panel.show(!panel.open), { id: "show-settings", "aria-expanded": "false", "aria-controls": "settings" });
panel.onshow = (open) => gear.setAttribute("aria-expanded", String(open));

$("top-end").append(modelSelect, exports, compare, gear,
  iconButton("key", "API key", async () => { if (await askKey()) loadModels(); }, { id: "key" }), themeButton());
$("show-history").append(icon("menu"));
$("show-history").addEventListener("click", () => {
  $("show-history").setAttribute("aria-expanded", String($("history").classList.toggle("open")));
});
$("new-chat").append(icon("plus"), "New chat");
$("new-chat").addEventListener("click", () => {
  open(store.all.find((one) => !Object.keys(one.nodes).length) ?? store.create());
  $("prompt").focus();
});
$("composer-start").append(iconButton("clip", "Attach a text file", () => $("file-input").click(), { id: "attach" }));
$("file-input").addEventListener("change", async () => { await attach($("file-input").files); $("file-input").value = ""; });
$("composer").addEventListener("submit", (event) => { event.preventDefault(); send($("prompt").value); });
$("prompt").addEventListener("input", resize);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send($("prompt").value); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
for (const [kind, on] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); document.body.classList.toggle("dropping", on); });
}
document.addEventListener("drop", (event) => attach(event.dataTransfer.files));

showHistory();
showThread();
showComposer();
loadModels();
