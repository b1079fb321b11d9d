import { Chart, clearedPen, legend } from "./chart.js";
import { colour, digits, duration, h, icon } from "./kit.js";
import { HARDWARE, MODEL, widePanel } from "./panel.js";

const LAW = [{ label: "mean number inside, L", colour: "c1" }, { label: "rate × mean time inside, λW", colour: "c2", dash: [5, 4] }];
const ROW = 7; // px of a seat of the batch

export const traffic = {
  title: "Traffic",
  lead: "A simulation by the scheduler that serves, played back.",
  presets: [
    ["Calm", { rate: 2 }], ["Busy", { rate: 12 }], ["Too much", { rate: 40 }], ["Prefill first: stalls", { policy: "prefill-first", rate: 12, prompt: 4000 }],
    ["Chunked: none", { policy: "chunked", rate: 12, prompt: 4000 }], ["Static batch", { policy: "static", rate: 8 }],
  ],
  controls: [
    MODEL, HARDWARE,
    { name: "rate", label: "Requests per second", min: 0.2, max: 100, log: true, whole: false, value: 8 },
    { name: "policy", label: "Policy", kind: "select", options: ["chunked", "prefill-first", "fcfs", "static"], value: "chunked" },
    { name: "prompt", label: "Prompt tokens, mean", min: 10, max: 20000, log: true, value: 1000 },
    { name: "output", label: "Output tokens, mean", min: 1, max: 2000, log: true, value: 200 },
    { name: "rows", label: "Seats in the batch", min: 1, max: 256, log: true, value: 64 },
    { name: "seed", label: "Seed", min: 0, max: 50, step: 1, value: 0 },
  ],
  sketch: { requests: 60 }, // drawn while a slider moves; the whole follows once it rests
  csv: (answer) => [["request", "arrival", "admitted", "first_token", "end", "prompt", "output", "longest_pause"],
    answer.requests.map((one) => [one.n, one.at, one.admitted, one.first, one.end, one.prompt, one.output, one.pause ?? ""])],
  open(root) {
    let answer = null;
    let at = 0;
    let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    let last = 0;
    let frame = 0;
    const seats = new Map();
    const button = h("button", { type: "button", id: "play", onclick: () => { playing = !playing; show(); } });
    const slider = h("input", { type: "range", min: 0, max: 1000, value: 0, id: "at", "aria-label": "Moment", oninput: () => { at = (slider.value / 1000) * answer.seconds; } });
    const clock = h("output", { class: "num", id: "clock" });
    const speed = h("select", { id: "speed", "aria-label": "Speed" }, ["1", "2", "5", "10"].map((text) => h("option", { value: text, selected: text === "2" }, `${text}×`)));
    const canvas = h("canvas", { dataset: { frames: 0 }, role: "img", "aria-label": "Queue on the left, batch on the right" });
    const numbers = h("p", { class: "see", id: "now" });
    const ttftPlot = h("div");
    const lawPlot = h("div");
    const lawSee = h("p", { class: "see", id: "law" });
    const marks = legend([{ label: "waits", colour: "line-strong" }, { label: "prefill", colour: "c2" }, { label: "decode", colour: "c1" }, { label: "pauses for others' prompts", colour: "bad" }]);
    root.append(widePanel("Queue and batch", h("div", { class: "play" }, button, slider, clock, speed), canvas, marks, numbers),
      widePanel("Time to first token, by arrival", ttftPlot), widePanel("Little's law", lawPlot, legend(LAW), lawSee));
    const ttft = new Chart(ttftPlot, {
      label: "Time to first token of each request by its arrival", series: [{ label: "TTFT", colour: "c1", points: 5 }, { label: "longest pause", colour: "bad", points: 3 }],
      x: { label: "arrival, s" }, y: { format: duration }, height: 200,
    });
    const law = new Chart(lawPlot, { label: "L and λW over time", series: LAW, x: { label: "seconds" }, height: 200 });

    function show() {
      button.replaceChildren(playing ? icon("stop") : "▶");
      button.setAttribute("aria-label", playing ? "Pause" : "Play");
    }

    /** Seats keep their place from admission to end. */
    function seat(one, running) {
      if (!seats.has(one.n)) {
        const taken = new Set(running.map((other) => seats.get(other.n)));
        let free = 0;
        while (taken.has(free)) free += 1;
        seats.set(one.n, free);
      }
      return seats.get(one.n);
    }

    function draw(now) {
      const height = Math.max(12, Math.min(40, answer.rows)) * ROW + 8;
      const [pen, width] = clearedPen(canvas, height);
      const waiting = answer.requests.filter((one) => one.at <= now && now < one.admitted);
      const running = answer.requests.filter((one) => one.admitted <= now && now < one.end);
      for (const number of [...seats.keys()]) if (!running.some((one) => one.n === number)) seats.delete(number);
      const long = stalling(now);
      const middle = width * 0.38;
      const tall = Math.floor((height - 8) / ROW);
      pen.fillStyle = colours.wait;
      waiting.forEach((one, index) => pen.fillRect(middle - 14 - Math.floor(index / tall) * 12, 4 + (index % tall) * ROW, 9, ROW - 2));
      for (const one of running) {
        const place = seat(one, running);
        const x = middle + 10 + Math.floor(place / tall) * ((width - middle - 20) / Math.ceil(answer.rows / tall));
        const room = (width - middle - 20) / Math.ceil(answer.rows / tall) - 6;
        const y = 4 + (place % tall) * ROW;
        const done = Math.max(0, Math.min(1, (now - one.first) / Math.max(1e-9, one.end - one.first)));
        pen.fillStyle = colours.seat;
        pen.fillRect(x, y, room, ROW - 2);
        pen.fillStyle = now < one.first ? colours.prefill : long && now > one.first ? colours.stall : colours.decode;
        pen.fillRect(x, y, now < one.first ? room * 0.12 : Math.max(2, room * done), ROW - 2);
      }
      pen.fillStyle = colours.line;
      pen.fillRect(middle, 0, 1, height);
      numbers.textContent = `${waiting.length} wait, ${running.length} in the batch, ${answer.requests.filter((one) => one.end <= now).length} done.`;
      clock.textContent = `${now.toFixed(2)} s`;
      const spot = answer.law.t.findIndex((time) => time >= now);
      const index = spot < 0 ? answer.law.t.length - 1 : spot;
      lawSee.textContent = `Until now L = ${digits(answer.law.mean[index])} and λW = ${digits(answer.law.product[index])}; ${answer.law.inside[index]} are inside.`;
    }

    /** Whether the step is long because of somebody's prompt. */
    function stalling(now) {
      const step = answer.steps.findLast(([begin]) => begin <= now);
      return step !== undefined && step[2] > step[1];
    }

    const colours = {};
    function paint() {
      Object.assign(colours, { wait: colour("line-strong"), seat: colour("sunken"), prefill: colour("c2"), decode: colour("c1"), stall: colour("bad"), line: colour("line") });
    }
    paint();
    addEventListener("themechange", paint);

    let frames = 0;
    function tick(time) {
      frame = requestAnimationFrame(tick);
      const passed = Math.min(0.1, (time - last) / 1000);
      last = time;
      if (!answer || !canvas.isConnected) return;
      if (playing) {
        at += passed * Number(speed.value);
        if (at > answer.seconds) at = 0;
        slider.value = (1000 * at) / answer.seconds;
      }
      draw(at);
      frames += 1;
      canvas.dataset.frames = frames;
    }
    frame = requestAnimationFrame(tick);
    show();
    return {
      chart: ttft,
      close: () => cancelAnimationFrame(frame),
      draw(found) {
        answer = found;
        at = Math.min(at, answer.seconds);
        seats.clear();
        const ordered = [...answer.requests].sort((a, b) => a.at - b.at);
        ttft.set([ordered.map((one) => one.at), ordered.map((one) => one.first - one.at), ordered.map((one) => one.pause ?? null)]);
        law.set([answer.law.t, answer.law.mean, answer.law.product]);
      },
    };
  },
};
