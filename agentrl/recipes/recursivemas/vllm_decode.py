"""The last decode by vLLM: this process thinks, embeds the decoder's prompt and hands it to vLLM's own process.

Only the decode moves: latent steps need each step's hidden state back as an input, which vLLM does not give. vLLM holds
a second copy of the decoder's model. Its greedy text equals the hf engine's in fp32 (a test holds it to that); in bf16
the two round differently, as any two engines do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.session import model_folder
from agentrl.rollout.latent_backbone import Backbone
from agentrl.rollout.vllm import VLLMEngine
from agentrl.types import Completion, Embeddings, Prompt, Request

_GPU_SHARE = 0.4  # of the memory, where the thinking models hold the rest


class VLLMDecode:
    """A decoder's engine. `computed`: forward positions by policy, as the hf engine counts them."""

    def __init__(self, engine: VLLMEngine, backbone: Backbone) -> None:
        self._engine, self._backbone = engine, backbone
        self._computed: Counter[str] = Counter()

    @classmethod
    async def start(cls, recipe: RecursiveRecipe, backbone: Backbone) -> VLLMDecode:
        """Start vLLM on the decoder's model. Raises as `VLLMEngine.start`."""
        policy, config = recipe.decoder.policy, recipe.engine
        model = recipe.policy_models[policy]
        if config.gpu_memory_utilization is None and backbone.device.type == "cuda":
            config = config.model_copy(update={"gpu_memory_utilization": _GPU_SHARE})
        engine = await VLLMEngine.start(
            config,
            {policy: model_folder(model, policy, recipe.run.dir)},
            dtype=model.dtype,
            seed=recipe.run.seed,
            threads=recipe.launch.threads,
            gpus=recipe.launch.gpus,
            address=recipe.launch.address,
            prompt_embeds=True,
        )
        return cls(engine, backbone)

    @property
    def computed(self) -> Mapping[str, int]:
        return self._computed

    async def generate(self, request: Request) -> Completion:
        """One completion of the prompt's embeddings. Raises as `VLLMEngine.generate`."""
        block_LD = self._backbone.embed(request.prompt)
        block = Embeddings(block_LD, block_LD.shape[0], block_LD.shape[1])
        completion = await self._engine.generate(replace(request, prompt=Prompt((block,))))
        self._computed[request.policy] += block.length + len(completion.ids) - 1
        return completion

    async def close(self) -> None:
        await self._engine.close()
