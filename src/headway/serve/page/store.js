// Conversations, kept in this browser and nowhere else. One is a tree: to edit or retry adds a branch beside the old.
//
//   conversation {id, title, at, system, root: children ids, nodes: {id: node}}
//   node {id, parent, role, content, children, active, ...}     `active`: which child the path goes on with

const KEY = "headway.conversations";
const SETTINGS = "headway.settings";
const MOST = 200; // conversations

export const newId = () => crypto.randomUUID?.() ?? `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export const settings = {
  load: () => read(SETTINGS, {}),
  save: (value) => localStorage.setItem(SETTINGS, JSON.stringify(value)),
};

export class Store {
  constructor() {
    this.all = read(KEY, []);
  }

  /** -> whether the browser had room. What is shown of single tokens is not kept: it is large. */
  save() {
    this.all.sort((a, b) => b.at - a.at);
    this.all.length = Math.min(this.all.length, MOST);
    const kept = this.all.filter((one) => Object.keys(one.nodes).length);
    try {
      localStorage.setItem(KEY, JSON.stringify(kept, (name, value) => (name === "tokens" ? undefined : value)));
      return true;
    } catch {
      return false;
    }
  }

  create(system = "") {
    const conversation = { id: newId(), title: "New chat", at: Date.now(), system, root: { children: [], active: null }, nodes: {} };
    this.all.unshift(conversation);
    return conversation;
  }

  remove(conversation) {
    this.all = this.all.filter((one) => one !== conversation);
    this.save();
  }

  find = (id) => this.all.find((one) => one.id === id);
}

/** Where a node hangs: its parent, or the conversation's root. */
export const parentOf = (conversation, node) => (node.parent ? conversation.nodes[node.parent] : conversation.root);

export function add(conversation, parent, fields) {
  const node = { id: newId(), parent: parent?.id ?? null, children: [], active: null, ...fields };
  conversation.nodes[node.id] = node;
  const above = parentOf(conversation, node);
  above.children.push(node.id);
  above.active = node.id;
  conversation.at = Date.now();
  return node;
}

/** The nodes that are shown, from the first to the last. */
export function path(conversation, until = null) {
  const found = [];
  let place = conversation.root;
  while (place.active) {
    place = conversation.nodes[place.active];
    found.push(place);
    if (place === until) break;
  }
  return found;
}

export const siblings = (conversation, node) => parentOf(conversation, node).children.map((id) => conversation.nodes[id]);

/** What an API takes as messages: the path down to `node`. */
export function messages(conversation, node) {
  const turns = path(conversation, node).map(({ role, content }) => ({ role, content }));
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...turns] : turns;
}

/** A conversation of its own that begins as this one does, down to `node`. */
export function branch(store, conversation, node) {
  const copy = store.create(conversation.system);
  let last = null;
  for (const { id, parent, children, active, ...fields } of path(conversation, node)) last = add(copy, last, structuredClone(fields));
  copy.title = `${conversation.title} (branch)`;
  return copy;
}

export function asMarkdown(conversation) {
  const said = path(conversation).map((node) => `## ${node.role === "user" ? "You" : node.model ?? "Assistant"}\n\n${node.content}\n`);
  const system = conversation.system.trim() ? [`## System\n\n${conversation.system}\n`] : [];
  return [`# ${conversation.title}\n`, ...system, ...said].join("\n");
}
