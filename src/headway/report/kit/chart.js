// Line charts, drawn by uPlot in the colours of the page. The numbers come from the server; nothing is computed here.

import { colour, digits, saveFile } from "./kit.js";

const { uPlot } = window;

/** A chart in `element`. `label`: what it shows, for those who cannot see it.
 *
 *  series: [{label, colour: a name of tokens.css, dash, points: only these, no line, step, fill}]
 *  x, y: {label, log, format: number -> text, min, max, time: numbers are seconds before now} */
export class Chart {
  constructor(element, { label, series, x = {}, y = {}, height = 220 }) {
    this.element = element;
    this.options = { series, x, y, height };
    this.data = [[], ...series.map(() => [])];
    element.classList.add("chart");
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", label);
    this.#build();
    new ResizeObserver(() => {
      if (element.clientWidth && element.clientWidth !== this.plot.width) this.plot.setSize(this.#size());
    }).observe(element);
    addEventListener("themechange", () => this.#build());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#build());
  }

  /** data: [xs, ys of the first series, ...]; null = no point. `range`: [least, most] of x. */
  set(data, range = null) {
    this.data = data;
    this.range = range;
    this.plot.setData(data);
  }

  png(name) {
    this.plot.ctx.canvas.toBlob((blob) => saveFile(name, blob));
  }

  #size() {
    return { width: Math.max(120, this.element.clientWidth), height: this.options.height };
  }

  #build() {
    this.plot?.destroy();
    const { series, x, y } = this.options;
    const ink = colour("muted");
    const line = colour("line");
    const axis = (of) => ({
      stroke: ink, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", label: of.label, labelSize: of.label ? 18 : 0,
      grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, gap: 4,
      values: (_, values) => values.map((value) => (value === null ? "" : (of.format ?? digits)(value))),
    });
    const bounds = (of) => (_, low, high) => {
      if (low === null) return of.log ? [1, 10] : [0, 1];
      const [least, most] = [of.min ?? low, of.max ?? high];
      return most > least ? [least, most + (of.max === undefined ? (most - least) * 0.06 : 0)] : [least, least + (Math.abs(least) || 1)];
    };
    this.plot = new uPlot({
      ...this.#size(), legend: { show: false }, padding: [10, 12, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, distr: x.log ? 3 : 1, range: (u, low, high) => this.range ?? (x.log ? [low ?? 1, high ?? 10] : bounds(x)(u, low, high)) },
        y: { distr: y.log ? 3 : 1, range: y.log ? undefined : bounds({ min: 0, ...y }) },
      },
      axes: [{ ...axis(x), size: 32 }, { ...axis(y), size: 56 }],
      series: [{}, ...series.map((one) => ({
        label: one.label, stroke: colour(one.colour), width: one.points ? 0 : 1.8, dash: one.dash,
        fill: one.fill ? withAlpha(colour(one.colour)) : undefined, spanGaps: one.span ?? false,
        paths: one.step ? uPlot.paths.stepped({ align: 1 }) : one.points ? () => null : undefined,
        points: { show: Boolean(one.points), size: one.points === true ? 5 : one.points, fill: colour(one.colour), stroke: colour(one.colour) },
      }))],
      hooks: { setCursor: [(u) => this.#hover(u)] },
    }, this.data, this.element);
    this.plot.root.append(this.tip = document.createElement("p"));
    this.tip.className = "u-tip";
    this.tip.hidden = true;
  }

  #hover(u) {
    const at = u.cursor.idx;
    this.tip.hidden = at === null || at === undefined || u.cursor.left < 0;
    if (this.tip.hidden) return;
    const { series, x, y } = this.options;
    const told = series.map((one, index) => [one.label, this.data[index + 1][at]]).filter(([, value]) => value !== null && value !== undefined);
    this.tip.textContent = [`${x.label ? `${x.label} ` : ""}${(x.format ?? digits)(this.data[0][at])}`,
      ...told.map(([label, value]) => `${label} ${(y.format ?? digits)(value)}`)].join("  ·  ");
  }
}

const withAlpha = (rgb) => rgb.replace("rgb(", "rgba(").replace(")", ", 0.14)");

/** The legend of a chart, as a list. */
export function legend(series) {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const one of series) {
    const item = document.createElement("li");
    const mark = document.createElement("i");
    mark.style.background = `var(--${one.colour})`;
    item.append(mark, one.label);
    list.append(item);
  }
  return list;
}

/** [what draws on a canvas of this height, its width], in CSS pixels and sharp on any screen; the canvas is cleared. */
export function clearedPen(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}
