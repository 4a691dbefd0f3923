"""mini-swe-agent: commands as text, and the Responses API."""

import os

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from features import main
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel


def submission(model, question: str) -> str:
    policy = model(model_name="openai/policy", cost_tracking="ignore_errors")
    templates = {"system_template": "Use bash.", "instance_template": "{{task}}"}
    return DefaultAgent(policy, LocalEnvironment(), step_limit=3, **templates).run(question)["submission"]


def chat(question: str) -> str:
    return submission(LitellmTextbasedModel, question)


def tools(question: str) -> str:
    return submission(LitellmModel, question)


def responses(question: str) -> str:
    return submission(LitellmResponseModel, question)


if __name__ == "__main__":
    main(chat=chat, responses=responses)
