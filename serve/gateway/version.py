"""One version as a gateway sees it: vLLM's own OpenAI classes on a remote engine."""

from ray.serve.handle import DeploymentHandle
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers.online_renderer import OnlineRenderer

from serve.artefacts.artefact import artefacts_folder
from serve.cache.responses import ResponseCache
from serve.config import ServeConfig
from serve.gateway.openai_routes import Chat, Completion
from serve.gateway.remote_engine import RemoteEngine
from serve.replica import engine_arguments
from serve.rollout.traffic import TrafficLog


class Version:
    """Answers OpenAI requests by the weights of one digest."""

    def __init__(
        self,
        config: ServeConfig,
        digest: str,
        handle: DeploymentHandle,
        cache: ResponseCache | None,
        traffic: TrafficLog,
    ) -> None:
        self.digest = digest
        folder = artefacts_folder(config.serve_dir) / digest
        vllm_config = AsyncEngineArgs(**engine_arguments(config.replica, folder, config.seed)).create_engine_config()
        engine = RemoteEngine(config, digest, vllm_config, handle, cache, traffic)
        self.models = OpenAIServingModels(engine, [BaseModelPath(config.gateway.model_name, digest)])
        templates = OnlineRenderer(
            model_config=vllm_config.model_config,
            renderer=engine.renderer,
            request_logger=None,
            chat_template=None,  # the one in the artefact
            chat_template_content_format="auto",
        )
        self.chat = Chat(
            engine,
            self.models,
            "assistant",
            online_renderer=templates,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
        self.completion = Completion(engine, self.models, online_renderer=templates, request_logger=None)
        for serving in (self.chat, self.completion):
            serving.system_fingerprint = digest
