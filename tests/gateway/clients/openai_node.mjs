// Runs with nothing but openai and ws beside it: node openai_node.mjs BASE_URL NODE_MODULES.
// Prints one JSON object: what each scenario saw. Asserts nothing; the test does.

import { createRequire } from "node:module";
import { join } from "node:path";

const [baseURL, folder] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const { OpenAI } = require("openai");
const { ResponsesWS } = require("openai/resources/responses/ws");

const TERMINAL = ["response.completed", "response.incomplete", "response.failed", "error"];

/** Messages of the socket, one after the other. */
function reader(socket) {
  const messages = socket.stream();
  return async () => {
    for (;;) {
      const { value } = await messages.next();
      if (value.type === "message") return value.message;
      if (value.type === "error" && value.error.error) return value.error.error;
      if (value.type === "close") throw new Error("closed");
    }
  };
}

async function answer(next) {
  const deltas = [];
  for (;;) {
    const event = await next();
    if (event.type === "response.output_text.delta") deltas.push(event.delta);
    if (!TERMINAL.includes(event.type)) continue;
    if (event.type === "error") return { error: [event.status, event.error.code, event.error.param] };
    const parts = event.response.output.flatMap((item) => item.content ?? []);
    return {
      deltas,
      id: event.response.id,
      status: event.response.status,
      text: parts.map((part) => part.text).join(""),
      calls: event.response.output
        .filter((item) => item.type === "function_call")
        .map((item) => [item.name, item.arguments]),
    };
  }
}

const client = new OpenAI({ baseURL, apiKey: "test-token" });
const seen = {};

let socket = new ResponsesWS(client);
let next = reader(socket);
socket.send({ type: "response.create", input: "Hello", instructions: "Brief." });
seen.create = await answer(next);
const previous_response_id = seen.create.id;
socket.send({ type: "response.create", input: "And then?", previous_response_id });
seen.previous = await answer(next);
const tools = [{ type: "function", name: "add", parameters: { type: "object" }, strict: false }];
socket.send({ type: "response.create", input: "call", tools });
seen.tools = await answer(next);
socket.send({ type: "response.create", input: "slow", stream_id: "a" });
socket.send({ type: "response.create", input: "quick", stream_id: "b" });
seen.lanes = [];
while (seen.lanes.length < 2) {
  const event = await next();
  if (!TERMINAL.includes(event.type)) continue;
  seen.lanes.push([event.stream_id, event.response.output[0].content[0].text]);
}
socket.send({ type: "response.create", input: "x", previous_response_id: "resp_0" });
seen.not_found = await answer(next);
socket.close();

socket = new ResponsesWS(client);
next = reader(socket);
socket.send({ type: "response.create", input: "endless", tinyvllm: { resume_seconds: 0 } });
while ((await next()).type !== "response.output_text.delta");
socket.close();
seen.closed = true;

console.log(JSON.stringify(seen));
