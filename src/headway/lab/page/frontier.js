import { Chart, legend } from "./chart.js";
import { digits, duration, h } from "./kit.js";
import { HARDWARE, MODEL, widePanel } from "./panel.js";

const SERIES = [
  { label: "fits", colour: "c1", span: true }, { label: "does not fit", colour: "c4", dash: [3, 5], span: true },
  { label: "this batch", colour: "c2", points: 11 }, { label: "measured", colour: "c3", points: 7 },
];

export const frontier = {
  title: "Frontier",
  lead: "What each user gets against what each GPU makes, as the batch grows.",
  presets: [
    ["Short chats", { context: 1000, batch: 64 }], ["Long documents", { context: 64000, batch: 8 }],
    ["8-bit cache", { context: 32000, kv: "fp8" }], ["70B on 8", { model: "llama-3.1-70b", gpus: 8 }],
  ],
  controls: [
    MODEL, HARDWARE,
    { name: "gpus", label: "GPUs of a replica", kind: "select", options: ["1", "2", "4", "8"], value: "1" },
    { name: "precision", label: "Weights", kind: "select", options: ["", "bf16", "fp8", "int4"], value: "" },
    { name: "kv", label: "KV cache", kind: "select", options: ["bf16", "fp8"], value: "bf16" },
    { name: "context", label: "Context, tokens", min: 128, max: 131072, log: true, value: 4096 },
    { name: "batch", label: "Batch", min: 1, max: 4096, log: true, value: 32 },
  ],
  csv: (answer) => [["batch", "seconds", "tokens_per_second_per_user", "tokens_per_second_per_gpu", "fits", "binds"],
    answer.points.map((one) => [one.batch, one.seconds, one.tokens_per_second_per_user, one.tokens_per_second_per_gpu, one.fits, one.binds])],
  open(root) {
    const plot = h("div");
    const figures = h("dl", { class: "figures" });
    const terms = h("table", { class: "data", id: "terms" });
    root.append(widePanel("The frontier", plot, legend(SERIES)), widePanel("Landmarks", figures), widePanel("The dot's step, term by term", terms));
    const chart = new Chart(plot, {
      label: "Tokens per second of each GPU against those of each user", series: SERIES, height: 380,
      x: { label: "tokens/s per user" }, y: { label: "tokens/s per GPU" },
    });
    const figure = (name, value, text) => h("div", {}, h("dt", {}, text), h("dd", { dataset: { figure: name } }, value));
    return {
      chart,
      draw(answer) {
        const points = answer.points.map((one) => ({ x: one.tokens_per_second_per_user, y: one.tokens_per_second_per_gpu, series: one.fits ? 0 : 1 }));
        const edge = answer.points.findLast((one) => one.fits);
        if (edge) points.push({ x: edge.tokens_per_second_per_user, y: edge.tokens_per_second_per_gpu, series: 1 });
        points.push({ x: answer.dot.tokens_per_second_per_user, y: answer.dot.tokens_per_second_per_gpu, series: 2 });
        points.push(...answer.measured.map((one) => ({ x: one.user, y: one.gpu, series: 3 })));
        points.sort((a, b) => a.x - b.x);
        chart.set([points.map((one) => one.x), ...SERIES.map((_, series) => points.map((one) => (one.series === series ? one.y : null)))]);
        figures.replaceChildren(
          figure("user", digits(answer.dot.tokens_per_second_per_user), "tokens/s per user"), figure("gpu", digits(answer.dot.tokens_per_second_per_gpu), "tokens/s per GPU"),
          figure("fits", answer.fits.toLocaleString("en-US"), "sequences fit"), figure("knee", answer.knee === null ? "–" : digits(answer.knee), "batch at the knee"),
          figure("critical", answer.critical_context === null ? "–" : digits(answer.critical_context), "critical context"),
          figure("ceiling", answer.ceiling === null ? "–" : digits(answer.ceiling), "tokens/s no batch exceeds"),
          figure("measured", answer.measured.length, "measured runs shown"));
        terms.replaceChildren(h("thead", {}, h("tr", {}, h("th", {}, "term"), h("th", {}, "takes"))),
          h("tbody", {}, Object.entries(answer.terms).sort((a, b) => b[1] - a[1]).map(([term, seconds]) => h("tr", {}, h("td", {}, term.replace("_", "-")), h("td", {}, duration(seconds))))));
      },
    };
  },
};
