// The live page: what a running engine holds and does, ten times a second.

import { Chart, clearedPen, legend } from "./chart.js";
import { History } from "./history.js";
import { ask, colour, digits, dollars, duration, h, percent, serverEvents, themeButton, toast } from "./kit.js";

const $ = (id) => document.getElementById(id);
const REASONS = {
  rows: "all rows of the batch are taken", blocks: "the cache has no blocks left", budget: "the step's budget is used up",
  prefix: "its prefix is being computed by another", preempting: "blocks are being taken back", policy: "the policy holds it back",
};
const RATE = 5; // seconds that rates look back over
const STATES = [["free", "free"], ["cached", "cached"], ["owned", "owned"], ["shared", "shared"]];
const KINDS = { queue: "line-strong", prefill: "c2", decode: "c1", beside: "c4", stall: "accent-soft" };
const KIND_NAMES = { queue: "waits", prefill: "prefill", decode: "decode", beside: "decode beside a chunk", stall: "in the batch, not in the step" };

let history = new History();
let sample = null;
let pool = 0;

// Set up

const batch = new Chart($("batch"), {
  label: "Requests running and waiting over time",
  series: [{ label: "running", colour: "c1", step: true, fill: true }, { label: "waiting", colour: "c2", step: true }],
  x: { label: "seconds ago", format: (value) => digits(-value) },
});
const steps = new Chart($("steps"), {
  label: "Measured and predicted time of each step",
  series: [{ label: "measured", colour: "c1", points: 3 }, { label: "predicted", colour: "c3", points: 3 }],
  x: { label: "seconds ago", format: (value) => digits(-value) }, y: { format: duration },
});
$("batch-legend").append(legend([{ label: "running", colour: "c1" }, { label: "waiting", colour: "c2" }]));
$("steps-legend").append(legend([{ label: "measured", colour: "c1" }, { label: "predicted", colour: "c3" }]));
$("lanes-legend").append(...Object.entries(KINDS).map(([kind, name]) => mark(name, KIND_NAMES[kind])), mark("bad", "preempted"));

function mark(name, text) {
  const square = h("i");
  square.style.background = `var(--${name})`;
  return h("li", {}, square, text);
}

// Show

function show() {
  if (!sample) return;
  showFigures();
  showCharts();
  showBlocks();
  showLanes();
  showTables();
}

function figure(name, value, text) {
  return h("div", {}, h("dt", {}, text), h("dd", { dataset: { figure: name } }, value));
}

function showFigures() {
  const recent = history.recent(RATE);
  const rate = (of) => recent.reduce((sum, step) => sum + step[of], 0) / RATE;
  const { running, waiting } = history.samples.at(-1);
  const now = sample.pools.reduce((sum, one) => ({ size: sum.size + one.size, used: sum.used + one.used, cached: sum.cached + one.cached }), { size: 0, used: 0, cached: 0 });
  const looked = [...history.requests.values()].filter((one) => one.admitted !== undefined);
  const prompt = looked.reduce((sum, one) => sum + (one.prompt ?? 0), 0);
  const hits = looked.reduce((sum, one) => sum + (one.cached ?? 0), 0);
  const predicted = recent.filter((step) => step.predicted);
  const ratio = predicted.reduce((sum, step) => sum + step.measured, 0) / predicted.reduce((sum, step) => sum + step.predicted, 0);
  $("figures").replaceChildren(
    figure("running", running, "running"), figure("waiting", waiting, "waiting"),
    figure("rate", digits(rate("emitted")), "tokens/s out"), figure("computed", digits(rate("tokens")), "tokens/s computed"),
    figure("kv", now.size ? percent(now.used / now.size) : "–", "of the cache owned"),
    figure("hits", prompt ? percent(hits / prompt) : "–", "of prompts from the cache"),
    figure("ratio", Number.isFinite(ratio) ? `${digits(ratio)}×` : "–", "measured / predicted"),
    ...(history.drafted ? [figure("accepted", percent(history.accepted / history.drafted), "of drafts accepted")] : []));
}

const ago = (time) => time - history.now;

function showCharts() {
  const span = Number($("span").value);
  const range = [-span, 0];
  const samples = history.samples.filter((one) => ago(one.t) > -span - 0.2);
  batch.set([samples.map((one) => ago(one.t)), samples.map((one) => one.running), samples.map((one) => one.waiting)], range);
  const recent = history.recent(span);
  steps.set([recent.map((one) => ago(one.t)), recent.map((one) => one.measured), recent.map((one) => one.predicted)], range);
  const { running, waiting } = history.samples.at(-1);
  const why = REASONS[sample.blocked];
  $("batch-see").textContent = waiting && why ? `${waiting} wait: ${why}.` : running ? `${running} in the batch, nobody waits.` : "Nothing to do.";
  const last = recent.at(-1);
  $("steps-see").textContent = last
    ? `The last step took ${duration(last.measured)}${last.predicted ? `, predicted were ${duration(last.predicted)}` : ""}, for ${last.tokens} tokens of ${last.rows} requests.`
    : "No step in this time.";
}

// The block map

let cell = 0;
let columns = 0;

const palette = new Map();
const paint = (name) => palette.get(name) ?? palette.set(name, colour(name)).get(name);
addEventListener("themechange", () => { palette.clear(); show(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette.clear(); show(); });

function showBlocks() {
  pool = Math.min(pool, sample.pools.length - 1);
  const { states, size, used, cached, window } = sample.pools[pool];
  if (sample.pools.length > 1 && $("pools").childElementCount !== sample.pools.length) {
    $("pools").replaceChildren(...sample.pools.map((one, index) => h("button", {
      type: "button", "aria-pressed": String(index === pool), onclick: () => { pool = index; $("pools").replaceChildren(); showBlocks(); },
    }, one.window ? `window of ${one.window}` : "all tokens")));
  }
  const width = $("blocks").clientWidth;
  cell = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * 170) / Math.max(1, states.length)))));
  columns = Math.max(1, Math.floor(width / cell));
  const [draw] = clearedPen($("blocks"), Math.max(cell, Math.ceil(states.length / columns) * cell));
  const counts = [0, 0, 0, 0];
  for (let block = 0; block < states.length; block += 1) {
    const state = Number(states[block]);
    counts[state] += 1;
    draw.fillStyle = paint(STATES[state][0]);
    draw.fillRect((block % columns) * cell, Math.floor(block / columns) * cell, cell - 1, cell - 1);
  }
  if (!states) { counts[0] = size - used - cached; counts[1] = cached; counts[2] = used; }
  $("blocks-legend").replaceChildren(...STATES.map(([name, text], index) => {
    const item = mark(name, `${counts[index]} ${text}`);
    item.dataset.state = text;
    return item;
  }));
  if (!hovered) $("blocks-see").textContent = `${size} blocks of ${sample.block_size} tokens${window ? `, looked back on for ${window}` : ""}. ${states ? "Point at one to see who has it." : "Too many to draw."}`;
}

let hovered = false;

function owners(block) {
  return sample.rows.filter((row) => {
    const runs = row.blocks[pool];
    for (let index = 0; index < runs.length; index += 2) if (block >= runs[index] && block < runs[index] + runs[index + 1]) return true;
    return false;
  });
}

function who(row) {
  return `request ${row.number}${row.own ? ` (${row.id})` : " of another key"}: ${row.prompt} prompt + ${row.generated} generated tokens`;
}

$("blocks").addEventListener("pointermove", (event) => {
  const { states } = sample?.pools[pool] ?? { states: "" };
  const block = Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell);
  hovered = block < states.length && event.offsetX < columns * cell;
  if (!hovered) return;
  const told = owners(block).map(who);
  $("blocks-see").textContent = `Block ${block}, ${STATES[Number(states[block])][1]}${told.length ? `: ${told.slice(0, 3).join("; ")}${told.length > 3 ? `; ${told.length - 3} more` : ""}` : ""}.`;
});
$("blocks").addEventListener("pointerleave", () => { hovered = false; show(); });

// The time line

const LANE = 15;
const NAMES = 64; // px

function showLanes() {
  const span = Number($("span").value);
  const begin = history.now - span;
  const lanes = [...history.requests.values()].filter((one) => (one.ended ?? Infinity) > begin).sort((a, b) => b.queued - a.queued).slice(0, 24).reverse();
  const [draw, width] = clearedPen($("lanes"), Math.max(2, lanes.length) * LANE + 4);
  const at = (time) => NAMES + (Math.max(0, time - begin) / span) * (width - NAMES);
  const bar = (from, to, y, kind) => {
    if (to <= begin) return;
    draw.fillStyle = paint(KINDS[kind]);
    draw.fillRect(at(from), y, Math.max(1, at(to) - at(from)), LANE - 5);
  };
  draw.font = "11px system-ui, sans-serif";
  draw.textBaseline = "middle";
  lanes.forEach((one, index) => {
    const y = index * LANE + 3;
    draw.fillStyle = paint(one.own ? "ink" : "muted");
    draw.fillText(`#${one.n}`, 2, y + LANE / 2 - 2);
    const end = one.ended ?? history.now;
    if (one.admitted !== undefined) bar(one.admitted, end, y, "stall");
    for (const [from, to] of one.waits ?? []) bar(from, to, y, "queue");
    if (one.place === "waiting") bar(one.since ?? one.queued, history.now, y, "queue");
    for (const segment of one.segments) bar(segment.from, segment.to, y, segment.kind);
    draw.fillStyle = paint("bad");
    for (const time of one.preempted) if (time > begin) draw.fillRect(at(time) - 1, y - 2, 2, LANE - 1);
  });
  const preempted = lanes.reduce((sum, one) => sum + one.preempted.length, 0);
  $("lanes-see").textContent = lanes.length ? `${lanes.length} requests in the last ${span} s${preempted ? `, ${preempted} times one was preempted` : ""}.` : "No request in this time.";
}

// Tables

const name = (one) => (one.own ? one.id.slice(-12) : `#${one.n}`);

function table(element, head, rows) {
  element.replaceChildren(h("thead", {}, h("tr", {}, head.map((text) => h("th", {}, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text) => h("td", {}, String(text)))))));
}

function whyMissed(one) {
  if (one.missed <= history.blockSize) return "no full block before its last token";
  if (one.left === undefined) return "it ended before it was looked at";
  return one.left === null ? "nothing cached began like it and went on" : `the nearest cached prompt goes on otherwise after ${one.left} tokens`;
}

function showTables() {
  const missed = [...history.requests.values()].filter((one) => one.admitted !== undefined && one.prompt)
    .map((one) => ({ ...one, missed: one.prompt - (one.cached ?? 0) })).sort((a, b) => b.missed - a.missed).slice(0, 8);
  table($("misses"), ["request", "prompt", "cached", "computed", "why"], missed.map((one) => [name(one), one.prompt, one.cached ?? 0, one.missed, whyMissed(one)]));
  $("misses-see").textContent = missed.length ? "The largest first. “headway cache explain” says where a prompt left the nearest cached one." : "No prompt yet.";
  const bills = history.receipts.slice(0, 8);
  const priced = bills.some((one) => one.dollars !== undefined);
  table($("bills"), ["request", "waited", "prefill", "decode", "stalls", ...(priced ? ["cost"] : [])], bills.map((one) => [`#${one.n}`,
    ...["queue_ms", "prefill_ms", "decode_ms", "stalls_ms"].map((part) => duration(one[part] / 1000)), ...(priced ? [dollars(one.dollars)] : [])]));
  const sum = history.receipts.reduce((total, one) => total + one.machine_seconds, 0);
  $("bills-see").textContent = history.receipts.length ? `${history.receipts.length} of this key's last answers took ${duration(sum)} of the machine.` : "None of this key's requests has ended since this page looks.";
}

// Listen

const state = h("span", { class: "state", id: "state", role: "status" }, "connecting");
const models = h("select", { id: "model", "aria-label": "Model", hidden: true, onchange: () => { controller.abort(); } });
$("top-end").append(state, models, themeButton());
$("span").addEventListener("change", show);
let controller = new AbortController();

function told(text, kind) {
  if (state.textContent !== text) state.textContent = text;
  state.className = `state ${kind}`;
}

async function listen() {
  history = new History();
  controller = new AbortController();
  const path = `v1/live${models.value ? `?model=${encodeURIComponent(models.value)}` : ""}`;
  const response = await ask(path, { headers: { accept: "text/event-stream" }, signal: controller.signal });
  let due = false;
  for await (const data of serverEvents(response)) {
    sample = JSON.parse(data);
    history.add(sample);
    told("live", "on");
    if (!due && !document.hidden) {
      due = true;
      requestAnimationFrame(() => { due = false; show(); });
    }
  }
}

async function run() {
  try {
    const names = (await (await ask("v1/models")).json()).data.filter((one) => !one.parent).map((one) => one.id);
    models.replaceChildren(...names.map((one) => h("option", { value: one }, one)));
    models.hidden = names.length < 2;
  } catch (error) {
    toast(error.message);
  }
  for (;;) {
    try {
      await listen();
      told("the server has ended the stream", "off");
    } catch (error) {
      if (error.name !== "AbortError") told(error instanceof TypeError ? "not connected" : error.message, "off");
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

run();
