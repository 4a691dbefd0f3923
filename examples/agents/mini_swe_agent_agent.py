"""An agent with mini-swe-agent, whose only tool is bash. The policy's commands run on this machine, as this user."""

import json
import os
import sys

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise LiteLLM downloads a table of prices
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

TASK = """{{task}} Compute it with a command. Then submit the answer with the command
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ANSWER"""

row = json.load(sys.stdin)
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors"),
    LocalEnvironment(timeout=5),
    system_template="Use the tool bash.",
    instance_template=TASK,
    step_limit=4,
)
submission = agent.run(row["input"])["submission"]
sys.exit(0 if row["answer"] in submission else 100)
