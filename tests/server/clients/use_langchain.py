"""langchain-openai: whole, streamed, structured, and what it reports of the usage."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str


model = ChatOpenAI(
    base_url=sys.argv[1] + "/v1", api_key="none", model="starter", max_tokens=40, temperature=0
)
question = "What is the capital of France? Answer in one sentence."
whole = model.invoke(question)
assert "Paris" in whole.content, whole.content
assert whole.usage_metadata["output_tokens"] > 0
assert "Paris" in "".join(chunk.content for chunk in model.stream(question))
city = model.with_structured_output(City, method="json_schema").invoke(question)
assert isinstance(city, City)
batch = model.batch([question] * 3)
assert len({answer.content for answer in batch}) == 1
