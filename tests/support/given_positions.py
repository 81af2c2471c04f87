"""A decode step whose positions and mask are arguments of the model, as docs/state.md shows it."""

from __future__ import annotations

import torch
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache


class GivenPositions(TorchExportableModuleWithStaticCache):
    """transformers' step with a static cache, for models that make positions of the length of what the cache holds."""

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        for layer in self.static_cache.layers:
            layer.cumulative_length.copy_(cache_position[0])
        length = self.static_cache.layers[0].max_cache_len
        logits: torch.Tensor = self.model(
            input_ids=input_ids,
            attention_mask=torch.ones(input_ids.shape[0], length, dtype=torch.int64),
            position_ids=cache_position[None],
            past_key_values=self.static_cache,
            use_cache=True,
        ).logits
        return logits
