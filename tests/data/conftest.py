"""A byte-level tokenizer of a few hundred tokens, trained here in milliseconds, with a ChatML template."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
CONTROL = ("<s>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def make_tokenizer():
    """A function: chat template, and whether plain encoding begins with <s>, to a tokenizer."""

    def make(chat_template: str | None = CHATML, adds_bos: bool = False) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(CONTROL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(["system user assistant What is the number? Reply with 12 + 34 only."] * 3, trainer)
        # Not flagged special, as in tokenizers of reasoning models; only <think> stands in the template
        backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<table>", special=False)])
        if adds_bos:
            bos = backend.token_to_id("<s>")
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", chat_template=chat_template
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()
