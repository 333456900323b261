// What Vercel's AI SDK makes of the server: the first argument is its address. Asserts, and prints nothing.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { CALL, say } from "./script.mjs";

const provider = createOpenAICompatible({
  name: "jaxengine",
  baseURL: process.argv[2] + "/v1",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("demo");
const tools = {
  city: tool({
    description: "Looks a city up.",
    inputSchema: z.object({ name: z.string() }),
    execute: async ({ name }) => say(`${name} has 700,000 people.`),
  }),
};

const whole = await generateText({ model, prompt: say("Good morning.") });
assert.equal(whole.text, "Good morning.");
assert.ok(whole.usage.outputTokens > 0);

const streamed = streamText({ model, prompt: say("Good morning.") });
let text = "", pieces = 0;
for await (const piece of streamed.textStream) {
  text += piece;
  pieces += 1;
}
assert.equal(text, "Good morning.");
assert.ok(pieces > 2);
assert.ok((await streamed.usage).outputTokens > 0);

const agent = await generateText({ model, tools, stopWhen: stepCountIs(3), prompt: say(CALL) });
assert.equal(agent.text, "Oslo has 700,000 people.");
const streaming = streamText({ model, tools, stopWhen: stepCountIs(3), prompt: say(CALL) });
await streaming.consumeStream();
assert.equal(await streaming.text, "Oslo has 700,000 people.");
assert.equal((await streaming.steps).length, 2);

const thought = await generateText({ model, prompt: say("<think>\nHm.\n</think>\n\nYes.") });
assert.equal(thought.reasoningText.trim(), "Hm.");
assert.equal(thought.text.trim(), "Yes.");

const { object } = await generateObject({
  model,
  schema: z.object({ name: z.string() }),
  prompt: say('{"name": "Oslo"}'),
});
assert.deepEqual(object, { name: "Oslo" });

await assert.rejects(
  generateText({ model, maxRetries: 0, prompt: "too much ".repeat(3000) }),
  (error) => APICallError.isInstance(error) && error.statusCode === 400,
);
