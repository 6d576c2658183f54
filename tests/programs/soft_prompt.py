"""A soft prompt of a local model (types only: it needs torch and a model)."""

from langchain_dpicl import Noise, PromptDPSGD
from langchain_dpicl.options import SoftPromptConfig, TrainableModel, Training
from tests.programs.common import examples, handler


def train() -> None:
    run = PromptDPSGD.from_private_examples(
        examples("p11"),
        llm=TrainableModel("./roberta-base", device="cuda", dtype="bfloat16"),
        budget=handler(),
        epsilon=3.0,
        prompt=SoftPromptConfig("prefix", 20),
        training=Training(expected_batch_size=1024, epochs=20.0, l2_clip_norm=0.1, learning_rate=0.01),
        noise=Noise(multiplier=1.1),
        checkpoint="run.jsonl",
    )
    for step in run.stream():
        print(step)
    run.result.save("prompt")
