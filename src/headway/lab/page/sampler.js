import { h, percent } from "./kit.js";
import { widePanel } from "./panel.js";

export const sampler = {
  title: "Sampler",
  lead: "A distribution on its way through the sampler, and a hundred draws from it.",
  presets: [
    ["As it is", {}], ["Cool", { temperature: 0.4 }], ["Hot", { temperature: 1.6 }], ["Nucleus", { top_p: 0.9 }],
    ["min-p", { temperature: 1.3, min_p: 0.1 }], ["Forced", { place: "forced" }],
  ],
  controls: [
    { name: "place", label: "Place in a text", kind: "select", options: ["open", "forced", "model"], value: "open" },
    { name: "text", label: "Text, for the built-in model", kind: "text", value: "The best way to learn is" },
    { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 1 },
    { name: "top_k", label: "top-k (0 = off)", min: 0, max: 100, step: 1, value: 0 },
    { name: "top_p", label: "top-p (1 = off)", min: 0, max: 1, step: 0.01, value: 1 },
    { name: "min_p", label: "min-p (0 = off)", min: 0, max: 0.5, step: 0.01, value: 0 },
    { name: "seed", label: "Seed", min: 0, max: 100, step: 1, value: 0 },
  ],
  csv: (answer) => [
    ["token", ...answer.stages.map((stage) => stage.name), "draws"],
    [...answer.tokens.map((token, index) => [token, ...answer.stages.map((stage) => stage.shares[index]), answer.draws[index]]),
      ["(the rest)", ...answer.stages.map((stage) => stage.tail), answer.tail_draws]],
  ],
  open(root) {
    const before = h("p", { class: "see", id: "place-text" });
    const table = h("table", { class: "bars", id: "bars" });
    const stages = h("table", { class: "data", id: "stages" });
    root.append(widePanel("The likeliest tokens: the model's, after all stages, and drawn", before, h("div", { class: "scroll", tabIndex: 0 }, table)),
      widePanel("Stage by stage", h("div", { class: "scroll", tabIndex: 0 }, stages)));
    const bar = (share, kind) => {
      const element = h("div", { class: `bar ${kind}` });
      element.style.width = `${100 * share}%`;
      return element;
    };
    return {
      chart: { png: () => drawPng(table) },
      draw(answer) {
        before.textContent = `“${answer.text}…”`;
        const [first, last] = [answer.stages[0], answer.stages.at(-1)];
        const most = Math.max(...first.shares, ...last.shares, first.tail, last.tail, ...answer.draws.map((count) => count / 100));
        const row = (token, one, two, count, kind) => h("tr", { class: two > 0 ? kind : `gone ${kind}` },
          h("td", {}, token), h("td", { class: "num" }, percent(one)), h("td", { class: "num" }, percent(two)), h("td", { class: "num" }, String(count)),
          h("td", {}, bar(one / most, ""), bar(two / most, "after"), bar(count / 100 / most, "drawn")));
        table.replaceChildren(
          h("thead", {}, h("tr", {}, ["token", "model", "drawn from", "of 100", ""].map((text) => h("th", {}, text)))),
          h("tbody", {}, answer.tokens.map((token, index) => row(JSON.stringify(token).slice(1, -1), first.shares[index], last.shares[index], answer.draws[index], "")),
            row(`the other ${(answer.vocab - answer.tokens.length).toLocaleString("en-US")}`, first.tail, last.tail, answer.tail_draws, "tail")));
        stages.replaceChildren(
          h("thead", {}, h("tr", {}, ["stage", "does something", "tokens left", "likeliest", "tail"].map((text) => h("th", {}, text)))),
          h("tbody", {}, answer.stages.map((stage) => h("tr", {}, [stage.name.replace("_", "-"), stage.active ? "yes" : "no",
            stage.survivors.toLocaleString("en-US"), percent(stage.shares[0]), percent(stage.tail)].map((text) => h("td", {}, text))))));
      },
    };
  },
};

/** The bars as a picture. */
function drawPng(table) {
  const canvas = document.createElement("canvas");
  const rows = [...table.tBodies[0].rows];
  canvas.width = 900;
  canvas.height = rows.length * 34 + 20;
  const draw = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  draw.fillStyle = style.backgroundColor;
  draw.fillRect(0, 0, canvas.width, canvas.height);
  draw.font = "14px system-ui, sans-serif";
  rows.forEach((row, index) => {
    const y = index * 34 + 14;
    draw.fillStyle = style.color;
    draw.fillText(row.cells[0].textContent, 10, y + 16);
    draw.fillText(row.cells[2].textContent, 190, y + 16);
    [...row.cells[4].children].forEach((bar, number) => {
      draw.fillStyle = getComputedStyle(bar).backgroundColor;
      draw.fillRect(270, y + number * 9, Math.max(1, (600 * parseFloat(bar.style.width)) / 100), 7);
    });
  });
  canvas.toBlob((blob) => import("./kit.js").then(({ saveFile }) => saveFile("sampler.png", blob)));
}
