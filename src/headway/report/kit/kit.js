// What all pages share: elements, the theme, figures as text, files to keep, the key, server-sent events.

export const ROOT = new URL("..", import.meta.url); // of the server, also behind a proxy's path

/** An element. `props`: properties, `class`, `on*` handlers, and attributes for names with a dash. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const ICONS = {
  send: "M5 12h13M12 5l7 7-7 7", stop: "M7 7h10v10H7z", retry: "M4 12a8 8 0 1 0 2.6-5.9M4 4v4.5h4.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4", copy: "M9 9h10v10H9zM5 15V5h10", branch: "M6 4v16M6 14c6 0 12-1 12-8M18 3v3",
  left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6", plus: "M12 5v14M5 12h14", clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7L9.4 17a1.7 1.7 0 0 1-2.4-2.4l7.6-7.6",
  gear: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4", bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  menu: "M4 7h16M4 12h16M4 17h16", close: "M6 6l12 12M18 6L6 18", theme: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  key: "M14 10a4 4 0 1 0-4 4l1-1 2 2v2h2v2h4v-4l-6-6", columns: "M4 5h16v14H4zM12 5v14", bars: "M5 19v-6M10 19V9M15 19V5M20 19v-9",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** A button that shows an icon only; `label` is what it is called. */
export function iconButton(name, label, onclick, props = {}) {
  return h("button", { type: "button", class: "plain", title: label, "aria-label": label, onclick, ...props }, icon(name));
}

// Theme: the system's, until the button says otherwise

export function themeButton() {
  const kept = localStorage.getItem("headway.theme");
  if (kept) document.documentElement.dataset.theme = kept;
  return iconButton("theme", "Light or dark", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("headway.theme", root.dataset.theme);
    dispatchEvent(new Event("themechange"));
  });
}

/** A colour of tokens.css as it is now, for a canvas, which knows no variables. */
export function colour(name) {
  const probe = h("i", { hidden: true });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Figures as text

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size < 1e-3) return `${digits(seconds * 1e6)} µs`;
  if (size < 1) return `${digits(seconds * 1e3)} ms`;
  if (size < 120) return `${digits(seconds)} s`;
  return size < 7200 ? `${digits(seconds / 60)} min` : `${digits(seconds / 3600)} h`;
}

/** Three significant digits, without an exponent below a million. */
export function digits(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 999.5) return Math.round(value).toLocaleString("en-US");
  if (size === 0) return "0";
  const places = Math.max(0, 2 - Math.floor(Math.log10(size)));
  return places > 6 ? value.toExponential(2) : String(Number(value.toFixed(places)));
}

export const dollars = (value) => (value >= 0.01 || value === 0 ? `$${value.toFixed(2)}` : `$${value.toPrecision(2)}`);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (Math.abs(value) >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${digits(value)} ${units[place]}`;
}

export const percent = (share) => `${digits(100 * share)} %`;

// Files

export function saveFile(name, content, type = "text/plain") {
  const link = h("a", { href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function saveCsv(name, head, rows) {
  const cell = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  saveFile(name, [head, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n", "text/csv");
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch { // pages that came over plain HTTP from another machine may not
    toast("This browser does not let the page copy; select the text instead");
  }
}

let toastTimer = 0;

export function toast(text) {
  document.querySelector(".toast")?.remove();
  document.body.append(h("div", { class: "toast", role: "status" }, text));
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => document.querySelector(".toast")?.remove(), 4000);
}

// The server

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask the server; a wrong or missing key is asked of the person, once per try.
 *  Throws ServerError with the server's own sentence. */
export async function ask(path, options = {}) {
  for (;;) {
    const key = localStorage.getItem("headway.key");
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(new URL(path, ROOT), { ...options, headers });
    if (response.status === 401 && (await askKey(Boolean(key)))) continue;
    if (response.ok) return response;
    let message = `the server answered ${response.status}`;
    try {
      message = (await response.json()).error.message;
    } catch { /* not JSON: the status must do */ }
    throw new ServerError(response.status, message);
  }
}

let asking = null;

/** Ask for a key -> whether one was given. Several callers share one question. */
export function askKey(wrong = false) {
  asking ??= new Promise((resolve) => {
    const input = h("input", { type: "password", autocomplete: "off", required: true, id: "key-input" });
    const dialog = h("dialog", { id: "key-dialog", "aria-labelledby": "key-title" },
      h("form", { method: "dialog" },
        h("div", {},
          h("h2", { id: "key-title" }, "This server asks for a key"),
          h("p", { class: "note" }, wrong ? "The key that this browser kept was refused." : "It stays in this browser.")),
        h("label", { class: "field" }, h("span", {}, "API key"), input),
        h("div", { class: "row" },
          h("button", { type: "button", value: "", onclick: () => dialog.close("") }, "Not now"),
          h("button", { class: "primary", value: "ok" }, "Use this key"))));
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" && input.value.trim();
      if (given) localStorage.setItem("headway.key", given);
      dialog.remove();
      asking = null;
      resolve(Boolean(given));
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

/** The data of server-sent events, one after the other, until the stream ends. */
export async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const lines = buffer.slice(0, end).split("\n");
      buffer = buffer.slice(end + 2);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
