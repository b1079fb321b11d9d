// One answer: asked of our own API, streamed into a node of the conversation.

import { ask, serverEvents } from "./kit.js";

export const NUMBERS = { // settings that are numbers: what they are called, least, most
  temperature: ["Temperature", 0, 2], top_p: ["top-p", 0, 1], top_k: ["top-k", 0, 1000],
  min_p: ["min-p", 0, 1], max_tokens: ["Longest answer (tokens)", 1, 1000000], seed: ["Seed", 0, 2147483647],
  repetition_penalty: ["Repetition penalty", 0.01, 2], presence_penalty: ["Presence penalty", -2, 2],
  frequency_penalty: ["Frequency penalty", -2, 2],
};

/** The body of a request. Settings that are left open are the model's own. */
export function bodyOf(model, messages, settings) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of Object.keys(NUMBERS)) {
    if (settings[name] !== "" && settings[name] !== undefined) body[name] = Number(settings[name]);
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 8 });
  return body;
}

/** Stream an answer into `node`; `changed` is called after each piece. Ends early when `signal` says so.
 *
 *  node.stats: {sent, first, last} as this page saw it (ms of its clock), {ttft, tpot} in seconds, usage and receipt
 *  as the server tells them. Throws ServerError. */
export async function generate(node, body, signal, changed) {
  node.stats = {};
  node.tokens = [];
  const sent = performance.now();
  let first = null;
  let last = null;
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "content-type": "application/json", "x-headway-receipt": "1" },
    });
    for await (const data of serverEvents(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) node.stats.usage = chunk.usage;
      const [choice] = chunk.choices ?? [];
      if (!choice) continue;
      const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
      if (content || thought || calls) {
        last = performance.now();
        first ??= last;
      }
      if (content) node.content += content;
      if (thought) node.thought = (node.thought ?? "") + thought;
      for (const call of calls ?? []) node.content += (call.function?.name ? `\n\n${call.function.name}` : "") + (call.function?.arguments ?? "");
      for (const token of choice.logprobs?.content ?? []) {
        node.tokens.push({ text: token.token, logprob: token.logprob, top: token.top_logprobs.map((one) => [one.token, one.logprob]) });
      }
      if (choice.finish_reason) node.finish = choice.finish_reason;
      changed();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    node.finish = "stopped";
  } finally {
    const count = node.stats.usage?.completion_tokens;
    if (first !== null) {
      node.stats.ttft = (first - sent) / 1000;
      if (count > 1) node.stats.tpot = (last - first) / 1000 / (count - 1);
    }
  }
}
