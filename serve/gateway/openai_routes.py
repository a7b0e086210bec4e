"""vLLM's classes of the two routes: chats ask the model exactly what training asked it, and nothing is cut unasked."""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.exceptions import VLLMValidationError

from core.errors import UserError
from data.template import control_pattern, template_tokens


class Chat(OpenAIServingChat):
    """As vLLM's, but the text of a control token in a message never becomes one.

    vLLM encodes the rendered chat in one go; data/template.py, which training and evaluation use, does the same unless
    a message holds such text. Then its ids are taken: a client cannot end a turn or speak as the system.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._control = control_pattern(self.renderer.tokenizer)

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        rendered = await super().render_chat_request(request)
        if not isinstance(rendered, tuple):
            return rendered
        conversation, (prompt,) = rendered
        if self._control is None or not any(
            self._control.search(text) for message in conversation for text in _texts(message)
        ):
            check_length(prompt, request.max_completion_tokens or request.max_tokens, self.model_config.max_model_len)
            return rendered
        messages: list[dict[str, Any]] = [dict(message) for message in conversation]
        if request.tools or request.continue_final_message or not request.add_generation_prompt:
            raise VLLMValidationError("messages must not hold control tokens' text together with tools or a prefix")
        if any(set(message) - {"role", "content"} or not isinstance(message["content"], str) for message in messages):
            raise VLLMValidationError("messages must be plain texts where one holds a control token's text")
        try:
            prompt["prompt_token_ids"] = template_tokens(self.renderer.tokenizer, messages)
        except UserError as error:
            raise VLLMValidationError(str(error)) from error
        check_length(prompt, request.max_completion_tokens or request.max_tokens, self.model_config.max_model_len)
        return conversation, [prompt]


class Completion(OpenAIServingCompletion):
    """As vLLM's, but a prompt and max_tokens that do not fit together are refused, as in a chat."""

    async def render_completion_request(self, request: CompletionRequest) -> Any:
        rendered = await super().render_completion_request(request)
        if isinstance(rendered, list):
            for prompt in rendered:
                # The protocol's own 16 where none is given must not turn a long prompt into an error.
                asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
                check_length(prompt, asked, self.model_config.max_model_len)
        return rendered


def check_length(prompt: Any, max_tokens: int | None, max_model_len: int) -> None:
    """VLLMValidationError, with both numbers, where prompt and answer would not fit; vLLM would cut the answer."""
    num_prompt = len(prompt["prompt_token_ids"])
    if max_tokens is not None and num_prompt + max_tokens > max_model_len:
        raise VLLMValidationError(
            f"prompt and max_tokens together must be at most {max_model_len} tokens, got {num_prompt} + {max_tokens}",
            parameter="max_tokens",
            value=max_tokens,
        )


def _texts(value: Any) -> list[str]:
    """Every text inside a message, however deep: tool calls and their arguments too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in _texts(inner)]
    return []
