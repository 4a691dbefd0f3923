// An agent with OpenAI's client for Node.
const { readFileSync } = require("node:fs");
const OpenAI = require("openai");
const { LengthFinishReasonError } = require("openai/error");

const multiply = ({ a, b }) => String(a * b);
const integers = { a: { type: "integer" }, b: { type: "integer" } };
const parameters = { type: "object", properties: integers, required: ["a", "b"] };
const tool = { name: "multiply", description: "Multiply two integers.", parameters, parse: JSON.parse };

async function main() {
  const row = JSON.parse(readFileSync(0, "utf8"));
  const client = new OpenAI(); // the run sets OPENAI_BASE_URL and OPENAI_API_KEY
  const runner = client.chat.completions.runTools(
    {
      model: "policy",
      messages: [{ role: "user", content: row.input }],
      tools: [{ type: "function", function: { ...tool, function: multiply } }],
    },
    { maxChatCompletions: 4 },
  );
  const answer = await runner.finalContent();
  process.exit((answer ?? "").includes(row.answer) ? 0 : 100);
}

main().catch((error) => {
  // The policy's turn was cut off, so a reward of 0 instead of a failure
  if (error instanceof LengthFinishReasonError) process.exit(100);
  throw error;
});
