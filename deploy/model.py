"""The model of deploy/app.toml: the vLLM server of deploy/compose.yaml, which sees the private prompts."""

import os

from langchain_openai import ChatOpenAI

llm = ChatOpenAI(base_url=os.environ["MODEL_URL"], model=os.environ["MODEL_NAME"], api_key="none-is-needed")
