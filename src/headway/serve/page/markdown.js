// Markdown as elements. The library only parses; every text becomes a text node, never markup, so that what a model
// says cannot run, load or look like anything but itself. Links open elsewhere, pictures are shown as links.

import { copyText, h } from "./kit.js";
import { lexer } from "./marked.js";

const SAFE = /^(https?:|mailto:)/i;

/** Show `text` in `element`; what has not changed since the last call is left as it is, as a stream wants it. */
export function render(element, text) {
  const tokens = lexer(text, { gfm: true, breaks: true }).filter((token) => token.type !== "space");
  const known = element.rendered ?? [];
  let same = 0;
  while (same < known.length && same < tokens.length && known[same] === tokens[same].raw) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...tokens.slice(same).map(block));
  element.rendered = tokens.map((token) => token.raw);
}

const BLOCKS = {
  heading: (token) => h(`h${Math.min(6, token.depth + 2)}`, {}, inline(token.tokens)),
  paragraph: (token) => h("p", {}, inline(token.tokens)),
  text: (token) => h("span", {}, inline(token.tokens ?? [token])),
  code: (token) => code(token.text, token.lang),
  blockquote: (token) => h("blockquote", {}, blocks(token.tokens)),
  hr: () => h("hr"),
  list: (token) => h(token.ordered ? "ol" : "ul", token.ordered && token.start ? { start: token.start } : {},
    token.items.map((item) => h("li", {},
      item.task ? h("input", { type: "checkbox", checked: item.checked, disabled: true, "aria-label": item.text }) : null,
      blocks(item.tokens)))),
  table: (token) => h("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" }, h("table", { class: "data" },
    h("thead", {}, h("tr", {}, token.header.map((cell) => h("th", {}, inline(cell.tokens))))),
    h("tbody", {}, token.rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, inline(cell.tokens)))))))),
};

const INLINE = {
  strong: (token) => h("strong", {}, inline(token.tokens)),
  em: (token) => h("em", {}, inline(token.tokens)),
  del: (token) => h("del", {}, inline(token.tokens)),
  codespan: (token) => h("code", {}, token.text),
  br: () => h("br"),
  link: (token) => link(token.href, inline(token.tokens)),
  image: (token) => link(token.href, [token.text || token.href]),
  escape: (token) => token.text,
  text: (token) => (token.tokens ? inline(token.tokens) : plain(token.text)),
};

const blocks = (tokens) => tokens.filter((token) => token.type !== "space").map(block);
const block = (token) => (BLOCKS[token.type] ?? ((other) => h("p", {}, other.raw)))(token);
const inline = (tokens) => tokens.map((token) => (INLINE[token.type] ?? ((other) => other.raw))(token)).flat();

// marked leaves entities as they are written, since its own output is HTML
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const plain = (text) => text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);

function link(href, content) {
  if (!SAFE.test(href)) return h("span", {}, content);
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, content);
}

function code(text, language) {
  const copy = h("button", { type: "button", class: "plain", onclick: () => copyText(text) }, "Copy");
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, (language ?? "").split(/\s/)[0] || "text"), copy),
    h("pre", { tabIndex: 0 }, h("code", {}, text)));
}
