import { Chart } from "./chart.js";
import { bytes, duration, h, percent } from "./kit.js";
import { HARDWARE, MODEL, widePanel } from "./panel.js";

export const request = {
  title: "Request",
  lead: "What one request costs, token by token.",
  presets: [
    ["Chat turn", { prompt: 500, output: 300 }], ["Long document", { prompt: 100000, output: 500 }],
    ["Thinking model", { prompt: 500, output: 8000 }], ["Turn 40, prefix cached", { prompt: 20000, output: 300, cached: 19500, hit: true }],
  ],
  controls: [
    MODEL, HARDWARE,
    { name: "prompt", label: "Prompt tokens", min: 10, max: 200000, log: true, value: 1000 },
    { name: "output", label: "Output tokens", min: 1, max: 20000, log: true, value: 300 },
    { name: "cached", label: "Prefix in the cache", min: 0, max: 100000, step: 500, value: 0 },
    { name: "hit", label: "Use the cached prefix", kind: "check", value: false },
    { name: "cache", label: "KV cache", kind: "check", value: true },
    { name: "grouped", label: "Grouped heads (GQA)", kind: "check", value: true },
  ],
  csv: (answer) => [["position", "seconds"], answer.positions.map((at, index) => [at, answer.seconds[index]])],
  open(root) {
    const figures = h("dl", { class: "figures" });
    const strip = h("div", { class: "strip", role: "img", "aria-label": "Share of prefill and decode" });
    const labels = h("p", { class: "see" });
    const plot = h("div");
    const gauge = h("div");
    const size = h("p", { class: "see" });
    root.append(widePanel("In figures", figures), widePanel("Time line", strip, labels), widePanel("Each token by its position", plot),
      widePanel("Cache at the end", h("div", { class: "gauge", role: "img", "aria-label": "Share of the memory for caches" }, gauge), size));
    const chart = new Chart(plot, {
      label: "Seconds of each token by its position", series: [{ label: "a token takes", colour: "c1", fill: true }],
      x: { label: "position" }, y: { format: duration }, height: 260,
    });
    const figure = (name, value, text) => h("div", {}, h("dt", {}, text), h("dd", { dataset: { figure: name } }, value));
    return {
      chart,
      draw(answer) {
        figures.replaceChildren(figure("ttft", duration(answer.ttft), "to the first token"), figure("tpot", duration(answer.tpot), "per token after it"),
          figure("e2e", duration(answer.e2e), "in all"), figure("cache", bytes(answer.cache_bytes), "cached at the end"),
          figure("binds", answer.binds.decode, "binds a decode step"));
        const part = (name, seconds) => {
          const element = h("div", { class: name, title: `${name} ${duration(seconds)}` });
          element.style.width = `${(100 * seconds) / answer.e2e}%`;
          return element;
        };
        strip.replaceChildren(part("prefill", answer.ttft), part("decode", answer.decode));
        labels.textContent = `Prefill ${duration(answer.ttft)} of ${answer.computed.toLocaleString("en-US")} tokens, then decode ${duration(answer.decode)}.`;
        chart.set([answer.positions, answer.seconds]);
        const share = answer.room_bytes > 0 ? answer.cache_bytes / answer.room_bytes : 1;
        gauge.style.width = `${Math.min(100, 100 * share)}%`;
        gauge.className = answer.fits ? "" : "over";
        size.textContent = `${bytes(answer.cache_bytes)}, ${percent(share)} of what the weights leave. ${answer.kv_heads} heads of keys and values for ${answer.heads} of queries.`;
      },
    };
  },
};
