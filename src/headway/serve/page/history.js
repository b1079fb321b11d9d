// What samples of a server add up to: the requests it had, the steps it made. Times in seconds of the engine's clock.

const KEPT = 75; // seconds of steps and of requests that ended
const MOST_LANES = 400;

export class History {
  constructor() {
    this.requests = new Map(); // number -> {n, id, own, prompt, cached, generated, queued, admitted, first, ended, reason, segments, preemptions, left}
    this.steps = []; // {t0, t, predicted, measured, rows, tokens, emitted, prefill}
    this.samples = []; // {t, running, waiting}
    this.receipts = []; // newest first
    this.drafted = 0;
    this.accepted = 0;
    this.now = 0;
    this.blockSize = 0; // tokens
  }

  add(sample) {
    this.now = sample.now;
    this.blockSize = sample.block_size;
    if (!this.samples.length) this.#rows(sample); // those that were there before this page
    for (const event of sample.events) this[`_${event.k}`]?.(event);
    this.#rows(sample);
    const running = sample.rows.filter((row) => row.place === "running").length;
    this.samples.push({ t: sample.now, running, waiting: sample.rows.length - running });
    this.#forget();
  }

  #rows(sample) {
    for (const row of sample.rows) {
      const queued = sample.now - row.age;
      const request = this.#request(row.number, { queued, first: row.generated ? queued : undefined });
      Object.assign(request, { id: row.id, own: row.own, prompt: row.prompt, generated: row.generated, place: row.place, preemptions: row.preemptions });
      if (row.place !== "waiting") request.left ??= row.left;
      if (row.place === "running") request.admitted ??= sample.now;
      request.cached ??= row.cached;
    }
  }

  #request(number, fields) {
    let found = this.requests.get(number);
    if (!found) this.requests.set(number, found = { n: number, segments: [], preempted: [], ...fields });
    return found;
  }

  _queued(event) {
    Object.assign(this.#request(event.n, {}), { queued: event.t, id: event.id, own: event.own, prompt: event.prompt, generated: 0, place: "waiting" });
  }

  _admitted(event) {
    const request = this.#request(event.n, { queued: event.t });
    if (event.preemptions === 0) request.cached = event.cached;
    request.waits = [...(request.waits ?? []), [request.since ?? request.queued, event.t]];
    request.admitted ??= event.t;
    request.place = "running";
  }

  _first(event) { this.#request(event.n, { queued: event.t - event.waited }).first = event.t; }

  _preempted(event) {
    const request = this.#request(event.n, { queued: event.t });
    request.preempted.push(event.t);
    request.since = event.t;
    request.place = "waiting";
  }

  _finished(event) {
    const request = this.#request(event.n, { queued: event.t - event.lived });
    Object.assign(request, { ended: event.t, reason: event.reason, generated: event.generated, prompt: event.prompt, cached: event.cached, place: "ended" });
  }

  _receipt(event) { this.receipts = [event, ...this.receipts].slice(0, 50); }

  _step(event) {
    const chunk = event.counts.some((count, index) => count > 1 && !event.emitted[index]) || Math.max(...event.counts, 0) > 8;
    this.steps.push({
      t0: event.t0, t: event.t, predicted: event.predicted, measured: event.measured, rows: event.rows.length,
      tokens: event.counts.reduce((sum, count) => sum + count, 0), emitted: event.emitted.reduce((sum, count) => sum + count, 0),
    });
    this.drafted += event.drafted;
    this.accepted += event.accepted;
    event.rows.forEach((number, index) => {
      const request = this.#request(number, { queued: event.t0 });
      const prefill = request.first === undefined || request.first >= event.t;
      const kind = prefill ? "prefill" : chunk ? "beside" : "decode";
      const last = request.segments.at(-1);
      if (last && last.kind === kind && event.t0 - last.to < 0.003 && kind !== "prefill") last.to = event.t;
      else request.segments.push({ kind, from: event.t0, to: event.t, count: event.counts[index] });
    });
  }

  #forget() {
    const before = this.now - KEPT;
    const cut = (list, time) => list.splice(0, Math.max(0, list.findIndex((one) => time(one) >= before)));
    cut(this.steps, (step) => step.t);
    cut(this.samples, (sample) => sample.t);
    for (const [number, request] of this.requests) {
      if (request.ended < before || this.requests.size > MOST_LANES) this.requests.delete(number);
      else cut(request.segments, (segment) => segment.to);
    }
  }

  /** Steps of the last seconds. */
  recent(seconds) {
    return this.steps.filter((step) => step.t > this.now - seconds);
  }
}
